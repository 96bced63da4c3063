"""The reference: the recurrence as written, one step after the other."""

from itertools import pairwise

import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.operator import without_autocast

DEVICES = None


def forward(call: Call) -> Tensor:
    """The outputs, which autograd differentiates."""
    with without_autocast(call.inputs.u):
        return _scan(*call.inputs[:7])


def _scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, ptr: Tensor
) -> Tensor:
    """The states h = exp(delta A) h + delta B u, read as C h + D u, in float64."""
    u_, delta, A, B, C, D = (x.double() for x in (u, delta, A, B, C, D))
    out = []
    for start, end in pairwise(ptr.tolist()):
        h = torch.zeros_like(A)
        for t in range(start, end):
            if t > start:  # as infinity times 0 is NaN
                h = torch.exp(delta[t, :, None] * A) * h
            h = h + (delta[t] * u_[t])[:, None] * B[t]
            out.append(h @ C[t] + D * u_[t])
    return (torch.stack(out) if out else u_.clone()).to(u.dtype)
