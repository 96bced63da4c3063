"""The delta rule on the CPU, jitted: matrices, and states with and without cycles."""

from types import ModuleType

from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.recurrence.delta_scan import (
    dense_masks,
    state_fronts,
    state_sweeps,
)
from pyg_chimera.ops.recurrence.delta_scan.cost_model import why_not_form

DEVICES = ("cpu",)

_FORMS: dict[str, ModuleType] = {"mask": dense_masks, "state": state_sweeps}
FORMS = tuple(_FORMS)


def why_not(call: Call) -> str | None:
    """It supports all calls in mask and state form, but has no chunk form."""
    return why_not_form(call, FORMS)


def _module(call: Call) -> ModuleType:
    sparse = call.choice.solver == "sparse"
    return state_fronts if sparse else _FORMS[call.choice.form]


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P], and the tensors to save."""
    return _module(call).forward(call)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta and edge weight."""
    return _module(call).backward(call, saved, grad)
