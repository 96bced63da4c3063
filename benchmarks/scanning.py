"""Measures states on edges: `stm_scan`, `grid_scan`, `PLSTMConv` and their structure.

Forward, backward and peak memory on batches of peptides, on grids and on sequences,
beside a loop over edges, `dag_scan`, and attention; line graphs a second::

    python benchmarks/scanning.py                   # all of it, a quarter of an hour
    python benchmarks/scanning.py --smoke           # tiny graphs, a few seconds
    python benchmarks/scanning.py --only grids --sides 16 32 --threads 1
    python benchmarks/scanning.py --root peptides-functional --out results/mine.json

Outputs and all gradients are compared with a float64 loop over edges first, or where
that takes too long with the float64 PyTorch backend: nothing is timed that differs.
Ratios are medians of the ratios within rounds of interleaved repetitions. They hold on
a busy machine too; times do not.
"""

import pickle
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from options import add_options, settle
from report import Figures, run, verdicts
from steps import (
    Pilot,
    Step,
    compare,
    compare_and_time,
    first_run,
    growth_rows,
    time_rows,
)
from timing import show
from torch import Tensor
from torch_geometric.nn import GATConv, GPSConv
from workloads import Workload, all_peptides, peptides, planar

from pyg_chimera.nn import ChimeraGridConv, PLSTMConv, PLSTMGridConv
from pyg_chimera.nn.conv import plstm_conv, plstm_grid_conv
from pyg_chimera.ops import dag_scan, grid_scan, line_graph, multitree, stm_scan
from pyg_chimera.ops.recurrence.plan.states import GridStates as StatesOfGrids
from pyg_chimera.ops.structure import topological_rank

HEADS, CHANNELS = 4, 64
#: The most states for which a float64 loop over edges is used for comparison.
MAX_LOOP = 25_000
#: Orientations: four of a grid, or both directions of a sequence.
ORIENTATIONS = {"grids": 4, "small-grids": 4, "sequences": 2}
#: The case of each part to which the others are compared.
BASES = {
    "peptides": "stm_scan",
    "grids": "grid_scan",
    "small-grids": "grid_scan, state",
    "sequences": "grid_scan",
    "layers": "PLSTMConv P",
    "grid-layers": "PLSTMConv P",
}
PARTS = (*BASES, "structure")


class Graphs(NamedTuple):
    """A batch of DAGs, or of grids of equal size, to measure on."""

    part: str
    name: str
    num_nodes: int
    num_edges: int  #: states, of all orientations
    edge_index: Tensor
    batch: Tensor
    height: int = 0
    width: int = 0


def forward_edges(edge_index: Tensor) -> Tensor:
    return edge_index[:, edge_index[0] < edge_index[1]]


def on_peptides(part: str, workload: Workload) -> Graphs:
    """Operators get edges to later nodes only; layers make two DAGs themselves."""
    edge_index, name = workload.edge_index, workload.name
    if part == "peptides":
        edge_index = forward_edges(edge_index)
    else:
        name = f"layers, {name}"
    return Graphs(
        part, name, workload.num_nodes, edge_index.size(1), edge_index, workload.batch
    )


def on_grids(part: str, height: int, width: int, count: int = 1) -> Graphs:
    """Grids, without a list of edges."""
    name = f"grid of {height} x {width}"
    if part == "sequences":
        name = f"sequence of {width:,}"
    elif count > 1:
        name = f"{count} grids of {height} x {width}"
        name = f"layers, {name}" if part == "grid-layers" else name
    edges = height * (width - 1) + (height - 1) * width
    edges *= count * ORIENTATIONS.get(part, 4)
    batch = torch.arange(count).repeat_interleave(height * width)
    nothing = torch.empty(2, 0, dtype=torch.long)
    return Graphs(part, name, batch.numel(), edges, nothing, batch, height, width)


# The loop ----------------------------------------------------------------------


class States(NamedTuple):
    """States, and the edges between them."""

    writer: Tensor  #: [S], the node that writes each state
    reader: Tensor  #: [S], the node that reads each state
    edge_index: Tensor  #: [2, L], between states


def edge_states(edge_index: Tensor, lines: Tensor) -> States:
    """A state for each edge of a DAG."""
    return States(edge_index[0], edge_index[1], lines)


class Order(NamedTuple):
    """The order in which a loop visits states, as Python lists."""

    states: list[int]  #: by graph, then topologically
    before: list[list[tuple[int, int]]]  #: each state's predecessors and line edges
    writer: list[int]
    reader: list[int]


def loop_order(states: States, batch: Tensor) -> Order:
    """Orders states by graph, then topologically."""
    num_states = states.writer.numel()
    rank = topological_rank(states.edge_index, num_states)
    order = torch.argsort(batch[states.writer] * (num_states + 1) + rank)
    before: list[list[tuple[int, int]]] = [[] for _ in range(num_states)]
    for line, (tail, head) in enumerate(states.edge_index.t().tolist()):
        before[head].append((tail, line))
    return Order(order.tolist(), before, states.writer.tolist(), states.reader.tolist())


def loop_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    source: Tensor,
    transition: Tensor,
    mark: Tensor,
    direct: Tensor,
    order: Order,
) -> Tensor:
    """A loop over states with a list of them, as people write it.

    Nodes and gates are unbound once: indexing them in the loop would make the backward
    pass quadratic, and slower than what is measured here.
    """
    out = ((query * key).sum(-1) * direct).unsqueeze(-1) * value
    queries, keys, values = query.unbind(), key.unbind(), value.unsqueeze(-2).unbind()
    sources = source.unsqueeze(-1).unbind()
    marks = mark.unsqueeze(-1).unbind()
    transitions = transition[..., None, None].unbind()
    states: list[Tensor] = [out] * len(order.writer)
    reads: list[Tensor] = [out] * len(order.writer)
    for e in order.states:
        u, w = order.writer[e], order.reader[e]
        state = (sources[e] * keys[u]).unsqueeze(-1) * values[u]
        for tail, line in order.before[e]:
            state = state + transitions[line] * states[tail]
        states[e] = state
        reads[e] = ((marks[e] * queries[w]).unsqueeze(-2) @ state).squeeze(-2)
    if not reads:
        return out
    reader = torch.tensor(order.reader, device=out.device)
    return out.index_add(0, reader, torch.stack(reads))


class ReleasedLoop(torch.autograd.Function):
    """A loop over states in one tensor, in the form of the released pLSTM, rewritten:
    products of single states, heads first. The backward pass recomputes all states,
    then visits them in reverse.
    """

    @staticmethod
    def run(q: Tensor, k: Tensor, v: Tensor, s: Tensor, t: Tensor, order: Order):
        """The states, [heads, states, N, P]."""
        states = v.new_zeros(q.size(0), s.size(1), q.size(2), v.size(2))
        for e in order.states:
            u = order.writer[e]
            for tail, line in order.before[e]:
                states[:, e] += t[:, line, None, None] * states[:, tail]
            written = torch.einsum("hn,hp->hnp", k[:, u], v[:, u])
            states[:, e] += s[:, e, None, None] * written
        return states

    @staticmethod
    def forward(ctx: Any, q, k, v, s, t, m, d, order: Order) -> Tensor:  # type: ignore[no-untyped-def, override]
        """The output, with inputs [heads, nodes or edges or line edges, ...]."""
        states = ReleasedLoop.run(q, k, v, s, t, order)
        out = (d * (q * k).sum(-1)).unsqueeze(-1) * v
        for e in order.states:
            w = order.reader[e]
            read = torch.einsum("hn,hnp->hp", q[:, w], states[:, e])
            out[:, w] += m[:, e, None] * read
        ctx.save_for_backward(q, k, v, s, t, m, d)
        ctx.order = order
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple:  # type: ignore[override]
        """The gradients of all inputs but the order."""
        q, k, v, s, t, m, d = ctx.saved_tensors
        order = ctx.order
        states = ReleasedLoop.run(q, k, v, s, t, order)
        back = torch.zeros_like(states)
        own, both = (q * k).sum(-1), (v * dy).sum(-1)
        dq, dk = (d * both).unsqueeze(-1) * k, (d * both).unsqueeze(-1) * q
        dv = (d * own).unsqueeze(-1) * dy
        ds, dt, dm = (torch.zeros_like(x) for x in (s, t, m))
        for e in reversed(order.states):
            u, w = order.writer[e], order.reader[e]
            state, gate = states[:, e], m[:, e, None]
            back[:, e] += gate[..., None] * torch.einsum(
                "hn,hp->hnp", q[:, w], dy[:, w]
            )
            dq[:, w] += gate * torch.einsum("hnp,hp->hn", state, dy[:, w])
            dm[:, e] += torch.einsum("hn,hnp,hp->h", q[:, w], state, dy[:, w])
            dk[:, u] += s[:, e, None] * torch.einsum("hnp,hp->hn", back[:, e], v[:, u])
            dv[:, u] += s[:, e, None] * torch.einsum("hnp,hn->hp", back[:, e], k[:, u])
            ds[:, e] += torch.einsum("hnp,hn,hp->h", back[:, e], k[:, u], v[:, u])
            for tail, line in order.before[e]:
                back[:, tail] += t[:, line, None, None] * back[:, e]
                dt[:, line] += torch.einsum("hnp,hnp->h", states[:, tail], back[:, e])
        return dq, dk, dv, ds, dt, dm, own * both, None


def released_scan(
    sizes: list[list[int]], orders: list[Order], *nodes: Tensor
) -> Tensor:
    """`stm_scan` by graph, with the sizes of its nodes, edges and line edges."""
    kinds = (0, 0, 0, 1, 2, 1, 0)
    split = [
        x.transpose(0, 1).split(sizes[kind], 1)
        for x, kind in zip(nodes, kinds, strict=True)
    ]
    outs = [
        ReleasedLoop.apply(q, k, v, s, t, m, d, order)
        for (q, k, v, s, t, m, d), order in zip(
            zip(*split, strict=True), orders, strict=True
        )
    ]
    return torch.cat(outs, 1).transpose(0, 1)


def one_by_one(
    edge_index: Tensor, lines: Tensor, batch: Tensor
) -> tuple[list[list[int]], list[Order]]:
    """Sizes and orders of the graphs of a batch, which must be sorted by graph."""
    graph = (batch, batch[edge_index[0]], batch[edge_index[0, lines[0]]])
    number = int(batch.max()) + 1
    counts = [x.bincount(minlength=number) for x in graph]
    first = [x.cumsum(0) - x for x in counts]
    orders = []
    for g in range(number):
        edge, line = edge_index[:, graph[1] == g], lines[:, graph[2] == g]
        states = edge_states(edge - first[0][g], line - first[1][g])
        orders.append(loop_order(states, torch.zeros_like(batch)))
    return [x.tolist() for x in counts], orders


# Operators ---------------------------------------------------------------------


class Nodes(NamedTuple):
    """The inputs of operators, in the order of `stm_scan`; all get gradients."""

    query: Tensor
    key: Tensor
    value: Tensor
    source: Tensor
    transition: Tensor
    mark: Tensor
    direct: Tensor


def random_nodes(
    num_nodes: int,
    gates: tuple[int, ...],
    turns: tuple[int, ...],
    size: int,
    dtype: torch.dtype,
    device: str,
) -> Nodes:
    """Random inputs; gates are [*gates, heads] and, in [0, 1], [*turns, heads]."""
    torch.manual_seed(1)
    query, key, value = torch.randn(3, num_nodes, HEADS, size)
    source, mark = torch.rand(2, *gates, HEADS)
    transition = torch.rand(*turns, HEADS)
    direct = torch.rand(num_nodes, HEADS)
    tensors = (query / size**0.5, key, value, source, transition, mark, direct)
    return Nodes(*(x.to(device, dtype).clone().requires_grad_() for x in tensors))


def step(function: Callable[[], Tensor], leaves: dict[str, Tensor], like: Tensor):
    torch.manual_seed(2)
    grad = torch.randn(like.shape).to(like.device, like.dtype)
    return Step(function, leaves, grad)


SIZES = {"peptides": 24, "grids": 16, "small-grids": 16, "sequences": 16}


def on_dag(
    way: Callable[..., Tensor] | str, graphs: Graphs, dtype: torch.dtype, device: str
) -> Step:
    """`way` takes the arguments of `stm_scan`, or is "loop" or "released loop"."""
    lines = line_graph(graphs.edge_index, graphs.num_nodes).edge_index
    x = random_nodes(
        graphs.num_nodes, (graphs.num_edges,), (lines.size(1),), SIZES["peptides"],
        dtype, device,
    )  # fmt: skip
    structure = (graphs.edge_index, lines, graphs.batch)
    if way == "loop":
        states = edge_states(graphs.edge_index, lines)
        run = partial(loop_scan, *x, loop_order(states, graphs.batch))
    elif way == "released loop":
        run = partial(released_scan, *one_by_one(*structure), *x)
    else:
        run = partial(way, *x, *(y.to(device) for y in structure))
    return step(run, x._asdict(), x.value)


def on_states(
    way: Callable[..., Tensor] | str, graphs: Graphs, dtype: torch.dtype, device: str
) -> Step:
    """`way` takes the arguments of `dag_scan`, on a graph whose nodes are states, or is
    "loop".
    """
    lines = line_graph(graphs.edge_index, graphs.num_nodes).edge_index
    states = graphs.num_edges
    x = random_nodes(states, (1,), (lines.size(1),), SIZES["peptides"], dtype, device)
    leaves = {k: y for k, y in x._asdict().items() if k in x._fields[:3]}
    leaves["edge_weight"] = x.transition
    batch = graphs.batch[graphs.edge_index[0]]
    if way == "loop":
        node = torch.arange(states)
        one = torch.ones_like(x.query[..., 0])
        gates = (one, x.transition, one, torch.zeros_like(one))
        order = loop_order(States(node, node, lines), batch)
        run = partial(loop_scan, *x[:3], *gates, order)
    else:
        run = partial(way, *x[:3], lines.to(device), x.transition, batch.to(device))
    return step(run, leaves, x.value)


def loop_stm(*args: Any, **_: Any) -> Tensor:
    """`stm_scan` as a loop over edges."""
    edge_index, lines, batch = args[7:10]
    if batch is None:
        batch = edge_index.new_zeros(args[0].size(0))
    order = loop_order(edge_states(edge_index, lines), batch)
    return loop_scan(*args[:7], order)


class GridStates(NamedTuple):
    """The states of grids, and the indices of their gates."""

    states: States
    source: Tensor
    mark: Tensor
    transition: Tensor


def all_grids(num_nodes: int, orientations: int, height: int, width: int) -> GridStates:
    count = num_nodes // (height * width)
    chosen = tuple(range(orientations))
    graph = StatesOfGrids((height, width) * count, chosen, on_nodes=False).graph
    parents, state = graph.parents, graph.state
    edges = np.empty((2, len(parents.col)), np.int64)
    edges[:, parents.entry] = state[parents.col], state[parents.row]
    assert graph.gates is not None
    writer, reader, edge_index, *gates = map(
        torch.from_numpy, (graph.writer, graph.reader, edges, *graph.gates)
    )
    return GridStates(States(writer, reader, edge_index), *gates)


def loop_grid(*args: Any, **_: Any) -> Tensor:
    """`grid_scan` as a loop over the edges of all orientations."""
    query, key, value, source, transition, mark, direct, height, width = args
    grids = all_grids(value.size(0), source.size(1), height, width)
    batch = torch.arange(value.size(0)) // (height * width)
    source = source.flatten(0, 2)[grids.source]
    transition = transition.flatten(0, 3)[grids.transition]
    mark = mark.flatten(0, 2)[grids.mark]
    order = loop_order(grids.states, batch)
    return loop_scan(query, key, value, source, transition, mark, direct, order)


class Split(NamedTuple):
    """An orientation of a grid as a general graph, and the indices of its gates."""

    edge_index: Tensor
    line_edge_index: Tensor
    source: Tensor
    transition: Tensor
    mark: Tensor


def orientations(grids: GridStates, number: int) -> Iterator[Split]:
    """The DAGs of the orientations, one after the other."""
    states = grids.states
    of_state = grids.source // 2 % number
    of_line = grids.transition // 4 % number
    rank = torch.empty_like(of_state)
    for o in range(number):
        state, line = (x == o for x in (of_state, of_line))
        rank[state] = torch.arange(int(state.sum()))
        yield Split(
            torch.stack([states.writer[state], states.reader[state]]),
            rank[states.edge_index[:, line]],
            grids.source[state],
            grids.transition[line],
            grids.mark[state],
        )


def split_grid(
    splits: list[Split], batch: Tensor, backend: str, form: str, *x: Tensor
) -> Tensor:
    """`grid_scan` as one `stm_scan` per orientation."""
    query, key, value, source, transition, mark, direct = x
    source, mark = source.flatten(0, 2), mark.flatten(0, 2)
    transition = transition.flatten(0, 3)
    out = torch.zeros_like(value)
    for o, split in enumerate(splits):
        out = out + stm_scan(
            query, key, value, source[split.source], transition[split.transition],
            mark[split.mark], direct if o == 0 else torch.zeros_like(direct),
            split.edge_index, split.line_edge_index, batch, form=form, backend=backend,
        )  # fmt: skip
    return out


def joined_grid(grids: GridStates, batch: Tensor, *x: Tensor) -> Tensor:
    """`grid_scan` as one `stm_scan` over the states of all orientations."""
    query, key, value, source, transition, mark, direct = x
    states = grids.states
    return stm_scan(
        query, key, value, source.flatten(0, 2)[grids.source],
        transition.flatten(0, 3)[grids.transition], mark.flatten(0, 2)[grids.mark],
        direct, torch.stack([states.writer, states.reader]), states.edge_index, batch,
    )  # fmt: skip


def on_grid(kind: str, graphs: Graphs, dtype: torch.dtype, device: str) -> Step:
    """A way to compute `grid_scan`, or attention on the same tokens."""
    number = ORIENTATIONS[graphs.part]
    V = graphs.num_nodes
    x = random_nodes(
        V, (V, number, 2), (V, number, 2, 2), SIZES[graphs.part], dtype, device
    )
    with torch.no_grad():  # long ranges, without growing states
        if graphs.part != "sequences":
            x.transition[:, :, 1] = 1 - x.transition[:, :, 0]
        else:
            x.transition.mul_(0.02).add_(0.97)
    leaves = x._asdict()
    sides = (graphs.height, graphs.width)
    run: Callable[[], Tensor]
    if kind == "loop":
        run = partial(loop_grid, *x, *sides)
    elif kind == "attention":
        leaves = {k: y for k, y in leaves.items() if k in x._fields[:3]}

        def run() -> Tensor:
            q, k, v = (y.transpose(0, 1).unsqueeze(0) for y in x[:3])
            return F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1)

    elif kind == "joined":
        grids = all_grids(V, number, *sides)
        run = partial(joined_grid, grids, graphs.batch, *x)
    elif kind.startswith("split"):
        splits = list(orientations(all_grids(V, number, *sides), number))
        backend, form = ("torch", "state") if "torch" in kind else ("auto", "auto")
        run = partial(split_grid, splits, graphs.batch, backend, form, *x)
    else:
        run = partial(grid_scan, *x, *sides, form=kind)
    return step(run, leaves, x.value)


# Layers ------------------------------------------------------------------------


class Attention(torch.nn.Module):
    """Multi-head attention within graphs of equal size."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(CHANNELS, HEADS, batch_first=True)

    def forward(self, x: Tensor, size: int) -> Tensor:
        """Attention for x [nodes, channels]."""
        x = x.view(-1, size, CHANNELS)
        return self.attention(x, x, x, need_weights=False)[0].flatten(0, 1)


def layer(kind: str, graphs: Graphs, dtype: torch.dtype, device: str) -> Step:
    """`kind` names a layer: a mode of pLSTM or chimera, then how to compute it."""
    on_grids = graphs.height > 0
    torch.manual_seed(0)
    module: torch.nn.Module
    arguments: tuple = (graphs.edge_index.to(device),)
    if kind == "GPSConv":
        module = GPSConv(CHANNELS, None, heads=HEADS, attn_type="multihead")
        arguments += (graphs.batch.to(device),)
    elif kind == "GATConv":
        module = GATConv(CHANNELS, CHANNELS // HEADS, heads=HEADS)
    elif kind == "attention":
        module, arguments = Attention(), (graphs.height * graphs.width,)
    else:
        mode, *way = kind.split()
        backend = "torch" if way == ["torch"] else "auto"
        form = "state" if way == ["torch"] else "auto"
        # Transitions near one: gradients through the steep part of tanh, at gates as
        # random as those below, are rounded more than is allowed in float32.
        on_graphs = partial(PLSTMConv, order="order", reach=None)
        make = partial(PLSTMGridConv if on_grids else on_graphs, mode=mode)
        if mode == "chimera":
            make = partial(ChimeraGridConv, state_channels=CHANNELS // HEADS)
        module = make(CHANNELS, heads=HEADS, form=form, backend=backend)
        for name, parameter in module.named_parameters():
            if name == "lin_gate.weight":  # zero in a new layer
                torch.nn.init.normal_(parameter, std=0.1)
        batch = graphs.batch.to(device)
        sides = (graphs.height, graphs.width)
        arguments += (None, batch, *(sides if on_grids else ()))
    module = module.to(device, dtype)
    torch.manual_seed(1)
    x = torch.randn(graphs.num_nodes, CHANNELS).to(device, dtype).requires_grad_()

    def run() -> Tensor:
        if "loop" not in kind:
            return module(x, *arguments)
        file, operator, loop = (
            (plstm_grid_conv, "grid_scan", loop_grid)
            if on_grids
            else (plstm_conv, "stm_scan", loop_stm)
        )
        with patch.object(file, operator, loop):
            return module(x, *arguments)

    return step(run, {"x": x} | dict(module.named_parameters()), x)


# Cases -------------------------------------------------------------------------


class Case(NamedTuple):
    """Something to measure, on a part of the workloads."""

    parts: tuple[str, ...]
    make: Callable[[Graphs, torch.dtype, str], Step]
    computes: str | None  #: a key of `EXACT`; None: nothing to compare with


#: Float64 results: by a loop over edges, and for many states by another backend.
EXACT: dict[str, tuple[Callable[..., Step], Callable[..., Step]]] = {
    "stm": (
        partial(on_dag, "loop"),
        partial(on_dag, partial(stm_scan, form="state", backend="torch")),
    ),
    "dag": (
        partial(on_states, "loop"),
        partial(on_states, partial(dag_scan, form="state", backend="torch")),
    ),
    "grid": (partial(on_grid, "loop"), partial(on_grid, "split torch")),
    "P": (partial(layer, "P loop"), partial(layer, "P torch")),
    "D": (partial(layer, "D loop"), partial(layer, "D torch")),
    "chimera": (partial(layer, "chimera torch"), partial(layer, "chimera torch")),
}

OPERATOR, GRIDS = ("peptides",), ("grids", "sequences")
LAYERS = ("layers", "grid-layers")
CASES: dict[str, Case] = {
    "stm_scan": Case(OPERATOR, partial(on_dag, stm_scan), "stm"),
    "dag_scan": Case(OPERATOR, partial(on_states, dag_scan), "dag"),
    "loop over edges": Case(OPERATOR, partial(on_dag, "loop"), "stm"),
    "loop as released": Case(OPERATOR, partial(on_dag, "released loop"), "stm"),
    "grid_scan": Case(GRIDS, partial(on_grid, "auto"), "grid"),
    "grid_scan, state": Case(("small-grids",), partial(on_grid, "state"), "grid"),
    "grid_scan, mask": Case(("small-grids",), partial(on_grid, "mask"), "grid"),
    "stm_scan by orientation": Case(GRIDS, partial(on_grid, "split"), "grid"),
    "stm_scan of all": Case(GRIDS, partial(on_grid, "joined"), "grid"),
    "attention": Case(GRIDS, partial(on_grid, "attention"), None),
    "PLSTMConv P": Case(LAYERS, partial(layer, "P"), "P"),
    "PLSTMConv D": Case(LAYERS, partial(layer, "D"), "D"),
    "GPSConv multihead": Case(("layers",), partial(layer, "GPSConv"), None),
    "GATConv": Case(("layers",), partial(layer, "GATConv"), None),
    "ChimeraGridConv": Case(("grid-layers",), partial(layer, "chimera"), "chimera"),
    "MultiheadAttention": Case(("grid-layers",), partial(layer, "attention"), None),
}


def names(graphs: Graphs) -> list[str]:
    """The cases of a workload."""
    return [name for name, case in CASES.items() if graphs.part in case.parts]


def check(graphs: Graphs, cases: list[str], device: str) -> list[dict[str, Any]]:
    """Compares outputs and all gradients, and ends the benchmark if one is wrong."""
    small = graphs.num_edges <= MAX_LOOP
    against = f"float64 {'loop over edges' if small else 'torch backend'}"
    expected: dict[str, dict[str, Tensor]] = {}
    rows = []
    for name in cases:
        case = CASES[name]
        if case.computes is None:
            continue
        show(f"exactness: {name} on {graphs.name}")
        if case.computes not in expected:
            exact = EXACT[case.computes][0 if small else 1]
            results = exact(graphs, torch.float64, "cpu").results()
            expected[case.computes] = {k: x.to(device) for k, x in results.items()}
        found = case.make(graphs, torch.float32, device).results()
        rows.append(compare(name, graphs.name, found, expected[case.computes], against))
    return rows


def tiny(part: str) -> Graphs:
    """A small workload of a part."""
    if part in ("peptides", "layers"):
        return on_peptides(part, planar(16, 30))
    return on_grids(part, 1 if part == "sequences" else 4, 5)


def pilot(name: str, pickled: bytes, device: str, threads: int) -> Pilot:
    """Runs a case once, in a fresh process on the CPU."""
    torch.set_num_threads(threads)
    graphs = pickle.loads(pickled)
    small = tiny(graphs.part)
    CASES[name].make(small, torch.float32, device)()
    if CASES[name].computes == "grid":  # larger grids may use either form
        for form in ("state", "mask"):
            on_grid(form, small, torch.float32, device)()
    return first_run(CASES[name].make(graphs, torch.float32, device))


# The parts of the benchmark ----------------------------------------------------


def workloads(args: Namespace) -> list[Graphs]:
    """The workloads of the requested parts."""
    found = []
    if not {"peptides", "layers"}.isdisjoint(args.only):
        real = list(peptides(args.root, [2] if args.smoke else [16, 64], args.smoke))
        for part in ("peptides", "layers"):
            if part in args.only:
                found += [on_peptides(part, x) for x in real]
    if "grids" in args.only:
        found += [on_grids("grids", side, side) for side in args.sides]
    if "small-grids" in args.only:
        small = ((3, 2),) if args.smoke else ((8, 64), (12, 32))
        found += [on_grids("small-grids", side, side, count) for side, count in small]
    if "sequences" in args.only:
        found += [on_grids("sequences", 1, length) for length in args.lengths]
    if "grid-layers" in args.only:
        sides, count = ([3], 2) if args.smoke else ([12, 24], 64)
        found += [on_grids("grid-layers", side, side, count) for side in sides]
    return found


def measure(args: Namespace) -> dict[str, Any]:
    """Compares, then times, all cases on the requested workloads."""
    chosen = workloads(args)
    errors, first, rounds = compare_and_time(
        chosen, CASES, names, tiny, check, pilot, args
    )
    rows = []
    for graphs in chosen:
        base = BASES[graphs.part]
        rows += time_rows(graphs, names(graphs), base, first, rounds)
    regular = [x for x in chosen if x.part in GRIDS]
    growth = growth_rows(regular, CASES, first, rounds)
    results = {"errors": errors, "layers": rows, "growth": growth}
    return results | {"rates": rates(args) if "structure" in args.only else []}


def rates(args: Namespace) -> list[dict[str, Any]]:
    """Line graphs and multitrees per second, for one graph after the other."""
    name, graphs = all_peptides(args.root, args.smoke)
    dags = [forward_edges(x.edge_index) for x in graphs[: 20 if args.smoke else 2000]]
    rows = rate(name, [(e, x.num_nodes) for e, x in zip(dags, graphs, strict=False)])
    side = 8 if args.smoke else 71
    first = next(orientations(all_grids(side * side, 1, side, side), 1))
    rows += rate(f"grid of {side} x {side}", [(first.edge_index, side * side)])
    large = planar(40 if args.smoke else 3345)
    edges = forward_edges(large.edge_index)
    rows += rate("planar graph", [(edges, large.num_nodes)])
    nodes, number = (30, 40) if args.smoke else (7000, 10_000)
    edges = torch.randint(nodes, (2, number), generator=torch.manual_seed(0))
    edges = edges[:, edges[0] != edges[1]].sort(dim=0).values
    return rows + rate("random DAG", [(edges, nodes)])


def rate(name: str, graphs: list[tuple[Tensor, int]]) -> list[dict[str, Any]]:
    """How fast structure is computed: the best of three passes over all graphs."""
    show(f"structure: {name}")
    lines = [line_graph(*graph).edge_index for graph in graphs]
    states = [edge_index.size(1) for edge_index, _ in graphs]
    jobs: dict[str, Callable[[], Any]] = {
        "line_graph": lambda: [line_graph(*graph) for graph in graphs],
        "multitree": lambda: list(map(multitree, lines, states)),
    }
    rows = []
    for operator, job in jobs.items():
        times = []
        for _ in range(3):
            start = time.perf_counter()
            job()
            times.append(time.perf_counter() - start)
        row = {"name": f"{operator}, {name}", "graphs": len(graphs)}
        row |= {"edges": sum(states), "seconds": min(times)}
        rows.append(row | {"rate": len(graphs) / min(times)})
    return rows


def targets(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets for scans, with measured values."""
    at_most: Figures = {}
    by_stm = {
        row["case"]: row.get("by_auto")
        for row in results["layers"]
        if row["part"] == "peptides" and row["workload"].endswith("batch of 64")
    }
    by_dag = by_stm.get("dag_scan")
    at_most["batch of 64: stm_scan / dag_scan"] = 1.5, by_dag and 1 / by_dag
    at_least: Figures = {
        f"batch of 64: {name} / stm_scan": (100, by_stm.get(name))
        for name in ("loop over edges", "loop as released")
    }
    steps = {
        row["from"]: row
        for row in results["growth"]
        if row["part"] == "grids" and row["case"] == "grid_scan"
    }
    for side in (16, 32, 64):
        row = steps.get(side**2, {"time": None, "memory": None})
        text = f"grid_scan, {side} -> {2 * side} a side, growth of"
        at_most[f"{text} time"] = 4.5, row["time"]
        at_most[f"{text} memory"] = 4.5, row["memory"]
    errors = [row["worst"] for row in results["errors"]]
    at_most["largest relative error"] = 1e-5, max(errors, default=None)
    return verdicts(at_most, at_least)


def parse(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    add_options(parser, PARTS, CASES)
    parser.add_argument(
        "--sides", nargs="+", type=int, help="of the grids (default: 16 32 64 128)"
    )
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        help="of the sequences (default: 1024 4096 16384 65536)",
    )
    args = parser.parse_args(argv)
    if args.sides is None:
        args.sides = [3, 6] if args.smoke else [16, 32, 64, 128]
    if args.lengths is None:
        args.lengths = [8, 32] if args.smoke else [1024, 4096, 16384, 65536]
    settle(args, "scanning")
    return args


def main() -> None:
    settings = ("only", "cases", "sides", "lengths", "device", "threads", "repeats")
    run(parse(), CASES, (*settings, "limit"), measure, targets)


if __name__ == "__main__":
    main()
