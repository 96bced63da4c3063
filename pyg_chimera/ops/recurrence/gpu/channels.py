"""The recurrence on a GPU, in Triton: spans of directed paths, in parallel."""

from torch import Tensor

from pyg_chimera.ops.common import triton_runtime
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.triton_runtime import DEVICES, DEVICES_IF_ASKED

__all__ = ["DEVICES", "DEVICES_IF_ASKED", "backward", "forward", "why_not"]


def why_not(call: Call) -> str | None:
    """It needs Triton, a GPU and paths, and counts rows in 32 bits."""
    value = call.inputs.value
    reason = triton_runtime.why_not(value, value.size(0))
    if reason is None and not call.structure.are_paths:
        reason = (
            "backend='triton' is for directed paths, where each node has at most one "
            "edge in and one out; use backend='torch' or 'auto'"
        )
    if reason is None and value.size(1) >= 1 << 20:
        reason = "backend='triton' counts channels in 20 bits; use backend='torch'"
    return reason


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The states, [V, C]."""
    from pyg_chimera.ops.recurrence.gpu.channel_spans import scan

    return scan(call.structure, *call.inputs[:3]), ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of value, and of edge weight and decay if they are given."""
    from pyg_chimera.ops.recurrence.gpu.channel_spans import gradients

    (state,), inputs = saved, call.inputs[:3]
    grads = gradients(call.structure, state, grad.contiguous(), *inputs)
    return tuple(x for x in grads if x is not None)
