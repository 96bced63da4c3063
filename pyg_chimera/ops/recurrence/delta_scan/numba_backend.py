"""The delta rule on the CPU, jitted, in two forms."""

from types import ModuleType

from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.recurrence.delta_scan import dense_masks, state_sweeps
from pyg_chimera.ops.recurrence.delta_scan.cost_model import why_not_form

DEVICES = ("cpu",)

_FORMS: dict[str, ModuleType] = {"mask": dense_masks, "state": state_sweeps}
FORMS = tuple(_FORMS)


def why_not(call: Call) -> str | None:
    """It supports all calls in mask and state form, but has no chunk form."""
    return why_not_form(call, FORMS)


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P], and the tensors to save."""
    return _FORMS[call.choice.form].forward(call)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta, edge weight, and if given of surprise."""
    return _FORMS[call.choice.form].backward(call, saved, grad)
