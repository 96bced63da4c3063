"""The symbolic factorisation of I - A for a batch of graphs, and its blocks."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from pyg_chimera.ops.common.checks import (
    check_batch,
    check_edge_index,
    check_rank,
    check_within_graphs,
)
from pyg_chimera.ops.common.compilation import compiled
from pyg_chimera.ops.structure.csr import (
    adjacency,
    compress,
    grouped,
    inverse,
    to_numpy,
)
from pyg_chimera.ops.structure.distance import connected_components
from pyg_chimera.ops.structure.elimination import (
    elimination_order,
    fill_pattern,
    postorder,
)
from pyg_chimera.ops.structure.topological import traversal


@dataclass(frozen=True, kw_only=True)
class Blocks:
    r"""The graphs of a batch, each a block of a block-diagonal :math:`I - A`.

    Nodes are renumbered by *position*, block by block (a block is a graph of the batch,
    or without a batch a connected component).

    All arrays are int64: ``V`` nodes, ``E`` edges, ``T`` blocks.
    """

    ptr: np.ndarray  #: [T + 1], first position of each block
    node: np.ndarray  #: [V], node at each position
    edge_ptr: np.ndarray  #: [T + 1], first of each block's edges in ...
    edge: np.ndarray  #: [E], ... the edges, block by block
    edge_row: np.ndarray  #: [E], position of the target of ``edge[x]``
    edge_col: np.ndarray  #: [E], position of the source of ``edge[x]``
    tables: dict[Any, Any] = field(default_factory=dict)  #: what backends derive

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return self.node.shape[0]

    @property
    def num_edges(self) -> int:
        """The number of edges."""
        return self.edge.shape[0]

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of nodes of each block."""
        return np.diff(self.ptr)

    def with_room(self, room: float) -> "Blocks":
        """The same, whose tables are made with room for those of larger graphs."""
        return replace(self, tables={"room": room})


@dataclass(frozen=True, kw_only=True)
class SymbolicFactor(Blocks):
    r"""The pattern of :math:`I - A = L U` for a batch of graphs.

    Within a block, positions are in elimination order, which is a postorder of the
    elimination tree: subtrees are contiguous. L and U share one pattern of ``F``
    entries: entry :obj:`x` of row :math:`i` is :math:`L_{ij}` and :math:`U_{ji}` with
    :obj:`j = lower_col[x]` :math:`< i`.
    """

    lower_ptr: np.ndarray  #: [V + 1], first entry of each row
    lower_col: np.ndarray  #: [F], column of each entry, ascending in a row
    upper_ptr: np.ndarray  #: [V + 1], the same entries by column: bounds ...
    upper_row: np.ndarray  #: [F], ... rows, ascending ...
    upper_entry: np.ndarray  #: [F], ... and indices in ``lower_col``
    slot: np.ndarray  #: [E], index of each edge in [diagonal | L | U], V + 2 F long

    @property
    def num_entries(self) -> int:
        """The number of entries of L below the diagonal."""
        return self.lower_col.shape[0]

    @property
    def entries(self) -> np.ndarray:
        """The number of entries of each block."""
        return np.diff(self.lower_ptr[self.ptr])

    @property
    def updates(self) -> np.ndarray:
        """The number of multiply-adds that factorise each block."""
        columns = np.diff(self.upper_ptr).astype(float)
        return np.diff(np.append(0.0, np.cumsum(columns**2))[self.ptr])

    @property
    def parent(self) -> np.ndarray:
        """[V], the parent of each position in the elimination tree, or -1."""
        parent, inner = np.full(self.num_nodes, -1), np.diff(self.upper_ptr) > 0
        parent[inner] = self.upper_row[self.upper_ptr[:-1][inner]]
        return parent

    def roots(self) -> np.ndarray:
        """The root of each position's tree [V], the last position of its component."""
        return _roots(self.parent)


#: Most entries of factors worth their while: the larger of this many per edge and in
#: total.
_MANY_AN_EDGE, _MANY = 16, 1 << 24
_ALL = np.iinfo(np.int64).max


def many(num_edges: int) -> int:
    """More entries than factors should have on the CPU, for a number of edges."""
    return max(_MANY, _MANY_AN_EDGE * num_edges)


def symbolic_factor(
    edge_index: Tensor,
    batch: Tensor | None,
    rank: Tensor | None,
    num_nodes: int,
    most: int = _ALL,
) -> Blocks:
    r"""Orders the nodes of a batch of graphs and finds the pattern of its factors.

    Args:
        edge_index (torch.Tensor): The edges, :math:`[2, |\mathcal{E}|]`, integer.
        batch (torch.Tensor, optional): The graph of each node, integer
            :math:`[|\mathcal{V}|]`, sorted or not. Without it, the weakly connected
            components are the blocks.
        rank (torch.Tensor, optional): The elimination rank of each node within its
            graph. Computed if absent.
        num_nodes (int): The number of nodes.
        most (int, optional): The number of entries above which it gives up.

    Returns:
        SymbolicFactor: The factors' pattern, or only :obj:`Blocks` if it gave up.

    Raises:
        ValueError: If a shape is wrong, an index is out of range, or an edge joins two
            graphs of the batch.
        TypeError: If :obj:`edge_index`, :obj:`batch` or :obj:`rank` is not integer.
    """
    check_edge_index(edge_index, num_nodes)
    col, row = to_numpy(edge_index)
    if rank is None:
        by_rank = elimination_order(row, col, num_nodes, most=most)
        if by_rank is None:
            return graph_blocks(edge_index, batch, num_nodes)
    else:
        check_rank(rank, num_nodes)
        by_rank = to_numpy(rank)
    blocks = ranked_blocks(edge_index, batch, by_rank, num_nodes)
    if rank is not None:  # make subtrees of the elimination tree contiguous
        position = inverse(blocks.node)
        later = postorder(*adjacency(position[row], position[col], num_nodes))
        blocks = ranked_blocks(edge_index, batch, later[position], num_nodes)

    edge_row, edge_col = blocks.edge_row, blocks.edge_col
    indptr, indices = adjacency(edge_row, edge_col, num_nodes)
    column_ptr, rows = fill_pattern(indptr, indices, most)
    if len(rows) > most:
        return blocks
    columns = np.repeat(np.arange(num_nodes), np.diff(column_ptr))
    lower_ptr, lower_col = compress(rows, columns, num_nodes)
    lower_row = np.repeat(np.arange(num_nodes), np.diff(lower_ptr))
    upper_ptr, entry = compress(lower_col, np.arange(len(rows)), num_nodes)
    low, high = np.minimum(edge_row, edge_col), np.maximum(edge_row, edge_col)
    x = np.searchsorted(lower_row * num_nodes + lower_col, high * num_nodes + low)
    x += num_nodes + np.where(edge_row < edge_col, len(lower_col), 0)
    slot = np.empty(blocks.num_edges, np.int64)
    slot[blocks.edge] = np.where(edge_row == edge_col, edge_row, x)
    return SymbolicFactor(
        **vars(blocks),
        lower_ptr=lower_ptr,
        lower_col=lower_col,
        upper_ptr=upper_ptr,
        upper_row=lower_row[entry],
        upper_entry=entry,
        slot=slot,
    )


def graph_blocks(edge_index: Tensor, batch: Tensor | None, num_nodes: int) -> Blocks:
    """The graphs of a batch, with nodes in their order; see :func:`symbolic_factor`."""
    check_edge_index(edge_index, num_nodes)
    return ranked_blocks(edge_index, batch, np.arange(num_nodes), num_nodes)


def ranked_blocks(
    edge_index: Tensor, batch: Tensor | None, by_rank: np.ndarray, num_nodes: int
) -> Blocks:
    """The graphs of a batch, each with its nodes ordered by rank."""
    col, row = to_numpy(edge_index)
    block = block_of(edge_index, batch, num_nodes)
    node, sizes = np.lexsort((by_rank, block)), np.bincount(block)
    edge, edge_ptr = grouped(block[row], len(sizes))
    position = inverse(node)
    return Blocks(
        ptr=np.append(0, np.cumsum(sizes)),
        node=node,
        edge_ptr=edge_ptr,
        edge=edge,
        edge_row=position[row[edge]],
        edge_col=position[col[edge]],
    )


def block_of(edge_index: Tensor, batch: Tensor | None, num_nodes: int) -> np.ndarray:
    """The block of each node, [V].

    Blocks are the graphs of the batch that have nodes, or connected components. Nothing
    is ever computed across blocks, so NaN cannot spread from one to another.
    """
    if batch is None:
        return to_numpy(connected_components(edge_index.cpu(), num_nodes))
    check_batch(batch, num_nodes)
    graph = to_numpy(batch)
    col, row = to_numpy(edge_index)
    check_within_graphs(col, row, graph)
    return np.unique(graph, return_inverse=True)[1]


@compiled()
def _roots(parent):
    root = np.arange(parent.shape[0])
    for i in range(parent.shape[0] - 1, -1, -1):
        if parent[i] >= 0:
            root[i] = root[parent[i]]
    return root


def heights(parent: np.ndarray) -> np.ndarray:
    """The height of each node of a forest."""
    child = np.flatnonzero(parent >= 0)
    return traversal(child, parent[child], len(parent))[0]
