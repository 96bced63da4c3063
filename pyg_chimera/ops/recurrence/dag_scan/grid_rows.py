"""The rows of a grid whose nodes are swept by `grid_sweeps`.

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

Gates at a border have no edge and may be anything, even NaN: they are not read.
"""

from typing import Any, NamedTuple

from pyg_chimera.ops.common.numba_runtime import inlined, jit
from pyg_chimera.ops.common.simd import (
    fma,
    lanes,
    load,
    load_part,
    row_totals,
    splat,
    store,
    store_part,
    total,
    zeros,
)
from pyg_chimera.ops.common.vector_kit import clear

__all__ = ["GridOperands", "Lines", "Tile", "sweep_row", "sweep_row_back"]


class GridOperands(NamedTuple):
    """The inputs or their gradients, as arrays, or as pointers to those of a tile.

    There are ``O`` orientations. If states are on edges, ``D`` is 2, for the directions
    to the right and downward; if they are on nodes, it is 1, and there are no marks.
    """

    query: Any  #: [V, groups, N]
    key: Any  #: [V, groups, N]
    value: Any  #: [V, heads, slices, P / slices]
    source: Any  #: [V, O, D, heads]
    mark: Any  #: [V, O, D, heads], or None
    transition: Any  #: [V, O, D (to), 2 (from), heads]


class Lines(NamedTuple):
    """How to sweep a grid: by rows, or if they are shorter by its columns."""

    start: int  #: the first node
    turn: int  #: the offset to the next node of a row
    line: int  #: the offset to the next row
    n: int  #: nodes per row
    number: int  #: of rows
    turned: bool  #: whether rows are the grid's columns


class Tile(NamedTuple):
    """Key channels by one vector of value channels, and numbers per ... in memory."""

    lines: Lines
    m: int  #: key channels
    w: int  #: value channels, if they are fewer than a vector has lanes
    size: int  #: ... state
    row: int  #: ... row of states that are held
    gates: int  #: ... node's sources; it has twice as many transitions
    keys: int  #: ... node's keys
    values: int  #: ... node's values
    other: int  #: offset of the gates of the other direction


@jit
def sweep_row(mark, states, step, i, tile, x, out):
    """Sweeps row `i`, given the states that enter it from above at `states`.

    Those that leave it downward are written `step` numbers after; with step 0 they
    replace the others. Adds to `out` unless it is None.
    """
    if mark is None:
        _nodes(states, step, i, tile, x, out)
    else:
        _edges(states, step, i, tile, x, out)


@jit
def sweep_row_back(mark, states, adjoints, sums, i, tile, x, grad, d):
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
def _gates_within(gates, x, is_first, other):
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
        rr, rd, dr, dd = _gates_within(gates, j, is_first, other)
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
        rr, rd, dr, dd = _gates_within(x.transition + 2 * of_gates, j, is_first, other)
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
