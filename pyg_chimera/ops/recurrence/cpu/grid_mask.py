"""The mask form of grids with states on edges, on the CPU: y = (G * Q K^T) V.

G_wu is the factor by which node w reads what node u writes, the sum over orientations.
The sweep is that of `grid_sweep`, with a row of numbers for each state, the factors by
which it holds what each node writes:

    R = T_rr C + T_rd E + S_r 1_u,       D = T_dr C + T_dd E + S_d 1_u,
    G_u += M_r C + M_d E,

where the diagonal, to which paths do not lead, starts as the direct gates.

A task is a grid and a head, or in the backward pass some heads that share keys. It
computes a block of G's columns, and sweeps only what has been reached: in the i-th row
of an orientation, the nodes of i rows.
"""

from typing import NamedTuple

import numpy as np

from pyg_chimera.ops.common.numba_runtime import inlined, jit, run, stopped
from pyg_chimera.ops.common.simd import (
    ADD,
    SET,
    first,
    fma,
    gemm,
    lanes,
    load,
    pointer,
    splat,
    store,
    total,
    vector_lanes,
    zeros,
)
from pyg_chimera.ops.common.vector_kit import clear, even_share, exp2
from pyg_chimera.ops.recurrence.cpu.grid_sweep import (
    GridOperands,
    Plan,
    gates_within,
    pointers,
    rows_of,
)

#: The most columns of G at a time.
WIDTH = 256


class _Block(NamedTuple):
    """Some columns of G, and numbers per node in memory."""

    n: int  #: nodes of the grid
    begin: int  #: the first node of the columns, counted from the grid's first
    columns: int  #: their number, ...
    width: int  #: ... rounded up to whole vectors
    num_keys: int
    channels: int
    keys: int  #: numbers of all groups' keys
    values: int  #: of all heads' values
    gates: int  #: of all orientations' sources; there are twice as many transitions
    heads: int


def mask_scan(
    plan: Plan, x: GridOperands, y: np.ndarray, d: GridOperands | None
) -> None:
    """Adds to the output `y`, or if `y` is its gradient, to the gradients `d`."""
    height, width, _ = plan.grids
    (_, heads, channels), num_keys = x.value.shape, x.key.shape[2]
    nodes, (vector, _) = height * width, vector_lanes(y.dtype)
    costs = 0.03 * nodes**2 * (2 * len(plan.orientation) + 0.1 * (num_keys + channels))
    n, most = int(nodes.max(initial=0)), int(width.max(initial=0))
    rows = 2 * n + num_keys + 2 * most + 1
    if d is not None:
        costs *= 3
        held = (height + 1) * (2 * width + 1) + width
        rows = 4 * n + max(num_keys, channels) + int(held.max(initial=0)) + 1
    tasks = np.repeat(plan.parts * costs, heads // plan.parts)
    scratch = rows * (min(WIDTH, n) + vector)
    run(_tasks, tasks, scratch, y.dtype, plan, x, y, d)


@jit
def _tasks(first, last, stop, scratch, plan, x, y, d):
    """Adds to the output `y`, or if `y` is its gradient, to the gradients `d`."""
    nodes, heads, channels = x.value.shape
    _, groups, num_keys = x.query.shape
    memory, parts, (height, width, node) = pointer(scratch), plan.parts, plan.grids
    of_keys, of_values = groups * num_keys, heads * channels
    of_gates, by = x.source.shape[1] * 2 * heads, lanes(memory)
    for task in range(first * parts, last * parts):
        grid, h = task // heads, task % heads
        start, n = node[grid], height[grid] * width[grid]
        keys = start * of_keys + h // (heads // groups) * num_keys
        values, gates = start * of_values + h * channels, start * of_gates
        places = (values, gates + h, 2 * gates + h, start * heads + h)
        own = pointers(x, keys, *places)
        columns = (even_share(n, WIDTH) + by - 1) // by * by
        for begin in range(0, n, columns):
            if stopped(stop):
                return
            block = _Block(
                *(n, begin, min(columns, n - begin), columns, num_keys, channels),
                *(of_keys, of_values, of_gates, heads),
            )
            size = height[grid], width[grid]
            if d is None:
                _mix(memory, plan.orientation, size, block, own, pointer(y) + values)
            else:
                part = h // parts % (heads // (groups * parts))
                to = part * nodes * of_keys + keys
                grads = pointers(d, to, *places)
                dy = pointer(y) + values
                _mix_back(memory, plan.orientation, size, block, own, dy, grads)


@inlined
def _products(out, rows, others, stride, channels, block, memory):
    """Products of all nodes' rows and those of the block's columns, [n, width]."""
    ld, source = block.width, others + block.begin * stride
    for c in range(channels):
        row = memory + c * ld
        clear(row, ld)
        for i in range(block.columns):
            row[i] = source[i * stride + c]
    size = block.n, ld, channels
    gemm((out, ld), (rows, stride, 1), (memory, ld), size, SET)


@jit
def _mix(memory, orientations, size, block, x, out):
    """Adds (G * Q K^T) V to the output."""
    n, m, ld, stride = block.n, block.columns, block.width, block.values
    G, scores, states = memory, memory + n * ld, memory + 2 * n * ld
    _products(scores, x.query, x.key, block.keys, block.num_keys, block, states)
    _start(G, block, x)
    for o in range(orientations.shape[0]):
        lines = rows_of(orientations[o], size[0], size[1], 0)
        for i in range(lines.number):
            _row(states, 0, i, o, lines, block, x, G)
    for at in range(0, n * ld, lanes(G)):
        store(G + at, load(G + at) * load(scores + at))
    v = x.value + block.begin * stride
    gemm((out, stride), (G, ld, 1), (v, stride), (n, block.channels, m), ADD)


@jit
def _mix_back(memory, orientations, size, block, x, dy, d):
    """Adds to the gradients of all operands."""
    n, m, ld = block.n, block.columns, block.width
    of_keys, num_keys = block.keys, block.num_keys
    of_values, channels = block.values, block.channels
    G, scores, products = memory, memory + n * ld, memory + 2 * n * ld
    dG, states, row = memory + 3 * n * ld, memory + 4 * n * ld, (2 * size[1] + 1) * ld
    adjoints = states + (size[0] + 1) * row
    _products(scores, x.query, x.key, of_keys, num_keys, block, states)
    _products(products, dy, x.value, of_values, channels, block, states)
    for at in range(0, n * ld, lanes(G)):
        store(dG + at, load(products + at) * load(scores + at))
    _start(G, block, x)
    for i in range(m):
        u = block.begin + i
        d.direct[u * block.heads] = dG[u * ld + i]
    for o in range(orientations.shape[0]):
        lines = rows_of(orientations[o], size[0], size[1], 0)
        for i in range(lines.number):
            _row(states + i * row, row, i, o, lines, block, x, G)
        clear(adjoints, lines.n * ld)
        for i in range(lines.number - 1, -1, -1):
            _row_back(states + i * row, adjoints, i, o, lines, block, x, dG, d)
    for at in range(0, n * ld, lanes(G)):
        g = load(G + at)
        store(G + at, g * load(scores + at))
        store(products + at, g * load(products + at))
    keys, values = block.begin * of_keys, block.begin * of_values
    k, dk, dv = x.key + keys, d.key + keys, d.value + values
    q, dq = (x.query, of_keys), (d.query, of_keys)
    gemm(dq, (products, ld, 1), (k, of_keys), (n, num_keys, m), ADD)
    gemm((dk, of_keys), (products, 1, ld), q, (m, num_keys, n), ADD)
    gemm((dv, of_values), (G, 1, ld), (dy, of_values), (m, channels, n), ADD)


@inlined
def _start(G, block, x):
    """Sets G to what nodes read of themselves."""
    clear(G, block.n * block.width)
    for i in range(block.columns):
        u = block.begin + i
        G[u * block.width + i] = x.direct[u * block.heads]


@inlined
def _reached(lines, rows, block, by):
    """The columns of the nodes of the first `rows` rows, in whole vectors."""
    nodes = rows * lines.n
    begin = (0 if lines.line > 0 else block.n - nodes) - block.begin
    end = begin + nodes
    begin, end = min(max(begin, 0), block.width), min(max(end, 0), block.width)
    return begin // by * by, (end + by - 1) // by * by


@jit
def _row(states, step, i, o, lines, block, x, G):
    """Sweeps row `i` in orientation `o`, given the states that enter it from above, and
    adds to G. Those that leave it downward are written `step` numbers after; with step
    0 they replace the others. After the states from above are those from the left.
    """
    by, size, other, is_first = lanes(states), block.width, block.heads, i == 0
    across, zero = states + lines.n * size, total(zeros(states))
    one = exp2(zeros(states))
    stride, u = size if step > 0 else 0, lines.start + i * lines.line
    begin, end = _reached(lines, i + 1, block, by)
    old_begin, old_end = _reached(lines, i, block, by)
    if is_first:
        old_begin = old_end = end
    clear(across + begin, end - begin)
    for j in range(lines.n):
        left, above = across + j * stride, states + j * size
        right, under = left + stride, above + step
        clear(above + begin, old_begin - begin)
        clear(above + old_end, end - old_end)
        at = u * block.gates + o * 2 * other
        gates = x.transition + 2 * at
        rr, rd, dr, dd = gates_within(gates, j, is_first, other)
        rr, rd, dr, dd = splat(rr), splat(rd), splat(dr), splat(dd)
        gates = x.mark + at
        m_r = splat(gates[0] if j > 0 else zero)
        m_d = splat(zero if is_first else gates[other])
        row = G + u * size
        for column in range(begin, end, by):
            c, e = load(left + column), load(above + column)
            read = fma(m_r, c, fma(m_d, e, load(row + column)))
            store(row + column, read)
            store(right + column, fma(rr, c, rd * e))
            store(under + column, fma(dr, c, dd * e))
        own = u - block.begin
        if own >= 0 and own < size:
            gates, k = x.source + at, own % by
            unit = first(one, k + 1) - first(one, k)
            right, under = right + (own - k), under + (own - k)
            store(right, fma(splat(gates[0]), unit, load(right)))
            store(under, fma(splat(gates[other]), unit, load(under)))
        u += lines.turn


@jit
def _row_back(states, adjoints, i, o, lines, block, x, dG, d):
    """Sweeps row `i` in reverse, and adds to the gradients of gates. The adjoints of
    the states that enter it from above replace those of the states that leave it.
    """
    by, size, other, n = lanes(states), block.width, block.heads, lines.n
    zero, across, back = total(zeros(states)), states + n * size, adjoints + n * size
    is_first, is_last = i == 0, i == lines.number - 1
    u = lines.start + i * lines.line + (n - 1) * lines.turn
    begin, end = _reached(lines, i + 1, block, by)
    clear(back + begin, end - begin)
    for j in range(n - 1, -1, -1):
        left, above, after = across + j * size, states + j * size, adjoints + j * size
        is_end, at = j == n - 1, u * block.gates + o * 2 * other
        gates = x.transition + 2 * at
        rr, rd, dr, dd = gates_within(gates, j, is_first, other)
        if is_end:
            rr, rd = zero, zero
        if is_last:
            dr, dd = zero, zero
        rr, rd, dr, dd = splat(rr), splat(rd), splat(dr), splat(dd)
        gates, mark, source = x.mark + at, d.mark + at, d.source + at
        m_r = splat(gates[0] if j > 0 else zero)
        m_d = splat(zero if is_first else gates[other])
        own = u - block.begin
        if own >= 0 and own < size:
            source[0] += back[own]
            source[other] += after[own]
        d_rr, d_rd, d_dr, d_dd = zeros(dG), zeros(dG), zeros(dG), zeros(dG)
        d_r, d_d = zeros(dG), zeros(dG)
        row = dG + u * size
        for column in range(begin, end, by):
            y, c, e = load(row + column), load(left + column), load(above + column)
            r, b = load(back + column), load(after + column)
            store(back + column, fma(m_r, y, fma(rr, r, dr * b)))
            store(after + column, fma(m_d, y, fma(rd, r, dd * b)))
            d_r, d_d = fma(y, c, d_r), fma(y, e, d_d)
            d_rr, d_rd = fma(r, c, d_rr), fma(r, e, d_rd)
            d_dr, d_dd = fma(b, c, d_dr), fma(b, e, d_dd)
        gates = d.transition + 2 * at
        # Where there is no edge, states and adjoints are zero.
        mark[0] += total(d_r)
        mark[other] += total(d_d)
        gates[0] += total(d_rr)
        gates[other] += total(d_rd)
        gates[2 * other] += total(d_dr)
        gates[3 * other] += total(d_dd)
        u -= lines.turn
