"""Topological ranks of directed acyclic graphs, and cycles of other graphs."""

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.checks import check_edge_index
from pyg_chimera.ops.common.compilation import compiled
from pyg_chimera.ops.common.errors import CycleError
from pyg_chimera.ops.structure.csr import compress, to_numpy
from pyg_chimera.ops.structure.registered import structural_op


@structural_op(lambda edges, size: edges.new_empty(size, dtype=torch.long))
def topological_rank(edge_index: Tensor, num_nodes: int) -> Tensor:
    r"""The length of the longest path that ends in each node of a DAG.

    Nodes of one rank are independent of each other, and each edge leads from a lower
    to a higher rank:

    .. math::
        r_i = \max \left( \{ 0 \} \cup \{ r_j + 1 : (j, i) \in \mathcal{E} \} \right)

    Takes :math:`O(|\mathcal{V}| + |\mathcal{E}|)` time, on the CPU.

    Args:
        edge_index (torch.Tensor): The edges, :math:`[2, |\mathcal{E}|]`, integer, from
            :obj:`edge_index[0]` to :obj:`edge_index[1]`. Duplicates are fine.
        num_nodes (int): The number of nodes.

    Returns:
        torch.Tensor: The rank of each node, int64 :math:`[|\mathcal{V}|]`, on the
        device of :obj:`edge_index`.

    Raises:
        CycleError: If there is a cycle (self-loops included), which the error names.
        ValueError: If :obj:`edge_index` has the wrong shape or is out of range.
        TypeError: If :obj:`edge_index` is not integer.
    """
    check_edge_index(edge_index, num_nodes)
    source, target = to_numpy(edge_index)
    rank, waiting, *_ = traversal(source, target, num_nodes)
    if waiting.any():
        raise CycleError(_cycle(source, target, waiting))
    return torch.from_numpy(rank).to(edge_index.device)


def find_cycle(edge_index: Tensor, num_nodes: int) -> list[int] | None:
    r"""The nodes of one directed cycle.

    Takes :math:`O(|\mathcal{V}| + |\mathcal{E}|)` time, on the CPU.

    Args:
        edge_index (torch.Tensor): The edges, :math:`[2, |\mathcal{E}|]`, integer, from
            :obj:`edge_index[0]` to :obj:`edge_index[1]`.
        num_nodes (int): The number of nodes.

    Returns:
        list[int], optional: The nodes of a cycle in the direction of its edges, each
        once and the smallest first (a single node for a self-loop), or :obj:`None` if
        the graph is acyclic.

    Raises:
        ValueError: If :obj:`edge_index` has the wrong shape or is out of range.
        TypeError: If :obj:`edge_index` is not integer.
    """
    check_edge_index(edge_index, num_nodes)
    source, target = to_numpy(edge_index)
    waiting = traversal(source, target, num_nodes)[1]
    return _cycle(source, target, waiting) if waiting.any() else None


def ranks_and_cycles(
    edge_index: Tensor, num_nodes: int
) -> tuple[np.ndarray, np.ndarray]:
    r"""Topological ranks where they are defined, and which nodes are on cycles.

    Args:
        edge_index (torch.Tensor): The edges, :math:`[2, |\mathcal{E}|]`, integer.
        num_nodes (int): The number of nodes.

    Returns:
        tuple[np.ndarray, np.ndarray]: The rank of each node, valid if no cycle leads to
        it, and whether it lies on a cycle or on a path from one to another.
    """
    source, target = to_numpy(edge_index)
    rank, waiting, *_ = traversal(source, target, num_nodes)
    if not waiting.any():
        return rank, waiting > 0
    waiting_back = traversal(target, source, num_nodes)[1]
    return rank, (waiting > 0) & (waiting_back > 0)


@compiled()
def traversal(source, target, n):
    """Ranks; how many edges of each node come from a cycle or from after one; the other
    nodes, parents first; and the compressed children of each node.
    """
    ptr, head = compress(source, target, n)
    waiting = np.zeros(n, np.int64)
    for e in range(target.shape[0]):
        waiting[target[e]] += 1
    rank = np.zeros(n, np.int64)
    queue = np.empty(n, np.int64)
    end = 0
    for i in range(n):
        if waiting[i] == 0:
            queue[end] = i
            end += 1
    begin = 0
    while begin < end:
        j = queue[begin]
        begin += 1
        for x in range(ptr[j], ptr[j + 1]):
            i = head[x]
            rank[i] = max(rank[i], rank[j] + 1)
            waiting[i] -= 1
            if waiting[i] == 0:
                queue[end] = i
                end += 1
    return rank, waiting, queue[:end], ptr, head


def _cycle(source: np.ndarray, target: np.ndarray, waiting: np.ndarray) -> list[int]:
    """A cycle among the waiting nodes, each of which has a waiting predecessor."""
    among = waiting[source] > 0
    before = np.full(len(waiting), -1)
    before[target[among]] = source[among]
    seen: dict[int, None] = {}  # in the order of the way back
    node = int(target[among][-1])
    while node not in seen:
        seen[node] = None
        node = int(before[node])
    way = list(seen)
    cycle = way[way.index(node) :][::-1]
    first = cycle.index(min(cycle))
    return cycle[first:] + cycle[:first]
