"""Mamba's recurrence on a GPU, in Triton: spans of rows are processed in parallel."""

from torch import Tensor

from pyg_chimera.ops.common import triton_runtime
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.triton_runtime import DEVICES, DEVICES_IF_ASKED

__all__ = ["DEVICES", "DEVICES_IF_ASKED", "backward", "forward", "why_not"]


def why_not(call: Call) -> str | None:
    """It needs Triton and a GPU, and counts rows in 32 bits."""
    return triton_runtime.why_not(call.inputs.u, max(call.inputs.u.shape))


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs, [T, D], and the states after each span."""
    from pyg_chimera.ops.recurrence.gpu.selective_spans import scan

    return scan(*(x.contiguous() for x in call.inputs[:7]))


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of u, delta, A, B, C and D."""
    from pyg_chimera.ops.recurrence.gpu.selective_spans import (
        scan_gradients,
    )

    (state,), inputs = saved, (x.contiguous() for x in call.inputs[:7])
    return scan_gradients(grad.contiguous(), state, *inputs)
