"""Node scores, such as centralities, by which the nodes of a graph are sorted."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from scipy.sparse import csr_array, eye_array
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import ArpackNoConvergence, eigsh, spsolve
from torch import Tensor

from pyg_chimera.ops.common.checks import (
    check_batch,
    check_edge_index,
    check_option,
    check_within_graphs,
)
from pyg_chimera.ops.common.compilation import compiled
from pyg_chimera.ops.structure.csr import adjacency, to_numpy
from pyg_chimera.ops.structure.distance import search
from pyg_chimera.ops.structure.equitable_partition import equitable_partition
from pyg_chimera.ops.structure.node_order import breadth_first
from pyg_chimera.ops.structure.registered import structural_op

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
_REAL = ("eigenvector", "pagerank", "closeness")  # the others are integers
_STEPS = 200  # of PageRank; 0.85 ** 200 is a rounding error
#: Of eigenvectors: the number of cells up to which matrices are dense, and how often
#: Lanczos' method is restarted beyond it.
_DENSE, _RESTARTS = 60, 20
_GOLDEN = 0.6180339887498949  # multiples of it, modulo one, are spread evenly


def node_score(
    edge_index: Tensor, num_nodes: int, order: str, batch: Tensor | None = None
) -> Tensor:
    r"""The scores by which the nodes of each graph are sorted, see
    :func:`~pyg_chimera.ops.node_sequences`.

    Edge directions, self-loops and duplicates make no difference. The scores of a graph
    are the same in a batch as on its own. Except with :obj:`"bfs"` and
    :obj:`"cluster"`, they don't depend on how the nodes are numbered, and nodes that
    differ only in their numbering have exactly the same score.

    Runs on the CPU. :obj:`"degree"` and :obj:`"bfs"` take time linear in the number of
    edges, :obj:`"pagerank"` and :obj:`"eigenvector"` usually not much more, and
    :obj:`"closeness"` :math:`O(|\mathcal{V}| |\mathcal{E}|)`. :obj:`"cluster"` is by
    far the slowest, as it runs in Python; compute it once, with
    :class:`~pyg_chimera.transforms.NodeOrder`.

    Args:
        edge_index (torch.Tensor): The edges, :math:`[2, |\mathcal{E}|]`, integer.
        num_nodes (int): The number of nodes.
        order (str): The score.

            * :obj:`"order"`, :obj:`"random"`: zeros, int64, so that all nodes are tied.
            * :obj:`"degree"`: the number of distinct neighbours, int64.
            * :obj:`"eigenvector"`: eigenvector centrality, float64. Each component has
              the principal eigenvector of its adjacency matrix. In a connected graph,
              its norm is 1. Otherwise, that of a component :math:`c` is
              :math:`\lambda_c / \lambda_{\max} \cdot \sqrt{|\mathcal{V}_c| /
              |\mathcal{V}|}`, with its principal eigenvalue and the largest one of the
              graph. Nodes without neighbours have 0.
            * :obj:`"pagerank"`: PageRank with damping 0.85, times the number of nodes
              of the graph, float64.
            * :obj:`"closeness"`: closeness centrality, scaled by the fraction of the
              graph that a node reaches, float64.
            * :obj:`"bfs"`: the position in a breadth-first search from the first node
              of each component, int64.
            * :obj:`"cluster"`: the number of the node's cluster, found by the Louvain
              method, int64. Clusters of a graph are numbered by their first nodes.
        batch (torch.Tensor, optional): The graph of each node, integer
            :math:`[|\mathcal{V}|]`, sorted or not. (default: :obj:`None`)

    Returns:
        torch.Tensor: The score of each node, int64 or float64
        :math:`[|\mathcal{V}|]`, on the device of :obj:`edge_index`.

    Raises:
        ValueError: If :obj:`order` is not one of these, a shape is wrong, an index is
            out of range, or an edge joins two graphs of :obj:`batch`.
        TypeError: If :obj:`edge_index` or :obj:`batch` is not integer.
    """
    check_option("order", order, ORDERS)
    return _node_score(edge_index, batch, num_nodes, order)


def _fake(
    edge_index: Tensor, batch: Tensor | None, num_nodes: int, order: str
) -> Tensor:
    dtype = torch.float64 if order in _REAL else torch.int64
    return edge_index.new_empty(num_nodes, dtype=dtype)


@structural_op(_fake)
def _node_score(
    edge_index: Tensor, batch: Tensor | None, num_nodes: int, order: str
) -> Tensor:
    check_edge_index(edge_index, num_nodes)
    row, col = to_numpy(edge_index)
    name = np.arange(num_nodes)  # node numbers that are consecutive in each graph
    bounds = np.array([0, num_nodes])
    if batch is not None:
        check_batch(batch, num_nodes)
        graph = to_numpy(batch)
        check_within_graphs(row, col, graph)
        node = np.argsort(graph, kind="stable")
        name[node] = np.arange(num_nodes)
        begin = np.flatnonzero(np.diff(graph[node])) + 1
        bounds = np.concatenate([[0], begin, [num_nodes]])
        row, col = name[row], name[col]

    score = np.zeros(num_nodes, np.int64)
    if order in _SCORES:
        ptr, head = adjacency(row, col, num_nodes)
        score = _SCORES[order](ptr, head, bounds)
    return torch.from_numpy(score[name]).to(edge_index.device)


def _degree(ptr: np.ndarray, head: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    return np.diff(ptr)


def _bfs(ptr: np.ndarray, head: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    # Roots are visited in the order of their numbers, so graph by graph.
    return breadth_first(ptr, head) - np.repeat(bounds[:-1], np.diff(bounds))


def _cluster(ptr: np.ndarray, head: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    import networkx  # slow to import

    out = np.empty(len(ptr) - 1, np.int64)
    tail = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    for low, high in pairwise(bounds.tolist()):
        edges = slice(ptr[low], ptr[high])
        pairs = np.stack([tail[edges], head[edges]], axis=1) - low
        pairs = pairs[pairs[:, 0] < pairs[:, 1]]
        # With ties, networkx may move nodes back and forth for ever, by what rounding
        # makes of no gain at all: weights are not quite one, and differ.
        weight = 1 + 1e-6 * (np.arange(len(pairs)) * _GOLDEN % 1)
        graph = networkx.empty_graph(high - low)
        graph.add_weighted_edges_from(
            (i, j, w) for (i, j), w in zip(pairs.tolist(), weight.tolist(), strict=True)
        )
        clusters = networkx.community.louvain_communities(graph, seed=0)
        for number, nodes in enumerate(sorted(clusters, key=min)):
            out[low + np.fromiter(nodes, np.int64)] = number
    return out


@compiled()
def closeness(ptr, head, bounds):
    """Closeness centrality, scaled by the fraction of the graph that a node reaches."""
    n = ptr.shape[0] - 1
    score = np.zeros(n)
    order = np.empty(n, np.int64)
    level = np.empty(n, np.int64)
    seen = np.full(n, -1, np.int64)
    for g in range(bounds.shape[0] - 1):
        size = bounds[g + 1] - bounds[g]
        for i in range(bounds[g], bounds[g + 1]):
            count = search(ptr, head, i, order, level, seen, i, n)
            total = 0
            for x in range(count):
                total += level[order[x]]
            if total > 0:
                score[i] = (count - 1) * (count - 1) / (total * (size - 1))
    return score


def pagerank(ptr: np.ndarray, head: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Undirected PageRank, damping 0.85, times the number of nodes of each graph."""
    cell, size, limits, neighbours = equitable_partition(ptr, head, bounds)
    degree = neighbours.sum(1)
    passed = neighbours.astype(float)
    passed.data *= 0.85 / degree[passed.indices]
    # Isolated nodes pass on all they have evenly, and receive nothing else themselves.
    graph = np.repeat(np.arange(len(limits) - 1), np.diff(limits))
    idle = np.bincount(graph, size * (degree == 0), len(limits) - 1)
    rest = score = (0.15 / (1 - 0.85 * idle / np.maximum(np.diff(bounds), 1)))[graph]
    for _ in range(_STEPS):
        score = rest + passed @ score
    return score[cell]


def eigenvector(ptr: np.ndarray, head: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Eigenvector centrality, component by component.

    Components that share one cell share all of them, and also their scaled scores, so
    components of the partition can be processed instead.
    """
    cell, size, limits, matrix = equitable_partition(ptr, head, bounds)
    # Scaled by the square roots of the sizes, the matrix of cells is symmetric.
    back = matrix.data * np.repeat(size, np.diff(matrix.indptr)) // size[matrix.indices]
    matrix.data = np.sqrt(matrix.data * back)
    number, component = connected_components(matrix, directed=False)
    order = np.argsort(component, kind="stable")
    blocks = matrix[order][:, order]  # on the diagonal
    score, value = np.zeros(len(size)), np.zeros(len(size))
    ends = np.cumsum(np.bincount(component, minlength=number))
    for first, last in pairwise((0, *ends.tolist())):
        a, b = blocks.indptr[first], blocks.indptr[last]
        if a < b:
            entries = blocks.data[a:b], blocks.indices[a:b] - first
            block = csr_array(
                (*entries, blocks.indptr[first : last + 1] - a), (last - first,) * 2
            )
            part = order[first:last]
            value[part], vector = _perron(block)
            score[part] = vector * np.sqrt(np.sum(size[part]) / size[part])
    # Where the graphs' cells begin, as none is empty but those of graphs without nodes.
    for low, high, nodes in zip(limits, limits[1:], np.diff(bounds), strict=False):
        if low < high and (largest := value[low:high].max()) > 0:
            score[low:high] *= value[low:high] / (largest * np.sqrt(nodes))
    return score[cell]


def _perron(matrix: csr_array) -> tuple[float, np.ndarray]:
    """The largest eigenvalue of a connected, symmetric matrix and its unit vector."""
    n = matrix.shape[0]
    if n <= _DENSE:
        values, vectors = np.linalg.eigh(matrix.toarray())
        values, vectors = values[-1:], vectors[:, -1:]
    else:
        start = np.ones(n)
        try:
            values, vectors = eigsh(matrix, 1, which="LA", v0=start, maxiter=_RESTARTS)
        except ArpackNoConvergence:  # of elongated graphs, eigenvalues are close
            bound = matrix.sum(1).max() * (1 + 1e-9)
            values, vectors = eigsh(matrix.tocsc(), 1, sigma=bound, v0=start)
    value, x = float(values[0]), np.abs(vectors[:, 0])
    # Small entries are rounding errors of the largest, and follow from the others.
    small = x < 1e-6 * x.max()
    if small.any():
        rows, x[small] = matrix[small], 0
        system = value * eye_array(small.sum()) - rows[:, small]
        x[small] = spsolve(system.tocsc(), rows @ x)
    return value, x


#: From where the neighbours of each node begin, [V + 1], these neighbours, in both
#: directions, and where the nodes of each graph begin, [B + 1].
_SCORES: dict[str, Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]] = {
    "degree": _degree,
    "eigenvector": eigenvector,
    "pagerank": pagerank,
    "closeness": closeness,
    "bfs": _bfs,
    "cluster": _cluster,
}
