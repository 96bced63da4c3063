"""The delta rule in plain PyTorch, in three forms, on any device.

All of this runs inside one registered operator, below autograd: gradients are written
out. Solutions of a linear system have those of the transposed system.
"""

from types import ModuleType

from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.delta_scan import level_states, matrices, path_chunks
from pyg_chimera.ops.delta_scan.cost_model import why_not_form

DEVICES = None

_FORMS: dict[str, ModuleType] = {
    "state": level_states,
    "mask": matrices,
    "chunk": path_chunks,
}
FORMS = tuple(_FORMS)


def why_not(call: Call) -> str | None:
    """It computes everything, but states on DAGs and chunks on paths only."""
    return why_not_form(call)


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P], and what `backward` needs again."""
    return _FORMS[call.choice.form].forward(call)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta and edge weight."""
    return _FORMS[call.choice.form].backward(call, saved, grad)
