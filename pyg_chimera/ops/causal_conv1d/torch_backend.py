"""The convolution in plain tensor operations, on any device."""

from collections.abc import Iterator

import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.sequences import places

DEVICES = None


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs, [T, D]."""
    x, weight, bias, ptr = call.inputs[:4]
    out = x * weight[:, -1]
    for back, outside in _taps(x.size(0), weight.size(1), ptr):
        seen = x[:-back].masked_fill(outside, 0.0)
        out[back:] += seen * weight[:, weight.size(1) - 1 - back]
    return (out if bias is None else out.add_(bias)), ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of x, weight and, if given, bias."""
    x, weight, bias, ptr = call.inputs[:4]
    dx, dweight = grad * weight[:, -1], torch.zeros_like(weight)
    dweight[:, -1] = (grad * x).sum(0)
    for back, outside in _taps(x.size(0), weight.size(1), ptr):
        tap = weight.size(1) - 1 - back
        g = grad[back:].masked_fill(outside, 0.0)
        dx[:-back] += g * weight[:, tap]
        dweight[:, tap] = (g * x[:-back]).sum(0)
    return (dx, dweight) if bias is None else (dx, dweight, grad.sum(0))


def _taps(num_rows: int, size: int, ptr: Tensor) -> Iterator[tuple[int, Tensor]]:
    """How far each past tap looks back, and the mask [t, 1] of rows for which that is
    before their sequence; without the first rows, which have no row to look back to.
    """
    place, _ = places(ptr, num_rows)
    for back in range(1, min(size, num_rows)):
        yield back, (place[back:] < back).unsqueeze(-1)
