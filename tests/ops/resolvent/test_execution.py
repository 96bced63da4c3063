"""How calls are carried out: choices, registration, compilation, threads, memory."""

import multiprocessing
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from asserts import (
    DAGS,
    GRAPHS,
    Inputs,
    assert_gradients_match,
    assert_near,
    dense_mix,
    make_inputs,
)
from poison import poison
from torch._dynamo.testing import CompileCounterWithBackend

from pyg_chimera.ops import dag_scan, explain, resolvent_mix
from pyg_chimera.ops.resolvent import mix, numba_, numba_scan, torch_
from pyg_chimera.ops.structure import (
    distance,
    elimination,
    system,
    topological,
)

CALLS = [
    ("resolvent_mix", {"solver": "sparse", "form": "state", "backend": "numba"}),
    ("resolvent_mix", {"solver": "sparse", "form": "mask", "backend": "numba"}),
    ("resolvent_mix", {"solver": "sparse", "form": "state", "backend": "torch"}),
    ("resolvent_mix", {"solver": "sparse", "form": "mask", "backend": "torch"}),
    ("resolvent_mix", {"solver": "dense", "form": "state", "backend": "torch"}),
    ("resolvent_mix", {"solver": "dense", "form": "mask", "backend": "torch"}),
    ("resolvent_mix", {"solver": "neumann", "form": "state", "num_terms": 3}),
    ("resolvent_mix", {"solver": "neumann", "form": "mask", "num_terms": 3}),
    ("dag_scan", {"form": "state", "backend": "numba"}),
    ("dag_scan", {"form": "mask", "backend": "numba"}),
    ("dag_scan", {"form": "state", "backend": "torch"}),
    ("dag_scan", {"form": "mask", "backend": "torch"}),
]
OPERATORS = {"resolvent_mix": resolvent_mix, "dag_scan": dag_scan}

calls = pytest.mark.parametrize(
    ("operator", "options"),
    CALLS,
    ids=["-".join([name, *map(str, options.values())]) for name, options in CALLS],
)


def inputs_of(operator: str, graph: str = "unsorted_batch", **kwargs) -> Inputs:
    graphs = GRAPHS if operator == "resolvent_mix" else DAGS
    return make_inputs(*graphs[graph], **kwargs)


def arguments(operator: str, options: dict, inputs: Inputs) -> tuple:
    """The registered operator's."""
    return (
        *inputs, None, operator, options.get("solver", "sparse"), options["form"],
        options.get("backend", "auto"), options.get("num_terms", -1),
    )  # fmt: skip


# --------------------------------------------------------------------------- explain


@pytest.fixture
def executed(monkeypatch):
    """What has run: (solver or none, form, backend, direction) for each call."""
    record = []

    def spy(module, name, *entry):
        function = getattr(module, name)

        def wrapper(*args, **kwargs):
            record.append(entry)
            return function(*args, **kwargs)

        monkeypatch.setattr(module, name, wrapper)

    for direction in ("forward", "backward"):
        spy(
            numba_scan, f"state_{direction}", "sparse", "state", "numba", direction
        )  # fmt: skip
        for form in ("state", "mask"):
            for module, backend in ((numba_, "numba"), (torch_, "torch")):
                spy(module, f"{form}_{direction}", "sparse", form, backend, direction)
            spy(torch_, f"dense_{form}_{direction}", "dense", form, "torch", direction)
        spy(
            torch_, f"neumann_state_{direction}", "neumann", "state", "torch", direction
        )
    spy(mix, "reference_mix", "dense", "mask", "reference", "forward")
    return record


@calls
def test_explain_says_what_is_asked_for(operator, options, executed):
    inputs = inputs_of(operator).with_grad()
    choice = explain(operator, *inputs, **options)
    assert executed == []
    assert choice.operator == operator
    assert choice.reason
    for name, option in options.items():
        if name != "num_terms":
            assert getattr(choice, name) == option
    OPERATORS[operator](*inputs, **options).sum().backward()
    solver, form, backend = choice.solver, choice.form, choice.backend
    if (solver, form) == ("neumann", "mask"):
        solver = "dense"  # they share their code
    assert executed == [
        (solver, form, backend, "forward"), (solver, form, backend, "backward"),
    ]  # fmt: skip


def star(num_nodes: int) -> torch.Tensor:
    leaves = torch.arange(1, num_nodes)
    edges = torch.stack([torch.zeros_like(leaves), leaves])
    return torch.cat([edges, edges.flip(0)], dim=1)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("backend", ["auto", "numba", "torch", "reference"])
@pytest.mark.parametrize("num_nodes", [2, 6, 60, 700])
def test_explain_says_what_auto_does(operator, backend, num_nodes, executed):
    edge_index = star(num_nodes)
    if operator == "dag_scan":
        edge_index = edge_index[:, : num_nodes - 1]
    inputs = make_inputs(edge_index, num_nodes, size=(2, 1, 4, 4)).to(torch.float32)
    choice = explain(operator, *inputs, backend=backend)
    OPERATORS[operator](*inputs, backend=backend)
    assert executed == [(*choice[1:4], "forward")]


def test_explain_says_when_sparse_gives_up(executed):
    inputs = make_inputs([(0, 1), (1, 0), (0, 0)], 20, size=(1, 1, 2, 2))
    weight = torch.tensor([[1.0], [1.0], [1.0]], dtype=torch.double)
    inputs = inputs._replace(edge_weight=weight)
    choice = explain("resolvent_mix", *inputs)
    with pytest.warns(UserWarning, match="without pivoting"):
        resolvent_mix(*inputs)
    assert choice[1] == "dense"
    assert "dominant" in choice.reason
    assert executed == [(*choice[1:4], "forward")]


def test_auto_prefers_masks_for_small_graphs_and_states_for_large_ones():
    small = make_inputs(star(20), 20, size=(2, 1, 64, 64))
    assert explain("resolvent_mix", *small).form == "mask"
    large = make_inputs(star(5000), 5000, size=(2, 1, 4, 4))
    choice = explain("resolvent_mix", *large)
    assert choice[1:4] == ("sparse", "state", "numba")


def test_auto_does_not_fill_memory_with_masks(monkeypatch):
    inputs = make_inputs(star(20), 20, size=(2, 1, 64, 64))
    monkeypatch.setattr(mix.cost, "_MAX_MASK_BYTES", 20 * 20 * 2 * 8)
    assert explain("resolvent_mix", *inputs).form == "mask"
    monkeypatch.setattr(mix.cost, "_MAX_MASK_BYTES", 20 * 20 * 2 * 8 - 1)
    choice = explain("resolvent_mix", *inputs)
    assert choice.form == "state"
    assert "memory" in choice.reason


def test_auto_counts_the_padding_of_the_torch_backend(monkeypatch):
    """It pads resolvents to the largest block, and holds all of them at a time."""
    sizes = [60] + [33] * 30
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    node = torch.arange(len(batch) - 1)
    edge_index = torch.stack([node, node + 1])[:, batch[1:] == batch[:-1]]
    inputs = make_inputs(edge_index, len(batch), batch, (2, 1, 96, 64))
    options = {"solver": "sparse", "backend": "torch"}
    assert explain("resolvent_mix", *inputs, **options).form == "mask"
    padded = len(sizes) * 60 * 60 * 2 * 8
    monkeypatch.setattr(mix.cost, "_MAX_MASK_BYTES", padded - 1)
    assert explain("resolvent_mix", *inputs, **options).form == "state"


# ---------------------------------------------------------------------- registration


@calls
def test_opcheck(operator, options):
    inputs = inputs_of(operator)
    args = arguments(operator, options, inputs)
    grad = torch.randn_like(inputs.value)
    op, backward = torch.ops.pyg_chimera.mix, torch.ops.pyg_chimera.mix_backward
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(backward.default, (grad, *args), test_utils=checks)
    args = arguments(operator, options, inputs.with_grad())
    checks += ("test_autograd_registration",)
    torch.library.opcheck(op.default, args, test_utils=checks)


@calls
def test_opcheck_of_strided_tensors(operator, options):
    """What a compiler is told of the strides must be so."""
    inputs = inputs_of(operator)
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs[:3])
    weight = inputs.edge_weight.t().contiguous().t()
    inputs = inputs._replace(query=q, key=k, value=v, edge_weight=weight)
    args = arguments(operator, options, inputs)
    grad = torch.randn_like(inputs.value)
    op, backward = torch.ops.pyg_chimera.mix, torch.ops.pyg_chimera.mix_backward
    fake = torch._subclasses.FakeTensorMode()
    for function, x in ((op, args), (backward, (grad, *args))):
        outs = function(*x)
        with fake:
            fakes = function(*(fake.from_tensor(y) if isinstance(y, torch.Tensor) else y
                               for y in x))  # fmt: skip
        if function is op:
            outs, fakes = [outs], [fakes]
        for out, imagined in zip(outs, fakes, strict=True):
            assert out.stride() == imagined.stride()


@pytest.mark.parametrize(
    ("operator", "options"), [CALLS[0], CALLS[9]], ids=["resolvent_mix", "dag_scan"]
)
def test_opcheck_of_dynamic_shapes(operator, options):
    args = arguments(operator, options, inputs_of(operator).with_grad())
    op = torch.ops.pyg_chimera.mix.default
    torch.library.opcheck(op, args, test_utils="test_aot_dispatch_dynamic")


@pytest.mark.parametrize("operator", OPERATORS)
def test_compile(operator):
    """One graph, no breaks, any number of nodes and edges."""
    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

    def layer(query, key, value, edge_index, edge_weight, batch):
        out = OPERATORS[operator](2 * query, key, value, edge_index, edge_weight, batch)
        return torch.tanh(out)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for num_nodes, batch in ((11, [0] * 4 + [1] * 7), (90, [0] * 90)):
        parent = [(i, i + 1) for i in range(num_nodes - 1) if batch[i] == batch[i + 1]]
        expected = make_inputs(parent * 2, num_nodes, batch).with_grad()
        layer(*expected).square().sum().backward()
        inputs = make_inputs(parent * 2, num_nodes, batch).with_grad()
        out = compiled(*inputs)
        out.square().sum().backward()
        assert_near(out, layer(*expected), 1e-12)
        for x, y in zip(inputs, expected, strict=True):
            if x.is_floating_point():
                assert_near(x.grad, y.grad, 1e-12)
    assert counter.frame_count == 1


def test_compiled_errors_are_the_same():
    torch._dynamo.reset()
    compiled = torch.compile(dag_scan, fullgraph=True, backend="aot_eager")
    inputs = make_inputs([(0, 1), (1, 0)], 2)
    with pytest.raises(ValueError, match="cycle 0 -> 1 -> 0"):
        compiled(*inputs)


# ----------------------------------------------------------------------------- memory


@pytest.fixture
def poisoned(monkeypatch):
    poison(
        monkeypatch, numba_, numba_scan, torch_, system, elimination, distance,
        topological,
    )  # fmt: skip


@calls
@pytest.mark.parametrize("graph", ["no_edges", "mixed", "unsorted_batch"])
@pytest.mark.usefixtures("poisoned")
def test_nothing_uninitialised_is_read(operator, options, graph):
    graph = "diamonds" if (operator, graph) == ("dag_scan", "mixed") else graph
    num_terms = options.get("num_terms")
    assert np.isnan(numba_.np.empty(1)).all()
    assert torch.empty(1).isnan().all()
    for size in ((1, 1, 1, 1), (2, 1, 3, 18)):
        inputs = inputs_of(operator, graph, size=size)
        assert_gradients_match(
            lambda *args: OPERATORS[operator](*args, **options),
            inputs,
            num_terms=num_terms,
        )


@pytest.mark.usefixtures("poisoned")
def test_kernels_stay_inside_their_arrays():
    """In plain Python an index beyond an array is an error; blocks of many nodes."""
    for operator in OPERATORS:
        for form in ("state", "mask"):
            inputs = inputs_of(operator, "several_blocks", size=(1, 1, 2, 1))
            assert_gradients_match(
                lambda *args, o=operator, f=form: OPERATORS[o](
                    *args, form=f, backend="numba"
                ),
                inputs,
            )


@calls
def test_inputs_are_left_alone(operator, options):
    inputs = inputs_of(operator).with_grad()
    before = [x.detach().clone() for x in inputs]
    OPERATORS[operator](*inputs, **options).sum().backward()
    for x, y in zip(inputs, before, strict=True):
        assert x.equal(y)


@pytest.mark.filterwarnings("ignore:.*without pivoting")
def test_no_batched_lapack_on_the_cpu(monkeypatch):
    """Batched LU is wrong there with more than one thread (pytorch#142815)."""
    sizes = []

    def guard(owner, name):
        function = getattr(owner, name)

        def wrapper(A, *args, **kwargs):
            assert A.dim() == 2, f"{name} of {list(A.shape)}"
            sizes.append(len(A))
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
    for operator, function in OPERATORS.items():
        inputs = inputs_of(operator, "several_blocks")
        for options in [o for name, o in CALLS if name == operator] + [
            {}, {"backend": "torch"}, {"backend": "reference"},
        ]:  # fmt: skip
            function(*inputs.with_grad(), **options).sum().backward()
    assert sizes  # dense and reference were seen
    sizes.clear()
    inputs = make_inputs([(0, 0), (0, 1), (1, 0)], 20)
    resolvent_mix(*inputs._replace(edge_weight=torch.ones(3, 4))).sum()
    assert sizes  # and what auto falls back to


# ---------------------------------------------------------------------------- threads


def busy() -> Inputs:
    """Enough work to wake threads up."""
    return inputs_of("resolvent_mix", "several_blocks", size=(2, 1, 48, 48))


def outputs(inputs: Inputs, form: str) -> list[torch.Tensor]:
    inputs = inputs.with_grad()
    out = resolvent_mix(*inputs, form=form, backend="numba")
    out.square().sum().backward()
    return [out.detach(), *(x.grad for x in inputs if x.is_floating_point())]


@pytest.fixture
def set_num_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("form", ["state", "mask"])
def test_any_number_of_threads(form, set_num_threads):
    results = []
    for num_threads in (1, 2, 3):
        set_num_threads(num_threads)
        results.append(outputs(busy(), form))
    for result in results[1:]:
        for x, y in zip(result, results[0], strict=True):
            assert_near(x, y, 1e-12)


def test_threads_are_used(set_num_threads, monkeypatch):
    threads = set()
    together = threading.Barrier(2)
    kernel = numba_._state_forward

    def spy(*args):
        if threading.current_thread() not in threads:
            threads.add(threading.current_thread())
            together.wait(timeout=20)
        kernel(*args)

    monkeypatch.setattr(numba_, "_state_forward", spy)
    set_num_threads(2)
    resolvent_mix(*busy(), form="state", backend="numba")
    assert len(threads) == 2


def test_threads_are_not_woken_for_little(set_num_threads, monkeypatch):
    threads = []
    kernel = numba_._state_forward

    def spy(*args):
        threads.append(threading.current_thread())
        kernel(*args)

    monkeypatch.setattr(numba_, "_state_forward", spy)
    set_num_threads(2)
    resolvent_mix(*inputs_of("resolvent_mix", "mixed"), form="state", backend="numba")
    assert threads == [threading.current_thread()]


def test_errors_of_threads_are_raised(set_num_threads, monkeypatch):
    def fail(*args):
        raise MemoryError("no more")

    monkeypatch.setattr(numba_, "_state_forward", fail)
    set_num_threads(2)
    with pytest.raises(MemoryError, match="no more"):
        resolvent_mix(*busy(), form="state", backend="numba")


def test_two_callers_at_once(set_num_threads):
    set_num_threads(2)
    cases = [
        (make_inputs(*GRAPHS["several_blocks"], (2, 1, 40, 40), seed=seed), form)
        for seed in range(3)
        for form in ("state", "mask")
    ]
    expected = [outputs(*case) for case in cases]
    system._CACHE.values.clear()
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda case: outputs(*case), cases * 5))
    for result, reference in zip(results, expected * 5, strict=True):
        for x, y in zip(result, reference, strict=True):
            assert_near(x, y, 1e-12)


def _in_child(queue, inputs):
    torch.set_num_threads(1)  # torch's own threads don't survive a fork
    results = [outputs(inputs, form) for form in ("state", "mask")]
    torch.get_num_threads = lambda: 2  # ours do
    results += [outputs(inputs, "state")]
    queue.put([[x.numpy() for x in result] for result in results])


@pytest.mark.skipif(
    "fork" not in multiprocessing.get_all_start_methods(), reason="needs fork"
)
def test_forked_process(set_num_threads):
    set_num_threads(2)
    inputs = busy()
    expected = [outputs(inputs, form) for form in ("state", "mask", "state")]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    with warnings.catch_warnings():  # Python >= 3.12 warns of forks beside threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child = context.Process(target=_in_child, args=(queue, inputs), daemon=True)
        child.start()
    deadline = threading.Timer(60, child.kill)
    deadline.start()
    while child.is_alive() and queue.empty():
        child.join(0.05)
    results = None if queue.empty() else queue.get()
    child.join()
    deadline.cancel()
    assert results is not None, "the child hung or died"
    assert child.exitcode == 0
    for result, reference in zip(results, expected, strict=True):
        for x, y in zip(result, reference, strict=True):
            assert_near(torch.from_numpy(x), y, 1e-12)
    for x, y in zip(outputs(inputs, "state"), expected[0], strict=True):
        assert_near(x, y, 1e-12)  # the parent still works


# ------------------------------------------------------------------------- no staleness


@calls
def test_graph_changed_in_place(operator, options):
    inputs = make_inputs([(0, 1), (1, 2), (2, 3)], 4)
    function = OPERATORS[operator]

    def check():
        out = function(*inputs, **options)
        expected = dense_mix(*inputs[:5], options.get("num_terms"))
        assert_near(out, expected, 1e-9)
        return out

    first = check()
    inputs.edge_index[1, 2] = 1
    inputs.edge_index[0, 2] = 0
    assert not torch.allclose(check(), first)
    inputs.edge_weight[0] = 0.1
    check()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("before", [False, True])
def test_denormals_are_zero_in_kernels_only(threads, before):
    torch.set_num_threads(threads)
    smallest = 5e-324
    seen = []

    def kernel(first, last, scratch):
        seen.append(smallest * float(last > first))

    try:
        torch.set_flush_denormal(before)
        for cost in (1.0, 1e6):  # by this thread alone, and by all of them
            numba_._run(kernel, np.full(64, cost), 1, np.dtype(np.float32))
            assert (smallest * float(threads > 0) == 0.0) == before
    finally:
        torch.set_flush_denormal(False)
    assert len(seen) > 1
    assert not any(seen)
    assert smallest * float(threads > 0) > 0


def test_states_decay_to_zero_not_to_denormals():
    """What decays to nothing far from where it was written stays nothing."""
    n = 400
    node = torch.arange(n - 1)
    inputs = make_inputs(torch.stack([node, node + 1]), n, size=(1, 1, 2, 2))
    weight = torch.full((n - 1, 1), 0.5)
    inputs = inputs._replace(edge_weight=weight).to(torch.float32)
    key = torch.zeros_like(inputs.key)
    key[0] = 1
    out = dag_scan(*inputs._replace(key=key), form="state", backend="numba")
    assert out[100].abs().max() > 0
    assert (out[150:] == 0).all()
