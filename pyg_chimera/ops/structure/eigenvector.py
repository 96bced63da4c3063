"""Eigenvector centrality: the Perron vector of each component of a graph."""

from itertools import pairwise

import numpy as np
from scipy.sparse import csr_array, eye_array
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import ArpackNoConvergence, eigsh, spsolve

from pyg_chimera.ops.structure.equitable_partition import equitable_partition

#: The number of cells up to which matrices are dense, and how often Lanczos' method is
#: restarted beyond it.
_DENSE, _RESTARTS = 60, 20


def eigenvector(ptr: np.ndarray, head: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Eigenvector centrality, component by component.

    Components that share one cell share all of them, and also their scaled scores, so
    components of the partition can be processed instead.

    Args:
        ptr (np.ndarray): Where the neighbours of each node begin, int64 [V + 1].
        head (np.ndarray): The neighbours; the relation must be symmetric.
        bounds (np.ndarray): Where the nodes of each graph begin, int64 [B + 1].
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
