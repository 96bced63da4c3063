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
    graph are the same in a batch as alone, and nodes that only their numbers tell
    apart have the same score (except with :obj:`"bfs"` and :obj:`"cluster"`).

    Runs on the CPU. :obj:`"degree"`, :obj:`"pagerank"` and :obj:`"bfs"` take time
    linear in the number of edges, :obj:`"eigenvector"` mostly not much more,
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
    n = ptr.shape[0] - 1
    score = np.ones(n)
    new = np.empty(n)
    for g in range(bounds.shape[0] - 1):
        low, high = bounds[g], bounds[g + 1]
        for _ in range(200):
            idle = 0.0  # what isolated nodes spread evenly
            for i in range(low, high):
                if ptr[i] == ptr[i + 1]:
                    idle += score[i]
            new[low:high] = 0.15 + 0.85 * idle / max(high - low, 1)
            for j in range(low, high):
                for x in range(ptr[j], ptr[j + 1]):
                    new[head[x]] += 0.85 * score[j] / (ptr[j + 1] - ptr[j])
            change = 0.0
            for i in range(low, high):
                change = max(change, abs(new[i] - score[i]))
                score[i] = new[i]
            if change < 1e-12:
                break
        _tie(score[low:high])
    return score


@njit(cache=True, nogil=True)
def _eigenvector(ptr, head, bounds):  # type: ignore[no-untyped-def]
    """Eigenvector centrality, component by component."""
    n = ptr.shape[0] - 1
    score = np.zeros(n)
    order = np.empty(n, np.int64)
    level = np.empty(n, np.int64)
    seen = np.full(n, -1, np.int64)
    place = np.empty(n, np.int64)
    for g in range(bounds.shape[0] - 1):
        low, high = bounds[g], bounds[g + 1]
        largest = 0.0
        for i in range(low, high):
            if seen[i] < 0 and ptr[i] < ptr[i + 1]:
                count = search(ptr, head, i, order, level, seen, i)
                nodes = np.sort(order[:count])
                place[nodes] = np.arange(count)
                value, vector = _principal(ptr, head, nodes, place)
                largest = max(largest, value)
                score[nodes] = vector * value * np.sqrt(count / (high - low))
        if largest > 0:
            score[low:high] /= largest
            _tie(score[low:high])
    return score


@njit(cache=True, nogil=True)
def _principal(ptr, head, nodes, place):  # type: ignore[no-untyped-def]
    """The largest eigenvalue of a component's adjacency matrix, and its eigenvector.

    By Lanczos' method, which finds close eigenvalues apart where power iteration takes
    forever. As the vectors of the first pass are not kept, a second one adds them up.
    They start from all ones, so that no symmetry of the graph is ever broken.
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
        v = np.full(n, 1 / np.sqrt(n))
        new = np.empty(n)
        k = 0
        while k < steps:
            if sums:
                out += weight[k] * v
            for a in range(n):
                total = 0.0
                for x in range(ptr[nodes[a]], ptr[nodes[a] + 1]):
                    total += v[place[head[x]]]
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
    return value, np.abs(out) / np.sqrt(np.sum(out * out))


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


@njit(cache=True, nogil=True)
def _tie(score):  # type: ignore[no-untyped-def]
    """Makes scores of a graph the same that differ by rounding errors, in place."""
    if score.shape[0] == 0:
        return
    order = np.argsort(score)
    least = score[order[0]]
    last = least
    tolerance = 1e-10 * score[order[-1]]
    for i in order:
        if score[i] - last > tolerance:
            least = score[i]
        last = score[i]
        score[i] = least


_SCORES: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "degree": _degree,
    "eigenvector": _eigenvector,
    "pagerank": pagerank,
    "closeness": closeness,
    "bfs": _bfs,
    "cluster": _cluster,
}
