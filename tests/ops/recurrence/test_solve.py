"""`solve` against dense float64, and what it refuses."""

import warnings

import pytest
import torch
from asserts import assert_near
from hypothesis import given, settings
from hypothesis import strategies as st

from pyg_chimera.ops import CycleError, solve, unchecked
from pyg_chimera.ops.structure import elimination_rank, topological_rank

double = {"dtype": torch.double}


def matrix(edge_index, weight, num_nodes):
    """I - A, dense."""
    source, target = edge_index
    eye = torch.eye(num_nodes, **double)
    return eye.index_put((target, source), -weight.double(), accumulate=True)


def graph(num_nodes, num_edges, seed=0, acyclic=False):
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(num_nodes, (2, num_edges), generator=generator)
    weight = torch.randn(num_edges, generator=generator, **double)
    if acyclic:
        edges = edges.sort(0).values[:, edges[0] != edges[1]]
        mixed = torch.randperm(num_nodes, generator=generator)
        edges, weight = mixed[edges], weight[: edges.size(1)]
    return edges, weight, torch.randn(num_nodes, 3, generator=generator, **double)


def results(solver, *floats):
    leaves = [x.detach().requires_grad_() for x in floats]
    x = solver(*leaves)
    weigh = torch.linspace(-1, 2, x.numel(), **double).view(x.shape)
    return x, *torch.autograd.grad((x * weigh).sum(), leaves)


def assert_solves(edges, weight, b, tol=1e-10, **options):
    got = results(lambda w, b: solve(edges, w, b, **options), weight, b)
    want = results(
        lambda w, b: torch.linalg.solve(matrix(edges, w, len(b)), b), weight, b
    )
    for y, z in zip(got, want, strict=True):
        assert_near(y, z, tol)


def test_by_hand():
    # x_1 = 1 + 0.5 x_0 and x_0 = 2 + 0.5 x_1, as edges lead from the second index of A.
    edges = torch.tensor([[0, 1], [1, 0]])
    x = solve(edges, torch.tensor([0.5, 0.25]), torch.tensor([2.0, 1.0]))
    assert_near(x, torch.tensor([18 / 7, 16 / 7]), 1e-6)
    one_way = torch.tensor([[0], [1]])
    x = solve(one_way, torch.tensor([3.0]), torch.tensor([2.0, 1.0]), acyclic=True)
    assert x.tolist() == [2.0, 7.0]


@pytest.mark.parametrize("acyclic", [False, True])
@pytest.mark.parametrize("columns", [None, 0, 1, 3])
def test_is_the_solution(acyclic, columns):
    edges, weight, b = graph(30, 50, acyclic=acyclic)
    weight = weight * (1 if acyclic else 0.2)
    b = b[:, 0] if columns is None else b[:, :columns]
    assert_solves(edges, weight, b, acyclic=acyclic)


@pytest.mark.parametrize("acyclic", [False, True])
def test_gradcheck(acyclic):
    edges, weight, b = graph(8, 14, acyclic=acyclic)
    for right in (b, b[:, 0]):
        leaves = [x.clone().requires_grad_() for x in (0.2 * weight, right)]
        assert torch.autograd.gradcheck(
            lambda w, b: solve(edges, w, b, acyclic=acyclic), leaves
        )


@settings(max_examples=60, derandomize=True, deadline=None)
@given(seed=st.integers(0, 10**6), scale=st.sampled_from([0.1, 1.0, 100.0]))
def test_weights_of_any_size_are_solved_or_refused(seed, scale):
    """As precisely as the condition number allows, and never with fewer digits."""
    edges, weight, b = graph(12, 60, seed)
    dense = matrix(edges, scale * weight, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the dense solver is used
        try:
            x = solve(edges, scale * weight, b)
        except ValueError:
            assert torch.linalg.cond(dense) > 1e12
            return
    tol = 1e-14 * torch.linalg.cond(dense).item()
    assert_near(x, torch.linalg.solve(dense, b), max(tol, 1e-12))


def ring(num_nodes, generator):
    """Around the ring, weights multiply to one, up to rounding."""
    edges = torch.arange(num_nodes)
    weight = torch.rand(num_nodes, generator=generator, **double) + 0.5
    weight[-1] = 1 / weight[:-1].prod()
    return torch.stack([edges, (edges + 1) % num_nodes]), weight


def laplacian(num_nodes, generator):
    """Each node has the mean of its neighbours, and none is given."""
    path = torch.arange(num_nodes).unfold(0, 2, 1).t()
    conductance = torch.rand(num_nodes - 1, generator=generator, **double) + 0.1
    edges, weight = torch.cat([path, path.flip(0)], 1), conductance.repeat(2)
    total = torch.zeros(num_nodes, **double).index_add(0, edges[1], weight)
    return edges, weight / total[edges[1]]


def dependent_rows(num_nodes, generator):
    """The first row of I - A is the sum of the others; far from dominant."""
    rows = torch.randn(num_nodes, num_nodes, generator=generator, **double)
    rows[0] = rows[1:].sum(0)
    A = torch.eye(num_nodes, **double) - rows
    edges = torch.ones(num_nodes, num_nodes).nonzero().t()
    return edges, A[edges[1], edges[0]]


@pytest.mark.parametrize("make", [ring, laplacian, dependent_rows])
@pytest.mark.parametrize("num_nodes", [7, 40, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_singular_systems_are_refused(make, num_nodes, dtype):
    """Also those that rounding has made invertible, beside a larger system."""
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        edges, weight = make(num_nodes, generator)
        other, others, _ = graph(20, 20, seed)
        edges = torch.cat([edges, other + num_nodes], 1)
        weight = torch.cat([weight, 0.1 * others])
        b = torch.randn(num_nodes + 20, generator=generator, **double)
        b[num_nodes:] *= 1e20
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(ValueError, match="singular"):
                solve(edges, weight, b.to(dtype))


def test_a_long_singular_path():
    edges, weight = laplacian(20_000, torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="singular, or nearly so"):
        solve(edges, weight, torch.ones(20_000))


def test_float32_is_solved_in_float64():
    """Conditions of 1e8 leave no digit in float32."""
    n = 10_000
    edges, weight = laplacian(n, torch.Generator().manual_seed(0))
    weight[(edges[1] == 0) | (edges[1] == n - 1)] = 0  # the ends are given
    b = torch.zeros(n).index_fill(0, torch.tensor([n - 1]), 1)
    x = solve(edges, weight, b)
    assert x.dtype == torch.float32
    want = solve(edges, weight, b.double())
    resistance = 1 / (
        torch.rand(n - 1, generator=torch.Generator().manual_seed(0), **double) + 0.1
    )
    height = torch.cat([torch.zeros(1), resistance.cumsum(0)]) / resistance.sum()
    assert_near(want, height, 1e-6)
    assert_near(x, want, 1e-7)


def test_gradients_of_other_dtypes():
    edges, weight, b = graph(10, 20)
    for dtype in (torch.float16, torch.float32):
        leaves = [x.to(dtype).requires_grad_() for x in (0.1 * weight, b)]
        solve(edges, *leaves).sum().backward()
        assert all(x.grad.dtype == dtype and x.grad.isfinite().all() for x in leaves)


@pytest.mark.parametrize("acyclic", [False, True])
def test_batches_and_stored_ranks(acyclic):
    edges, weight, b = graph(12, 20, acyclic=acyclic)
    both = torch.cat([edges, edges + 12], 1)
    batch = torch.arange(2).repeat_interleave(12)
    order = topological_rank if acyclic else elimination_rank
    rank = order(edges, 12).repeat(2)
    options = {"acyclic": acyclic, "rank": rank}
    x = solve(both, 0.2 * weight.repeat(2), torch.cat([b, -b]), batch, **options)
    alone = solve(edges, 0.2 * weight, b, acyclic=acyclic)
    assert_near(x, torch.cat([alone, -alone]))


@pytest.mark.parametrize("acyclic", [False, True])
def test_empty_graphs(acyclic):
    none = torch.zeros(2, 0, dtype=torch.long)
    for n in (0, 1, 3):
        b = torch.randn(n, 2, requires_grad=True)
        weight = torch.zeros(0, requires_grad=True)
        x = solve(none, weight, b, acyclic=acyclic)
        assert torch.equal(x, b)
        x.sum().backward()
        assert torch.equal(b.grad, torch.ones(n, 2))
        assert weight.grad.shape == (0,)


def test_compiled_and_unchecked():
    edges, weight, b = graph(10, 20)
    compiled = torch.compile(solve, backend="aot_eager", fullgraph=True)
    want = solve(edges, 0.1 * weight, b)
    assert_near(compiled(edges, 0.1 * weight, b), want)
    with unchecked():
        assert_near(solve(edges, 0.1 * weight, b), want)
        assert solve(edges, 0.1 * weight, b[:, :0]).shape == (10, 0)


# ------------------------------------------------------------------------------- errors


def test_cycles_are_named():
    edges = torch.tensor([[0, 1, 2], [1, 2, 1]])
    with pytest.raises(CycleError, match="1 -> 2 -> 1"):
        solve(edges, torch.ones(3), torch.ones(3), acyclic=True)


@pytest.mark.parametrize("acyclic", [False, True])
@pytest.mark.parametrize(
    ("changes", "error", "match"),
    [
        ({"b": torch.ones(4, 1, 1)}, ValueError, r"'b' must be \[nodes\] or"),
        ({"b": torch.ones(4).long()}, TypeError, "'b' must be floating point"),
        ({"b": [1.0]}, TypeError, "'b' must be a torch.Tensor"),
        ({"edge_weight": torch.ones(2, 1)}, ValueError, r"'edge_weight' must be \[e"),
        ({"edge_weight": torch.ones(3)}, ValueError, "'edge_weight' must"),
        ({"edge_weight": torch.tensor([1, torch.nan])}, ValueError, "edge 1 has nan"),
        ({"edge_index": torch.ones(2, 2)}, TypeError, "'edge_index' must be integer"),
        ({"edge_index": torch.tensor([[0, 1], [1, 4]])}, ValueError, "got 4 in"),
        ({"edge_index": torch.ones(3, 2).long()}, ValueError, r"be \[2, edges\]"),
        ({"batch": torch.tensor([0, 0, 1, 1])}, ValueError, "different graphs"),
        ({"rank": torch.arange(3)}, ValueError, r"'rank' must be \[nodes\]"),
    ],
)  # fmt: skip
def test_what_is_refused(acyclic, changes, error, match):
    inputs = {
        "edge_index": torch.tensor([[0, 1], [1, 2]]),
        "edge_weight": torch.ones(2),
        "b": torch.ones(4),
        **changes,
    }
    with pytest.raises(error, match=match):
        solve(**inputs, acyclic=acyclic)


def test_acyclic_is_a_flag():
    inputs = torch.tensor([[0], [1]]), torch.ones(1), torch.ones(2)
    with pytest.raises(TypeError, match="'acyclic' must be True or False, got 'dag'"):
        solve(*inputs, acyclic="dag")
