"""Mamba's recurrence in plain tensor operations, on any device."""

import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.sequences import linear_recurrence, longest_of, places

DEVICES = None

#: Bytes of states per slice of channels: few on the CPU, to fit in its cache, more on a
#: GPU, where small kernels are inefficient.
_CPU_BYTES, _GPU_BYTES = 1 << 22, 1 << 28


def why_not(call: Call) -> str | None:
    """It supports all calls."""


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs, [T, D]."""
    u, delta, A, B, C, D, ptr = call.inputs[:7]
    longest = longest_of(ptr)
    place, _ = places(ptr, u.size(0))
    outs = [torch.empty_like(u[:, :0])]
    for d in _slices(u.size(0), A):
        _, h = _states(u[:, d], delta[:, d], A[d], B, place, longest)
        outs.append((h @ C.unsqueeze(-1)).squeeze(-1))
    return torch.addcmul(torch.cat(outs, dim=1), u, D), ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of u, delta, A, B, C and D; states are recomputed."""
    u, delta, A, B, C, D, ptr = call.inputs[:7]
    longest = longest_of(ptr)
    place, left = places(ptr, u.size(0))
    du, ddelta, dA = (torch.empty_like(x) for x in (u, delta, A))
    dB, dC = torch.zeros_like(B), torch.zeros_like(C)
    for d in _slices(u.size(0), A):
        decay, h = _states(u[:, d], delta[:, d], A[d], B, place, longest)
        dC += (grad[:, d].unsqueeze(1) @ h).squeeze(1)
        # The adjoint states: g[t] = decay[t + 1] g[t + 1] + C[t] grad[t].
        g = grad[:, d].unsqueeze(-1) * C.unsqueeze(1)
        after = decay.roll(-1, 0).flip(0)
        g = linear_recurrence(after, g.flip(0), left.flip(0), longest).flip(0)
        dB += ((delta[:, d] * u[:, d]).unsqueeze(1) @ g).squeeze(1)
        read = (g @ B.unsqueeze(-1)).squeeze(-1)
        before = h.roll(1, 0).masked_fill_((place == 0).view(-1, 1, 1), 0.0)
        g = g * decay * before  # the gradient of the exponents, delta A
        du[:, d] = delta[:, d] * read + grad[:, d] * D[d]
        ddelta[:, d] = u[:, d] * read + (g * A[d]).sum(-1)
        dA[d] = (g * delta[:, d].unsqueeze(-1)).sum(0)
    return du, ddelta, dA, dB, dC, (grad * u).sum(0)


def _slices(num_rows: int, A: Tensor) -> list[slice]:
    """Slices of the channels whose states fit into the memory set aside for them."""
    row = num_rows * A.size(1) * A.element_size()
    limit = _CPU_BYTES if A.device.type == "cpu" else _GPU_BYTES
    width = max(1, limit // max(1, row))
    return [slice(d, d + width) for d in range(0, A.size(0), width)]


def _states(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, place: Tensor, longest: int
) -> tuple[Tensor, Tensor]:
    decay = torch.exp(delta.unsqueeze(-1) * A)
    x = (delta * u).unsqueeze(-1) * B.unsqueeze(1)
    return decay, linear_recurrence(decay, x, place, longest)
