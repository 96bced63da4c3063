"""How important each node is, by which the nodes of a graph are sorted."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from numba import njit
from torch import Tensor

from pyg_chimera.ops.structure.checks import (
    check_batch,
    check_edge_index,
    check_within_graphs,
)
from pyg_chimera.ops.structure.distance import search
from pyg_chimera.ops.structure.elimination import adjacency, to_numpy
from pyg_chimera.ops.structure.order import breadth_first

__all__ = ["ORDERS", "closeness", "node_score", "pagerank"]

ORDERS = (
    "order",
    "degree",
    "eigenvector",
    "pagerank",
    "closeness",
    "bfs",
    "random",
    "cluster",
)


def node_score(
    edge_index: Tensor, num_nodes: int, method: str, batch: Tensor | None = None
) -> Tensor:
    r"""What to sort the nodes of each graph by, see
    :func:`~pyg_chimera.ops.node_sequences`.

    Edge directions, self-loops and duplicates make no difference. The scores of a
    graph are the same in a batch as alone. Except with :obj:`"bfs"` and
    :obj:`"cluster"`, they don't depend on how the nodes are numbered, and nodes that
    only their numbers tell apart have exactly the same score.

    Runs on the CPU. :obj:`"degree"` and :obj:`"bfs"` take time linear in the number of
    edges, :obj:`"pagerank"` and :obj:`"eigenvector"` mostly not much more,
    :obj:`"closeness"` :math:`O(|\mathcal{V}| |\mathcal{E}|)`. :obj:`"cluster"` is
    the slowest by far, as it runs in Python; better compute it once, with
    :class:`~pyg_chimera.transforms.NodeOrder`.

    Args:
        edge_index (torch.Tensor): The edges, :math:`[2, |\mathcal{E}|]`, integer.
        num_nodes (int): The number of nodes.
        method (str): The score.

            * :obj:`"order"`, :obj:`"random"`: zeros, int64, so that all nodes are
              equal.
            * :obj:`"degree"`: the number of different neighbours, int64.
            * :obj:`"eigenvector"`: eigenvector centrality, float64. Each component
              has the principal eigenvector of its adjacency matrix. In a connected
              graph its norm is 1; otherwise that of a component :math:`c` is
              :math:`\lambda_c / \lambda_{\max} \cdot \sqrt{|\mathcal{V}_c| /
              |\mathcal{V}|}`, by its principal eigenvalue and the largest one of the
              graph. Nodes without neighbours have 0.
            * :obj:`"pagerank"`: PageRank, damping 0.85, times the number of nodes of
              the graph, float64.
            * :obj:`"closeness"`: closeness centrality, scaled by the part of the graph
              that a node reaches, float64.
            * :obj:`"bfs"`: the place in a breadth-first search from the first node of
              each component, int64.
            * :obj:`"cluster"`: the number of the node's cluster by the Louvain method,
              int64. Clusters of a graph are numbered by their first nodes. Needs
              :obj:`networkx`.
        batch (torch.Tensor, optional): The graph of each node, integer
            :math:`[|\mathcal{V}|]`, sorted or not. (default: :obj:`None`)

    Returns:
        torch.Tensor: The score of each node, int64 or float64
        :math:`[|\mathcal{V}|]`, on the device of :obj:`edge_index`.

    Raises:
        ValueError: If :obj:`method` is not one of these, a shape is wrong, an index is
            out of range, or an edge joins two graphs of :obj:`batch`.
        TypeError: If :obj:`edge_index` or :obj:`batch` is not integer.
        ImportError: If :obj:`networkx` is needed and missing.
    """
    if method not in ORDERS:
        raise ValueError(f"'method' must be one of {list(ORDERS)} (got {method!r})")
    check_edge_index(edge_index, num_nodes)
    row, col = to_numpy(edge_index)
    name = np.arange(num_nodes)  # of each node, where graph comes after graph
    bounds = np.array([0, num_nodes])
    if batch is not None:
        check_batch(batch, num_nodes)
        graph = to_numpy(batch)
        check_within_graphs(row, col, graph)
        name[np.argsort(graph, kind="stable")] = np.arange(num_nodes)
        bounds = np.concatenate([[0], np.cumsum(np.bincount(graph))])
        row, col = name[row], name[col]

    score = np.zeros(num_nodes, np.int64)
    if method not in ("order", "random"):
        ptr, head = adjacency(row, col, num_nodes)
        score = _SCORES[method](ptr, head, bounds)
    return torch.from_numpy(score[name]).to(edge_index.device)


def _degree(ptr: np.ndarray, head: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    return np.diff(ptr)


def _bfs(ptr: np.ndarray, head: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    # As roots are taken by number, it goes from graph to graph.
    return breadth_first(ptr, head) - np.repeat(bounds[:-1], np.diff(bounds))


def _cluster(ptr: np.ndarray, head: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    try:
        import networkx
    except ImportError as error:
        if error.name != "networkx":
            raise
        raise ImportError(
            "Clusters by the Louvain method need 'networkx': pip install networkx"
        ) from error
    out = np.empty(len(ptr) - 1, np.int64)
    tail = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    for low, high in pairwise(bounds.tolist()):
        edges = slice(ptr[low], ptr[high])
        pairs = np.stack([tail[edges], head[edges]], axis=1) - low
        graph = networkx.empty_graph(high - low)
        graph.add_edges_from(pairs.tolist())
        clusters = networkx.community.louvain_communities(graph, seed=0)
        for number, nodes in enumerate(sorted(clusters, key=min)):
            out[low + np.fromiter(nodes, np.int64)] = number
    return out


@njit(cache=True, nogil=True)
def closeness(ptr, head, bounds):  # type: ignore[no-untyped-def]
    """Closeness centrality, scaled by the part of the graph that a node reaches.

    Args:
        ptr (np.ndarray): Where the neighbours of each node begin, int64 [V + 1].
        head (np.ndarray): The neighbours, which have their neighbours in turn.
        bounds (np.ndarray): Where the nodes of each graph begin, int64 [B + 1].
    """
    n = ptr.shape[0] - 1
    score = np.zeros(n)
    order = np.empty(n, np.int64)
    level = np.empty(n, np.int64)
    seen = np.full(n, -1, np.int64)
    for g in range(bounds.shape[0] - 1):
        size = bounds[g + 1] - bounds[g]
        for i in range(bounds[g], bounds[g + 1]):
            count = search(ptr, head, i, order, level, seen, i)
            total = 0
            for x in range(count):
                total += level[order[x]]
            if total > 0:
                score[i] = (count - 1) * (count - 1) / (total * (size - 1))
    return score


@njit(cache=True, nogil=True)
def pagerank(ptr, head, bounds):  # type: ignore[no-untyped-def]
    """Undirected PageRank, damping 0.85, times the number of nodes of each graph.

    Args:
        ptr (np.ndarray): Where the neighbours of each node begin, int64 [V + 1].
        head (np.ndarray): The neighbours, which have their neighbours in turn.
        bounds (np.ndarray): Where the nodes of each graph begin, int64 [B + 1].
    """
    cell, size, limits, ptr, head, count = _quotient(ptr, head, bounds)
    n = size.shape[0]
    score = np.ones(n)
    share = np.zeros(n)  # what a node gives to each neighbour
    new = np.empty(n)
    for g in range(bounds.shape[0] - 1):
        low, high = limits[g], limits[g + 1]
        for _ in range(200):
            idle = 0.0  # what isolated nodes spread evenly
            for i in range(low, high):
                if ptr[i] == ptr[i + 1]:
                    idle += size[i] * score[i]
                else:
                    share[i] = score[i] / np.sum(count[ptr[i] : ptr[i + 1]])
            rest = 0.15 + 0.85 * idle / max(bounds[g + 1] - bounds[g], 1)
            change = 0.0
            for i in range(low, high):
                total = 0.0
                for x in range(ptr[i], ptr[i + 1]):
                    total += count[x] * share[head[x]]
                new[i] = rest + 0.85 * total
                change = max(change, abs(new[i] - score[i]))
            score[low:high] = new[low:high]
            if change < 1e-12:
                break
    return score[cell]


@njit(cache=True, nogil=True)
def _eigenvector(ptr, head, bounds):  # type: ignore[no-untyped-def]
    """Eigenvector centrality, component by component.

    Components that share a cell share all of them, and then the scaled scores, too,
    so that those of the partition are looked at instead.
    """
    cell, size, limits, ptr, head, count = _quotient(ptr, head, bounds)
    n = size.shape[0]
    # Scaled by the roots of the sizes, the matrix is symmetric.
    entry = np.empty(head.shape[0])
    for i in range(n):
        for x in range(ptr[i], ptr[i + 1]):
            entry[x] = np.sqrt(count[x] * (count[x] * size[i] // size[head[x]]))
    score = np.zeros(n)
    order = np.empty(n, np.int64)
    level = np.empty(n, np.int64)
    seen = np.full(n, -1, np.int64)
    place = np.empty(n, np.int64)
    for g in range(bounds.shape[0] - 1):
        low, high = limits[g], limits[g + 1]
        largest = 0.0
        for i in range(low, high):
            if seen[i] < 0 and ptr[i] < ptr[i + 1]:
                num_cells = search(ptr, head, i, order, level, seen, i)
                cells = np.sort(order[:num_cells])
                place[cells] = np.arange(num_cells)
                total = np.sum(size[cells])
                root = np.sqrt(size[cells] / total)
                value, vector = _principal(ptr, head, entry, cells, place, root)
                largest = max(largest, value)
                score[cells] = vector / root * value
        if largest > 0:
            score[low:high] /= largest * np.sqrt(bounds[g + 1] - bounds[g])
    return score[cell]


@njit(cache=True, nogil=True)
def _quotient(ptr, head, bounds):  # type: ignore[no-untyped-def]
    """The coarsest equitable partition of each graph.

    All nodes of a cell have equally many neighbours in each cell, so that their
    centralities are the same. In the partition, symmetric nodes are equal to the last
    bit, and an eigenvalue whose vector has them differ is none. The numbers of the
    cells say nothing about those of the nodes, so that scores don't depend on them at
    all, even where rounding decides.

    By `"Tight Lower and Upper Bounds for the Complexity of Canonical Colour
    Refinement" <https://arxiv.org/abs/1509.08251>`_, in O(E log V) time.

    Returns:
        The cell of each node, the size of each cell, where the cells of each graph
        begin, and, as `ptr` and `head` for nodes, the cells that are neighbours of a
        cell, ascending, and how many neighbours a node of the cell has there.
    """
    n = ptr.shape[0] - 1
    node = np.arange(n)  # cell by cell
    place = np.arange(n)  # of each node among them
    cell = np.empty(n, np.int64)
    first = np.empty(n, np.int64)
    size = np.zeros(n, np.int64)
    number = np.zeros(n, np.int64)  # of neighbours in the cell that refines
    touched = np.empty(n, np.int64)
    queue = np.empty(n, np.int64)
    queued = np.zeros(n, np.bool_)
    limits = np.zeros(bounds.shape[0], np.int64)
    num_cells = 0
    for g in range(bounds.shape[0] - 1):
        low, high = bounds[g], bounds[g + 1]
        begin = end = 0  # of the queue, where each cell is once at most
        if low < high:
            cell[low:high] = num_cells
            first[num_cells], size[num_cells] = low, high - low
            queue[0] = num_cells
            queued[num_cells] = True
            end = 1
            num_cells += 1
        while begin < end:
            c = queue[begin % n]
            queued[c] = False
            begin += 1
            num_touched = 0
            for p in range(first[c], first[c] + size[c]):
                for x in range(ptr[node[p]], ptr[node[p] + 1]):
                    if number[head[x]] == 0:
                        touched[num_touched] = head[x]
                        num_touched += 1
                    number[head[x]] += 1
            key = np.empty(num_touched, np.int64)
            for t in range(num_touched):
                key[t] = cell[touched[t]] * n + number[touched[t]]
            order = np.argsort(key)
            t = 0
            while t < num_touched:
                c = cell[touched[order[t]]]
                after = t + 1
                while after < num_touched and key[order[after]] // n == c:
                    after += 1
                # Those that have most neighbours go to the end of their cell and
                # leave as new cells, and the first ones stay.
                stop = first[c] + size[c]
                old = num_cells
                if after - t < size[c] or key[order[t]] < key[order[after - 1]]:
                    for s in range(after - 1, t - 1, -1):
                        stop -= 1
                        i, j = touched[order[s]], node[stop]
                        node[place[i]], place[j] = j, place[i]
                        node[stop], place[i] = i, stop
                    for s in range(t, after):
                        if stop + s - t == first[c]:
                            continue
                        if s == t or key[order[s]] != key[order[s - 1]]:
                            first[num_cells], size[num_cells] = stop + s - t, 0
                            num_cells += 1
                        if num_cells > old:
                            cell[touched[order[s]]] = num_cells - 1
                            size[num_cells - 1] += 1
                    for k in range(old, num_cells):
                        size[c] -= size[k]
                    # As the whole has refined, or will do so, one part need not.
                    largest = c
                    for k in range(old, num_cells):
                        if size[k] > size[largest]:
                            largest = k
                    if queued[c]:
                        largest = -1
                    for k in range(old - 1, num_cells):
                        part = c if k < old else k
                        if not queued[part] and part != largest:
                            queue[end % n] = part
                            end += 1
                            queued[part] = True
                t = after
            number[touched[:num_touched]] = 0
        limits[g + 1] = num_cells

    cell_ptr = np.zeros(num_cells + 1, np.int64)
    cell_head = np.empty(head.shape[0], np.int64)
    count = np.empty(head.shape[0], np.int64)
    fill = 0
    for c in range(num_cells):
        i = node[first[c]]  # as good as any other one
        last = -1
        for k in np.sort(cell[head[ptr[i] : ptr[i + 1]]]):
            if k != last:
                cell_head[fill], count[fill] = k, 0
                fill += 1
                last = k
            count[fill - 1] += 1
        cell_ptr[c + 1] = fill
    return cell, size[:num_cells], limits, cell_ptr, cell_head[:fill], count[:fill]


@njit(cache=True, nogil=True)
def _principal(ptr, head, entry, nodes, place, start):  # type: ignore[no-untyped-def]
    """The largest eigenvalue of a component's matrix, and its eigenvector of norm 1.

    By Lanczos' method, which finds close eigenvalues apart where power iteration takes
    forever. As the vectors of the first pass are not kept, a second one adds them up.
    """
    n = nodes.shape[0]
    limit = 100 + min(10 * n, 20_000)  # far more than ever seen
    alpha = np.zeros(limit)
    beta = np.zeros(limit + 1)  # beta[k] leads to vector k
    weight = np.zeros(0)
    value = 0.0
    out = np.zeros(n)
    steps, check = limit, min(n, 8)
    for sums in (False, True):
        last = np.zeros(n)
        v = start.copy()
        new = np.empty(n)
        k = 0
        while k < steps:
            if sums:
                out += weight[k] * v
            for a in range(n):
                total = 0.0
                for x in range(ptr[nodes[a]], ptr[nodes[a] + 1]):
                    total += entry[x] * v[place[head[x]]]
                new[a] = total - beta[k] * last[a]
            if not sums:
                alpha[k] = np.sum(new * v)
            new -= alpha[k] * v
            if not sums:
                beta[k + 1] = np.sqrt(np.sum(new * new))
            k += 1
            if not sums and (k in (check, limit) or beta[k] < 1e-13 * alpha[0]):
                value, weight = _largest(alpha[:k], beta[:k], value)
                if beta[k] * weight[-1] <= 1e-11 * value:
                    steps = k
                check = k + 1 + k // 8
            if k < steps:
                last, v, new = v, new, last
                v /= beta[k]
    out = np.abs(out)
    _polish(ptr, head, entry, nodes, place, value, out)
    return value, out / np.sqrt(np.sum(out * out))


@njit(cache=True, nogil=True)
def _polish(ptr, head, entry, nodes, place, value, v):  # type: ignore[no-untyped-def]
    """Makes also small entries of an eigenvector exact, in place.

    Relative to the largest one, they are rounding errors. Gauss and Seidel's method
    finds them from their neighbours, from below, as nothing is ever subtracted. It is
    slow only far away from the largest ones, around others that are nearly as large in
    their own surroundings; there, entries of less than 1e-12 may remain too small.
    """
    n = nodes.shape[0]
    if n == 1:
        return
    v[v < 1e-12 * np.max(v)] = 0
    for sweep in range(1000):
        change = 0.0
        for b in range(n):
            a = b if sweep % 2 == 0 else n - 1 - b
            total, own = 0.0, 0.0
            for x in range(ptr[nodes[a]], ptr[nodes[a] + 1]):
                if head[x] == nodes[a]:
                    own = entry[x]
                else:
                    total += entry[x] * v[place[head[x]]]
            total /= value - own
            change = max(change, abs(total - v[a]) / (total + 1e-300))
            v[a] = total
        if change < 1e-13:
            break


@njit(cache=True, nogil=True)
def _largest(alpha, beta, low):  # type: ignore[no-untyped-def]
    """The largest eigenpair of a tridiagonal matrix, eigenvalue at least `low`."""
    n = alpha.shape[0]
    high = 0.0
    for k in range(n):
        after = beta[k + 1] if k + 1 < n else 0.0
        high = max(high, alpha[k] + (beta[k] if k > 0 else 0.0) + after)
    high = high * (1 + 1e-12) + 1e-300
    pivot = np.empty(n)
    for step in range(60):
        # x I - T is positive definite if x is larger than all eigenvalues
        x = high if step == 0 else (low + high) / 2
        if step > 0 and high - low <= 4e-16 * high:
            break
        below = False
        for k in range(n):
            pivot[k] = x - alpha[k] - (beta[k] * beta[k] / pivot[k - 1] if k else 0.0)
            if pivot[k] <= 0:
                below = True
                break
        if below:
            low = x
        else:
            high = x
    for k in range(n):
        pivot[k] = high - alpha[k] - (beta[k] * beta[k] / pivot[k - 1] if k else 0.0)
    vector = np.ones(n)
    for _ in range(4):  # inverse iteration
        for k in range(1, n):
            vector[k] += beta[k] / pivot[k - 1] * vector[k - 1]
        vector[n - 1] /= pivot[n - 1]
        for k in range(n - 2, -1, -1):
            vector[k] = (vector[k] + beta[k + 1] * vector[k + 1]) / pivot[k]
        vector /= np.sqrt(np.sum(vector * vector))
    return high, vector


_SCORES: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "degree": _degree,
    "eigenvector": _eigenvector,
    "pagerank": pagerank,
    "closeness": closeness,
    "bfs": _bfs,
    "cluster": _cluster,
}
