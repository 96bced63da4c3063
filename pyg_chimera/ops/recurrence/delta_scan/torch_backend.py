"""The delta rule in plain PyTorch, in three forms, on any device.

All of this runs inside one registered operator, below autograd, so gradients are
written out (by `torch.func`, states would take up to three times as long). Those of
solutions of a linear system solve the transposed system.
"""

from types import ModuleType

from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.recurrence.delta_scan import level_states, matrices, path_chunks
from pyg_chimera.ops.recurrence.delta_scan.cost_model import why_not_form

DEVICES = None

_FORMS: dict[str, ModuleType] = {
    "state": level_states,
    "mask": matrices,
    "chunk": path_chunks,
}
FORMS = tuple(_FORMS)


def why_not(call: Call) -> str | None:
    """It supports all calls, but the state form for DAGs and chunks for paths only."""
    return why_not_form(call, FORMS)


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P], and the tensors to save."""
    return _FORMS[call.choice.form].forward(call)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta and edge weight."""
    return _FORMS[call.choice.form].backward(call, saved, grad)
