"""That operators leave a GPU alone in `unchecked`, on graphs that they have seen."""

import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from asserts import assert_near
from host_waits import host_waits
from operators import OPERATORS, assert_results, computed, example, results
from torch_geometric import EdgeIndex

from pyg_chimera import nn, ops
from pyg_chimera.ops.common import cache
from pyg_chimera.ops.recurrence import resolvent_mix as resolvent_op
from pyg_chimera.ops.structure.symbolic_factor import symbolic_factor as factor

EDGES = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])

#: What may wait all the same, as docs/gpu.md says: bounds of sequences are looked at,
#: and so are sizes of grids, if they are tensors.
WAITS = {
    "selective_scan": {"cpu", "item"},
    "causal_conv1d": {"cpu", "item"},
    "grid_dag_scan": {"tolist"},
    "grid_scan": {"tolist"},
    "grid_conv": {"tolist", "tensor"},
}


def variants():
    for key, operator in OPERATORS.items():
        for name, options in operator.variants.items():
            if options.get("backend") in ("torch", "triton"):
                yield pytest.param(key, options, id=f"{key}-{name}")


@pytest.mark.parametrize(("key", "options"), list(variants()))
def test_nothing_waits_for_a_graph_that_is_known(key, options):
    case = example(key)
    inputs = case.inputs

    def run():
        function = case.operator.function
        return results(lambda **x: function(**inputs | x | options), case.floats)

    want = computed(case, options)
    with ops.unchecked():
        run()  # which reads the tensors of indices, once
        with host_waits() as waits:
            got = run()
    assert waits <= WAITS.get(case.operator.function.__name__, set())
    assert_results(got, want, 1e-9)


NODES = torch.randn(3, 4, 2, 3, generator=torch.Generator().manual_seed(0))


def resolvent(edge_index=EDGES, scale=0.4, **options):
    query, key, value = NODES
    weight = torch.full((edge_index.size(1), 2), scale)
    return ops.resolvent_mix(query, key, value, edge_index, weight, **options)


def test_without_it_the_host_waits():
    options = {"backend": "torch", "solver": "dense"}
    resolvent(**options)
    with host_waits() as waits:
        resolvent(**options)
    assert waits == {"item", "cpu", "linalg_inv_ex"}


@pytest.mark.parametrize("name", ["ChimeraConv", "ChimeraDAGConv", "PLSTMConv"])
def test_layers(name):
    conv = getattr(nn, name)(8, 8, heads=2, state_channels=3, backend="torch")
    edge_index = EDGES if name == "ChimeraConv" else EDGES[:, ::2].contiguous()
    x, options = torch.randn(4, 8), {"batch": torch.zeros(4, dtype=torch.long)}
    if name == "PLSTMConv":
        options["line_edge_index"] = ops.line_graph(edge_index, 4).edge_index
    with host_waits():  # as layers fuse nothing that is watched
        want = conv(x, edge_index, **options)
    with ops.unchecked():
        conv(x, edge_index, **options)
        with host_waits() as waits:
            out = conv(x, edge_index, **options)
            out.sum().backward()
    assert waits == set()
    assert out.equal(want)


# -------------------------------------------------------------- graphs are recognised


def test_a_changed_graph_is_another_one(monkeypatch):
    edges = EDGES.clone()
    with ops.unchecked():
        first = resolvent(edges)
        assert resolvent(edges).equal(first)
        edges[:, 0] = torch.tensor([0, 3])
        second = resolvent(edges)
        edges.detach()[:, 0] = torch.tensor([0, 1])  # another view: the same version
        assert resolvent(edges).equal(first)
    assert second.equal(
        resolvent(torch.tensor([[0, *EDGES[0, 1:]], [3, *EDGES[1, 1:]]]))
    )
    assert not second.equal(first)


def test_other_memory_is_another_graph():
    edges = EDGES.clone()
    with ops.unchecked():
        first = resolvent(edges)
        edges.data = torch.tensor([[0], [1]])
        got = resolvent(edges)
    assert got.equal(resolvent(torch.tensor([[0], [1]])))
    assert not got.equal(first)


def test_an_edge_index_is_read_again():
    conv = nn.ChimeraDAGConv(8, 8, state_channels=3)
    x, edges = torch.randn(5, 8), EdgeIndex([[0, 1], [1, 2]], sparse_size=(5, 5))
    with ops.unchecked():
        conv(x, edges)
        edges.add_(2)
        got = conv(x, edges)
    assert got.equal(conv(x, torch.tensor([[2, 3], [3, 4]])))


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("c++") is None and shutil.which("g++") is None,
    reason="there is no C++ compiler",
)
def test_compiled_code_writes_without_telling():
    """Inductor makes one graph in the memory, and the object, of another one."""

    def scans(query, key, value, edges, weight):
        first = ops.dag_scan(query, key, value, (edges * 1).clamp(max=5) + 0, weight)
        return first, ops.dag_scan(query, key, value, 5 - edges.flip(0), weight)

    edges = torch.tensor([[0, 0, 1, 2, 3, 1, 0], [1, 2, 3, 4, 5, 5, 5]])
    inputs = (*torch.randn(3, 6, 1, 4), edges, torch.rand(7, 1))
    compiled, want = torch.compile(scans, fullgraph=True), scans(*inputs)
    with ops.unchecked(), torch.no_grad():
        for got, expected in zip(compiled(*inputs), want, strict=True):
            assert_near(got, expected, 1e-5)


@pytest.mark.parametrize("trusted", [True, False])
def test_a_structure_that_was_forgotten(monkeypatch, trusted):
    """In compiled code, it is found backward as forward, with a look at weights or
    without.
    """
    contexts, seen = [nullcontext, ops.unchecked], []
    monkeypatch.setattr(resolvent_op, "_MAX_SMALL", 2)
    monkeypatch.setattr(
        resolvent_op, "symbolic_factor", lambda *x: seen.append(x[-1]) or factor(*x)
    )
    weight = torch.full((6, 2), 0.6, requires_grad=True)
    mix = torch.compile(ops.resolvent_mix, backend="aot_eager")
    with contexts[trusted]():
        out = mix(*NODES, EDGES, weight)
    cache._CACHE.values.clear()
    with contexts[not trusted]():
        out.sum().backward()
    may_iterate = [most < sys.maxsize for most in seen]
    assert may_iterate == [trusted, trusted]


def test_outside_contents_count_as_ever():
    edges = EDGES.clone()
    with ops.unchecked():
        first = resolvent(edges)
    edges.numpy()[1, 0] = 3  # which PyTorch is not told
    with ops.unchecked():
        assert resolvent(edges).equal(first)
    assert not resolvent(edges).equal(first)


def test_tensors_without_versions_are_read():
    with torch.inference_mode():
        edges = EDGES.clone()
        with ops.unchecked():
            first = resolvent(edges)
            edges[:, 0] = torch.tensor([0, 3])
            assert not resolvent(edges).equal(first)


def test_digests_do_not_keep_tensors():
    digests = cache._Digests()
    edges = EDGES.clone()
    with ops.unchecked(), cache.called_eagerly():
        digests.of(edges)
    assert len(digests.found) == 1
    del edges
    assert len(digests.found) == 0


# ---------------------------------------------------------- what becomes of bad input


def test_new_graphs_are_checked():
    with ops.unchecked(), pytest.raises(ValueError, match="must hold node indices"):
        resolvent(torch.tensor([[0], [9]]))
    with ops.unchecked(), pytest.raises(ValueError, match="must be one of"):
        resolvent(solver="best")
    with ops.unchecked(), pytest.raises(ops.CycleError):
        ops.dag_scan(*torch.randn(3, 4, 1, 2), EDGES, torch.randn(6, 1))
    with ops.unchecked(), pytest.raises(ValueError, match="must be \\[2, edges\\]"):
        nn.ChimeraConv(8, 8)(torch.randn(4, 8), EDGES[0])


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_weights_that_are_not_finite(backend):
    """Only the graph that they belong to is lost."""
    edges, batch = torch.tensor([[0, 2], [1, 3]]), torch.tensor([0, 0, 1, 1])
    query, key, value = torch.randn(3, 4, 1, 2)
    weight = torch.tensor([[float("nan")], [0.5]])
    args = (query, key, value, edges, weight, batch)
    for function in (ops.resolvent_mix, ops.dag_scan):
        with pytest.raises(ValueError, match="'edge_weight' must be finite"):
            function(*args, backend=backend)
        with ops.unchecked():
            out = function(*args, backend=backend)
        assert out[1].isnan().all()
        fine = function(query, key, value, edges, weight.nan_to_num(), batch)
        assert_near(out[2:], fine[2:], 1e-5)


def test_a_singular_matrix():
    options = {"solver": "dense", "backend": "torch"}
    edges = torch.tensor([[0, 1], [1, 0]])
    with pytest.raises(ValueError, match="I - A"):
        resolvent(edges, 1.0, **options)
    with ops.unchecked():
        assert not resolvent(edges, 1.0, **options)[:2].isfinite().any()


# ----------------------------------------------------------------------- where it holds


def test_it_ends_and_is_of_its_thread():
    bad = (EDGES, float("inf"))
    with ThreadPoolExecutor(1) as pool, ops.unchecked():
        with ops.unchecked():
            resolvent(*bad)
        resolvent(*bad)
        with pytest.raises(ValueError, match="finite"):
            pool.submit(resolvent, *bad).result()
    with pytest.raises(ValueError, match="finite"):
        resolvent(*bad)
    with pytest.raises(RuntimeError, match="boom"), ops.unchecked():
        raise RuntimeError("boom")
    with pytest.raises(ValueError, match="finite"):
        resolvent(*bad)


def test_compiled():
    """A compiled model asks at each call, and not when it is compiled."""
    compiled = torch.compile(resolvent, backend="eager", fullgraph=True)
    with ops.unchecked():
        lost = compiled(EDGES, float("inf"), backend="torch")
    assert not lost.isfinite().any()
    with pytest.raises(ValueError, match="finite"):
        compiled(EDGES, float("inf"), backend="torch")
