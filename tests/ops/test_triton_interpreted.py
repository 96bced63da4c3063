"""Triton's kernels in its interpreter: races, order, memory, precision.

That results are right is what `test_operators.py` says, for the rows `triton_*`.
"""

import importlib
from dataclasses import replace

import pytest
import torch
from asserts import assert_near
from operators import (
    DAGS,
    OPERATORS,
    PATHS,
    assert_results,
    computed,
    expected_of,
    make_case,
)
from poison import poison_tensors

from pyg_chimera.ops import explain
from pyg_chimera.ops.common import cache, triton_runtime
from pyg_chimera.ops.recurrence.plan.fronts import Fronts
from pyg_chimera.ops.structure.supernodes import Merging
from pyg_chimera.ops.structure.symbolic_factor import symbolic_factor

if not triton_runtime.INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1: make test-triton", allow_module_level=True)
triton = pytest.importorskip("triton")
tl = triton.language

from triton_watch import rounded, watched  # noqa: E402

#: Constants of modules, and what they are here: several tiles in small graphs.
SMALL = {
    "recurrence.gpu.mask": {"TILE": 16},
    "recurrence.gpu.sparse_inverse": {"TILE": 16, "ROWS": 2},
    "recurrence.gpu.chunks": {"CHUNK": 16, "_STEP": 16, "_WIDTH": 16},
    "recurrence.gpu.carry": {"_SPANS": 2, "_WIDTH": 4},
    "recurrence.gpu.walk": {"_ROWS": 4, "_COLUMNS": 2},
    "recurrence.plan.fronts": {"_MERGING": Merging(8, 8, 40)},
    "recurrence.gpu.fronts": {"TILE": 16, "_LANES": 16},
    "recurrence.gpu.delta_walk": {"_NUMEL": 16},
    "recurrence.gpu.delta_chunks": {"_STEP": 16},
    "recurrence.gpu.selective_spans": {"_ROWS": 4, "_WIDTH": 4},
    "causal_conv1d.triton_taps": {"_ROWS": 4, "_WIDTH": 4},
    "recurrence.gpu.channel_spans": {"_ROWS": 4, "_WIDTH": 4},
}
SMALL = {
    importlib.import_module(f"pyg_chimera.ops.{name}"): constants
    for name, constants in SMALL.items()
}
#: Structures and sizes that are cut by them.
CUT = {
    "triton_sparse": ("several_blocks", (1, 1, 5, 4)),
    "triton_paths": ("two_chunks", (2, 1, 17, 18)),
    "triton_delta_paths": ("two_chunks", (2, 1, 17, 18)),
    "triton_paths_of_edges": ("several_blocks", (1, 1, 5, 3)),
    "triton_sequences": ("several", (5, 2)),
    "triton_filters": ("several", (5, 3)),
    "triton_channels_of_paths": ("two_chunks", (5,)),
    "triton_channels_of_nodes": ("two_chunks", (5,)),
}
CUT_GRAPHS = ("several_blocks", (1, 1, 5, 3))

KINDS = {
    f"{key}-{name}": (key, options)
    for key, operator in OPERATORS.items()
    for name, options in operator.variants.items()
    if key.startswith("triton_")
}
every_kind = pytest.mark.parametrize(("key", "options"), KINDS.values(), ids=KINDS)
PRODUCTS = {
    name: (key, options)
    for name, (key, options) in KINDS.items()
    if options.get("form") in ("mask", "chunk") or options.get("solver") == "sparse"
}
every_product = pytest.mark.parametrize(
    ("key", "options"), PRODUCTS.values(), ids=PRODUCTS
)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch):
    """Several tiles and slices in small graphs, and no tables of larger ones."""
    for module, constants in SMALL.items():
        for name, value in constants.items():
            assert getattr(module, name) >= value
            monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(cache, "_CACHE", cache._Cache(size=4))


def case_of(key):
    operator, (name, size) = OPERATORS[key], CUT.get(key, CUT_GRAPHS)
    return make_case(operator, operator.structures[name], size)


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


@every_product
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


@pytest.mark.parametrize(
    ("key", "module"),
    [
        ("triton_dags", "recurrence.gpu.walk"),
        ("triton_sparse", "recurrence.gpu.fronts"),
        ("triton_delta_dags", "recurrence.gpu.delta_walk"),
    ],
)
def test_states_in_several_rounds(key, module, monkeypatch):
    case = make_case(OPERATORS[key], OPERATORS[key].structures["unsorted_batch"])
    module = importlib.import_module(f"pyg_chimera.ops.{module}")
    monkeypatch.setattr(module, "_MAX_NUMEL", 1)
    options = {"form": "state", "backend": "triton"}
    assert_results(computed(case, options), expected_of(case))


def test_fronts_are_cut():
    """Several levels, of several tiles of columns and of rows below."""
    structure = case_of("triton_sparse").structure
    arguments = (structure.edge_index, structure.graph, None, len(structure.graph))
    fronts = Fronts.of(symbolic_factor(*arguments), torch.device("cpu"), 16)
    assert len(fronts.levels) >= 3
    pivots, size = fronts.pivots, fronts.size
    assert ((pivots > 16) & (pivots < size - 1) & (pivots % 16 > 0)).any()
    assert (fronts.task_row * 16 > pivots[fronts.task_front]).any()


@pytest.mark.parametrize("key", ["triton_paths", "triton_delta_paths"])
@pytest.mark.parametrize("weight", [0.0, -1.5, 3.0, 1e-30])
def test_weights_of_any_size_and_sign(weight, key):
    """Decays are products: nothing is divided by, and no logarithm taken of, a zero."""
    case, options = case_of(key), {"form": "chunk", "backend": "triton"}
    weights = case.floats["edge_weight"] / 2
    weights[::5] = weight
    case = case.changed(edge_weight=weights)
    assert_results(computed(case, options), expected_of(case))


def test_auto_leaves_the_interpreter_alone():
    for key in ("dag_scan", "resolvent_mix", "delta_scan"):
        found = explain(key, **make_case(OPERATORS[key], case_of(key).structure).inputs)
        others = {x.backend for x in found.alternatives}
        assert "triton" not in {found.backend, *others}
    choice = explain("dag_scan", **case_of("triton_dags").inputs, backend="triton")
    assert (choice.form, choice.backend) == ("state", "triton")


@pytest.mark.parametrize("shapes", ["value:VC edge_weight:EC", "value:VC"])
def test_channels_without_decays(shapes):
    """There numba and the reference have the same bits, so the suite leaves it out."""
    operator = replace(OPERATORS["triton_channels_of_paths"], shapes=shapes)
    case = make_case(operator, operator.structures["two_chunks"], (5,))
    with watched(1) as problems:
        assert_results(computed(case, {"backend": "triton"}), expected_of(case))
    assert problems == set()


def test_nodes_that_write_nothing_or_reflect_one_key():
    """What they would write still counts for the gradient of beta, and T is exact."""
    case = case_of("triton_delta_paths")
    options = {"form": "chunk", "backend": "triton"}
    beta = case.floats["beta"].clone()
    beta[::3] = 0
    case = case.changed(beta=beta)
    assert_results(computed(case, options), expected_of(case))
    key, weight = (case.floats[x] for x in ("key", "edge_weight"))
    case = case.changed(
        beta=torch.full_like(beta, 2), key=key[:1].expand_as(key),
        edge_weight=torch.ones_like(weight),
    )  # fmt: skip
    got = case.to(torch.float32)(**options)
    assert_near(got, expected_of(case)["output"], 1e-5)


def test_keys_that_do_not_fit_are_refused():
    """A slice of a state has all key channels, and some of the value channels."""
    operator = OPERATORS["triton_delta_dags"]
    for form, most in (("state", 128), ("chunk", 64)):
        case = make_case(operator, PATHS["two_chunks"], (1, 1, most + 1, 1))
        with pytest.raises(ValueError, match=f"at most {most} key channels, got"):
            case(backend="triton", form=form)
    case = make_case(operator, DAGS["diamonds"], (1, 1, 65, 65))
    choice = explain("delta_scan", **case.inputs, backend="triton")
    assert (choice.form, choice.backend, choice.cost) == ("state", "triton", None)
    with pytest.raises(ValueError, match="form='mask' has no triton backend; use"):
        case(backend="triton", form="mask")


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
