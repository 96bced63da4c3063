"""The recurrence in plain PyTorch, on any device.

It proceeds by topological level, one step per level. On directed paths, that would be
one step per node; instead, all rows are computed at once, in as many passes as the
length of the longest path has binary digits.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.autograd import by_autograd
from pyg_chimera.ops.common.cache import table
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.sequences import linear_recurrence, longest_of, places
from pyg_chimera.ops.recurrence.plain.levels import levels_of, solve_by_levels
from pyg_chimera.ops.recurrence.plan.states import StateGraph

DEVICES = None


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The states, [V, C]."""
    if call.structure.are_paths:
        paths = table(_paths, call.structure, call.inputs.value.device)
        h = linear_recurrence(*_path_operands(call, paths))
        return torch.empty_like(h).index_copy_(0, paths.node, h), ()
    return _level_states(call), ()


backward = by_autograd(forward)


def _level_states(call: Call) -> Tensor:
    """From the weight of each edge, times that of the node that it leads to."""
    value, weight, decay = call.inputs[:3]
    levels = levels_of(call.structure, value.device)
    steps = value.new_ones(len(levels.head), 1) if weight is None else weight
    if decay is not None:
        steps = steps * decay[levels.head]
    return solve_by_levels(levels, steps, value.clone())


# ------------------------------------------------------------------------------- paths


class _Paths(NamedTuple):
    """The nodes of all paths as rows, path by path."""

    node: Tensor  #: [V], the node of each row
    row: Tensor  #: [E], the row that each entry leads to, ...
    edge: Tensor  #: [E], ... and its edge
    place: Tensor  #: [V], how many rows of its path precede each row
    longest: int  #: the length of the longest path


def _paths(graph: StateGraph, device: torch.device) -> _Paths:
    """The rows of a graph of paths."""
    ptr = torch.from_numpy(graph.component_ptr)
    entered = np.flatnonzero(np.diff(graph.parents.ptr))
    index = map(torch.from_numpy, (graph.state, entered, graph.parents.entry))
    place, _ = places(ptr, len(graph.state))
    node, row, edge, place = (x.to(device) for x in (*index, place))
    return _Paths(node, row, edge, place, longest_of(ptr))


def _path_operands(call: Call, paths: _Paths) -> tuple[Tensor, Tensor, Tensor, int]:
    """The operands of `linear_recurrence`; a row's weight is the product of its node's
    and its incoming edge's.
    """
    value, weight, decay = call.inputs[:3]
    steps = torch.ones_like(value) if decay is None else decay[paths.node]
    if weight is not None:
        steps[paths.row] *= weight[paths.edge]
    return steps, value[paths.node], paths.place, paths.longest
