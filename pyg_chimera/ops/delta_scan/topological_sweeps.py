"""The state form on the CPU: one sweep along a DAG, and one back.

A task is a (block, head, piece of value channels), and takes as many of these at a time
as a vector has numbers: a state is [N, lanes]. It is formed from those of the parents,
and read, while it is in the first cache. The sweep back needs all states of a block
again, beside their adjoints: they are made anew. For the gradients, see `level_states`.
"""

import numpy as np
import torch

from pyg_chimera.ops.common.numba_runtime import inlined, jit, run, stopped, summed
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
from pyg_chimera.ops.common.vector_kit import (
    clear,
    inner_product,
    inner_product_of_rows,
)
from pyg_chimera.ops.delta_scan.graph import DeltaGraph
from pyg_chimera.ops.delta_scan.ordered_blocks import ordered_blocks

__all__ = ["backward", "forward"]


def _pieces(graph: DeltaGraph, value: np.ndarray) -> int:
    """Tasks of a (block, head): more than one only if threads have too few."""
    (_, heads, channels), (vector, _) = value.shape, vector_lanes(value.dtype)
    enough = len(graph.sizes) * heads >= 2 * torch.get_num_threads()
    return 1 if enough else max(1, -(-channels // vector))


def _costs(graph: DeltaGraph, num_keys: int, value: np.ndarray) -> np.ndarray:
    (_, heads, channels), pieces = value.shape, _pieces(graph, value)
    edges = np.bincount(graph.block[graph.row], minlength=len(graph.sizes))
    work = 0.05 * (3.0 * graph.sizes + edges) * num_keys * channels
    return np.repeat(work / pieces, heads * pieces)


def _scratch(graph: DeltaGraph, num_keys: int, value: np.ndarray, copies: int) -> int:
    """Numbers in so many states of each node of a block, and in what a task adds."""
    vector, _ = vector_lanes(value.dtype)
    most = int(graph.sizes.max(initial=0))
    return vector * (most * (copies * num_keys + 1) + 2 * (num_keys + vector))


def forward(
    graph: DeltaGraph,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    beta: np.ndarray,
    weight: np.ndarray,
) -> np.ndarray:
    """The output [V, heads, P]."""
    out = np.empty_like(value)
    run(
        _forward_tasks,
        _costs(graph, query.shape[2], value),
        _scratch(graph, query.shape[2], value, 1),
        value.dtype,
        ordered_blocks(graph),
        query,
        key,
        value,
        beta,
        weight,
        out,
        _pieces(graph, value),
    )
    return out


def backward(
    graph: DeltaGraph,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    beta: np.ndarray,
    weight: np.ndarray,
    grad: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """Gradients of query, key, value, beta and edge weight."""
    pieces, (nodes, heads, _) = _pieces(graph, value), value.shape
    groups, num_keys = query.shape[1:]
    # Pieces and the heads of a group write to parts of their own, summed below.
    dq = np.zeros((pieces, nodes, heads, num_keys), value.dtype)
    dk, dv = np.zeros_like(dq), np.empty_like(value)
    d_beta = np.zeros((pieces, *beta.shape), value.dtype)
    d_weight = np.zeros((pieces, *weight.shape), value.dtype)
    run(
        _backward_tasks,
        4 * _costs(graph, num_keys, value),
        _scratch(graph, num_keys, value, 2),
        value.dtype,
        ordered_blocks(graph),
        query,
        key,
        value,
        beta,
        weight,
        grad,
        dq,
        dk,
        dv,
        d_beta,
        d_weight,
        pieces,
    )
    shape = (pieces, nodes, groups, heads // groups, num_keys)
    grad_query, grad_key = (summed(x.reshape(shape), (0, 3)) for x in (dq, dk))
    return grad_query, grad_key, dv, summed(d_beta, (0,)), summed(d_weight, (0,))


# ------------------------------------------------------------------------------- tasks


@inlined
def _add(target, factor, source, size):  # type: ignore[no-untyped-def]
    """Adds a state times a factor."""
    for at in range(0, size, lanes(target)):
        store(target + at, fma(factor, load(source + at), load(target + at)))


@inlined
def _read(q, state, num_keys):  # type: ignore[no-untyped-def]
    """q^T S, in four sums: one has to wait for itself."""
    step, a = lanes(state), 0
    s0, s1, s2, s3 = zeros(state), zeros(state), zeros(state), zeros(state)
    while a + 4 <= num_keys:
        row = state + a * step
        s0 = fma(splat(q[a]), load(row), s0)
        s1 = fma(splat(q[a + 1]), load(row + step), s1)
        s2 = fma(splat(q[a + 2]), load(row + 2 * step), s2)
        s3 = fma(splat(q[a + 3]), load(row + 3 * step), s3)
        a += 4
    while a < num_keys:
        s0 = fma(splat(q[a]), load(state + a * step), s0)
        a += 1
    return (s0 + s1) + (s2 + s3)


@jit
def _write(states, s, i, h, blocks, k, num_keys, v, count, beta, weight):  # type: ignore[no-untyped-def]
    """Forms the state at a position; returns how wrong the node finds what it reads."""
    step = lanes(states)
    size, begin, end = num_keys * step, blocks.edge_ptr[i], blocks.edge_ptr[i + 1]
    here = states + (i - s) * size
    source, factor = here, weight.dtype.type(1)
    if end - begin == 1:
        source = states + (blocks.edge_col[begin] - s) * size
        factor = weight[blocks.edge[begin], h]
    else:
        clear(here, size)
        for x in range(begin, end):
            parent = states + (blocks.edge_col[x] - s) * size
            _add(here, splat(weight[blocks.edge[x], h]), parent, size)
    moved = splat(factor)
    error = load_part(v, count) - moved * _read(k, source, num_keys)
    written = splat(beta[blocks.node[i], h]) * error
    for a in range(num_keys):
        before = moved * load(source + a * step)
        store(here + a * step, fma(splat(k[a]), written, before))
    return error


@jit
def _forward_tasks(  # type: ignore[no-untyped-def]
    first, last, stop, scratch, blocks, query, key, value, beta, weight, out, pieces,
):  # fmt: skip
    (_, heads, channels), (_, groups, num_keys) = value.shape, query.shape
    states = pointer(scratch)
    step = lanes(states)
    for task in range(first, last):
        block, h = task // (heads * pieces), task // pieces % heads
        s, end = blocks.ptr[block], blocks.ptr[block + 1]
        at = h // (heads // groups) * num_keys
        q0, k0 = pointer(query) + at, pointer(key) + at
        v0, y0 = pointer(value) + h * channels, pointer(out) + h * channels
        for p in range(task % pieces * step, channels, pieces * step):
            if stopped(stop):
                return
            for i in range(s, end):
                u, count = blocks.node[i], channels - p
                k, v = k0 + u * groups * num_keys, v0 + (u * heads * channels + p)
                _write(states, s, i, h, blocks, k, num_keys, v, count, beta, weight)
                q, state = (
                    q0 + u * groups * num_keys,
                    states + (i - s) * num_keys * step,
                )
                y = y0 + (u * heads * channels + p)
                store_part(y, _read(q, state, num_keys), count)


@jit
def _backward_tasks(  # type: ignore[no-untyped-def]
    first, last, stop, scratch, blocks, query, key, value, beta, weight, grad,
    grad_query, grad_key, grad_value, grad_beta, grad_weight, pieces,
):  # fmt: skip
    (nodes, heads, channels), (_, groups, num_keys) = value.shape, query.shape
    states = pointer(scratch)
    step = lanes(states)
    size, of_keys = num_keys * step, groups * num_keys
    for task in range(first, last):
        block, h, piece = (
            task // (heads * pieces),
            task // pieces % heads,
            task % pieces,
        )
        s, end = blocks.ptr[block], blocks.ptr[block + 1]
        adjoints = states + (end - s) * size
        errors = adjoints + (end - s) * size
        of_q = errors + (end - s) * step
        of_k = of_q + (num_keys + step) * step
        at = h // (heads // groups) * num_keys
        q0, k0 = pointer(query) + at, pointer(key) + at
        at = (piece * nodes * heads + h) * num_keys
        dq0, dk0 = pointer(grad_query) + at, pointer(grad_key) + at
        v0, dy0 = pointer(value) + h * channels, pointer(grad) + h * channels
        dv0 = pointer(grad_value) + h * channels
        for p in range(piece * step, channels, pieces * step):
            if stopped(stop):
                return
            count = channels - p
            for i in range(s, end):
                u = blocks.node[i]
                k, v = k0 + u * of_keys, v0 + (u * heads * channels + p)
                error = _write(
                    states, s, i, h, blocks, k, num_keys, v, count, beta, weight
                )
                store(errors + (i - s) * step, error)
            clear(adjoints, (end - s) * size)
            for i in range(end - 1, s - 1, -1):
                u = blocks.node[i]
                at = u * heads * channels + p
                q, k, dy = (
                    q0 + u * of_keys,
                    k0 + u * of_keys,
                    load_part(dy0 + at, count),
                )
                S, Z = states + (i - s) * size, adjoints + (i - s) * size
                error, b = load(errors + (i - s) * step), splat(beta[u, h])
                found = fma(
                    splat(inner_product_of_rows(q, k, num_keys)), dy,
                    _read(k, Z, num_keys),
                )  # fmt: skip
                written, d_value = b * error, b * found
                store_part(dv0 + at, d_value, count)
                grad_beta[piece, u, h] += total(found * error)
                for a in range(num_keys):
                    row = a * step
                    state, adjoint = load(S + row), load(Z + row)
                    adjoint = fma(splat(q[a]), dy, adjoint)
                    store(of_q + row, state * dy)
                    # The state before is S - k u^T.
                    store(of_k + row, adjoint * written - state * d_value)
                    store(Z + row, adjoint - splat(k[a]) * d_value)
                own = splat(total(written * d_value))
                at = u * heads * num_keys
                for a in range(0, num_keys, step):
                    left = num_keys - a
                    dq, dk = dq0 + (at + a), dk0 + (at + a)
                    sums = row_totals(of_q + a * step)
                    store_part(dq, load_part(dq, left) + sums, left)
                    sums = fma(own, load_part(k + a, left), row_totals(of_k + a * step))
                    store_part(dk, load_part(dk, left) + sums, left)
                for x in range(blocks.edge_ptr[i], blocks.edge_ptr[i + 1]):
                    e, parent = blocks.edge[x], (blocks.edge_col[x] - s) * size
                    grad_weight[piece, e, h] += inner_product(Z, states + parent, size)
                    _add(adjoints + parent, splat(weight[e, h]), Z, size)
