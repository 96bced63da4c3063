"""Grids with nodes in row-major order, whose structure is known without a search.

The four DAGs of a grid lead right and down, left and up, right and up, left and down;
the second is the reverse of the first, and the fourth of the third.
"""

from collections.abc import Sequence
from itertools import chain
from numbers import Integral
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.checks import NO_TORCHSCRIPT, check_integers, check_option
from pyg_chimera.ops.common.portability import is_portable
from pyg_chimera.ops.structure.registered import structural_op

#: The horizontal and vertical step of each DAG.
WAYS = ((1, 1), (-1, -1), (1, -1), (-1, 1))


class Grids(NamedTuple):
    """Grids whose nodes are consecutive, in row-major order."""

    height: np.ndarray  #: [T]
    width: np.ndarray  #: [T]
    first: np.ndarray  #: [T], the first node of each grid

    @classmethod
    def of(cls, sizes: Sequence[int]) -> "Grids":
        """Grids with `sizes` height, width, height, width, ..."""
        height, width = np.array(sizes, np.int64).reshape(-1, 2).T.copy()
        nodes = height * width
        return cls(height, width, np.cumsum(nodes) - nodes)


def grid_sizes(
    height: int | Tensor, width: int | Tensor, num_nodes: int
) -> list[tuple[int, int]]:
    """The height and width of each grid.

    Raises:
        TypeError: If sizes are not integers.
        ValueError: If they are not positive, or do not match each other or the nodes.
    """
    if is_portable():
        return _unread_sizes(height, width, num_nodes)  # type: ignore[return-value]
    if torch.jit.is_tracing():
        raise NotImplementedError(NO_TORCHSCRIPT)
    lists = []
    for name, x in {"height": height, "width": width}.items():
        numbers = x.reshape(-1).tolist() if isinstance(x, Tensor) else [x]
        wanted = f"'{name}' must be a positive integer, or a tensor of them"
        for number in numbers:
            if not isinstance(number, (Integral, torch.SymInt)):
                raise TypeError(f"{wanted}, got {number!r}")
            if number < 1:
                raise ValueError(f"{wanted}, got {number!r}")
        lists.append(numbers)
    heights, widths = lists
    if not isinstance(height, Tensor):
        heights = heights * len(widths)
    if not isinstance(width, Tensor):
        widths = widths * len(heights)
    if len(heights) != len(widths):
        raise ValueError(
            f"'height' and 'width' must be of as many grids, got {len(heights)} and "
            f"{len(widths)}"
        )
    covered = sum(h * w for h, w in zip(heights, widths, strict=True))
    plain = not isinstance(height, Tensor) and not isinstance(width, Tensor)
    if plain and num_nodes % covered == 0:  # grids of equal size
        return [(heights[0], widths[0])] * (num_nodes // covered)
    if covered != num_nodes:
        count = len(heights)
        raise ValueError(
            f"'height' and 'width' must be of grids of {num_nodes} nodes in all, got "
            f"{covered} in {count} grid{'s' * (count != 1)}"
        )
    return list(zip(heights, widths, strict=True))


def _unread_sizes(height: int | Tensor, width: int | Tensor, num_nodes: int) -> Tensor:
    """The height and width of each grid, [grids, 2], without a look at them."""
    if isinstance(height, int) and isinstance(width, int):
        return torch.tensor([[height, width]]).expand(num_nodes // (height * width), 2)
    sides = (torch.as_tensor(x).long().reshape(-1) for x in (height, width))
    return torch.stack(torch.broadcast_tensors(*sides), 1)


def flat_sizes(height: int | Tensor, width: int | Tensor, nodes: Tensor) -> list[int]:
    """Height and width of each grid in one flat list, as operators expect it.

    Raises:
        TypeError: As :func:`grid_sizes`, and if a tensor is not integer.
        ValueError: As :func:`grid_sizes`, and if a tensor is neither on the CPU nor on
            the device of the nodes.
    """
    for name, size in {"height": height, "width": width}.items():
        if isinstance(size, Tensor) and size.device.type != "cpu":
            check_integers(name, size, nodes)
    sizes: Any = grid_sizes(height, width, nodes.size(0))
    return sizes if is_portable() else list(chain(*sizes))


def grid_edges(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Edges in both directions, by source, then target; (column, row) of the nodes."""
    node = torch.arange(height * width, device="cpu")
    row, col = node // width, node % width
    # Neighbours above, left, right and below.
    exists = torch.stack([row > 0, col > 0, col < width - 1, row < height - 1], dim=1)
    source, side = exists.nonzero(as_tuple=True)
    target = source + torch.tensor([-width, -1, 1, width], device="cpu")[side]
    return torch.stack([source, target]), torch.stack([col, row], dim=1)


def is_grid(edge_index: Tensor, height: int, width: int) -> bool:
    """Whether these are the edges of a grid, in any order, possibly repeated."""
    row, col = edge_index // width, edge_index % width
    steps = (row[1] - row[0]).abs() + (col[1] - col[0]).abs()
    if bool((steps != 1).any()):
        return False
    different = torch.unique(edge_index[0] * (height * width) + edge_index[1]).numel()
    return different == 2 * (height * (width - 1) + max(0, height - 1) * width)


def grid_dag(
    edge_index: Tensor, height: int, width: int, dag: int
) -> tuple[Tensor, Tensor]:
    """A mask of the edges of a grid that belong to one of its DAGs, and node ranks."""
    right, below = WAYS[dag]
    row, col = edge_index // width, edge_index % width
    across, down = col[1] - col[0], row[1] - row[0]
    node = torch.arange(height * width, device=edge_index.device)
    x, y = node % width, node // width
    rank = (x if right > 0 else width - 1 - x) + (y if below > 0 else height - 1 - y)
    return (across * right == 1) | (down * below == 1), rank


def grid_parents(
    height: int | Tensor, width: int | Tensor, num_dags: int, num_nodes: int
) -> Tensor:
    r"""The nodes that come before each node in the first DAGs of grids: beside it, and
    above or below it.

    Args:
        height (int or torch.Tensor): The number of rows of each grid, integer
            :math:`[\textrm{grids}]`, or one number for all.
        width (int or torch.Tensor): The number of columns of each grid.
        num_dags (int): The number of DAGs, up to 4.
        num_nodes (int): The number of nodes of all grids.

    Returns:
        torch.Tensor: Indices into a flattened :math:`[|\mathcal{V}|, D]`, int64
        :math:`[|\mathcal{V}|, D, 2]`, on the CPU; that of the node itself where there
        is none.

    Raises:
        TypeError: If sizes are not integers.
        ValueError: If the sizes of grids do not match the number of nodes, or there are
            no such DAGs.
    """
    check_option("num_dags", num_dags, (1, 2, 3, 4))
    sizes = torch.as_tensor(
        grid_sizes(height, width, num_nodes), dtype=torch.long, device="cpu"
    )
    return _grid_parents(*sizes.view(-1, 2).unbind(1), num_dags, num_nodes)


@structural_op(lambda height, _, dags, nodes: height.new_empty((nodes, dags, 2)))
def _grid_parents(
    height: Tensor, width: Tensor, num_dags: int, num_nodes: int
) -> Tensor:
    sizes = height * width
    grid = torch.repeat_interleave(sizes, output_size=num_nodes)
    node = torch.arange(num_nodes, device=height.device)
    local, h, w = node - (sizes.cumsum(0) - sizes)[grid], height[grid], width[grid]
    return parents_at(num_dags, node, local % w, local // w, w, h)


def parents_at(
    num_dags: int, node: Tensor, x: Tensor, y: Tensor, w: Tensor, h: Tensor
) -> Tensor:
    """The parents of nodes in columns x and rows y of grids of widths w, heights h."""
    before = [
        torch.where(exists, node - step, node) * num_dags + d
        for d, (right, below) in enumerate(WAYS[:num_dags])
        for exists, step in (
            (x > 0 if right > 0 else x < w - 1, right),
            (y > 0 if below > 0 else y < h - 1, below * w),
        )
    ]
    return torch.stack(before, dim=1).unflatten(1, (num_dags, 2))
