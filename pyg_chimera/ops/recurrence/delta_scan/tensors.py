"""Functions that several forms of the delta rule use."""

import torch
from torch import Tensor

__all__ = ["fill_products", "positive", "repeated", "summed", "unit_lower_inverse"]

#: Rows of a triangular block that is inverted row by row.
_BASE = 16


def positive(beta: Tensor) -> Tensor:
    """Beta, but not zero, to divide by it; what is then written is lost in rounding."""
    return beta.clamp(min=1e-20)


def repeated(x: Tensor, num_heads: int) -> Tensor:
    """[..., groups, n, N] -> [..., heads, n, N], the same for all heads of a group."""
    repeats = num_heads // x.size(-3)
    return x if repeats == 1 else x.repeat_interleave(repeats, -3)


def summed(x: Tensor, num_groups: int) -> Tensor:
    """[..., heads, n, N] -> [..., groups, n, N], the sums over the heads of a group."""
    return x.unflatten(-3, (num_groups, -1)).sum(-3)


def unit_lower_inverse(X: Tensor) -> Tensor:
    """(I + X)^-1 for strictly lower triangular matrices, [..., n, n].

    Only entries below the diagonal of X are read. n is at most 16, or 16 times a power
    of two. On a CPU, these products of blocks are several times as fast as triangular
    solves of many small matrices.
    """
    n = X.size(-1)
    base = min(n, _BASE)
    diagonal = [slice(i, i + base) for i in range(0, n, base)]
    out = torch.zeros_like(X)
    first = torch.stack([X[..., x, x] for x in diagonal]).flatten(0, -3)
    by_entry = first.permute(1, 2, 0).contiguous()  # one step for all matrices
    T = torch.zeros_like(by_entry)
    for i in range(base):
        if i > 0:
            T[i, :i] = -(by_entry[i, :i, None] * T[:i, :i]).sum(0)
        T[i, i] = 1
    parts = T.permute(2, 0, 1).reshape(len(diagonal), *X.shape[:-2], base, base)
    for x, part in zip(diagonal, parts, strict=True):
        out[..., x, x] = part
    size = base
    while size < n:
        for i in range(0, n, 2 * size):
            upper, lower = slice(i, i + size), slice(i + size, i + 2 * size)
            moved = X[..., lower, upper] @ out[..., upper, upper]
            out[..., lower, upper] = -(out[..., lower, lower] @ moved)
        size *= 2
    return out


def fill_products(out: Tensor, factor: Tensor) -> None:
    """Fills zeros, [..., n, n], with the products of the factors j + 1 to i, [..., n],
    in row i and column j; n as in `unit_lower_inverse`.
    """
    n = out.size(-1)
    size = min(n, _BASE)
    out.diagonal(dim1=-2, dim2=-1).fill_(1)
    blocks = out.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    blocks = blocks.diagonal(dim1=-4, dim2=-2)  # [..., size, size, blocks]
    by_block = factor.unflatten(-1, (-1, size)).mT
    for i in range(1, size):
        step = by_block[..., i, None, :]
        torch.mul(blocks[..., i - 1, :i, :], step, out=blocks[..., i, :i, :])
    while size < n:
        for i in range(0, n, 2 * size):
            upper, lower = slice(i, i + size), slice(i + size, i + 2 * size)
            after = factor[..., i + size, None] * out[..., lower, i + size]
            before = out[..., i + size - 1, None, upper]
            torch.mul(after.unsqueeze(-1), before, out=out[..., lower, upper])
        size *= 2
