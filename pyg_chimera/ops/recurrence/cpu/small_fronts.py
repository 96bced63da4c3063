r"""Factors subtrees of small fronts (see `multifrontal`), of several heads at once.

A small front is too short for vectors, and so all its numbers are, for each of some
heads: [t, t, lanes]. Its first s pivots are exchanged one by one (`"A Note on the
Stability of Gauss-Jordan Elimination for Diagonally Dominant Matrices"
<https://doi.org/10.1007/s006070070004>`_, Malyshev, 2000), which turns

.. math::
    \begin{pmatrix} F_{ss} & F_{sr} \\ F_{rs} & F_{rr} \end{pmatrix} \to
    \begin{pmatrix} F_{ss}^{-1} & F_{ss}^{-1} F_{sr} \\
    -F_{rs} F_{ss}^{-1} & F_{rr} - F_{rs} F_{ss}^{-1} F_{sr} \end{pmatrix}

in place: the panel, E with another sign, and the update. Errors are small where rows or
columns are diagonally dominant; for other blocks, nothing of this is used.
"""

from typing import NamedTuple

import numpy as np

from pyg_chimera.ops.common.compilation import compiled
from pyg_chimera.ops.common.numba_runtime import jit, run, stopped
from pyg_chimera.ops.common.simd import (
    lanes,
    load,
    load_part,
    load_some,
    pointer,
    repeated,
    splat,
    store,
    store_part,
    store_some,
    vector_lanes,
)
from pyg_chimera.ops.common.vector_kit import clear
from pyg_chimera.ops.structure.supernodes import Supernodes

#: The largest small front. Larger ones are faster by products of matrices.
_MOST = 48
#: Nanoseconds of a subtree, which one thread takes; those of more are cut.
_LONG = 1e6


class Subtrees(NamedTuple):
    """Those of small fronts that are in no other one."""

    root: np.ndarray  #: [N], the last supernode of each
    work: np.ndarray  #: [N], nanoseconds for each, about
    small: np.ndarray  #: [S], whether a supernode is in one, 0 or 1
    ptr: np.ndarray  #: [S + 1], first number of the update of each root
    side: int  #: that of the largest front
    stack: int  #: the most numbers of updates that are pending at any time

    @classmethod
    def of(cls, nodes: Supernodes) -> "Subtrees":
        """Those of some blocks."""
        parent, heights, sides = nodes.parent, nodes.heights, nodes.sides
        small, work, stack = _marked(parent, nodes.widths, heights, _MOST)
        is_root = (small == 1) & (np.append(small, 0)[parent] == 0)
        return cls(
            root=np.flatnonzero(is_root),
            work=work[is_root],
            small=small,
            ptr=np.append(0, np.cumsum(np.where(is_root, heights**2, 0))),
            side=int(sides[small == 1].max(initial=0)),
            stack=stack,
        )


@compiled()
def _marked(parent, widths, heights, most):
    """Which supernodes are in small subtrees, the cost of each with those below, and
    the most numbers of updates that are pending within a subtree, or more.
    """
    small = (widths + heights <= most).astype(np.int64)
    work, waiting = np.zeros(len(parent)), np.zeros(len(parent), np.int64)
    held, stack = 0, 0
    for x in range(len(parent)):
        y = parent[x]
        work[x] += 100 + (0.3 * widths[x] + 2) * (widths[x] + heights[x]) ** 2
        if work[x] > _LONG:
            small[x] = 0
        held = held + heights[x] ** 2 - waiting[x] if small[x] == 1 else 0
        stack = max(stack, held)
        if y < 0 or widths[y] + heights[y] > most:
            held = 0
        if y >= 0 and small[x] == 1:
            work[y] += work[x]
            waiting[y] += heights[x] ** 2
        elif y >= 0:
            small[y] = 0
    return small, work, stack


class Updates(NamedTuple):
    """What subtrees leave for the fronts above them."""

    numbers: np.ndarray  #: those of each group of heads, of each root: [m, m, width]
    fails: np.ndarray  #: [groups, S], of roots: whether any head's pivot is of no use
    width: int  #: heads of a group, a power of two


def factor_subtrees(
    trees: Subtrees, nodes: Supernodes, weight: np.ndarray, out: np.ndarray
) -> Updates:
    """Sets the panels of all small subtrees, and returns the updates of their roots."""
    heads, (most, _) = weight.shape[1], vector_lanes(np.dtype(np.float64))
    width = min(most, 1 << (heads - 1).bit_length())
    groups = -(-heads // width)
    numbers = np.empty(groups * trees.ptr[-1] * width)
    fails = np.zeros((groups, len(trees.small)), np.bool_)
    updates = Updates(numbers, fails, width)
    run(
        _factor_subtrees,
        np.repeat(trees.work, groups),
        trees.side * (trees.side * width + most) + trees.stack * width,
        np.dtype(np.float64),
        *(trees, nodes, weight, out, updates),
    )
    return updates


@jit
def _factor_subtrees(begin, end, stop, scratch, trees, nodes, weight, out, updates):
    groups, width, heads = updates.fails.shape[0], updates.width, weight.shape[1]
    F, U = pointer(scratch), pointer(updates.numbers)
    step, ptr, row_ptr = lanes(F), nodes.ptr, nodes.row_ptr
    place = np.empty(nodes.node.shape[0], np.int64)  # in a front, of positions
    at = np.empty(trees.side, np.int64)
    for task in range(begin, end):
        root, group = trees.root[task // groups], task % groups
        h0 = group * width
        h1 = min(h0 + width, heads)
        top = F + trees.side * (trees.side * width + step)
        for x in range(root - nodes.subtree[root] + 1, root + 1):
            if stopped(stop):
                return
            a, s, r, m = ptr[x], ptr[x + 1] - ptr[x], row_ptr[x], row_ptr[x + 1]
            m -= r
            for i in range(s):
                place[a + i] = i
            for i in range(m):
                place[nodes.row[r + i]] = s + i
            t = s + m
            ld = (t * width + step - 1) // step * step
            clear(F, t * ld)
            for i in range(s):
                for h in range(width):
                    F[i * (ld + width) + h] = 1.0
            for y in range(nodes.edge_ptr[x], nodes.edge_ptr[x + 1]):
                i, j = place[nodes.edge_row[y]], place[nodes.edge_col[y]]
                for h in range(h0, h1):
                    k = i * ld + j * width + h - h0
                    F[k] = F[k] - weight[nodes.edge[y], h]
            y = x - 1
            while y > x - nodes.subtree[x]:  # its children; the last one is on top
                r, c = row_ptr[y], row_ptr[y + 1] - row_ptr[y]
                top = top + -c * c * width
                for i in range(c):
                    at[i] = place[nodes.row[r + i]]
                for i in range(c):
                    for j in range(c):
                        p = F + (at[i] * ld + at[j] * width)
                        q = top + (i * c + j) * width
                        both = load_some(p, width) + load_some(q, width)
                        store_some(p, both, width)
                y -= nodes.subtree[y]
            if not _exchange(F, t, ld, s, width):
                updates.fails[group, root] = True
            to = top
            if x == root:
                to = U + (group * trees.ptr[-1] + trees.ptr[x]) * width
            for i in range(m):
                own = F + ((s + i) * ld + s * width)
                for j in range(0, m * width, step):
                    left = m * width - j
                    store_part(to + j, load_part(own + j, left), left)
                to = to + m * width
            top = top + m * m * width
            for h in range(h0, h1):
                k, own = nodes.panel_ptr[x], F + (h - h0)
                for i in range(s, t):
                    for j in range(s):
                        out[h, k] = -own[i * ld + j * width]
                        k += 1
                for i in range(s):
                    for j in range(t):
                        out[h, k] = own[i * ld + j * width]
                        k += 1


@jit
def _exchange(F, t, ld, s, width):
    """Exchanges the first s pivots of a front; returns whether all are of use."""
    step, usable, one = lanes(F), True, splat(np.float64(1))
    for k in range(s):
        row, pivot = F + k * ld, F + (k * ld + k * width)
        for h in range(width):
            usable &= pivot[h] != 0 and np.isfinite(pivot[h])
        inverse = one / repeated(pivot, width)
        for j in range(0, ld, step):
            store(row + j, load(row + j) * inverse)
        # So that the column is left as -f / pivot, which is f - f (1 + 1 / pivot).
        store_some(pivot, one + inverse, width)
        for i in range(t):
            if i != k:
                target = F + i * ld
                f = repeated(target + k * width, width)
                for j in range(0, ld, step):
                    store(target + j, load(target + j) - f * load(row + j))
        store_some(pivot, inverse, width)
    return usable
