"""The state form of grids on the CPU: sweeps over their nodes, row by row.

A task is a grid with one head and slice of value channels, or in the backward pass some
of them that share keys, which add to the same gradients. It sweeps tiles of at most 16
key channels by one vector of value channels, one orientation after the other, and holds
one row of states between rows. States are on edges or on nodes: see `grid_rows`.

The backward pass recomputes and holds the states for a segment of rows, then sweeps it
in reverse, with the adjoints. If a segment is not the whole grid, the states that enter
each segment are stored first.
"""

import math
from typing import NamedTuple

import numpy as np

from pyg_chimera.ops.common.numba_runtime import (
    heads_a_task,
    jit,
    run,
    stopped,
    summed,
)
from pyg_chimera.ops.common.simd import lanes, pointer, vector_lanes
from pyg_chimera.ops.common.vector_kit import clear, copy, even_share
from pyg_chimera.ops.recurrence.dag_scan.grid_rows import (
    GridOperands,
    Lines,
    Tile,
    sweep_row,
    sweep_row_back,
)
from pyg_chimera.ops.structure.grid import Grids

__all__ = ["backward", "forward", "most_held", "rows_held"]

#: Key channels per tile.
_KEYS = 16
#: Numbers of states that the backward pass holds, about, so that they fit in a cache.
_HELD = 1 << 19


class _Plan(NamedTuple):
    """What is swept, and by how many tasks."""

    grids: Grids
    orientation: np.ndarray  #: [O], that of each of the gates' O entries
    parts: int  #: heads and slices per task


def forward(grids: Grids, orientations: tuple[int, ...], x: GridOperands) -> np.ndarray:
    """The output [V, heads, slices, P / slices]."""
    out = np.zeros_like(x.value)
    _run(_Plan(grids, np.array(orientations), 1), x, out, None)
    return out


def backward(
    grids: Grids, orientations: tuple[int, ...], x: GridOperands, grad: np.ndarray
) -> GridOperands:
    """The gradients of the operands."""
    _, heads, slices, _ = x.value.shape
    groups = x.key.shape[1]
    parts = heads_a_task(len(grids.height), groups, heads * slices)
    # What several tasks add to has a part for each, summed below.
    of_keys = heads * slices // (groups * parts)
    sizes = (of_keys, of_keys, 1, slices, slices, slices)
    d = GridOperands(
        *(
            None if like is None else np.zeros((n, *like.shape), like.dtype)
            for n, like in zip(sizes, x, strict=True)
        )
    )
    _run(_Plan(grids, np.array(orientations), parts), x, grad, d)
    return GridOperands(*(None if y is None else summed(y, (0,)) for y in d))


def _run(plan: _Plan, x: GridOperands, y: np.ndarray, d: GridOperands | None) -> None:
    """Adds to the output `y`, or if `y` is its gradient, to the gradients `d`."""
    grids, on_nodes, (vector, _) = plan.grids, x.mark is None, vector_lanes(y.dtype)
    _, heads, slices, width = x.value.shape
    visits = grids.height * grids.width * float(len(plan.orientation))
    time = 10 + (2.0 if on_nodes else 3.0) * x.key.shape[2]
    costs = plan.parts * visits * -(-width // vector) * time
    scratch = (int(np.minimum(*grids[:2]).max(initial=0)) + 1) * _KEYS * vector
    if d is not None:
        costs *= 4
        scratch = most_held(grids, on_nodes, vector) + 2 * (_KEYS + vector) * vector
    tasks = np.repeat(costs, heads * slices // plan.parts)
    run(_tasks, tasks, scratch, y.dtype, plan, x, y, d)


def most_held(grids: Grids, on_nodes: bool, vector: int) -> int:
    """The most numbers of states that a task of the backward pass holds."""
    most, size = 0, _KEYS * vector
    for sides in set(zip(grids.height.tolist(), grids.width.tolist(), strict=True)):
        n, lines = sorted(sides)
        row = _states_held(n, on_nodes)
        rows = rows_held(lines, row * size)
        segments = -(-lines // rows)
        most = max(most, (rows * row + (segments + 2) * n + 2) * size)
    return most


@jit
def _states_held(n, on_nodes):
    """The states that are held of a row: those from above, and on edges from beside."""
    return n if on_nodes else 2 * n + 1


@jit
def rows_held(height, row):
    """How many rows of states (`row` numbers each) are held at a time: all, if they
    fit; else at least about sqrt(height), so that there are about as many segments
    at most.
    """
    fit = _HELD // row
    return height if fit >= height else max(1, fit, int(math.sqrt(height)))


@jit
def _lines(orientation, height, width, node):
    """How to sweep a grid, whose first node is given, in an orientation."""
    right = -1 if orientation == 1 or orientation == 3 else 1
    down = -1 if orientation == 1 or orientation == 2 else 1
    if right < 0:
        node += width - 1
    if down < 0:
        node += (height - 1) * width
    if width <= height:
        return Lines(node, right, down * width, width, height, False)
    return Lines(node, down * width, right, height, width, True)


@jit
def _pointer(array, at):
    if array is None:
        return None
    return pointer(array) + at


@jit
def _pointers(x, keys, values, gates, transitions):
    """Pointers to what belongs to a tile, with the given offsets."""
    return GridOperands(
        pointer(x.query) + keys,
        pointer(x.key) + keys,
        pointer(x.value) + values,
        pointer(x.source) + gates,
        _pointer(x.mark, gates),
        pointer(x.transition) + transitions,
    )


@jit
def _tasks(first, last, stop, scratch, plan, x, y, d):
    """Adds to the output `y`, or if `y` is its gradient, to the gradients `d`."""
    nodes, heads, slices, channels = x.value.shape
    _, groups, num_keys = x.query.shape
    memory, parts, (height, width, node) = pointer(scratch), plan.parts, plan.grids
    _, num_orientations, directions, _ = x.source.shape
    by, most = lanes(memory), even_share(num_keys, _KEYS)
    of_keys, of_values = groups * num_keys, heads * slices * channels
    of_gates = num_orientations * directions * heads
    for task in range(first * parts, last * parts):
        grid, part = task // (heads * slices), task % (heads * slices)
        h, slice_ = part // slices, part % slices
        for o in range(num_orientations):
            lines = _lines(plan.orientation[o], height[grid], width[grid], node[grid])
            gates, other = o * directions * heads, heads
            transitions = 2 * gates
            if lines.turned:  # directions are swapped: the last gate comes first
                gates += (directions - 1) * heads
                transitions += (2 * directions - 1) * heads
                other = -heads
            gates, transitions = gates + h, transitions + h
            held = _states_held(lines.n, directions == 1)
            rows = rows_held(lines.number, held * _KEYS * by)
            for a in range(0, num_keys, most):
                m = min(most, num_keys - a)
                keys = h // (heads // groups) * num_keys + a
                for p in range(0, channels, by):
                    values, size = part * channels + p, m * by
                    tile = Tile(
                        *(lines, m, channels - p, size, held * size),
                        *(of_gates, of_keys, of_values, other),
                    )
                    own = _pointers(x, keys, values, gates, transitions)
                    if d is None:
                        _sweep(stop, memory, tile, own, pointer(y) + values)
                    else:
                        at = slice_ * nodes * of_gates
                        split = part // parts % (heads * slices // (groups * parts))
                        grads = _pointers(
                            *(d, split * nodes * of_keys + keys, values),
                            *(at + gates, 2 * at + transitions),
                        )
                        _sweep_back(
                            *(stop, memory, tile, own, pointer(y) + values),
                            *(grads, rows),
                        )


@jit
def _sweep(stop, states, tile, x, out):
    clear(states, tile.lines.n * tile.size)
    for i in range(tile.lines.number):
        if stopped(stop):
            return
        sweep_row(x.mark, states, 0, i, tile, x, out)


@jit
def _sweep_back(stop, memory, tile, x, grad, d, rows):
    """Holds `rows` rows of states at a time."""
    number, row, line = tile.lines.number, tile.row, tile.lines.n * tile.size
    segments = (number + rows - 1) // rows
    # Rows of products; states that enter each row of a segment, and leave it; adjoints;
    # states that enter each segment. The last two are followed by a state each.
    states = memory + 2 * (tile.m + lanes(memory)) * lanes(memory)
    adjoints = states + (rows * row + line)
    stored = adjoints + (line + tile.size)
    clear(stored, line)
    entry = stored
    for i in range((segments - 1) * rows):
        if stopped(stop):
            return
        if i % rows == 0:
            copy(entry + line, entry, line)
            entry = entry + line
        sweep_row(x.mark, entry, 0, i, tile, x, None)
    clear(adjoints, line)
    for segment in range(segments - 1, -1, -1):
        begin = segment * rows
        end = min(number, begin + rows)
        copy(states, stored + segment * line, line)
        for i in range(begin, end):
            if stopped(stop):
                return
            sweep_row(x.mark, states + (i - begin) * row, row, i, tile, x, None)
        for i in range(end - 1, begin - 1, -1):
            if stopped(stop):
                return
            own = states + (i - begin) * row
            sweep_row_back(x.mark, own, adjoints, memory, i, tile, x, grad, d)
