"""The state form of grids on the CPU: sweeps over their nodes, row by row.

If states are on edges, those that lead to a node from the nodes beside it and above it
have states C and E, and those from it to the right and downward R and D:

    R = S_r k v^T + T_rr C + T_rd E,        y += q^T (M_r C + M_d E)
    D = S_d k v^T + T_dr C + T_dd E,

so a node loads two states and stores two, where one state at a time would take twice as
many, and no list of states is needed. The adjoints are computed in reverse.

If states are on nodes, each is computed from those of the nodes beside it and above it,
with transitions a and b, and its adjoint from those of the nodes that it flows to:

    S = a S_beside + b S_above + s k v^T,                     y += S^T q
    Z = a_beside Z_beside + b_below Z_below + q dy^T,
    dq += S dy,  dk += s Z v,  dv += s Z^T k,  ds = k^T Z v,
    da = <Z, S_beside>,  db = <Z, S_above>.

So each node loads two states and stores one, which replaces the one above.

A task is a grid and a head, or in the backward pass some heads that share keys, which
add to the same gradients. It sweeps tiles of at most 16 key channels by one vector of
value channels, one orientation after the other, and holds one row of states between
rows. The backward pass recomputes and holds the states for a segment of rows, then
sweeps it in reverse, with the adjoints. If a segment is not the whole grid, the states
that enter each segment are stored first.

Gates at a border have no edge and may be anything, even NaN: they are not read.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from pyg_chimera.ops.common.numba_runtime import (
    heads_a_task,
    inlined,
    jit,
    run,
    stopped,
    summed,
)
from pyg_chimera.ops.common.simd import (
    fma,
    lanes,
    load,
    load_part,
    pointer,
    row_totals,
    splat,
    store,
    store_part,
    total,
    vector_lanes,
    zeros,
)
from pyg_chimera.ops.common.vector_kit import clear, copy, even_share
from pyg_chimera.ops.recurrence.plan.states import GridStates
from pyg_chimera.ops.structure.grid import Grids

#: Key channels per tile.
_KEYS = 16
#: Numbers of states that the backward pass holds, about, so that they fit in a cache.
_HELD = 1 << 19


class GridOperands(NamedTuple):
    """The inputs or their gradients, as arrays, or as pointers to those of a tile.

    There are ``O`` orientations. If states are on edges, ``D`` is 2, for the directions
    to the right and downward; if they are on nodes, it is 1, and there are no marks.
    """

    query: Any  #: [V, groups, N]
    key: Any  #: [V, groups, N]
    value: Any  #: [V, heads, P]
    source: Any  #: [V, O, D, heads]
    mark: Any  #: [V, O, D, heads], or None
    transition: Any  #: [V, O, D (to), 2 (from), heads]
    direct: Any  #: [V, heads], in the mask form; elsewhere None


class Plan(NamedTuple):
    """What is swept, and by how many tasks."""

    grids: Grids
    orientation: np.ndarray  #: [O], that of each of the gates' O entries
    parts: int  #: heads per task


class _Lines(NamedTuple):
    """How to sweep a grid: by rows, or if they are shorter by its columns."""

    start: int  #: the first node
    turn: int  #: the offset to the next node of a row
    line: int  #: the offset to the next row
    n: int  #: nodes per row
    number: int  #: of rows
    turned: bool  #: whether rows are the grid's columns


#: `scan(plan, x, y, d)` adds to the output `y`, or if `y` is its gradient, to the
#: gradients `d`.
GridScan = Callable[[Plan, GridOperands, np.ndarray, GridOperands | None], None]


class _Tile(NamedTuple):
    """Key channels by one vector of value channels, and numbers per ... in memory."""

    lines: _Lines
    m: int  #: key channels
    w: int  #: value channels, if they are fewer than a vector has lanes
    size: int  #: ... state
    row: int  #: ... row of states that are held
    gates: int  #: ... node's sources; it has twice as many transitions
    keys: int  #: ... node's keys
    values: int  #: ... node's values
    other: int  #: offset of the gates of the other direction


def pieces(num_blocks: int, value: np.ndarray) -> int:
    """How many slices of value channels become heads, to have tasks for all threads.

    Gradients are summed over the slices, so there are no more than needed.
    """
    (_, heads, channels), threads = value.shape, torch.get_num_threads()
    if threads == 1 or num_blocks * heads >= 4 * threads:
        return 1
    widths = [w for w in range(8, 17) if channels % w == 0]
    return max(1, channels // widths[-1]) if widths else 1


def _in_pieces(x: GridOperands, number: int) -> GridOperands:
    """The operands with slices of value channels as heads."""
    if number == 1:
        return x
    gates = (None if y is None else np.repeat(y, number, -1) for y in x[3:])
    nodes, heads, channels = x.value.shape
    value = x.value.reshape(nodes, heads * number, channels // number)
    return GridOperands(x.query, x.key, value, *gates)


def forward(
    scan: GridScan, states: GridStates, operands: GridOperands, number: int
) -> np.ndarray:
    """The output [V, heads, P], with `number` slices of value channels as heads."""
    x = _in_pieces(operands, number)
    out = np.zeros_like(x.value)
    scan(Plan(states.grids, np.array(states.orientations), 1), x, out, None)
    return out.reshape(operands.value.shape)


def backward(
    scan: GridScan,
    states: GridStates,
    operands: GridOperands,
    number: int,
    grad: np.ndarray,
) -> list[np.ndarray]:
    """The gradients of the operands, of marks only if there are any."""
    blocks, heads = len(states.grids.height), operands.value.shape[1]
    x, groups = _in_pieces(operands, number), operands.key.shape[1]
    parts = heads_a_task(blocks, groups, heads * number)
    # What several tasks add to has a part for each, summed below.
    shape = (heads * number // (groups * parts), *x.key.shape)
    dq, dk = (np.zeros(shape, grad.dtype) for _ in "qk")
    rest = (None if y is None else np.zeros_like(y) for y in x[2:])
    d = GridOperands(dq, dk, *rest)
    plan = Plan(states.grids, np.array(states.orientations), parts)
    scan(plan, x, grad.reshape(x.value.shape), d)
    gates = (
        summed(y.reshape(*y.shape[:-1], heads, number), (-1,))
        for y in d[3:]
        if y is not None
    )
    return [summed(dq, (0,)), summed(dk, (0,)), d.value, *gates]


def sweep(plan: Plan, x: GridOperands, y: np.ndarray, d: GridOperands | None) -> None:
    """Adds to the output `y`, or if `y` is its gradient, to the gradients `d`."""
    grids, on_nodes, (vector, _) = plan.grids, x.mark is None, vector_lanes(y.dtype)
    _, heads, channels = x.value.shape
    visits = grids.height * grids.width * float(len(plan.orientation))
    time = 10 + (2.0 if on_nodes else 3.0) * x.key.shape[2]
    costs = plan.parts * visits * -(-channels // vector) * time
    scratch = (int(np.minimum(*grids[:2]).max(initial=0)) + 1) * _KEYS * vector
    if d is not None:
        costs *= 4
        scratch = most_held(grids, on_nodes, vector) + 2 * (_KEYS + vector) * vector
    tasks = np.repeat(costs, heads // plan.parts)
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
def rows_of(orientation, height, width, node):
    """How to sweep a grid, whose first node is given, by rows in an orientation."""
    right = -1 if orientation == 1 or orientation == 3 else 1
    down = -1 if orientation == 1 or orientation == 2 else 1
    if right < 0:
        node += width - 1
    if down < 0:
        node += (height - 1) * width
    return _Lines(node, right, down * width, width, height, False)


@jit
def _lines(orientation, height, width, node):
    """As `rows_of`, or by columns if they are shorter."""
    start, turn, line, n, number, _ = rows_of(orientation, height, width, node)
    if n <= number:
        return _Lines(start, turn, line, n, number, False)
    return _Lines(start, line, turn, number, n, True)


@jit
def _pointer(array, at):
    if array is None:
        return None
    return pointer(array) + at


@jit
def pointers(x, keys, values, gates, transitions, direct):
    """Pointers to what belongs to a tile, with the given offsets."""
    return GridOperands(
        pointer(x.query) + keys,
        pointer(x.key) + keys,
        pointer(x.value) + values,
        pointer(x.source) + gates,
        _pointer(x.mark, gates),
        pointer(x.transition) + transitions,
        _pointer(x.direct, direct),
    )


@jit
def _tasks(first, last, stop, scratch, plan, x, y, d):
    """Adds to the output `y`, or if `y` is its gradient, to the gradients `d`."""
    nodes, heads, channels = x.value.shape
    _, groups, num_keys = x.query.shape
    memory, parts, (height, width, node) = pointer(scratch), plan.parts, plan.grids
    _, num_orientations, directions, _ = x.source.shape
    by, most = lanes(memory), even_share(num_keys, _KEYS)
    of_keys, of_values = groups * num_keys, heads * channels
    of_gates = num_orientations * directions * heads
    for task in range(first * parts, last * parts):
        grid, h = task // heads, task % heads
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
                    values, size = h * channels + p, m * by
                    tile = _Tile(
                        *(lines, m, channels - p, size, held * size),
                        *(of_gates, of_keys, of_values, other),
                    )
                    own = pointers(x, keys, values, gates, transitions, 0)
                    if d is None:
                        _sweep(stop, memory, tile, own, pointer(y) + values)
                    else:
                        part = h // parts % (heads // (groups * parts))
                        to = part * nodes * of_keys + keys
                        grads = pointers(d, to, values, gates, transitions, 0)
                        of_tile = (own, pointer(y) + values, grads)
                        _sweep_back(stop, memory, tile, *of_tile, rows)


@jit
def _sweep(stop, states, tile, x, out):
    clear(states, tile.lines.n * tile.size)
    for i in range(tile.lines.number):
        if stopped(stop):
            return
        _sweep_row(x.mark, states, 0, i, tile, x, out)


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
        _sweep_row(x.mark, entry, 0, i, tile, x, None)
    clear(adjoints, line)
    for segment in range(segments - 1, -1, -1):
        begin = segment * rows
        end = min(number, begin + rows)
        copy(states, stored + segment * line, line)
        for i in range(begin, end):
            if stopped(stop):
                return
            _sweep_row(x.mark, states + (i - begin) * row, row, i, tile, x, None)
        for i in range(end - 1, begin - 1, -1):
            if stopped(stop):
                return
            own = states + (i - begin) * row
            _sweep_row_back(x.mark, own, adjoints, memory, i, tile, x, grad, d)


@jit
def _sweep_row(mark, states, step, i, tile, x, out):
    """Sweeps row `i`, given the states that enter it from above at `states`.

    Those that leave it downward are written `step` numbers after; with step 0 they
    replace the others. Adds to `out` unless it is None.
    """
    if mark is None:
        _nodes(states, step, i, tile, x, out)
    else:
        _edges(states, step, i, tile, x, out)


@jit
def _sweep_row_back(mark, states, adjoints, sums, i, tile, x, grad, d):
    """Sweeps row `i` in reverse, and adds to the gradients `d`.

    The adjoints of the states that enter it from above replace those of the states that
    leave it downward; `sums` holds rows of products, to be summed.
    """
    if mark is None:
        _nodes_back(states, adjoints, sums, i, tile, x, grad, d)
    else:
        _edges_back(states, adjoints, sums, i, tile, x, grad, d)


@inlined
def _add_sums(target, rows, m):
    """Adds the sum of each row to the target's entry."""
    by = lanes(rows)
    for a in range(0, m, by):
        sums = load_part(target + a, m - a) + row_totals(rows + a * by)
        store_part(target + a, sums, m - a)


# -------------------------------------------------------------------- states on edges


@inlined
def gates_within(gates, x, is_first, other):
    """The transitions to the right (from the left, from above) and downward (the same),
    `other` apart in memory; zero where no edge arrives.
    """
    zero = total(zeros(gates))
    rr, rd, dr, dd = zero, zero, zero, zero
    if x > 0:
        rr, dr = gates[0], gates[2 * other]
    if not is_first:
        rd, dd = gates[other], gates[3 * other]
    return rr, rd, dr, dd


@jit
def _edges(states, step, i, tile, x, out):
    """After the states from above are those from the left, all if rows are held."""
    lines, by, size, other = tile.lines, lanes(states), tile.size, tile.other
    across, is_first, u = states + lines.n * size, i == 0, lines.start + i * lines.line
    stride = size if step > 0 else 0
    clear(across, size)
    for j in range(lines.n):
        left, above = across + j * stride, states + j * size
        right, under = left + stride, above + step
        gates = x.transition + 2 * u * tile.gates
        rr, rd, dr, dd = gates_within(gates, j, is_first, other)
        rr, rd, dr, dd = splat(rr), splat(rd), splat(dr), splat(dd)
        v = load_part(x.value + u * tile.values, tile.w)
        gates = x.source + u * tile.gates
        v_right, v_down = splat(gates[0]) * v, splat(gates[other]) * v
        q, k = x.query + u * tile.keys, x.key + u * tile.keys
        read_left, read_above = zeros(across), zeros(across)
        for a in range(tile.m):
            at, k_a = a * by, splat(k[a])
            c, e = load(left + at), load(above + at)
            if out is not None:
                q_a = splat(q[a])
                read_left, read_above = fma(q_a, c, read_left), fma(q_a, e, read_above)
            store(right + at, fma(k_a, v_right, fma(rr, c, rd * e)))
            store(under + at, fma(k_a, v_down, fma(dr, c, dd * e)))
        if out is not None:
            y, gates = out + u * tile.values, x.mark + u * tile.gates
            read = load_part(y, tile.w)
            if j > 0:
                read = fma(splat(gates[0]), read_left, read)
            if not is_first:
                read = fma(splat(gates[other]), read_above, read)
            store_part(y, read, tile.w)
        u += lines.turn


@jit
def _edges_back(states, adjoints, sums, i, tile, x, grad, d):
    """After the row of adjoints is that of the state that leaves to the right."""
    lines, by, size, other = tile.lines, lanes(states), tile.size, tile.other
    n, m, w, zero = lines.n, tile.m, tile.w, total(zeros(states))
    across, back = states + n * size, adjoints + n * size
    of_q, of_k = sums, sums + (m + by) * by
    is_first, is_last = i == 0, i == lines.number - 1
    u = lines.start + i * lines.line + (n - 1) * lines.turn
    clear(back, size)
    for j in range(n - 1, -1, -1):
        left, above, after = across + j * size, states + j * size, adjoints + j * size
        is_end, of_gates, of_values = j == n - 1, u * tile.gates, u * tile.values
        rr, rd, dr, dd = gates_within(x.transition + 2 * of_gates, j, is_first, other)
        gates = x.source + of_gates
        s_r, s_d = gates[0], gates[other]
        if is_end:
            rr, rd, s_r = zero, zero, zero
        if is_last:
            dr, dd, s_d = zero, zero, zero
        rr, rd, dr, dd = splat(rr), splat(rd), splat(dr), splat(dd)
        gates = x.mark + of_gates
        m_r = gates[0] if j > 0 else zero
        m_d = gates[other] if not is_first else zero
        v, dy = load_part(x.value + of_values, w), load_part(grad + of_values, w)
        v_right, v_down = splat(s_r) * v, splat(s_d) * v
        dy_left, dy_above = splat(m_r) * dy, splat(m_d) * dy
        q, k = x.query + u * tile.keys, x.key + u * tile.keys
        read_left, read_above = zeros(states), zeros(states)
        written_right, written_down = zeros(states), zeros(states)
        d_rr, d_rd = zeros(states), zeros(states)
        d_dr, d_dd = zeros(states), zeros(states)
        for a in range(m):
            at, q_a, k_a = a * by, splat(q[a]), splat(k[a])
            c, e = load(left + at), load(above + at)
            r, b = load(back + at), load(after + at)
            store(back + at, fma(q_a, dy_left, fma(rr, r, dr * b)))
            store(after + at, fma(q_a, dy_above, fma(rd, r, dd * b)))
            store(of_q + at, fma(dy_left, c, dy_above * e))
            store(of_k + at, fma(v_right, r, v_down * b))
            read_left, read_above = fma(q_a, c, read_left), fma(q_a, e, read_above)
            written_right = fma(k_a, r, written_right)
            written_down = fma(k_a, b, written_down)
            d_rr, d_rd = fma(r, c, d_rr), fma(r, e, d_rd)
            d_dr, d_dd = fma(b, c, d_dr), fma(b, e, d_dd)
        _add_sums(d.query + u * tile.keys, of_q, m)
        _add_sums(d.key + u * tile.keys, of_k, m)
        dv = d.value + of_values
        written = fma(splat(s_r), written_right, splat(s_d) * written_down)
        store_part(dv, load_part(dv, w) + written, w)
        source, mark = d.source + of_gates, d.mark + of_gates
        gates = d.transition + 2 * of_gates
        if not is_end:
            source[0] += total(v * written_right)
            if j > 0:
                gates[0] += total(d_rr)
            if not is_first:
                gates[other] += total(d_rd)
        if not is_last:
            source[other] += total(v * written_down)
            if j > 0:
                gates[2 * other] += total(d_dr)
            if not is_first:
                gates[3 * other] += total(d_dd)
        if j > 0:
            mark[0] += total(dy * read_left)
        if not is_first:
            mark[other] += total(dy * read_above)
        u -= lines.turn


# -------------------------------------------------------------------- states on nodes


@jit
def _nodes(states, step, i, tile, x, out):
    lines, by, size = tile.lines, lanes(states), tile.size
    zero, u = total(zeros(states)), lines.start + i * lines.line
    for j in range(lines.n):
        over, gates = states + j * size, x.transition + 2 * u * tile.gates
        here = over + step
        # Beside the first node is none, of which zero times any state is taken.
        before, a, b = over, zero, zero
        if j > 0:
            before, a = here + (-size), gates[0]
        if i > 0:
            b = gates[tile.other]
        a, b = splat(a), splat(b)
        v = load_part(x.value + u * tile.values, tile.w)
        v = splat((x.source + u * tile.gates)[0]) * v
        q, k = x.query + u * tile.keys, x.key + u * tile.keys
        read = zeros(states)
        for c in range(tile.m):
            at = c * by
            s = fma(splat(k[c]), v, fma(a, load(before + at), b * load(over + at)))
            store(here + at, s)
            if out is not None:
                read = fma(splat(q[c]), s, read)
        if out is not None:
            y = out + u * tile.values
            store_part(y, load_part(y, tile.w) + read, tile.w)
        u += lines.turn


@jit
def _nodes_back(states, adjoints, sums, i, tile, x, grad, d):
    lines, by, size, m, w = tile.lines, lanes(states), tile.size, tile.m, tile.w
    n, zero = lines.n, total(zeros(states))
    of_q, of_k = sums, sums + (m + by) * by
    u = lines.start + i * lines.line + (n - 1) * lines.turn
    for j in range(n - 1, -1, -1):
        over, adjoint = states + j * size, adjoints + j * size
        here = over + tile.row
        before, after, a, b = over, adjoint, zero, zero
        if j > 0:
            before = here + (-size)
        if j < n - 1:
            after = adjoint + size
            a = (x.transition + 2 * (u + lines.turn) * tile.gates)[0]
        if i < lines.number - 1:
            b = (x.transition + 2 * (u + lines.line) * tile.gates)[tile.other]
        a, b, s = splat(a), splat(b), splat((x.source + u * tile.gates)[0])
        v = load_part(x.value + u * tile.values, w)
        dy = load_part(grad + u * tile.values, w)
        q, k = x.query + u * tile.keys, x.key + u * tile.keys
        sv, written, d_a, d_b = s * v, zeros(states), zeros(states), zeros(states)
        for c in range(m):
            at = c * by
            z = fma(splat(q[c]), dy, fma(a, load(after + at), b * load(adjoint + at)))
            store(adjoint + at, z)
            store(of_q + at, dy * load(here + at))
            store(of_k + at, sv * z)
            written = fma(splat(k[c]), z, written)
            d_a, d_b = fma(z, load(before + at), d_a), fma(z, load(over + at), d_b)
        _add_sums(d.query + u * tile.keys, of_q, m)
        _add_sums(d.key + u * tile.keys, of_k, m)
        dv = d.value + u * tile.values
        store_part(dv, fma(s, written, load_part(dv, w)), w)
        source, gates = d.source + u * tile.gates, d.transition + 2 * u * tile.gates
        source[0] += total(v * written)
        if j > 0:
            gates[0] += total(d_a)
        if i > 0:
            gates[tile.other] += total(d_b)
        u -= lines.turn
