"""The convolution on the CPU, jitted.

A task is a piece of a row of nodes, or for the gradient of filters some pieces, which
have a sum of their own. It takes all channels of four nodes, then those of the next:
few channels of many nodes would be one cache line of each, and wait for memory. As the
adjoint of a filter is the mirrored filter, the backward pass is the forward pass of the
output's gradient, and multiplies what it reads with the inputs as well.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.numba_runtime import arrays, jit, run, stopped
from pyg_chimera.ops.common.simd import (
    fma,
    lanes,
    load_part,
    pointer,
    store_part,
    zeros,
)
from pyg_chimera.ops.structure.grid import Grids

DEVICES = ("cpu",)

#: The most sums of filter gradients, one for each task.
_SUMS = 16
#: The most nodes of a row in one piece.
_PIECE = 64


class _Pieces(NamedTuple):
    """Pieces of the rows of grids, and how far filters reach."""

    chunk: np.ndarray  #: [tasks + 1], the first piece of each task
    node: np.ndarray  #: [pieces], the first node
    size: np.ndarray  #: [pieces], the number of nodes
    column: np.ndarray  #: [pieces], the column of the first node
    row: np.ndarray  #: [pieces]
    height: np.ndarray  #: [pieces], that of the grid
    width: np.ndarray  #: [pieces], that of the grid
    above: int  #: rows of a filter above a node
    left: int  #: columns to its left
    taps: tuple[int, ...]  #: as long as a filter has columns


class _Gradient(NamedTuple):
    """The inputs, and for each task the gradient of filters, to be added to."""

    x: np.ndarray  #: [V, F]
    weight: np.ndarray  #: [tasks, rows, columns, F]


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs, [V, F]."""
    x, weight, causal = call.inputs[:3]
    before = [n - 1 if causal else n // 2 for n in weight.shape[1:]]
    return _seen(call, x, weight, before, None), ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of x and weight."""
    x, weight, causal = call.inputs[:3]
    behind = [0 if causal else n - 1 - n // 2 for n in weight.shape[1:]]
    sums = weight.new_zeros(_SUMS, *weight.shape[1:], weight.size(0))
    dx = _seen(call, grad, weight.flip(1, 2), behind, _Gradient(*arrays(x, sums)))
    return dx, sums.sum(0).permute(2, 0, 1).flip(1, 2)


def _seen(
    call: Call, x: Tensor, weight: Tensor, before: list[int], d: _Gradient | None
) -> Tensor:
    """The outputs of a filter; adds to the gradients `d`, if they are given."""
    grids = Grids.of(call.inputs.sizes)
    number = -(-grids.width // _PIECE)  # of pieces of a row
    ends = np.cumsum(grids.height * number)
    grid = np.repeat(np.arange(len(ends)), grids.height * number)
    width, number = grids.width[grid], number[grid]
    row, piece = np.divmod(np.arange(len(grid)) - ends[grid], number)
    row, column = row + grids.height[grid], piece * _PIECE
    count = np.minimum(_PIECE, width - column)
    tasks = len(grid) if d is None else min(_SUMS, len(grid))
    chunk = np.linspace(0, len(grid), tasks + 1).astype(np.int64)
    node = grids.first[grid] + row * width + column
    above, left = before
    pieces = _Pieces(
        *(chunk, node, count, column, row, grids.height[grid], width),
        *(above, left, tuple(range(weight.size(2)))),
    )
    costs = np.diff(np.append(0, np.cumsum(count))[chunk]) * 0.05 * weight.numel()
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    operands = arrays(x, weight.permute(1, 2, 0), out)
    run(_tasks, costs, 0, operands[0].dtype, pieces, *operands, d)
    return out


@jit
def _tasks(first, last, stop, scratch, pieces, x, weight, out, d):
    rows, columns, channels = weight.shape
    chunk, node, number, column, row, height, width, above, left, taps = pieces
    own, sums, Y = None, None, pointer(out)
    for task in range(first, last):
        for i in range(chunk[task], chunk[task + 1]):
            if stopped(stop):
                return
            r, w, c = row[i], width[i], column[i]
            top, bottom = max(0, above - r), min(rows, height[i] - r + above)
            size, at = (bottom - top, w, channels), top * columns * channels
            factors = pointer(weight) + at
            if d is not None:
                sums = pointer(d.weight) + (at + task * rows * columns * channels)
            begin, end = c, c + number[i]
            inside = min(end, w - columns + 1 + left) - 4  # the last four that see all
            while c < end:
                four = max(left, begin) <= inside and left <= c < inside + 4
                at = min(c, inside) if four else c
                u = node[i] + at - begin
                seen = pointer(x) + (u + (top - above) * w - left) * channels
                y = Y + u * channels
                if d is not None:
                    own = pointer(d.x) + u * channels
                if four:
                    _see_four(y, seen, factors, size, taps, own, sums, c - at)
                    c = at + 4
                else:
                    a, b = max(0, left - c), min(columns, w - c + left)
                    _see(y, seen, factors, (*size, columns, a, b), own, sums)
                    c += 1


@jit
def _see(y, x, factors, size, own, sums):
    """Sets the output of a node that sees some columns; adds the products of its own
    inputs, if they are given, and all that it sees to `sums`.
    """
    rows, width, channels, columns, begin, end = size
    for at in range(0, channels, lanes(y)):
        n, out = channels - at, zeros(y)
        for a in range(rows):
            for b in range(begin, end):
                to_w = (a * columns + b) * channels + at
                v = load_part(x + ((a * width + b) * channels + at), n)
                out = fma(load_part(factors + to_w, n), v, out)
                if own is not None:
                    s = load_part(sums + to_w, n)
                    store_part(sums + to_w, fma(load_part(own + at, n), v, s), n)
        store_part(y + at, out, n)


@jit
def _see_four(y, x, factors, size, taps, own, sums, known):
    """As `_see`, for four nodes of a row that see all columns, of which some may be
    known. The compiler knows the number of `taps`, that of columns.
    """
    rows, width, C = size
    for at in range(0, C, lanes(y)):
        n, y0, y1, y2, y3 = C - at, zeros(y), zeros(y), zeros(y), zeros(y)
        if own is not None:
            o, none = own + at, zeros(y)
            x0 = load_part(o, n) if known < 1 else none
            x1 = load_part(o + C, n) if known < 2 else none
            x2 = load_part(o + 2 * C, n) if known < 3 else none
            x3 = load_part(o + 3 * C, n)
        for a in range(rows):
            p, to_w = x + (a * width * C + at), a * len(taps) * C + at
            for _ in range(len(taps)):
                v0, v1 = load_part(p, n), load_part(p + C, n)
                v2, v3 = load_part(p + 2 * C, n), load_part(p + 3 * C, n)
                f = load_part(factors + to_w, n)
                y0, y1 = fma(f, v0, y0), fma(f, v1, y1)
                y2, y3 = fma(f, v2, y2), fma(f, v3, y3)
                if own is not None:
                    s = fma(x1, v1, fma(x0, v0, load_part(sums + to_w, n)))
                    store_part(sums + to_w, fma(x3, v3, fma(x2, v2, s)), n)
                p, to_w = p + C, to_w + C
        store_part(y + at, y0, n)
        store_part(y + (C + at), y1, n)
        store_part(y + (2 * C + at), y2, n)
        store_part(y + (3 * C + at), y3, n)
