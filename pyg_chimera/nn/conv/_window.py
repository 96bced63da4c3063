"""Filters over a small window of a grid or sequence, applied before recurrences."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_chimera.ops import grid_conv
from pyg_chimera.ops.common.checks import check_integer

#: Maps projections of nodes, [V, F], to ones that include nearby nodes.
Filter = Callable[[Tensor], Tensor]


def check_window(window: Any) -> tuple[int, int] | None:
    """Checks the rows and columns of a window, if there is one."""
    if window is None:
        return None
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(
            "'window' must be positive numbers of rows and columns, such as (3, 3), or "
            f"None, got {window!r}"
        )
    rows, columns = (check_integer("window", size, 1) for size in window)
    return rows, columns


@torch.no_grad()
def reset_filter_(weight: Tensor, place: int = 0) -> None:
    """Fills filters [channels, ...] with 1 for the node itself, at index `place`, and
    small random numbers for the others.
    """
    bound = weight[0].numel() ** -0.5
    weight.uniform_(-bound, bound)
    weight.flatten(1)[:, place] = 1


def reset_window_(weight: Tensor, causal: bool) -> None:
    """Fills the filters of windows, [channels, rows, columns]."""
    rows, columns = weight.shape[1:]
    last, middle = rows * columns - 1, rows // 2 * columns + columns // 2
    reset_filter_(weight, last if causal else middle)


def over_grids(
    weight: Tensor | None,
    height: int | Tensor,
    width: int | Tensor,
    causal: bool,
    backend: str,
) -> Filter | None:
    """The filter over the nodes of grids; None without weights."""
    if weight is None:
        return None
    backend = "auto" if backend == "triton" else backend  # filters have no Triton
    return lambda y: grid_conv(y, weight, height, width, causal=causal, backend=backend)


class Continued:
    """Causal filters [F, rows, columns], applied to one more node per sequence, [B, F].

    Attributes:
        seen (torch.Tensor, optional): The previous nodes, [B, F, columns - 1].
    """

    def __init__(self, weight: Tensor, seen: Tensor | None) -> None:
        self.weight, self.seen = weight[:, -1], seen

    def __call__(self, y: Tensor) -> Tensor:
        before = self.seen
        if before is None:
            before = y.new_zeros(*y.shape, self.weight.size(1) - 1)
        window = torch.cat([before, y.unsqueeze(2)], dim=2)
        self.seen = window[:, :, 1:]
        return (window * self.weight.to(y.dtype)).sum(2)
