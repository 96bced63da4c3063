"""Factors I - A supernode by supernode, in dense fronts (`"The Multifrontal Solution
of Indefinite Sparse Symmetric Linear Systems" <https://doi.org/10.1145/356044.356047>`_,
Duff and Reid, 1983).

A supernode's *front* is the square matrix over its columns s and the rows r below: the
sum of its own edges and its children's updates. Its columns are eliminated without
pivoting. The Schur complement in the rows and columns r is its update, which is put on
a stack for its parent.
"""

import numpy as np

from pyg_chimera.ops.common.numba_runtime import jit, run, stopped
from pyg_chimera.ops.common.simd import (
    SET,
    SUBTRACT,
    gemm,
    lanes,
    load_part,
    pointer,
    splat,
    store_part,
)
from pyg_chimera.ops.common.vector_kit import add_multiple, workspace
from pyg_chimera.ops.recurrence.cpu.rows import growth_of
from pyg_chimera.ops.recurrence.cpu.small_fronts import Subtrees, factor_subtrees
from pyg_chimera.ops.structure.supernodes import Supernodes, supernodes
from pyg_chimera.ops.structure.symbolic_factor import SymbolicFactor

#: Columns that are eliminated together.
_PANEL = 32
#: Columns that are eliminated from all others at once.
_WIDE = 128


def factorize(symbolic: SymbolicFactor, weight: np.ndarray) -> tuple[np.ndarray, float]:
    """Factors I - A in float64, without pivoting.

    Args:
        symbolic: The blocks.
        weight: The weights of the edges, [E, heads].

    Returns:
        The panels of all supernodes, [heads, numbers] in the precision of the weights:
        for a supernode with columns s and rows r below, E = L_rs L_ss^-1, and then, row
        by row, G = (L_ss U_ss)^-1 beside R = U_ss^-1 U_sr. And the pivot growth: the
        ratio of the largest row sum of |L| |U| to that of |I - A| in any connected
        component. Compared with pivoting, rounding errors are larger by at most about
        this factor. It is one for components of which all rows, or all columns, are
        diagonally dominant, as these need no pivoting.
    """
    nodes, heads = supernodes(symbolic), weight.shape[1]
    if factorize not in symbolic.tables:
        trees = Subtrees.of(nodes)
        found = trees, *_work_and_room(nodes, trees), symbolic.roots()
        symbolic.tables[factorize] = found
    trees, work, room, roots = symbolic.tables[factorize]
    out = np.empty((heads, nodes.panel_ptr[-1]), weight.dtype)
    updates = factor_subtrees(trees, nodes, weight, out)
    growths = np.ones((len(symbolic.sizes), heads))
    run(
        _factor_blocks,
        np.repeat(work, heads),
        room,
        np.dtype(np.float64),
        *(roots, nodes, weight, (trees, updates), out, growths),
    )
    return out, float(growths.max(initial=1.0))


def _work_and_room(nodes: Supernodes, trees: Subtrees) -> tuple[np.ndarray, int]:
    """The cost of each block, and the numbers of scratch memory of a task."""
    widths, heights, sides = nodes.widths, nodes.heights, nodes.sides
    work = 0.1 * widths * sides**2 + 20.0 * sides + 3.0 * sides**2
    room = sides**2 + widths * sides + widths * heights
    room = int(room.max(initial=0)) + 5 * int(np.diff(nodes.start).max(initial=0))
    # What is in small subtrees is looked at only.
    work = np.where(trees.small == 1, 2.0 * widths, work)
    return nodes.by_block(work), room + int(nodes.stack[0])


@jit
def _factor_blocks(
    begin, end, stop, scratch, root, nodes, weight, subtrees, out, growths
):
    trees, updates = subtrees
    width = updates.width
    ptr, row_ptr, row, subtree = nodes.ptr, nodes.row_ptr, nodes.row, nodes.subtree
    heads = weight.shape[1]
    for task in range(begin, end):
        block, h = task // heads, task % heads
        start = nodes.start[block]
        n = nodes.start[block + 1] - start
        place = np.empty(n, np.int64)
        vectors = scratch[: 5 * n].reshape(5, n)
        vectors[:] = 0
        grown, u_sum, diagonal = vectors[0], vectors[1], vectors[2]
        by_row, by_column = vectors[3], vectors[4]
        first, last = nodes.block_ptr[block], nodes.block_ptr[block + 1]
        room = 0
        for x in range(first, last):
            s, m = ptr[x + 1] - ptr[x], row_ptr[x + 1] - row_ptr[x]
            room = max(room, (s + m) * (s + m) + s * (s + m) + s * m)
        top = 5 * n + room  # top of the stack
        edges = nodes.edge_ptr[first], nodes.edge_ptr[last]
        grows = not _is_dominant(edges, start, nodes, weight, h, by_row, by_column)
        fails = False
        for x in range(first, last):
            if stopped(stop):
                return
            if trees.small[x] == 1 and not grows:
                fails |= updates.fails[h // width, x]
                continue
            a, s, m = ptr[x], ptr[x + 1] - ptr[x], row_ptr[x + 1] - row_ptr[x]
            t = s + m
            for i in range(s):
                place[a - start + i] = i
            for i in range(m):
                place[row[row_ptr[x] + i] - start] = s + i
            F, at = workspace(scratch, 5 * n, t, t)
            W, at = workspace(scratch, at, s, t)
            E, _ = workspace(scratch, at, m, s)
            F[:] = 0
            for i in range(s):
                F[i, i] = 1
            for y in range(nodes.edge_ptr[x], nodes.edge_ptr[x + 1]):
                i, j = nodes.edge_row[y] - start, nodes.edge_col[y] - start
                F[place[i], place[j]] -= weight[nodes.edge[y], h]
            if grows:
                below = row[row_ptr[x] : row_ptr[x + 1]] - start
                _add_sums(F, s, a - start, below, diagonal, by_row, by_column)
            y = x - 1
            while y > x - subtree[x]:  # its children; the last one is on top
                r0, c = row_ptr[y], row_ptr[y + 1] - row_ptr[y]
                k = (h // width * trees.ptr[-1] + trees.ptr[y]) * width + h % width
                source, by = updates.numbers, width
                if grows or trees.small[y] == 0:
                    top -= c * c
                    source, k, by = scratch, top, 1
                for i in range(c):
                    target = F[place[row[r0 + i] - start]]
                    for j in range(c):
                        target[place[row[r0 + j] - start]] += source[k]
                        k += by
                y -= subtree[y]
            usable = _eliminate(pointer(F), t, s, stop)
            for i in range(m):
                for j in range(m):
                    scratch[top + i * m + j] = F[s + i, s + j]
            top += m * m

            fails |= not usable
            if grows:
                for k in range(s):
                    total = 0.0
                    for j in range(k, t):
                        total += abs(F[k, j])
                    u_sum[a - start + k] = total
                for i in range(t):
                    p = a - start + i if i < s else row[row_ptr[x] + i - s] - start
                    total = 0.0
                    for k in range(min(i, s)):
                        total += abs(F[i, k]) * u_sum[a - start + k]
                    grown[p] += total + (u_sum[p] if i < s else 0.0)
                if not usable:
                    grown[a - start] = np.inf

            # W = [L_ss^-1 | U_sr], E = L_rs L_ss^-1, and then W <- U_ss^-1 W
            W[:] = 0
            _invert_lower(pointer(F), t, pointer(W), t, s, stop)
            left = pointer(F) + s * t, t, 1
            gemm((pointer(E), s), left, (pointer(W), t), (m, s, s), SET)
            for i in range(s):
                for j in range(s, t):
                    W[i, j] = F[i, j]
            _solve_upper(pointer(F), t, pointer(W), t, s, t, stop)
            at = nodes.panel_ptr[x]
            for i in range(m):
                for j in range(s):
                    out[h, at + i * s + j] = E[i, j]
            at += m * s
            for i in range(s):
                for j in range(t):
                    out[h, at + i * t + j] = W[i, j]

        if grows:
            roots = root[start : start + n] - start
            growths[block, h] = growth_of(roots, diagonal, by_row, by_column, grown)
        elif fails:
            growths[block, h] = np.inf


@jit
def _is_dominant(edges, start, nodes, weight, h, by_row, by_column):
    """Whether all rows of |A|, or all columns, sum to less than one. If not, leaves
    zeros in memory for the sums.
    """
    for y in range(*edges):
        x = abs(weight[nodes.edge[y], h])
        by_row[nodes.edge_row[y] - start] += x
        by_column[nodes.edge_col[y] - start] += x
    rows, columns = True, True
    for i in range(len(by_row)):
        rows &= by_row[i] < 1
        columns &= by_column[i] < 1
    by_row[:] = 0
    by_column[:] = 0
    return rows or columns


@jit
def _add_sums(F, s, a, rows, diagonal, by_row, by_column):
    """Takes the diagonal of |I - A| from a front's own entries, and adds the other
    entries to the sums of their rows and columns.
    """
    for i in range(F.shape[0]):
        p = a + i if i < s else rows[i - s]
        for j in range(F.shape[0] if i < s else s):
            x = abs(F[i, j])
            if x != 0:
                q = a + j if j < s else rows[j - s]
                if i == j:
                    diagonal[p] = x
                else:
                    by_row[p] += x
                    by_column[q] += x


@jit
def _scale(target, f, n):
    factor = splat(f)
    for at in range(0, n, lanes(target)):
        store_part(target + at, factor * load_part(target + at, n - at), n - at)


@jit
def _eliminate(F, t, s, stop):
    """Factors a front's first s columns in place; returns if all pivots are usable.

    Rows and columns beyond a share of `_WIDE` columns are updated once per share, as
    this takes a pass over all of them.
    """
    usable = True
    for k0 in range(0, s, _PANEL):
        if stopped(stop):
            return False
        k1 = min(k0 + _PANEL, s)
        w0, w1 = k0 // _WIDE * _WIDE, min((k0 // _WIDE + 1) * _WIDE, s)
        for k in range(k0, k1):
            pivot = F[k * t + k]
            usable &= pivot != 0 and np.isfinite(pivot)
            inverse = 1 / pivot if pivot != 0 else 0.0
            for i in range(k + 1, t):
                f = F[i * t + k] * inverse
                F[i * t + k] = f
                if f != 0:
                    add_multiple(
                        F + (i * t + k + 1), -f, F + (k * t + k + 1), k1 - k - 1
                    )
        _update(F, t, (k0, k1), t, (k1, w1))
        if k1 == w1:
            for p0 in range(w0, w1, _PANEL):
                _update(F, t, (p0, min(p0 + _PANEL, w1)), w1, (w1, t))
            m, below, beside = t - w1, F + (w1 * t + w0), F + (w0 * t + w1)
            rest, size = (F + (w1 * t + w1), t), (m, m, w1 - w0)
            gemm(rest, (below, t, 1), (beside, t), size, SUBTRACT)
    return usable


@jit
def _update(F, t, panel, last, columns):
    """Eliminates a panel's columns from some columns to its right, up to row `last`."""
    (k0, k1), (j0, j1) = panel, columns
    for i in range(k0 + 1, k1):
        for j in range(k0, i):
            add_multiple(F + (i * t + j0), -F[i * t + j], F + (j * t + j0), j1 - j0)
    below, size = (F + (k1 * t + k0), t, 1), (last - k1, j1 - j0, k1 - k0)
    gemm((F + (k1 * t + j0), t), below, (F + (k0 * t + j0), t), size, SUBTRACT)


@jit
def _invert_lower(L, ldl, X, ldx, s, stop):
    """Sets X, which is zero, to L^-1, where L has a unit diagonal."""
    for i0 in range(0, s, _PANEL):
        if stopped(stop):
            return
        i1 = min(i0 + _PANEL, s)
        _subtract(X + i0 * ldx, ldx, L + i0 * ldl, ldl, X, ldx, i1 - i0, i0, i0)
        for i in range(i0, i1):
            X[i * ldx + i] = 1.0
            for j in range(i0, i):
                add_multiple(X + i * ldx, -L[i * ldl + j], X + j * ldx, j + 1)


@jit
def _solve_upper(U, ldu, X, ldx, s, n, stop):
    """X <- U^-1 X."""
    shares = (s + _PANEL - 1) // _PANEL
    for share in range(shares - 1, -1, -1):
        if stopped(stop):
            return
        i0, i1 = share * _PANEL, min((share + 1) * _PANEL, s)
        beside, below = U + (i0 * ldu + i1), X + i1 * ldx
        _subtract(X + i0 * ldx, ldx, beside, ldu, below, ldx, i1 - i0, n, s - i1)
        for i in range(i1 - 1, i0 - 1, -1):
            for j in range(i + 1, i1):
                add_multiple(X + i * ldx, -U[i * ldu + j], X + j * ldx, n)
            pivot = U[i * ldu + i]
            _scale(X + i * ldx, 1 / pivot if pivot != 0 else 0.0, n)


@jit
def _subtract(c, ldc, a, lda, b, ldb, m, n, k):
    """C -= A B, with few rows of B at a time, so that they stay in the cache."""
    for at in range(0, k, 4 * _PANEL):
        few = min(4 * _PANEL, k - at)
        left, right = (a + at, lda, 1), (b + at * ldb, ldb)
        gemm((c, ldc), left, right, (m, n, few), SUBTRACT)
