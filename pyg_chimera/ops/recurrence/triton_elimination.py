"""Gauss-Jordan elimination of tiles, without pivoting."""

import triton
import triton.language as tl

__all__ = ["eliminated", "matrix_tile"]


@triton.jit
def matrix_tile(matrix, i, j, tiles, TILE: tl.constexpr):
    """Pointers to tile i, j of a matrix."""
    o = tl.arange(0, TILE)
    width = tiles * TILE
    return matrix + (i * width + j) * TILE + o[:, None] * width + o[None, :]


@triton.jit
def eliminated(X, pivots, TILE: tl.constexpr):
    """[[G, G B], [-C G, D - C G B]] of a tile [[A, B], [C, D]], where G = A^-1.

    A has as many rows and columns as there are pivots; the whole tile may be A.
    """
    o = tl.arange(0, TILE)
    for k in range(0, pivots):
        in_row, in_col = o[:, None] == k, o[None, :] == k
        row = tl.sum(tl.where(in_row, X, 0.0), 0)
        col = tl.sum(tl.where(in_col, X, 0.0), 1)
        pivot = 1.0 / tl.sum(tl.where(o == k, row, 0.0), 0)
        row *= pivot
        new = X - col[:, None] * row[None, :]
        new = tl.where(in_row, row[None, :], new)
        new = tl.where(in_col, (-pivot * col)[:, None], new)
        X = tl.where(in_row & in_col, pivot, new)
    return X
