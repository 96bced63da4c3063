"""The convolution on the CPU: jitted, some channels at a time.

A task is a grid, or for the gradient of filters a chunk of grids, with as many channels
as fit in a vector. What it reads of a node is one cache line, which is reused for the
other taps of the filter; adjacent lines are likely still cached for the next tasks.
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
    vector_lanes,
    zeros,
)
from pyg_chimera.ops.structure.grid import Grids

DEVICES = ("cpu",)

#: The most chunks of a batch, each with its own sum of filter gradients.
_CHUNKS = 16


class _Work(NamedTuple):
    """The grids in chunks, and how far filters reach."""

    chunk: np.ndarray  #: [chunks + 1], first grid of each chunk
    grids: Grids
    above: int  #: rows of a filter above a node
    left: int  #: columns to its left


def why_not(call: Call) -> str | None:
    """It supports all calls."""


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs, [V, F]."""
    x, weight = call.inputs[:2]
    return _seen(call, x, weight, _before(call)), ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of x and weight."""
    x, weight = call.inputs[:2]
    # The adjoint of a filter is the mirrored filter.
    behind = [n - 1 - m for n, m in zip(weight.shape[1:], _before(call), strict=True)]
    dx = _seen(call, grad, weight.flip(1, 2), behind)
    chunks = min(len(call.inputs.sizes) // 2, _CHUNKS)
    dweight = weight.new_zeros(chunks, *weight.shape[1:], weight.size(0))
    _run(_weight_tasks, call, chunks, _before(call), *arrays(x, grad, dweight))
    return dx, dweight.sum(0).permute(2, 0, 1)


def _before(call: Call) -> list[int]:
    """How many rows of the filter are above a node, how many columns to its left."""
    sides, causal = call.inputs.weight.shape[1:], call.inputs.causal
    return [n - 1 if causal else n // 2 for n in sides]


def _seen(call: Call, x: Tensor, weight: Tensor, before: list[int]) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    operands = arrays(x, weight.permute(1, 2, 0), out)
    _run(_seen_tasks, call, len(call.inputs.sizes) // 2, before, *operands)
    return out


def _run(kernel, call: Call, chunks: int, before: list[int], *args) -> None:
    """Runs a kernel on all channels of the grids, divided into chunks."""
    weight, dtype = call.inputs.weight, args[-1].dtype
    grids, places = Grids.of(call.inputs.sizes), weight.size(1) * weight.size(2)
    chunk = np.linspace(0, len(grids.first), chunks + 1).astype(np.int64)
    nodes = np.append(0, np.cumsum(grids.height * grids.width))
    parts = -(-weight.size(0) // vector_lanes(dtype)[0])
    costs = np.repeat(np.diff(nodes[chunk]) * (3.0 + places), parts)
    run(kernel, costs, 0, dtype, _Work(chunk, grids, *before), *args)


@jit
def _seen_tasks(first, last, stop, scratch, work, x, weight, out):
    rows, columns, channels = weight.shape
    chunk, grids, above, left = work
    by = lanes(pointer(out))
    parts = (channels + by - 1) // by
    for task in range(first, last):
        part, at = task // parts, task % parts * by
        n = channels - at
        X, W, Y = pointer(x) + at, pointer(weight) + at, pointer(out) + at
        for grid in range(chunk[part], chunk[part + 1]):
            h, w = grids.height[grid], grids.width[grid]
            for r in range(h):
                if stopped(stop):
                    return
                row = grids.first[grid] + r * w
                for c in range(w):
                    store_part(Y + (row + c) * channels, zeros(Y), n)
                for a in range(max(0, above - r), min(rows, h - r + above)):
                    over = row + (a - above) * w - left
                    for b in range(columns):
                        begin, end = max(0, left - b), min(w, w + left - b)
                        y = Y + (row + begin) * channels
                        seen = X + (over + b + begin) * channels
                        factors = load_part(W + (a * columns + b) * channels, n)
                        _add_products(y, seen, factors, channels, end - begin, n)


@jit
def _add_products(y, x, factors, channels, count, n):
    """Adds the products of factors and x to y, for channels of consecutive nodes."""
    for i in range(0, count * channels, channels):
        store_part(y + i, fma(factors, load_part(x + i, n), load_part(y + i, n)), n)


@jit
def _weight_tasks(first, last, stop, scratch, work, x, grad, out):
    _, rows, columns, channels = out.shape
    chunk, grids, above, left = work
    by = lanes(pointer(out))
    parts = (channels + by - 1) // by
    for task in range(first, last):
        part, at = task // parts, task % parts * by
        n = channels - at
        X, dY, dW = pointer(x) + at, pointer(grad) + at, pointer(out) + at
        dW = dW + part * rows * columns * channels
        for grid in range(chunk[part], chunk[part + 1]):
            h, w = grids.height[grid], grids.width[grid]
            for r in range(h):
                if stopped(stop):
                    return
                row = grids.first[grid] + r * w
                for a in range(max(0, above - r), min(rows, h - r + above)):
                    over = row + (a - above) * w - left
                    for b in range(columns):
                        begin, end = max(0, left - b), min(w, w + left - b)
                        place = dW + (a * columns + b) * channels
                        dy = dY + (row + begin) * channels
                        seen = X + (over + b + begin) * channels
                        sums = _sum_of_products(dy, seen, channels, end - begin, n)
                        store_part(place, load_part(place, n) + sums, n)


@jit
def _sum_of_products(x, y, channels, count, n):
    """The sum of the products of x and y, for channels of consecutive nodes."""
    sums = zeros(x)
    for i in range(0, count * channels, channels):
        sums = fma(load_part(x + i, n), load_part(y + i, n), sums)
    return sums
