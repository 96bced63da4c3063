"""Elimination orders: the order in which Gaussian elimination removes the nodes.

Eliminating a node joins its remaining neighbours into a clique. The order decides how
many entries this adds (the *fill-in*), and thus the cost of everything that
`pyg_chimera.ops.resolvent_mix` does with the factors.
"""

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.checks import check_edge_index, check_option
from pyg_chimera.ops.common.compilation import compiled
from pyg_chimera.ops.common.numba_runtime import run, stopped
from pyg_chimera.ops.common.optional import required
from pyg_chimera.ops.structure.csr import (
    adjacency,
    enlarged,
    grouped,
    inverse,
    to_numpy,
)
from pyg_chimera.ops.structure.distance import components

#: The methods to find an elimination order.
METHODS = ("minimum_fill", "metis")

#: An upper bound for the time per neighbour, in nanoseconds: most take far less.
_PER_ENTRY = 1e4
#: Queues per octave: scores within a factor of 2 ** (1 / 3) are tied, as estimates.
_PER_OCTAVE = 3

_ALL = np.iinfo(np.int64).max


def elimination_rank(
    edge_index: Tensor, num_nodes: int, method: str = "minimum_fill"
) -> Tensor:
    r"""A fill-reducing elimination order of the (undirected) graph.

    With :obj:`"minimum_fill"`, the next node is the one with the least estimated
    fill-in: approximate minimum mean local fill (`"Node Selection Strategies for
    Bottom-Up Sparse Matrix Ordering" <https://doi.org/10.1137/S0895479896302692>`_,
    Rothberg and Eisenstat, 1998) on the quotient graph of `"An Approximate Minimum
    Degree Ordering Algorithm" <https://doi.org/10.1137/S0895479894278952>`_ (Amestoy,
    Davis and Duff, 1996).

    With :obj:`"metis"`, small separators that halve the graph are eliminated last:
    nested dissection by METIS (`"A Fast and High Quality Multilevel Scheme for
    Partitioning Irregular Graphs" <https://doi.org/10.1137/S1064827595287997>`_,
    Karypis and Kumar, 1998). It takes longer, but fills in less on large meshes.

    The result is a postorder of the elimination tree, which has the same fill-in and
    better locality. Edge directions, self-loops and duplicates are ignored. The same
    graph always gets the same order, on its own or in a batch.

    Args:
        edge_index (torch.Tensor): The edges, :math:`[2, |\mathcal{E}|]`, integer.
        num_nodes (int): The number of nodes.
        method (str, optional): How to find the order, :obj:`"minimum_fill"` or
            :obj:`"metis"`. (default: :obj:`"minimum_fill"`)

    Returns:
        torch.Tensor: For each node, how many nodes are eliminated before it,
        int64 :math:`[|\mathcal{V}|]`, on the device of :obj:`edge_index`.

    Raises:
        ValueError: If :obj:`edge_index` has the wrong shape or is out of range, or
            :obj:`method` is unknown.
        TypeError: If :obj:`edge_index` is not integer.
        ImportError: If :obj:`method="metis"` and :obj:`pymetis` is missing.
    """
    check_edge_index(edge_index, num_nodes)
    check_option("method", method, METHODS)
    row, col = to_numpy(edge_index)
    rank = elimination_order(row, col, num_nodes, method)
    return torch.from_numpy(rank).to(edge_index.device)


def elimination_order(
    row: np.ndarray,
    col: np.ndarray,
    n: int,
    method: str = "minimum_fill",
    most: int = _ALL,
) -> np.ndarray | None:
    """The rank of each node in a fill-reducing order.

    The order of a component does not depend on the other components, so graphs have the
    same orders in a batch as alone. With minimum fill, the result is None if the factor
    has more than `most` entries, which takes only part of the time to find out.
    """
    if method == "metis":
        rank = _nested_dissection(row, col, n)
    else:
        found = _minimum_fill_but_hubs(row, col, n, most)
        if found is None:
            return None
        rank = found
    return postorder(*adjacency(rank[row], rank[col], n))[rank]


def _nested_dissection(row: np.ndarray, col: np.ndarray, n: int) -> np.ndarray:
    pymetis = required("pymetis", "method='metis'", "metis")
    component = components(row, col, n)
    node, ptr = grouped(component, int(component.max(initial=-1)) + 1)
    place = inverse(node)
    indptr, indices = adjacency(place[row], place[col], n)
    rank = np.empty(n, np.int64)
    for first, end in pairwise(ptr.tolist()):
        low, high = indptr[first], indptr[end]
        part = pymetis.CSRAdjacency(
            indptr[first : end + 1] - low, indices[low:high] - first
        )
        _, places = pymetis.nested_dissection(part)
        rank[node[first:end]] = first + np.asarray(places)
    return rank


def _minimum_fill_but_hubs(
    row: np.ndarray, col: np.ndarray, n: int, most: int
) -> np.ndarray | None:
    """Minimum fill with hubs last, as they would be rescanned for each neighbour."""
    indptr, indices = adjacency(row, col, n)
    hub = _hubs(row, col, indptr)
    if not hub.any():
        return minimum_fill_order(indptr, indices, most)
    hubs, rest = np.flatnonzero(hub), np.flatnonzero(~hub)
    hubs = hubs[np.argsort(np.diff(indptr)[hubs], kind="stable")]
    rank = np.empty(n, np.int64)
    rank[rest], rank[hubs] = np.arange(len(rest)), np.arange(len(rest), n)
    inside = ~(hub[row] | hub[col])
    indptr, indices = adjacency(rank[row[inside]], rank[col[inside]], len(rest))
    places = minimum_fill_order(indptr, indices, most)
    if places is None:
        return None
    rank[rest] = places
    return rank


def minimum_fill_order(
    indptr: np.ndarray, indices: np.ndarray, most: int = _ALL
) -> np.ndarray | None:
    """The rank of each node if the cheapest one is eliminated next; changes `indices`.

    None if the factor has more than `most` entries.
    """
    rank = np.full(len(indptr) - 1, -1, np.int64)
    cost = np.array([_PER_ENTRY * len(indices)])
    run(_minimum_fill, cost, 0, rank.dtype, indptr, indices, rank, most)
    return None if len(rank) > 0 and rank.min() < 0 else rank


def _hubs(row: np.ndarray, col: np.ndarray, indptr: np.ndarray) -> np.ndarray:
    """Which nodes have very many neighbours, relative to the size of the component."""
    hub = np.diff(indptr) > 16
    if hub.any():
        component = components(row, col, len(hub))
        size = np.bincount(component)[component]
        hub &= np.diff(indptr) > 10 * np.sqrt(size)
    return hub


@compiled()
def postorder(indptr, indices):
    """Renumber nodes, given in elimination order, so that subtrees are contiguous.

    The parent of k in the elimination tree is the first node in k's clique; it is found
    by climbing from each earlier neighbour, with path compression.
    """
    n = indptr.shape[0] - 1
    parent = np.full(n, -1, np.int64)
    shortcut = np.full(n, -1, np.int64)
    for k in range(n):
        for x in range(indptr[k], indptr[k + 1]):
            i = indices[x]
            while i >= 0 and i < k:
                above = shortcut[i]
                shortcut[i] = k
                if above < 0:
                    parent[i] = k
                i = above
    child = np.full(n, -1, np.int64)
    sibling = np.full(n, -1, np.int64)
    for k in range(n - 1, -1, -1):
        if parent[k] >= 0:
            sibling[k] = child[parent[k]]
            child[parent[k]] = k
    rank = np.empty(n, np.int64)
    count = 0
    for root in range(n):
        k = root if parent[root] < 0 else -1
        while k >= 0:
            while child[k] >= 0:  # down to a leaf
                below = child[k]
                child[k] = sibling[below]
                k = below
            rank[k] = count
            count += 1
            k = parent[k]
    return rank


@compiled()
def _minimum_fill(first, last, stop, scratch, indptr, indices, rank, most):
    """Approximate minimum mean local fill on a quotient graph; overwrites `indices`.

    A kernel with one task, so that it can be interrupted. Row i of `indices` first
    holds the *elements* (eliminated nodes whose clique contains i), then the remaining
    original neighbours; it never grows. The cliques of elements are stored in `pool`.

    Nodes with equal rows are merged: one represents all, and they are eliminated
    together. `weight[i]` is how many nodes i represents: 0 if it has been merged or
    eliminated. Sizes and degrees count all nodes, merged or not.
    """
    n = rank.shape[0]
    weight = np.ones(n, np.int64)
    merged, end = np.full(n, -1, np.int64), np.arange(n)  # lists of merged nodes
    elements = np.zeros(n, np.int64)  # how many entries of row i are elements
    length = indptr[1:] - indptr[:-1]  # how many entries row i has
    degree = length.copy()
    pool = np.empty(max(16, 2 * indices.shape[0]), np.int64)
    pool_start, pool_stop = np.zeros(n, np.int64), np.zeros(n, np.int64)
    size = np.zeros(n, np.int64)  # of each element's clique
    top = 0
    absorbed = np.zeros(n, np.bool_)
    member = np.full(n, -1, np.int64)  # the last pivot whose clique contains i
    outside = np.zeros(n, np.int64)  # stamp + |clique of e without the pivot's|
    stamp = 0
    digest = np.zeros(n, np.int64)  # equal if rows are equal
    same, next_same = np.full(n, -1, np.int64), np.empty(n, np.int64)
    mark, mark_stamp = np.full(n, -1, np.int64), 0
    # Queues of nodes with similar scores, as doubly linked lists. Degrees may be
    # overestimated, but each of at most n entries of a row counts at most n nodes.
    num_queues = _queue(float(n) ** 4) + 1
    head, tail = np.full(num_queues, -1, np.int64), np.full(num_queues, -1, np.int64)
    before, after = np.empty(n, np.int64), np.empty(n, np.int64)
    queue = np.empty(n, np.int64)
    for i in range(n):
        queue[i] = _queue(degree[i] * (degree[i] - 1.0)) if degree[i] > 0 else 0
        _append(i, queue[i], head, tail, before, after)
    lowest = 0
    step = 0
    entries = 0
    while step < n and entries <= most and not stopped(stop):
        while head[lowest] < 0:
            lowest += 1
        p = head[lowest]
        _unlink(p, lowest, head, tail, before, after)
        weight[p] = 0

        bound = length[p]
        for x in range(indptr[p], indptr[p] + elements[p]):
            bound += pool_stop[indices[x]] - pool_start[indices[x]]
        if top + bound > pool.shape[0]:
            pool = enlarged(pool, top, 2 * (top + bound))
        start = top
        for x in range(indptr[p], indptr[p] + length[p]):
            e = indices[x]
            if x < indptr[p] + elements[p]:
                for y in range(pool_start[e], pool_stop[e]):
                    i = pool[y]
                    if weight[i] > 0 and member[i] != p:
                        member[i] = p
                        pool[top] = i
                        top += 1
                        size[p] += weight[i]
                absorbed[e] = True
            elif weight[e] > 0 and member[e] != p:
                member[e] = p
                pool[top] = e
                top += 1
                size[p] += weight[e]

        stamp += n + 1
        for y in range(start, top):
            i = pool[y]
            for x in range(indptr[i], indptr[i] + elements[i]):
                e = indices[x]
                if not absorbed[e]:
                    if outside[e] < stamp:
                        outside[e] = stamp + size[e]
                    outside[e] -= weight[i]
        for y in range(start, top):
            i = pool[y]
            _unlink(i, queue[i], head, tail, before, after)
            begin = indptr[i]
            first_neighbour = begin + elements[i]
            w = begin
            d = 0
            total = 0
            for x in range(begin, first_neighbour):
                e = indices[x]
                # An element inside the new clique is absorbed.
                if not absorbed[e] and outside[e] > stamp:
                    d += outside[e] - stamp
                    total += e
                    indices[w] = e
                    w += 1
            kept = w
            for x in range(first_neighbour, begin + length[i]):
                j = indices[x]
                if weight[j] > 0 and member[j] != p:
                    d += weight[j]
                    total += j
                    indices[w] = j
                    w += 1
            if w == begin:  # no neighbours beyond the clique: i is eliminated with p
                size[p] -= weight[i]
                weight[i] = 0
                merged[end[p]] = i
                end[p] = end[i]
                continue
            # The pivot takes the place of an entry just removed: itself or an element.
            for x in range(w, kept, -1):
                indices[x] = indices[x - 1]
            indices[kept] = p
            elements[i] = kept - begin + 1
            length[i] = w + 1 - begin
            degree[i] = min(degree[i], d)
            digest[i] = total % n
            next_same[i] = same[total % n]
            same[total % n] = i

        for y in range(start, top):
            i = same[digest[pool[y]]]
            same[digest[pool[y]]] = -1
            while i >= 0 and next_same[i] >= 0:
                mark_stamp += 1
                for x in range(indptr[i], indptr[i] + length[i]):
                    mark[indices[x]] = mark_stamp
                previous, j = i, next_same[i]
                while j >= 0:
                    equal = length[j] == length[i] and elements[j] == elements[i]
                    x = indptr[j]
                    while equal and x < indptr[j] + length[j]:
                        equal = mark[indices[x]] == mark_stamp
                        x += 1
                    if equal:
                        weight[i] += weight[j]
                        weight[j] = 0
                        merged[end[i]] = j
                        end[i] = end[j]
                        next_same[previous] = next_same[j]
                    else:
                        previous = j
                    j = next_same[j]
                i = next_same[i]

        i, first_step = p, step
        while i >= 0:
            rank[i] = step
            step += 1
            i = merged[i]
        count = step - first_step
        entries += count * size[p] + count * (count - 1) // 2
        w = start
        for y in range(start, top):
            i = pool[y]
            if weight[i] > 0:
                pool[w] = i
                w += 1
                others = size[p] - weight[i]
                d = degree[i] + others
                degree[i] = d
                # Bounds the fill: pairs of neighbours that are not yet in one clique.
                pairs = d * (d - 1.0) - others * (others - 1.0)
                queue[i] = _queue(pairs / weight[i])
                _append(i, queue[i], head, tail, before, after)
                lowest = min(lowest, queue[i])
        top = w
        pool_start[p] = start
        pool_stop[p] = top
    if entries > most:
        rank[:] = -1


@compiled()
def _queue(score):
    return 1 + int(_PER_OCTAVE * np.log2(1.0 + score))


@compiled()
def _append(i, k, head, tail, before, after):
    """Append node i to list k."""
    before[i], after[i] = tail[k], -1
    if tail[k] < 0:
        head[k] = i
    else:
        after[tail[k]] = i
    tail[k] = i


@compiled()
def _unlink(i, k, head, tail, before, after):
    """Remove node i from list k."""
    if before[i] < 0:
        head[k] = after[i]
    else:
        after[before[i]] = after[i]
    if after[i] < 0:
        tail[k] = before[i]
    else:
        before[after[i]] = before[i]


@compiled()
def fill_pattern(indptr, indices, most=_ALL):
    """The column pattern of the factor of a graph that is eliminated in node order.

    Column k has the rows below k of its own edges and of its children in the
    elimination tree; its parent is the first of them. Rows are in no order. Stops early
    if there are more than `most` entries.
    """
    n = indptr.shape[0] - 1
    child = np.full(n, -1, np.int64)
    sibling = np.full(n, -1, np.int64)
    member = np.full(n, -1, np.int64)
    ptr = np.zeros(n + 1, np.int64)
    rows = np.empty(max(16, 2 * indices.shape[0]), np.int64)
    top = 0
    for k in range(n):
        bound = indptr[k + 1] - indptr[k]
        c = child[k]
        while c >= 0:
            bound += ptr[c + 1] - ptr[c]
            c = sibling[c]
        if top + bound > rows.shape[0]:
            rows = enlarged(rows, top, 2 * (top + bound))
        member[k] = k
        parent = n
        for x in range(indptr[k], indptr[k + 1]):
            i = indices[x]
            if i > k and member[i] != k:
                member[i] = k
                rows[top] = i
                top += 1
                parent = min(parent, i)
        c = child[k]
        while c >= 0:
            for x in range(ptr[c], ptr[c + 1]):
                i = rows[x]
                if member[i] != k:
                    member[i] = k
                    rows[top] = i
                    top += 1
                    parent = min(parent, i)
            c = sibling[c]
        ptr[k + 1] = top
        if top > most:
            return ptr, rows[:top]
        if parent < n:
            sibling[k] = child[parent]
            child[parent] = k
    return ptr, rows[:top]
