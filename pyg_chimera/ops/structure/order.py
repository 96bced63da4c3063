"""Orders of the nodes, by which an undirected graph becomes a DAG."""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from pyg_chimera.ops.structure.checks import check_edge_index
from pyg_chimera.ops.structure.elimination import adjacency, to_numpy
from pyg_chimera.ops.structure.topological import compress

__all__ = ["node_order"]

_METHODS = ("order", "degree", "bfs")


def node_order(edge_index: Tensor, num_nodes: int, method: str) -> Tensor:
    r"""The place of each node in an order of all nodes.

    If only those edges of an undirected graph are kept that lead from an earlier to a
    later node, a DAG remains. Edge directions, self-loops and duplicates make no
    difference here. Takes :math:`O(|\mathcal{V}| + |\mathcal{E}|)` time, on the CPU.

    In a batch of graphs, the places of all of them are numbered together; the nodes of
    one graph are in the same order as if the graph were alone.

    Args:
        edge_index (torch.Tensor): The edges, :math:`[2, |\mathcal{E}|]`, integer.
        num_nodes (int): The number of nodes.
        method (str): How to order them.

            * :obj:`"order"`: as they are numbered.
            * :obj:`"degree"`: by the number of different neighbours, fewest first,
              nodes that have equally many by number.
            * :obj:`"bfs"`: a breadth-first search from the first node of each
              component, one component after the other, neighbours by number.

    Returns:
        torch.Tensor: The place of each node, int64 :math:`[|\mathcal{V}|]`, a
        permutation of :math:`0, \ldots, |\mathcal{V}| - 1`, on the device of
        :obj:`edge_index`.

    Raises:
        ValueError: If :obj:`method` is not one of these, or :obj:`edge_index` has a
            wrong shape or is out of range.
        TypeError: If :obj:`edge_index` is not integer.
    """
    if method not in _METHODS:
        raise ValueError(f"'method' must be one of {list(_METHODS)} (got {method!r})")
    check_edge_index(edge_index, num_nodes)
    device = edge_index.device
    if method == "order":
        return torch.arange(num_nodes, device=device)
    row, col = to_numpy(edge_index)
    ptr, neighbour = adjacency(row, col, num_nodes)
    if method == "degree":
        node = compress(np.diff(ptr), np.arange(num_nodes), num_nodes)[1]
        place = np.empty(num_nodes, np.int64)
        place[node] = np.arange(num_nodes)
    else:
        place = _breadth_first(ptr, neighbour)
    return torch.from_numpy(place).to(device)


@njit(cache=True, nogil=True)
def _breadth_first(ptr, neighbour):  # type: ignore[no-untyped-def]
    n = ptr.shape[0] - 1
    place = np.full(n, -1, np.int64)
    queue = np.empty(n, np.int64)
    begin, end = 0, 0
    for root in range(n):
        if place[root] >= 0:
            continue
        queue[end] = root
        place[root] = end
        end += 1
        while begin < end:
            j = queue[begin]
            begin += 1
            for x in range(ptr[j], ptr[j + 1]):
                i = neighbour[x]
                if place[i] < 0:
                    place[i] = end
                    queue[end] = i
                    end += 1
    return place
