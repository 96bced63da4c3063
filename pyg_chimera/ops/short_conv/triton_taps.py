"""The convolution on a GPU: a program per block of rows and channels, tap by tap.

The gradient of a filter is summed over the rows of each program, and over programs
afterwards.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_chimera.ops.common.triton_runtime import on_device_of

__all__ = ["convolve", "weight_gradient"]

#: Rows and channels of a program.
_ROWS, _WIDTH = 32, 64
_OPTIONS = {"num_warps": 4, "num_stages": 1}


def convolve(x: Tensor, weight: Tensor, reads: Tensor) -> Tensor:
    """The products with the rows that each row reads, [T, F]."""
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.numel() > 0:
        args = (x.contiguous(), weight.t().contiguous(), reads, out, x.size(0))
        with on_device_of(x):
            _convolve[_programs(x)](*args, *weight.shape, _ROWS, _WIDTH, **_OPTIONS)
    return out


def weight_gradient(grad: Tensor, x: Tensor, weight: Tensor, reads: Tensor) -> Tensor:
    """The gradient of the filters, [F, K]."""
    if x.numel() == 0:
        return torch.zeros_like(weight)
    dweight = x.new_empty(_programs(x)[0], *weight.t().shape)
    args = (grad.contiguous(), x.contiguous(), reads, dweight, x.size(0))
    with on_device_of(x):
        _differentiate[_programs(x)](*args, *weight.shape, _ROWS, _WIDTH, **_OPTIONS)
    return dweight.sum(0).t()


def _programs(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.size(0), _ROWS), triton.cdiv(x.size(1), _WIDTH)


@triton.jit
def _tile(num_rows, CHANNELS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A program's rows and channels, and a mask."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    d = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    return t, d, (t < num_rows)[:, None] & (d < CHANNELS)[None, :]


@triton.jit
def _seen(X, READS, t, d, k, num_rows, CHANNELS: tl.constexpr, SIZE: tl.constexpr):
    """The rows that tap k reads; zeros outside."""
    row = tl.load(READS + t * SIZE + k, mask=t < num_rows, other=-1)[:, None]
    there = (row >= 0) & (d < CHANNELS)[None, :]
    return tl.load(X + row.to(tl.int64) * CHANNELS + d[None, :], mask=there, other=0.0)


@triton.jit(do_not_specialize=["num_rows"])
def _convolve(
    X,
    WEIGHT,
    READS,
    OUT,
    num_rows,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """The outputs, for weights [SIZE, CHANNELS]."""
    t, d, there = _tile(num_rows, CHANNELS, ROWS, WIDTH)
    out = tl.zeros([ROWS, WIDTH], X.dtype.element_ty)
    for k in range(0, SIZE):
        w = tl.load(WEIGHT + k * CHANNELS + d, mask=d < CHANNELS, other=0.0)
        out += w[None, :] * _seen(X, READS, t, d, k, num_rows, CHANNELS, SIZE)
    tl.store(OUT + t[:, None] * CHANNELS + d[None, :], out, mask=there)


@triton.jit(do_not_specialize=["num_rows"])
def _differentiate(
    DY,
    X,
    READS,
    DWEIGHT,
    num_rows,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """This program's part of the gradient of the weights."""
    t, d, there = _tile(num_rows, CHANNELS, ROWS, WIDTH)
    dy = tl.load(DY + t[:, None] * CHANNELS + d[None, :], mask=there, other=0.0)
    part = DWEIGHT + tl.program_id(0).to(tl.int64) * (SIZE * CHANNELS)
    for k in range(0, SIZE):
        x = _seen(X, READS, t, d, k, num_rows, CHANNELS, SIZE)
        tl.store(part + k * CHANNELS + d, tl.sum(dy * x, 0), mask=d < CHANNELS)
