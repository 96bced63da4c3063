"""Triton's kernels as compiled: for GPUs that need not be there, and on one."""

import itertools

import pytest
import torch
from operations import as_on_gpus
from operators import (
    OPERATORS,
    assert_results,
    computed,
    example,
    expected,
    make_case,
)

from pyg_chimera import nn
from pyg_chimera.ops import edge_softmax, gated_norm, unchecked
from pyg_chimera.ops.common import operator, triton_runtime

if triton_runtime.INTERPRETED:
    pytest.skip("TRITON_INTERPRET=1 replaces the compiler", allow_module_level=True)
pytest.importorskip("triton", reason="needs the extra 'triton': make test-triton")

from triton_aot import SHARED, TARGETS, built, launches, specializations

from pyg_chimera.ops import triton_edge_softmax, triton_gated_norm

BACKENDS = [
    declared.backends["triton"]
    for declared in operator.OPERATORS.values()
    if "triton" in declared.backends
]
#: Heads, groups, state channels and value channels: those of models, and odd ones.
SIZES = [(2, 2, 96, 32), (4, 1, 20, 100)]
GRAPH = ("edge_index", "line_edge_index", "batch", "ptr")
CALLS = [
    ("dag_scan", {"form": "state"}),
    ("paths", {"form": "chunk"}),
    ("resolvent_mix", {}),
    ("resolvent_mix", {"solver": "dense"}),
    ("resolvent_mix", {"solver": "sparse"}),
]
#: Of sequences: channels, and states or taps.
SEQUENCES = [
    ("selective_scan", (64, 16)), ("selective_scan", (100, 5)),
    ("causal_conv1d", (96, 4)), ("causal_conv1d", (20, 3)),
    ("channels_of_paths", (64,)), ("channels_of_paths", (100,)),
]  # fmt: skip
#: Sizes of states.
DELTA = [
    ("delta_dags", (2, 2, 96, 32)), ("delta_dags", (4, 1, 20, 100)),
    ("delta_paths", (2, 2, 64, 64)), ("delta_paths", (4, 1, 20, 100)),
]  # fmt: skip


def compute(key, size, options):
    structures = OPERATORS[key].structures
    batch = structures.get("unsorted_batch", structures.get("several"))
    if options.get("solver") == "sparse":  # with several tiles in a front
        batch = structures["several_blocks"]
    case = make_case(OPERATORS[key], batch, size).to(torch.float32)
    computed(case, {**options, "backend": "triton"})


def soften(heads, most):
    """Transitions of a graph with a node of so many edges, in float32 and float64."""
    x, edges = torch.ones(most + 1, heads), torch.arange(most).expand(2, -1)
    into = torch.stack([edges[0], torch.full_like(edges[1], most)])
    for wide, edge in itertools.product((torch.float32, torch.float64), (x[:-1], None)):
        given, options = (into, x, x, x, edge), edge_softmax._Options(1.0, 1e-3, wide)
        outs, saved, tables = triton_edge_softmax.forward(given, options)
        triton_edge_softmax.backward(given, saved, outs, tables)


@pytest.fixture
def found(monkeypatch, tmp_path, allow_tf32):
    """All launches of the operators, each with its constants, on no GPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.setattr(triton_runtime, "_problem", lambda device: None)
    for backend in BACKENDS:
        monkeypatch.setattr(backend, "DEVICES", ("cuda", "cpu"))
    with launches() as found:
        for key, options in CALLS:
            for size in SIZES:
                compute(key, size, options)
        for key, size in SEQUENCES:
            compute(key, size, {})
        for key, size in DELTA:
            options = {"form": "chunk"} if key == "delta_paths" else {}
            compute(key, size, options)
        for channels in (64, 100, 2048):
            x, weight, factor, skip = map(
                torch.ones, ((9, channels), channels, 9, channels // 4)
            )
            given, options = (x, weight, x, factor, x, skip), (1e-5, 0.5, True, True)
            triton_gated_norm.forward(given, options)
            triton_gated_norm.backward(given, options, x)
            rows = x[:, : channels // 4 * 4].view(9, 2, -1), factor.view(9, 1)
            scaled = x.view(9, 1, channels), rows[1]
            parts = gated_norm._parts(rows[0], rows[0], *scaled, True)
            outs = triton_gated_norm.inputs_forward(parts)
            triton_gated_norm.inputs_backward(parts, outs)
        for heads, most in ((4, 4), (3, 600)):
            soften(heads, most)
        allow_tf32()
        compute("resolvent_mix", SIZES[0], {})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_fit(found, target):
    """No register is spilt, and shared memory is enough."""
    assert len({x.kernel for x in found.values()}) == 38
    broken = {}
    for name, launch in found.items():
        build = built(launch, target)
        if build.spills > 0 or build.shared > SHARED[target]:
            broken[name] = build
    assert broken == {}


def test_large_matrices(found):
    """Places beyond 2^31 are 64 bits wide."""
    for launch in {x.kernel: x for x in found.values()}.values():
        if "total" in launch.kernel.arg_names:
            at = launch.kernel.arg_names.index("total")
            args = (*launch.args[:at], 1 << 40, *launch.args[at + 1 :])
            assert built(launch._replace(args=args), "sm_90").spills == 0


LAYERS = {
    "ChimeraConv": lambda **x: nn.ChimeraConv(16, 16, 2, form="mask", **x),
    "fronts": lambda **x: nn.ChimeraConv(16, 16, 2, solver="sparse", form="state", **x),
    "ChimeraDAGConv": lambda **x: nn.ChimeraDAGConv(16, 16, 2, 8, form="state", **x),
    "chunks": lambda **x: nn.ChimeraDAGConv(16, 16, 2, 8, form="chunk", **x),
    "PLSTMConv": lambda **x: nn.PLSTMConv(16, 16, 2, 8, **x),
    "GatedDeltaConv": lambda **x: nn.GatedDeltaConv(16, 16, 2, 8, form="state", **x),
    "delta chunks": lambda **x: nn.GatedDeltaConv(16, 16, 2, 8, form="chunk", **x),
    "RGLRUConv": lambda **x: nn.RGLRUConv(16, 16, **x),
    "GraphMambaConv": lambda **x: nn.GraphMambaConv(16, 16, **x),
}


def paths(*sizes, both_ways):
    """Of so many nodes: the edges, and the batch vector."""
    first, edges = 0, []
    for size in sizes:
        path = torch.arange(first, first + size - 1)
        edges.append(torch.stack([path, path + 1]))
        first += size
    edge_index = torch.cat(edges, 1)
    if both_ways:
        edge_index = torch.cat([edge_index, edge_index.flip(0)], 1)
    graphs = torch.arange(len(sizes))
    return edge_index, graphs.repeat_interleave(torch.tensor(sizes))


@pytest.mark.parametrize("name", LAYERS)
def test_sizes_are_not_compiled_for(name, monkeypatch):
    """Kernels of a layer serve all batches."""
    monkeypatch.setattr(triton_runtime, "_problem", lambda device: None)
    for trial in (gated_norm._TRIAL, edge_softmax._TRIAL):
        monkeypatch.setattr(trial, "found", {torch.device("cpu"): True})
    for backend in BACKENDS:
        monkeypatch.setattr(backend, "DEVICES", ("cuda", "cpu"))
    layer, found = LAYERS[name](backend="triton"), []
    for sizes in ((80, 80), (79, 82), (81, 90, 66)):
        edges, batch = paths(*sizes, both_ways=name in ("ChimeraConv", "fronts"))
        with as_on_gpus(), specializations() as noted, unchecked():
            out = layer(torch.ones(sum(sizes), 16), edges, batch=batch)
            out.sum().backward()
        found.append(noted)
    assert len(found[0]) > 0
    for noted in found[1:]:
        assert noted == found[0]


# ----------------------------------------------------------------------------- on a GPU


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("module", [gated_norm, edge_softmax])
def test_what_surrounds_operators_is_right_on_a_gpu(module):
    """Which layers try themselves, before the first use."""
    assert module._TRIAL.tried(torch.device("cuda"))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(
    ("key", "options"),
    [
        *(
            (key, {"form": "state"})
            for key in ("dag_scan", "stm_scan", "grid_scan", "grid_dag_scan")
        ),
        ("paths", {"form": "chunk"}),
        ("paths_of_edges", {"form": "chunk"}),
        ("undirected_paths", {"form": "chunk"}),
        ("resolvent_mix", {"form": "mask"}),
        ("resolvent_mix", {"form": "mask", "solver": "dense"}),
        ("resolvent_mix", {"solver": "sparse", "form": "state"}),
        ("selective_scan", {"delta_softplus": True}),
        ("causal_conv1d", {}),
        ("channels_of_paths", {}),
        ("delta_dags", {"form": "state"}),
        ("delta_paths", {"form": "chunk"}),
    ],
)
def test_right_on_a_gpu(key, options):
    operator, options = OPERATORS[key], {**options, "backend": "triton"}
    for name, size in itertools.product(operator.structures, operator.sizes):
        case = example(key, name, size).to(torch.float32)
        integers = {x: y.cuda() for x, y in case.integers.items() if x in GRAPH}
        moved = case.changed(**{x: y.cuda() for x, y in case.floats.items()})
        for _ in range(3):  # races need not show at once
            got = computed(moved, {**options, **integers})
            cpu = {x: y.cpu() for x, y in got.items()}
            assert_results(cpu, expected(key, name, size), what=f"of {name}, {size}")
