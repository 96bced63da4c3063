"""Which rows the taps of a filter read."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_chimera.ops.common.sequences import check_ptr

__all__ = ["Taps", "grid_taps", "sequence_taps"]


class Taps(NamedTuple):
    """For T rows and K taps, int32; -1 outside of the grid."""

    reads: Tensor  #: [T, K], the row that each tap reads
    read_by: Tensor  #: [T, K], the row of which that tap reads this one


def sequence_taps(ptr: Tensor, num_rows: int, size: int) -> Taps:
    """Causal filters of packed sequences, which are grids of one row.

    Raises:
        ValueError: If the sequences do not follow each other and cover all rows.
    """
    check_ptr(ptr, num_rows)
    length = ptr.diff()
    return _taps(torch.ones_like(length), length, (1, size, 1))


def grid_taps(
    device: torch.device, sizes: Sequence[int], window: Sequence[int]
) -> Taps:
    """Filters of rows x columns, causal or not, of grids of height x width."""
    pairs = torch.tensor(sizes, dtype=torch.int64, device=device).view(-1, 2)
    height, width = pairs.unbind(1)
    return _taps(height, width, window)


def _taps(height: Tensor, width: Tensor, window: Sequence[int]) -> Taps:
    rows, columns, causal = window
    size = height * width
    h, w, first = (
        x.repeat_interleave(size)[:, None]
        for x in (height, width, size.cumsum(0) - size)
    )
    node = torch.arange(len(first), device=size.device)[:, None]
    r, c = (node - first) // w, (node - first) % w
    tap = torch.arange(rows * columns, device=size.device)
    down = tap // columns - (rows - 1 if causal else rows // 2)
    right = tap % columns - (columns - 1 if causal else columns // 2)

    def moved(down: Tensor, right: Tensor) -> Tensor:
        i, j = r + down, c + right
        inside = (i >= 0) & (i < h) & (j >= 0) & (j < w)
        return torch.where(inside, node + down * w + right, -1).int()

    return Taps(moved(down, right), moved(-down, -right))
