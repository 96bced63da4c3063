"""States by products with the sparse A, on the CPU: finite sums and iterations.

A task is a (block, head, piece of value channels). It holds the states of all nodes of
a block, [nodes, keys x width], for as many key channels at a time as fit in a core's
cache (at least one), as states are gathered. All steps have one form,
Y_i = c0 X_i + c1 H_i + c2 sum_j A_ij H_j, see `_step`.

A finite sum repeats H <- A H + X. An iteration repeats the steps of `SweepPolynomial`,
from the current residual, until it is below the tolerance.
"""

from typing import NamedTuple

import numpy as np

from pyg_chimera.ops.common.numba_runtime import jit, run, stopped, summed
from pyg_chimera.ops.common.simd import (
    fma,
    lanes,
    load,
    pointer,
    splat,
    store,
    vector_lanes,
    zeros,
)
from pyg_chimera.ops.common.vector_kit import clear, copy, inner_product
from pyg_chimera.ops.resolvent.state_tiles import StateTiles, outer, read, read_rows
from pyg_chimera.ops.structure.csr import sorted_rows
from pyg_chimera.ops.structure.symbolic_factor import Blocks

__all__ = ["Products", "System", "backward", "forward", "products"]

#: Bytes of the states that a task gathers from: part of a typical L2 cache.
_TILE_BYTES = 1 << 19


class Products(NamedTuple):
    """A by rows, or by columns."""

    ptr: np.ndarray  #: [V + 1], first entry of each position
    other: np.ndarray  #: [E], position of the other end, within the block
    edge: np.ndarray  #: [E], index of the edge


def products(blocks: Blocks) -> tuple[Products, Products]:
    """A and its transpose, cached in the tables of the blocks."""
    if "products" not in blocks.tables:
        row, col, edge = blocks.edge_row, blocks.edge_col, blocks.edge
        start = np.repeat(blocks.ptr[:-1], blocks.sizes)
        made = []
        for own, other in ((row, col), (col, row)):
            rows = sorted_rows(own, other, blocks.num_nodes)
            local = (rows.col - start[rows.row]).astype(np.int32)
            made.append(Products(rows.ptr, local, edge[rows.entry]))
        blocks.tables["products"] = tuple(made)
    return blocks.tables["products"]


# ------------------------------------------------------------------------------ passes


class System(NamedTuple):
    """The matrix, and how to solve or sum."""

    weight: np.ndarray  #: the edges' weights, [E, heads]
    steps: np.ndarray  #: those of `SweepPolynomial`, [heads, steps, 2]
    num_terms: int  #: highest power of a finite sum, or -1 to iterate
    tolerance: float  #: relative residual at which an iteration stops


def forward(
    blocks: Blocks,
    system: System,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
) -> tuple[np.ndarray, float]:
    """The output, and the largest relative residual of an iteration."""
    out = np.zeros_like(value)
    if out.size == 0 or query.shape[2] == 0:
        return out, 0.0
    tiles, (rows, _) = _tiles(blocks, query, value), products(blocks)
    costs = _costs(blocks, system, tiles, query, value)
    left = np.zeros(costs.shape[0])
    room = 3 * int(blocks.sizes.max()) + 6
    run(
        _forward_tasks,
        costs,
        room * tiles.keys * tiles.width,
        out.dtype,
        blocks.ptr,
        blocks.node,
        rows.ptr,
        rows.other,
        _by_head(system.weight, rows),
        system.steps,
        system.num_terms,
        system.tolerance,
        query,
        key,
        value,
        out,
        left,
        *tiles,
    )
    return out, float(left.max())


def backward(
    blocks: Blocks,
    system: System,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    grad: np.ndarray,
) -> tuple[tuple[np.ndarray, ...], float]:
    """Gradients of query, key, value and edge weight, and the largest residual.

    The formulas are those of `supernodal_sweeps`. For a finite sum up to the power T,
    dA_ij is the sum over m < T of <(A^T)^m (q dy^T)_i, (sum_{t < T - m} A^t k v^T)_j>.
    """
    num_nodes, heads, _ = value.shape
    groups, num_keys = query.shape[1:]
    dv, dw = np.zeros_like(value), np.zeros_like(system.weight)
    if value.size == 0 or num_keys == 0:
        return (np.zeros_like(query), np.zeros_like(key), dv, dw), 0.0
    tiles, (rows, columns) = _tiles(blocks, query, value), products(blocks)
    costs = 4 * _costs(blocks, system, tiles, query, value)
    # Pieces, and the heads of a group, write separate parts, which are summed below.
    dq = np.empty((tiles.pieces, num_nodes, heads, num_keys), value.dtype)
    dk = np.empty_like(dq)
    by_head = np.zeros((tiles.pieces, heads, blocks.num_edges), value.dtype)
    left = np.zeros(costs.shape[0])
    vector, _ = vector_lanes(value.dtype)
    room = (4 + max(system.num_terms, 0)) * int(blocks.sizes.max()) + 6
    run(
        _backward_tasks,
        costs,
        room * tiles.keys * tiles.width + (tiles.keys + vector) * vector,
        value.dtype,
        blocks.ptr,
        blocks.node,
        rows.ptr,
        rows.other,
        _by_head(system.weight, rows),
        columns.ptr,
        columns.other,
        _by_head(system.weight, columns),
        system.steps,
        system.num_terms,
        system.tolerance,
        query,
        key,
        value,
        grad,
        dq,
        dk,
        dv,
        by_head,
        left,
        *tiles,
    )
    dw[rows.edge] = summed(by_head, (0,)).T
    shape = (tiles.pieces, num_nodes, groups, heads // groups, num_keys)
    dq, dk = (summed(x.reshape(shape), (0, 3)) for x in (dq, dk))
    return (dq, dk, dv, dw), float(left.max())


def _costs(
    blocks: Blocks,
    system: System,
    tiles: StateTiles,
    query: np.ndarray,
    value: np.ndarray,
) -> np.ndarray:
    sweeps = max(system.num_terms, system.steps.shape[1]) + 3.0
    work = sweeps * (np.diff(blocks.edge_ptr) + 6.0 * blocks.sizes)
    work *= 0.1 * query.shape[2] * tiles.width
    return np.repeat(work, value.shape[1] * tiles.pieces)


def _tiles(blocks: Blocks, query: np.ndarray, value: np.ndarray) -> StateTiles:
    vector, _ = vector_lanes(value.dtype)
    return StateTiles.of(blocks.sizes, query, value, _TILE_BYTES, vector)


def _by_head(weight: np.ndarray, own: Products) -> np.ndarray:
    """The weights in the order of the entries of `own`, [heads, E]."""
    return np.ascontiguousarray(weight[own.edge].T)


@jit
def _step(
    out, own, source, x, ptr, other, weight, first, last, size, c0, c1, c2, d0, d1,
):  # fmt: skip
    """Sets out_i = c0 own_i + c1 source_i + c2 sum_j A_ij source_j, and adds
    d0 own_i + d1 source_i to x_i. `out` may be `own`.
    """
    step = lanes(out)
    a0, a1, a2, b0, b1 = splat(c0), splat(c1), splat(c2), splat(d0), splat(d1)
    moves = d0 != 0 or d1 != 0
    for i in range(first, last):
        at = (i - first) * size
        e0, e1 = ptr[i], ptr[i + 1]
        for w in range(at, at + size, step):
            left = w - at
            even, odd = zeros(out), zeros(out)
            for e in range(e0, e1 - 1, 2):
                even = fma(
                    splat(weight[e]), load(source + (other[e] * size + left)), even
                )
                odd = fma(
                    splat(weight[e + 1]), load(source + (other[e + 1] * size + left)),
                    odd,
                )  # fmt: skip
            if (e1 - e0) % 2 == 1:
                e = e1 - 1
                even = fma(
                    splat(weight[e]), load(source + (other[e] * size + left)), even
                )
            mine, there = load(own + w), load(source + w)
            store(out + w, fma(a0, mine, fma(a1, there, a2 * (even + odd))))
            if moves:
                store(x + w, fma(b0, mine, fma(b1, there, load(x + w))))


@jit
def _form(
    target, left, right, nodes, of_left, of_right, first, last, count, keys, channels,
    width,
):  # fmt: skip
    """Sets the states of a tile's nodes to the outer products left right^T."""
    for i in range(first, last):
        u = nodes[i]
        outer(
            target + (i - first) * keys * width, left + u * of_left,
            right + u * of_right, count, keys, channels, width,
        )  # fmt: skip


@jit
def _norms(norms, states, rows):
    """Computes the maximum (ignoring NaN) and the sum of absolute values of each lane.

    A contracts the maximum if its rows sum to less than one, the sum if columns do.
    """
    size = norms.shape[1]
    largest, total = norms
    norms[:] = 0
    for i in range(rows):
        row = states + i * size
        for w in range(size):
            x = abs(row[w])
            largest[w] = max(x, largest[w])
            total[w] += x


@jit
def _ratio(x, bound):
    """The largest ratio of x to its bound, ignoring NaN and bounds of zero."""
    ratio = 0.0
    for w in range(x.shape[0]):
        if x[w] > ratio * bound[w] and bound[w] > 0:
            ratio = x[w] / bound[w]
    return ratio


@jit
def _solve(
    x, r, t, norms, left, right, nodes, of_left, of_right, ptr, other, weight, first,
    last, steps, tolerance, stop, count, keys, channels, width,
):  # fmt: skip
    """Sets x to (I - A)^-1 b for b = left right^T; returns the relative residual.

    Each pass takes all steps from the current residual. `r` and `t` hold a tile each.
    The steps were found for a whole batch: if a pass does not reduce the residual of
    this block, it starts over with x <- A x + b, which is known to converge.
    """
    size = keys * width
    norms = norms[: 6 * size].reshape(6, size)
    one = norms.dtype.type(1)
    zero = one - one
    x_norms, r_norms, b_norms = norms[:2], norms[2:4], norms[4:]
    start, safe, idle = True, False, 0
    largest, total = np.inf, np.inf  # the smallest residual so far, in either norm
    while True:
        _form(
            r, left, right, nodes, of_left, of_right, first, last, count, keys,
            channels, width,
        )  # fmt: skip
        if start:
            start = False
            _norms(b_norms, r, last - first)
            clear(x, (last - first) * size)
        else:
            _step(
                r, r, x, x, ptr, other, weight, first, last, size, one, -one, one,
                zero, zero,
            )  # fmt: skip
            _norms(r_norms, r, last - first)
            _norms(x_norms, x, last - first)
            residual = _ratio(r_norms.ravel(), 2 * x_norms.ravel() + b_norms.ravel())
            if residual <= tolerance:
                return residual
            left0 = _ratio(r_norms[0], b_norms[0])
            left1 = _ratio(r_norms[1], b_norms[1])
            idle = 0 if left0 < largest or left1 < total else idle + 1
            largest, total = min(largest, left0), min(total, left1)
            if idle > 0 and residual <= 16 * tolerance:  # only rounding errors are left
                return residual
            if idle > 64 and safe:
                return residual
            if idle > 0 and not safe:
                start, safe, idle, largest, total = True, True, 0, np.inf, np.inf
                continue
        for s in range(steps.shape[0]):
            if stopped(stop):
                return np.inf
            c, a = steps[s]
            if safe:
                c, a = one, zero
            elif c == 0:  # other heads have more steps
                break
            if a == 0:  # a real root, 1 / c
                _step(
                    t, r, r, x, ptr, other, weight, first, last, size, one - c, zero,
                    c, c, zero,
                )  # fmt: skip
                r, t = t, r
            else:  # a pair of roots with the sum a and the product 1 / c
                _step(
                    t, r, r, x, ptr, other, weight, first, last, size, one, zero, -one,
                    zero, zero,
                )  # fmt: skip
                _step(
                    r, r, t, x, ptr, other, weight, first, last, size, one, c - c * a,
                    -c, c * a, -c,
                )  # fmt: skip


@jit
def _forward_tasks(
    begin, end, stop, scratch, block_ptr, nodes, ptr, other, weight, steps, num_terms,
    tolerance, query, key, value, out, left, pieces, channels_, width, keys,
):  # fmt: skip
    _, heads, num_channels = value.shape
    _, groups, num_keys = query.shape
    size = keys * width
    one = value.dtype.type(1)
    zero = one - one
    norms, states = scratch[: 6 * size], pointer(scratch) + 6 * size
    of_keys, of_values = groups * num_keys, heads * num_channels
    for task in range(begin, end):
        block = task // (heads * pieces)
        h, piece = (task // pieces) % heads, task % pieces
        first, last = block_ptr[block], block_ptr[block + 1]
        rows = last - first
        H, r, t = states, states + rows * size, states + 2 * rows * size
        at = (h // (heads // groups)) * num_keys
        q0, k0 = pointer(query) + at, pointer(key) + at
        at = h * num_channels + piece * channels_
        channels = min(channels_, num_channels - piece * channels_)
        v0, y0 = pointer(value) + at, pointer(out) + at
        w0 = pointer(weight) + h * weight.shape[1]
        for a0 in range(0, num_keys, keys):
            count = min(keys, num_keys - a0)
            if num_terms < 0:
                residual = _solve(
                    H, r, t, norms, k0 + a0, v0, nodes, of_keys, of_values, ptr, other,
                    w0, first, last, steps[h], tolerance, stop, count, keys, channels,
                    width,
                )  # fmt: skip
                left[task] = max(left[task], residual)
            else:
                _form(
                    t, k0 + a0, v0, nodes, of_keys, of_values, first, last, count,
                    keys, channels, width,
                )  # fmt: skip
                copy(H, t, rows * size)
                for _ in range(num_terms):
                    if stopped(stop):
                        return
                    _step(
                        r, t, H, H, ptr, other, w0, first, last, size, one, zero, one,
                        zero, zero,
                    )  # fmt: skip
                    H, r = r, H
            if stopped(stop):
                return
            for i in range(first, last):
                u = nodes[i]
                read(
                    y0 + u * of_values, q0 + (u * of_keys + a0),
                    H + (i - first) * size, one, count, channels, width,
                )  # fmt: skip


@jit
def _backward_tasks(
    begin, end, stop, scratch, block_ptr, nodes, ptr, other, weight, back_ptr,
    back_other, back_weight, steps, num_terms, tolerance, query, key, value, grad,
    grad_query, grad_key, grad_value, grad_weight, left, pieces, channels_, width, keys,
):  # fmt: skip
    num_nodes, heads, num_channels = value.shape
    _, groups, num_keys = query.shape
    size = keys * width
    one = value.dtype.type(1)
    zero = one - one
    norms, states = scratch[: 6 * size], pointer(scratch) + 6 * size
    of_keys, of_values = groups * num_keys, heads * num_channels
    of_grads = heads * num_keys
    for task in range(begin, end):
        block = task // (heads * pieces)
        h, piece = (task // pieces) % heads, task % pieces
        first, last = block_ptr[block], block_ptr[block + 1]
        rows = last - first
        tile = rows * size
        at = (h // (heads // groups)) * num_keys
        q0, k0 = pointer(query) + at, pointer(key) + at
        at = (piece * num_nodes * heads + h) * num_keys
        dq0, dk0 = pointer(grad_query) + at, pointer(grad_key) + at
        at = h * num_channels + piece * channels_
        channels = min(channels_, num_channels - piece * channels_)
        v0, dy0, dv0 = pointer(value) + at, pointer(grad) + at, pointer(grad_value) + at
        w0 = pointer(weight) + h * weight.shape[1]
        u0 = pointer(back_weight) + h * weight.shape[1]
        dw = grad_weight[piece, h]
        for a0 in range(0, num_keys, keys):
            count = min(keys, num_keys - a0)
            Z, r, t = states, states + tile, states + 2 * tile
            H = states + 3 * tile
            if num_terms < 0:
                residual = _solve(
                    H, r, t, norms, k0 + a0, v0, nodes, of_keys, of_values, ptr, other,
                    w0, first, last, steps[h], tolerance, stop, count, keys, channels,
                    width,
                )  # fmt: skip
                left[task] = max(left[task], residual)
                residual = _solve(
                    Z, r, t, norms, q0 + a0, dy0, nodes, of_keys, of_values, back_ptr,
                    back_other, u0, first, last, steps[h], tolerance, stop, count, keys,
                    channels, width,
                )  # fmt: skip
                left[task] = max(left[task], residual)
                _edges(dw, Z, H, ptr, other, first, last, size)
            else:
                _form(
                    H, k0 + a0, v0, nodes, of_keys, of_values, first, last, count,
                    keys, channels, width,
                )  # fmt: skip
                X = H
                for _ in range(num_terms):
                    if stopped(stop):
                        return
                    _step(
                        H + tile, X, H, H, ptr, other, w0, first, last, size, one,
                        zero, one, zero, zero,
                    )  # fmt: skip
                    H = H + tile
                _form(
                    r, q0 + a0, dy0, nodes, of_keys, of_values, first, last, count,
                    keys, channels, width,
                )  # fmt: skip
                copy(Z, r, tile)
                for m in range(num_terms):  # r = (A^T)^m (q dy^T), Z is their sum
                    if stopped(stop):
                        return
                    _edges(
                        dw, r, X + (num_terms - 1 - m) * tile, ptr, other, first, last,
                        size,
                    )  # fmt: skip
                    _step(
                        t, r, r, Z, back_ptr, back_other, u0, first, last, size, zero,
                        zero, one, zero, zero,
                    )  # fmt: skip
                    _add(Z, t, tile)
                    r, t = t, r
            if stopped(stop):
                return
            products = states + (4 + max(num_terms, 0)) * tile
            for i in range(first, last):
                u = nodes[i]
                at = u * of_grads + a0
                state, adjoint = H + (i - first) * size, Z + (i - first) * size
                v, dy = v0 + u * of_values, dy0 + u * of_values
                read_rows(dq0 + at, state, dy, products, count, channels, width)
                read_rows(dk0 + at, adjoint, v, products, count, channels, width)
                read(
                    dv0 + u * of_values, k0 + (u * of_keys + a0), adjoint, one, count,
                    channels, width,
                )  # fmt: skip


@jit
def _add(target, source, size):
    for at in range(0, size, lanes(target)):
        store(target + at, load(target + at) + load(source + at))


@jit
def _edges(dw, Z, H, ptr, other, first, last, size):
    """Adds <Z_i, H_j> to the gradient of A_ij."""
    for i in range(first, last):
        adjoint = Z + (i - first) * size
        for e in range(ptr[i], ptr[i + 1]):
            dw[e] += inner_product(adjoint, H + other[e] * size, size)
