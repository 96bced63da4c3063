"""Triton's kernels compiled for GPUs that need not be there: all of them fit."""

import importlib

import pytest
import torch
from operators import OPERATORS, computed, make_case

from pyg_chimera.ops.common import triton_runtime

if triton_runtime.INTERPRETED:
    pytest.skip("TRITON_INTERPRET=1 replaces the compiler", allow_module_level=True)
pytest.importorskip("triton", reason="needs the extra 'triton': make test-triton")

from triton_aot import SHARED, TARGETS, built, launches

BACKENDS = [
    importlib.import_module(f"pyg_chimera.ops.{x}.triton_backend")
    for x in ("dag_scan", "resolvent")
]
#: Heads, groups, state channels and value channels: those of models, and odd ones.
SIZES = [(2, 2, 96, 32), (4, 1, 20, 100), (1, 1, 1, 1)]
CALLS = [
    ("dag_scan", {"form": "mask"}),
    ("dag_scan", {"form": "state"}),
    ("resolvent_mix", {}),
]


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
            batch = OPERATORS[key].structures["unsorted_batch"]
            for size in SIZES:
                case = make_case(OPERATORS[key], batch, size).to(torch.float32)
                computed(case, {**options, "backend": "triton"})
        allow_tf32()
        case = make_case(OPERATORS["dag_scan"], batch, SIZES[0]).to(torch.float32)
        computed(case, {"form": "mask", "backend": "triton"})
    return found


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_fit(found, target):
    """No register is spilt, and shared memory is enough."""
    assert len({x.kernel for x in found.values()}) == 8
    broken = {}
    for name, launch in found.items():
        build = built(launch, target)
        if build.spills > 0 or build.shared > SHARED[target]:
            broken[name] = build
    assert broken == {}


def test_large_matrices(found):
    """Places beyond 2^31 are 64 bits wide."""
    for launch in found.values():
        if "total" in launch.kernel.arg_names:
            at = launch.kernel.arg_names.index("total")
            args = (*launch.args[:at], 1 << 40, *launch.args[at + 1 :])
            assert built(launch._replace(args=args), "sm_90").spills == 0
