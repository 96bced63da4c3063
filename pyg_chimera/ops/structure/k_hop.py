"""Pairs of nodes within a few steps of each other."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.checks import check_edge_index, check_integer
from pyg_chimera.ops.common.compilation import compiled
from pyg_chimera.ops.common.memory import CPU, left_if_short, too_large
from pyg_chimera.ops.structure.csr import compress, places, simple, to_numpy
from pyg_chimera.ops.structure.distance import search
from pyg_chimera.ops.structure.registered import structural_op, unsized

#: Bytes of a pair and its distance, which are remembered and returned.
_PAIR = 48


class KHop(NamedTuple):
    r"""What :func:`k_hop_index` returns."""

    #: The pairs :math:`[2, |\mathcal{P}|]`, int64: row 0 is the node that reaches that
    #: of row 1.
    edge_index: Tensor
    #: The number of steps of each pair :math:`[|\mathcal{P}|]`, int64.
    distance: Tensor


def k_hop_index(edge_index: Tensor, num_nodes: int, k: int) -> KHop:
    r"""All pairs of a node and a node that it reaches in at most :math:`k` steps along
    the edges, such as itself in none.

    On a DAG, they join each node to its ancestors up to :math:`k` generations back, on
    an undirected graph to its :math:`k`-hop neighbourhood, and on a directed path to
    the causal window of sequence models. Takes a breadth-first search from each node,
    in time linear in the number of edges visited, on the CPU, and memory linear in the
    number of pairs.

    Args:
        edge_index (torch.Tensor): The edges, :math:`[2, |\mathcal{E}|]`, integer, from
            :obj:`edge_index[0]` to :obj:`edge_index[1]`, in any order. Self-loops and
            duplicates make no difference.
        num_nodes (int): The number of nodes.
        k (int): The largest number of steps, 1 or more.

    Returns:
        KHop: The pairs :obj:`edge_index`, int64 :math:`[2, |\mathcal{P}|]`, each of
        them once, in the direction of the edges, and the :obj:`distance` of each, int64
        :math:`[|\mathcal{P}|]`, on the device of the edges. They are sorted by the node
        that is reached, then by distance.

    Raises:
        ValueError: If :obj:`k` is less than 1, :obj:`edge_index` has the wrong shape or
            is out of range, or there are more pairs than fit into memory, as around a
            node with many neighbours.
        TypeError: If :obj:`edge_index` or :obj:`k` is not integer.
    """
    k = check_integer("k", k, 1)
    return KHop(*_k_hop_index(edge_index, num_nodes, k))


@structural_op(unsized((2, "pairs"), ("pairs",)), sized=False)
def _k_hop_index(edge_index: Tensor, num_nodes: int, k: int) -> tuple[Tensor, Tensor]:
    check_edge_index(edge_index, num_nodes)
    source, target = to_numpy(edge_index)
    left = left_if_short(_PAIR * num_nodes**2, CPU)
    most = num_nodes**2 if left is None else int(left / _PAIR)
    index, distance, searched, count = _pairs(source, target, num_nodes, k, most)
    if left is not None and count > most:
        about = count * num_nodes / searched  # as if the other nodes had as many
        raise too_large(
            f"At most {k} steps join about {about:,.0f} pairs of {num_nodes:,} nodes, "
            "which",
            _PAIR * about,
            left,
            "use a smaller 'k', or samples of the graph, in which hubs have fewer "
            "neighbours",
        )
    index, distance = (torch.from_numpy(x) for x in (index, distance))
    return index.to(edge_index.device), distance.to(edge_index.device)


@structural_op(lambda edges, *_: edges.new_empty(edges.size(1), dtype=torch.long))
def pairs_of_edges(edge_index: Tensor, pairs: Tensor, num_nodes: int) -> Tensor:
    r"""The index of each edge among pairs of nodes.

    Args:
        edge_index (torch.Tensor): The edges, :math:`[2, |\mathcal{E}|]`, integer.
        pairs (torch.Tensor): Distinct pairs, :math:`[2, |\mathcal{P}|]`, integer.
        num_nodes (int): The number of nodes.

    Returns:
        torch.Tensor: int64 :math:`[|\mathcal{E}|]`.

    Raises:
        ValueError: If an edge is not among the pairs.
    """
    check_edge_index(edge_index, num_nodes)
    check_edge_index(pairs, num_nodes)
    (source, target), (col, row) = to_numpy(edge_index), to_numpy(pairs)
    edge, pair = target * num_nodes + source, row * num_nodes + col
    found = places(pair, edge)
    missing = np.flatnonzero(found < 0)
    if missing.size:
        e = int(missing[0])
        raise ValueError(
            f"'k_hop_index' must have a pair for each edge, but has none for edge {e}, "
            f"from node {source[e]} to node {target[e]}; use 'AddKHopIndex'"
        )
    return torch.from_numpy(found).to(edge_index.device)


@structural_op(lambda edges, pairs, distance, *_: torch.empty_like(distance))
def checked_distance(
    edge_index: Tensor, pairs: Tensor, distance: Tensor, num_nodes: int, k: int
) -> Tensor:
    r"""The distances of pairs of nodes, which must be those that `k_hop_index` finds.

    If so, each node is at distance 0 from itself, and the pairs at distance 1 are the
    edges. The others follow from these, as long as pairs and distances are together. If
    those of a node end before `k` steps, no edge leads on.

    Args:
        edge_index (torch.Tensor): The edges, :math:`[2, |\mathcal{E}|]`, integer.
        pairs (torch.Tensor): The pairs, :math:`[2, |\mathcal{P}|]`, integer.
        distance (torch.Tensor): Their distances :math:`[|\mathcal{P}|]`, integer.
        num_nodes (int): The number of nodes.
        k (int): The largest number of steps.

    Returns:
        torch.Tensor: A copy of the distances.

    Raises:
        ValueError: If the pairs are those of other edges or nodes.
    """
    check_edge_index(edge_index, num_nodes)
    (source, target), (col, row) = to_numpy(edge_index), to_numpy(pairs)
    steps = to_numpy(distance)
    got = _difference(target * num_nodes + source, row, col, steps, num_nodes)
    if got:
        raise ValueError(
            f"'k_hop_index' must hold the pairs of the edges, got {got}: edges or "
            "nodes have been added, removed or renumbered since it was stored. Apply "
            "'AddKHopIndex' after what does so, or as the 'transform' of a loader that "
            "samples"
        )
    ptr, tail = compress(target, source, num_nodes)
    pair_ptr, first = compress(row, col, num_nodes)
    far = _complete_to(
        ptr, tail, pair_ptr, first, compress(row, steps, num_nodes)[1], k
    )
    if far < k:
        raise ValueError(
            f"'k_hop_index' must hold all pairs up to k={k} steps apart, got those up "
            f"to {far}; use 'AddKHopIndex(k={k})'"
        )
    return distance.clone()


@compiled()
def _complete_to(ptr, tail, pair_ptr, first, steps, k):
    """`k`, or less if the pairs of a node end there, although edges lead on."""
    n = len(ptr) - 1
    seen = np.full(n, -1, np.int64)
    for i in range(n):
        far = 0
        for x in range(pair_ptr[i], pair_ptr[i + 1]):
            seen[first[x]] = i
            far = max(far, steps[x])
        for x in range(pair_ptr[i], pair_ptr[i + 1]):
            if far < k and steps[x] == far:
                for y in range(ptr[first[x]], ptr[first[x] + 1]):
                    if seen[tail[y]] != i:
                        return far
    return k


def _difference(
    edge: np.ndarray, row: np.ndarray, col: np.ndarray, steps: np.ndarray, n: int
) -> str:
    """How pairs differ from those of edges, each of them a number; empty if not."""
    low = min(row.min(initial=0), col.min(initial=0))
    high = max(row.max(initial=0), col.max(initial=0))
    if low < 0 or high >= max(n, 1):
        return f"node {low if low < 0 else high} for {n} nodes"
    if not np.array_equal(np.sort(row[(steps == 0) & (row == col)]), np.arange(n)):
        return f"{np.sum(steps == 0)} pairs at distance 0 for {n} nodes"
    edge = np.sort(edge[edge // max(n, 1) != edge % max(n, 1)])  # without self-loops
    edge = edge[np.diff(edge, prepend=-1) > 0]  # and duplicates
    near = np.sort((row * n + col)[steps == 1])
    if np.array_equal(near, edge):
        return ""
    wrong = np.setxor1d(near, edge)
    if not wrong.size:
        return "repeated pairs"
    i, j = divmod(int(wrong[0]), n)
    kind = "none at distance 1 for" if wrong[0] in edge else "one at distance 1 without"
    return f"{kind} an edge between nodes {i} and {j}"


@compiled()
def _pairs(source, target, n, k, most):
    """Searches from each node against the edges, until there are more than so many
    pairs. Returns the pairs unless there are, and how many nodes have how many.
    """
    ptr, tail = simple(target, source, n)
    order = np.empty(n, np.int64)
    level = np.empty(n, np.int64)
    seen = np.full(n, -1, np.int64)
    total = 0
    for i in range(n):
        total += search(ptr, tail, i, order, level, seen, i, k)
        if total > most:
            return np.empty((2, 0), np.int64), np.empty(0, np.int64), i + 1, total
    index = np.empty((2, total), np.int64)
    distance = np.empty(total, np.int64)
    seen[:] = -1
    end = 0
    for i in range(n):
        for x in range(search(ptr, tail, i, order, level, seen, i, k)):
            index[0, end] = order[x]
            index[1, end] = i
            distance[end] = level[order[x]]
            end += 1
    return index, distance, n, total
