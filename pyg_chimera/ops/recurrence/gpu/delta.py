"""The delta rule on a GPU, in Triton."""

from types import ModuleType

from torch import Tensor

from pyg_chimera.ops.common import triton_runtime
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.triton_runtime import DEVICES, DEVICES_IF_ASKED
from pyg_chimera.ops.recurrence.plan.delta_forms import why_not_form

__all__ = [
    "DEVICES",
    "DEVICES_IF_ASKED",
    "FORMS",
    "backward",
    "forward",
    "why_not",
]

FORMS = ("state", "chunk")

#: The most key channels in each form, as a slice of a state has all of them.
_MOST_KEYS = {"state": 128, "chunk": 64}


def why_not(call: Call) -> str | None:
    """It needs Triton, a GPU, and states that fit in the registers."""
    inputs, graph = call.inputs, call.structure
    reason = why_not_form(call, FORMS)
    if reason is None:
        rows = max(graph.num_nodes, len(graph.row))
        reason = triton_runtime.why_not(inputs.value, rows)
    keys = inputs.key.size(2)
    if reason is None and keys > (most := _MOST_KEYS[call.choice.form]):
        reason = (
            f"form={call.choice.form!r} with backend='triton' takes at most {most} key "
            f"channels, got {keys}; use form='state' with backend='torch'"
        )
    return reason


def _module(call: Call) -> ModuleType:
    """That of the form, which needs Triton."""
    if call.choice.form == "chunk":
        from pyg_chimera.ops.recurrence.gpu import delta_chunks

        return delta_chunks
    from pyg_chimera.ops.recurrence.gpu import delta_walk

    return delta_walk


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P], and tensors to save."""
    return _module(call).forward(call)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta and edge weight."""
    return _module(call).backward(call, saved, grad)
