"""States by products with the sparse A, on the CPU: finite sums and iterations.

A task is a (block, head, piece of value channels). It holds the states of all nodes of
a block, [nodes, keys x width], for as many key channels at a time as fit in a core's
cache (at least one), as states are gathered. All steps have one form,
Y_i = c0 X_i + c1 H_i + c2 sum_j A_ij H_j, see `_step`.

A finite sum repeats H <- A H + X. An iteration repeats the steps of `SweepPolynomial`,
from the current residual, until it is below the tolerance.
"""

from typing import Any, NamedTuple

import numpy as np

from pyg_chimera.ops.common.numba_runtime import jit, run, stopped
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
from pyg_chimera.ops.recurrence.resolvent.state_tiles import (
    Gradients,
    Operands,
    StateTiles,
    form,
    read,
    read_rows,
    task_of,
    tile_of,
)
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


class _Matrix(NamedTuple):
    """A, or its transpose, by rows."""

    ptr: np.ndarray  #: [V + 1], as `Products`
    other: np.ndarray  #: [E], as `Products`
    weight: np.ndarray  #: [heads, E], in the order of these


class _Plan(NamedTuple):
    """What the kernels take besides operands."""

    ptr: np.ndarray  #: [T + 1], first position of each block
    node: np.ndarray  #: [V], node at each position
    matrices: tuple[_Matrix, ...]  #: A, and in backward passes its transpose
    steps: np.ndarray  #: the rest of `System`
    num_terms: int
    tolerance: float

    @classmethod
    def of(cls, blocks: Blocks, system: System, *by_rows: Products) -> "_Plan":
        matrices = (
            _Matrix(x.ptr, x.other, np.ascontiguousarray(system.weight[x.edge].T))
            for x in by_rows
        )
        return cls(blocks.ptr, blocks.node, tuple(matrices), *system[1:])


class _Rows(NamedTuple):
    """The rows of a block in a matrix."""

    ptr: np.ndarray
    other: np.ndarray
    weight: Any  #: a pointer to those of the head
    first: int
    last: int
    size: int  #: of a state


def forward(blocks: Blocks, system: System, x: Operands) -> tuple[np.ndarray, float]:
    """The output, and the largest relative residual of an iteration."""
    out, tiles = np.zeros_like(x.value), _tiles(blocks, x)
    costs = _costs(blocks, system, tiles, x)
    left = np.zeros(costs.shape[0])
    room = 3 * int(blocks.sizes.max(initial=0)) + 6
    run(
        _forward_tasks,
        costs,
        room * tiles.keys * tiles.width,
        out.dtype,
        *(_Plan.of(blocks, system, products(blocks)[0]), x, out, left, tiles),
    )
    return out, float(left.max(initial=0))


def backward(
    blocks: Blocks, system: System, x: Operands
) -> tuple[tuple[np.ndarray, ...], float]:
    """Gradients of query, key, value and edge weight, and the largest residual.

    The formulas are those of `supernodal_sweeps`. For a finite sum up to the power T,
    dA_ij is the sum over m < T of <(A^T)^m (q dy^T)_i, (sum_{t < T - m} A^t k v^T)_j>.
    """
    tiles, (rows, columns) = _tiles(blocks, x), products(blocks)
    d = Gradients.of(x, tiles, blocks.num_edges)
    costs = 4 * _costs(blocks, system, tiles, x)
    left = np.zeros(costs.shape[0])
    vector, _ = vector_lanes(x.value.dtype)
    room = (4 + max(system.num_terms, 0)) * int(blocks.sizes.max(initial=0)) + 6
    run(
        _backward_tasks,
        costs,
        room * tiles.keys * tiles.width + (tiles.keys + vector) * vector,
        x.value.dtype,
        *(_Plan.of(blocks, system, rows, columns), x, d, left, tiles),
    )
    return d.summed(x.query.shape[1], rows.edge), float(left.max(initial=0))


def _costs(
    blocks: Blocks, system: System, tiles: StateTiles, x: Operands
) -> np.ndarray:
    sweeps = max(system.num_terms, system.steps.shape[1]) + 3.0
    work = sweeps * (np.diff(blocks.edge_ptr) + 6.0 * blocks.sizes)
    work *= 0.1 * x.query.shape[2] * tiles.width
    return np.repeat(work, x.value.shape[1] * tiles.pieces)


def _tiles(blocks: Blocks, x: Operands) -> StateTiles:
    vector, _ = vector_lanes(x.value.dtype)
    return StateTiles.of(blocks.sizes, x, _TILE_BYTES, vector)


@jit
def _rows(plan, matrix, task, size):
    weight = pointer(matrix.weight) + task.head * matrix.weight.shape[1]
    first, last = plan.ptr[task.block], plan.ptr[task.block + 1]
    return _Rows(matrix.ptr, matrix.other, weight, first, last, size)


@jit
def _step(out, own, source, x, A, coefficients):
    """Sets out_i = c0 own_i + c1 source_i + c2 sum_j A_ij source_j, and adds
    d0 own_i + d1 source_i to x_i. `out` may be `own`.
    """
    step, size, other, weight = lanes(out), A.size, A.other, A.weight
    c0, c1, c2, d0, d1 = coefficients
    a0, a1, a2, b0, b1 = splat(c0), splat(c1), splat(c2), splat(d0), splat(d1)
    moves = d0 != 0 or d1 != 0
    for i in range(A.first, A.last):
        at = (i - A.first) * size
        e0, e1 = A.ptr[i], A.ptr[i + 1]
        for w in range(at, at + size, step):
            here = source + (w - at)
            even, odd = zeros(out), zeros(out)
            for e in range(e0, e1 - 1, 2):
                even = fma(splat(weight[e]), load(here + other[e] * size), even)
                odd = fma(splat(weight[e + 1]), load(here + other[e + 1] * size), odd)
            if (e1 - e0) % 2 == 1:
                last = load(here + other[e1 - 1] * size)
                even = fma(splat(weight[e1 - 1]), last, even)
            mine, there = load(own + w), load(source + w)
            store(out + w, fma(a0, mine, fma(a1, there, a2 * (even + odd))))
            if moves:
                store(x + w, fma(b0, mine, fma(b1, there, load(x + w))))


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
def _solve(x, r, norms, pair, A, plan, head, stop, tile):
    """Sets x to (I - A)^-1 b for b = k v^T; returns the relative residual.

    Each pass takes all steps from the current residual. `r` has room for two tiles.
    The steps were found for a whole batch: if a pass does not reduce the residual of
    this block, it starts over with x <- A x + b, which is known to converge.
    """
    rows, size = A.last - A.first, A.size
    steps, tolerance, t = plan.steps[head], plan.tolerance, r + rows * size
    norms = norms[: 6 * size].reshape(6, size)
    one = norms.dtype.type(1)
    zero = one - one
    x_norms, r_norms, b_norms = norms[:2], norms[2:4], norms[4:]
    start, safe, idle = True, False, 0
    largest, total = np.inf, np.inf  # the smallest residual so far, in either norm
    while True:
        form(r, pair, plan.node, A.first, A.last, tile)
        if start:
            start = False
            _norms(b_norms, r, rows)
            clear(x, rows * size)
        else:
            _step(r, r, x, x, A, (one, -one, one, zero, zero))
            _norms(r_norms, r, rows)
            _norms(x_norms, x, rows)
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
                _step(t, r, r, x, A, (one - c, zero, c, c, zero))
                r, t = t, r
            else:  # a pair of roots with the sum a and the product 1 / c
                _step(t, r, r, x, A, (one, zero, -one, zero, zero))
                _step(r, r, t, x, A, (one, c - c * a, -c, c * a, -c))


@jit
def _forward_tasks(begin, end, stop, scratch, plan, x, out, left, tiles):
    one = x.value.dtype.type(1)
    zero = one - one
    size = tiles.keys * tiles.width
    norms, states = scratch[: 6 * size], pointer(scratch) + 6 * size
    for index in range(begin, end):
        task = task_of(index, x, tiles)
        A = _rows(plan, plan.matrices[0], task, size)
        rows = A.last - A.first
        H, r, t = states, states + rows * size, states + 2 * rows * size
        v, y = pointer(x.value) + task.values, pointer(out) + task.values
        for a in range(0, x.key.shape[2], tiles.keys):
            tile = tile_of(task.piece, a, x, tiles)
            q, k = pointer(x.query) + (task.keys + a), pointer(x.key) + (task.keys + a)
            if plan.num_terms < 0:
                residual = _solve(H, r, norms, (k, v), A, plan, task.head, stop, tile)
                left[index] = max(left[index], residual)
            else:
                form(t, (k, v), plan.node, A.first, A.last, tile)
                copy(H, t, rows * size)
                for _ in range(plan.num_terms):
                    if stopped(stop):
                        return
                    _step(r, t, H, H, A, (one, zero, one, zero, zero))
                    H, r = r, H
            if stopped(stop):
                return
            for i in range(A.first, A.last):
                read(y, q, H + (i - A.first) * size, one, plan.node[i], tile)


@jit
def _backward_tasks(begin, end, stop, scratch, plan, x, d, left, tiles):
    one = x.value.dtype.type(1)
    zero = one - one
    size = tiles.keys * tiles.width
    norms, states = scratch[: 6 * size], pointer(scratch) + 6 * size
    for index in range(begin, end):
        task = task_of(index, x, tiles)
        h, dw = task.head, d.weight[task.piece, task.head]
        A = _rows(plan, plan.matrices[0], task, size)
        AT = _rows(plan, plan.matrices[1], task, size)
        held = (A.last - A.first) * size
        products = states + (4 + max(plan.num_terms, 0)) * held
        v, dy = pointer(x.value) + task.values, pointer(x.grad) + task.values
        dv = pointer(d.value) + task.values
        for a in range(0, x.key.shape[2], tiles.keys):
            tile = tile_of(task.piece, a, x, tiles)
            q, k = pointer(x.query) + (task.keys + a), pointer(x.key) + (task.keys + a)
            dq, dk = pointer(d.query) + task.grads + a, pointer(d.key) + task.grads + a
            Z, r, t = states, states + held, states + 2 * held
            H = states + 3 * held
            if plan.num_terms < 0:
                residual = _solve(H, r, norms, (k, v), A, plan, h, stop, tile)
                left[index] = max(left[index], residual)
                residual = _solve(Z, r, norms, (q, dy), AT, plan, h, stop, tile)
                left[index] = max(left[index], residual)
                _edges(dw, Z, H, A)
            else:
                form(H, (k, v), plan.node, A.first, A.last, tile)
                X = H
                for _ in range(plan.num_terms):
                    if stopped(stop):
                        return
                    _step(H + held, X, H, H, A, (one, zero, one, zero, zero))
                    H = H + held
                form(r, (q, dy), plan.node, A.first, A.last, tile)
                copy(Z, r, held)
                for m in range(plan.num_terms):  # r = (A^T)^m (q dy^T), Z is their sum
                    if stopped(stop):
                        return
                    _edges(dw, r, X + (plan.num_terms - 1 - m) * held, A)
                    _step(t, r, r, Z, AT, (zero, zero, one, zero, zero))
                    _add(Z, t, held)
                    r, t = t, r
            if stopped(stop):
                return
            for i in range(A.first, A.last):
                u, at = plan.node[i], (i - A.first) * size
                read_rows(dq, H + at, dy, products, u, tile)
                read_rows(dk, Z + at, v, products, u, tile)
                read(dv, k, Z + at, one, u, tile)


@jit
def _add(target, source, size):
    for at in range(0, size, lanes(target)):
        store(target + at, load(target + at) + load(source + at))


@jit
def _edges(dw, Z, H, A):
    """Adds <Z_i, H_j> to the gradient of A_ij."""
    for i in range(A.first, A.last):
        adjoint = Z + (i - A.first) * A.size
        for e in range(A.ptr[i], A.ptr[i + 1]):
            dw[e] += inner_product(adjoint, H + A.other[e] * A.size, A.size)
