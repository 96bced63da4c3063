"""The convolution on a GPU: a program per block of rows and channels, tap by tap.

A tap looks back a number of rows, and is skipped if its row is before the sequence. Its
gradient is summed over the rows of each program, and over programs afterwards.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_chimera.ops.common.sequences import places
from pyg_chimera.ops.common.triton_runtime import on_device_of

#: Rows and channels of a program.
_ROWS, _WIDTH = 32, 64
_OPTIONS = {"num_warps": 4, "num_stages": 1}


class _Sizes(NamedTuple):
    """What kernels are compiled for."""

    channels: int
    taps: int
    rows: int = _ROWS
    width: int = _WIDTH


def convolve(x: Tensor, weight: Tensor, bias: Tensor, ptr: Tensor) -> Tensor:
    """The outputs, [T, D]."""
    out = torch.empty_like(x)
    if x.numel() > 0:
        before, _ = places(ptr, x.size(0))
        filters, sizes = (weight.t().contiguous(), bias), _Sizes(*weight.shape)
        with on_device_of(x):
            _convolve[_programs(x)](
                x, filters, before.int(), out, x.size(0), sizes, **_OPTIONS
            )
    return out


def gradients(
    x: Tensor, weight: Tensor, ptr: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight."""
    if x.numel() == 0:
        return torch.zeros_like(x), torch.zeros_like(weight)
    dx, programs = torch.empty_like(x), _programs(x)
    dweight = x.new_empty(programs[0], *weight.t().shape)
    around = tuple(rows.int() for rows in places(ptr, x.size(0)))
    with on_device_of(x):
        _differentiate[programs](
            grad, x, weight.t().contiguous(), around, dx, dweight, x.size(0),
            _Sizes(*weight.shape), **_OPTIONS,
        )  # fmt: skip
    return dx, dweight.sum(0).t()


def _programs(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.size(0), _ROWS), triton.cdiv(x.size(1), _WIDTH)


@triton.jit
def _tile(num_rows, sizes: tl.constexpr):
    """A program's rows and channels, their offsets, and a mask."""
    t = tl.program_id(0).to(tl.int64) * sizes.rows + tl.arange(0, sizes.rows)
    d = tl.program_id(1) * sizes.width + tl.arange(0, sizes.width)
    there = (t < num_rows)[:, None] & (d < sizes.channels)[None, :]
    return t, d, t[:, None] * sizes.channels + d[None, :], there


@triton.jit(do_not_specialize=["num_rows"])
def _convolve(X, filters, BEFORE, OUT, num_rows, sizes: tl.constexpr):
    """The outputs, for weights [taps, channels] and biases."""
    WEIGHT, BIAS = filters
    CHANNELS: tl.constexpr = sizes.channels
    SIZE: tl.constexpr = sizes.taps
    t, d, at, there = _tile(num_rows, sizes)
    before = tl.load(BEFORE + t, mask=t < num_rows, other=0)[:, None]
    out = tl.zeros([sizes.rows, sizes.width], X.dtype.element_ty)
    out += tl.load(BIAS + d, mask=d < CHANNELS, other=0.0)[None, :]
    for back in range(0, SIZE):
        tap = WEIGHT + (SIZE - 1 - back) * CHANNELS + d
        x = tl.load(X + at - back * CHANNELS, mask=there & (back <= before), other=0.0)
        out += tl.load(tap, mask=d < CHANNELS, other=0.0)[None, :] * x
    tl.store(OUT + at, out, mask=there)


@triton.jit(do_not_specialize=["num_rows"])
def _differentiate(DY, X, WEIGHT, around, DX, DWEIGHT, num_rows, sizes: tl.constexpr):
    """The gradient of the inputs, and this program's part of that of the weights."""
    BEFORE, AFTER = around
    CHANNELS: tl.constexpr = sizes.channels
    SIZE: tl.constexpr = sizes.taps
    t, d, at, there = _tile(num_rows, sizes)
    before = tl.load(BEFORE + t, mask=t < num_rows, other=0)[:, None]
    after = tl.load(AFTER + t, mask=t < num_rows, other=0)[:, None]
    own = tl.load(DY + at, mask=there, other=0.0)
    dx = tl.zeros([sizes.rows, sizes.width], X.dtype.element_ty)
    for back in range(0, SIZE):
        tap = (SIZE - 1 - back) * CHANNELS + d
        dy = tl.load(DY + at + back * CHANNELS, mask=there & (back <= after), other=0.0)
        dx += tl.load(WEIGHT + tap, mask=d < CHANNELS, other=0.0)[None, :] * dy
        x = tl.load(X + at - back * CHANNELS, mask=there & (back <= before), other=0.0)
        part = tl.program_id(0).to(tl.int64) * (SIZE * CHANNELS)
        tl.store(DWEIGHT + part + tap, tl.sum(own * x, 0), mask=d < CHANNELS)
    tl.store(DX + at, dx, mask=there)
