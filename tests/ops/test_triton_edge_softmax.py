"""The fused transitions in Triton's interpreter: against PyTorch in float64."""

import pytest
import torch
from asserts import assert_near
from poison import poison_tensors

from pyg_chimera import ops
from pyg_chimera.ops import edge_softmax as module
from pyg_chimera.ops.common import triton_runtime, triton_trial
from pyg_chimera.ops.edge_softmax import _Options, edge_softmax

if not triton_runtime.INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1: make test-triton", allow_module_level=True)
pytest.importorskip("triton")

from triton_watch import counted, watched

from pyg_chimera.ops import triton_edge_softmax as kernels

EMPTY = torch.zeros(2, 0, dtype=torch.long)
GRAPHS = {
    "one node": (1, [[0], [0]]),
    "empty rows, parallel edges": (5, [[0, 1, 1, 3, 4, 1], [1, 0, 0, 3, 3, 0]]),
    "hubs": (70, [[*range(69), *[69] * 69], [*[69] * 69, *range(69)]]),
    "one edge in many nodes": (300, [[7], [290]]),
}


def drawn(nodes, edges, heads, on_edges, dtype):
    generator = torch.Generator().manual_seed(nodes + heads)

    def draw(*size):
        return (torch.rand(size, generator=generator).double() * 4).to(dtype)

    columns = draw(nodes, 4, heads).unbind(1)  # of a larger matrix, as in layers
    edge = draw(edges, heads) if on_edges else None
    return [*columns[:3], edge]


@pytest.fixture
def on_gpus(monkeypatch):
    """Transitions are computed as those of tensors on a GPU."""
    monkeypatch.setattr(triton_trial, "by_triton", lambda _: True)
    monkeypatch.setattr(module._TRIAL, "found", {})


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("on_edges", [False, True])
@pytest.mark.parametrize(
    ("dtype", "wide", "tolerance"),
    [
        (torch.float32, torch.float32, 5e-6),
        (torch.float32, torch.float64, 3e-7),
        (torch.float64, torch.float64, 1e-13),
    ],
)
def test_outputs_and_gradients(
    graph, heads, on_edges, dtype, wide, tolerance, monkeypatch
):
    nodes, edges = GRAPHS[graph]
    index, options = torch.tensor(edges), _Options(0.9, 1e-3, wide)
    inputs = drawn(nodes, index.size(1), heads, on_edges, dtype)
    leaves = [x if x is None else x.double().requires_grad_() for x in inputs]
    out = module._composed(index, *leaves, options._replace(wide=torch.double))
    grads = [torch.linspace(-1, len(x), x.numel()).view_as(x).cos() for x in out]
    grads = [grads[0].double(), grads[1].double() / 2]  # their sum does not cancel
    wanted = [x for x in leaves if x is not None]
    inputs = [x if x is None else x.contiguous() for x in inputs]  # for the watch
    for present in (grads, [grads[0], None], [None, grads[1]]):
        pairs = zip(out, present, strict=True)
        some, those = zip(*(x for x in pairs if x[1] is not None), strict=True)
        want = torch.autograd.grad(some, wanted, those, retain_graph=True)
        own = [
            None if x is None else x.to(t)
            for x, t in zip(present, (wide, dtype), strict=True)
        ]
        with monkeypatch.context() as patch, watched(1) as problems:
            poison_tensors(patch)
            got, saved, tables = kernels.forward((index, *inputs), options)
            found = kernels.backward((index, *inputs), saved, own, tables)
        assert problems == set()
        assert found[0] is None
        assert (found[4] is None) == (not on_edges)
        found = [x for x in found if x is not None]
        assert (got[0].dtype, {x.dtype for x in found}) == (wide, {dtype})
        for x, y in zip(got, out, strict=True):
            assert_near(x.double(), y.detach(), tolerance)
        first, second = (torch.cat([x.flatten() for x in y]) for y in (found, want))
        assert_near(first.double(), second, 3 * tolerance)


def test_few_edges_at_a_time(monkeypatch):
    """Of hubs; sums do not depend on what else is computed."""
    nodes, edges = GRAPHS["hubs"]
    index, options = torch.tensor(edges), _Options(1.0, 1e-3, torch.double)
    inputs = drawn(nodes, index.size(1), 3, False, torch.double)
    want, _, _ = kernels.forward((index, *inputs), options)
    monkeypatch.setattr(kernels, "_STEP", 16)
    got, _, _ = kernels.forward((index, *inputs), options)
    for x, y in zip(got, want, strict=True):
        assert_near(x, y, 1e-14)
    again, _, _ = kernels.forward((index, *inputs), options)
    assert all(x.equal(y) for x, y in zip(got, again, strict=True))


def test_selectivities_of_any_size():
    index = torch.tensor([[0, 1, 2, 0], [1, 0, 0, 2]])
    target, source, psi = torch.tensor([[[0.0], [2e3], [1e3]]]).expand(3, 3, 1)
    options = _Options(1.0, 1e-6, torch.float32)
    got, _, _ = kernels.forward((index, target, source, psi, None), options)
    want = module._composed(index, target, source, psi, None, options)
    for x, y in zip(got, want, strict=True):
        assert torch.isfinite(y).all()
        assert_near(x, y, 1e-6)


@pytest.mark.parametrize("which", [0, 1, 2, 3])
def test_what_is_not_a_number_stays_in_its_rows(which, on_gpus):
    index = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 1, 2, 0]])
    inputs = drawn(4, 5, 2, True, torch.float32)
    inputs[which] = inputs[which].clone()
    inputs[which][1, 0] = torch.nan
    leaves = [x.detach().requires_grad_() for x in inputs]
    options = _Options(1.0, 1e-3, torch.float64)
    want = module._composed(index, *leaves, options)
    got = module._SOFTMAX((index, *leaves), options)
    for x, y in zip(got, want, strict=True):
        assert x.isnan().equal(y.isnan())
        assert 0 < x.isnan().sum() < x.numel()
        assert_near(x.nan_to_num(0), y.nan_to_num(0), 1e-6)
    grads = [torch.ones_like(x) for x in want]
    for x, y in zip(
        torch.autograd.grad(got, leaves, grads),
        torch.autograd.grad(want, leaves, grads),
        strict=True,
    ):
        assert x.isnan().equal(y.isnan())


def test_three_launches(on_gpus):
    index = torch.tensor(GRAPHS["hubs"][1])
    inputs = drawn(70, index.size(1), 2, True, torch.float32)
    leaves = [x.detach().requires_grad_() for x in inputs]
    assert module._TRIAL.passed(torch.device("cpu"))
    with counted() as launches, ops.unchecked():
        out, _ = edge_softmax(index, *leaves, 1.0, 1e-3, torch.float64)
        out.square().sum().backward()
    assert launches == {"_forward": 1, "_backward": 1, "_sources": 1}
    options = _Options(1.0, 1e-3, torch.float64)
    assert_near(out, module._composed(index, *leaves, options)[0], 1e-12)


def _wrong(given, options):
    (weight, rest), *others = FORWARD(given, options)
    return (2 * weight, rest), *others


FORWARD = kernels.forward


@pytest.mark.parametrize(
    ("broken", "match"), [(_wrong, "something else"), (lambda *_: 1 / 0, "division")]
)
def test_kernels_that_fail_are_not_used(on_gpus, monkeypatch, broken, match):
    monkeypatch.setattr(kernels, "forward", broken)
    index = torch.tensor(GRAPHS["one node"][1])
    inputs = drawn(1, 1, 2, False, torch.float64)
    with pytest.warns(UserWarning, match=match):
        got = edge_softmax(index, *inputs, 1.0, 1e-3, torch.float64)
    want = module._composed(index, *inputs, _Options(1.0, 1e-3, torch.float64))
    assert_near(got[0], want[0], 1e-13)


@pytest.mark.parametrize("nodes", [0, 3])
def test_no_edges_are_left_to_pytorch(nodes, on_gpus):
    inputs = drawn(nodes, 0, 2, False, torch.float32)
    with counted() as launches:
        weight, rest = edge_softmax(EMPTY, *inputs, 1.0, 1e-3, torch.float64)
    assert launches == {}
    assert (weight.shape, rest.shape) == ((0, 2), (nodes, 2))


def test_edges_out_of_range(on_gpus):
    inputs = drawn(3, 1, 2, False, torch.float32)
    with pytest.raises(ValueError, match="edge_index"):
        edge_softmax(torch.tensor([[0], [3]]), *inputs, 1.0, 1e-3, torch.float64)
