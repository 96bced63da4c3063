"""The delta rule on the CPU, jitted."""

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.numba_runtime import arrays
from pyg_chimera.ops.delta_scan import dense_masks

DEVICES = ("cpu",)


def why_not(call: Call) -> str | None:
    """It has the mask form alone."""
    form = call.choice.form
    if form != "mask":
        return f"form={form!r} has no numba backend; use backend='torch' or 'auto'"
    return None


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P], and what `backward` needs again, of float64."""
    out, saved = dense_masks.forward(call.structure, *arrays(*call.inputs[:5]))
    as_saved = (
        torch.from_numpy(x).flatten().view(call.inputs.value.dtype) for x in saved
    )
    return torch.from_numpy(out), tuple(as_saved)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta and edge weight."""
    written, *factors = (x.numpy().view(np.float64) for x in saved)
    heads = grad.size(1)
    parts = dense_masks.Saved(
        written.reshape(grad.shape), *(x.reshape(heads, -1) for x in factors)
    )
    query, key, _, beta, weight = arrays(*call.inputs[:5])
    found = dense_masks.backward(
        call.structure, query, key, beta, weight, parts, *arrays(grad)
    )
    return tuple(map(torch.from_numpy, found))
