"""Elimination orders: in which order the nodes leave, and what that costs.

Gaussian elimination of a node joins its remaining neighbours into a clique. The
order decides how many entries this adds (the *fill-in*), and with it the cost of
everything that `pyg_chimera.ops.resolvent_mix` does with the factors.
"""

import numpy as np
import torch
from numba import njit
from torch import Tensor

from pyg_chimera.ops.common.checks import check_edge_index
from pyg_chimera.ops.structure.csr import adjacency, to_numpy

__all__ = ["elimination_rank"]

_ALL = np.iinfo(np.int64).max


def elimination_rank(edge_index: Tensor, num_nodes: int) -> Tensor:
    r"""A fill-reducing elimination order of the (undirected) graph.

    Approximate minimum degree on a quotient graph: `"An Approximate Minimum Degree
    Ordering Algorithm" <https://doi.org/10.1137/S0895479894278952>`_ (Amestoy, Davis
    and Duff, 1996), then a postorder of the elimination tree, which keeps the fill-in
    and brings what is needed together close together. Edge directions, self-loops and
    duplicates are ignored.

    Args:
        edge_index (torch.Tensor): The edges, :math:`[2, |\mathcal{E}|]`, integer.
        num_nodes (int): The number of nodes.

    Returns:
        torch.Tensor: For each node, how many nodes are eliminated before it,
        int64 :math:`[|\mathcal{V}|]`, on the device of :obj:`edge_index`.

    Raises:
        ValueError: If :obj:`edge_index` has a wrong shape or is out of range.
        TypeError: If :obj:`edge_index` is not integer.
    """
    check_edge_index(edge_index, num_nodes)
    row, col = to_numpy(edge_index)
    rank = elimination_order(row, col, num_nodes)
    return torch.from_numpy(rank).to(edge_index.device)


@njit(cache=True, nogil=True)
def elimination_order(row, col, n):  # type: ignore[no-untyped-def]
    """The rank of each node in a fill-reducing order."""
    indptr, indices = adjacency(row, col, n)
    # Hubs go last: they would be scanned each time that a neighbour leaves.
    degree = np.diff(indptr)
    hub = degree > max(16.0, 10.0 * np.sqrt(n))
    hubs = np.flatnonzero(hub)
    place = np.cumsum(~hub) - 1
    inside = ~(hub[row] | hub[col])
    kept = n - len(hubs)
    rank = np.empty(n, np.int64)
    rank[~hub] = minimum_degree(
        *adjacency(place[row][inside], place[col][inside], kept)
    )
    rank[hubs[np.argsort(degree[hubs], kind="mergesort")]] = np.arange(kept, n)
    indptr, indices = adjacency(rank[row], rank[col], n)
    return postorder(indptr, indices)[rank]


@njit(cache=True, nogil=True)
def postorder(indptr, indices):  # type: ignore[no-untyped-def]
    """Renumber nodes, eliminated in order, such that subtrees are contiguous.

    The parent of k in the elimination tree is the first node that k's clique holds;
    it is found by climbing from each earlier neighbour, along shortcuts.
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


@njit(cache=True, nogil=True)
def minimum_degree(indptr, indices):  # type: ignore[no-untyped-def]
    """Approximate minimum degree; overwrites `indices`.

    Row i of `indices` holds first the *elements* (eliminated nodes whose clique
    holds i), then the remaining original neighbours; together they never grow.
    The clique of an element lies in `pool`.
    """
    n = indptr.shape[0] - 1
    elements = np.zeros(n, np.int64)  # how many entries of row i are elements
    length = np.diff(indptr)  # how many entries of row i are in use
    degree = length.copy()
    pool = np.empty(max(16, 4 * indices.shape[0]), np.int64)
    pool_start = np.zeros(n, np.int64)
    pool_stop = np.zeros(n, np.int64)
    top = 0
    # Buckets of nodes of equal degree, as doubly linked lists.
    head = np.full(n + 1, -1, np.int64)
    after = np.full(n, -1, np.int64)
    before = np.full(n, -1, np.int64)
    for i in range(n - 1, -1, -1):
        d = degree[i]
        after[i] = head[d]
        if head[d] >= 0:
            before[head[d]] = i
        head[d] = i
    rank = np.full(n, -1, np.int64)
    absorbed = np.zeros(n, np.bool_)
    member = np.full(n, -1, np.int64)  # the last pivot whose clique holds i
    outside = np.zeros(n, np.int64)  # stamp + |clique of e without the pivot's|
    stamp = 0
    lowest = 0
    for step in range(n):
        while head[lowest] < 0:
            lowest += 1
        p = head[lowest]
        head[lowest] = after[p]
        if after[p] >= 0:
            before[after[p]] = -1
        rank[p] = step

        bound = length[p]
        for x in range(indptr[p], indptr[p] + elements[p]):
            bound += pool_stop[indices[x]] - pool_start[indices[x]]
        if top + bound > pool.shape[0]:
            grown = np.empty(2 * (top + bound), np.int64)
            grown[:top] = pool[:top]
            pool = grown
        start = top
        member[p] = p
        for x in range(indptr[p], indptr[p] + length[p]):
            e = indices[x]
            if x < indptr[p] + elements[p]:
                for y in range(pool_start[e], pool_stop[e]):
                    i = pool[y]
                    if member[i] != p:
                        member[i] = p
                        pool[top] = i
                        top += 1
                absorbed[e] = True
            elif member[e] != p:
                member[e] = p
                pool[top] = e
                top += 1
        pool_start[p] = start
        pool_stop[p] = top
        size = top - start

        stamp += n + 1
        for y in range(start, top):
            i = pool[y]
            for x in range(indptr[i], indptr[i] + elements[i]):
                e = indices[x]
                if not absorbed[e]:
                    if outside[e] < stamp:
                        outside[e] = stamp + pool_stop[e] - pool_start[e]
                    outside[e] -= 1
        for y in range(start, top):
            i = pool[y]
            begin = indptr[i]
            stop = begin + length[i]
            first_neighbour = begin + elements[i]
            w = begin
            d = size - 1
            for x in range(begin, first_neighbour):
                e = indices[x]
                # An element inside the new clique is absorbed.
                if not absorbed[e] and outside[e] > stamp:
                    d += outside[e] - stamp
                    indices[w] = e
                    w += 1
            kept = w
            for x in range(first_neighbour, stop):
                j = indices[x]
                if member[j] != p:
                    d += 1
                    indices[w] = j
                    w += 1
            # The pivot replaces an entry that has just gone: itself or an element.
            for x in range(w, kept, -1):
                indices[x] = indices[x - 1]
            indices[kept] = p
            elements[i] = kept - begin + 1
            length[i] = w + 1 - begin
            d = min(d, degree[i] + size - 1, n - step - 2)
            if after[i] >= 0:
                before[after[i]] = before[i]
            if before[i] >= 0:
                after[before[i]] = after[i]
            else:
                head[degree[i]] = after[i]
            degree[i] = d
            after[i] = head[d]
            before[i] = -1
            if head[d] >= 0:
                before[head[d]] = i
            head[d] = i
            lowest = min(lowest, d)
    return rank


@njit(cache=True, nogil=True)
def fill_pattern(indptr, indices, most=_ALL):  # type: ignore[no-untyped-def]
    """Column pattern of the factor of a graph eliminated in node order.

    Column k is what its own edges and its children in the elimination tree reach
    beyond k; its parent is the first of these. Rows come out ascending. It gives up
    with more than `most` entries.
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
            grown = np.empty(2 * (top + bound), np.int64)
            grown[:top] = rows[:top]
            rows = grown
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
    rows = rows[:top].copy()
    for k in range(n):
        rows[ptr[k] : ptr[k + 1]].sort()
    return ptr, rows
