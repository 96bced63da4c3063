"""Triton's kernels in its interpreter: races, order, memory, precision.

That results are right is what `test_operators.py` says, for the rows `triton_*`.
"""

import importlib

import pytest
import torch
from asserts import assert_near
from operators import OPERATORS, assert_results, computed, expected_of, make_case
from poison import poison_tensors

from pyg_chimera.ops import explain
from pyg_chimera.ops.common import triton_runtime
from pyg_chimera.ops.structure import cache

if not triton_runtime.INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1: make test-triton", allow_module_level=True)
triton = pytest.importorskip("triton")
tl = triton.language

from triton_watch import rounded, watched  # noqa: E402

mask_form, state_form = (
    importlib.import_module(f"pyg_chimera.ops.{x}")
    for x in ("common.triton_mask_form", "dag_scan.triton_state_form")
)

KINDS = {
    f"{key}-{name}": (key, options)
    for key, operator in OPERATORS.items()
    for name, options in operator.variants.items()
    if key.startswith("triton_")
}
every_kind = pytest.mark.parametrize(("key", "options"), KINDS.values(), ids=KINDS)
every_mask = pytest.mark.parametrize(
    ("key", "options"),
    [x for x in KINDS.values() if x[1]["form"] == "mask"],
    ids=[name for name in KINDS if "state" not in name],
)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Several tiles and slices in small graphs, and no tables of larger ones."""
    monkeypatch.setattr(mask_form, "TILE", 16)
    monkeypatch.setattr(state_form, "_ROWS", 4)
    monkeypatch.setattr(state_form, "_COLUMNS", 2)
    monkeypatch.setattr(cache, "_CACHE", cache._Cache(size=4))


def case_of(key):
    operator = OPERATORS[key]
    return make_case(operator, operator.structures["several_blocks"], (1, 1, 5, 3))


@every_kind
def test_no_races_and_nothing_read_that_nobody_wrote(key, options, monkeypatch):
    """In whatever order programs run: the same bits."""
    poison_tensors(monkeypatch)
    case, want = case_of(key).to(torch.float32), None
    for seed in (1, 2):
        with watched(seed) as problems:
            got = computed(case, options)
        assert problems == set()
        assert_results(got, want or expected_of(case), 0.0 if want else 1e-5)
        want = got


@every_mask
def test_as_exact_as_float32_unless_pytorch_is_told_not_to_be(key, options, allow_tf32):
    case = case_of(key).to(torch.float32)
    want = expected_of(case)
    with rounded():
        assert_results(computed(case, options), want, 1e-5)
        allow_tf32()
        coarse = computed(case, options)
    assert_results(coarse, want, 1e-2)
    with pytest.raises(AssertionError, match="off by"):
        assert_results(coarse, want, 1e-5)


def test_states_in_several_rounds(monkeypatch):
    case, options = case_of("triton_dags"), {"form": "state", "backend": "triton"}
    monkeypatch.setattr(state_form, "_MAX_NUMEL", 1)
    assert_results(computed(case, options), expected_of(case))


def test_auto_leaves_the_interpreter_alone():
    for key in ("dag_scan", "resolvent_mix"):
        found = explain(key, **make_case(OPERATORS[key], case_of(key).structure).inputs)
        others = {x.backend for x in found.alternatives}
        assert "triton" not in {found.backend, *others}
    choice = explain("dag_scan", **case_of("triton_dags").inputs, backend="triton")
    assert (choice.form, choice.backend) == ("mask", "triton")


# ------------------------------------------------------------ whether `watched` watches


@triton.jit
def _adds(X, Y):
    tl.store(Y, tl.load(Y) + tl.load(X + tl.program_id(0)))


@triton.jit
def _rotates(X, BARRIER: tl.constexpr):
    o = tl.arange(0, 8)
    x = tl.load(X + (o + 1) % 8)
    if BARRIER:
        tl.debug_barrier()
    tl.store(X + o, x)


def test_mistakes_are_found():
    x, total = torch.ones(8), torch.zeros(1)
    with watched(0) as problems:
        _adds[8,](x, total)
    assert_near(total, torch.full((1,), 8.0))  # and yet it is wrong
    assert {"_adds reads another's Y", "_adds writes another's Y"} <= problems
    for barrier, found in ((True, set()), (False, {"_rotates writes too soon X"})):
        with watched(0) as problems:
            _rotates[1,](x, barrier)
        assert problems == found
    with pytest.raises(Exception, match="1 addresses beyond"), watched(0):
        _adds[9,](x, total)
