"""Nodes that are structurally alike: the coarsest equitable partition of a graph."""

import numpy as np
from scipy.sparse import csr_array

from pyg_chimera.ops.common.cache import scrambled
from pyg_chimera.ops.common.compilation import compiled


def equitable_partition(
    ptr: np.ndarray, head: np.ndarray, bounds: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, csr_array]:
    """The coarsest equitable partition of each graph.

    All nodes of a cell have the same number of neighbours in each cell, and thus the
    same centralities. Computed on cells, scores of symmetric nodes are equal to the
    last bit, and eigenvectors in which they differ do not occur. Cells are numbered
    independently of the node numbers, so scores do not depend on these, not even by
    rounding.

    Returns:
        The cell of each node, the size of each cell, the first cell of each graph, and
        how many neighbours each node of a cell has in others, ascending.
    """
    code = scrambled(np.arange(1, len(ptr)))
    cell, limits = _refined(ptr, head, bounds, code)
    _, some, size = np.unique(cell, return_index=True, return_counts=True)
    ones = np.ones(len(head), np.int64)
    matrix = csr_array((ones, cell[head], ptr), (len(cell), len(size)))[some]
    matrix.sum_duplicates()
    return cell, size, limits, matrix


@compiled()
def _refined(ptr, head, bounds, code):
    """The cell of each node, and the first cell of each graph.

    In each round, nodes are told apart by the cells of those neighbours whose cell is
    new: by the sum of the cells' random codes, in 64 bits. Of each cell, some nodes
    stay in it: those without such neighbours, or else most of those that are alike. As
    all nodes of a cell have as many neighbours in it as a whole, they need not count.
    """
    n = ptr.shape[0] - 1
    cell, size = np.empty(n, np.int64), np.zeros(n, np.int64)
    code_sum = np.zeros(n, np.int64)
    moved, touched = np.empty(n, np.int64), np.empty(n, np.int64)
    limits = np.zeros(bounds.shape[0], np.int64)
    for g in range(bounds.shape[0] - 1):
        low, high, first = bounds[g], bounds[g + 1], limits[g]
        num_moved, num_cells = high - low, first + min(1, high - low)
        moved[:num_moved] = np.arange(low, high)
        cell[low:high], size[first:num_cells] = first, high - low
        while num_moved > 0:
            count = 0
            for i in moved[:num_moved]:
                for j in head[ptr[i] : ptr[i + 1]]:
                    if code_sum[j] == 0:
                        touched[count] = j
                        count += 1
                    code_sum[j] += code[cell[i] - first]
            some = touched[:count]
            some = some[np.argsort(code_sum[some], kind="mergesort")]
            some = some[np.argsort(cell[some], kind="mergesort")]
            sums, num_moved, begin = code_sum[some], 0, 0
            while begin < count:
                c, end, most, staying = cell[some[begin]], begin, 0, -1
                while end < count and cell[some[end]] == c:
                    start = end
                    while (
                        end < count
                        and cell[some[end]] == c
                        and sums[end] == sums[start]
                    ):
                        end += 1
                    if end - start > most:
                        most, staying = end - start, start
                if end - begin < size[c]:
                    staying = -1
                stays = False
                for s in range(begin, end):
                    if s == begin or sums[s] != sums[s - 1]:
                        stays = s == staying
                        num_cells += not stays
                    if not stays:
                        cell[some[s]] = num_cells - 1
                        size[c] -= 1
                        size[num_cells - 1] += 1
                        moved[num_moved] = some[s]
                        num_moved += 1
                begin = end
            code_sum[some] = 0
        limits[g + 1] = num_cells
    return cell, limits
