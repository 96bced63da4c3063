import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import OPERATORS, make_case, structure
from scipy.sparse import csr_array

from pyg_chimera.ops import explain, resolvent_mix
from pyg_chimera.ops.recurrence import resolvent_mix as op
from pyg_chimera.ops.recurrence.cpu import sweep_polynomial
from pyg_chimera.ops.structure import symbolic_factor

OPERATOR = OPERATORS["resolvent_mix"]


def random_case(num_nodes, num_edges, row_sum, *, seed=0, size=(2, 1, 3, 4)):
    """Weights of both signs, whose rows sum to at most `row_sum`."""
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(num_nodes, (2, num_edges), generator=generator)
    case = make_case(OPERATOR, structure(edges, num_nodes), size)
    weight = torch.randn(num_edges, size[0], generator=generator).double()
    total = torch.zeros(num_nodes, size[0], dtype=torch.double)
    total.index_add_(0, edges[1], weight.abs())
    return case.changed(edge_weight=row_sum * weight / total[edges[1]])


def relative_error(got, want):
    return ((got - want).abs().max() / want.abs().max()).item()


@pytest.mark.parametrize("row_sum", [0.5, 0.99])
def test_directed_graphs_have_complex_roots(row_sum):
    case = random_case(200, 500, row_sum)
    call = {"solver": "iterative"}
    assert relative_error(case(**call), case(solver="dense")) < 1e-12
    steps = steps_of(case)
    assert (steps[..., 1] != 0).any()


def steps_of(case, tolerance=4e-16):
    """Of the first head, by a dense matrix."""
    x = case.inputs
    num_nodes = x["value"].size(0)
    dense = torch.zeros(num_nodes, num_nodes, dtype=torch.double)
    dense.index_put_(tuple(x["edge_index"].flip(0)), x["edge_weight"][:, 0], True)
    A, start = csr_array(dense.numpy()), np.random.default_rng(0).normal(size=num_nodes)
    H, *_ = sweep_polynomial._search(A, start, 64, tolerance)
    return sweep_polynomial._leja(sweep_polynomial._harmonic_ritz_values(H))


@settings(max_examples=30, derandomize=True)
@given(st.integers(0, 10**6), st.integers(1, 40), st.floats(0.1, 0.9))
def test_a_pass_leaves_what_the_roots_say(seed, num_nodes, row_sum):
    """On a dense matrix, whose multiple eigenvalues the random vector may blur."""
    case = random_case(num_nodes, 3 * num_nodes, row_sum, seed=seed)
    x = case.inputs
    A = np.zeros((num_nodes, num_nodes))
    np.add.at(A, tuple(x["edge_index"].flip(0).numpy()), x["edge_weight"][:, 0].numpy())
    left = M = np.eye(num_nodes)
    M = M - A
    for c, a in steps_of(case):
        left = left @ (np.eye(num_nodes) - (c * M if a == 0 else c * (a * M - M @ M)))
    assert np.abs(left).max() < 1e-6


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_or_columns_must_sum_to_less_than_one(transposed):
    edges = torch.tensor([[1, 2, 3, 0], [0, 0, 0, 1]])  # three edges into one node
    weight = torch.tensor([0.9, 0.9, 0.9, 0.1])
    if transposed:
        edges = edges.flip(0)
    one = torch.ones(4, 1, 1)
    call = {"solver": "iterative"}
    got = resolvent_mix(one, one, one, edges, weight[:, None], **call)
    want = resolvent_mix(one, one, one, edges, weight[:, None], solver="dense")
    assert relative_error(got, want) < 1e-6
    both = torch.cat([edges, edges.flip(0)], 1)
    with pytest.raises(
        ValueError, match=r"not converge for: .*into a node sum to 2\.8"
    ):
        resolvent_mix(one, one, one, both, weight.repeat(2)[:, None], **call)


@pytest.mark.parametrize("gap", [1e-3, 1e-5])
def test_slow_to_converge(gap):
    """A long ring in which hardly anything decays: GMRES' steps do not help."""
    n = 200
    node = torch.arange(n)
    one = torch.ones(n, 1, 1, dtype=torch.double)
    weight = torch.full((n, 1), 1 - gap, dtype=torch.double)
    edges = torch.stack([node, (node + 1) % n])
    out = resolvent_mix(one, one, one, edges, weight, solver="iterative")
    assert relative_error(out, torch.full_like(out, 1 / gap)) < 1e-8


def ring(num_nodes, weight):
    node = torch.arange(num_nodes)
    return torch.stack([node, (node + 1) % num_nodes]), torch.full((num_nodes,), weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_directed_ring_takes_many_passes(dtype):
    """A pass may leave more of a residual, beside a solution that shrinks."""
    edges, weight = ring(500, 0.99)
    x = torch.randn(500, 1, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    call = (x, x, x, edges, weight[:, None].to(dtype))
    got = resolvent_mix(*call, solver="iterative")
    want = resolvent_mix(*(y.double() if y.is_floating_point() else y for y in call))
    assert relative_error(got.double(), want) < 1e3 * torch.finfo(dtype).eps


@pytest.mark.parametrize("weight", [-0.99, 0.95])
@pytest.mark.parametrize("directed_path", [False, True])
def test_steps_for_a_batch_may_not_suit_one_of_its_graphs(weight, directed_path):
    random = random_case(1500, 12000, 0.9, size=(1, 1, 2, 3)).inputs
    edges, weights = ring(120, weight)
    if directed_path:
        edges, weights = edges[:, :-1], weights[:-1]
    both = torch.cat([random["edge_index"], edges + 1500], 1)
    weights = torch.cat([random["edge_weight"][:, 0], weights.double()])[:, None]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1620, 1, 2, dtype=torch.double, generator=generator)
    batch = torch.arange(1620) // 1500
    call = (x, x, x, both, weights, batch)
    got = resolvent_mix(*call, solver="iterative")
    want = resolvent_mix(*call, solver="sparse")
    for graph in (batch == 0, batch == 1):
        assert relative_error(got[graph], want[graph]) < 1e-10


def gradients(x, weight, edges, dtype, **options):
    """The output and all gradients, for inputs made of x."""
    floats = [y.to(dtype).requires_grad_() for y in (x, x.flip(0), x.cos(), weight)]
    out = resolvent_mix(*floats[:3], edges, floats[3], **options)
    return out, *torch.autograd.grad(out.square().sum(), floats)


def test_gradients_beside_hubs():
    """Rows sum to less than one: of the transposed system only the 1-norm falls."""
    generator = torch.Generator().manual_seed(0)
    source = (2000 * torch.rand(16000, generator=generator) ** 4).long()
    edges = torch.stack([source, torch.randint(2000, (16000,), generator=generator)])
    degree = torch.zeros(2000).index_add_(0, edges[1], torch.ones(16000))
    weight = (0.99 / degree)[edges[1], None]
    x = torch.randn(2000, 1, 4, generator=generator)

    want = gradients(x, weight, edges, torch.double, solver="sparse")
    got = gradients(x, weight, edges, torch.float, solver="iterative")
    for y, z in zip(got, want, strict=True):
        assert relative_error(y.double(), z) < 5e-5


@pytest.mark.parametrize("psi", [6, 9, 12, 15])
def test_rows_that_sum_to_nearly_one(psi):
    """Errors of constant states are exp(psi) times the residual."""
    generator = torch.Generator().manual_seed(0)
    edges = expander(300, 6)
    weight = 0.5 + torch.rand(edges.size(1), 1, generator=generator)
    sums = torch.zeros(300, 1).index_add_(0, edges[1], weight)
    weight = weight / sums[edges[1]] * (1 - np.exp(-psi))
    x = torch.randn(300, 1, 4, generator=generator)

    want = gradients(x, weight, edges, torch.double, solver="dense")
    got = gradients(x, weight, edges, torch.float, solver="iterative")
    for y, z in zip(got, want, strict=True):
        assert y.dtype == torch.float
        assert relative_error(y.double(), z) < 2e-6


def nearly_closed(edges, num_nodes, least=1e-6, heads=2):
    """Weights of which rows sum to 1 less between `least` and 0.01, in float64."""
    generator = torch.Generator().manual_seed(0)
    weight = 0.5 + torch.rand(edges.size(1), heads, generator=generator).double()
    sums = torch.zeros(num_nodes, heads).double().index_add_(0, edges[1], weight)
    margin = 0.01 * torch.rand(num_nodes, heads, generator=generator).double() ** 4
    return weight / sums[edges[1]] * (1 - margin.clamp(min=least))[edges[1]]


@pytest.mark.parametrize("with_path", [False, True])
def test_nearly_singular_in_one_direction_of_each_graph(with_path):
    """Two expanders, a pair, nodes without edges, and a path, which has many slow
    modes: all are exact, as are the small differences of large gradients within rows.
    """
    path = torch.arange(40 if with_path else 1)
    path = torch.stack([path[:-1], path[1:]])
    path, pair = torch.cat([path, path.flip(0)], 1), torch.tensor([[0, 1], [1, 0]])
    parts = [expander(300, 8), expander(200, 12) + 300, pair + 500, path + 504]
    edges, num_nodes = torch.cat(parts, 1), 505 + path.size(1)
    weight = nearly_closed(edges, num_nodes)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_nodes, 2, 5, generator=generator)

    want = gradients(x, weight, edges, torch.double, solver="dense")
    got = gradients(x, weight, edges, torch.double, solver="iterative")
    for y, z in zip(got, want, strict=True):
        assert relative_error(y, z) < 1e-9
    floats = x, x.flip(0), x.cos()
    floats = [y.requires_grad_() for y in (*floats, weight.clone())]
    y = resolvent_mix(*floats[:3], edges, floats[3], solver="iterative")
    grads = torch.autograd.grad(y.square().sum(), floats)
    for y, z in zip(grads, want[1:], strict=True):
        assert relative_error(y.double(), z) < 2e-5
    if not with_path:
        assert relative_error(
            differences(weight, grads[3], edges), differences(weight, want[4], edges)
        ) < 2e-5  # fmt: skip


def differences(weight, grad, edges):
    """What is left of the weights' gradient if their rows are divided by their sums."""
    num_nodes = int(edges.max()) + 1
    rows = torch.zeros(num_nodes, weight.size(1)).double()
    mean = rows.index_add(0, edges[1], weight * grad)
    mean = mean / rows.index_add(0, edges[1], weight)
    return weight.detach() * (grad - mean[edges[1]])


def test_graphs_of_one_node():
    node = torch.arange(30)
    weight = torch.linspace(0.1, 0.999, 30)[:, None].double()
    one = torch.ones(30, 1, 1).double()
    edges = torch.stack([node, node])
    out = resolvent_mix(one, one, one, edges, weight, solver="iterative")
    assert relative_error(out[..., 0], 1 / (1 - weight)) < 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slow_modes_halve_the_steps_and_need_no_float64(dtype):
    edges = expander(1000, 10)
    weight = nearly_closed(edges, 1000).numpy()
    A = csr_array((weight[:, 0], edges.flip(0).numpy()), (1000, 1000))
    ptr, margins = np.array([0, 1000]), 1 - A.sum(1).max(keepdims=True)
    _, modes, sweeps, gap = sweep_polynomial._steps(A, ptr, margins, dtype)
    assert gap > 0.2 > 1e3 * margins[0]
    assert sweep_polynomial.precision_of(dtype, gap)[0] == dtype
    start = np.random.default_rng(0).standard_normal(1000)
    _, tolerance = sweep_polynomial.precision_of(dtype, margins[0])
    _, without, _ = sweep_polynomial._search(A, start, 64, tolerance)
    assert sweeps < 0.8 * without
    right, right_image, left, left_image = modes
    np.testing.assert_allclose(right_image, right - A @ right, atol=1e-12)
    np.testing.assert_allclose(left_image, left - A.T @ left, rtol=1e-9, atol=1e-9)
    assert left @ right_image == pytest.approx(1)
    rate = (right @ right_image) / (right @ right)
    assert np.abs(right_image - rate * right).max() < 1e-7


@pytest.mark.parametrize("seed", range(0, 20, 2))
def test_no_slow_mode_is_missed(seed):
    """Whatever the weights are: random vectors around zero have little of some."""
    random, (num_nodes, degree) = np.random.default_rng(seed), (400, 8)
    row = np.repeat(np.arange(num_nodes), degree)
    col = random.integers(0, num_nodes, num_nodes * degree)
    weight = np.exp(random.standard_normal(len(row)))
    margin = np.maximum(1e-6, 1e-4 * np.exp(1.5 * random.standard_normal(num_nodes)))
    weight *= (1 - margin)[row] / np.bincount(row, weight)[row]
    A = csr_array((weight, (row, col)), (num_nodes, num_nodes))
    given = A, np.array([0, num_nodes]), np.array([margin.min()]), torch.float32
    _, modes, sweeps, gap = sweep_polynomial._steps(*given)
    assert modes.any()
    assert sweeps < 30
    assert gap > 0.1


def test_what_an_iteration_cannot_find_is_refused():
    sweep_polynomial.check_residual(1e-6, tolerance=5e-7)
    with pytest.raises(ValueError, match="standstill at a relative residual of"):
        sweep_polynomial.check_residual(0.1, tolerance=5e-7)


# ------------------------------------------------------------------------- long passes


def hanging(kind):
    """A random graph of 500 nodes, and something that takes long to cross."""
    generator = torch.Generator().manual_seed(0)
    core = torch.randint(500, (2, 2500), generator=generator)
    step = torch.arange(100)
    path = torch.stack([step + 499, step + 500])
    path[0, 0] = 0
    parts = {
        "path": [path],
        "ring": [path, torch.tensor([[599], [1]])],
        "caterpillar": [path, torch.stack([step + 500, step + 600])],
        "barbell": [path, torch.tensor([[599], [600]]), core + 600],
    }
    edges = torch.cat([core, *parts[kind]], 1)
    return torch.cat([edges, edges.flip(0)], 1)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", ["path", "ring", "caterpillar", "barbell"])
def test_what_hangs_on_a_graph_takes_no_worst_case(kind, symmetric):
    """Of margins of 1e-4, a plain iteration takes some 300,000 sweeps."""
    edges = hanging(kind)
    num_nodes = int(edges.max()) + 1
    generator = torch.Generator().manual_seed(2)
    weight = torch.ones(edges.size(1), 1, dtype=torch.double)
    if not symmetric:
        weight = weight + torch.rand(weight.shape, generator=generator)
    total = torch.zeros(num_nodes, 1).double().index_add_(0, edges[1], weight)
    weight = (1 - 1e-4) * weight / total[edges[1]]
    x = torch.randn(num_nodes, 1, 2, generator=generator).double()
    floats = [x, x.flip(0), x.roll(1, 0), weight]
    choice = explain("resolvent_mix", *floats[:3], edges, weight, solver="iterative")
    sweeps = int(choice.reason.split("about ")[1].split()[0])
    # Chebyshev's bound is 2,500 for real eigenvalues.
    assert sweeps < (3000 if symmetric else 15_000)
    results = []
    for solver in ("iterative", "sparse"):
        given = [y.clone().requires_grad_() for y in floats]
        out = resolvent_mix(*given[:3], edges, given[3], solver=solver)
        results.append([out, *torch.autograd.grad((out * x.flip(2)).sum(), given)])
    for got, want in zip(*results, strict=True):
        assert relative_error(got, want) < 1e-8


def test_a_long_pass_leaves_what_it_says():
    """Of any component with a real eigenvalue between the bounds."""
    A = csr_array(np.diag(np.linspace(-0.999, 0.999, 400)))
    H, *_ = sweep_polynomial._search(A, np.ones(400), 16, 1e-12)
    steps, count = sweep_polynomial._long_pass(A, H, 0.999, 1e-12)
    assert len(steps) + 1 <= count < 700  # Chebyshev's bound is 634
    left = np.prod(1 - steps[:, :1] * (1 - A.diagonal()), axis=0)
    assert np.abs(left).max() < 2 * 1e-12 ** (len(steps) / count)
    assert 0.999 - 1e-12 < sweep_polynomial._radius(A) < 0.9991


# ---------------------------------------------------------------------------- choices


def expander(num_nodes, degree):
    generator = torch.Generator().manual_seed(1)
    edges = torch.randint(num_nodes, (2, num_nodes * degree // 2), generator=generator)
    return torch.cat([edges, edges.flip(0)], 1)


def layer_case(edges, num_nodes, row_sum=0.9):
    degree = torch.zeros(num_nodes).index_add_(0, edges[1], torch.ones(edges.size(1)))
    weight = (row_sum / degree)[edges[1], None].expand(-1, 2)
    x = torch.randn(num_nodes, 2, 16)
    return {"query": x, "key": x, "value": x, "edge_index": edges,
            "edge_weight": weight}  # fmt: skip


def test_auto_iterates_where_factors_fill_up_and_it_converges_fast():
    call = layer_case(expander(2000, 10), 2000)
    choice = explain("resolvent_mix", **call)
    assert choice[1:4] == ("iterative", "state", "numba")
    assert "sweeps are enough" in choice.reason
    by_solver = {x.solver: x.cost for x in choice.alternatives}
    assert choice.cost.seconds < min(x.seconds for x in by_solver.values())
    assert choice.cost.memory < by_solver["sparse"].memory
    assert relative_error(
        resolvent_mix(**call), resolvent_mix(**call, solver="sparse")
    ) < 2e-6  # fmt: skip
    # Nearly singular, or with rows that sum to more: exactly, then.
    for row_sum in (1 - 1e-7, 1.2):
        hard = layer_case(torch.arange(2000).repeat(2, 1).roll(1, 1), 2000, row_sum)
        hard["edge_index"][0] = torch.arange(2000)
        assert explain("resolvent_mix", **hard).solver != "iterative"


def test_auto_gives_up_factors_that_do_not_fit(monkeypatch):
    call = layer_case(expander(1500, 10), 1500)
    want = resolvent_mix(**call, solver="sparse")
    monkeypatch.setattr(op, "_MAX_SMALL", 0)
    monkeypatch.setattr(symbolic_factor, "_MANY", 100)
    monkeypatch.setattr(symbolic_factor, "_MANY_AN_EDGE", 0)
    call["edge_index"] = call["edge_index"].flip(1)  # of which nothing is remembered
    call["edge_weight"] = call["edge_weight"].flip(0)
    choice = explain("resolvent_mix", **call)
    assert choice[1:4] == ("iterative", "state", "numba")
    assert "fill up" in choice.reason
    assert relative_error(resolvent_mix(**call), want) < 2e-6
    assert "sweeps are enough" in choice.reason
    assert explain("resolvent_mix", **call, form="mask").solver == "dense"
    # Where an iteration need not converge, factors are made, however full.
    call["edge_weight"] = 3 * call["edge_weight"]
    with pytest.warns(UserWarning, match="eliminated without pivoting"):
        choice = explain("resolvent_mix", **call)
    assert choice.solver == "dense"
    assert "fill up" not in choice.reason
