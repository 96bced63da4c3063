r"""Solves M = I + diag(b) ((L - I) * K K^T) on the CPU, without pivoting.

Why no pivoting is needed: the rule has a solution for any strengths b in [0, 2]. If b
is zero except at some nodes s, then M reduces to M_ss, and is not singular, as A is a
contraction. So all principal minors are positive, in any order of the nodes, and so are
their ratios, the pivots. That of a node i is 1 + b k^T C (I - C)^-1 k, where C is the
matrix, of norm r < 1, by which a state returns to i for the first time if only nodes
before i overwrite. As k^T (I - C)^-1 k is at least 1 / (1 + r),

    pivot >= 1 - b r / (1 + r),

which is more than 1/2 if b <= 1, and at least (1 - r) / (1 + r) if b = 2. Nothing
returns to a node that is on no cycle: its pivot is one, whatever the weights. After
elimination steps, an entry of M is b k_i^T G_ij k_j, where G is L if the eliminated
nodes overwrite: at most b times the resolvent of |A|.

Rows are eliminated `SIDE` at a time, by matrix products: M = B W, where B is block
lower and W block upper triangular. W has identities on the diagonal; the diagonal
blocks of B are stored as inverses.
"""

import numpy as np

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
from pyg_chimera.ops.common.vector_kit import assign, matmul

#: Rows and columns of a block; a multiple of the lanes of any vector.
SIDE = 16


def check_accuracy(wrong: np.ndarray) -> None:
    """Raises an error if anything is wrong."""
    if wrong.any():
        raise ValueError(
            "'edge_weight' has rows on cycles that sum to so nearly one that the rule "
            "is not solved accurately without pivots; scale it or, where 'beta' is "
            "nearly two, use backend='torch'"
        )


@jit
def invert(matrix, n):
    """Inverts the first n rows and columns of a matrix, of rows of whole vectors."""
    D, side, one = pointer(matrix), matrix.shape[1], matrix.dtype.type(1)
    step = lanes(D)
    for k in range(n):
        own = D + k * side
        pivot = one / own[k]
        factor = splat(pivot)
        for j in range(0, n, step):
            store(own + j, factor * load(own + j))
        for i in range(n):
            if i != k:
                row = D + i * side
                f = row[k]
                factor = splat(-f)
                for j in range(0, n, step):
                    store(row + j, fma(factor, load(own + j), load(row + j)))
                row[k] = -f * pivot
        own[k] = pivot


@jit
def eliminate(M, inverse, spare, stop):
    """Factors M [n, n] in place, into B below the diagonal blocks and W above them.

    The inverses of B's diagonal blocks are written to `inverse`, [n, SIDE]. `spare` has
    SIDE * n numbers.
    """
    n = M.shape[0]
    for a in range(0, n, SIDE):
        if stopped(stop):
            return
        b = min(a + SIDE, n)
        for i in range(a, b):
            for j in range(SIDE):
                inverse[i, j] = M[i, a + j] if a + j < b else 0
        invert(inverse[a:b], b - a)
        right = M[a:b, b:]
        moved = spare[: right.size].reshape(right.shape)
        assign(moved, right)
        matmul(right, inverse[a:b, : b - a], moved)
        matmul(M[b:, b:], M[b:, a:b], right, SUBTRACT)


@jit
def sweep(M, inverse, X, spare, lower, transposed):
    """X <- B^-1 X, or if not lower W^-1 X; or of the transposed matrices."""
    n, count = X.shape
    for step in range(0, n, SIDE):
        a = (n - 1) // SIDE * SIDE - step if lower == transposed else step
        b = min(a + SIDE, n)
        own, rest, D = X[a:b], X[b:], inverse[a:b, : b - a]
        beyond = M[b:, a:b] if lower else M[a:b, b:].T
        if lower == transposed:
            matmul(own, beyond.T, rest, SUBTRACT)
        if lower:
            moved = spare[: (b - a) * count].reshape(b - a, count)
            assign(moved, own)
            matmul(own, D.T if transposed else D, moved)
        if lower != transposed:
            matmul(rest, beyond, own, SUBTRACT)


@jit
def solve(M, inverse, X, spare, transposed):
    """X <- M^-1 X or M^-T X, for X [n, P]; `spare` has SIDE * P numbers."""
    sweep(M, inverse, X, spare, not transposed, transposed)
    sweep(M, inverse, X, spare, transposed, transposed)
