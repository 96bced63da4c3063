"""The state form of `grid_dag_scan` on the CPU: sweeps over the nodes of grids.

In each orientation, a node's state is computed from those of the nodes beside it and
above it, with transitions a and b; in the backward pass, its adjoint from those of the
nodes that its state flows to:

    S = a S_beside + b S_above + s k v^T,                     y += S^T q
    Z = a_beside Z_beside + b_below Z_below + q dy^T,
    dq += S dy,  dk += s Z v,  dv += s Z^T k,  ds = k^T Z v,
    da = <Z, S_beside>,  db = <Z, S_above>.

So each node loads two states and stores one, which replaces the one above. Tiles, rows,
and the rows whose states the backward pass holds are as in `grid_sweeps`. A task of the
backward pass is a grid with some heads and slices of value channels, all of which add
to the same gradients of query and key.
"""

import numpy as np

from pyg_chimera.ops.common.numba_runtime import jit, run, stopped
from pyg_chimera.ops.common.simd import (
    fma,
    lanes,
    load,
    load_part,
    pointer,
    splat,
    store,
    store_part,
    total,
    vector_lanes,
    zeros,
)
from pyg_chimera.ops.common.vector_kit import clear, copy, even_share
from pyg_chimera.ops.dag_scan.grid_sweeps import (
    KEYS,
    add_sums,
    geometry,
    rows_held,
)
from pyg_chimera.ops.structure.grid import Grids

__all__ = ["backward", "forward", "most_held"]


def _costs(
    grids: Grids, source: np.ndarray, key: np.ndarray, value: np.ndarray, parts: int
) -> np.ndarray:
    """The forward cost of each task of `parts` heads and slices, in nanoseconds."""
    _, heads, slices, width = value.shape
    vectors = -(-width // vector_lanes(value.dtype)[0])
    nodes = grids.height * grids.width * float(source.shape[1])
    costs = parts * nodes * vectors * (10 + 2.0 * key.shape[2])
    return np.repeat(costs, heads * slices // parts)


def forward(
    grids: Grids,
    orientations: np.ndarray,
    source: np.ndarray,
    transition: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
) -> np.ndarray:
    """The output [V, heads, slices, P / slices].

    Args:
        grids: The grids.
        orientations: [O], the orientation of each of the gates' O entries.
        source: [V, O, heads].
        transition: [V, O, 2, heads].
        query: [V, groups, N].
        key: [V, groups, N].
        value: [V, heads, slices, P / slices].
    """
    out = np.zeros_like(value)
    vector, _ = vector_lanes(value.dtype)
    run(
        _forward_tasks,
        _costs(grids, source, key, value, 1),
        (int(np.minimum(*grids[:2]).max(initial=0)) + 1) * KEYS * vector,
        out.dtype,
        *grids,
        orientations,
        source,
        transition,
        query,
        key,
        value,
        out,
    )
    return out


def backward(
    grids: Grids,
    orientations: np.ndarray,
    source: np.ndarray,
    transition: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    grad: np.ndarray,
    *,
    parts: int,
) -> tuple[np.ndarray, ...]:
    """Gradients of query and key [splits, V, groups, N], value, source and transition.

    A task takes `parts` of a group's heads and slices, of which there are `splits` such
    parts. Gradients of gates also have slices, as their first dimension.
    """
    _, heads, slices, _ = value.shape
    splits = heads * slices // (key.shape[1] * parts)
    dq, dk = (np.zeros((splits, *key.shape), key.dtype) for _ in "qk")
    dv = np.zeros_like(value)
    ds, dt = (np.zeros((slices, *x.shape), x.dtype) for x in (source, transition))
    vector, _ = vector_lanes(value.dtype)
    run(
        _backward_tasks,
        4 * _costs(grids, source, key, value, parts),
        most_held(grids, vector) + 2 * (KEYS + vector) * vector,
        dv.dtype,
        *grids,
        orientations,
        source,
        transition,
        query,
        key,
        value,
        grad,
        parts,
        dq,
        dk,
        dv,
        ds,
        dt,
    )
    return dq, dk, dv, ds, dt


def most_held(grids: Grids, vector: int) -> int:
    """The most numbers of states that a task of the backward pass holds."""
    most = 0
    for sides in set(zip(grids.height.tolist(), grids.width.tolist(), strict=True)):
        n, lines = sorted(sides)
        row = (n + 1) * KEYS * vector
        rows = rows_held(lines, row)
        most = max(most, (rows + -(-lines // rows) + 2) * row)
    return most


@jit
def _row(
    states, above, size, m, n, u, turn, is_first, source, of_source, transition, other,
    query, key, of_keys, value, out, of_values, w,
):  # fmt: skip
    """Sweeps a row of `n` nodes, from `u` on, that are `turn` apart.

    Its states are stored contiguously after a tile of zeros, and may replace those
    above. Adds to `out` unless it is None.
    """
    by = lanes(states)
    zero = total(zeros(states))
    for x in range(n):
        here, over = states + x * size, above + x * size
        before = here + (-size)
        gates = transition + 2 * u * of_source
        # Gates at a border belong to no edge, and may be anything, even NaN.
        a, b = zero, zero
        if x > 0:
            a = gates[0]
        if not is_first:
            b = gates[other]
        a, b = splat(a), splat(b)
        v = splat(source[u * of_source]) * load_part(value + u * of_values, w)
        q, k = query + u * of_keys, key + u * of_keys
        read = zeros(states)
        for i in range(m):
            at = i * by
            s = fma(splat(k[i]), v, fma(a, load(before + at), b * load(over + at)))
            store(here + at, s)
            if out is not None:
                read = fma(splat(q[i]), s, read)
        if out is not None:
            y = out + u * of_values
            store_part(y, load_part(y, w) + read, w)
        u += turn


@jit
def _row_back(
    states, above, adjoints, rows, size, m, n, u, turn, line, is_first, is_last, source,
    of_source, transition, other, query, key, of_keys, value, grad, of_values, w,
    grad_query, grad_key, grad_value, grad_source, grad_transition,
):  # fmt: skip
    """Sweeps the same row in reverse, from its last node `u` on.

    Adjoints, followed by a tile of zeros, replace those of the row below.
    """
    by = lanes(states)
    zero = total(zeros(states))
    of_q, of_k = rows, rows + (m + by) * by  # rows of products, to be summed
    for x in range(n - 1, -1, -1):
        here, over, adjoint = states + x * size, above + x * size, adjoints + x * size
        before, after = here + (-size), adjoint + size
        a, b = zero, zero
        if x < n - 1:
            a = (transition + 2 * (u + turn) * of_source)[0]
        if not is_last:
            b = (transition + 2 * (u + line) * of_source)[other]
        a, b, s = splat(a), splat(b), splat(source[u * of_source])
        v, dy = load_part(value + u * of_values, w), load_part(grad + u * of_values, w)
        q, k = query + u * of_keys, key + u * of_keys
        sv, written, d_a, d_b = s * v, zeros(states), zeros(states), zeros(states)
        for i in range(m):
            at = i * by
            z = fma(splat(q[i]), dy, fma(a, load(after + at), b * load(adjoint + at)))
            store(adjoint + at, z)
            store(of_q + at, dy * load(here + at))
            store(of_k + at, sv * z)
            written = fma(splat(k[i]), z, written)
            d_a, d_b = fma(z, load(before + at), d_a), fma(z, load(over + at), d_b)
        add_sums(grad_query + u * of_keys, of_q, m)
        add_sums(grad_key + u * of_keys, of_k, m)
        dv = grad_value + u * of_values
        store_part(dv, fma(s, written, load_part(dv, w)), w)
        grad_source[u * of_source] += total(v * written)
        gates = grad_transition + 2 * u * of_source
        if x > 0:
            gates[0] += total(d_a)
        if not is_first:
            gates[other] += total(d_b)
        u -= turn


@jit
def _forward_tasks(
    first, last, stop, scratch, height, width, node, orientations, source, transition,
    query, key, value, out,
):  # fmt: skip
    _, heads, slices, w = value.shape
    _, groups, num_keys = query.shape
    zeros_before = pointer(scratch)
    by, share = lanes(zeros_before), even_share(num_keys, KEYS)
    of_source, of_keys = orientations.shape[0] * heads, groups * num_keys
    of_values = heads * slices * w
    for task in range(first, last):
        grid, part = task // (heads * slices), task % (heads * slices)
        h = part // slices
        for o in range(orientations.shape[0]):
            start, turn, line, n, lines, turned = geometry(
                orientations[o], height[grid], width[grid]
            )
            start += node[grid]
            S, T = pointer(source) + (o * heads + h), pointer(transition) + h
            T, other = T + 2 * o * heads, heads
            if turned:
                T, other = T + heads, -heads
            for i in range(0, num_keys, share):
                m = min(share, num_keys - i)
                at, size = h // (heads // groups) * num_keys + i, m * by
                q, k = pointer(query) + at, pointer(key) + at
                states = zeros_before + size
                for p in range(0, w, by):
                    at = part * w + p
                    v, y = pointer(value) + at, pointer(out) + at
                    clear(zeros_before, (n + 1) * size)
                    for row in range(lines):
                        if stopped(stop):
                            return
                        _row(
                            states, states, size, m, n, start + row * line, turn,
                            row == 0, S, of_source, T, other, q, k, of_keys, v, y,
                            of_values, w - p,
                        )  # fmt: skip


@jit
def _backward_tasks(
    first, last, stop, scratch, height, width, node, orientations, source, transition,
    query, key, value, grad, parts, grad_query, grad_key, grad_value, grad_source,
    grad_transition,
):  # fmt: skip
    nodes, heads, slices, w = value.shape
    _, groups, num_keys = query.shape
    rows = pointer(scratch)
    by, share = lanes(rows), even_share(num_keys, KEYS)
    of_source, of_keys = orientations.shape[0] * heads, groups * num_keys
    of_values, splits = heads * slices * w, grad_query.shape[0]
    for task in range(first * parts, last * parts):
        grid, part = task // (heads * slices), task % (heads * slices)
        h, slice_ = part // slices, part % slices
        group, split = part // (parts * splits), part // parts % splits
        for o in range(orientations.shape[0]):
            start, turn, line, n, lines, turned = geometry(
                orientations[o], height[grid], width[grid]
            )
            start += node[grid]
            at, other = o * heads, heads
            S = pointer(source) + (at + h)
            dS = pointer(grad_source) + (slice_ * nodes * of_source + at + h)
            at = 2 * at + h
            if turned:
                at, other = at + heads, -heads
            T = pointer(transition) + at
            dT = pointer(grad_transition) + (2 * slice_ * nodes * of_source + at)
            for i in range(0, num_keys, share):
                m = min(share, num_keys - i)
                at, size = group * num_keys + i, m * by
                q, k = pointer(query) + at, pointer(key) + at
                at += split * nodes * of_keys
                dq, dk = pointer(grad_query) + at, pointer(grad_key) + at
                row = (n + 1) * size
                held = rows_held(lines, (n + 1) * KEYS * by)
                segments = (lines + held - 1) // held
                # Scratch: the states of a segment's rows, after the row that enters it;
                # a row of adjoints; and the row of states that enters each segment.
                states = rows + 2 * (m + by) * by
                adjoints = states + (held + 1) * row
                stored = adjoints + row
                for p in range(0, w, by):
                    at = part * w + p
                    v, dy = pointer(value) + at, pointer(grad) + at
                    dv = pointer(grad_value) + at
                    clear(stored, row)
                    entry = stored
                    for r in range((segments - 1) * held):
                        if stopped(stop):
                            return
                        if r % held == 0:
                            copy(entry + row, entry, row)
                            entry = entry + row
                        _row(
                            entry + size, entry + size, size, m, n, start + r * line,
                            turn, r == 0, S, of_source, T, other, q, k, of_keys, v,
                            None, of_values, w - p,
                        )  # fmt: skip
                    clear(adjoints, row)
                    for segment in range(segments - 1, -1, -1):
                        begin = segment * held
                        end = min(lines, begin + held)
                        copy(states, stored + segment * row, row)
                        for r in range(begin, end):
                            if stopped(stop):
                                return
                            above = states + ((r - begin) * row + size)
                            clear(above + (row - size), size)
                            _row(
                                above + row, above, size, m, n, start + r * line, turn,
                                r == 0, S, of_source, T, other, q, k, of_keys, v, None,
                                of_values, w - p,
                            )  # fmt: skip
                        for r in range(end - 1, begin - 1, -1):
                            if stopped(stop):
                                return
                            above = states + ((r - begin) * row + size)
                            _row_back(
                                above + row, above, adjoints, rows, size, m, n,
                                start + r * line + (n - 1) * turn, turn, line, r == 0,
                                r == lines - 1, S, of_source, T, other, q, k, of_keys,
                                v, dy, of_values, w - p, dq, dk, dv, dS, dT,
                            )  # fmt: skip
