"""The state form of `grid_scan` on the CPU: sweeps over the nodes of grids.

In each orientation, edges lead to a node from the nodes beside it and above it, with
states C and E, and from it to the right and downward, with states R and D:

    R = S_r k v^T + T_rr C + T_rd E,        y += q^T (M_r C + M_d E)
    D = S_d k v^T + T_dr C + T_dd E,

so a node loads two states and stores two, where one state at a time would take twice as
many, and no list of states is needed. A task is a (grid, head, slice of value
channels). It sweeps tiles of at most 16 key channels by one vector of value channels,
one orientation after the other, row by row, and holds one row of states between rows.

The backward pass recomputes and holds C and E for a segment of rows, then sweeps it in
reverse, with the adjoints of R and D. If a segment is not the whole grid, the states
that enter each segment are stored first.
"""

import math

import numpy as np

from pyg_chimera.ops.common.numba_runtime import inlined, jit, run, stopped
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
from pyg_chimera.ops.structure.grid import Grids

__all__ = [
    "KEYS",
    "add_sums",
    "backward",
    "forward",
    "geometry",
    "most_held",
    "rows_held",
]

#: Key channels per tile.
KEYS = 16
#: Numbers of states that the backward pass holds, about, so that they fit in a cache.
_HELD = 1 << 19


def _costs(
    grids: Grids, source: np.ndarray, key: np.ndarray, value: np.ndarray
) -> np.ndarray:
    """The cost of each task of the forward pass, in nanoseconds (approximately)."""
    _, heads, slices, width = value.shape
    vectors = -(-width // vector_lanes(value.dtype)[0])
    nodes = grids.height * grids.width * float(source.shape[1])
    return np.repeat(nodes * vectors * (10 + 3.0 * key.shape[2]), heads * slices)


def forward(
    grids: Grids,
    source: np.ndarray,
    mark: np.ndarray,
    transition: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
) -> np.ndarray:
    """The output [V, heads, slices, P / slices].

    Args:
        grids: The grids.
        source: [V, orientations, 2, heads].
        mark: [V, orientations, 2, heads].
        transition: [V, orientations, 2 (to), 2 (from), heads].
        query: [V, groups, N].
        key: [V, groups, N].
        value: [V, heads, slices, P / slices].
    """
    out = np.zeros_like(value)
    vector, _ = vector_lanes(value.dtype)
    run(
        _forward_tasks,
        _costs(grids, source, key, value),
        (int(np.minimum(*grids[:2]).max(initial=0)) + 1) * KEYS * vector,
        out.dtype,
        *grids,
        source,
        mark,
        transition,
        query,
        key,
        value,
        out,
    )
    return out


def backward(
    grids: Grids,
    source: np.ndarray,
    mark: np.ndarray,
    transition: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    grad: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """Gradients of query, key [slices, V, heads, N], value, source, mark, transition.

    Gradients of gates also have slices, as their first dimension.
    """
    nodes, heads, slices, _ = value.shape
    dq, dk = (np.zeros((slices, nodes, heads, key.shape[2]), key.dtype) for _ in "qk")
    dv = np.zeros_like(value)
    ds, dm, dt = (
        np.zeros((slices, *x.shape), x.dtype) for x in (source, mark, transition)
    )
    vector, _ = vector_lanes(value.dtype)
    run(
        _backward_tasks,
        4 * _costs(grids, source, key, value),
        most_held(grids, vector) + 2 * KEYS * vector + 2 * vector * vector,
        dv.dtype,
        *grids,
        source,
        mark,
        transition,
        query,
        key,
        value,
        grad,
        dq,
        dk,
        dv,
        ds,
        dm,
        dt,
    )
    return dq, dk, dv, ds, dm, dt


def most_held(grids: Grids, vector: int) -> int:
    """The most numbers of states that a task of the backward pass holds."""
    most, size = 0, KEYS * vector
    for sides in set(zip(grids.height.tolist(), grids.width.tolist(), strict=True)):
        n, lines = sorted(sides)
        rows = rows_held(lines, 2 * n * size)
        segments = -(-lines // rows)
        most = max(most, (rows * (2 * n + 1) + (segments + 2) * n + 1) * size)
    return most


@jit
def rows_held(height, row):
    """How many rows of states (`row` numbers each) are held at a time: all, if they
    fit; else at least about sqrt(height), so that there are about as many segments
    at most.
    """
    fit = _HELD // row
    return height if fit >= height else max(1, fit, int(math.sqrt(height)))


@inlined
def _gates_within(gates, x, is_first, other):
    """The transitions to the right (from the left, from above) and downward (the same),
    `other` apart in memory; zero where no edge arrives.

    Gates at a border have no edge and may be anything, even NaN: they are not read.
    """
    zero = total(zeros(gates))
    rr, rd, dr, dd = zero, zero, zero, zero
    if x > 0:
        rr, dr = gates[0], gates[2 * other]
    if not is_first:
        rd, dd = gates[other], gates[3 * other]
    return rr, rd, dr, dd


@jit
def _row(
    across, step, down, below, size, m, n, u, turn, is_first, source, mark, transition,
    of_gates, other, query, key, of_keys, value, out, of_values, w,
):  # fmt: skip
    """Sweeps a row of `n` nodes, from `u` on, that are `turn` apart.

    Reads the incoming states at `down`, and writes the outgoing ones to `below` and,
    `step` apart, to `across`; `below` may equal `down`. Adds to `out` if it is given.
    """
    by = lanes(across)
    clear(across, size)
    for x in range(n):
        left, above = across + x * step, down + x * size
        right, under = across + (x + 1) * step, below + x * size
        gates = transition + 2 * u * of_gates
        rr, rd, dr, dd = _gates_within(gates, x, is_first, other)
        rr, rd, dr, dd = splat(rr), splat(rd), splat(dr), splat(dd)
        v, k = load_part(value + u * of_values, w), key + u * of_keys
        gates = source + u * of_gates
        v_right, v_down = splat(gates[0]) * v, splat(gates[other]) * v
        q = query + u * of_keys
        read_left, read_above = zeros(across), zeros(across)
        for a in range(m):
            at, k_a = a * by, splat(k[a])
            c, e = load(left + at), load(above + at)
            if out is not None:
                q_a = splat(q[a])
                read_left, read_above = fma(q_a, c, read_left), fma(q_a, e, read_above)
            store(right + at, fma(k_a, v_right, fma(rr, c, rd * e)))
            store(under + at, fma(k_a, v_down, fma(dr, c, dd * e)))
        if out is not None:
            y, gates = out + u * of_values, mark + u * of_gates
            read = load_part(y, w)
            if x > 0:
                read = fma(splat(gates[0]), read_left, read)
            if not is_first:
                read = fma(splat(gates[other]), read_above, read)
            store_part(y, read, w)
        u += turn


@jit
def _row_back(
    across, down, back, up, rows, size, m, n, u, turn, is_first, is_last, source, mark,
    transition, of_gates, other, query, key, of_keys, value, grad, of_values, w,
    grad_query, grad_key, of_grads, grad_value, grad_source, grad_mark, grad_transition,
):  # fmt: skip
    """Sweeps the same row in reverse, from its last node `u` on.

    In `up`, the adjoints of states that arrive from above replace those of states that
    leave downward; `back` holds that of the state that leaves to the right.
    """
    by = lanes(across)
    zero = total(zeros(across))
    of_q, of_k = rows, rows + (m + by) * by  # rows of products, to be summed
    clear(back, size)
    for x in range(n - 1, -1, -1):
        left, above, after = across + x * size, down + x * size, up + x * size
        is_end = x == n - 1
        gates = transition + 2 * u * of_gates
        rr, rd, dr, dd = _gates_within(gates, x, is_first, other)
        gates = source + u * of_gates
        s_r, s_d = gates[0], gates[other]
        if is_end:
            rr, rd, s_r = zero, zero, zero
        if is_last:
            dr, dd, s_d = zero, zero, zero
        rr, rd, dr, dd = splat(rr), splat(rd), splat(dr), splat(dd)
        gates = mark + u * of_gates
        m_r = gates[0] if x > 0 else zero
        m_d = gates[other] if not is_first else zero
        v, dy = load_part(value + u * of_values, w), load_part(grad + u * of_values, w)
        v_right, v_down = splat(s_r) * v, splat(s_d) * v
        dy_left, dy_above = splat(m_r) * dy, splat(m_d) * dy
        q, k = query + u * of_keys, key + u * of_keys
        read_left, read_above = zeros(across), zeros(across)
        written_right, written_down = zeros(across), zeros(across)
        d_rr, d_rd, d_dr, d_dd = (
            zeros(across), zeros(across), zeros(across), zeros(across),
        )  # fmt: skip
        for a in range(m):
            at, q_a, k_a = a * by, splat(q[a]), splat(k[a])
            c, e = load(left + at), load(above + at)
            r, d = load(back + at), load(after + at)
            store(back + at, fma(q_a, dy_left, fma(rr, r, dr * d)))
            store(after + at, fma(q_a, dy_above, fma(rd, r, dd * d)))
            store(of_q + at, fma(dy_left, c, dy_above * e))
            store(of_k + at, fma(v_right, r, v_down * d))
            read_left, read_above = fma(q_a, c, read_left), fma(q_a, e, read_above)
            written_right, written_down = (
                fma(k_a, r, written_right), fma(k_a, d, written_down),
            )  # fmt: skip
            d_rr, d_rd = fma(r, c, d_rr), fma(r, e, d_rd)
            d_dr, d_dd = fma(d, c, d_dr), fma(d, e, d_dd)
        add_sums(grad_query + u * of_grads, of_q, m)
        add_sums(grad_key + u * of_grads, of_k, m)
        dv = grad_value + u * of_values
        written = fma(splat(s_r), written_right, splat(s_d) * written_down)
        store_part(dv, load_part(dv, w) + written, w)
        gates, at = grad_transition, 2 * u * of_gates
        if not is_end:
            grad_source[u * of_gates] += total(v * written_right)
            if x > 0:
                gates[at] += total(d_rr)
            if not is_first:
                gates[at + other] += total(d_rd)
        if not is_last:
            grad_source[u * of_gates + other] += total(v * written_down)
            if x > 0:
                gates[at + 2 * other] += total(d_dr)
            if not is_first:
                gates[at + 3 * other] += total(d_dd)
        if x > 0:
            grad_mark[u * of_gates] += total(dy * read_left)
        if not is_first:
            grad_mark[u * of_gates + other] += total(dy * read_above)
        u -= turn


@inlined
def add_sums(target, rows, m):
    """Adds the sum of each row to the target's entry."""
    by = lanes(rows)
    for a in range(0, m, by):
        sums = load_part(target + a, m - a) + row_totals(rows + a * by)
        store_part(target + a, sums, m - a)


@jit
def geometry(o, height, width):
    """How to sweep an orientation: the first node, the offsets to the next node and to
    the next row, the number of nodes per row and of rows, and whether rows are the
    grid's columns, as they are if those are shorter.
    """
    right = -1 if o == 1 or o == 3 else 1
    down = -1 if o == 1 or o == 2 else 1
    start = 0
    if right < 0:
        start += width - 1
    if down < 0:
        start += (height - 1) * width
    if width <= height:
        return start, right, down * width, width, height, False
    return start, down * width, right, height, width, True


@jit
def _orientation(o, height, width, heads):
    """The geometry without its last entry, then the offsets of the first direction's
    gates and transitions, and the offset from them to the other direction's.

    Directions are swapped if rows are the grid's columns.
    """
    start, turn, line, n, lines, turned = geometry(o, height, width)
    gates, transitions, other = 2 * o * heads, 4 * o * heads, heads
    if turned:
        gates, transitions, other = gates + heads, transitions + 3 * heads, -heads
    return start, turn, line, n, lines, gates, transitions, other


@jit
def _forward_tasks(
    first, last, stop, scratch, height, width, node, source, mark, transition, query,
    key, value, out,
):  # fmt: skip
    _, heads, slices, w = value.shape
    orientations, (_, groups, num_keys) = source.shape[1], query.shape
    across = pointer(scratch)
    by, share = lanes(across), even_share(num_keys, KEYS)
    of_gates, of_keys = orientations * 2 * heads, groups * num_keys
    of_values = heads * slices * w
    for task in range(first, last):
        grid, part = task // (heads * slices), task % (heads * slices)
        h = part // slices
        for o in range(orientations):
            start, turn, line, n, lines, gates, transitions, other = _orientation(
                o, height[grid], width[grid], heads
            )
            start += node[grid]
            S, M = pointer(source) + (gates + h), pointer(mark) + (gates + h)
            T = pointer(transition) + (transitions + h)
            for a in range(0, num_keys, share):
                m = min(share, num_keys - a)
                at, size = h // (heads // groups) * num_keys + a, m * by
                q, k, down = pointer(query) + at, pointer(key) + at, across + size
                for p in range(0, w, by):
                    at = part * w + p
                    v, y = pointer(value) + at, pointer(out) + at
                    clear(down, n * size)
                    for i in range(lines):
                        if stopped(stop):
                            return
                        _row(
                            across, 0, down, down, size, m, n, start + i * line, turn,
                            i == 0, S, M, T, of_gates, other, q, k, of_keys, v, y,
                            of_values, w - p,
                        )  # fmt: skip


@jit
def _backward_tasks(
    first, last, stop, scratch, height, width, node, source, mark, transition, query,
    key, value, grad, grad_query, grad_key, grad_value, grad_source, grad_mark,
    grad_transition,
):  # fmt: skip
    nodes, heads, slices, w = value.shape
    orientations, (_, groups, num_keys) = source.shape[1], query.shape
    rows = pointer(scratch)
    by, share = lanes(rows), even_share(num_keys, KEYS)
    of_gates, of_keys = orientations * 2 * heads, groups * num_keys
    of_values, of_grads = heads * slices * w, heads * num_keys
    for task in range(first, last):
        grid, part = task // (heads * slices), task % (heads * slices)
        h, slice_ = part // slices, part % slices
        for o in range(orientations):
            start, turn, line, n, lines, gates, transitions, other = _orientation(
                o, height[grid], width[grid], heads
            )
            start += node[grid]
            at = gates + h
            S, M = pointer(source) + at, pointer(mark) + at
            at += slice_ * nodes * of_gates
            dS, dM = pointer(grad_source) + at, pointer(grad_mark) + at
            at = transitions + h
            T = pointer(transition) + at
            dT = pointer(grad_transition) + (at + 2 * slice_ * nodes * of_gates)
            for a in range(0, num_keys, share):
                m = min(share, num_keys - a)
                at, size = h // (heads // groups) * num_keys + a, m * by
                q, k = pointer(query) + at, pointer(key) + at
                at = slice_ * nodes * of_grads + h * num_keys + a
                dq, dk = pointer(grad_query) + at, pointer(grad_key) + at
                held = rows_held(lines, 2 * n * KEYS * by)
                segments = (lines + held - 1) // held
                # Per row: states from the left; then states from above, ...
                across = rows + 2 * (m + by) * by
                down = across + held * (n + 1) * size
                back = down + (held + 1) * n * size
                up = back + size  # ... adjoints, and states that enter each segment.
                stored = up + n * size
                for p in range(0, w, by):
                    at = part * w + p
                    v, dy = pointer(value) + at, pointer(grad) + at
                    dv = pointer(grad_value) + at
                    clear(stored, n * size)
                    entry = stored
                    for i in range((segments - 1) * held):
                        if stopped(stop):
                            return
                        if i % held == 0:
                            copy(entry + n * size, entry, n * size)
                            entry = entry + n * size
                        _row(
                            across, 0, entry, entry, size, m, n, start + i * line, turn,
                            i == 0, S, M, T, of_gates, other, q, k, of_keys, v, None,
                            of_values, w - p,
                        )  # fmt: skip
                    clear(up, n * size)
                    for segment in range(segments - 1, -1, -1):
                        begin = segment * held
                        end = min(lines, begin + held)
                        copy(down, stored + segment * n * size, n * size)
                        for i in range(begin, end):
                            if stopped(stop):
                                return
                            row = i - begin
                            _row(
                                across + row * (n + 1) * size, size,
                                down + row * n * size, down + (row + 1) * n * size,
                                size, m, n, start + i * line, turn, i == 0, S, M, T,
                                of_gates, other, q, k, of_keys, v, None, of_values,
                                w - p,
                            )  # fmt: skip
                        for i in range(end - 1, begin - 1, -1):
                            if stopped(stop):
                                return
                            row = i - begin
                            _row_back(
                                across + row * (n + 1) * size, down + row * n * size,
                                back, up, rows, size, m, n,
                                start + i * line + (n - 1) * turn, turn, i == 0,
                                i == lines - 1, S, M, T, of_gates, other, q, k,
                                of_keys, v, dy, of_values, w - p, dq, dk, of_grads, dv,
                                dS, dM, dT,
                            )  # fmt: skip
