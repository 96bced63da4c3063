"""The convolution in plain tensor operations, on any device: tap by tap."""

import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call

DEVICES = None


def why_not(call: Call) -> str | None:
    """It supports all calls."""


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs, [T, F]."""
    x, weight, bias = call.inputs[:3]
    out = _convolved(x, weight, call.structure.reads)
    return (out if bias is None else out.add_(bias)), ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of x, weight and, if given, bias."""
    x, weight, bias = call.inputs[:3]
    dx = _convolved(grad, weight, call.structure.read_by)
    taps = call.structure.reads.unbind(1)
    dweight = torch.stack([(grad * _seen(x, row)).sum(0) for row in taps], dim=1)
    return (dx, dweight) if bias is None else (dx, dweight, grad.sum(0))


def _convolved(x: Tensor, weight: Tensor, reads: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for row, factor in zip(reads.unbind(1), weight.unbind(1), strict=True):
        out.addcmul_(_seen(x, row), factor)
    return out


def _seen(x: Tensor, row: Tensor) -> Tensor:
    """The rows that a tap reads; zeros outside."""
    seen = x.index_select(0, row.clamp(min=0))
    return seen.masked_fill_((row < 0).unsqueeze(1), 0.0)
