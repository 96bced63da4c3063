"""Grids with nodes row by row, whose structure needs no search."""

import torch
from torch import Tensor

__all__ = ["grid_dag", "grid_edges", "is_grid"]

#: The ways of the four DAGs of a grid along columns and rows: right and down, left and
#: up, right and up, left and down. Every second is the one before turned around.
ORIENTATIONS = ((1, 1), (-1, -1), (1, -1), (-1, 1))


def grid_edges(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Edges in both directions, by source, then target, and columns and rows."""
    node = torch.arange(height * width)
    row, col = node // width, node % width
    # Above, left, right and below, where there is one.
    exists = torch.stack([row > 0, col > 0, col < width - 1, row < height - 1], dim=1)
    source, side = exists.nonzero(as_tuple=True)
    target = source + torch.tensor([-width, -1, 1, width])[side]
    return torch.stack([source, target]), torch.stack([col, row], dim=1)


def grid_dag(
    edge_index: Tensor, height: int, width: int, orientation: int
) -> tuple[Tensor, Tensor]:
    """Which edges of a grid one of its DAGs has, as a mask, and ranks of nodes."""
    x_way, y_way = ORIENTATIONS[orientation]
    row, col = edge_index // width, edge_index % width
    across, down = col[1] - col[0], row[1] - row[0]
    node = torch.arange(height * width, device=edge_index.device)
    x, y = node % width, node // width
    x = x if x_way > 0 else width - 1 - x
    y = y if y_way > 0 else height - 1 - y
    return (across * x_way == 1) | (down * y_way == 1), x + y


def is_grid(edge_index: Tensor, height: int, width: int) -> bool:
    """Whether these are the edges of a grid, in any order, some perhaps repeated."""
    row, col = edge_index // width, edge_index % width
    steps = (row[1] - row[0]).abs() + (col[1] - col[0]).abs()
    if bool((steps != 1).any()):
        return False
    different = torch.unique(edge_index[0] * (height * width) + edge_index[1]).numel()
    return different == 2 * (height * (width - 1) + (height - 1) * width)
