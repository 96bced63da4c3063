"""The graph of states that a scan runs on: nodes or edges of DAGs or grids."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.cache import remembered, table
from pyg_chimera.ops.common.checks import check_edge_index, check_rank
from pyg_chimera.ops.common.errors import CycleError
from pyg_chimera.ops.recurrence.plan.paths import PathStates
from pyg_chimera.ops.structure.csr import Rows, grouped, inverse, sorted_rows, to_numpy
from pyg_chimera.ops.structure.distance import connected_components
from pyg_chimera.ops.structure.grid import WAYS, Grids
from pyg_chimera.ops.structure.line_graph import check_line_edges
from pyg_chimera.ops.structure.symbolic_factor import block_of
from pyg_chimera.ops.structure.topological import find_cycle, topological_rank

#: The error message for form 'chunk' on other graphs.
NOT_PATHS = (
    "form='chunk' is for paths, where each state follows on at most one other and is "
    "followed by at most one; use form='auto'"
)


class BlockNodes(NamedTuple):
    """The nodes of the states of each block, for ``T`` blocks and ``S`` states."""

    ptr: np.ndarray  #: [T + 1], first entry of each block in ``node``
    node: np.ndarray  #: the nodes, block by block
    writer: np.ndarray  #: [S], by position: the writer, as an index within the block
    reader: np.ndarray  #: [S], the same for the reader


class StateArrays(NamedTuple):
    """The arrays of a `StateGraph` that kernels read."""

    block: np.ndarray  #: [T + 1], first component of each block
    ptr: np.ndarray  #: [C + 1], first position of each component
    bandwidth: np.ndarray  #: [C], the most positions that an edge leads back
    state: np.ndarray  #: [S], state at each position
    writer: np.ndarray  #: [S], the node that writes each state
    reader: np.ndarray  #: [S], the node that reads each state
    parents: Rows  #: the edges into each position, and the places of their weights
    children: Rows  #: those out of each position, and the places of their weights


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
    parents: Rows  #: the edges into each position, from which positions, and numbers
    children: Rows  #: those out of each position, and their indices in ``parents``
    #: For grids: indices of the states' and edges' gates (source, mark, transition).
    gates: tuple[np.ndarray, np.ndarray | None, np.ndarray] | None = None
    tables: dict[Any, Any] = field(default_factory=dict)  #: what backends derive

    @property
    def graph(self) -> "StateGraph":
        """Itself, as `GridStates` has such an attribute too."""
        return self

    @property
    def sizes(self) -> np.ndarray:
        """The number of states of each block."""
        return np.diff(self.ptr)

    @property
    def entries(self) -> np.ndarray:
        """The number of edges of each block."""
        return np.diff(self.parents.ptr[self.ptr])

    @property
    def nbytes(self) -> int:
        """Approximate bytes of memory, including derived tables."""
        return 2 * 8 * (8 * len(self.state) + 4 * len(self.parents.col))

    def arrays(self, by_edge: bool) -> StateArrays:
        """What kernels read, for weights by edge, or in the order of `parents`."""
        if (StateArrays, by_edge) not in self.tables:
            parents, children = self.parents, self.children
            if by_edge:
                children = children._replace(entry=parents.entry[children.entry])
            else:
                parents = parents._replace(entry=np.arange(len(parents.entry)))
            self.tables[StateArrays, by_edge] = StateArrays(
                self.block_component,
                self.component_ptr,
                self.bandwidth,
                self.state,
                self.writer,
                self.reader,
                parents,
                children,
            )
        return self.tables[StateArrays, by_edge]

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
        return len(self.parents.col) == steps and self.bandwidth.max(initial=0) <= 1

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
    block = block_of(edge_index, batch, num_nodes)
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
    block = block_of(edge_index, batch, num_nodes)
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
    position = inverse(state)
    num_blocks = int(block.max(initial=-1)) + 1
    _, ptr = grouped(block, num_blocks)
    first = np.flatnonzero(np.diff(component[state], prepend=-1))
    component_ptr = np.append(first, num_states)

    tail, head = position[to_numpy(edges)]
    parents = sorted_rows(head, tail, num_states)
    row = parents.row
    children = sorted_rows(parents.col, row, num_states)
    bandwidth = np.zeros(len(first), np.int64)
    inside = np.searchsorted(component_ptr, row, side="right") - 1
    np.maximum.at(bandwidth, inside, row - parents.col)
    return StateGraph(
        num_nodes=num_nodes,
        writer=writer,
        reader=reader,
        ptr=ptr,
        component_ptr=component_ptr,
        block_component=np.searchsorted(component_ptr, ptr),
        bandwidth=bandwidth,
        state=state,
        parents=parents,
        children=children,
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


@dataclass(frozen=True)
class GridStates:
    """States on the edges or the nodes of grids, without a list of them.

    Each orientation directs the edges of a grid to a DAG; each grid is a block.
    """

    shapes: tuple[int, ...]  #: height, width, height, width, ...
    orientations: tuple[int, ...]
    on_nodes: bool  #: whether states are on nodes, rather than on edges
    #: What is derived of them.
    tables: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

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
    def sizes(self) -> np.ndarray:
        """The number of states of each grid."""
        h, w, _ = self.grids
        states = h * w if self.on_nodes else h * (w - 1) + (h - 1) * w
        return len(self.orientations) * states

    @cached_property
    def entries(self) -> np.ndarray:
        """The number of edges between states of each grid."""
        h, w, _ = self.grids
        edges = h * (w - 1) + (h - 1) * w
        if not self.on_nodes:
            straight = h * np.maximum(0, w - 2) + w * np.maximum(0, h - 2)
            edges = straight + 2 * (h - 1) * (w - 1)
        return len(self.orientations) * edges

    @cached_property
    def are_paths(self) -> bool:
        """Whether each grid is one row or one column."""
        return bool((np.minimum(self.grids.height, self.grids.width) == 1).all())


def _grid_graph(
    sizes: tuple[int, ...], orientations: tuple[int, ...], on_nodes: bool
) -> StateGraph:
    grids, number = Grids.of(sizes), len(orientations)
    grid = np.repeat(np.arange(len(grids.first)), grids.height * grids.width)
    node, height, width = np.arange(len(grid)), grids.height[grid], grids.width[grid]
    row, column = np.divmod(node - grids.first[grid], width)
    num_nodes, one = len(node), np.ones_like(node)
    # A place is a node in an orientation; its gates follow each other.
    edges = [np.empty((3, 0), np.int64)]
    for o, orientation in enumerate(orientations):
        sides = ((column, width, one), (row, height, width))
        for direction, way in enumerate(WAYS[orientation]):
            at, end, step = sides[direction]
            tail = np.flatnonzero(at < end - 1 if way > 0 else at > 0)
            head, directions = tail + way * step[tail], np.full_like(tail, direction)
            first = o * num_nodes
            edges.append(np.stack([first + tail, first + head, directions]))
    tail, head, direction = np.concatenate(edges, axis=1)
    gate = (node * number + np.arange(number)[:, None]).ravel()
    if on_nodes:
        owner, block = np.tile(node, number), np.tile(grid, number)
        ends, gates = np.stack([tail, head]), (gate, None, 2 * gate[head] + direction)
        lines = torch.from_numpy(ends)
        return _state_graph(num_nodes, owner, owner, lines, block, gates=gates)
    # The edge that leaves, or arrives at, each place in each direction, or -1.
    leaving, arriving = np.full((2, 2, len(gate)), -1)
    leaving[direction, tail] = arriving[direction, head] = np.arange(len(tail))
    exist = (leaving[:, None] >= 0) & (arriving >= 0)
    turn, place = np.divmod(np.flatnonzero(exist), max(len(gate), 1))
    turns = np.stack([arriving[turn % 2, place], leaving[turn // 2, place]])
    lines = torch.from_numpy(turns)
    source, mark = 2 * gate[tail] + direction, 2 * gate[head] + direction
    gates = (source, mark, 4 * gate[place] + turn)
    writer, reader = tail % num_nodes, head % num_nodes
    return _state_graph(num_nodes, writer, reader, lines, grid[writer], gates=gates)
