"""The mask form on the CPU: a linear system for each block and head, in float64.

A task is a (block, heads that share keys). It makes L by sparse elimination, or along
the edges where there are no cycles, and eliminates M = I + diag(b) F as
`block_elimination` says. Only u, what nodes write, and the factors of I - A are kept
for the backward pass: all that is [n, n] stays in a core's cache, and is made anew. For
the formulas of the gradients, see `matrices`.
"""

from typing import NamedTuple

import numpy as np
import torch

from pyg_chimera.ops.common.numba_runtime import heads_a_task, jit, run, stopped, summed
from pyg_chimera.ops.common.simd import ADD, fma, lanes, load, pointer, splat, store
from pyg_chimera.ops.common.vector_kit import (
    LANES,
    matmul,
    put,
    set_identity,
    take,
    take_transposed,
)
from pyg_chimera.ops.delta_scan.block_elimination import (
    SIDE,
    eliminate,
    solve,
    solve_transposed,
)
from pyg_chimera.ops.delta_scan.graph import DeltaGraph
from pyg_chimera.ops.resolvent.row_sweeps import edge_products, factorize
from pyg_chimera.ops.resolvent.row_sweeps import solve as sweep
from pyg_chimera.ops.structure.symbolic_factor import SymbolicFactor, symbolic_factor

__all__ = ["Saved", "backward", "forward"]

#: A beta to divide by: what a node with none of it writes is lost in rounding.
_LEAST = 1e-20
#: Rows of gradients of matrices that are made at a time, and stay in the first cache.
_STRIP = 12


class Saved(NamedTuple):
    """What the backward pass needs again, in float64."""

    written: np.ndarray  #: u, [V, heads, P]
    diagonal: np.ndarray  #: factors of I - A, as `row_sweeps.Factors`
    lower: np.ndarray
    upper: np.ndarray


class _Layout(NamedTuple):
    """Blocks, with their nodes in an order to eliminate them in.

    That is the topological order where there is one, and else that in which I - A fills
    up least. Positions are numbered block by block.
    """

    ptr: np.ndarray  #: [T + 1], first position of each block
    acyclic: np.ndarray  #: [T], whether it has no cycle
    node: np.ndarray  #: [V], node at each position
    edge_ptr: np.ndarray  #: [T + 1], first of a block's edges in ...
    edge: np.ndarray  #: [E], ... the edges by the position that they lead to
    edge_row: np.ndarray  #: [E], that position
    edge_col: np.ndarray  #: [E], the position that they come from
    column_ptr: np.ndarray  #: the pattern of the factors of I - A, by columns
    column_row: np.ndarray
    column_entry: np.ndarray


def _layout(graph: DeltaGraph) -> tuple[_Layout, SymbolicFactor, np.ndarray]:
    """The layout, the factors of I - A where there are cycles, and the edges there."""
    if _Layout not in graph.tables:
        graph.tables[_Layout] = _laid_out(graph)
    return graph.tables[_Layout]


def _laid_out(graph: DeltaGraph) -> tuple[_Layout, SymbolicFactor, np.ndarray]:
    cyclic = np.flatnonzero(graph.is_cyclic[graph.block[graph.row]])
    edges = torch.from_numpy(np.stack([graph.col[cyclic], graph.row[cyclic]]))
    symbolic = symbolic_factor(
        edges, torch.from_numpy(graph.block), None, graph.num_nodes
    )
    assert isinstance(symbolic, SymbolicFactor)
    node = np.where(
        graph.is_cyclic[graph.block[graph.order]], symbolic.node, graph.order
    )
    position = np.empty_like(node)
    position[node] = np.arange(len(node))
    edge = np.argsort(position[graph.row], kind="stable")
    row = position[graph.row[edge]]
    layout = _Layout(
        ptr=symbolic.ptr,
        acyclic=~graph.is_cyclic,
        node=node,
        edge_ptr=np.searchsorted(row, symbolic.ptr),
        edge=edge,
        edge_row=row,
        edge_col=position[graph.col[edge]],
        column_ptr=symbolic.upper_ptr,
        column_row=symbolic.upper_row,
        column_entry=symbolic.upper_entry,
    )
    return layout, symbolic, cyclic


def _share(graph: DeltaGraph, query: np.ndarray, value: np.ndarray) -> int:
    return heads_a_task(len(graph.sizes), query.shape[1], value.shape[1])


def _costs(
    graph: DeltaGraph, query: np.ndarray, value: np.ndarray, share: int
) -> np.ndarray:
    n, N, P = graph.sizes.astype(float), query.shape[2], value.shape[2]
    work = n**2 * (0.1 * N + share * (2.0 + 0.15 * P + 0.02 * n)) + 1e3
    return np.repeat(work, value.shape[1] // share)


def _scratch(
    graph: DeltaGraph, query: np.ndarray, value: np.ndarray, squares: int
) -> int:
    """Numbers in so many matrices [n, n], and in all others that a task has."""
    n = int(graph.sizes.max(initial=0)) + LANES
    narrow = 5 * query.shape[2] + 4 * value.shape[2] + SIDE
    return n * (squares * n + narrow) + max(SIDE, 2 * _STRIP) * (n + value.shape[2])


def forward(
    graph: DeltaGraph,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    beta: np.ndarray,
    weight: np.ndarray,
) -> tuple[np.ndarray, Saved]:
    """The output [V, heads, P], and what `backward` needs."""
    layout, symbolic, cyclic = _layout(graph)
    factors, _ = factorize(symbolic, weight[cyclic].astype(np.float64))
    out, written = np.empty_like(value), np.empty(value.shape)
    share = _share(graph, query, value)
    run(
        _forward_tasks,
        _costs(graph, query, value, share),
        _scratch(graph, query, value, 4),
        written.dtype,
        *layout,
        *factors,
        query,
        key,
        value,
        beta,
        weight,
        out,
        written,
        share,
    )
    return out, Saved(written, *factors)


def backward(
    graph: DeltaGraph,
    query: np.ndarray,
    key: np.ndarray,
    beta: np.ndarray,
    weight: np.ndarray,
    saved: Saved,
    grad: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """Gradients of query, key, value, beta and edge weight."""
    layout, _, _ = _layout(graph)
    written, *factors = saved
    share = _share(graph, query, grad)
    parts = grad.shape[1] // query.shape[1] // share
    dq = np.empty((parts, *query.shape), query.dtype)
    dk, dv, d_beta = np.empty_like(dq), np.empty_like(grad), np.empty_like(beta)
    d_weight = np.zeros_like(weight)
    run(
        _backward_tasks,
        2 * _costs(graph, query, grad, share),
        _scratch(graph, query, grad, 6),
        written.dtype,
        *layout,
        *factors,
        query,
        key,
        beta,
        weight,
        written,
        grad,
        dq,
        dk,
        dv,
        d_beta,
        d_weight,
        share,
    )
    return summed(dq, (0,)), summed(dk, (0,)), dv, d_beta, d_weight


# ------------------------------------------------------------------------------- tasks


@jit
def _make_resolvent(  # type: ignore[no-untyped-def]
    L, s, acyclic, begin, end, edge, edge_row, edge_col, weight, stop, column_ptr,
    column_row, column_entry, diagonal, lower, upper,
):  # fmt: skip
    """(I - A)^-1."""
    set_identity(L)
    if not acyclic:
        sweep(
            L, s, L.shape[0], L.shape[1], False, stop, column_ptr, column_row,
            column_entry, diagonal, lower, upper,
        )  # fmt: skip
        return
    for x in range(begin, end):
        source, target = L[edge_col[x] - s], L[edge_row[x] - s]
        w = weight[edge[x]]
        for j in range(L.shape[1]):
            target[j] += w * source[j]


@jit
def _solve_for_adjoint(  # type: ignore[no-untyped-def]
    D, s, acyclic, begin, end, edge, edge_row, edge_col, weight, stop, column_ptr,
    column_row, column_entry, diagonal, lower, upper,
):  # fmt: skip
    """D <- (I - A)^-T D."""
    if not acyclic:
        sweep(
            D, s, D.shape[0], D.shape[1], True, stop, column_ptr, column_row,
            column_entry, diagonal, lower, upper,
        )  # fmt: skip
        return
    for x in range(end - 1, begin - 1, -1):
        source, target = D[edge_row[x] - s], D[edge_col[x] - s]
        w = weight[edge[x]]
        for j in range(D.shape[1]):
            target[j] += w * source[j]


@jit
def _make_scores(scores, rows, columns, query, key, nodes, g):  # type: ignore[no-untyped-def]
    """Q K^T, and K K^T below it, from Q and K below it, and K^T."""
    n = nodes.shape[0]
    take(rows[:n], query, nodes, g)
    take(rows[n:], key, nodes, g)
    take_transposed(columns, key, nodes, g)
    matmul(scores, rows, columns)


@jit
def _make_system(M, L, overlap, beta, nodes, h):  # type: ignore[no-untyped-def]
    """I + diag(b) ((L - I) * K K^T)."""
    m = M.shape[1]
    out, x, y = pointer(M), pointer(L), pointer(overlap)
    for i in range(M.shape[0]):
        b = np.float64(max(beta[nodes[i], h], _LEAST))
        factor = splat(b)
        for at in range(i * m, (i + 1) * m, lanes(out)):
            store(out + at, factor * load(x + at) * load(y + at))
        M[i, i] = 1.0 + b * (L[i, i] - 1.0) * overlap[i, i]


@jit
def _multiply(out, left, right):  # type: ignore[no-untyped-def]
    """The products of the entries of matrices of whole vectors."""
    target, x, y = pointer(out), pointer(left), pointer(right)
    for at in range(0, out.size, lanes(target)):
        store(target + at, load(x + at) * load(y + at))


@jit
def _forward_tasks(  # type: ignore[no-untyped-def]
    first, last, stop, scratch, ptr, acyclic, node, edge_ptr, edge, edge_row, edge_col,
    column_ptr, column_row, column_entry, diagonal, lower, upper, query, key, value,
    beta, weight, out, written, share,
):  # fmt: skip
    heads, P, N = value.shape[1], value.shape[2], query.shape[2]
    tasks = heads // share
    for task in range(first, last):
        block, head = task // tasks, (task % tasks) * share
        s, n = ptr[block], ptr[block + 1] - ptr[block]
        m = (n + LANES - 1) // LANES * LANES
        nodes = node[s : s + n]
        squares, rest = scratch[: 4 * n * m].reshape(4, n, m), scratch[4 * n * m :]
        scores, overlap, L, M = squares[0], squares[1], squares[2], squares[3]
        columns, rest = rest[: N * m].reshape(N, m), rest[N * m :]
        rows, rest = rest[: 2 * n * N].reshape(2 * n, N), rest[2 * n * N :]
        spare, rest = rest[: SIDE * (m + P)], rest[SIDE * (m + P) :]
        inverse, rest = rest[: n * SIDE].reshape(n, SIDE), rest[n * SIDE :]
        u, y = rest[: n * P].reshape(n, P), rest[n * P : 2 * n * P].reshape(n, P)
        _make_scores(
            squares[:2].reshape(2 * n, m), rows, columns, query, key, nodes,
            head * query.shape[1] // heads,
        )  # fmt: skip
        for h in range(head, head + share):
            if stopped(stop):
                return
            _make_resolvent(
                L, s, acyclic[block], edge_ptr[block], edge_ptr[block + 1], edge,
                edge_row, edge_col, weight[:, h], stop, column_ptr, column_row,
                column_entry, diagonal[h], lower[h], upper[h],
            )  # fmt: skip
            _make_system(M, L, overlap, beta, nodes, h)
            eliminate(M[:, :n], inverse, spare, acyclic[block], stop)
            take(u, value, nodes, h)
            for i in range(n):
                b = max(beta[nodes[i], h], _LEAST)
                for p in range(P):
                    u[i, p] *= b
            solve(M[:, :n], inverse, u, spare, acyclic[block])
            put(written, u, nodes, h)
            _multiply(L, L, scores)
            matmul(y, L[:, :n], u)
            put(out, y, nodes, h)


@jit
def _backward_tasks(  # type: ignore[no-untyped-def]
    first, last, stop, scratch, ptr, acyclic, node, edge_ptr, edge, edge_row, edge_col,
    column_ptr, column_row, column_entry, diagonal, lower, upper, query, key, beta,
    weight, written, grad, grad_query, grad_key, grad_value, grad_beta, grad_weight,
    share,
):  # fmt: skip
    heads, P, N = grad.shape[1], grad.shape[2], query.shape[2]
    groups, tasks = query.shape[1], heads // share
    for task in range(first, last):
        block, head = task // tasks, (task % tasks) * share
        g = head * groups // heads
        part = (head - g * (heads // groups)) // share
        s, n = ptr[block], ptr[block + 1] - ptr[block]
        m = (n + LANES - 1) // LANES * LANES
        nodes = node[s : s + n]
        squares, rest = scratch[: 6 * n * m].reshape(6, n, m), scratch[6 * n * m :]
        scores, overlap, L, M = squares[0], squares[1], squares[2], squares[3]
        d_scores, d_overlap = squares[4], squares[5]
        columns, rest = rest[: N * m].reshape(N, m), rest[N * m :]
        rows, rest = rest[: 2 * n * N].reshape(2 * n, N), rest[2 * n * N :]
        spare, rest = rest[: SIDE * (m + P)], rest[SIDE * (m + P) :]
        inverse, rest = rest[: n * SIDE].reshape(n, SIDE), rest[n * SIDE :]
        u, x = rest[: n * P].reshape(n, P), rest[n * P : 2 * n * P].reshape(n, P)
        rest = rest[2 * n * P :]
        dy, rest = rest[: n * P].reshape(n, P), rest[n * P :]
        ut, rest = rest[: P * m].reshape(P, m), rest[P * m :]
        d_rows = rest[: 2 * n * N].reshape(2 * n, N)
        _make_scores(squares[:2].reshape(2 * n, m), rows, columns, query, key, nodes, g)
        squares[4:] = 0
        for h in range(head, head + share):
            if stopped(stop):
                return
            _make_resolvent(
                L, s, acyclic[block], edge_ptr[block], edge_ptr[block + 1], edge,
                edge_row, edge_col, weight[:, h], stop, column_ptr, column_row,
                column_entry, diagonal[h], lower[h], upper[h],
            )  # fmt: skip
            take(dy, grad, nodes, h)
            _multiply(M, L, scores)
            matmul(x, M[:, :n].T, dy)
            _make_system(M, L, overlap, beta, nodes, h)
            eliminate(M[:, :n], inverse, spare, acyclic[block], stop)
            solve_transposed(M[:, :n], inverse, x, spare, acyclic[block])
            take(u, written, nodes, h)
            take_transposed(ut, written, nodes, h)
            for i in range(n):
                b = np.float64(max(beta[nodes[i], h], _LEAST))
                total = 0.0
                for p in range(P):
                    total += x[i, p] * u[i, p]
                    x[i, p] *= b
                grad_beta[nodes[i], h] = total / b  # u is beta times an error
            put(grad_value, x, nodes, h)
            _differentiate(M, d_scores, d_overlap, L, scores, overlap, dy, x, ut, spare)
            _solve_for_adjoint(
                M, s, acyclic[block], edge_ptr[block], edge_ptr[block + 1], edge,
                edge_row, edge_col, weight[:, h], stop, column_ptr, column_row,
                column_entry, diagonal[h], lower[h], upper[h],
            )  # fmt: skip
            edge_products(
                M, L, s, m, edge_ptr[block], edge_ptr[block + 1], edge, edge_row,
                edge_col, grad_weight[:, h],
            )  # fmt: skip
        both = squares[4:].reshape(2 * n, m)[:, :n]
        matmul(d_rows, both, rows[n:])
        matmul(d_rows[n:], both.T, rows, ADD)
        put(grad_query[part], d_rows[:n], nodes, g)
        put(grad_key[part], d_rows[n:], nodes, g)


@jit
def _differentiate(  # type: ignore[no-untyped-def]
    dL, d_scores, d_overlap, L, scores, overlap, dy, dv, ut, spare
):
    """Sets dL, and adds to gradients of scores and overlaps, some rows at a time."""
    n, m = L.shape
    strips = spare[: 2 * _STRIP * m].reshape(2, _STRIP, m)
    of_mask, of_F = pointer(strips), pointer(strips[1])
    step = lanes(of_F)
    for a in range(0, n, _STRIP):
        b = min(a + _STRIP, n)
        matmul(strips[0, : b - a], dy[a:b], ut)
        matmul(strips[1, : b - a], dv[a:b], ut)
        first = a * m
        p, p_scores, p_overlap = (
            pointer(dL) + first,
            pointer(d_scores) + first,
            pointer(d_overlap) + first,
        )
        q, q_scores, q_overlap = (
            pointer(L) + first,
            pointer(scores) + first,
            pointer(overlap) + first,
        )
        for at in range(0, (b - a) * m, step):
            d_mask, d_F, l = load(of_mask + at), load(of_F + at), load(q + at)
            store(p + at, d_mask * load(q_scores + at) - d_F * load(q_overlap + at))
            store(p_scores + at, fma(d_mask, l, load(p_scores + at)))
            store(p_overlap + at, load(p_overlap + at) - d_F * l)
        for i in range(a, b):  # F lacks I * K K^T
            d_overlap[i, i] += strips[1, i - a, i]
