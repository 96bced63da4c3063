"""Packed sequences: the rows of all sequences concatenated, and their bounds."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.array_views import as_array
from pyg_chimera.ops.common.checks import check_integers
from pyg_chimera.ops.common.torch_private import is_transforming

#: Sequences are grouped into blocks of about this many rows.
_BLOCK_ROWS = 128


def as_ptr(ptr: Any, x: Tensor) -> Tensor:
    """The bounds of the sequences in x, int64 [S + 1]; one sequence if None.

    Checks only what needs no contents, so it also works while tracing.
    """
    if ptr is None:
        return torch.tensor([0, x.size(0)], device=x.device)
    ptr = check_integers("ptr", ptr, x)
    if ptr.dim() != 1 or ptr.size(0) < 1:
        raise ValueError(f"'ptr' must be [sequences + 1], got {list(ptr.shape)}")
    return ptr


def check_ptr(ptr: Tensor, num_rows: int) -> None:
    """Checks that the sequences follow each other and cover all rows."""
    if is_transforming():  # tensors have no memory
        bounds = np.array([int(x) for x in ptr])
    else:
        bounds = as_array(ptr.cpu())  # a GPU is waited for once
    if bounds[0] != 0 or bounds[-1] != num_rows:
        raise ValueError(
            f"'ptr' must begin with 0 and end with the number of rows, {num_rows}, got "
            f"{bounds[0]} and {bounds[-1]}"
        )
    shorter = np.flatnonzero(np.diff(bounds) < 0)
    if shorter.size:
        s = shorter[0]
        raise ValueError(
            f"'ptr' must not decrease, but sequence {s} begins at {bounds[s]} and the "
            f"next one at {bounds[s + 1]}"
        )


def row_blocks(ptr: np.ndarray) -> np.ndarray:
    """The first sequence of each block of sequences, followed by their number."""
    number = ptr[:-1] // _BLOCK_ROWS
    new = np.flatnonzero(np.diff(number, prepend=-1))
    return np.append(new, number.shape[0])


def places(ptr: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """How many rows of its sequence precede each row, and how many follow it."""
    rows = torch.arange(num_rows, device=ptr.device)
    end = torch.searchsorted(ptr, rows, right=True)
    return rows - ptr[end - 1], ptr[end] - 1 - rows


def longest_of(ptr: Tensor) -> int:
    """The length of the longest sequence."""
    return int(ptr.diff().max()) if ptr.numel() > 1 else 0


def linear_recurrence(decay: Tensor, x: Tensor, place: Tensor, longest: int) -> Tensor:
    """h[t] = decay[t] h[t - 1] + x[t], for all rows at once in log2(longest) passes."""
    return _Recurrence.apply(decay, x, place.view(-1, *[1] * (x.dim() - 1)), longest)


class _Recurrence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, decay: Tensor, x: Tensor, place: Tensor, longest: int
    ) -> Tensor:
        h = _in_passes(decay, x, place, longest)
        ctx.save_for_backward(decay, h, place)
        ctx.longest = longest
        return h

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        decay, h, place = ctx.saved_tensors
        # The adjoints: g[t] = decay[t + 1] g[t + 1] + grad[t].
        after = decay.roll(-1, 0).flip(0)
        g = _in_passes(after, grad.flip(0), place, ctx.longest, reverse=True).flip(0)
        return g * h.roll(1, 0).masked_fill_(place == 0, 0.0), g, None, None


def _in_passes(
    decay: Tensor, x: Tensor, place: Tensor, longest: int, reverse: bool = False
) -> Tensor:
    """Each pass doubles the number of rows that are summed. Rows of another sequence
    are left out rather than multiplied by zero, as they may be NaN.
    """
    step = 1
    while step < longest:
        inside = place[step:] >= step
        inside = inside.flip(0) if reverse else inside
        longer = torch.addcmul(x[step:], decay[step:], x[:-step])
        x = torch.cat([x[:step], torch.where(inside, longer, x[step:])])
        if 2 * step < longest:
            decay = torch.cat([decay[:step], decay[step:] * decay[:-step]])
        step *= 2
    return x
