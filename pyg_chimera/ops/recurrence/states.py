"""The graph of states that a scan runs on: nodes or edges of DAGs or grids."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.checks import check_edge_index, check_rank
from pyg_chimera.ops.common.errors import CycleError
from pyg_chimera.ops.recurrence.chunk_form import PathStates
from pyg_chimera.ops.structure.cache import remembered, table
from pyg_chimera.ops.structure.csr import grouped, sorted_rows, to_numpy
from pyg_chimera.ops.structure.distance import connected_components
from pyg_chimera.ops.structure.grid import WAYS, Grids
from pyg_chimera.ops.structure.line_graph import check_line_edges
from pyg_chimera.ops.structure.symbolic_factor import blocks_of
from pyg_chimera.ops.structure.topological import find_cycle, topological_rank

__all__ = [
    "NOT_PATHS",
    "Extents",
    "GridStates",
    "StateGraph",
    "edge_states",
    "grid_states",
    "node_states",
]

#: The error message for form 'chunk' on other graphs.
NOT_PATHS = (
    "form='chunk' is for paths, where each state follows on at most one other and is "
    "followed by at most one; use form='auto'"
)


class Extents(NamedTuple):
    """The size of each of ``T`` blocks."""

    states: np.ndarray  #: [T]
    entries: np.ndarray  #: [T], edges between states
    nodes: np.ndarray  #: [T]


class BlockNodes(NamedTuple):
    """The nodes of the states of each block, for ``T`` blocks and ``S`` states."""

    ptr: np.ndarray  #: [T + 1], first entry of each block in ``node``
    node: np.ndarray  #: the nodes, block by block
    writer: np.ndarray  #: [S], by position: the writer, as an index within the block
    reader: np.ndarray  #: [S], the same for the reader


@dataclass(frozen=True)
class StateGraph:
    """States, each written and read by one node each, and the edges between them.

    States are renumbered by *position*: by block (a graph of the batch, or without a
    batch a connected component), within a block by component, and within a component
    in topological order. All arrays are int64: ``V`` nodes, ``S`` states, ``L`` edges
    between states, ``T`` blocks, ``C`` components.
    """

    num_nodes: int
    writer: np.ndarray  #: [S], the node that writes each state
    reader: np.ndarray  #: [S], the node that reads each state
    ptr: np.ndarray  #: [T + 1], first position of each block
    component_ptr: np.ndarray  #: [C + 1], first position of each component
    block_component: np.ndarray  #: [T + 1], first component of each block
    bandwidth: np.ndarray  #: [C], the most positions that an edge leads back
    state: np.ndarray  #: [S], state at each position
    parent_ptr: np.ndarray  #: [S + 1], first of the edges into each position, ...
    parent: np.ndarray  #: [L], ... the positions they come from, ascending, ...
    edge: np.ndarray  #: [L], ... and their numbers
    child_ptr: np.ndarray  #: [S + 1], first of the edges out of each position, ...
    child: np.ndarray  #: [L], ... the positions they lead to, ascending, ...
    child_entry: np.ndarray  #: [L], ... and their indices in ``parent``
    #: For grids: indices of the states' and edges' gates (source, mark, transition).
    gates: tuple[np.ndarray, np.ndarray | None, np.ndarray] | None = None
    tables: dict[Any, Any] = field(default_factory=dict)  #: what backends derive

    @property
    def graph(self) -> "StateGraph":
        """Itself, as `GridStates` has such an attribute too."""
        return self

    @property
    def extents(self) -> Extents:
        """The sizes of the blocks."""
        return Extents(self.sizes, self.entries, np.diff(self.nodes.ptr))

    @property
    def sizes(self) -> np.ndarray:
        """The number of states of each block."""
        return np.diff(self.ptr)

    @property
    def entries(self) -> np.ndarray:
        """The number of edges of each block."""
        return np.diff(self.parent_ptr[self.ptr])

    @property
    def block_bandwidth(self) -> np.ndarray:
        """The largest bandwidth in each block, 0 if it has no component."""
        out = np.zeros(len(self.sizes), np.int64)
        block = np.repeat(np.arange(len(out)), np.diff(self.block_component))
        np.maximum.at(out, block, self.bandwidth)
        return out

    @property
    def nbytes(self) -> int:
        """Approximate bytes of memory, including derived tables."""
        arrays = (x for x in vars(self).values() if isinstance(x, np.ndarray))
        return 2 * sum(x.nbytes for x in arrays)

    @cached_property
    def nodes(self) -> BlockNodes:
        """The nodes of each block."""
        span = max(self.num_nodes, 1)
        block = np.repeat(np.arange(len(self.sizes)), self.sizes)
        ends = [block * span + x[self.state] for x in (self.writer, self.reader)]
        keys, places = np.unique(np.concatenate(ends), return_inverse=True)
        ptr = np.searchsorted(keys // span, np.arange(len(self.sizes) + 1))
        writer, reader = places.reshape(2, -1) - ptr[block]
        return BlockNodes(ptr, keys % span, writer, reader)

    @property
    def are_paths(self) -> bool:
        """Whether each component is a path."""
        steps = len(self.state) - len(self.bandwidth)
        return len(self.parent) == steps and self.bandwidth.max(initial=0) <= 1

    @property
    def paths(self) -> PathStates:
        """The components, which must be paths."""
        return PathStates(
            self.block_component,
            self.component_ptr,
            self.state,
            self.writer,
            self.reader,
        )

    def gates_of(self, inputs: Any) -> list[Tensor]:
        """Source and mark [S, heads] of states, transition [L, heads] of edges."""
        shape = (self.writer.shape[0], inputs.value.size(1))
        gates = (inputs.source, inputs.mark, inputs.transition)
        places = table(_gates, self, inputs.value.device)
        return [
            inputs.value.new_ones(shape)  # a gate that is not given
            if x is None
            else x
            if index is None
            else x.index_select(0, index)
            for x, index in zip(gates, places, strict=True)
        ]

    def gradients(self, inputs: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        """The gradients of the inputs, given those of query, key, value and gates."""
        likes = (inputs.source, inputs.mark, inputs.transition)
        places = table(_gates, self, inputs.value.device)
        gates = [
            grad
            if index is None
            else torch.zeros_like(x).index_copy_(0, index, grad)  # unused gates: 0
            for x, index, grad in zip(likes, places, grads[3:], strict=True)
            if x is not None
        ]
        return *grads[:3], *gates


def _gates(graph: StateGraph, device: torch.device) -> list[Tensor | None]:
    """Indices of the gates of states and edges; None if they are all, in order."""
    return [
        None if x is None else torch.from_numpy(x).to(device)
        for x in graph.gates or (None, None, None)
    ]


# ----------------------------------------------------------------------------- of DAGs


def node_states(
    edge_index: Tensor, batch: Tensor | None, rank: Tensor | None, num_nodes: int
) -> StateGraph:
    """A state for each node of a DAG."""
    check_edge_index(edge_index, num_nodes)
    _, _, block = blocks_of(edge_index, batch, num_nodes)
    by_rank = None
    if rank is not None:
        check_rank(rank, num_nodes)
        by_rank = to_numpy(rank)
        _check_topological(edge_index, by_rank, num_nodes)
    node = np.arange(num_nodes)
    return _state_graph(num_nodes, node, node, edge_index, block, by_rank)


def edge_states(
    edge_index: Tensor,
    line_edge_index: Tensor,
    batch: Tensor | None,
    num_nodes: int,
    num_components: int,
) -> StateGraph:
    """A state for each edge and component of a DAG; line edges join all components."""
    check_edge_index(edge_index, num_nodes)
    check_line_edges(line_edge_index, edge_index.size(1))
    _check_line_graph(edge_index, line_edge_index)
    _, _, block = blocks_of(edge_index, batch, num_nodes)
    J = num_components
    writer, reader = (np.repeat(x, J) for x in to_numpy(edge_index))
    component = np.arange(J)
    tail, head = np.broadcast_arrays(
        to_numpy(line_edge_index[0]).reshape(-1, 1, 1) * J + component,
        to_numpy(line_edge_index[1]).reshape(-1, 1, 1) * J + component[:, None],
    )
    edges = torch.from_numpy(np.stack([tail.ravel(), head.ravel()]))
    try:
        return _state_graph(num_nodes, writer, reader, edges, block[writer])
    except CycleError as error:
        around = [state // J for state in error.cycle]
        raise CycleError(edge_index[0, around].tolist()) from None


def _state_graph(
    num_nodes: int,
    writer: np.ndarray,
    reader: np.ndarray,
    edges: Tensor,
    block: np.ndarray,
    rank: np.ndarray | None = None,
    gates: tuple[np.ndarray, np.ndarray | None, np.ndarray] | None = None,
) -> StateGraph:
    """Orders states; `edges` lead between states, `block` has one entry per state."""
    num_states = writer.shape[0]
    if rank is None:
        rank = to_numpy(topological_rank(edges, num_states))
    component = to_numpy(connected_components(edges, num_states))
    state = np.lexsort((rank, component, block))
    position = np.empty(num_states, np.int64)
    position[state] = np.arange(num_states)
    num_blocks = int(block.max(initial=-1)) + 1
    _, ptr = grouped(block, num_blocks)
    first = np.flatnonzero(np.diff(component[state], prepend=-1))
    component_ptr = np.append(first, num_states)

    tail, head = position[to_numpy(edges)]
    parents = sorted_rows(head, tail, num_states)
    children = sorted_rows(parents.col, parents.row, num_states)
    bandwidth = np.zeros(len(first), np.int64)
    inside = np.searchsorted(component_ptr, parents.row, side="right") - 1
    np.maximum.at(bandwidth, inside, parents.row - parents.col)
    return StateGraph(
        num_nodes=num_nodes,
        writer=writer,
        reader=reader,
        ptr=ptr,
        component_ptr=component_ptr,
        block_component=np.searchsorted(component_ptr, ptr),
        bandwidth=bandwidth,
        state=state,
        parent_ptr=parents.ptr,
        parent=parents.col,
        edge=parents.entry,
        child_ptr=children.ptr,
        child=children.col,
        child_entry=children.entry,
        gates=gates,
    )


def _check_topological(edge_index: Tensor, rank: np.ndarray, num_nodes: int) -> None:
    col, row = to_numpy(edge_index)
    wrong = np.flatnonzero(rank[col] >= rank[row])
    if wrong.size:
        cycle = find_cycle(edge_index.cpu(), num_nodes)
        if cycle is not None:
            raise CycleError(cycle)
        e = int(wrong[0])
        raise ValueError(
            f"'rank' must grow along every edge, but edge {e} goes from node {col[e]} "
            f"(rank {rank[col[e]]}) to node {row[e]} (rank {rank[row[e]]})"
        )


def _check_line_graph(edge_index: Tensor, line_edge_index: Tensor) -> None:
    tail, head = line_edge_index
    wrong = (edge_index[1, tail] != edge_index[0, head]).nonzero()
    if wrong.numel() == 0:
        return
    x = int(wrong[0])
    a, b = int(tail[x]), int(head[x])
    shown = [
        f"edge {e} ({' -> '.join(map(str, edge_index[:, e].tolist()))})" for e in (a, b)
    ]
    backwards = bool(edge_index[1, b] == edge_index[0, a])
    raise ValueError(
        f"'line_edge_index' must lead from an edge to one that begins where it ends, "
        f"but line edge {x} leads from {shown[0]} to {shown[1]}"
        + (
            ": it runs against the graph. Is row 0 the edge that is left?"
            if backwards
            else ". Is it of another edge list, or of another order of its edges? "
            "'pyg_chimera.ops.line_graph' makes it anew"
        )
    )


# ---------------------------------------------------------------------------- of grids


class _Grid(NamedTuple):
    """The states of one grid, and the indices of their gates."""

    writer: np.ndarray
    reader: np.ndarray
    edges: np.ndarray  #: [2, L]
    source: np.ndarray  #: [S], in a flattened [V, O, 2], or on nodes [V, O]
    mark: np.ndarray  #: [S], likewise, or on nodes unused
    transition: np.ndarray  #: [L], in a flattened [V, O, 2, 2], or on nodes [V, O, 2]


def _kept(make: Callable[..., _Grid]) -> Callable[..., _Grid]:
    """Caches the result for small grids, of which batches have many."""
    keep = lru_cache(maxsize=64)(make)

    def of_grid(height: int, width: int, orientations: tuple[int, ...]) -> _Grid:
        small = height * width <= 4096
        return (keep if small else make)(height, width, orientations)

    return of_grid


@_kept
def _nodes_of_grid(height: int, width: int, orientations: tuple[int, ...]) -> _Grid:
    """A state for each orientation of each node."""
    node = np.arange(height * width).reshape(height, width)
    num_orientations = len(orientations)
    states, edges, gates = [node[:0, 0]], [np.empty((2, 0), np.int64)], [node[:0, 0]]
    for o, orientation in enumerate(orientations):
        states.append(node.ravel() * num_orientations + o)
        for d, (step, axis) in enumerate(zip(WAYS[orientation], (1, 0), strict=True)):
            ends = [np.delete(node, end, axis).ravel() for end in (-1, 0)]
            tail, head = ends if step > 0 else ends[::-1]
            edges.append(np.stack([tail, head]) + o * node.size)
            gates.append(2 * (head * num_orientations + o) + d)
    source, transition = np.concatenate(states), np.concatenate(gates)
    owner = np.tile(node.ravel(), num_orientations)
    edge_list = np.concatenate(edges, axis=1)
    return _Grid(owner, owner, edge_list, source, source[:0], transition)


@_kept
def _edges_of_grid(height: int, width: int, orientations: tuple[int, ...]) -> _Grid:
    """A state for each edge in each orientation."""
    node = np.arange(height * width).reshape(height, width)
    num_orientations = len(orientations)
    states: list[list[np.ndarray]] = [[], [], [], []]
    edges: list[list[np.ndarray]] = [[], [], []]
    first = 0
    for o, orientation in enumerate(orientations):
        right, down = WAYS[orientation]
        leaving, arriving = [], []  # per direction: each node's state, or -1
        for d, (step, axis) in enumerate(((right, 1), (down, 0))):
            ends = [np.delete(node, end, axis).ravel() for end in (-1, 0)]
            writer, reader = ends if step > 0 else ends[::-1]
            state = first + np.arange(writer.size)
            first += writer.size
            out, arrived = np.full((2, node.size), -1)
            out[writer], arrived[reader] = state, state
            leaving.append(out)
            arriving.append(arrived)
            gate = (2 * num_orientations, 2 * o + d)
            columns = (
                writer,
                reader,
                writer * gate[0] + gate[1],
                reader * gate[0] + gate[1],
            )
            for column, x in zip(states, columns, strict=True):
                column.append(x)
        for to in range(2):
            for origin in range(2):
                both = (leaving[to] >= 0) & (arriving[origin] >= 0)
                at = np.flatnonzero(both) * num_orientations + o
                turn = (arriving[origin][both], leaving[to][both])
                for column, x in zip(
                    edges, (*turn, 4 * at + 2 * to + origin), strict=True
                ):
                    column.append(x)
    writer, reader, source, mark = map(np.concatenate, states)
    tail, head, transition = map(np.concatenate, edges)
    return _Grid(writer, reader, np.stack([tail, head]), source, mark, transition)


@dataclass(frozen=True)
class GridStates:
    """States on the edges or the nodes of grids, without a list of them.

    Each orientation directs the edges of a grid to a DAG; each grid is a block.
    """

    shapes: tuple[int, ...]  #: height, width, height, width, ...
    orientations: tuple[int, ...]
    on_nodes: bool  #: whether states are on nodes, rather than on edges

    @cached_property
    def grids(self) -> Grids:
        """Sizes and first nodes of the grids."""
        return Grids.of(self.shapes)

    @property
    def graph(self) -> StateGraph:
        """The states as a graph, for code that does not handle grids."""
        return remembered(
            _grid_graph, (), self.shapes, self.orientations, self.on_nodes
        )

    @cached_property
    def extents(self) -> Extents:
        """The sizes of the blocks."""
        h, w, _ = self.grids
        edges = h * (w - 1) + (h - 1) * w
        straight = h * np.maximum(0, w - 2) + w * np.maximum(0, h - 2)
        lines = straight + 2 * (h - 1) * (w - 1)
        states, entries = (h * w, edges) if self.on_nodes else (edges, lines)
        times = len(self.orientations)
        return Extents(times * states, times * entries, h * w)

    @cached_property
    def are_paths(self) -> bool:
        """Whether each grid is one row or one column."""
        return bool((np.minimum(self.grids.height, self.grids.width) == 1).all())


def grid_states(
    sizes: tuple[int, ...], orientations: tuple[int, ...], on_nodes: bool
) -> GridStates:
    """The states of grids with `sizes` height, width, height, width, ..."""
    return GridStates(sizes, orientations, on_nodes)


def _grid_graph(
    sizes: tuple[int, ...], orientations: tuple[int, ...], on_nodes: bool
) -> StateGraph:
    pairs = list(zip(sizes[::2], sizes[1::2], strict=True))
    listed = _nodes_of_grid if on_nodes else _edges_of_grid
    parts = [listed(*pair, orientations) for pair in pairs]
    nodes = np.cumsum([0, *(height * width for height, width in pairs)])
    states = np.cumsum([0, *(x.writer.size for x in parts)])
    gates = len(orientations) * (1 if on_nodes else 2)

    def joined(name: str, offset: np.ndarray) -> np.ndarray:
        arrays = [getattr(x, name) + n for x, n in zip(parts, offset, strict=False)]
        empty = np.empty((2, 0) if name == "edges" else 0, np.int64)
        return np.concatenate([empty, *arrays], axis=-1)

    block = np.repeat(np.arange(len(parts)), np.diff(states))
    return _state_graph(
        int(nodes[-1]),
        joined("writer", nodes),
        joined("reader", nodes),
        torch.from_numpy(joined("edges", states)),
        block,
        gates=(
            joined("source", nodes * gates),
            None if on_nodes else joined("mark", nodes * gates),
            joined("transition", nodes * gates * 2),
        ),
    )
