"""States by products with the sparse A, on the CPU: finite sums and iterations.

A task is a (block, head, piece of value channels). It holds the states of all nodes of
a block, [nodes, keys x width], for as many key channels at a time as fit in a core's
cache (at least one), as states are gathered. All steps have one form,
Y_i = c0 X_i + c1 H_i + c2 sum_j A_ij H_j, see `_step`.

A finite sum repeats H <- A H + X. An iteration repeats the steps of `SweepPolynomial`,
from the current residual, until it is below the tolerance. It is for the second system
of `sweep_polynomial` only; what is along u is added in the end, in float64 where
gradients of weights are small differences of large numbers.
"""

from typing import Any, NamedTuple

import numpy as np

from pyg_chimera.ops.common.numba_runtime import jit, run, stopped
from pyg_chimera.ops.common.simd import (
    fma,
    lanes,
    larger,
    load,
    pointer,
    splat,
    store,
    vector_lanes,
    zeros,
)
from pyg_chimera.ops.common.vector_kit import (
    add_multiple,
    clear,
    copy,
    inner_product,
)
from pyg_chimera.ops.recurrence.cpu.state_tiles import (
    Gradients,
    Operands,
    StateTiles,
    form,
    read,
    read_rows,
    task_of,
    tile_of,
)
from pyg_chimera.ops.structure.csr import Rows, sorted_rows
from pyg_chimera.ops.structure.symbolic_factor import Blocks

#: Bytes of the states that a task gathers from: a typical L2 cache. Two vectors a node
#: are faster all the same, as they share indices and weights.
_TILE_BYTES = 1 << 20


def products(blocks: Blocks) -> tuple[Rows, Rows]:
    """A and its transpose, cached in the tables of the blocks. Columns are positions
    within the block, entries are indices of edges.
    """
    if "products" not in blocks.tables:
        row, col, edge = blocks.edge_row, blocks.edge_col, blocks.edge
        start = np.repeat(blocks.ptr[:-1], blocks.sizes)
        made = []
        for own, other in ((row, col), (col, row)):
            rows = sorted_rows(own, other, blocks.num_nodes)
            local = (rows.col - start[rows.row]).astype(np.int32)
            made.append(Rows(rows.ptr, local, edge[rows.entry]))
        blocks.tables["products"] = tuple(made)
    return blocks.tables["products"]


# ------------------------------------------------------------------------------ passes


class SlowModes(NamedTuple):
    """For each graph, the direction in which I - A is nearly singular; zero if there is
    none, or not just one. Vectors of float64 over positions, with v^T (I - A) u = 1.
    """

    right: np.ndarray  #: u
    right_image: np.ndarray  #: (I - A) u
    left: np.ndarray  #: v
    left_image: np.ndarray  #: (I - A)^T v


class System(NamedTuple):
    """The matrix, and how to solve or sum."""

    weight: np.ndarray  #: the edges' weights, [E, heads]
    steps: np.ndarray  #: those of `SweepPolynomial`, [heads, steps, 2]
    modes: np.ndarray  #: those of `SlowModes`, [heads, 4, V]
    num_terms: int  #: highest power of a finite sum, or -1 to iterate
    tolerance: float  #: relative residual at which an iteration stops


class _Matrix(NamedTuple):
    """A, or its transpose, by rows."""

    ptr: np.ndarray  #: [V + 1], as in `products`
    other: np.ndarray  #: [E], as in `products`
    weight: np.ndarray  #: [heads, E], in the order of these


class _Plan(NamedTuple):
    """What the kernels take besides operands."""

    ptr: np.ndarray  #: [T + 1], first position of each block
    node: np.ndarray  #: [V], node at each position
    matrices: tuple[_Matrix, ...]  #: A, and in backward passes its transpose
    steps: np.ndarray  #: the rest of `System`
    modes: np.ndarray
    num_terms: int
    tolerance: float

    @classmethod
    def of(cls, blocks: Blocks, system: System, *by_rows: Rows) -> "_Plan":
        matrices = (
            _Matrix(x.ptr, x.col, np.ascontiguousarray(system.weight[x.entry].T))
            for x in by_rows
        )
        return cls(blocks.ptr, blocks.node, tuple(matrices), *system[1:])


class _Rows(NamedTuple):
    """The rows of a block in a matrix."""

    ptr: np.ndarray
    other: np.ndarray
    weight: Any  #: a pointer to those of the head
    modes: SlowModes  #: of the block
    first: int
    last: int
    size: int  #: of a state


def forward(blocks: Blocks, system: System, x: Operands) -> tuple[np.ndarray, float]:
    """The output, and the largest relative residual of an iteration."""
    out, tiles = np.zeros_like(x.value), _tiles(blocks, x)
    costs = _costs(blocks, system, tiles, x)
    left = np.zeros(costs.shape[0])
    room = 3 * int(blocks.sizes.max(initial=0)) + 8
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

    The formulas are those of `supernodal`. For a finite sum up to the power T,
    dA_ij is the sum over m < T of <(A^T)^m (q dy^T)_i, (sum_{t < T - m} A^t k v^T)_j>.
    """
    tiles, (rows, columns) = _tiles(blocks, x), products(blocks)
    d = Gradients.of(x, tiles, blocks.num_edges)
    along = np.zeros((tiles.pieces, x.value.shape[1], 3, blocks.num_nodes))
    costs = 4 * _costs(blocks, system, tiles, x)
    left = np.zeros(costs.shape[0])
    vector, _ = vector_lanes(x.value.dtype)
    room = (4 + max(system.num_terms, 0)) * int(blocks.sizes.max(initial=0)) + 9
    run(
        _backward_tasks,
        costs,
        room * tiles.keys * tiles.width + (tiles.keys + vector) * vector,
        x.value.dtype,
        *(_Plan.of(blocks, system, rows, columns), x, d, (along, left), tiles),
    )
    dq, dk, dv, dw = d.summed(x.query.shape[1], rows.entry)
    if system.modes.any():
        dw = dw + _along_modes(blocks, system.modes, along.sum(0))
    return (dq, dk, dv, dw), float(left.max(initial=0))


def _along_modes(blocks: Blocks, modes: np.ndarray, along: np.ndarray) -> np.ndarray:
    """What states along u and v add to the gradient of the weights, [E, heads].

    For states H + u C and adjoints Z + v D it is <Z_i, C> u_j + v_i <D, H_j> + v_i u_j
    <D, C>; `along` has these inner products, [heads, 3, V].
    """
    right, left = modes[:, 0], modes[:, 2]
    by_row, by_column, both = along.swapaxes(0, 1)
    i, j = blocks.edge_row, blocks.edge_col
    dw = np.empty((blocks.num_edges, len(modes)))
    dw[blocks.edge] = (
        (by_row + left * both)[:, i] * right[:, j] + left[:, i] * by_column[:, j]
    ).T
    return dw


def _costs(
    blocks: Blocks, system: System, tiles: StateTiles, x: Operands
) -> np.ndarray:
    sweeps = max(system.num_terms, system.steps.shape[1]) + 3.0
    work = sweeps * (np.diff(blocks.edge_ptr) + 6.0 * blocks.sizes)
    work *= 0.1 * x.query.shape[2] * tiles.width
    return np.repeat(work, x.value.shape[1] * tiles.pieces)


def _tiles(blocks: Blocks, x: Operands) -> StateTiles:
    vector, _ = vector_lanes(x.value.dtype)
    two = 2 * vector * x.value.itemsize * int(blocks.sizes.max(initial=0))
    side = vector if x.query.shape[2] == 1 else 2 * vector
    return StateTiles.of(blocks.sizes, x, max(_TILE_BYTES, two), side)


@jit
def _rows(plan, transposed, task, size):
    matrix, modes = plan.matrices[transposed], plan.modes[task.head]
    weight = pointer(matrix.weight) + task.head * matrix.weight.shape[1]
    first, last = plan.ptr[task.block], plan.ptr[task.block + 1]
    right, left = 2 * transposed, 2 - 2 * transposed
    slow = SlowModes(
        modes[right, first:last],
        modes[right + 1, first:last],
        modes[left, first:last],
        modes[left + 1, first:last],
    )
    return _Rows(matrix.ptr, matrix.other, weight, slow, first, last, size)


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
        for w in range(at, at + size, 2 * step):
            here, pair = source + (w - at), w + step < at + size
            first, second = zeros(out), zeros(out)
            if pair:
                for e in range(A.ptr[i], A.ptr[i + 1]):
                    f, there = splat(weight[e]), here + other[e] * size
                    first = fma(f, load(there), first)
                    second = fma(f, load(there + step), second)
            else:
                for e in range(A.ptr[i], A.ptr[i + 1]):
                    f, there = splat(weight[e]), here + other[e] * size
                    first = fma(f, load(there), first)
            for u in range(w, w + step + pair * step, step):
                mine, there = load(own + u), load(source + u)
                store(out + u, fma(a0, mine, fma(a1, there, a2 * first)))
                if moves:
                    store(x + u, fma(b0, mine, fma(b1, there, load(x + u))))
                first = second


@jit
def _norms(norms, states, rows):
    """Computes the maximum (ignoring NaN) and the sum of absolute values of each lane.

    A contracts the maximum if its rows sum to less than one, the sum if columns do.
    """
    size = norms.shape[1]
    norms[:] = 0
    for i in range(rows):
        for w in range(0, size, lanes(states)):
            most, total = pointer(norms) + w, pointer(norms) + (size + w)
            x = load(states + (i * size + w))
            x = larger(x, zeros(states) - x)
            store(most, larger(load(most), x))
            store(total, load(total) + x)


@jit
def _ratio(x, bound):
    """The largest ratio of x to its bound, ignoring NaN and bounds of zero."""
    ratio = 0.0
    for w in range(x.shape[0]):
        if x[w] > ratio * bound[w] and bound[w] > 0:
            ratio = x[w] / bound[w]
    return ratio


@jit
def _along(out, left, pair, nodes, tile):
    """Sets one state to sum_i v_i b_i for b = k v^T, summed in float64."""
    sums = np.zeros((tile.num_keys, tile.channels))
    for i in range(len(nodes)):
        k, v = pair[0] + nodes[i] * tile.key_step, pair[1] + nodes[i] * tile.value_step
        for a in range(tile.num_keys):
            f = left[i] * k[a]
            for p in range(tile.channels):
                sums[a, p] += f * v[p]
    out[:] = 0
    for a in range(tile.num_keys):
        out[a * tile.width : a * tile.width + tile.channels] = sums[a]


@jit
def _add_mode(states, vector, state, sign):
    """Adds sign u_i C to the states, for a vector u and one state C."""
    size, of = state.shape[0], pointer(state)
    for i in range(len(vector)):
        f, at = splat(state.dtype.type(sign * vector[i])), states + i * size
        for w in range(0, size, lanes(states)):
            store(at + w, fma(f, load(of + w), load(at + w)))


@jit
def _total(out, states, vector):
    """Sets one state to sum_i v_i X_i."""
    size, to = out.shape[0], pointer(out)
    out[:] = 0
    for i in range(len(vector)):
        f, at = splat(out.dtype.type(vector[i])), states + i * size
        for w in range(0, size, lanes(states)):
            store(to + w, fma(f, load(at + w), load(to + w)))


@jit
def _solve(x, r, norms, pair, A, plan, head, stop, tile):
    """Solves (I - A) X = b for b = k v^T, where X = x + u C, see `sweep_polynomial`;
    returns the relative residual.

    Each pass takes all steps from the current residual. `r` has room for two tiles, and
    `norms` for seven states and C. The steps were found for a whole batch: if a pass
    does not reduce the residual of this block, it starts over with x <- A x + b, which
    is known to converge.
    """
    rows, size, modes = A.last - A.first, A.size, A.modes
    nodes = plan.node[A.first : A.last]
    steps, tolerance, t = plan.steps[head], plan.tolerance, r + rows * size
    along, C = norms[6], norms[7]
    one = norms.dtype.type(1)
    zero = one - one
    x_norms, r_norms, b_norms = norms[:2], norms[2:4], norms[4:6]
    has_mode = modes.right.any()
    if has_mode:
        _along(C, modes.left, pair, nodes, tile)
    start, safe, idle = True, False, 0
    largest, total = np.inf, np.inf  # the smallest residual so far, in either norm
    while True:
        form(r, pair, plan.node, A.first, A.last, tile)
        if has_mode:
            _add_mode(r, modes.right_image, C, -1.0)
        if start:
            start = False
            _norms(b_norms, r, rows)
            clear(x, rows * size)
        else:
            _step(r, r, x, x, A, (one, -one, one, zero, zero))
            if has_mode:
                _total(along, r, modes.left)
                _add_mode(r, modes.right_image, along, -1.0)
            _norms(r_norms, r, rows)
            _norms(x_norms, x, rows)
            residual = _ratio(r_norms.ravel(), 2 * x_norms.ravel() + b_norms.ravel())
            left0 = _ratio(r_norms[0], b_norms[0])
            left1 = _ratio(r_norms[1], b_norms[1])
            idle = 0 if left0 < largest or left1 < total else idle + 1
            largest, total = min(largest, left0), min(total, left1)
            if (
                residual <= tolerance
                or (idle > 0 and residual <= 16 * tolerance)  # only rounding is left
                or (idle > 64 and safe)
            ):
                if has_mode:
                    _total(along, x, modes.left_image)
                    _add_mode(x, modes.right, along, -1.0)
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
    norms, states = scratch[: 8 * size].reshape(8, size), pointer(scratch) + 8 * size
    for index in range(begin, end):
        task = task_of(index, x, tiles)
        A = _rows(plan, 0, task, size)
        rows = A.last - A.first
        H, r, t = states, states + rows * size, states + 2 * rows * size
        v, y = pointer(x.value) + task.values, pointer(out) + task.values
        for a in range(0, x.key.shape[2], tiles.keys):
            tile = tile_of(task.piece, a, x, tiles)
            q, k = pointer(x.query) + (task.keys + a), pointer(x.key) + (task.keys + a)
            if plan.num_terms < 0:
                residual = _solve(H, r, norms, (k, v), A, plan, task.head, stop, tile)
                left[index] = max(left[index], residual)
                if A.modes.right.any():
                    _add_mode(H, A.modes.right, norms[7], 1.0)
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
def _backward_tasks(begin, end, stop, scratch, plan, x, d, found, tiles):
    along, left = found
    one = x.value.dtype.type(1)
    zero = one - one
    size = tiles.keys * tiles.width
    norms, states = scratch[: 9 * size].reshape(9, size), pointer(scratch) + 9 * size
    for index in range(begin, end):
        task = task_of(index, x, tiles)
        h, dw = task.head, d.weight[task.piece, task.head]
        A, AT = _rows(plan, 0, task, size), _rows(plan, 1, task, size)
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
                C, D = norms[8], norms[7]
                C[:] = D
                residual = _solve(Z, r, norms, (q, dy), AT, plan, h, stop, tile)
                left[index] = max(left[index], residual)
                _edges(dw, Z, H, A)
                if A.modes.right.any():
                    here = along[task.piece, h, :, A.first : A.last]
                    _multiply_modes(here, Z, H, C, D)
                    _add_mode(H, A.modes.right, C, 1.0)
                    _add_mode(Z, AT.modes.right, D, 1.0)
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
                    add_multiple(Z, one, t, held)
                    r, t = t, r
            if stopped(stop):
                return
            for i in range(A.first, A.last):
                u, at = plan.node[i], (i - A.first) * size
                read_rows(dq, H + at, dy, products, u, tile)
                read_rows(dk, Z + at, v, products, u, tile)
                read(dv, k, Z + at, one, u, tile)


@jit
def _multiply_modes(along, Z, H, C, D):
    """Adds <Z_i, C>, <D, H_i> and <D, C>, for states C along u and D along v."""
    size, c, d = len(C), pointer(C), pointer(D)
    along[2] += inner_product(c, d, size)
    for i in range(along.shape[1]):
        along[0, i] += inner_product(Z + i * size, c, size)
        along[1, i] += inner_product(H + i * size, d, size)


@jit
def _edges(dw, Z, H, A):
    """Adds <Z_i, H_j> to the gradient of A_ij."""
    for i in range(A.first, A.last):
        adjoint = Z + (i - A.first) * A.size
        for e in range(A.ptr[i], A.ptr[i + 1]):
            dw[e] += inner_product(adjoint, H + A.other[e] * A.size, A.size)
