"""What is special to `channel_scan`: weights of nodes or edges, and what it keeps."""

from importlib import import_module

import pytest
import torch
from asserts import assert_near
from operators import PATHS, example, make_case

from pyg_chimera.ops import CycleError, channel_scan, dag_scan, explain
from pyg_chimera.ops.common import sequences
from pyg_chimera.ops.common.triton_runtime import INTERPRETED, WITH_TRITON
from pyg_chimera.ops.recurrence.cpu import channels as numba_backend
from pyg_chimera.ops.recurrence.gpu import channels as triton_backend

BACKENDS = ("numba", "torch", "reference")
interpreted = pytest.mark.skipif(
    not (INTERPRETED and WITH_TRITON), reason="needs TRITON_INTERPRET=1"
)
TRITON = pytest.param("triton", marks=interpreted)  # on paths
#: Node 2 has both others as parents, one of them twice.
EDGES = torch.tensor([[0, 0, 1, 1], [1, 2, 2, 2]])
VALUE = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


def path(length):
    node = torch.arange(length)
    return torch.stack([node[:-1], node[1:]])


def results(function, tensors):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]


# --------------------------------------------------------------------------- the rule


@pytest.mark.parametrize("backend", BACKENDS)
def test_by_hand(backend):
    """h = 1, 3 + 10 * 1 and 5 + 100 * (2 * 1 + (3 + 4) * 13) in the first channel."""
    weight = torch.tensor([[1.0, 0.5], [2.0, 0.0], [3.0, -1.0], [4.0, 1.0]])
    decay = torch.tensor([[7.0, 7.0], [10.0, 2.0], [100.0, -1.0]])
    out = channel_scan(VALUE, EDGES, weight, decay=decay, backend=backend)
    assert out.tolist() == [[1, 2], [13, 6], [9305, 6]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_without_weights_walks_are_counted(backend):
    out = channel_scan(torch.ones(3, 1), EDGES, backend=backend)
    assert out.tolist() == [[1], [2], [6]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_decays_are_weights_of_all_edges_into_a_node(backend):
    x, _, decay = example("channel_scan", "several_blocks").floats.values()
    index = example("channel_scan", "several_blocks").structure.edge_index

    def by_edge(x, decay):
        return channel_scan(x, index, decay[index[1]], backend=backend)

    def by_node(x, decay):
        return channel_scan(x, index, decay=decay, backend=backend)

    for a, b in zip(
        results(by_node, (x, decay)), results(by_edge, (x, decay)), strict=True
    ):
        assert_near(a, b)


@pytest.mark.parametrize("backend", [*BACKENDS, TRITON])
def test_long_paths_that_hardly_decay(backend):
    """In float32: sums of 3,000 terms, as exact as they come."""
    x, decay = torch.randn(3000, 2), torch.full((3000, 2), 0.999)
    exact = channel_scan(x.double(), path(3000), decay=decay.double())
    out = channel_scan(x, path(3000), decay=decay, backend=backend)
    assert_near(out, exact, 1e-5)


@pytest.mark.parametrize("backend", [*BACKENDS, TRITON])
def test_weights_of_any_size(backend):
    """Zeros cut a path, and large ones grow: nothing is divided by them."""
    decay = torch.tensor([3.0, -2.0, 0.0, 1e8, 1.0]).view(5, 1)
    out = channel_scan(torch.ones(5, 1), path(5), decay=decay, backend=backend)
    assert out.view(-1).tolist() == [1, -1, 1, 1e8, 1e8]


# --------------------------------------------------------------- structures and memory


def test_ranks_that_are_given():
    case = example("channel_scan", "diamonds")
    rank = torch.tensor([3, 2, 0, 1, 0, 0, 4])
    assert_near(case(rank=rank), case())
    for backend in BACKENDS:
        with pytest.raises(ValueError, match=r"'rank' must grow along every edge"):
            case(rank=-rank, backend=backend)


def test_dag_scan_has_the_same_structure(monkeypatch):
    """Made once for both."""
    case = make_case(
        example("channel_scan").operator, example("channel_scan").structure
    )
    _, case = case.shuffled()
    case()
    module = import_module("pyg_chimera.ops.recurrence.plan.states")
    monkeypatch.setattr(module, "_state_graph", None)  # nothing is made any more
    s, one = case.structure, torch.ones(7, 1, 1).double()
    dag_scan(one, one, one, s.edge_index, torch.ones(7, 1).double(), s.graph)


@pytest.mark.parametrize("backend", ["numba", "torch", TRITON])
def test_the_output_is_all_that_is_kept(backend):
    x = torch.randn(5, 3, requires_grad=True)
    out = channel_scan(x, path(5), backend=backend)
    kept = [y for y in out.grad_fn.saved_tensors if y is not None]
    kept = {y.data_ptr() for y in kept if y.is_floating_point()}
    assert kept == {x.data_ptr(), out.data_ptr()}


def test_changed_outputs_are_noticed():
    """Gradients would be wrong."""
    x = torch.randn(5, 3, requires_grad=True)
    out = channel_scan(x, path(5), decay=torch.rand(5, 3))
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_paths_on_any_device_take_few_passes(monkeypatch):
    """As many as their length has binary digits, and no step for each level."""
    case = make_case(example("channels_of_paths").operator, PATHS["several_blocks"])
    module = import_module("pyg_chimera.ops.recurrence.plain.channels")
    monkeypatch.setattr(module, "levels_of", None)
    assert_near(case(backend="torch"), case())
    passes = []
    addcmul = torch.addcmul
    monkeypatch.setattr(
        sequences.torch, "addcmul", lambda *x: passes.append(x) or addcmul(*x)
    )
    case(backend="torch")
    assert len(passes) == 8  # paths of up to 130 nodes


# ------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("backend", BACKENDS)
def test_cycles_are_named(backend):
    index = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 1]])
    with pytest.raises(CycleError, match=r"has the cycle 1 -> 2 -> 3 -> 1") as info:
        channel_scan(torch.randn(4, 2), index, backend=backend)
    assert info.value.cycle == [1, 2, 3]
    with pytest.raises(CycleError, match="has a self-loop at node 2"):
        channel_scan(torch.randn(4, 2), torch.tensor([[2], [2]]), backend=backend)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_must_be_finite(backend, bad):
    weight, decay = torch.rand(4, 2), torch.rand(3, 2)
    weight[3, 1] = bad
    with pytest.raises(ValueError, match=r"'edge_weight' .* edge 3 .* in channel 1"):
        channel_scan(VALUE, EDGES, weight, backend=backend)
    decay[2, 0] = bad
    with pytest.raises(ValueError, match=r"'decay' .* node 2 .* in channel 0"):
        channel_scan(VALUE, EDGES, decay=decay, backend=backend)


def test_sums_of_weights_may_overflow():
    decay = torch.full((3, 2), 3e38)
    assert channel_scan(VALUE * 0, EDGES, decay=decay).tolist() == [[0, 0]] * 3


@pytest.mark.parametrize(
    ("name", "shape"),
    [("edge_weight", (4, 1)), ("edge_weight", (3, 2)), ("decay", (4, 2))],
)
def test_shapes_that_do_not_fit(name, shape):
    wanted = {"edge_weight": r"\[edges, channels\] = \[4, 2\]",
              "decay": r"\[nodes, channels\] = \[3, 2\]"}[name]  # fmt: skip
    with pytest.raises(ValueError, match=f"'{name}' must be {wanted}, got"):
        channel_scan(VALUE, EDGES, **{name: torch.rand(shape)})


def test_explain():
    choice = explain("channel_scan", VALUE, EDGES)
    assert choice[1:4] == ("scan", "state", "numba")
    assert choice.reason == "tensors on cpu"
    assert explain("channel_scan", VALUE, EDGES, backend="torch").reason == "asked for"


@interpreted
def test_explain_triton(monkeypatch):
    """Directed paths only, and `auto` knows."""
    monkeypatch.setattr(numba_backend, "DEVICES", ("cuda",))
    monkeypatch.setattr(triton_backend, "DEVICES", ("cpu",))
    reason = "is for directed paths, where each node has at most one edge in"
    with pytest.raises(ValueError, match=reason):
        channel_scan(VALUE, EDGES, backend="triton")
    choice = explain("channel_scan", VALUE, EDGES)
    assert choice.backend == "torch"
    assert reason in choice.reason
    choice = explain("channel_scan", VALUE, path(3))
    assert (choice.backend, choice.reason) == ("triton", "tensors on cpu")
