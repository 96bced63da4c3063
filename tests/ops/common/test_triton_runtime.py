"""Which calls Triton's backends take, and why not; without Triton or a GPU."""

import importlib
import types

import pytest
import torch
from operators import OPERATORS, example, grids_of, make_case, structure

from pyg_chimera.ops import dag_scan, explain, resolvent_mix
from pyg_chimera.ops.common import operator, triton_runtime
from pyg_chimera.ops.common.coefficients import ON_GPUS
from pyg_chimera.ops.recurrence import resolvent_mix as resolvent_op

SEQUENCES = ("selective_scan", "causal_conv1d")
#: There and back, and a loop.
PATH = structure([(0, 1), (1, 0), (0, 0)], 2)
CPU, GPU = torch.device("cpu"), torch.device("cuda:3")
needs_compiler = pytest.mark.skipif(
    triton_runtime.INTERPRETED, reason="TRITON_INTERPRET=1 takes the CPU"
)


@needs_compiler
def test_it_is_refused_on_the_cpu():
    for function, key in ((dag_scan, "dag_scan"), (resolvent_mix, "resolvent_mix")):
        with pytest.raises(
            ValueError, match="backend='triton' runs on cuda, but 'valu"
        ):
            function(**example(key).inputs, backend="triton")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that can be made worse."""

    def make(version="3.9.1", capability=(9, 0), hip=None):
        triton_runtime._problem_of_gpu.cache_clear()
        fake = types.SimpleNamespace(__version__=version)
        monkeypatch.setattr(triton_runtime, "WITH_TRITON", True)
        monkeypatch.setattr(triton_runtime, "INTERPRETED", False)
        monkeypatch.setattr(triton_runtime, "import_module", lambda name: fake)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.version, "hip", hip)

    yield make
    triton_runtime._problem_of_gpu.cache_clear()


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, None),
        ({"capability": (8, 0)}, None),
        ({"version": "4.0.0+git1"}, None),
        ({"capability": (7, 5)}, "capability 8.0 or more, and cuda:3 has 7.5"),
        ({"capability": (7, 5), "hip": "6.2"}, None),
        ({"version": "3.5.1"}, "Triton 3.6 or newer, and 3.5.1 is installed"),
    ],
)
def test_what_a_gpu_must_have(facts, said, gpu):
    gpu(**facts)
    problem = triton_runtime._problem(GPU)
    assert problem is None if said is None else said in problem


def test_what_else_is_needed(gpu, monkeypatch):
    gpu()
    assert "needs a GPU" in triton_runtime.why_not(torch.zeros(1))
    monkeypatch.setattr(triton_runtime, "_problem", lambda device: None)
    assert triton_runtime.why_not(torch.zeros(1)) is None
    assert triton_runtime.why_not(torch.zeros(1).double()) is None
    monkeypatch.undo()
    monkeypatch.setattr(triton_runtime, "WITH_TRITON", False)
    problem = triton_runtime.why_not(torch.zeros(1))
    assert "needs the package 'triton', which is not installed" in problem


def test_precision(monkeypatch, allow_tf32):
    x = torch.zeros(1)
    assert triton_runtime.input_precision(x) == "tf32x3"
    assert triton_runtime.input_precision(x.double()) == "ieee"
    allow_tf32()
    assert triton_runtime.input_precision(x) == "tf32"
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert triton_runtime.input_precision(x) == "ieee"


@pytest.mark.skipif(
    not hasattr(torch.backends.cuda.matmul, "fp32_precision"),
    reason="needs PyTorch 2.9",
)
def test_precision_set_by_the_new_name():
    """After which PyTorch refuses to read the old one."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        assert triton_runtime.allows_tf32()
    finally:
        matmul.fp32_precision = before
    assert not triton_runtime.allows_tf32()


# ------------------------------------------------------------------ as if it were a GPU


@pytest.fixture
def without_numba(monkeypatch):
    """`auto` chooses as it does on a GPU, of what runs there."""
    monkeypatch.setattr(triton_runtime, "_problem", lambda device: None)
    monkeypatch.setitem(ON_GPUS, "dense: nodes", 64)
    for name in ("dag_scan", "resolvent_mix", *SEQUENCES):
        declared = operator.OPERATORS[name]
        backends = dict(declared.backends)
        del backends["numba"]
        monkeypatch.setattr(backends["triton"], "DEVICES", ("cpu",))
        monkeypatch.setattr(type(declared), "backends", backends)


def chosen(key, **options):
    case = example(key).to(torch.float32)
    return explain(key, **{**case.inputs, **options})


def test_auto_takes_it_first(without_numba):
    choice = chosen("dag_scan")
    assert (choice.form, choice.backend) == ("state", "triton")
    choice = chosen("resolvent_mix")
    assert choice[1:4] == ("dense", "mask", "triton")
    choice = chosen("resolvent_mix", solver="sparse")
    assert choice[1:4] == ("sparse", "state", "triton")
    choice = chosen("resolvent_mix", form="state", backend="triton")
    assert choice[1:4] == ("sparse", "state", "triton")
    for key in SEQUENCES:
        assert chosen(key).backend == "triton"


def test_auto_says_why_it_does_not_take_it(without_numba, monkeypatch):
    monkeypatch.setattr(triton_runtime, "_problem", lambda device: "is out of order")
    for key in ("dag_scan", "resolvent_mix", *SEQUENCES):
        choice = chosen(key)
        assert choice.backend == "torch"
        assert "backend='triton' is out of order; use" in choice.reason
        with pytest.raises(ValueError, match="'triton' is out of order; use"):
            chosen(key, backend="triton")


def test_matrices_that_do_not_fit(without_numba, monkeypatch):
    module = importlib.import_module("pyg_chimera.ops.recurrence.gpu.resolvent")
    monkeypatch.setattr(module, "_MOST_NODES", 2)
    with pytest.raises(ValueError, match="at most 2 nodes in a graph, and the largest"):
        chosen("resolvent_mix", solver="dense", backend="triton")
    choice = chosen("resolvent_mix")
    assert (choice.backend, choice.form) == ("torch", "mask")
    assert "at most 2 nodes in a graph" in choice.reason
    choice = chosen("resolvent_mix", backend="triton")
    assert choice[1:4] == ("sparse", "state", "triton")
    monkeypatch.setattr(module, "_MOST_ROWS", 2)
    with pytest.raises(ValueError, match="at most 2 rows in a front, and the largest"):
        chosen("resolvent_mix", solver="sparse", backend="triton")
    with pytest.raises(ValueError, match="at most 2 rows in a front, and the largest"):
        chosen("resolvent_mix", solver="sparse")
    choice = chosen("resolvent_mix")
    assert choice[1:4] == ("dense", "mask", "torch")


def test_sparse_graphs(without_numba):
    """States on fronts, and no matrix of a whole graph; masks are for small ones."""
    case = make_case(OPERATORS["resolvent_mix"], grids_of((10, 10)), (2, 1, 5, 3))
    inputs = case.to(torch.float32).inputs

    def choose(**options):
        return explain("resolvent_mix", **{**inputs, **options})

    for options in ({}, {"backend": "triton"}, {"form": "state"}):
        assert choose(**options)[1:4] == ("sparse", "state", "triton")
    others = {(x.solver, x.backend) for x in choose().alternatives}
    assert others == {("dense", "triton"), ("dense", "torch")}
    for options in ({}, {"backend": "triton"}):
        assert choose(form="mask", **options)[1:4] == ("dense", "mask", "triton")
    large = 1.3 * case.floats["edge_weight"].float()
    choice = choose(edge_weight=large)
    assert choice.backend == "torch"
    assert "not diagonally dominant" in choice.reason
    for backend in ("auto", "triton"):
        with pytest.raises(ValueError, match="pivoting; scale the weights"):
            choose(edge_weight=large, solver="sparse", backend=backend)


def test_long_paths_are_cut_into_chunks(without_numba):
    """No walk along them; one takes less than chunks along very short ones."""

    def choose(name, key="paths", **options):
        case = make_case(OPERATORS[key], OPERATORS[key].structures[name])
        inputs = {**case.to(torch.float32).inputs, **options}
        return explain(OPERATORS[key].name, **inputs)

    for key in ("paths", "paths_of_edges"):
        choice = choose("several_blocks", key)
        assert (choice.form, choice.backend) == ("chunk", "triton")
        assert {x.form for x in choice.alternatives} == {"state"}
    assert choose("two_chunks").form == "chunk"
    assert choose("unsorted_batch").form == "state"
    choice = choose("several_blocks", "undirected_paths")
    assert choice[1:4] == ("sparse", "chunk", "triton")
    assert choose("two_chunks", "undirected_paths").form != "chunk"
    for weight, form in ((0.3, "state"), (0.4, "chunk")):  # needs no dominance
        case = make_case(
            OPERATORS["undirected_paths"],
            OPERATORS["undirected_paths"].structures["two_chunks"],
        )
        weights = torch.full_like(case.floats["edge_weight"], weight).float()
        options = {"edge_weight": weights, "solver": "sparse", "backend": "triton"}
        assert choose("two_chunks", "undirected_paths", **options).form == form
    row = {"height": torch.tensor([1]), "width": torch.tensor([111])}
    assert choose("several_blocks", "grid_scan", **row).form == "chunk"


def test_hubs(without_numba, monkeypatch):
    """A front with very many children is left to dense matrices."""
    module = importlib.import_module("pyg_chimera.ops.recurrence.gpu.resolvent")
    monkeypatch.setattr(module, "_MOST_ADDED", 1)
    case = make_case(OPERATORS["resolvent_mix"], grids_of((10, 10)))
    inputs = {**case.to(torch.float32).inputs, "form": "state"}
    for options in ({"backend": "triton"}, {"solver": "sparse"}):
        with pytest.raises(ValueError, match="such hubs"):
            resolvent_mix(**inputs, **options)
    choice = explain("resolvent_mix", **inputs)
    assert choice[1:4] == ("dense", "mask", "triton")
    assert "such hubs" in choice.reason


def test_factors_that_fill_up(without_numba, monkeypatch):
    """No front of Triton's kernels has as many rows."""
    monkeypatch.setattr(resolvent_op, "_most_entries", lambda inputs: 2)
    choice = chosen("resolvent_mix")
    assert choice[1:4] == ("dense", "mask", "triton")
    assert "fill up" in choice.reason


def test_paths_that_need_pivots(without_numba):
    case = make_case(OPERATORS["undirected_paths"], PATH, (1, 1, 2, 2))
    weight = torch.tensor([[1.0], [1.0], [1 - 1e-4]])
    inputs = {**case.to(torch.float32).inputs, "edge_weight": weight}
    with pytest.raises(ValueError, match="too far from diagonally dominant"):
        resolvent_mix(**inputs, form="chunk", backend="triton")


def test_what_has_no_kernel(without_numba):
    for key in ("dag_scan", "resolvent_mix"):
        with pytest.raises(ValueError, match=r"form='chunk' is for .*paths"):
            chosen(key, form="chunk", backend="triton")
    for solver, form in (("sparse", "mask"), ("iterative", "state")):
        said = f"solver='{solver}', form='{form}' has no triton"
        with pytest.raises(ValueError, match=said):
            chosen("resolvent_mix", solver=solver, form=form, backend="triton")


def test_weights_that_need_pivots(without_numba):
    """Rows, or columns, of |A| must sum to less than one, of each head."""
    case = example("resolvent_mix").to(torch.float32)
    large = 3 * case.floats["edge_weight"]
    with pytest.raises(
        ValueError, match="'edge_weight' makes I - A not diagonally dom"
    ):
        chosen("resolvent_mix", edge_weight=large, backend="triton")
    choice = chosen("resolvent_mix", edge_weight=large)
    assert choice.backend == "torch"
    assert "not diagonally dominant" in choice.reason


def test_forms_of_dags(without_numba):
    """As measured: levels of shallow DAGs, chunks of paths, walks otherwise."""

    def choose(nodes, edge_index, **options):
        query, key, value = torch.randn(3, nodes, 2, 4)
        weight = torch.rand(edge_index.size(1), 2)
        found = explain("dag_scan", query, key, value, edge_index, weight, **options)
        assert ("level by level" in found.reason) == (found.backend == "torch")
        return found.form, found.backend

    node = torch.arange(5000)
    star = torch.stack([torch.zeros_like(node[1:]), node[1:]])
    assert choose(5000, star) == ("state", "torch")
    assert choose(5000, star, backend="triton") == ("state", "triton")
    paths = torch.stack([node[:-1], node[1:]])[:, (node[1:] % 100 > 0)]
    assert choose(5000, paths) == ("chunk", "triton")
    ladder = torch.cat([torch.stack([node[:98], node[k : 98 + k]]) for k in (1, 2)], 1)
    assert choose(100, ladder) == ("state", "triton")
    sizes = {"height": torch.full((64,), 12), "width": torch.full((64,), 12)}
    query, key, value = torch.randn(3, 64 * 144, 2, 4)
    source, mark = torch.rand(2, 64 * 144, 4, 2, 2)
    gates = source, torch.rand(64 * 144, 4, 2, 2, 2), mark, torch.rand(64 * 144, 2)
    found = explain("grid_scan", query, key, value, *gates, **sizes)
    assert (found.form, found.backend) == ("state", "triton")
