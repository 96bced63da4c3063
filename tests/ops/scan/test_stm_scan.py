from itertools import product

import pytest
import torch
from asserts import DAGS, SIZES, assert_near
from hypothesis import given, settings
from poison import poison
from scans import StmInputs, assert_scan, loop_scan, make_stm, pairs
from strategies import Batch, batches, dags

from pyg_chimera.ops import (
    CycleError,
    dag_scan,
    explain,
    line_graph,
    multitree,
    stm_scan,
)
from pyg_chimera.ops.resolvent import numba_, numba_scan, torch_
from pyg_chimera.ops.scan import numba_mask, stm
from pyg_chimera.ops.structure import distance, system

DISTINCT = [*product(("state", "mask"), ("numba", "torch")), ("auto", "reference")]
COMBINATIONS = [*DISTINCT, ("auto", "auto"), ("auto", "torch"), ("mask", "auto")]

combinations = pytest.mark.parametrize(
    ("form", "backend"), COMBINATIONS, ids=map("-".join, COMBINATIONS)
)
distinct = pytest.mark.parametrize(
    ("form", "backend"), DISTINCT, ids=map("-".join, DISTINCT)
)
#: Two diamonds in a row, and one more way around; a duplicate edge; an isolated node.
EDGES = [(0, 1), (0, 2), (1, 3), (2, 3), (3, 4), (3, 5), (4, 6), (5, 6), (0, 6), (3, 5)]


def scanner(form, backend):
    return lambda *args: stm_scan(*args, form=form, backend=backend)


@combinations
@pytest.mark.parametrize("graph", DAGS)
def test_oracle(graph, form, backend):
    for size in SIZES[: 1 if graph == "several_blocks" else None]:
        inputs = make_stm(*DAGS[graph], size)
        for dtype in (torch.float64, torch.float32):
            assert_scan(scanner(form, backend), inputs.to(dtype))


@combinations
def test_oracle_where_many_paths_meet(form, backend):
    assert_scan(scanner(form, backend), make_stm(EDGES, 8))


@combinations
@pytest.mark.parametrize("size", [1, 2, 3])
def test_state_tracking(form, backend, size):
    inputs = make_stm(EDGES, 8, size=(2, 1, 3, 4), components=size)
    assert_scan(scanner(form, backend), inputs)
    if size == 1:
        plain = inputs._replace(
            source=inputs.source[..., 0], mark=inputs.mark[..., 0],
            transition=inputs.transition[..., 0, 0],
        )  # fmt: skip
        assert_near(scanner(form, backend)(*inputs), scanner(form, backend)(*plain))


@distinct
@settings(max_examples=25, derandomize=True, deadline=None)
@given(batch=batches(dags(max_nodes=5, max_edges=8), max_graphs=3))
def test_random_batches(form, backend, batch: Batch):
    """The oracle, with and without `batch`, and what its graphs give one by one."""
    inputs = make_stm(batch.edge_index, batch.num_nodes, batch.batch, (2, 1, 2, 3))
    function = scanner(form, backend)
    assert_scan(function, inputs)
    out = function(*inputs)
    assert_near(function(*inputs._replace(batch=None)), out)
    edges, lines = inputs.edge_index, inputs.line_edge_index
    for node in batch.node_map:
        edge = torch.isin(edges[0], node).nonzero().view(-1)
        line = torch.isin(lines[0], edge).nonzero().view(-1)
        place = torch.zeros(batch.num_nodes, dtype=torch.long)
        place[node] = torch.arange(len(node))
        rank = torch.zeros(edges.size(1), dtype=torch.long)
        rank[edge] = torch.arange(len(edge))
        single = StmInputs(
            *(x[node] for x in inputs[:3]),
            inputs.source[edge], inputs.transition[line], inputs.mark[edge],
            inputs.direct[node], place[edges[:, edge]], rank[lines[:, line]],
        )  # fmt: skip
        assert_near(function(*single), out[node], 1e-9)


@distinct
def test_permutation_of_nodes_edges_and_line_edges(form, backend):
    inputs = make_stm(EDGES, 8)
    expected = scanner(form, backend)(*inputs)
    for _ in range(3):
        node, edge = torch.randperm(8), torch.randperm(len(EDGES))
        line = torch.randperm(inputs.line_edge_index.size(1))
        name, number = torch.argsort(node), torch.argsort(edge)
        out = scanner(form, backend)(
            *(x[node] for x in inputs[:3]),
            inputs.source[edge], inputs.transition[line], inputs.mark[edge],
            inputs.direct[node], name[inputs.edge_index[:, edge]],
            number[inputs.line_edge_index[:, line]],
        )  # fmt: skip
        assert_near(out, expected[node], 1e-12)


@distinct
def test_some_line_edges(form, backend):
    """Those of a multitree, a single one, none, or the same one twice."""
    edges = torch.tensor(EDGES).t()
    lines = line_graph(edges, 8).edge_index
    kept = lines[:, multitree(lines, len(EDGES))]
    assert kept.size(1) < lines.size(1)
    for some in (kept, lines[:, :1], lines[:, :0], lines[:, [0, 3, 0, 0]]):
        assert_scan(scanner(form, backend), make_stm(EDGES, 8, line_edge_index=some))


@distinct
def test_dags_side_by_side(form, backend):
    """An undirected path there and back: no line edge turns around."""
    edges = torch.tensor([(0, 1), (1, 2), (2, 3), (1, 0), (2, 1), (3, 2)]).t()
    lines = torch.tensor([[0, 1, 5, 4], [1, 2, 4, 3]])
    assert_scan(scanner(form, backend), make_stm(edges, 4, line_edge_index=lines))


@distinct
def test_gradcheck(form, backend):
    inputs = make_stm(EDGES[:6], 6, size=(2, 1, 2, 2)).with_grad()
    assert torch.autograd.gradcheck(
        lambda *x: scanner(form, backend)(*x, *inputs[7:]), inputs[:7]
    )
    inputs = make_stm(EDGES[:4], 5, size=(1, 1, 2, 1), components=2).with_grad()
    assert torch.autograd.gradcheck(
        lambda *x: scanner(form, backend)(*x, *inputs[7:]), inputs[:7]
    )


@distinct
def test_path_is_a_scan_of_its_nodes(form, backend):
    """Where each edge goes on to one edge, states may as well lie on nodes."""
    n = 40
    path = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
    inputs = make_stm(path, n, size=(2, 2, 3, 4))
    out = scanner(form, backend)(*inputs)
    shifted = inputs.query[1:], inputs.key[:-1], inputs.value[:-1]
    query = shifted[0] * inputs.mark[..., None]
    value = shifted[2] * inputs.source[..., None]
    expected = dag_scan(
        query, shifted[1], value, path[:, :-1], inputs.transition, form=form,
        backend=backend,
    )  # fmt: skip
    own = (inputs.query * inputs.key).sum(-1) * inputs.direct
    expected = torch.cat([torch.zeros_like(expected[:1]), expected])
    assert_near(out, expected + own[..., None] * inputs.value, 1e-12)


# ------------------------------------------------------------------ tiles and threads


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tile", [1, 300, 1 << 20])
def test_slices_of_any_size(monkeypatch, threads, tile):
    """Rows of a state at a time, slices of channels, and threads for them."""
    torch.set_num_threads(threads)
    monkeypatch.setattr(numba_scan, "_TILE_BYTES", tile)
    inputs = make_stm(EDGES, 8, size=(2, 1, 7, 37))
    assert_scan(scanner("state", "numba"), inputs)
    assert_scan(scanner("state", "numba"), inputs.to(torch.float32))


def test_wide_graphs_keep_all_threads_busy():
    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(0)
    tail = torch.cat([torch.randint(i, (2,), generator=generator)
                      for i in range(1, 300)])  # fmt: skip
    head = torch.arange(1, 300).repeat_interleave(2)
    edges = torch.stack([tail, head])
    lines = line_graph(edges, 300).edge_index
    inputs = make_stm(edges, 300, size=(1, 1, 9, 40), line_edge_index=lines)
    inputs = inputs._replace(transition=0.3 * inputs.transition).with_grad()
    outs = []
    for backend in ("numba", "torch"):
        out = stm_scan(*inputs, form="state", backend=backend)
        grads = torch.autograd.grad(out.square().sum(), inputs[:7])
        outs.append([out, *grads])
    for x, y in zip(*outs, strict=True):
        assert_near(x, y, 1e-9)


# ----------------------------------------------------------------------------- memory


@distinct
@pytest.mark.parametrize("tile", [1, 1 << 20])
def test_nothing_uninitialised_is_read(form, backend, tile, monkeypatch):
    """In plain Python, where an index beyond an array is an error, too."""
    poison(monkeypatch, numba_, numba_scan, numba_mask, torch_, system, distance)
    monkeypatch.setattr(numba_scan, "_TILE_BYTES", tile)
    monkeypatch.setattr(numba_scan, "_MIN_LANES", 1)
    monkeypatch.setattr(numba_mask, "_WIDTH", 16)
    for edges, n, size in (
        (EDGES, 8, (2, 1, 3, 2)),
        (EDGES[:0], 2, (1, 1, 1, 1)),
        ([(i, i + 1) for i in range(18)] + [(0, 9), (3, 12)], 20, (1, 1, 2, 1)),
    ):
        assert_scan(scanner(form, backend), make_stm(edges, n, size=size))


# -------------------------------------------------------------------- dtypes, compile


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    inputs = make_stm(EDGES, 8).to(dtype)
    out = stm_scan(*inputs)
    assert out.dtype == dtype
    assert torch.equal(out, stm_scan(*inputs.to(torch.float32)).to(dtype))


def test_autocast_does_not_reach_inside():
    inputs = make_stm(EDGES, 8).to(torch.float32)
    expected = stm_scan(*inputs)
    with torch.autocast("cpu", torch.bfloat16):
        for form, backend in DISTINCT:
            out = stm_scan(*inputs, form=form, backend=backend)
            assert_near(out, expected, 1e-5)


def test_int32_indices():
    inputs = make_stm(EDGES, 8, [0] * 8)
    small = inputs._replace(
        edge_index=inputs.edge_index.int(), batch=inputs.batch.int(),
        line_edge_index=inputs.line_edge_index.int(),
    )  # fmt: skip
    assert torch.equal(stm_scan(*small), stm_scan(*inputs))


@distinct
def test_compile(form, backend):
    if backend == "reference":
        pytest.skip("the reference loops over graphs")

    def layer(*args):
        return torch.tanh(stm_scan(2 * args[0], *args[1:], form=form, backend=backend))

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for edges, n in ((EDGES, 8), (EDGES[:5], 6)):
        inputs = make_stm(edges, n, [0] * n).with_grad()
        out = compiled(*inputs)
        expected = layer(*inputs)
        assert_near(out, expected, 1e-12)
        got = torch.autograd.grad(out.square().sum(), inputs[:7])
        wanted = torch.autograd.grad(expected.square().sum(), inputs[:7])
        for x, y in zip(got, wanted, strict=True):
            assert_near(x, y, 1e-12)


@distinct
def test_opcheck(form, backend):
    if backend == "reference":
        pytest.skip("the reference is plain autograd")
    inputs = make_stm(EDGES, 8, size=(2, 1, 3, 4), components=2)
    call = stm._stm_call(*inputs, form, backend)
    args = call.arguments()
    ops = torch.ops.pyg_chimera
    checks = ("test_schema", "test_faketensor")
    grad = torch.randn_like(inputs.value)
    torch.library.opcheck(ops.scan_backward.default, (grad, *args), test_utils=checks)
    args = stm._stm_call(*inputs.with_grad(), form, backend).arguments()
    args = [x.detach().requires_grad_(x.requires_grad)
            if isinstance(x, torch.Tensor) else x for x in args]  # fmt: skip
    checks += ("test_autograd_registration", "test_aot_dispatch_dynamic")
    torch.library.opcheck(ops.scan.default, tuple(args), test_utils=checks)


# --------------------------------------------------------------------------- explain


@combinations
def test_explain_says_what_runs(form, backend, monkeypatch):
    ran = []

    def spy(module, name, *entry):
        function = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args: (ran.append(entry), function(*args))[1]
        )

    spy(numba_scan, "state_forward", "sparse", "state", "numba")
    spy(numba_mask, "mask_forward", "sparse", "mask", "numba")
    for f in ("state", "mask"):
        spy(torch_, f"{f}_forward", "sparse", f, "torch")
        spy(torch_, f"dense_{f}_forward", "dense", f, "torch")
    spy(stm, "reference_scan", "dense", "mask", "reference")
    inputs = make_stm(EDGES, 8)
    choice = explain("stm_scan", *inputs, form=form, backend=backend)
    assert ran == []
    assert choice.operator == "stm_scan"
    assert choice.reason
    stm_scan(*inputs, form=form, backend=backend)
    assert ran == [choice[1:4]]


# ---------------------------------------------------------------------------- errors


def good(**changes) -> StmInputs:
    return make_stm(EDGES, 8, size=(2, 1, 3, 4))._replace(**changes)


def of_shape(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.double)


E, L = len(EDGES), pairs(torch.tensor(EDGES).t()).size(1)
BAD = [
    ({"query": of_shape(8, 3)}, r"'query' must be \[nodes, heads, channels\]"),
    ({"query": of_shape(8, 1, 9)}, r"same shape, got \[8, 1, 9\] and \[8, 1, 3\]"),
    ({"value": of_shape(7, 2, 4)}, r"as many nodes, got \[8, 1, 3\] and \[7, 2, 4\]"),
    ({"direct": of_shape(8, 3)}, r"'direct' must be \[nodes, heads\] = \[8, 2\]"),
    ({"source": of_shape(E + 1, 2)}, rf"'source' must be \[edges, heads\] = \[{E}, 2"),
    ({"mark": of_shape(E - 1, 2)}, rf"'mark' must be .* got \[{E - 1}, 2\]"),
    ({"transition": of_shape(L + 1, 2)}, rf"'transition' must be .* = \[{L}, 2\], got"),
    ({"source": of_shape(E, 2, 3)}, r"'mark' must be \[edges, heads, components\]"),
    (
        {"source": of_shape(E, 2, 3), "mark": of_shape(E, 2, 3)},
        r"'transition' must be \[line edges, heads, components, components\]",
    ),
    ({"edge_index": torch.zeros(3, E, dtype=torch.long)}, r"'edge_index' must be \[2"),
    ({"line_edge_index": torch.zeros(L, dtype=torch.long)}, "'line_edge_index' must"),
    ({"transition": of_shape(L, 2) / 0}, "but at line edge 0 it is inf in head 0"),
    ({"edge_index": torch.tensor(EDGES).t() + 2}, "node indices in"),
    ({"batch": torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])}, "of graph 0 to node 3 of"),
    ({"batch": torch.zeros(7, dtype=torch.long)}, r"'batch' must be of shape"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "match"), BAD)
def test_bad_input(changes, match):
    inputs = good(**changes)
    for function in (stm_scan, lambda *args: explain("stm_scan", *args)):
        with pytest.raises(ValueError, match=match):
            function(*inputs)


@combinations
def test_bad_graphs(form, backend):
    function = scanner(form, backend)
    edges = torch.tensor([(3, 1), (1, 2), (2, 3)]).t()
    with pytest.raises(
        CycleError, match=r"cycle (1 -> 2 -> 3|2 -> 3 -> 1|3 -> 1 -> 2)"
    ):
        function(*make_stm(edges, 4))
    with pytest.raises(
        CycleError, match=r"cycle (1 -> 2 -> 3|2 -> 3 -> 1|3 -> 1 -> 2)"
    ):
        function(*make_stm(edges, 4, components=2))
    with pytest.raises(CycleError, match="cycle 1 -> 1"):
        function(*make_stm([(0, 1), (1, 1)], 2))
    edges = torch.tensor([(0, 1), (1, 2), (2, 3)]).t()
    inputs = make_stm(edges, 4)
    flipped = inputs._replace(line_edge_index=inputs.line_edge_index.flip(0))
    with pytest.raises(ValueError, match=r"edge 1 \(1 -> 2\) to edge 0 .* against"):
        function(*flipped)
    apart = inputs._replace(line_edge_index=torch.tensor([[0, 0], [1, 2]]))
    with pytest.raises(ValueError, match=r"edge 0 \(0 -> 1\) to edge 2 .* another"):
        function(*apart)
    shuffled = inputs._replace(edge_index=edges[:, [1, 0, 2]])
    with pytest.raises(ValueError, match="line edge 0 leads from edge 0"):
        function(*shuffled)
    outside = inputs._replace(line_edge_index=torch.tensor([[0, 1], [1, 3]]))
    with pytest.raises(ValueError, match=r"states in .* = \[0, 3\) \(got 3\)"):
        function(*outside)


def test_bad_dtypes():
    inputs = good()
    with pytest.raises(TypeError, match="'mark' must be floating point"):
        stm_scan(*inputs._replace(mark=inputs.mark.long()))
    with pytest.raises(TypeError, match="'line_edge_index' must be integer"):
        stm_scan(*inputs._replace(line_edge_index=inputs.line_edge_index.double()))


def test_bad_options():
    with pytest.raises(ValueError, match="'form' must be one of"):
        stm_scan(*good(), form="cube")
    with pytest.raises(ValueError, match="'backend' must be one of"):
        stm_scan(*good(), backend="jax")


def test_directions_are_never_altered():
    """An edge against the order of nodes carries what its own source writes."""
    inputs = make_stm([(3, 1), (1, 2), (2, 0)], 4, size=(1, 1, 2, 2))
    edges = inputs.edge_index.clone()
    out = stm_scan(*inputs)
    assert torch.equal(inputs.edge_index, edges)
    assert_near(out, loop_scan(*inputs), 1e-12)
    own = inputs._replace(direct=torch.zeros_like(inputs.direct))
    assert stm_scan(*own)[3].abs().max() == 0  # nothing leads to it
    assert stm_scan(*own)[0].abs().max() > 0


@pytest.mark.cuda
def test_cuda():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    inputs = make_stm(EDGES, 8)
    on_device = StmInputs(*(x if x is None else x.cuda() for x in inputs))
    for form in ("state", "mask", "auto"):
        assert_near(stm_scan(*on_device, form=form).cpu(), stm_scan(*inputs), 1e-9)


# -------------------------------------------------------------------------- remembered


@distinct
def test_tensors_may_be_changed_after_a_call(form, backend):
    """Structure is remembered by contents, and must not lie in the caller's memory."""
    inputs = make_stm(EDGES, 8)
    expected = scanner(form, backend)(*inputs)
    for fill in (0, 10**9):
        edges, lines = inputs.edge_index.clone(), inputs.line_edge_index.clone()
        mine = inputs._replace(edge_index=edges, line_edge_index=lines)
        assert torch.equal(scanner(form, backend)(*mine), expected)
        edges.fill_(fill)
        lines.fill_(fill)
        assert torch.equal(scanner(form, backend)(*inputs), expected)


@distinct
def test_inference_first(form, backend):
    inputs = make_stm([*EDGES, (6, 7)], 8)
    with torch.inference_mode():
        expected = scanner(form, backend)(*inputs)
    inputs = inputs.with_grad()
    out = scanner(form, backend)(*inputs)
    out.sum().backward()
    assert torch.equal(out, expected)


@distinct
def test_no_channels(form, backend):
    for size in ((8, 8, 3, 0), (2, 1, 0, 4), (1, 1, 0, 0)):
        inputs = make_stm(EDGES, 8, size=size).with_grad()
        out = scanner(form, backend)(*inputs)
        assert out.shape == inputs.value.shape
        assert not out.any()
        out.sum().backward()


def test_numba_is_for_the_cpu():
    inputs = make_stm(EDGES, 8)
    meta = StmInputs(*(x.to("meta") for x in inputs[:7]), *inputs[7:])
    for form in ("auto", "state", "mask"):
        with pytest.raises(ValueError, match="runs on the CPU, but 'value' is on meta"):
            explain("stm_scan", *meta, form=form, backend="numba")
