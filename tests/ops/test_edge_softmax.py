"""The fused softmax over edges: against the formula in float64, dense."""

import pytest
import torch
from asserts import assert_near
from hypothesis import given, settings
from hypothesis import strategies as st
from poison import poison

from pyg_chimera.ops.edge_softmax import _composed, _Options, edge_softmax

GAMMA, MARGIN = 0.9, 1e-3


def oracle(edge_index, target, source, psi, edge):
    """Weights, and what those of a row leave of one, without the package's code."""
    share = 2 if edge is None else 3
    out = []
    for e, i in enumerate(edge_index[1].tolist()):
        rows = [k for k in range(edge_index.size(1)) if edge_index[1, k] == i]

        def a(k, i=i):
            more = 0 if edge is None else edge[k]
            return torch.exp(-(target[i] + source[edge_index[0, k]] + more) / share)

        total = sum(a(k) for k in rows)
        margin = (torch.exp(-2 * psi[i]) + (MARGIN * total) ** 2).sqrt()
        out.append(GAMMA * a(e) / (total + margin))
    weight = torch.stack(out)
    rows = torch.nn.functional.one_hot(edge_index[1], len(psi)).to(weight.dtype)
    return weight, 1 - rows.t() @ weight


def case(nodes, edges, heads, on_edges, seed=0):
    generator = torch.Generator().manual_seed(seed)
    index = torch.randint(nodes, (2, edges), generator=generator)
    delta = torch.rand(nodes, 4, heads, generator=generator, dtype=torch.double)
    edge = torch.rand(edges, heads, generator=generator, dtype=torch.double)
    target, source, psi, _ = (3 * delta).unbind(1)  # not contiguous
    return index, target, source, psi, 2 * edge if on_edges else None


def softmax(*inputs):
    return edge_softmax(*inputs, GAMMA, MARGIN, torch.double)


def results(function, index, *nodes):
    leaves = [x if x is None else x.detach().requires_grad_() for x in nodes]
    out = function(index, *leaves)
    grads = [torch.linspace(-1, 2, x.numel()).double().view_as(x).cos() for x in out]
    wanted = [x for x in leaves if x is not None]
    return [*(x.detach() for x in out), *torch.autograd.grad(out, wanted, grads)]


@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(1, 9), st.booleans())
def test_outputs_and_gradients(nodes, edges, heads, on_edges):
    inputs = case(nodes, edges, heads, on_edges, seed=edges)
    got, want = results(softmax, *inputs), results(oracle, *inputs)
    for x, y in zip(got, want, strict=True):
        assert_near(x, y, 1e-12)


@pytest.mark.parametrize("on_edges", [False, True])
def test_float32_is_computed_in_float64(on_edges):
    index, *nodes = case(5, 12, 3, on_edges)
    narrow = [x if x is None else x.float() for x in nodes]
    got = results(softmax, index, *narrow)
    want = results(oracle, index, *(x if x is None else x.double() for x in narrow))
    assert got[0].dtype == torch.double
    assert_near(got[0], want[0], 1e-13)
    assert_near(got[1].double(), want[1], 1e-6)
    for x, y in zip(got[2:], want[2:], strict=True):
        assert x.dtype == torch.float32
        assert_near(x.double(), y, 1e-6)


@pytest.mark.parametrize("on_edges", [False, True])
def test_gradcheck(on_edges):
    index, *nodes = case(4, 8, 2, on_edges)
    leaves = [x.clone().requires_grad_() for x in nodes if x is not None]

    def run(target, source, psi, edge=None):
        return softmax(index, target, source, psi, edge)

    assert torch.autograd.gradcheck(run, leaves, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(run, leaves)


@pytest.mark.parametrize("size", [1e2, 1e5])
def test_selectivities_of_any_size(size):
    """A row whose weights would underflow is normalized all the same."""
    index, target, source, psi, _ = case(5, 20, 2, on_edges=False)
    nodes = size * target, size * source, psi + 2 * size * 3
    weight, rest = softmax(index, *nodes, None)
    sums = torch.zeros(5, 2).double().index_add(0, index[1], weight)
    assert_near(rest, 1 - sums, 1e-12)
    assert_near(sums[index[1]], torch.full_like(weight, GAMMA / (1 + MARGIN)), 1e-6)


def test_nan_stays_in_the_rows_that_read_it():
    index = torch.tensor([[0, 1, 2, 3], [1, 2, 1, 0]])
    _, target, source, psi, _ = case(4, 4, 2, on_edges=False)
    source = source.clone()
    source[2, 0] = torch.nan
    weight, rest = softmax(index, target, source, psi, None)
    assert weight.isnan()[:, 0].tolist() == [True, False, True, False]
    assert rest.isnan()[:, 0].tolist() == [False, True, False, False]
    assert weight[:, 1].isfinite().all()
    assert rest[:, 1].isfinite().all()


def test_little_that_is_left_is_exact():
    """Where a difference would have rounded to nothing."""
    index = torch.tensor([[0, 1, 2], [1, 2, 1]])
    node = torch.zeros(3, 1, dtype=torch.double)
    psi = torch.tensor([[1.0], [40.0], [300.0]], dtype=torch.double)
    _, rest = edge_softmax(index, node, node, psi, None, 1.0, 0.0, torch.double)
    margin = torch.exp(-psi[:, 0])
    want = torch.stack([margin[0] / margin[0], margin[1] / 2, margin[2]])
    assert torch.allclose(rest[:, 0], want, rtol=1e-13, atol=0)


def test_no_edges_and_nothing_uninitialised(monkeypatch):
    poison(monkeypatch)
    index, *nodes = case(3, 1, 2, on_edges=True)
    empty = [*nodes[:3], nodes[3][:0]]
    weight, rest = softmax(index[:, :0], *empty)
    assert weight.shape == (0, 2)
    assert torch.equal(rest, torch.ones(3, 2, dtype=torch.double))
    got, want = results(softmax, index, *nodes), results(oracle, index, *nodes)
    for x, y in zip(got, want, strict=True):
        assert_near(x, y, 1e-12)


@pytest.mark.parametrize("on_edges", [False, True])
def test_large_graphs(on_edges):
    inputs = case(100_000, 300_000, 5, on_edges)
    options = _Options(GAMMA, MARGIN, torch.double)
    found = results(softmax, *inputs)
    want = results(lambda *x: _composed(*x, options), *inputs)
    for x, y in zip(found, want, strict=True):
        assert_near(x, y, 1e-12)


def test_compilers_see_operators_of_torch():
    inputs = case(5, 9, 3, on_edges=True)
    compiled = torch.compile(softmax, fullgraph=True, backend="aot_eager")
    for x, y in zip(results(compiled, *inputs), results(oracle, *inputs), strict=True):
        assert_near(x, y, 1e-12)
