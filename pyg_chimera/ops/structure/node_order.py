"""Node orders, which turn undirected graphs into DAGs."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.cache import called_eagerly, remembered
from pyg_chimera.ops.common.checks import check_edge_index, check_option
from pyg_chimera.ops.common.compilation import compiled
from pyg_chimera.ops.structure.csr import adjacency, compress, inverse, to_numpy
from pyg_chimera.ops.structure.distance import connected_components, search
from pyg_chimera.ops.structure.registered import structural_op
from pyg_chimera.ops.structure.topological import traversal

_ORDERS = ("order", "degree", "bfs", "auto")


def node_order(edge_index: Tensor, num_nodes: int, order: str) -> Tensor:
    r"""The position of each node in an order of all nodes.

    If only those edges of an undirected graph are kept that lead from an earlier to a
    later node, the result is a DAG. Edge directions, self-loops and duplicates are
    ignored. Takes :math:`O(|\mathcal{V}| + |\mathcal{E}|)` time, on the CPU, the first
    time it sees a graph.

    In a batch of graphs, positions are numbered consecutively across all graphs; the
    nodes of a graph are in the same order as if it were on its own.

    Args:
        edge_index (torch.Tensor): The edges, :math:`[2, |\mathcal{E}|]`, integer.
        num_nodes (int): The number of nodes.
        order (str): How to order them.

            * :obj:`"order"`: as they are numbered.
            * :obj:`"degree"`: by the number of distinct neighbours, fewest first, with
              ties broken by number.
            * :obj:`"bfs"`: a breadth-first search from the first node of each
              component, one component after the other, neighbours by number.
            * :obj:`"auto"`: as :obj:`"bfs"`, but components without a directed cycle
              (self-loops aside) in topological order, so that all their edges lead to
              later nodes.

    Returns:
        torch.Tensor: The position of each node, int64 :math:`[|\mathcal{V}|]`, a
        permutation of :math:`0, \ldots, |\mathcal{V}| - 1`, on the device of
        :obj:`edge_index`.

    Raises:
        ValueError: If :obj:`order` is not one of these, or :obj:`edge_index` has the
            wrong shape or is out of range.
        TypeError: If :obj:`edge_index` is not integer.
    """
    check_option("order", order, _ORDERS)
    return _node_order(edge_index, num_nodes, order)


@structural_op(lambda edges, size, _: edges.new_empty(size, dtype=torch.long))
def _node_order(edge_index: Tensor, num_nodes: int, order: str) -> Tensor:
    check_edge_index(edge_index, num_nodes)
    place = np.arange(num_nodes)
    if order != "order":
        row, col = to_numpy(edge_index)
        ptr, neighbour = adjacency(row, col, num_nodes)
        if order == "degree":
            place = inverse(compress(np.diff(ptr), place, num_nodes)[1])
        else:
            place = breadth_first(ptr, neighbour)
        if order == "auto":
            place = _topological_if_acyclic(row, col, place)
    return torch.from_numpy(place).to(edge_index.device)


def _topological_if_acyclic(
    source: np.ndarray, target: np.ndarray, place: np.ndarray
) -> np.ndarray:
    """The places, in which components are side by side, with the nodes of each
    component without cycles in topological order.
    """
    proper = source != target
    source, target = source[proper], target[proper]
    rank, waiting, *_ = traversal(source, target, len(place))
    edges = torch.from_numpy(np.stack([source, target]))
    component = to_numpy(connected_components(edges, len(place)))
    cyclic = np.isin(component, component[waiting > 0])
    return inverse(np.lexsort((place, np.where(cyclic, 0, rank), component)))


class Halves(NamedTuple):
    """A graph's edges in two DAGs; the second has none if all cycles are self-loops."""

    later: Tensor  # [E'], the indices of edges to later nodes in the order "auto"
    earlier: Tensor  # [E''], those of edges to earlier nodes
    cyclic: Tensor  # bool [V], nodes whose component has edges of both kinds


def dag_halves(edge_index: Tensor, num_nodes: int) -> Halves | None:
    """Divides a graph into two DAGs, without its self-loops; None if it is a DAG."""
    with called_eagerly():
        halves = remembered(_dag_halves, (edge_index,), num_nodes)
    return None if halves.later.numel() == edge_index.size(1) else halves


def _dag_halves(edge_index: Tensor, num_nodes: int) -> Halves:
    check_edge_index(edge_index, num_nodes)
    source, target = edge_index.long()
    proper = to_numpy(edge_index[:, source != target])
    if not traversal(*proper, num_nodes)[1].any():  # a DAG, which is soon known
        later = (source != target).nonzero().view(-1)
        return Halves(later, later[:0], later.new_zeros(num_nodes, dtype=torch.bool))
    before, after = node_order(edge_index, num_nodes, "auto")[edge_index.long()]
    later, earlier = (x.nonzero().view(-1) for x in (before < after, before > after))
    component = connected_components(edge_index, num_nodes)
    returning = component[edge_index[0].long()[earlier]]
    return Halves(later, earlier, torch.isin(component, returning))


@compiled()
def breadth_first(ptr, neighbour):
    """Each node's position in searches from the first node of each component.

    Args:
        ptr (np.ndarray): Where the neighbours of each node begin, int64 [V + 1].
        neighbour (np.ndarray): The neighbours; the relation must be symmetric.
    """
    n = ptr.shape[0] - 1
    order = np.empty(n, np.int64)
    level = np.empty(n, np.int64)
    seen = np.full(n, -1, np.int64)
    begin = 0
    for root in range(n):
        if seen[root] < 0:
            begin += search(ptr, neighbour, root, order[begin:], level, seen, 0, n)
    place = np.empty(n, np.int64)
    place[order] = np.arange(n)
    return place
