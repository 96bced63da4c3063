"""Mamba's recurrence in plain tensor operations, on any device."""

import torch
from torch import Tensor

from pyg_chimera.ops.common.autograd import by_autograd
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.sequences import linear_recurrence, longest_of, places

DEVICES = None

#: Bytes of states per slice of channels: few on the CPU, to fit in its cache, more on a
#: GPU, where small kernels are inefficient.
_CPU_BYTES, _GPU_BYTES = 1 << 22, 1 << 28


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs, [T, D]."""
    return _outputs(call, longest_of(call.inputs.ptr)), ()


def _outputs(call: Call, longest: int) -> Tensor:
    u, delta, A, B, C, D, ptr = call.inputs[:7]
    place, _ = places(ptr, u.size(0))
    outs = [torch.empty_like(u[:, :0])]
    for d in _slices(u.size(0), A):
        decay = delta[:, d].unsqueeze(-1) * A[d]
        # Nothing is before first rows, and infinity times 0 is NaN.
        decay = decay.masked_fill((place == 0).view(-1, 1, 1), 0).exp()
        x = (delta[:, d] * u[:, d]).unsqueeze(-1) * B.unsqueeze(1)
        h = linear_recurrence(decay, x, place, longest)
        outs.append((h @ C.unsqueeze(-1)).squeeze(-1))
    return torch.addcmul(torch.cat(outs, dim=1), u, D)


# Where the host must not wait for the device, no sequence is longer than all.
backward = by_autograd(lambda call: (_outputs(call, call.inputs.u.size(0)), ()))


def _slices(num_rows: int, A: Tensor) -> list[slice]:
    """Slices of the channels whose states fit into the memory set aside for them."""
    row = num_rows * A.size(1) * A.element_size()
    limit = _CPU_BYTES if A.device.type == "cpu" else _GPU_BYTES
    width = max(1, limit // max(1, row))
    return [slice(d, d + width) for d in range(0, A.size(0), width)]
