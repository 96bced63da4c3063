"""The delta rule on the CPU, jitted: matrices, and states without cycles."""

from types import ModuleType

from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.recurrence.cpu import delta_mask, delta_sweep
from pyg_chimera.ops.recurrence.plan.delta_forms import why_not_form

DEVICES = ("cpu",)

_FORMS: dict[str, ModuleType] = {"mask": delta_mask, "state": delta_sweep}
FORMS = tuple(_FORMS)


def why_not(call: Call) -> str | None:
    """It supports all calls in mask form, and in state form those on DAGs."""
    return why_not_form(call, FORMS)


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P], and the tensors to save."""
    return _FORMS[call.choice.form].forward(call)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta and edge weight."""
    return _FORMS[call.choice.form].backward(call, saved, grad)
