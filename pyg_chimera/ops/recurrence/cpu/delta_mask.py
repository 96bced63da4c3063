"""The mask form on the CPU: a linear system for each block and head, in float64.

A task is a (block, heads that share keys). It computes L by sparse elimination, and
eliminates M = I + diag(b) F with `block_elimination`; `plain.delta_matrices` says why.
Only u, what nodes write, and the factors of I - A are saved for the backward pass,
which recomputes all matrices [n, n] within a core's cache.

Backward, x = M^-T du is the adjoint of diag(b) V, and -b x is that of the predictions
F u, which keys read as queries read Y. The gradient of A is L^T dL L^T.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.numba_runtime import (
    arrays,
    heads_a_task,
    jit,
    run,
    stopped,
    summed,
)
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
    assign,
    matmul,
    multiply,
    put,
    set_identity,
    take,
    take_transposed,
    workspace,
)
from pyg_chimera.ops.recurrence.cpu.block_elimination import (
    SIDE,
    check_accuracy,
    eliminate,
    solve,
)
from pyg_chimera.ops.recurrence.cpu.rows import (
    Factors,
    Pattern,
    edge_products,
    factorize,
)
from pyg_chimera.ops.recurrence.cpu.rows import solve as sweep
from pyg_chimera.ops.recurrence.plan.delta_graph import DeltaGraph, Operands, positive

#: Rows of the matrices' gradients to compute at a time, within the L1 cache.
_STRIP = 12
#: The most steps of iterative refinement, and the largest relative error after them.
_MAX_CORRECTIONS, _MAX_ERROR = 16, 1e-6
#: Rows of scratch memory for eliminations, solves or strips.
_SPARE = max(SIDE, 2 * _STRIP)


class _Results(NamedTuple):
    """What the forward pass computes, [V, heads, P]."""

    out: np.ndarray  #: the output, or its gradient
    written: np.ndarray  #: u, what nodes write, in float64


class _Graphs(NamedTuple):
    """The graphs of a batch, and I - A in factors."""

    pattern: Pattern
    factors: Factors
    is_cyclic: np.ndarray  #: [T], whether each has a cycle


class _Work(NamedTuple):
    """A task's memory, for n nodes; m is n rounded up to whole vectors."""

    squares: np.ndarray  #: [4 or 6, n, m]: Q K^T, K K^T, L, M; their gradients
    inverse: np.ndarray  #: [n, SIDE], of the diagonal blocks of M
    rows: np.ndarray  #: [2, 2 n, N]: Q above K, and their gradients
    columns: np.ndarray  #: [N, m], K^T
    thin: np.ndarray  #: [4, n, P]; the first two are a right-hand side and a solution
    across: np.ndarray  #: [P, m], u^T
    b: np.ndarray  #: [n], beta
    spare: np.ndarray


def _costs(graph: DeltaGraph, x: Operands, share: int) -> np.ndarray:
    n, N, P = graph.sizes.astype(float), x.query.shape[2], x.value.shape[2]
    work = n**2 * (0.1 * N + share * (2.0 + 0.15 * P + 0.02 * n)) + 1e3
    return np.repeat(work, x.value.shape[1] // share)


def _scratch(graph: DeltaGraph, x: Operands, squares: int) -> int:
    """The size of a task's memory: some matrices [n, n], and all smaller ones."""
    n = int(graph.sizes.max(initial=0)) + LANES
    narrow = 5 * x.query.shape[2] + 5 * x.value.shape[2] + SIDE + 1
    return n * (squares * n + narrow) + _SPARE * (n + x.value.shape[2])


def _operands(call: Call) -> Operands:
    query, key, value, beta, weight = call.inputs[:5]
    return Operands(*arrays(query, key, value, positive(beta), weight))


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P]; saves u and the factors of I - A."""
    graph, x = call.structure, _operands(call)
    factors, _ = factorize(graph.factor, x.weight.astype(np.float64))
    results = _Results(np.empty_like(x.value), np.empty(x.value.shape))
    share = heads_a_task(len(graph.sizes), x.query.shape[1], x.value.shape[1])
    wrong = np.zeros((len(graph.sizes), x.value.shape[1] // share), bool)
    run(
        _forward_tasks,
        _costs(graph, x, share),
        _scratch(graph, x, 4),
        results.written.dtype,
        _Graphs(Pattern.of(graph.factor), factors, graph.is_cyclic),
        *(x, results, wrong),
    )
    check_accuracy(wrong)
    dtype = call.inputs.value.dtype  # saved tensors are viewed as this dtype
    saved = map(torch.from_numpy, (results.written, *factors))
    return torch.from_numpy(results.out), tuple(y.flatten().view(dtype) for y in saved)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta and edge weight."""
    graph, x, (dy,) = call.structure, _operands(call), arrays(grad)
    written, *factored = (y.view(np.float64) for y in arrays(*saved))
    heads, groups = dy.shape[1], x.query.shape[1]
    share = heads_a_task(len(graph.sizes), groups, heads)
    parts = heads // groups // share
    dq, dk = np.empty((2, parts, *x.query.shape), dy.dtype)
    d_value, d_beta = np.empty_like(x.value), np.empty_like(x.beta)
    d = Operands(dq, dk, d_value, d_beta, np.zeros_like(x.weight))
    factors = Factors(*(y.reshape(heads, -1) for y in factored))
    run(
        _backward_tasks,
        2 * _costs(graph, x, share),
        _scratch(graph, x, 6),
        written.dtype,
        _Graphs(Pattern.of(graph.factor), factors, graph.is_cyclic),
        *(x, _Results(dy, written.reshape(dy.shape)), d),
    )
    grads = (summed(dq, (0,)), summed(dk, (0,)), *d[2:])
    return tuple(map(torch.from_numpy, grads))


# ------------------------------------------------------------------------------- tasks


@jit
def _workspace(scratch, count, n, N, P):
    """A task's memory."""
    m = (n + LANES - 1) // LANES * LANES
    squares, at = workspace(scratch, 0, count * n, m)
    inverses, at = workspace(scratch, at, n, SIDE)
    rows, at = workspace(scratch, at, 4 * n, N)
    columns, at = workspace(scratch, at, N, m)
    thin, at = workspace(scratch, at, 4 * n, P)
    across, at = workspace(scratch, at, P, m)
    b, spare = scratch[at : at + n], scratch[at + n : at + n + _SPARE * (m + P)]
    return _Work(
        squares.reshape(count, n, m),
        inverses,
        rows.reshape(2, 2 * n, N),
        columns,
        thin.reshape(4, n, P),
        across,
        b,
        spare,
    )


@jit
def _make_scores(work, query, key, nodes, g):
    """Computes Q K^T and, below it, K K^T; leaves Q and K in rows."""
    n, rows = nodes.shape[0], work.rows[0]
    take(rows[:n], query, nodes, g)
    take(rows[n:], key, nodes, g)
    take_transposed(work.columns, key, nodes, g)
    matmul(work.squares[:2].reshape(2 * n, -1), rows, work.columns)


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
def _solve(work, is_cyclic, transposed):
    """X <- M^-1 X, or M^-T X; returns whether the result is accurate.

    If nodes on cycles reflect (beta > 1), pivots may be small: the solution is then
    refined iteratively, as long as each correction is less than half of the last one.
    """
    rhs, X, residual = work.thin[0], work.thin[1], work.thin[3]
    overlap, L, M = work.squares[1], work.squares[2], work.squares[3]
    inverse, b, spare = work.inverse, work.b, work.spare
    n, m = L.shape
    M, reflects = M[:, :n], False
    for i in range(n):
        reflects |= is_cyclic and b[i] > 1
    if reflects:
        assign(rhs, X)
    solve(M, inverse, X, spare, transposed)
    if not reflects:
        return True
    last = np.inf
    for _ in range(_MAX_CORRECTIONS):
        assign(residual, rhs)
        for a in range(0, n, _STRIP):
            end = min(a + _STRIP, n)
            strip = spare[: (end - a) * m].reshape(end - a, m)
            _make_system(strip, a, L, overlap, b)
            if transposed:
                matmul(residual, strip[:, :n].T, X[a:end], SUBTRACT)
            else:
                matmul(residual[a:end], strip[:, :n], X, SUBTRACT)
        solve(M, inverse, residual, spare, transposed)
        found, correction = np.abs(X).sum(), np.abs(residual).sum()
        if not correction < last / 2:
            break
        X += residual
        last = correction
        if last <= 1e-14 * found:
            break
    return not last > _MAX_ERROR * np.abs(X).sum()  # NaN passes


@jit
def _eliminate(work, beta, nodes, h, stop):
    """Sets b, and M = I + diag(b) ((L - I) * K K^T), and eliminates it."""
    overlap, L, M = work.squares[1], work.squares[2], work.squares[3]
    for i in range(nodes.shape[0]):
        work.b[i] = beta[nodes[i], h]
    _make_system(M, 0, L, overlap, work.b)
    eliminate(M[:, : nodes.shape[0]], work.inverse, work.spare, stop)


@jit
def _forward_tasks(first, last, stop, scratch, graphs, operands, results, wrong):
    (pattern, factors, is_cyclic), (query, key, value, beta, _) = graphs, operands
    (_, heads, P), (_, groups, N), tasks = value.shape, query.shape, wrong.shape[1]
    share = heads // tasks
    for task in range(first, last):
        block, head = task // tasks, (task % tasks) * share
        s = pattern.ptr[block]
        nodes = pattern.node[s : pattern.ptr[block + 1]]
        n = nodes.shape[0]
        work = _workspace(scratch, 4, n, N, P)
        scores, L, b = work.squares[0], work.squares[2], work.b
        y, u = work.thin[0], work.thin[1]
        _make_scores(work, query, key, nodes, head * groups // heads)
        for h in range(head, head + share):
            if stopped(stop):
                return
            set_identity(L)
            sweep(L, s, False, stop, pattern, factors, h)
            _eliminate(work, beta, nodes, h, stop)
            take(u, value, nodes, h)
            for i in range(n):
                for p in range(P):
                    u[i, p] *= b[i]
            solved = _solve(work, is_cyclic[block], False)
            wrong[block, task % tasks] |= not solved
            put(results.written, u, nodes, h)
            multiply(L, L, scores)
            matmul(y, L[:, :n], u)
            put(results.out, y, nodes, h)


@jit
def _backward_tasks(first, last, stop, scratch, graphs, operands, results, d):
    (pattern, factors, is_cyclic), (query, key, _, beta, _) = graphs, operands
    grad, written = results
    (_, heads, P), (_, groups, N) = grad.shape, query.shape
    tasks = groups * d.query.shape[0]
    share = heads // tasks
    for task in range(first, last):
        block, head = task // tasks, (task % tasks) * share
        g = head * groups // heads
        part = (head - g * (heads // groups)) // share
        s = pattern.ptr[block]
        edges = pattern.edge_ptr[block], pattern.edge_ptr[block + 1]
        nodes = pattern.node[s : pattern.ptr[block + 1]]
        n = nodes.shape[0]
        work = _workspace(scratch, 6, n, N, P)
        squares, rows, b = work.squares, work.rows, work.b
        scores, L, M = squares[0], squares[2], squares[3]
        u, x, dy = work.thin[0], work.thin[1], work.thin[2]
        _make_scores(work, query, key, nodes, g)
        squares[4:] = 0
        for h in range(head, head + share):
            if stopped(stop):
                return
            set_identity(L)
            sweep(L, s, False, stop, pattern, factors, h)
            take(dy, grad, nodes, h)
            multiply(M, L, scores)
            matmul(x, M[:, :n].T, dy)
            _eliminate(work, beta, nodes, h, stop)
            _solve(work, is_cyclic[block], True)
            take(u, written, nodes, h)
            take_transposed(work.across, written, nodes, h)
            for i in range(n):
                total = 0.0
                for p in range(P):
                    total += x[i, p] * u[i, p]
                    x[i, p] *= b[i]
                d.beta[nodes[i], h] = total / b[i]  # u is beta times an error
            put(d.value, x, nodes, h)
            _differentiate(squares, dy, x, work.across, work.spare)
            sweep(M, s, True, stop, pattern, factors, h)
            edge_products(M, L, s, edges, pattern, d.weight[:, h])
        d_both, d_rows = squares[4:].reshape(2 * n, -1)[:, :n], rows[1]
        matmul(d_rows, d_both, rows[0, n:])
        matmul(d_rows[n:], d_both.T, rows[0], ADD)
        put(d.query[part], d_rows[:n], nodes, g)
        put(d.key[part], d_rows[n:], nodes, g)


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
