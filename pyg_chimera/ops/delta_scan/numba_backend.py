"""The delta rule on the CPU, jitted."""

from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.delta_scan import state_sweeps, torch_backend

DEVICES = ("cpu",)


def why_not(call: Call) -> str | None:
    """It carries states along DAGs."""
    if call.choice.form != "state":
        return f"form={call.choice.form!r} has no numba backend; use backend='torch'"
    return torch_backend.why_not(call)


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P], and what `backward` needs again."""
    return state_sweeps.forward(call)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta, edge weight, and if given of surprise."""
    return state_sweeps.backward(call, saved, grad)
