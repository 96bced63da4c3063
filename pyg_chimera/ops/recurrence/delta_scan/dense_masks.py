"""The mask form on the CPU: a linear system for each block and head, in float64.

A task is a (block, heads that share keys). It computes L by sparse elimination, or
along the edges if there are no cycles, and eliminates M = I + diag(b) F with
`block_elimination`. Only u, what nodes write, and the factors of I - A are saved for
the backward pass, which recomputes all matrices [n, n] within a core's cache. For the
formulas of the gradients, see `matrices`.
"""

from typing import NamedTuple

import numpy as np

from pyg_chimera.ops.common.numba_runtime import heads_a_task, jit, run, stopped, summed
from pyg_chimera.ops.common.simd import (
    ADD,
    SUBTRACT,
    fma,
    lanes,
    load,
    pointer,
    splat,
    store,
)
from pyg_chimera.ops.common.vector_kit import (
    LANES,
    matmul,
    multiply,
    put,
    set_identity,
    take,
    take_transposed,
)
from pyg_chimera.ops.recurrence.delta_scan.block_elimination import (
    SIDE,
    eliminate,
    solve,
)
from pyg_chimera.ops.recurrence.delta_scan.graph import DeltaGraph
from pyg_chimera.ops.recurrence.delta_scan.ordered_blocks import (
    factor_of_cycles,
    ordered_blocks,
)
from pyg_chimera.ops.recurrence.row_sweeps import Factors, edge_products, factorize
from pyg_chimera.ops.recurrence.row_sweeps import solve as sweep

__all__ = ["Operands", "backward", "forward"]


#: Rows of the matrices' gradients to compute at a time, within the L1 cache.
_STRIP = 12
#: The most steps of iterative refinement, and the largest relative error after them.
_MAX_CORRECTIONS, _MAX_ERROR = 16, 1e-6
#: Rows of scratch memory for eliminations, solves or strips.
_SPARE = max(SIDE, 2 * _STRIP)


class Operands(NamedTuple):
    """The inputs, or their gradients."""

    query: np.ndarray  #: [V, groups, N]; gradients are parts [parts, V, groups, N]
    key: np.ndarray  #: alike
    value: np.ndarray  #: [V, heads, P]
    beta: np.ndarray  #: [V, heads]
    weight: np.ndarray  #: [E, heads]


class _Results(NamedTuple):
    """What the forward pass computes, [V, heads, P]."""

    out: np.ndarray  #: the output, or its gradient
    written: np.ndarray  #: u, what nodes write, in float64


class _System(NamedTuple):
    """M = I + diag(b) ((L - I) * K K^T) for a block and head, eliminated."""

    M: np.ndarray  #: [n, n]
    inverse: np.ndarray  #: [n, SIDE]
    L: np.ndarray  #: [n, m], rows padded to whole vectors
    overlap: np.ndarray  #: [n, m], K K^T
    b: np.ndarray  #: [n]
    triangular: bool


def _share(graph: DeltaGraph, x: Operands) -> int:
    return heads_a_task(len(graph.sizes), x.query.shape[1], x.value.shape[1])


def _costs(graph: DeltaGraph, x: Operands, share: int) -> np.ndarray:
    n, N, P = graph.sizes.astype(float), x.query.shape[2], x.value.shape[2]
    work = n**2 * (0.1 * N + share * (2.0 + 0.15 * P + 0.02 * n)) + 1e3
    return np.repeat(work, x.value.shape[1] // share)


def _scratch(graph: DeltaGraph, x: Operands, squares: int) -> int:
    """The size of a task's memory: some matrices [n, n], and all smaller ones."""
    n = int(graph.sizes.max(initial=0)) + LANES
    narrow = 5 * x.query.shape[2] + 5 * x.value.shape[2] + SIDE + 1
    return n * (squares * n + narrow) + _SPARE * (n + x.value.shape[2])


def forward(graph: DeltaGraph, x: Operands) -> tuple[np.ndarray, np.ndarray, Factors]:
    """The output and what nodes write, [V, heads, P], and the factors of I - A."""
    pattern, edge = factor_of_cycles(graph)
    factors, _ = factorize(pattern, x.weight[edge].astype(np.float64))
    results = _Results(np.empty_like(x.value), np.empty(x.value.shape))
    share = _share(graph, x)
    wrong = np.zeros((len(graph.sizes), x.value.shape[1] // share), bool)
    run(
        _forward_tasks,
        _costs(graph, x, share),
        _scratch(graph, x, 4),
        results.written.dtype,
        *(ordered_blocks(graph), factors, x, results, wrong),
    )
    if wrong.any():
        raise ValueError(
            "'edge_weight' has rows on cycles that sum to so nearly one, where 'beta' "
            "is nearly two, that the rule is not solved accurately without pivots; "
            "scale it, or use backend='torch'"
        )
    return *results, factors


def backward(
    graph: DeltaGraph,
    x: Operands,
    written: np.ndarray,
    factors: Factors,
    grad: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """Gradients of query, key, value, beta and edge weight."""
    share = _share(graph, x)
    parts = grad.shape[1] // x.query.shape[1] // share
    dq, dk = np.empty((2, parts, *x.query.shape), grad.dtype)
    d_value, d_beta = np.empty_like(x.value), np.empty_like(x.beta)
    d = Operands(dq, dk, d_value, d_beta, np.zeros_like(x.weight))
    run(
        _backward_tasks,
        2 * _costs(graph, x, share),
        _scratch(graph, x, 6),
        written.dtype,
        *(ordered_blocks(graph), factors, x, _Results(grad, written), d),
    )
    return summed(dq, (0,)), summed(dk, (0,)), *d[2:]


# ------------------------------------------------------------------------------- tasks


@jit
def _workspace(scratch, count, n, N, P):
    """A task's memory; rows of matrices [n, n] are padded to whole vectors."""
    m = (n + LANES - 1) // LANES * LANES
    at = count * n * m
    squares = scratch[:at].reshape(count, n, m)
    spare = scratch[at : at + _SPARE * (m + P)]
    at += _SPARE * (m + P)
    inverse = scratch[at : at + n * SIDE].reshape(n, SIDE)
    at += n * SIDE
    rows = scratch[at : at + 4 * n * N].reshape(2, 2 * n, N)
    at += 4 * n * N
    thin = scratch[at : at + 4 * n * P].reshape(4, n, P)
    at += 4 * n * P
    columns = scratch[at : at + N * m].reshape(N, m)
    at += N * m
    return squares, spare, inverse, rows, thin, columns, scratch[at : at + n], at + n


@jit
def _make_scores(scores, rows, columns, query, key, nodes, g):
    """Computes Q K^T and, below it, K K^T; leaves Q and K in rows, K^T in columns."""
    n = nodes.shape[0]
    take(rows[:n], query, nodes, g)
    take(rows[n:], key, nodes, g)
    take_transposed(columns, key, nodes, g)
    matmul(scores, rows, columns)


@jit
def _make_resolvent(L, block, h, blocks, factors, weight, stop):
    """L <- (I - A)^-1."""
    s, end = blocks.ptr[block], blocks.ptr[block + 1]
    set_identity(L)
    if not blocks.acyclic[block]:
        sweep(L, s, False, stop, blocks, factors, h)
        return
    for x in range(blocks.edge_ptr[s], blocks.edge_ptr[end]):
        source, target = L[blocks.edge_col[x] - s], L[blocks.edge_row[x] - s]
        w = weight[blocks.edge[x], h]
        for j in range(L.shape[1]):
            target[j] += w * source[j]


@jit
def _find_adjoint(D, block, h, blocks, factors, weight, stop):
    """D <- (I - A)^-T D."""
    s, end = blocks.ptr[block], blocks.ptr[block + 1]
    if not blocks.acyclic[block]:
        sweep(D, s, True, stop, blocks, factors, h)
        return
    for x in range(blocks.edge_ptr[end] - 1, blocks.edge_ptr[s] - 1, -1):
        source, target = D[blocks.edge_row[x] - s], D[blocks.edge_col[x] - s]
        w = weight[blocks.edge[x], h]
        for j in range(D.shape[1]):
            target[j] += w * source[j]


@jit
def _take_strengths(b, beta, nodes, h):
    """Sets b to beta, but not to zero, as it is divided by; what is then written is
    lost in rounding.
    """
    for i in range(nodes.shape[0]):
        x = np.float64(beta[nodes[i], h])
        b[i] = 1e-20 if x < 1e-20 else x  # NaN passes


@jit
def _make_system(M, a, L, overlap, b):
    """Sets M to the rows from a on of I + diag(b) ((L - I) * K K^T)."""
    m = M.shape[1]
    out, x, y = pointer(M), pointer(L) + a * m, pointer(overlap) + a * m
    for i in range(M.shape[0]):
        factor = splat(b[a + i])
        for at in range(i * m, (i + 1) * m, lanes(out)):
            store(out + at, factor * load(x + at) * load(y + at))
        M[i, a + i] = 1.0 + b[a + i] * (L[a + i, a + i] - 1.0) * overlap[a + i, a + i]


@jit
def _solve(system, X, rhs, residual, spare, transposed):
    """X <- M^-1 X, or M^-T X; returns whether the result is accurate.

    If nodes reflect (beta > 1), pivots may be small: the solution is then refined
    iteratively, as long as each correction is less than half of the last one.
    """
    M, inverse, L, overlap, b, triangular = system
    n, m = L.shape
    reflects = False
    for i in range(n):
        reflects |= b[i] > 1
    if reflects and not triangular:
        rhs[:] = X
    solve(M, inverse, X, spare, triangular, transposed)
    if triangular or not reflects:
        return True
    last = np.inf
    for _ in range(_MAX_CORRECTIONS):
        residual[:] = rhs
        for a in range(0, n, _STRIP):
            end = min(a + _STRIP, n)
            strip = spare[: (end - a) * m].reshape(end - a, m)
            _make_system(strip, a, L, overlap, b)
            if transposed:
                matmul(residual, strip[:, :n].T, X[a:end], SUBTRACT)
            else:
                matmul(residual[a:end], strip[:, :n], X, SUBTRACT)
        solve(M, inverse, residual, spare, triangular, transposed)
        found, correction = np.abs(X).sum(), np.abs(residual).sum()
        if not correction < last / 2:
            break
        X += residual
        last = correction
        if last <= 1e-14 * found:
            break
    return not last > _MAX_ERROR * np.abs(X).sum()  # NaN passes


@jit
def _forward_tasks(
    first, last, stop, scratch, blocks, factors, operands, results, wrong
):
    query, key, value, beta, weight = operands
    (_, heads, P), (_, groups, N), tasks = value.shape, query.shape, wrong.shape[1]
    share = heads // tasks
    for task in range(first, last):
        block, head = task // tasks, (task % tasks) * share
        nodes = blocks.node[blocks.ptr[block] : blocks.ptr[block + 1]]
        n, triangular = nodes.shape[0], blocks.acyclic[block]
        squares, spare, inverse, rows, thin, columns, b, _ = _workspace(
            scratch, 4, n, N, P
        )
        scores, overlap, L, M = squares[0], squares[1], squares[2], squares[3]
        system = _System(M[:, :n], inverse, L, overlap, b, triangular)
        u, y = thin[0], thin[1]
        both = squares[:2].reshape(2 * n, L.shape[1])
        _make_scores(both, rows[0], columns, query, key, nodes, head * groups // heads)
        for h in range(head, head + share):
            if stopped(stop):
                return
            _make_resolvent(L, block, h, blocks, factors, weight, stop)
            _take_strengths(b, beta, nodes, h)
            _make_system(M, 0, L, overlap, b)
            eliminate(M[:, :n], inverse, spare, triangular, stop)
            take(u, value, nodes, h)
            for i in range(n):
                for p in range(P):
                    u[i, p] *= b[i]
            solved = _solve(system, u, y, thin[2], spare, False)
            wrong[block, task % tasks] |= not solved
            put(results.written, u, nodes, h)
            multiply(L, L, scores)
            matmul(y, L[:, :n], u)
            put(results.out, y, nodes, h)


@jit
def _backward_tasks(first, last, stop, scratch, blocks, factors, operands, results, d):
    query, key, _, beta, weight = operands
    grad_query, grad_key, grad_value, grad_beta, grad_weight = d
    grad, written = results
    (_, heads, P), (_, groups, N) = grad.shape, query.shape
    tasks = groups * grad_query.shape[0]
    share = heads // tasks
    for task in range(first, last):
        block, head = task // tasks, (task % tasks) * share
        g = head * groups // heads
        part = (head - g * (heads // groups)) // share
        nodes = blocks.node[blocks.ptr[block] : blocks.ptr[block + 1]]
        n, triangular = nodes.shape[0], blocks.acyclic[block]
        squares, spare, inverse, rows, thin, columns, b, at = _workspace(
            scratch, 6, n, N, P
        )
        scores, overlap, L, M = squares[0], squares[1], squares[2], squares[3]
        system = _System(M[:, :n], inverse, L, overlap, b, triangular)
        u, x, dy, m = thin[0], thin[1], thin[2], L.shape[1]
        ut = scratch[at : at + P * m].reshape(P, m)
        both = squares[:2].reshape(2 * n, m)
        _make_scores(both, rows[0], columns, query, key, nodes, g)
        squares[4:] = 0
        for h in range(head, head + share):
            if stopped(stop):
                return
            _make_resolvent(L, block, h, blocks, factors, weight, stop)
            take(dy, grad, nodes, h)
            multiply(M, L, scores)
            matmul(x, M[:, :n].T, dy)
            _take_strengths(b, beta, nodes, h)
            _make_system(M, 0, L, overlap, b)
            eliminate(M[:, :n], inverse, spare, triangular, stop)
            _solve(system, x, u, thin[3], spare, True)
            take(u, written, nodes, h)
            take_transposed(ut, written, nodes, h)
            for i in range(n):
                total = 0.0
                for p in range(P):
                    total += x[i, p] * u[i, p]
                    x[i, p] *= b[i]
                grad_beta[nodes[i], h] = total / b[i]  # u is beta times an error
            put(grad_value, x, nodes, h)
            _differentiate(squares, dy, x, ut, spare)
            _find_adjoint(M, block, h, blocks, factors, weight, stop)
            s, end = blocks.ptr[block], blocks.ptr[block + 1]
            edges = blocks.edge_ptr[s], blocks.edge_ptr[end]
            edge_products(M, L, s, edges, blocks, grad_weight[:, h])
        d_both = squares[4:].reshape(2 * n, m)[:, :n]
        d_rows = rows[1]
        matmul(d_rows, d_both, rows[0, n:])
        matmul(d_rows[n:], d_both.T, rows[0], ADD)
        put(grad_query[part], d_rows[:n], nodes, g)
        put(grad_key[part], d_rows[n:], nodes, g)


@jit
def _differentiate(squares, dy, dv, ut, spare):
    """Sets dL, and adds to the gradients of scores and overlap, some rows at a time."""
    scores, overlap, L, dL = squares[0], squares[1], squares[2], squares[3]
    d_scores, d_overlap, (n, m) = squares[4], squares[5], L.shape
    strips = spare[: 2 * _STRIP * m].reshape(2, _STRIP, m)
    d_mask, d_F = pointer(strips[0]), pointer(strips[1])
    for a in range(0, n, _STRIP):
        b = min(a + _STRIP, n)
        matmul(strips[0, : b - a], dy[a:b], ut)
        matmul(strips[1, : b - a], dv[a:b], ut)  # -dF
        p, p_scores, p_overlap = pointer(dL), pointer(d_scores), pointer(d_overlap)
        q, q_scores, q_overlap = pointer(L), pointer(scores), pointer(overlap)
        for i in range(0, (b - a) * m, lanes(p)):
            at = a * m + i
            of_mask, of_F, reach = load(d_mask + i), load(d_F + i), load(q + at)
            of_L = of_mask * load(q_scores + at) - of_F * load(q_overlap + at)
            store(p + at, of_L)
            store(p_scores + at, fma(of_mask, reach, load(p_scores + at)))
            store(p_overlap + at, load(p_overlap + at) - of_F * reach)
        for i in range(a, b):  # F lacks I * K K^T
            d_overlap[i, i] += strips[1, i - a, i]
