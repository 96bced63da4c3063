"""The oracle: the recurrences as they are written, one step after the other."""

from itertools import pairwise

import torch
from torch import Tensor

__all__ = ["reference_conv", "reference_scan"]


def reference_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, ptr: Tensor
) -> Tensor:
    """The states h = exp(delta A) h + delta B u, read as C h + D u, in float64."""
    u_, delta, A, B, C, D = (x.double() for x in (u, delta, A, B, C, D))
    out = []
    for start, end in pairwise(ptr.tolist()):
        h = torch.zeros_like(A)
        for t in range(start, end):
            decay = torch.exp(delta[t, :, None] * A)
            h = decay * h + (delta[t] * u_[t])[:, None] * B[t]
            out.append(h @ C[t] + D * u_[t])
    return (torch.stack(out) if out else u_.clone()).to(u.dtype)


def reference_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, ptr: Tensor
) -> Tensor:
    """What each row sees of those before it in its sequence, in float64."""
    size = weight.size(1)
    out = []
    for start, end in pairwise(ptr.tolist()):
        for t in range(start, end):
            seen = range(max(start, t - size + 1), t + 1)
            terms = [weight[:, s - t + size - 1].double() * x[s].double() for s in seen]
            y = torch.stack(terms).sum(0)
            out.append(y if bias is None else y + bias.double())
    return (torch.stack(out) if out else x.clone()).to(x.dtype)
