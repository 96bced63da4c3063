"""The sparse linear system I - A of a batch of graphs, made ready for elimination."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from pyg_chimera.ops.structure.checks import (
    check_batch,
    check_edge_index,
    check_within_graphs,
)
from pyg_chimera.ops.structure.distance import connected_components
from pyg_chimera.ops.structure.elimination import (
    adjacency,
    elimination_order,
    fill_pattern,
    to_numpy,
)
from pyg_chimera.ops.structure.errors import CycleError
from pyg_chimera.ops.structure.topological import find_cycle, topological_rank

__all__ = ["System", "build_system", "make_system", "remembered"]


class System(NamedTuple):
    r"""Where the entries of :math:`I - A = L U` lie, for a batch of graphs.

    Nodes are renumbered by *position*: block by block (a block is an independent
    part of the batch), and within a block in elimination order. L and U share one
    pattern: entry :obj:`x` of row :math:`i` is :math:`L_{ij}` and :math:`U_{ji}` with
    :obj:`j = lower_col[x]` :math:`< i`. In a DAG, :math:`I - A` is L already, each
    edge is its own entry, and U is the identity.

    All arrays are int64: ``V`` nodes, ``E`` edges, ``T`` blocks, ``F`` entries. In a
    DAG a block's components lie one after the other: ``C`` of them, else one a block.
    """

    triangular: bool  #: whether the graph is a DAG and U the identity
    ptr: np.ndarray  #: [T + 1], first position of each block
    component_ptr: np.ndarray  #: [C + 1], first position of each component
    block_component: np.ndarray  #: [T + 1], first component of each block
    reach: np.ndarray  #: [C], how many positions its entries lead back at most
    node: np.ndarray  #: [V], node at each position
    local: np.ndarray  #: [V], place of that node among the nodes of its block
    order: np.ndarray  #: [V], nodes block by block, in node order within a block
    lower_ptr: np.ndarray  #: [V + 1], first entry of each row
    lower_col: np.ndarray  #: [F], column of each entry, ascending in a row
    upper_ptr: np.ndarray  #: [V + 1], the same entries by column ...
    upper_row: np.ndarray  #: [F], ... with their rows, ascending ...
    upper_entry: np.ndarray  #: [F], ... and their numbers
    slot: np.ndarray  #: [E], of each edge in [diagonal | L | U], V + 2 F long
    edge_ptr: np.ndarray  #: [T + 1], first of a block's edges in ...
    edge: np.ndarray  #: [E], ... the edges block by block
    edge_row: np.ndarray  #: [E], position of the target of ``edge[x]``
    edge_col: np.ndarray  #: [E], position of the source of ``edge[x]``

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return self.node.shape[0]

    @property
    def num_entries(self) -> int:
        """The number of entries of L below the diagonal."""
        return self.lower_col.shape[0]

    @property
    def sizes(self) -> np.ndarray:
        """The number of nodes of each block."""
        return np.diff(self.ptr)

    def roots(self) -> np.ndarray:
        """The last position [V] that each position is connected to."""
        return _roots(self.upper_ptr, self.upper_row)


class _Cache:
    """What was last made of some graphs, found by what the graphs hold.

    A network's layers, and the backward pass, ask for the same structure many times.
    Keys are digests of the graph's contents, so nothing can go stale.
    """

    def __init__(self, size: int, num_bytes: int = 1 << 28) -> None:
        self.size, self.num_bytes = size, num_bytes
        self.values: OrderedDict[tuple, tuple[Any, int]] = OrderedDict()
        self.held = 0
        self.lock = Lock()

    def get(self, key: tuple) -> Any:
        with self.lock:
            if key not in self.values:
                return None
            self.values.move_to_end(key)
            return self.values[key][0]

    def put(self, key: tuple, value: Any) -> None:
        with self.lock:
            self.held -= self.values.pop(key, (None, 0))[1]
            self.values[key] = (value, _num_bytes(value))
            self.held += self.values[key][1]
            while len(self.values) > self.size or (
                self.held > self.num_bytes and len(self.values) > 8
            ):
                self.held -= self.values.popitem(last=False)[1][1]


def _num_bytes(value: Any) -> int:
    if isinstance(value, tuple):
        return sum(map(_num_bytes, value))
    return getattr(value, "nbytes", 0)


_CACHE = _Cache(size=32)


def remembered(make: Callable, tensors: Sequence[Tensor | None], *options: Any) -> Any:
    """`make(*tensors, *options)`, or what it was for the same contents before.

    For integer tensors, and results that nobody changes.
    """
    arrays = [None if x is None else to_numpy(x) for x in tensors]
    # Dtypes too, as some of them are errors; devices, as results may lie there.
    kinds = [None if x is None else (x.dtype, x.device) for x in tensors]
    key = (make.__qualname__, *options, *kinds, *map(_digest, arrays))
    value = _CACHE.get(key)
    if value is None:
        # Of copies, as results may be parts of what they are made of, and tensors that
        # later calls may save for their gradients.
        with torch.inference_mode(False):
            copies = [None if x is None else x.detach().clone() for x in tensors]
            value = make(*copies, *options)
        _CACHE.put(key, value)
    return value


#: Parts of a batch are gathered to blocks of about this many nodes.
_MIN_BLOCK = 32


def build_system(
    edge_index: Tensor,
    num_nodes: int,
    batch: Tensor | None = None,
    rank: Tensor | None = None,
    *,
    triangular: bool = False,
) -> System:
    r"""Order the nodes of a batch of graphs and find the pattern of its factors.

    Args:
        edge_index (torch.Tensor): The edges, :math:`[2, |\mathcal{E}|]`, integer.
        num_nodes (int): The number of nodes.
        batch (torch.Tensor, optional): The graph of each node, integer
            :math:`[|\mathcal{V}|]`, sorted or not. Without it, the weakly connected
            components are the blocks.
        rank (torch.Tensor, optional): The elimination rank, or for a DAG the
            topological rank, of each node within its graph. Computed if absent.
        triangular (bool, optional): Whether the graph must be a DAG.

    Returns:
        System: The same for the same graphs; the last few are remembered.

    Raises:
        ValueError: If a shape is wrong, an index is out of range, an edge joins two
            graphs of the batch, or :obj:`rank` is not a topological rank.
        CycleError: If :obj:`triangular` is set and the graph has a cycle.
        TypeError: If :obj:`edge_index`, :obj:`batch` or :obj:`rank` is not integer.
    """
    tensors = (edge_index, batch, rank)
    return remembered(make_system, tensors, num_nodes, triangular)


def _digest(array: np.ndarray | None) -> bytes | None:
    if array is None:
        return None
    return hashlib.blake2b(array.data, digest_size=16).digest() + bytes([array.ndim])


def make_system(
    edge_index: Tensor,
    batch: Tensor | None,
    rank: Tensor | None,
    num_nodes: int,
    triangular: bool,
) -> System:
    """What `build_system` remembers."""
    check_edge_index(edge_index, num_nodes)
    col, row = to_numpy(edge_index)
    if batch is None:
        block = connected_components(edge_index.cpu(), num_nodes).numpy()
    else:
        check_batch(batch, num_nodes)
        block = to_numpy(batch)
        check_within_graphs(col, row, block)
        if num_nodes and block.max() > 2 * num_nodes:  # sparse labels
            block = np.unique(block, return_inverse=True)[1]
    # Small parts go together: fewer tasks, and no leak, as no edge joins them.
    sizes = np.bincount(block)
    block = ((np.cumsum(sizes) - sizes) // _MIN_BLOCK)[block]
    order, ptr = _group(block)
    if rank is None and triangular:
        rank_ = topological_rank(edge_index.cpu(), num_nodes).numpy()
    elif rank is None:
        rank_ = elimination_order(row, col, num_nodes)
    else:
        if rank.dim() != 1 or rank.numel() != num_nodes:
            raise ValueError(
                f"'rank' must have one entry per node, [{num_nodes}], got "
                f"{list(rank.shape)}"
            )
        if rank.is_floating_point() or rank.dtype == torch.bool:
            raise TypeError(f"'rank' must be integer, got {rank.dtype}")
        rank_ = to_numpy(rank)
        if triangular:
            _check_topological(edge_index, rank_, num_nodes)
    component = block
    if triangular:
        component = connected_components(edge_index.cpu(), num_nodes).numpy()
    node = order[np.lexsort((rank_[order], component[order], block[order]))]
    new = np.flatnonzero(np.diff(component[node], prepend=-1))
    component_ptr = np.append(new, num_nodes)
    position = np.empty(num_nodes, np.int64)
    position[node] = np.arange(num_nodes)
    place = np.empty(num_nodes, np.int64)
    place[order] = np.arange(num_nodes) - np.repeat(ptr[:-1], np.diff(ptr))

    edge_row, edge_col = position[row], position[col]
    if triangular:
        lower = _rows(edge_row, edge_col, num_nodes)
        slot = num_nodes + np.argsort(lower.entry)  # where each edge went
    else:
        column_ptr, rows = fill_pattern(*adjacency(edge_row, edge_col, num_nodes))
        columns = np.repeat(np.arange(num_nodes), np.diff(column_ptr))
        lower = _rows(rows, columns, num_nodes)
        slot = _slots(edge_row, edge_col, lower.ptr, lower.col)
    upper = _rows(lower.col, lower.row, num_nodes)
    reach = np.zeros(len(component_ptr) - 1, np.int64)
    inside = np.searchsorted(component_ptr, lower.row, side="right") - 1
    np.maximum.at(reach, inside, lower.row - lower.col)
    edge, edge_ptr = _group(
        np.searchsorted(ptr, edge_row, side="right") - 1, len(ptr) - 1
    )
    return System(
        triangular=triangular,
        ptr=ptr,
        component_ptr=component_ptr,
        block_component=np.searchsorted(component_ptr, ptr),
        reach=reach,
        node=node,
        local=place[node],
        order=order,
        lower_ptr=lower.ptr,
        lower_col=lower.col,
        upper_ptr=upper.ptr,
        upper_row=upper.col,
        upper_entry=upper.entry,
        slot=slot,
        edge_ptr=edge_ptr,
        edge=edge,
        edge_row=edge_row[edge],
        edge_col=edge_col[edge],
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


def _group(label: np.ndarray, num_groups: int | None = None) -> tuple:
    """Indices grouped by label, stable, and the bounds of the groups.

    Without `num_groups`, labels nobody has make no group.
    """
    order = np.argsort(label, kind="stable")
    counts = np.bincount(label, minlength=num_groups or 0)
    if num_groups is None:
        counts = counts[counts > 0]
    return order, np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)


class _Rows(NamedTuple):
    ptr: np.ndarray
    row: np.ndarray
    col: np.ndarray
    entry: np.ndarray


def _rows(row: np.ndarray, col: np.ndarray, num_rows: int) -> _Rows:
    """Sort coordinates by row, then column, and remember where each came from."""
    entry = np.lexsort((col, row))
    ptr = np.zeros(num_rows + 1, np.int64)
    np.cumsum(np.bincount(row, minlength=num_rows), out=ptr[1:])
    return _Rows(ptr, row[entry], col[entry], entry)


@njit(cache=True, nogil=True)
def _roots(upper_ptr, upper_row):  # type: ignore[no-untyped-def]
    n = upper_ptr.shape[0] - 1
    root = np.arange(n)
    for i in range(n - 1, -1, -1):
        if upper_ptr[i] < upper_ptr[i + 1]:  # climb the elimination tree
            root[i] = root[upper_row[upper_ptr[i]]]
    return root


@njit(cache=True, nogil=True)
def _slots(row, col, lower_ptr, lower_col):  # type: ignore[no-untyped-def]
    """Where each edge of a general graph stands in [diagonal | L | U]."""
    n = lower_ptr.shape[0] - 1
    slot = np.empty(row.shape[0], np.int64)
    for e in range(row.shape[0]):
        i, j = row[e], col[e]
        if i == j:
            slot[e] = i
            continue
        low, high = min(i, j), max(i, j)
        a, b = lower_ptr[high], lower_ptr[high + 1]
        x = a + np.searchsorted(lower_col[a:b], low)
        slot[e] = n + x if i > j else n + lower_col.shape[0] + x
    return slot
