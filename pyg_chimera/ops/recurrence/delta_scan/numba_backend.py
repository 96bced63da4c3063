"""The delta rule on the CPU, jitted, in two forms."""

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.numba_runtime import arrays
from pyg_chimera.ops.recurrence.delta_scan import dense_masks, state_sweeps
from pyg_chimera.ops.recurrence.delta_scan.cost_model import why_not_form
from pyg_chimera.ops.recurrence.row_sweeps import Factors

DEVICES = ("cpu",)
FORMS = ("mask", "state")


def why_not(call: Call) -> str | None:
    """It supports all calls in mask and state form, but has no chunk form."""
    if call.choice.form not in FORMS:
        return (
            f"form={call.choice.form!r} has no numba backend; use backend='torch' or "
            "'auto'"
        )
    return why_not_form(call)


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P]; the mask form saves u and the factors of I - A."""
    if call.choice.form == "state":
        return state_sweeps.forward(call), ()
    operands = dense_masks.Operands(*arrays(*call.inputs[:5]))
    out, written, factors = dense_masks.forward(call.structure, operands)
    dtype = call.inputs.value.dtype  # saved tensors are viewed as this dtype
    saved = (torch.from_numpy(x).flatten().view(dtype) for x in (written, *factors))
    return torch.from_numpy(out), tuple(saved)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta, edge weight, and if given of surprise."""
    if call.choice.form == "state":
        return state_sweeps.backward(call, grad)
    operands = dense_masks.Operands(*arrays(*call.inputs[:5]))
    written, *parts = (x.numpy().view(np.float64) for x in saved)
    factors = Factors(*(x.reshape(grad.size(1), -1) for x in parts))
    grads = dense_masks.backward(
        call.structure, operands, written.reshape(grad.shape), factors, *arrays(grad)
    )
    return tuple(map(torch.from_numpy, grads))
