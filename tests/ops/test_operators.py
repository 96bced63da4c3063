"""What holds for all operators, whatever computes them."""

import functools
import importlib
import inspect
import multiprocessing
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache
from itertools import cycle, product

import pytest
import torch
from asserts import assert_near
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import (
    OPERATORS,
    assert_results,
    computed,
    example,
    expected,
    expected_of,
    make_case,
    results,
)
from poison import poison
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad as forward_ad_api
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric import EdgeIndex

from pyg_chimera import ops
from pyg_chimera.ops import dag_scan, explain
from pyg_chimera.ops.recurrence.cpu import chunks as chunk_form

VARIANTS = {
    f"{key}-{name}": (key, options)
    for key, operator in OPERATORS.items()
    for name, options in operator.variants.items()
    if name != "auto"  # which takes one of the others, as `explain` says
}
NUMBA = {x: y for x, y in VARIANTS.items() if x.endswith("numba")}
#: Those of a registered operator; references are plain PyTorch.
REGISTERED = {x: y for x, y in VARIANTS.items() if not x.endswith("reference")}


def parametrized(variants):
    return pytest.mark.parametrize(("key", "options"), variants.values(), ids=variants)


every_operator = pytest.mark.parametrize("key", OPERATORS)
every_variant = parametrized(VARIANTS)


@pytest.fixture
def case(key):
    """Inputs of the operator: a small batch of several graphs."""
    return example(key)


def large(key):
    return example(key, "several_blocks")


# ------------------------------------------------------------------------ right results


@every_variant
def test_outputs_and_gradients(key, options):
    operator = OPERATORS[key]
    for name, size in product(operator.structures, operator.sizes):
        if (name == "several_blocks" and size != operator.sizes[0]) or (
            0 in size and name not in ("several", "unsorted_batch")
        ):
            continue
        case, want = example(key, name, size), expected(key, name, size)
        for dtype in (torch.float64, torch.float32):
            got = computed(case.to(dtype), options)
            assert got["output"].dtype == dtype
            assert_results(got, want, what=f"of {name}, {size}, {dtype}")


TILED = {name: x for name, x in REGISTERED.items() if name.endswith("state-numba")}


def shrink_tiles(monkeypatch, size: int) -> None:
    """To a few states, and key channels, at a time."""
    for name in ("sweep", "supernodal", "iterate"):
        module = importlib.import_module(f"pyg_chimera.ops.recurrence.cpu.{name}")
        assert module._TILE_BYTES >= 2**19
        monkeypatch.setattr(module, "_TILE_BYTES", size)
        monkeypatch.setattr(module, "_ALL_BYTES", size, raising=False)


@parametrized(TILED)
@pytest.mark.parametrize("size", [2**9, 2**13])
def test_small_tiles(key, options, size, monkeypatch):
    """States that do not fit are cut; those of a scan are computed by segments."""
    operator, large = OPERATORS[key], {"H": 2, "G": 1, "N": 21, "P": 18}
    shape = tuple(large.get(x, 2) for x in operator.letters)
    shrink_tiles(monkeypatch, size)
    for name in operator.structures:
        if name != "several_blocks" or size == 2**13:
            case, want = example(key, name, shape), expected(key, name, shape)
            for dtype in (torch.float64, torch.float32):
                assert_results(computed(case.to(dtype), options), want, what=name)


@every_operator
@settings(max_examples=20, derandomize=True)
@given(data=st.data())
def test_outputs_and_gradients_on_random_batches(key, data):
    operator = OPERATORS[key]
    case = make_case(operator, data.draw(operator.any_structure))
    want = expected_of(case)
    for name, options in operator.variants.items():
        assert_results(computed(case, options), want, what=f"of {name}")
        if "batch" in case.integers:
            options = {**options, "batch": None}
            assert_results(computed(case, options), want, what=f"of {name}, no batch")


@every_variant
def test_each_graph_is_alone(case, options):
    """It gives what it gives without the others, and they have no gradient of it."""
    out = case(**options)
    for nodes, graph in case.graphs():
        assert_near(graph(**options), out[nodes])
    inside = case.structure.graph == case.structure.graph.mode().values

    def output_inside(**floats):
        return case(**floats, **options)[inside]

    for name, grad in list(results(output_inside, case.floats).items())[1:]:
        axis = case.operator.axes[name]
        if axis != "shared":
            own = case.structure.graph_of(axis) == case.structure.graph.mode().values
            assert (grad[own] != 0).any(), name
            assert (grad[~own] == 0).all(), name


@every_variant
def test_numbers_of_nodes_and_edges_do_not_matter(case, options):
    out = case(**options)
    for _ in range(3):
        nodes, renumbered = case.shuffled()
        assert_near(renumbered(**options), out[nodes], 1e-12)


@every_variant
def test_gradients_of_some_inputs(case, options):
    want = computed(case, options)
    assert not case(**options).requires_grad
    for name, x in case.floats.items():
        got = results(lambda **y: case(**y, **options), {name: x})
        assert_near(got[name], want[name], 1e-12, name)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", [{}, {"backend": "torch"}], ids=["auto", "torch"])
@every_operator
def test_cuda(key, options):
    operator = OPERATORS[key]
    common = next(iter(operator.variants.values()))
    options = {**common, "form": "auto", "backend": "auto", **options}
    options = {x: y for x, y in options.items() if x in common}
    for name in operator.structures:
        case = example(key, name)
        moved = {
            x: y.cuda()
            for x, y in case.integers.items()
            if x not in ("height", "width")
        }
        floats = {x: y.cuda() for x, y in case.floats.items()}
        got = computed(case.changed(**floats), {**options, **moved})
        assert_results({x: y.cpu() for x, y in got.items()}, expected(key, name))


# ---------------------------------------------------------------------- kinds of inputs


def every_second(x):
    return x.repeat_interleave(2, -1)[..., ::2]


LAYOUTS = {
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "expanded": lambda x: x[:1].expand(x.shape),
    "strided": every_second,
}


def laid_out(floats, layouts):
    """Edges that are all alike must not let states grow around a cycle."""
    small = {"edge_weight": 0.3, "transition": 0.3}
    return {x: next(layouts)(small.get(x, 1) * y) for x, y in floats.items()}


@every_variant
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_in_memory(case, options, layout):
    """Of inputs, structures and the gradient of the output."""
    floats = laid_out(case.floats, cycle([LAYOUTS[layout]]))
    if layout == "expanded" and "edge_bias" in floats:
        # Where all that is attended to is alike, most gradients are zero.
        floats.update({x: case.floats[x] for x in ("key", "value")})
    integers = {name: every_second(x) for name, x in case.integers.items()}

    def turned(**x):
        return case(**x, **integers, **options).transpose(0, -1)

    def oracle(**x):
        return case.operator.oracle(x, case.structure).transpose(0, -1)

    assert_results(results(turned, floats), results(oracle, floats))


@every_variant
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_integer_dtypes(case, options, dtype):
    narrow = {name: x.to(dtype) for name, x in case.integers.items()}
    assert torch.equal(case(**options, **narrow), case(**options))


@every_variant
def test_batches_and_edges_as_pyg_has_them(case, options):
    """Numbers of graphs may be any, and edges an `EdgeIndex`."""
    if "batch" not in case.integers:
        pytest.skip("takes no batch vector")
    named = torch.tensor([10**12, 5, 7, 77])[case.structure.graph]
    edges = EdgeIndex(case.structure.edge_index, sparse_size=(7, 7))
    out = case(**options, batch=named, edge_index=edges)
    assert_near(out, case(**options), 1e-12)


@every_variant
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(key, options, dtype):
    half = example(key).to(dtype)
    got = computed(half, options)
    want = computed(half.to(torch.float32), options)
    assert {x.dtype for x in got.values()} == {dtype}
    assert torch.equal(got["output"], want["output"].to(dtype))
    assert_results(got, want, 2 * torch.finfo(dtype).eps)


@every_variant
def test_mixed_dtypes_are_computed_in_the_widest(case, options):
    dtypes = (torch.float32, torch.float64, torch.bfloat16)
    floats = {name: x.to(dtypes[i % 3])
              for i, (name, x) in enumerate(case.floats.items())}  # fmt: skip
    case = case.changed(**floats)
    got, want = computed(case, options), computed(case.to(torch.float64), options)
    assert got["output"].dtype == floats[case.operator.like].dtype
    for name, x in got.items():
        assert_near(x, want[name], torch.finfo(x.dtype).eps, name)


@every_variant
def test_autocast_does_not_reach_inside(key, options):
    case = example(key).to(torch.float32)
    want = computed(case, options)

    def autocast(**floats):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return case(**floats, **options)

    for name, x in results(autocast, case.floats).items():
        assert torch.equal(x, want[name]), name


# ------------------------------------------------------------------ what is remembered


@every_variant
def test_inference_mode_then_training(key, options):
    _, case = example(key).shuffled()  # a structure that has not been seen
    with torch.inference_mode():
        want = case(**options)
    got = computed(case, options)
    assert torch.equal(got["output"], want)
    with torch.inference_mode():
        assert torch.equal(case(**options), want)


@every_variant
def test_structures_changed_in_place(case, options):
    """They are remembered by contents, and not in the caller's memory."""
    _, case = case.shuffled()
    if "edge_weight" in case.floats:  # or an iteration may not converge, turned round
        case = case.changed(edge_weight=case.floats["edge_weight"] / 4)
    mine = {name: x.clone() for name, x in case.integers.items()}
    want = case(**options, **mine)
    for x in mine.values():
        x.fill_(10**9)
    assert torch.equal(case(**options), want)
    for name, x in case.integers.items():
        mine[name].copy_(x)
        if name == "ptr":
            mine[name].copy_((x[-1] - x).flip(0))
        elif name == "edge_index" and "edge" not in case.operator.axes.values():
            mine[name].copy_(x.flip(0))  # edges that are alike may be in any order
        elif name != "batch" and not (name == "edge_index" and len(mine) == 3):
            mine[name].copy_(x.flip(-1))  # line edges have to fit the edges
    out = case(**options, **mine)
    assert not torch.allclose(out, want)
    assert torch.equal(case(**options, **{x: y.clone() for x, y in mine.items()}), out)


@every_variant
def test_inputs_are_left_alone(case, options):
    before = {name: x.clone() for name, x in case.inputs.items()}
    computed(case, options)
    for name, x in case.inputs.items():
        assert torch.equal(x, before[name]), name


# -------------------------------------------------------------------- threads and forks

#: Enough work for several threads, and for several slices of channels in a cache.
BUSY = {
    "selective_scan": (71, 4),
    "causal_conv1d": (300, 4),
    "channel_scan": (300,),
    "delta_scan": (2, 1, 16, 48),  # the oracle takes cubes of the number of keys
    "grid_scan": (2, 1, 48, 48, 2),
    "grid_dag_scan": (2, 1, 48, 48, 4),
}


def busy(key):
    operator = OPERATORS[key]
    batch = operator.structures["several_blocks"]
    return make_case(operator, batch, BUSY.get(operator.name, (2, 1, 48, 48)))


@parametrized(NUMBA)
def test_any_number_of_threads(key, options):
    case = busy(key)
    want = expected_of(case)
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        assert_results(computed(case, options), want)


def test_two_callers_at_once():
    torch.set_num_threads(2)
    calls = [(busy(key).shuffled()[1], options) for key, options in NUMBA.values()]
    with ThreadPoolExecutor(2) as pool:
        got = list(pool.map(lambda call: computed(*call), calls * 3))
    want = [computed(*call) for call in calls]
    for x, y in zip(got, want * 3, strict=True):
        assert_results(x, y, 1e-12)


class Calls(torch.utils.data.Dataset):
    """Results of all variants, computed where they are asked for."""

    def __len__(self):
        return len(VARIANTS)

    def __getitem__(self, i):
        key, options = list(VARIANTS.values())[i]
        return computed(example(key), options)


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="needs fork"
)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_workers_forked_after_a_training_step():
    torch.set_num_threads(2)
    for key, options in NUMBA.values():
        computed(busy(key), options)
    loader = torch.utils.data.DataLoader(
        Calls(), None, num_workers=2, timeout=120, multiprocessing_context="fork"
    )
    for got, want in zip(loader, Calls(), strict=True):
        assert_results(got, want, 1e-12)


#: Calls without end, in the midst of kernels when they are interrupted.
INTERRUPTED = """
import torch
from pyg_chimera import ops

def call(operator, num_nodes, degree, channels):
    torch.manual_seed(0)
    target = torch.arange(1, num_nodes).repeat_interleave(degree)
    source = (torch.rand(len(target)) * target).long()
    edges = torch.stack([source, target])
    if operator is ops.resolvent_mix:
        edges = torch.cat([edges, edges.flip(0)], dim=1)
    x = torch.randn(num_nodes, 2, channels)
    weight = torch.full((edges.size(1), 2), 0.1 / degree)
    return operator(x, x, x, edges, weight, backend="numba")

for operator, threads, *size in (
    (ops.resolvent_mix, 2, 3000, 10, 8), (ops.dag_scan, 1, 20000, 5, 256)
):
    torch.set_num_threads(threads)
    before = call(operator, 20, 2, 8)
    print("begins", flush=True)
    try:
        while True:  # a fast machine ends one of them before it is interrupted
            call(operator, *size)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    assert torch.equal(call(operator, 20, 2, 8), before)
"""


@pytest.mark.slow
def test_interrupts_are_obeyed_at_once():
    command = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for _ in range(2):
            assert child.stdout.readline() == "begins\n"
            time.sleep(1.5)
            child.send_signal(signal.SIGINT)
            sent = time.monotonic()
            deadline = threading.Timer(3.0, child.kill)
            deadline.start()
            assert child.stdout.readline() == "interrupted\n"
            assert time.monotonic() - sent < 2.0
            deadline.cancel()
    assert child.returncode == 0


# --------------------------------------------------- memory, registration, compilation


@parametrized(REGISTERED)
def test_nothing_uninitialised_is_read(key, options, monkeypatch):
    operator, small = OPERATORS[key], {"H": 2, "G": 1, "N": 3, "P": 18}
    size = tuple(small.get(x, 2) for x in operator.letters)
    cases = [
        make_case(operator, batch, size)
        for name, batch in operator.structures.items()
        if name not in ("spans", "several_blocks")
    ]
    poison(monkeypatch)
    assert torch.empty(1).isnan().all()
    monkeypatch.setattr(chunk_form, "CHUNK", 16)
    for case in cases:
        assert_results(computed(case, options), expected_of(case))
    shrink_tiles(monkeypatch, 2**9)
    for case in cases:
        assert_results(computed(case, options), expected_of(case))


@parametrized(REGISTERED)
def test_no_batched_lapack_on_the_cpu(key, options, monkeypatch):
    """Batched LU is wrong there with more than one thread (pytorch#142815)."""

    def guard(owner, name):
        function = getattr(owner, name)

        def wrapper(A, *args, **kwargs):
            assert A.dim() == 2, f"{name} of {list(A.shape)}"
            return function(A, *args, **kwargs)

        monkeypatch.setattr(owner, name, wrapper)

    for name in (
        "inv", "inv_ex", "solve", "solve_ex", "lu", "lu_factor", "lu_factor_ex",
        "lu_solve", "ldl_factor", "det", "slogdet",
    ):  # fmt: skip
        guard(torch.linalg, name)
    for name in ("inverse", "lu", "lu_solve", "det", "slogdet"):
        guard(torch, name)
    guard(torch.Tensor, "inverse")
    computed(large(key), options)


class Recorder(TorchDispatchMode):
    """Notes the calls of registered operators."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "pyg_chimera":
            args = [x.detach() if isinstance(x, torch.Tensor) else x for x in args]
            self.calls.append((op, args))
        return op(*args, **(kwargs or {}))


def registered_calls(case, options):
    """Those of the forward pass, and those of the backward pass."""
    leaves = {name: x.detach().requires_grad_() for name, x in case.floats.items()}
    with Recorder() as forward:
        out = case(**leaves, **options)
    with Recorder() as backward:
        out.sum().backward()
    assert forward.calls
    assert backward.calls
    return forward.calls, backward.calls


@parametrized(REGISTERED)
def test_registered_operators_pass_opcheck(case, options):
    forward, backward = registered_calls(case, options)
    checks = ("test_schema", "test_faketensor")
    for op, args in backward:
        torch.library.opcheck(op, args, test_utils=checks)
    checks += ("test_autograd_registration",)
    for op, args in forward:
        for x in args:
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                x.requires_grad_()
        torch.library.opcheck(op, args, test_utils=checks)


@parametrized(REGISTERED)
def test_compilers_are_told_the_right_strides(case, options):
    floats = laid_out(case.floats, cycle(LAYOUTS.values()))
    fake = torch._subclasses.FakeTensorMode(shape_env=ShapeEnv())
    forward, backward = registered_calls(case.changed(**floats), options)
    for op, args in forward + backward:
        outs = pytree.tree_leaves(op(*args))
        args = pytree.tree_map_only(torch.Tensor, fake.from_tensor, args)
        with fake:
            fakes = pytree.tree_leaves(op(*args))
        for x, y in zip(outs, fakes, strict=True):
            if any(isinstance(size, torch.SymInt) for size in y.shape):  # not known
                y = y.new_empty(x.shape)
            assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype)


COMPILED = [
    *product([x for x, y in OPERATORS.items() if x == y.name], ["aot_eager"], [True]),
    *product(["stm_scan", "selective_scan"], ["aot_eager"], [False]),
    *(pytest.param(x, "inductor", True, marks=pytest.mark.slow)
      for x in ("stm_scan", "selective_scan")),
]  # fmt: skip
#: Two structures to compile for, without two counts that happen to be the same.
SHAPES = {
    "resolvent_mix": ("unsorted_batch", "several_blocks"),
    "dag_scan": ("diamonds", "several_blocks"),
    "delta_scan": ("unsorted_batch", "several_blocks"),
    "channel_scan": ("diamonds", "several_blocks"),
    "neighborhood_attention": ("unsorted_batch", "several_blocks"),
    "stm_scan": ("diamonds", "several_blocks"),
    "grid_scan": ("alike", "one_node"),
    "grid_dag_scan": ("alike", "one_node"),
    "grid_conv": ("alike", "one_node"),
    "selective_scan": ("spans", "several_blocks"),
    "causal_conv1d": ("spans", "several_blocks"),
}


@pytest.mark.parametrize(("key", "backend", "dynamic"), COMPILED)
def test_compile(key, backend, dynamic):
    """In one graph, on batches of several sizes that have not been seen before."""
    operator = OPERATORS[key]
    counter = CompileCounterWithBackend(backend)
    options = next(iter(operator.variants.values()))

    @torch.compile(fullgraph=True, dynamic=dynamic, backend=counter)
    def compiled(inputs):
        return layer(inputs)

    def layer(inputs):
        first, *_ = operator.axes
        return operator.function(**{**inputs, first: 2 * inputs[first]}, **options)

    for name in SHAPES[key]:
        _, case = example(key, name).shuffled()
        integers = case.integers
        if "height" in integers:  # alike, so their numbers need not be tensors
            integers = {x: int(y[0]) for x, y in integers.items()}
        got = results(lambda i=integers, **x: compiled({**x, **i}), case.floats)
        want = results(lambda i=integers, **x: layer({**x, **i}), case.floats)
        assert_results(got, want, 1e-12)
    if dynamic and "height" not in case.integers:
        assert counter.frame_count == 1


def test_compiled_errors_are_the_same():
    case = example("dag_scan", "diamonds")
    compiled = torch.compile(dag_scan, fullgraph=True, backend="aot_eager")
    edges = case.structure.edge_index.clone()
    edges[:, 0] = torch.tensor([3, 5])
    with pytest.raises(ValueError, match=r"cycle 5 -> 3 -> 5|cycle 3 -> 5 -> 3"):
        compiled(**{**case.inputs, "edge_index": edges})


# --------------------------------------------------------------------------- explain


def all_options(operator):
    """What may be asked for, legal or not."""
    first = next(iter(operator.variants.values()))
    known = inspect.signature(operator.function).parameters
    asked = {
        "solver": ["neumann"]
        if "num_terms" in first
        else ["auto", "sparse", "dense", "iterative"],
        "form": ["auto", "state", "mask", "chunk"],
        "backend": ["auto", "numba", "torch", "reference"],
    }
    asked["backend"] += ["triton"] * (first.get("backend") == "triton")
    asked = {x: y for x, y in asked.items() if x in known}
    for values in product(*asked.values()):
        yield {**first, **dict(zip(asked, values, strict=True))}


def spied(ran, name, forward, call):
    ran.append(name)
    return forward(call)


@every_operator
@pytest.mark.parametrize("size", ["small", "large"])
def test_explain_says_what_runs(key, size, monkeypatch):
    """That backend runs, and to ask for what it says gives the same bits."""
    case = (example(key) if size == "small" else large(key)).to(torch.float64)
    module, ran = sys.modules[case.operator.function.__module__], []
    backends = getattr(module, f"_{case.operator.name}").backends
    for name, backend in backends.items():
        forward = functools.partial(spied, ran, name, backend.forward)
        monkeypatch.setattr(backend, "forward", forward)
    bits = {}
    for options in all_options(case.operator):
        try:
            choice = explain(case.operator.name, **{**case.inputs, **options})
        except ValueError as refusal:
            with pytest.raises(ValueError, match=re.escape(str(refusal))):
                case(**options)
            continue
        assert choice.operator == case.operator.name
        assert choice.reason
        said = {x: getattr(choice, x) for x in ("solver", "form", "backend")}
        said = {x: y for x, y in said.items() if x in options}
        if choice.backend == "reference":  # has neither solvers nor forms
            said = {"backend": "reference"}
        assert all(options[x] in (y, "auto") for x, y in said.items())
        if choice[1:4] not in bits:
            bits[choice[1:4]] = case(**{**options, **said})
        ran.clear()
        assert torch.equal(case(**options), bits[choice[1:4]])
        assert ran == [choice.backend]
    assert len({backend for *_, backend in bits}) >= min(3, len(backends))


# -------------------------------------------------------- what must not leave its graph

#: Weights that can't be eliminated or let states grow; what has to be of a length.
REFUSED = (
    "'edge_weight' (makes I - A|must, on cycles)|'beta' must be in|'key' must hold"
)
#: What must be finite.
WEIGHTS = {"edge_weight", "transition", "decay"}
BAD_VALUES = {"nan": [torch.nan], "infinity": [torch.inf], "overflow": [1e30, 1e-30]}


def spoilt(x, rows, values):
    """A copy of which some rows hold values that alternate."""
    x = x.clone()
    bad = torch.tensor(values).repeat(x[rows].numel() // len(values) + 1)
    x[rows] = bad[: x[rows].numel()].view_as(x[rows])
    return x


@every_variant
@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("bad", BAD_VALUES)
def test_bad_values_stay_in_their_graph(key, options, size, bad):
    """Other graphs have the outputs and gradients that they have beside good ones."""
    case = (example(key) if size == "small" else large(key)).to(torch.float32)
    s, axes = case.structure, case.operator.axes
    inside = {axis: s.graph_of(axis) == s.graph.mode().values for axis in s.axes}
    want = computed(case, options)
    spoiled = {
        name: spoilt(x, inside[axes[name]], BAD_VALUES[bad])
        for name, x in case.floats.items()
        if axes[name] != "shared" and name not in WEIGHTS
    }
    changes = [spoiled]
    hints = [options]
    if size == "small":
        changes += [{name: x} for name, x in spoiled.items()]
        hints += [{**options, "batch": None}] * ("batch" in case.integers)
    if bad == "overflow":  # weights must be finite
        for name in WEIGHTS & set(axes):
            x = spoilt(case.floats[name], inside[axes[name]], BAD_VALUES[bad])
            changes.append({name: x})
    scale = spoilt(torch.ones(len(s.graph)), inside["node"], BAD_VALUES[bad])

    def scaled(**x):  # so that gradients of the output are bad
        out = case(**x)
        return out * scale.view(-1, *[1] * (out.dim() - 1))

    for hint in hints:
        outcomes = [results(lambda o=hint, **x: scaled(**x, **o), case.floats)]
        for change in changes:
            try:
                outcomes.append(computed(case.changed(**change), hint))
            except ValueError as refusal:
                if not re.search(REFUSED, str(refusal)):
                    raise
        for got in outcomes:
            for name, x in got.items():
                if axes.get(name) != "shared":
                    rows = ~inside[axes.get(name, "node")]
                    assert_near(x[rows], want[name][rows], 1e-5, name)


def spots(x, rows):
    """One number of some rows, and all of them."""
    every = torch.zeros_like(x, dtype=torch.bool)
    every[rows] = True
    found = every.view(-1).nonzero().view(-1)
    one = torch.zeros_like(every)
    one.view(-1)[found[len(found) // 2 : len(found) // 2 + 1]] = True
    return {"one": one, "all": every}


def results_where(function, case, name, where, change):
    """With some numbers of an input, or of the gradient of the output, changed."""
    if name != "gradient":
        x = case.floats[name].clone()
        x[where] = change(x[where])
        return results(function, {**case.floats, name: x})

    def scaled(**floats):
        out = function(**floats)
        factor = torch.ones_like(out)
        factor[where] = change(factor[where])
        return out * factor

    return results(scaled, case.floats)


@cache
def dependents(key):
    """What changes with an input: by its name and the numbers that are changed."""
    case, want, found = example(key), expected(key), []
    s, axes = case.structure, case.operator.axes

    def oracle(**floats):
        return case.operator.oracle(floats, s)

    for name, x in {**case.floats, "gradient": want["output"]}.items():
        axis = axes.get(name, "node")
        rows = slice(None)
        if axis != "shared":
            rows = s.graph_of(axis) == s.graph.mode().values
        for kind, where in spots(x, rows).items():
            other = results_where(oracle, case, name, where, lambda x: 1.3 * x + 0.1)
            moved = {
                y: (other[y] - z).abs() > 1e-7 * (z.abs() + 0.01)
                for y, z in want.items()
            }
            assert kind == "one" or any(y.any() for y in moved.values()), name
            found.append((name, kind, where, moved))
    return found


@every_variant
@pytest.mark.parametrize("trusted", [False, True], ids=["checked", "unchecked"])
def test_nan_reaches_all_that_depends_on_it(key, case, options, trusted):
    """Outputs and gradients, those of weights included where nothing checks them."""
    case = case.to(torch.float32)

    def function(**floats):
        return case(**floats, **options)

    for name, kind, where, moved in dependents(key):
        with ops.unchecked() if trusted else nullcontext():
            try:
                got = results_where(
                    function, case, name, where, lambda x: x * torch.nan
                )
            except ValueError as refusal:
                refused = f"must be finite|{REFUSED}"
                assert re.search(refused, str(refusal))  # noqa: PT017
                assert name in ("edge_weight", "transition", "decay", "beta", "key")
                continue
        for result, x in got.items():
            assert x[moved[result]].isnan().all(), f"{result}, NaN in {kind} of {name}"


# --------------------------------------------------------- derivatives beyond the first


def forward_ad(function, x):
    with forward_ad_api.dual_level():
        out = function(forward_ad_api.make_dual(x, x.cos()))
        tangent = forward_ad_api.unpack_dual(out).tangent
        return torch.zeros_like(out) if tangent is None else tangent


def second(function, x):
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(function(x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(grad.square().sum(), x)[0]


def per_sample(function, x):
    grad = torch.func.grad(lambda y: function(y).square().sum())
    return torch.func.vmap(grad)(torch.stack([x, x.roll(1, -1)]))


def batched_gradients(function, x):
    x = x.clone().requires_grad_()
    out = function(x).flatten()[::17]
    rows = torch.eye(out.numel(), dtype=out.dtype)
    return torch.autograd.grad(out, x, rows, is_grads_batched=True)[0]


DERIVATIVES = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "forward_ad": forward_ad,
    "second": second,
    "jacrev": lambda f, x: torch.func.jacrev(lambda y: f(y).flatten()[::17])(x),
    "batched": batched_gradients,
    "jacobian": lambda f, x: torch.autograd.functional.jacobian(
        lambda y: f(y).flatten()[::17], x, vectorize=True
    ),
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack([x, x.roll(1, -1)])),
    "per_sample": per_sample,
}


@cache
def expected_derivative(key, derivative, name):
    case = example(key)

    def oracle(x):
        return case.operator.oracle({**case.floats, name: x}, case.structure)

    return DERIVATIVES[derivative](oracle, case.floats[name])


@every_variant
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_other_derivatives_are_right_or_refused(key, case, options, derivative):
    """Those of the oracle, or an error that names the operator and says what to do."""
    for name, x in case.floats.items():
        try:
            got = DERIVATIVES[derivative](
                lambda y, name=name: case(**{name: y}, **options), x
            )
        except (RuntimeError, NotImplementedError) as refusal:
            if not re.search(rf"(?s){case.operator.name}.*\buse\b", str(refusal)):
                raise
            assert options.get("backend") != "reference"  # what such errors recommend
        else:
            assert_near(got, expected_derivative(key, derivative, name), what=name)
