"""The fronts of supernodes on a device: their layout, and how children add to parents.

A supernode's *front* is the square matrix over its columns s, which are eliminated in
it, and the rows r below. It is the sum of its own entries of I - A and its children's
updates. In sweeps, each front has a *vector* over its columns and then its rows below,
to which the vectors of its children are added in the same way.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.structure.csr import inverse, runs, starts
from pyg_chimera.ops.structure.supernodes import Merging, Supernodes, supernodes
from pyg_chimera.ops.structure.symbolic_factor import SymbolicFactor, heights

#: Larger supernodes than on a CPU, as every level takes launches: a grid of 100 x 100
#: nodes has 9 levels instead of 23, and takes no more memory in whole tiles.
_MERGING = Merging(max_leaf=32, per_row=32, per_supernode=1000)


def supernodes_of(symbolic: SymbolicFactor) -> Supernodes:
    """The supernodes whose fronts are computed on a device."""
    return supernodes(symbolic, _MERGING)


class Level(NamedTuple):
    """The fronts of one height in the tree: their children are on lower levels.

    A *task* is a row of tiles of a front. The tasks of a level are contiguous; those
    that contain pivots come first.
    """

    first: int  #: first task
    tasks: int  #: number of tasks
    pivot_tasks: int  #: number of tasks that contain pivots
    steps: int  #: most tiles of columns of a front that has more than one tile


class Fronts(NamedTuple):
    """A graph's fronts by level: S fronts, C of them with a parent, E edges.

    Tensors are int32 unless stated otherwise.
    """

    pivots: Tensor  #: [S] number of columns of each front ...
    size: Tensor  #: [S] ... and of rows, including those of the columns
    first: Tensor  #: [S] first row of its vector
    offset: Tensor  #: [S] first entry of its matrix, which has whole tiles, int64
    child_ptr: Tensor  #: [S + 1] first of each front's children in ...
    child: Tensor  #: [C] ... the children, front by front
    source: Tensor  #: [C] first entry of each child in `place`, int64
    place: Tensor  #: the child's row for each row of its parent's whole tiles, or -1
    node: Tensor  #: the node of each row of the vectors
    task_front: Tensor  #: the front of each task ...
    task_row: Tensor  #: ... and the index of its row of tiles
    entry: Tensor  #: [E] index of each edge in the matrices of a head, int64
    ends: Tensor  #: [2, E] source and target node of each edge, int64
    levels: list[Level]
    total: int  #: entries of all matrices of a head
    rows: int  #: rows of all vectors

    @property
    def layout(self) -> "Fronts":
        """The tables alone: what kernels read, and are not compiled for."""
        return self._replace(levels=0, total=0, rows=0)  # type: ignore[arg-type]

    @classmethod
    def of(cls, symbolic: SymbolicFactor, device: torch.device, tile: int) -> "Fronts":
        """The fronts of a symbolic factor, in tiles of the given size."""
        nodes = supernodes_of(symbolic)
        level = heights(nodes.parent)
        sizes = nodes.widths + nodes.heights
        order = np.lexsort((-sizes, level))  # the slowest fronts of a level first
        rank = inverse(order)
        level, pivots, size = level[order], nodes.widths[order], sizes[order]
        tiles = -(-size // tile)
        width = tiles * tile
        first, offset = starts(size), starts(width**2)

        # The positions of the rows of each front, ascending.
        front = np.repeat(np.arange(len(size)), size)
        own = np.arange(len(front)) - first[front] < pivots[front]
        position = np.empty_like(front)
        position[own] = runs(nodes.ptr[:-1][order], pivots)
        position[~own] = nodes.row[runs(nodes.row_ptr[:-1][order], size - pivots)]
        key = front * symbolic.num_nodes + position

        def row_in(front: np.ndarray, position: np.ndarray) -> np.ndarray:
            place = np.searchsorted(key, front * symbolic.num_nodes + position)
            return place - first[front]

        parent = nodes.parent[order]
        child = np.flatnonzero(parent >= 0)
        child = child[np.argsort(rank[parent[child]], kind="stable")]
        above = rank[parent[child]]
        source = starts(width[above])
        below = size[child] - pivots[child]
        place = np.full(width[above].sum(), -1)
        met = position[runs(first[child] + pivots[child], below)]
        at = np.repeat(source, below) + row_in(np.repeat(above, below), met)
        place[at] = runs(pivots[child], below)

        number = np.repeat(rank, nodes.widths)
        meets = number[np.minimum(nodes.edge_row, nodes.edge_col)]
        i, j = row_in(meets, nodes.edge_row), row_in(meets, nodes.edge_col)
        entry, ends = np.empty_like(i), np.empty((2, len(i)), np.int64)
        entry[nodes.edge] = offset[meets] + i * width[meets] + j
        ends[0, nodes.edge] = symbolic.node[nodes.edge_col]
        ends[1, nodes.edge] = symbolic.node[nodes.edge_row]

        task_front = np.repeat(np.arange(len(size)), tiles)
        task_row = runs(0, tiles)
        lower = task_row * tile >= pivots[task_front]
        by_level = np.lexsort((task_front, lower, level[task_front]))

        def moved(x: np.ndarray, dtype: type = np.int32) -> Tensor:
            return torch.from_numpy(x.astype(dtype)).to(device)

        return cls(
            pivots=moved(pivots),
            size=moved(size),
            first=moved(first),
            offset=moved(offset, np.int64),
            child_ptr=moved(np.searchsorted(above, np.arange(len(size) + 1))),
            child=moved(child),
            source=moved(source, np.int64),
            place=moved(place),
            node=moved(symbolic.node[position]),
            task_front=moved(task_front[by_level]),
            task_row=moved(task_row[by_level]),
            entry=moved(entry, np.int64),
            ends=moved(ends, np.int64),
            levels=_levels(level, tiles, -(-pivots // tile)),
            total=int((width**2).sum()),
            rows=len(position),
        )


def _levels(level: np.ndarray, tiles: np.ndarray, columns: np.ndarray) -> list[Level]:
    """The levels, from each front's level, tiles in a row, and tiles of columns."""
    bounds = np.searchsorted(level, np.arange(level.max(initial=-1) + 2))
    found, first = [], 0
    for a, b in pairwise(bounds):
        tasks, several = int(tiles[a:b].sum()), tiles[a:b] > 1
        steps = int(columns[a:b][several].max(initial=0))
        found.append(Level(first, tasks, int(columns[a:b].sum()), steps))
        first += tasks
    return found
