"""Attention on a GPU, in Triton: tiles of nodes in parallel."""

from torch import Tensor

from pyg_chimera.ops.common import triton_runtime
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.triton_runtime import DEVICES, DEVICES_IF_ASKED

__all__ = ["DEVICES", "DEVICES_IF_ASKED", "backward", "forward", "why_not"]

#: The most channels per head that fit in the registers.
_MOST_CHANNELS = 256


def why_not(call: Call) -> str | None:
    """It needs Triton, a GPU, float32, heads that fit, and 32-bit counts."""
    query, value = call.inputs.query, call.inputs.value
    rows = max(query.size(0) * query.size(1), call.inputs.edge_index.size(1))
    reason = triton_runtime.why_not(value, rows)
    channels = max(query.size(2), value.size(2))
    if reason is None and channels > _MOST_CHANNELS:
        reason = (
            f"backend='triton' takes at most {_MOST_CHANNELS} channels in a head, got "
            f"{channels}; use backend='torch'"
        )
    return reason


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, H, P]; saves it or sums of differences, and logs of sums."""
    from pyg_chimera.ops.neighborhood_attention.triton_edges import attend

    return attend(call.structure, call.inputs.scale, *call.inputs[:5])


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of query, key, value and, if given, bias and contrast."""
    from pyg_chimera.ops.neighborhood_attention.triton_edges import gradients

    known = (call.structure, call.inputs.scale, saved, grad.contiguous())
    grads = gradients(*known, *call.inputs[:5])
    return tuple(x for x in grads if x is not None)
