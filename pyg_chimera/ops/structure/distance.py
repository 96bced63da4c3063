"""Hop distances and connected components."""

import numpy as np
import torch
from scipy.sparse import coo_array, csgraph
from torch import Tensor

from pyg_chimera.ops.common.checks import (
    check_batch,
    check_edge_index,
    check_within_graphs,
)
from pyg_chimera.ops.common.compilation import compiled
from pyg_chimera.ops.structure.csr import simple, to_numpy


def connected_components(edge_index: Tensor, num_nodes: int) -> Tensor:
    r"""The weakly connected component of each node.

    Args:
        edge_index (torch.Tensor): The edges, :math:`[2, |\mathcal{E}|]`, integer.
            Their directions don't matter.
        num_nodes (int): The number of nodes.

    Returns:
        torch.Tensor: The component of each node, int64 :math:`[|\mathcal{V}|]`, on the
        device of :obj:`edge_index`. Components are numbered by their first node.

    Raises:
        ValueError: If :obj:`edge_index` has the wrong shape or is out of range.
        TypeError: If :obj:`edge_index` is not integer.
    """
    check_edge_index(edge_index, num_nodes)
    source, target = to_numpy(edge_index)
    component = components(source, target, num_nodes)
    return torch.from_numpy(component).to(edge_index.device)


def diameter(
    edge_index: Tensor,
    num_nodes: int,
    batch: Tensor | None = None,
) -> int | Tensor:
    r"""The largest finite distance from any node to any other.

    The distance is the number of edges of a shortest directed path; pairs without a
    path don't count. In a graph with one-way edges, this takes a breadth-first search
    from each node, :math:`O(|\mathcal{V}| |\mathcal{E}|)`; where each edge has its
    reverse, usually far fewer searches (`"Determining the Diameter of Small World
    Networks" <https://doi.org/10.1145/2063576.2063748>`_).

    Args:
        edge_index (torch.Tensor): The edges, :math:`[2, |\mathcal{E}|]`, integer, from
            :obj:`edge_index[0]` to :obj:`edge_index[1]`.
        num_nodes (int): The number of nodes.
        batch (torch.Tensor, optional): The graph of each node, integer
            :math:`[|\mathcal{V}|]`, sorted or not.

    Returns:
        int or torch.Tensor: The diameter, 0 if there are no edges; with :obj:`batch`,
        that of each of its :math:`B` = :obj:`max(batch) + 1` graphs, int64 :math:`[B]`,
        on the device of :obj:`edge_index`.

    Raises:
        ValueError: If a shape is wrong, an index is out of range, or an edge joins two
            graphs of :obj:`batch`.
        TypeError: If :obj:`edge_index` or :obj:`batch` is not integer.
    """
    check_edge_index(edge_index, num_nodes)
    source, target = to_numpy(edge_index)
    if batch is None:
        graph = np.zeros(num_nodes, np.int64)
        return int(_diameters(source, target, graph, 1)[0])
    check_batch(batch, num_nodes)
    labels = to_numpy(batch)
    check_within_graphs(source, target, labels)
    num_graphs = int(labels.max(initial=-1)) + 1
    if num_graphs > 2**31:
        raise ValueError(
            "'batch' must number the graphs from 0 on, as there is a diameter for each "
            f"number, got {num_graphs - 1}"
        )
    labels, graph = np.unique(labels, return_inverse=True)
    out = np.zeros(num_graphs, np.int64)
    out[labels] = _diameters(source, target, graph, len(labels))
    return torch.from_numpy(out).to(edge_index.device)


def components(source: np.ndarray, target: np.ndarray, n: int) -> np.ndarray:
    """The component of each node, in the order of their first nodes."""
    ones = np.ones(len(source), np.bool_)
    matrix = coo_array((ones, (source, target)), shape=(n, n))
    return csgraph.connected_components(matrix, directed=False)[1].astype(np.int64)


@compiled()
def search(ptr, head, start, order, level, seen, stamp, most):
    """Breadth-first search of up to `most` steps from one node; returns the number of
    nodes reached.

    These are the first entries of `order`, nearest first. Where `seen` is `stamp`,
    `level` holds the distance.
    """
    order[0] = start
    level[start] = 0
    seen[start] = stamp
    begin, end = 0, 1
    while begin < end:
        j = order[begin]
        if level[j] == most:
            break
        begin += 1
        for x in range(ptr[j], ptr[j + 1]):
            i = head[x]
            if seen[i] != stamp:
                seen[i] = stamp
                level[i] = level[j] + 1
                order[end] = i
                end += 1
    return end


@compiled()
def search_tree(ptr, head, roots):
    """Each node's distance from the nearest root, and its predecessor on the way."""
    n = ptr.shape[0] - 1
    level = np.full(n, -1, np.int64)
    parent = np.full(n, -1, np.int64)
    queue = np.empty(n, np.int64)
    end = roots.shape[0]
    queue[:end] = roots
    level[roots] = 0
    begin = 0
    while begin < end:
        j = queue[begin]
        begin += 1
        for x in range(ptr[j], ptr[j + 1]):
            i = head[x]
            if level[i] < 0:
                level[i] = level[j] + 1
                parent[i] = j
                queue[end] = i
                end += 1
    return level, parent


@compiled()
def _diameters(source, target, graph, num_graphs):
    n = graph.shape[0]
    ptr, head = simple(source, target, n)
    in_ptr, tail = simple(target, source, n)
    symmetric = np.array_equal(ptr, in_ptr) and np.array_equal(head, tail)

    out = np.zeros(num_graphs, np.int64)
    order = np.empty(n, np.int64)
    level = np.empty(n, np.int64)
    seen = np.full(n, -1, np.int64)
    stamp = 0
    if not symmetric:
        for i in range(n):
            count = search(ptr, head, i, order, level, seen, i, n)
            out[graph[i]] = max(out[graph[i]], level[order[count - 1]])
        return out

    # No node is further than ecc(c) + d(c, i) from i. Searches alternate between the
    # outskirts (high upper bounds) and the middle (which lowers the bounds of others),
    # until no node can be further out than the longest distance found.
    done = np.zeros(n, np.bool_)
    upper = np.full(n, n, np.int64)
    lower = np.zeros(n, np.int64)
    for i in range(n):
        if done[i]:
            continue
        count = search(ptr, head, i, order, level, seen, stamp, n)
        active = order[:count].copy()
        done[active] = True
        longest = 0
        outskirts = True
        while active.shape[0] > 0:
            farthest = level[order[count - 1]]
            longest = max(longest, farthest)
            for j in active:
                upper[j] = min(upper[j], farthest + level[j])
                lower[j] = max(lower[j], level[j], farthest - level[j])
            active = active[upper[active] > longest]
            if active.shape[0] > 0:
                if outskirts:
                    j = active[np.argmax(upper[active])]
                else:
                    j = active[np.argmin(lower[active])]
                outskirts = not outskirts
                stamp += 1
                search(ptr, head, j, order, level, seen, stamp, n)
        stamp += 1
        out[graph[i]] = max(out[graph[i]], longest)
    return out
