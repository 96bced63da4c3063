"""Eigenvector centrality: the Perron vector of each component of a graph."""

import numpy as np

from pyg_chimera.ops.common.compilation import compiled
from pyg_chimera.ops.structure.distance import search
from pyg_chimera.ops.structure.elimination import fill_pattern
from pyg_chimera.ops.structure.equitable_partition import equitable_partition

__all__ = ["eigenvector"]


def eigenvector(ptr: np.ndarray, head: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Eigenvector centrality, component by component.

    Components that share one cell share all of them, and also their scaled scores, so
    components of the partition can be processed instead.

    Args:
        ptr (np.ndarray): Where the neighbours of each node begin, int64 [V + 1].
        head (np.ndarray): The neighbours; the relation must be symmetric.
        bounds (np.ndarray): Where the nodes of each graph begin, int64 [B + 1].
    """
    cell, size, limits, ptr, head, count = equitable_partition(ptr, head, bounds)
    return _scores(size, limits, ptr, head, count, bounds)[cell]


@compiled()
def _scores(size, limits, ptr, head, count, bounds):  # type: ignore[no-untyped-def]
    """The score of each cell, whose nodes have `count` neighbours in cell `head`."""
    n = size.shape[0]
    score = np.zeros(n)
    order = np.empty(n, np.int64)
    level = np.empty(n, np.int64)
    seen = np.full(n, -1, np.int64)
    place = np.empty(n, np.int64)
    for g in range(bounds.shape[0] - 1):
        low, high = limits[g], limits[g + 1]
        largest = 0.0
        for i in range(low, high):
            if seen[i] >= 0 or ptr[i] == ptr[i + 1]:
                continue
            num_cells = search(ptr, head, i, order, level, seen, i, n)
            search(ptr, head, order[num_cells - 1], order, level, seen, i + n, n)
            depth = level[order[num_cells - 1]]
            # From the outside in: a perfect elimination order for trees, and a good one
            # for elongated graphs.
            cells = order[:num_cells][::-1].copy()
            for k in range(num_cells):
                place[cells[k]] = k
            rows, cols, counts = _part(ptr, head, count, cells, place)
            sizes = size[cells]
            # A step of Lanczos' method costs as much as a few entries of the matrix; it
            # takes some steps per hop between the most distant cells.
            if _is_cheap(rows, cols, (4 + 2 * depth) * cols.shape[0]):
                value, vector = _by_elimination(rows, cols, counts)
            else:
                value, vector = _by_lanczos(rows, cols, counts, sizes)
            mean = np.sum(sizes * vector * vector) / np.sum(sizes)
            score[cells] = vector * (value / np.sqrt(mean))
            largest = max(largest, value)
        if largest > 0:
            score[low:high] /= largest * np.sqrt(bounds[g + 1] - bounds[g])
    return score


@compiled()
def _part(ptr, head, count, cells, place):  # type: ignore[no-untyped-def]
    """The submatrix of the given rows, with columns renumbered by `place`."""
    part_ptr = np.zeros(cells.shape[0] + 1, np.int64)
    for a in range(cells.shape[0]):
        part_ptr[a + 1] = part_ptr[a] + ptr[cells[a] + 1] - ptr[cells[a]]
    part_head = np.empty(part_ptr[-1], np.int64)
    part_count = np.empty(part_ptr[-1], np.int64)
    for a in range(cells.shape[0]):
        row = slice(ptr[cells[a]], ptr[cells[a] + 1])
        part_head[part_ptr[a] : part_ptr[a + 1]] = place[head[row]]
        part_count[part_ptr[a] : part_ptr[a + 1]] = count[row]
    return part_ptr, part_head, part_count


@compiled()
def _is_cheap(ptr, head, limit):  # type: ignore[no-untyped-def]
    """Whether elimination in numerical order takes at most `limit` steps."""
    n = ptr.shape[0] - 1
    parent = np.full(n, -1, np.int64)
    last = np.full(n, -1, np.int64)
    length = np.zeros(n, np.int64)  # of the columns of the factor
    total = 0
    for k in range(n):
        last[k] = k
        for x in range(ptr[k], ptr[k + 1]):
            i = head[x]
            while i < k and last[i] != k:
                if parent[i] < 0:
                    parent[i] = k
                last[i] = k
                total += 2 * length[i] + 1  # the difference of consecutive squares
                length[i] += 1
                i = parent[i]
        if total > limit:
            return False
    return True


@compiled()
def _by_elimination(ptr, head, count):  # type: ignore[no-untyped-def]
    """The largest eigenvalue of a matrix C, and its eigenvector, to full accuracy.

    By Noda's method (Numerische Mathematik 17, 1971): inverse iteration with the shift
    m = max (C x)_i / x_i, which is never below the eigenvalue. Each step solves
    (m I - C) D y = x, where D = diag(x), and the next x is D y. The rows of
    D^-1 (m I - C) D have the sums m - (C x)_i / x_i >= 0. From these and the
    off-diagonal entries, `"Accurate computation of the smallest eigenvalue of a
    diagonally dominant M-matrix" <https://doi.org/10.1090/S0025-5718-01-01325-4>`_
    (Alfa, Xue and Ye, 2002) eliminates (here, in numerical order) without subtractions.
    So each entry is accurate, however small it is and however close the next eigenvalue
    is. The row sums are small differences, and are computed in twice the precision.
    """
    n = ptr.shape[0] - 1
    fill_ptr, fill = fill_pattern(ptr, head)
    x = np.ones(n)
    excess = np.empty(n)
    rest = np.empty(n)  # row sums of the remaining matrix
    pivot = np.empty(n)
    change = np.empty(n)
    upper = np.empty(fill.shape[0])  # negated off-diagonal entries
    lower = np.empty(fill.shape[0])
    value, before = 0.0, np.inf
    for _ in range(100):
        _row_sums(ptr, head, count, x, value, excess)
        # Entries that have become too small say nothing about the eigenvalue.
        valid = x > 1e-200
        most = np.max(excess[valid])
        upper[:] = 0
        lower[:] = 0
        for k in range(n):
            rest[k] = max(most - excess[k], 0.0) + 1e-28 * (value + most)
            for e in range(ptr[k], ptr[k + 1]):
                m = head[e]
                first = min(k, m)
                y = fill_ptr[first] + np.searchsorted(
                    fill[fill_ptr[first] : fill_ptr[first + 1]], max(k, m)
                )
                if m > k:
                    upper[y] = count[e] * (x[m] / x[k])
                elif m < k:
                    lower[y] = count[e] * (x[m] / x[k])
        change[:] = 1
        for k in range(n):
            begin, end = fill_ptr[k], fill_ptr[k + 1]
            pivot[k] = rest[k] + np.sum(upper[begin:end])
            for y in range(begin, end):
                m = fill[y]
                factor, other = lower[y] / pivot[k], upper[y] / pivot[k]
                rest[m] += factor * rest[k]
                change[m] += factor * change[k]
                w = fill_ptr[m]
                for z in range(y + 1, end):
                    while fill[w] != fill[z]:
                        w += 1
                    upper[w] += factor * upper[z]
                    lower[w] += other * lower[z]
        for k in range(n - 1, -1, -1):
            for y in range(fill_ptr[k], fill_ptr[k + 1]):
                change[k] += upper[y] * change[fill[y]]
            change[k] /= pivot[k]
        value += most
        spread = np.max(change[valid]) / np.min(change[valid]) - 1
        x *= change / np.max(change)
        x = np.maximum(x / np.max(x), 1e-280)
        if spread < 1e-13 or before / 2 < spread < 1e-6:
            break
        before = spread
    return value, x


@compiled()
def _row_sums(ptr, head, count, x, about, out):  # type: ignore[no-untyped-def]
    """Sets out to (C x)_i / x_i - about, computed in twice the precision."""
    for i in range(x.shape[0]):
        high, low = _product(-about, x[i])
        for e in range(ptr[i], ptr[i + 1]):
            term, error = _product(float(count[e]), x[head[e]])
            total = high + term
            part = total - high
            low += (high - (total - part)) + (term - part) + error
            high = total
        out[i] = (high + low) / x[i]


@compiled()
def _product(a, b):  # type: ignore[no-untyped-def]
    """The product of a and b and its rounding error (Dekker's method)."""
    product = a * b
    split = 134217729.0 * a  # 2^27 + 1
    a_high = split - (split - a)
    split = 134217729.0 * b
    b_high = split - (split - b)
    a_low, b_low = a - a_high, b - b_high
    error = (
        (a_high * b_high - product) + a_high * b_low + a_low * b_high
    ) + a_low * b_low
    return product, error


@compiled()
def _by_lanczos(ptr, head, count, size):  # type: ignore[no-untyped-def]
    """The largest eigenvalue of a component's matrix, and its eigenvector.

    Lanczos' method separates close eigenvalues, for which power iteration takes too
    many steps. The vectors are not stored; a second pass recomputes and sums them.
    """
    n = size.shape[0]
    # Scaled by the square roots of the sizes, the matrix is symmetric.
    root = np.sqrt(size / np.sum(size))
    entry = np.empty(head.shape[0])
    for i in range(n):
        for e in range(ptr[i], ptr[i + 1]):
            entry[e] = np.sqrt(count[e] * (count[e] * size[i] // size[head[e]]))
    limit = 100 + min(10 * n, 20_000)  # far more than ever needed in practice
    alpha = np.zeros(limit)
    beta = np.zeros(limit + 1)  # beta[k] couples vectors k - 1 and k
    weight = np.zeros(0)
    value = 0.0
    out = np.zeros(n)
    steps, check = limit, min(n, 8)
    for sums in (False, True):
        last = np.zeros(n)
        v = root.copy()
        new = np.empty(n)
        k = 0
        while k < steps:
            if sums:
                out += weight[k] * v
            for i in range(n):
                total = 0.0
                for e in range(ptr[i], ptr[i + 1]):
                    total += entry[e] * v[head[e]]
                new[i] = total - beta[k] * last[i]
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
    out = np.abs(out) / root
    _polish(ptr, head, count, value, out)
    return value, out


@compiled()
def _polish(ptr, head, count, value, x):  # type: ignore[no-untyped-def]
    """Makes small entries of an eigenvector accurate too, in place.

    They are rounding errors of the largest one. The Gauss-Seidel method recomputes them
    from their neighbours, from below and without subtractions. It is slow only far from
    the largest entries, around others that are nearly as large in their own
    neighbourhood; there, entries of less than 1e-12 may remain too small.
    """
    small = np.flatnonzero(x < 1e-4 * np.max(x))
    x[x < 1e-12 * np.max(x)] = 0
    for sweep in range(1000):
        change = 0.0
        for i in small[:: 1 if sweep % 2 == 0 else -1]:
            total, own = 0.0, 0
            for e in range(ptr[i], ptr[i + 1]):
                if head[e] == i:
                    own = count[e]
                else:
                    total += count[e] * x[head[e]]
            total /= value - own
            change = max(change, abs(total - x[i]) / (total + 1e-300))
            x[i] = total
        if change < 1e-13:
            break


@compiled()
def _largest(alpha, beta, low):  # type: ignore[no-untyped-def]
    """The largest eigenpair of a tridiagonal matrix, whose eigenvalue is >= `low`."""
    n = alpha.shape[0]
    high = 0.0
    for k in range(n):
        after = beta[k + 1] if k + 1 < n else 0.0
        high = max(high, alpha[k] + (beta[k] if k > 0 else 0.0) + after)
    high = high * (1 + 1e-12) + 1e-300
    pivot = np.empty(n)
    for step in range(60):
        # x I - T is positive definite iff x is larger than all eigenvalues.
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
