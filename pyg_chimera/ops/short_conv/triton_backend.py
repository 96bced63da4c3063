"""The convolution on a GPU, in Triton."""

from torch import Tensor

from pyg_chimera.ops.common import triton_runtime
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.triton_runtime import DEVICES, DEVICES_IF_ASKED

__all__ = ["DEVICES", "DEVICES_IF_ASKED", "backward", "forward", "why_not"]


def why_not(call: Call) -> str | None:
    """It needs Triton, a GPU and float32, and counts rows in 32 bits."""
    return triton_runtime.why_not(call.inputs.x, max(call.inputs.x.shape))


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs, [T, F]."""
    from pyg_chimera.ops.short_conv.triton_taps import convolve

    x, weight, bias = call.inputs[:3]
    out = convolve(x, weight, call.structure.reads)
    return (out if bias is None else out.add_(bias)), ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of x, weight and, if given, bias."""
    from pyg_chimera.ops.short_conv.triton_taps import convolve, weight_gradient

    x, weight, bias = call.inputs[:3]
    dx = convolve(grad, weight, call.structure.read_by)
    dweight = weight_gradient(grad, x, weight, call.structure.reads)
    return (dx, dweight) if bias is None else (dx, dweight, grad.sum(0))
