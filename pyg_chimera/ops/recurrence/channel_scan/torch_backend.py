"""The recurrence in plain PyTorch, on any device.

It proceeds by topological level, one step per level. On directed paths, that would be
one step per node; instead, all rows are computed at once, in as many passes as the
length of the longest path has binary digits.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.sequences import linear_recurrence, longest_of, places
from pyg_chimera.ops.recurrence.levels import levels_of
from pyg_chimera.ops.recurrence.states import StateGraph
from pyg_chimera.ops.structure.cache import table

DEVICES = None


def why_not(call: Call) -> str | None:
    """It supports all calls."""


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The states, [V, C]."""
    if call.structure.are_paths:
        paths = table(_paths, call.structure, call.inputs.value.device)
        h = linear_recurrence(*_path_operands(call, paths))
        return torch.empty_like(h).index_copy_(0, paths.node, h), ()
    return _level_states(call), ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of value, and of edge weight and decay if they are given."""
    (h,) = saved
    compute = _path_gradients if call.structure.are_paths else _level_gradients
    return tuple(x for x in compute(call, h, grad) if x is not None)


# ---------------------------------------------------------------------- level by level


def _level_states(call: Call) -> Tensor:
    value, weight, decay = call.inputs[:3]
    h = value.clone()
    for edge, tail, head in levels_of(call.structure, value.device).down:
        part = h[tail] if weight is None else weight[edge] * h[tail]
        h.index_add_(0, head, part if decay is None else decay[head] * part)
    return h


def _level_gradients(call: Call, h: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
    """From the adjoints g, and the sums that arrive at nodes, before decay."""
    value, weight, decay = call.inputs[:3]
    g, arrived = grad.clone(), torch.zeros_like(value)
    levels = levels_of(call.structure, value.device)
    for edge, tail, head in levels.up:
        to = g[head] if decay is None else decay[head] * g[head]
        g.index_add_(0, tail, to if weight is None else weight[edge] * to)
        if decay is not None:
            part = h[tail] if weight is None else weight[edge] * h[tail]
            arrived.index_add_(0, head, part)
    dw = None
    if weight is not None:
        to = g if decay is None else decay * g
        dw = to[levels.head] * h[levels.tail]
    return g, dw, None if decay is None else g * arrived


# ------------------------------------------------------------------------------- paths


class _Paths(NamedTuple):
    """The nodes of all paths as rows, path by path."""

    node: Tensor  #: [V], the node of each row
    row: Tensor  #: [E], the row that each entry leads to, ...
    edge: Tensor  #: [E], ... and its edge
    place: Tensor  #: [V], how many rows of its path precede each row, ...
    left: Tensor  #: [V], ... and how many follow it
    longest: int  #: the length of the longest path


def _paths(graph: StateGraph, device: torch.device) -> _Paths:
    """The rows of a graph of paths."""
    ptr = torch.from_numpy(graph.component_ptr)
    entered = np.flatnonzero(np.diff(graph.parent_ptr))
    index = map(torch.from_numpy, (graph.state, entered, graph.edge))
    tensors = (*index, *places(ptr, len(graph.state)))
    node, row, edge, place, left = (x.to(device) for x in tensors)
    return _Paths(node, row, edge, place, left, longest_of(ptr))


def _path_operands(call: Call, paths: _Paths) -> tuple[Tensor, Tensor, Tensor, int]:
    """The operands of `linear_recurrence`; a row's weight is the product of its node's
    and its incoming edge's.
    """
    value, weight, decay = call.inputs[:3]
    steps = torch.ones_like(value) if decay is None else decay[paths.node]
    if weight is not None:
        steps[paths.row] *= weight[paths.edge]
    return steps, value[paths.node], paths.place, paths.longest


def _path_gradients(call: Call, h: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
    value, weight, decay = call.inputs[:3]
    paths = table(_paths, call.structure, value.device)
    steps, _, place, longest = _path_operands(call, paths)
    # The adjoints: g[t] = steps[t + 1] g[t + 1] + grad[t].
    after, dy = steps.roll(-1, 0).flip(0), grad[paths.node].flip(0)
    g = linear_recurrence(after, dy, paths.left.flip(0), longest).flip(0)
    before = h[paths.node].roll(1, 0).masked_fill_((place == 0).unsqueeze(1), 0.0)
    d_steps = g * before
    dw = dd = None
    if weight is not None:
        to = d_steps if decay is None else d_steps * decay[paths.node]
        dw = torch.empty_like(weight).index_copy_(0, paths.edge, to[paths.row])
        d_steps[paths.row] *= weight[paths.edge]
    if decay is not None:
        dd = torch.empty_like(value).index_copy_(0, paths.node, d_steps)
    return torch.empty_like(value).index_copy_(0, paths.node, g), dw, dd
