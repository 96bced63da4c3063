"""The elimination of sparse matrices by rows, several at a time."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.structure.csr import inverse, runs
from pyg_chimera.ops.structure.symbolic_factor import SymbolicFactor, heights


class RowGroups(NamedTuple):
    """The rows of each block in groups of R that are processed at the same time.

    The rows of a group have the same height in the elimination tree, so none depends on
    another. Each entry of a row takes a step, and a step takes an entry of each row.
    Rows and columns are numbered within their blocks; -1 stands for none. Tensors are
    int32, on a device: T blocks, G groups.
    """

    ptr: Tensor  #: [T + 1] first group of each block
    row: Tensor  #: [G, R] the rows, those on which others depend first
    lower_ptr: Tensor  #: [G + 1] first step of each group in ...
    lower: Tensor  #: [steps, R] ... the columns of the entries of L, ascending
    upper_ptr: Tensor  #: [G + 1] the same ...
    upper: Tensor  #: [steps, R] ... for entries of U
    longest: int  #: the most steps of a block: up, down, and one for each row stored

    @classmethod
    def of(
        cls, symbolic: SymbolicFactor, device: torch.device, at_once: int
    ) -> "RowGroups":
        """The groups of at most `at_once` rows of a symbolic factor."""
        num_nodes, num_blocks = symbolic.num_nodes, len(symbolic.sizes)
        block = np.repeat(np.arange(num_blocks), symbolic.sizes)
        height = heights(symbolic.parent)
        entries = np.diff(symbolic.lower_ptr) + np.diff(symbolic.upper_ptr)
        order = np.lexsort((entries, height, block))  # rows of a group take as long
        place, level = np.arange(num_nodes), (block[order], height[order])
        begins = np.any([np.diff(x, prepend=-1) != 0 for x in level], axis=0)
        place -= np.maximum.accumulate(np.where(begins, place, 0))
        begins = place % at_once == 0
        ptr = np.searchsorted(block[order][begins], np.arange(num_blocks + 1))
        rank = inverse(order)
        group, slot = (np.cumsum(begins) - 1)[rank], (place % at_once)[rank]

        first = symbolic.ptr[block]
        row = np.full((ptr[-1], at_once), -1)
        row[group, slot] = np.arange(num_nodes) - first

        def steps(entry_ptr: np.ndarray, col: np.ndarray) -> tuple[np.ndarray, ...]:
            count = np.diff(entry_ptr)
            most = np.maximum.reduceat(count[order], np.flatnonzero(begins))
            step_ptr = np.append(0, np.cumsum(most))
            owner = np.repeat(np.arange(num_nodes), count)
            table = np.full((step_ptr[-1], at_once), -1)
            step = runs(step_ptr[group], count)
            table[step, slot[owner]] = col - first[owner]
            return step_ptr, table

        lower = steps(symbolic.lower_ptr, symbolic.lower_col)
        upper = steps(symbolic.upper_ptr, symbolic.upper_row)
        taken = np.diff((lower[0] + upper[0])[ptr]) + 2 * np.diff(ptr)
        tables = (
            torch.from_numpy(x.astype(np.int32)).to(device)
            for x in (ptr, row, *lower, *upper)
        )
        return cls(*tables, int(taken.max(initial=0)))  # type: ignore[call-arg, arg-type]

    @property
    def layout(self) -> "RowGroups":
        """The tables alone: what kernels read, and are not compiled for."""
        return self._replace(longest=0)

    def with_room(self, room: float) -> "RowGroups":
        """The same, with room for more rows and entries."""

        def more(x: Tensor) -> Tensor:
            wanted = math.ceil(room * len(x))
            return torch.cat([x, x.new_full((wanted - len(x), *x.shape[1:]), -1)])

        longest = math.ceil(room * self.longest)
        tables = map(more, self[1:-1])
        return RowGroups(self.ptr, *tables, longest)  # type: ignore[call-arg, arg-type]
