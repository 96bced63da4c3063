"""The convolution on a GPU, in Triton."""

from torch import Tensor

from pyg_chimera.ops.common import triton_runtime
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.triton_runtime import DEVICES, DEVICES_IF_ASKED

__all__ = ["DEVICES", "DEVICES_IF_ASKED", "backward", "forward", "why_not"]


def why_not(call: Call) -> str | None:
    """It needs Triton and a GPU, and counts rows in 32 bits."""
    return triton_runtime.why_not(call.inputs.x, max(call.inputs.x.shape))


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs, [T, D]."""
    from pyg_chimera.ops.causal_conv1d.triton_taps import convolve

    x, weight, bias, ptr = call.inputs[:4]
    bias = weight.new_zeros(weight.size(0)) if bias is None else bias
    return convolve(x.contiguous(), weight, bias.contiguous(), ptr), ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of x, weight and, if given, bias."""
    from pyg_chimera.ops.causal_conv1d.triton_taps import gradients

    x, weight, bias, ptr = call.inputs[:4]
    grads = gradients(x.contiguous(), weight, ptr, grad.contiguous())
    return grads if bias is None else (*grads, grad.sum(0))
