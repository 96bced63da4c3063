r"""Solves M = I + diag(b) ((L - I) * K K^T) on the CPU, without pivoting.

The rule holds for any strength of writing. With b = 0 everywhere but at some nodes s, M
is M_ss beside an identity, and no contraction has a singular matrix: all principal
minors are positive, in any order of the nodes. Their ratios, the pivots, are what a
node i finds of its own write if only nodes before it overwrite: 1 + b k^T C (I - C)^-1
k, where C, what returns to i for the first time, is a matrix of norm r < 1. As k^T (I -
C)^-1 k is at least 1 / (1 + r) for such a matrix,

    pivot >= 1 - b r / (1 + r),

more than a half where b <= 1, and (1 - r) / (1 + r) at least where b = 2. What is left
of an entry of M is b k_i^T G_ij k_j, where G is L with nodes that overwrite: no larger
than b times the resolvent of |A|.

Rows are eliminated `SIDE` at a time, as all is matrix products then: M = B W, where B
is lower and W upper triangular in blocks. On the diagonal, W has identities, and what B
has there is kept as its inverse. On a DAG in topological order, M = B.
"""

from pyg_chimera.ops.common.numba_runtime import jit, stopped
from pyg_chimera.ops.common.simd import (
    SUBTRACT,
    fma,
    lanes,
    load,
    pointer,
    splat,
    store,
)
from pyg_chimera.ops.common.vector_kit import matmul

__all__ = ["SIDE", "eliminate", "solve"]

#: Rows and columns of a block; a multiple of the lanes of any vector.
SIDE = 16


@jit
def _invert(D, n):  # type: ignore[no-untyped-def]
    """Inverts the first n rows and columns of rows of `SIDE` numbers, in place."""
    step = lanes(D)
    for k in range(n):
        own = D + k * SIDE
        pivot = 1.0 / own[k]
        factor = splat(pivot)
        for j in range(0, n, step):
            store(own + j, factor * load(own + j))
        for i in range(n):
            if i != k:
                row = D + i * SIDE
                f = row[k]
                factor = splat(-f)
                for j in range(0, n, step):
                    store(row + j, fma(factor, load(own + j), load(row + j)))
                row[k] = -f * pivot
        own[k] = pivot


@jit
def eliminate(M, inverse, spare, triangular, stop):  # type: ignore[no-untyped-def]
    """Makes B, below the diagonal, and W of a matrix [n, n], in place.

    Inverses of the blocks on the diagonal of B come in `inverse`, [n, SIDE]; `spare` is
    of SIDE * n numbers. If M is triangular, blocks above its diagonal are not touched.
    """
    n = M.shape[0]
    for a in range(0, n, SIDE):
        if stopped(stop):
            return
        b = min(a + SIDE, n)
        for i in range(a, b):
            for j in range(SIDE):
                inverse[i, j] = M[i, a + j] if a + j < b else 0
        _invert(pointer(inverse) + a * SIDE, b - a)
        if not triangular:
            right, D = M[a:b, b:], inverse[a:b, : b - a]
            moved = spare[: (b - a) * (n - b)].reshape(b - a, n - b)
            moved[:] = right
            matmul(right, D, moved)
            matmul(M[b:, b:], M[b:, a:b], right, SUBTRACT)


@jit
def solve(M, inverse, X, spare, triangular, transposed):  # type: ignore[no-untyped-def]
    """X <- M^-1 X, or M^-T X, for [n, P]; `spare` is of SIDE * P numbers."""
    n, count = X.shape
    last = (n - 1) // SIDE * SIDE
    if transposed:
        if not triangular:
            for a in range(0, n, SIDE):
                b = min(a + SIDE, n)
                matmul(X[b:], M[a:b, b:].T, X[a:b], SUBTRACT)
        for a in range(last, -1, -SIDE):
            b = min(a + SIDE, n)
            moved = spare[: (b - a) * count].reshape(b - a, count)
            moved[:] = X[a:b]
            matmul(moved, M[b:, a:b].T, X[b:], SUBTRACT)
            matmul(X[a:b], inverse[a:b, : b - a].T, moved)
        return
    for a in range(0, n, SIDE):
        b = min(a + SIDE, n)
        moved = spare[: (b - a) * count].reshape(b - a, count)
        moved[:] = X[a:b]
        matmul(X[a:b], inverse[a:b, : b - a], moved)
        matmul(X[b:], M[b:, a:b], X[a:b], SUBTRACT)
    if not triangular:
        for a in range(last, -1, -SIDE):
            b = min(a + SIDE, n)
            matmul(X[a:b], M[a:b, b:], X[b:], SUBTRACT)
