"""The delta rule by states that are carried along a DAG, on the CPU, jitted.

A task is a (block, head): one pass over its nodes in topological order. Each state
[N, P] is gathered from those of its parents; key and query read it; then the key's
write is added. A ring buffer, as long as edges lead
back, holds the states. The backward pass runs the same pass again, storing all states,
and then its mirror image for the adjoints, in a ring buffer.

Rows of states are padded with zeros to whole vectors.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.numba_runtime import arrays, jit, run, stopped, summed
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
    vector_lanes,
    zeros,
)
from pyg_chimera.ops.common.vector_kit import clear, inner_product
from pyg_chimera.ops.recurrence.delta_scan.graph import DeltaGraph
from pyg_chimera.ops.recurrence.delta_scan.ordered_blocks import ordered_blocks
from pyg_chimera.ops.structure.csr import sorted_rows

__all__ = ["backward", "forward"]


class _Edges(NamedTuple):
    """The edges by the positions of one of their ends."""

    ptr: np.ndarray  #: [V + 1], first of the edges of each position in ...
    other: np.ndarray  #: [E], ... the positions of their other ends ...
    edge: np.ndarray  #: [E], ... and their indices


class _Order(NamedTuple):
    """Nodes block by block, in topological order."""

    ptr: np.ndarray  #: [T + 1], first position of each block
    node: np.ndarray  #: [V], the node at each position
    parents: _Edges
    children: _Edges
    held: np.ndarray  #: [T], one more than the most positions that an edge spans


class _Inputs(NamedTuple):
    """The inputs, or their gradients; those of query and key are [V, heads, N]."""

    query: np.ndarray  #: [V, groups, N]
    key: np.ndarray  #: [V, groups, N]
    value: np.ndarray  #: [V, heads, P]
    beta: np.ndarray  #: [V, heads]
    weight: np.ndarray  #: [E, heads, 1 or N]
    scale: np.ndarray  #: [heads], that of squared errors; empty without surprise


class _Node(NamedTuple):
    """Pointers to what belongs to a node and a head."""

    q: Any
    k: Any
    dy: Any
    error: Any


class _Sums(NamedTuple):
    """Pointers to gradients of query and key, as vectors to be summed."""

    to_query: Any
    to_key: Any


def _order(graph: DeltaGraph) -> _Order:
    """The order of a DAG, cached in its tables."""
    if _Order not in graph.tables:
        blocks = ordered_blocks(graph)
        rows = sorted_rows(blocks.edge_col, blocks.edge_row, graph.num_nodes)
        held = np.ones(len(graph.sizes), np.int64)
        back = blocks.edge_row - blocks.edge_col + 1
        np.maximum.at(held, graph.block[graph.row[blocks.edge]], back)
        parents = _Edges(blocks.edge_ptr, blocks.edge_col, blocks.edge)
        children = _Edges(rows.ptr, rows.col, blocks.edge[rows.entry])
        order = _Order(blocks.ptr, blocks.node, parents, children, held)
        graph.tables[_Order] = order
    return graph.tables[_Order]


def _inputs(call: Call) -> _Inputs:
    q, k, v, beta, weight = arrays(*call.inputs[:5])
    scale, surprise = np.empty(0, weight.dtype), call.inputs.surprise
    if surprise is not None:
        scale = (1 / (surprise * max(call.inputs.value.size(2), 1))).numpy()
    weight = weight if weight.ndim == 3 else weight[:, :, None]
    return _Inputs(q, k, v, beta, weight, scale)


@jit
def _width(value):
    """The length of a row of a state, in whole vectors."""
    vector = lanes(pointer(value))
    return max(1, -(-value.shape[2] // vector)) * vector


def _costs(graph: DeltaGraph, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The cost of each task (block, head)."""
    work = 0.3 * graph.sizes * key.shape[2] * _width(value)
    return np.repeat(work, value.shape[1])


def forward(call: Call) -> Tensor:
    """The output [V, heads, P]."""
    order, x = _order(call.structure), _inputs(call)
    out, held = np.empty_like(x.value), int(order.held.max(initial=1))
    run(
        _forward_blocks,
        _costs(call.structure, x.key, x.value),
        (held * x.key.shape[2] + 2) * _width(x.value),
        x.value.dtype,
        *(order, x, out),
    )
    return torch.from_numpy(out)


def backward(call: Call, grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta, edge weight, and if given of surprise.

    With the adjoint Z of a state, a strength b and x = Z^T k, the adjoint of S' is
    Z - b k x^T - q e^T, where e is the adjoint of the query's error, if there is a
    surprise.
    """
    graph, order, x = call.structure, _order(call.structure), _inputs(call)
    (V, heads, P), (groups, N), width = x.value.shape, x.key.shape[1:], _width(x.value)
    # The heads of a group write separate parts, which are summed below.
    dq, dk = (np.empty((V, heads, N), x.value.dtype) for _ in range(2))
    of_scale = np.zeros((len(graph.sizes), heads), x.value.dtype)
    of_rest = (np.empty_like(y) for y in (x.value, x.beta, x.weight))
    d = _Inputs(dq, dk, *of_rest, of_scale)  # type: ignore[call-arg]
    largest, held = (int(y.max(initial=1)) for y in (graph.sizes, order.held))
    vector, _ = vector_lanes(x.value.dtype)
    run(
        _backward_blocks,
        3 * _costs(graph, x.key, x.value),
        ((largest + held) * N + 2 * largest + 3) * width
        + (largest // vector + 1 + 2 * (N + vector)) * vector,
        x.value.dtype,
        *(order, x, *arrays(grad), d, largest),
    )
    shape = (V, groups, heads // groups, N)
    sums = (summed(y.reshape(shape), (2,)) for y in (dq, dk))
    of_weight = d.weight.reshape(call.inputs.edge_weight.shape)
    grads = [torch.from_numpy(y) for y in (*sums, d.value, d.beta, of_weight)]
    surprise = call.inputs.surprise
    if surprise is not None:
        of_blocks = torch.from_numpy(of_scale.sum(0))
        grads.append(-of_blocks / (surprise.square() * max(P, 1)))
    return tuple(grads)


@jit
def _gather(target, states, ring, size, start, i, edges, weight, h):
    """Sets a state to the weighted sum of those of its parents (or children), in a ring
    buffer.
    """
    begin, end, part = edges.ptr[i], edges.ptr[i + 1], size // max(1, weight.shape[2])
    if begin == end:
        clear(target, size)
    for x in range(begin, end):
        row = states + (edges.other[x] - start) % ring * size
        for c in range(weight.shape[2]):
            w = splat(weight[edges.edge[x], h, c])
            if x > begin:
                for at in range(c * part, (c + 1) * part, lanes(target)):
                    store(target + at, fma(w, load(row + at), load(target + at)))
            else:
                for at in range(c * part, (c + 1) * part, lanes(target)):
                    store(target + at, w * load(row + at))


@jit
def _read(state, q, k, v, error, surprise, num_keys, P, width):
    """The errors of a key and of a query: the value minus what they read of a state.
    Beyond P, they are zero.
    """
    for p in range(0, width, lanes(state)):
        by_key, by_query = zeros(state), zeros(state)
        at = p
        for a in range(num_keys):
            s = load(state + at)
            by_key = fma(splat(k[a]), s, by_key)
            by_query = fma(splat(q[a]), s, by_query)
            at += width
        wanted = load_part(v + p, P - p)
        store(error + p, wanted - by_key)
        store(surprise + p, wanted - by_query)


@jit
def _excess(surprise, width, scale, h, most):
    """A node's surprise, whose sigmoid is the share of beta that is used; or `most`."""
    if scale.shape[0] == 0:
        return most
    return inner_product(surprise, surprise, width) * scale[h]


@jit
def _sigmoid(x, one):
    return one / (one + np.exp(-x))


@jit
def _write(state, k, error, num_keys, width, strength):
    """Adds strength times key times error to a state."""
    for a in range(num_keys):
        w, row = splat(strength * k[a]), state + a * width
        for p in range(0, width, lanes(state)):
            store(row + p, fma(w, load(error + p), load(row + p)))


@jit
def _forward_blocks(first, last, stop, scratch, order, x, out):
    _, heads, P = x.value.shape
    _, groups, num_keys = x.key.shape
    one, most = x.value.dtype.type(1), x.value.dtype.type(np.inf)
    error, width = pointer(scratch), _width(x.value)
    size = num_keys * width
    surprise, states = error + width, error + 2 * width
    for task in range(first, last):
        block, h = task // heads, task % heads
        start, ring = order.ptr[block], order.held[block]
        for i in range(start, order.ptr[block + 1]):
            if stopped(stop):
                return
            u = order.node[i]
            row = (u * groups + h // (heads // groups)) * num_keys
            q, k = pointer(x.query) + row, pointer(x.key) + row
            row = (u * heads + h) * P
            v, y = pointer(x.value) + row, pointer(out) + row
            state = states + (i - start) % ring * size
            _gather(state, states, ring, size, start, i, order.parents, x.weight, h)
            _read(state, q, k, v, error, surprise, num_keys, P, width)
            excess = _excess(surprise, width, x.scale, h, most)
            strength = x.beta[u, h] * _sigmoid(excess, one)
            _write(state, k, error, num_keys, width, strength)
            # The write changes what the query reads by q^T k times strength * error.
            agree = one - one
            for a in range(num_keys):
                agree += q[a] * k[a]
            agree *= strength
            for p in range(0, P, lanes(v)):
                before = load_part(v + p, P - p) - load(surprise + p)
                store_part(y + p, fma(splat(agree), load(error + p), before), P - p)


@jit
def _backward_blocks(first, last, stop, scratch, order, x, grad, d, largest):
    _, heads, P = x.value.shape
    _, groups, num_keys = x.key.shape
    one, most = x.value.dtype.type(1), x.value.dtype.type(np.inf)
    # For all nodes of a block: S, errors, surprises; the rest is for one node.
    states = pointer(scratch)
    step, width = lanes(states), _width(x.value)
    size = num_keys * width
    errors = states + largest * size
    surprises = errors + largest * width
    excess = surprises + largest * width
    dy = excess + (largest // step + 1) * step
    d_error, d_read = dy + width, dy + 2 * width
    to_query = dy + 3 * width
    to_key = to_query + (num_keys + step) * step
    sums = _Sums(to_query, to_key)
    adjoints = to_key + (num_keys + step) * step
    part = size // max(1, x.weight.shape[2])
    for task in range(first, last):
        block, h = task // heads, task % heads
        g = h // (heads // groups)
        start, end = order.ptr[block], order.ptr[block + 1]
        ring = order.held[block]
        for i in range(start, end):
            if stopped(stop):
                return
            u, n = order.node[i], i - start
            row = (u * groups + g) * num_keys
            q, k = pointer(x.query) + row, pointer(x.key) + row
            state, error, surprise = (
                states + n * size, errors + n * width, surprises + n * width
            )  # fmt: skip
            _gather(state, states, largest, size, start, i, order.parents, x.weight, h)
            v = pointer(x.value) + (u * heads + h) * P
            _read(state, q, k, v, error, surprise, num_keys, P, width)
            excess[n] = _excess(surprise, width, x.scale, h, most)
            strength = x.beta[u, h] * _sigmoid(excess[n], one)
            _write(state, k, error, num_keys, width, strength)
        d.scale[block, h] = one - one
        for i in range(end - 1, start - 1, -1):
            if stopped(stop):
                return
            u, n = order.node[i], i - start
            row = (u * heads + h) * P
            for p in range(0, width, step):
                store(dy + p, load_part(pointer(grad) + (row + p), P - p))
            state, surprise = states + n * size, surprises + n * width
            keys = (u * groups + g) * num_keys
            node = _Node(
                pointer(x.query) + keys, pointer(x.key) + keys, dy, errors + n * width
            )
            share = _sigmoid(excess[n], one)
            strength = share * x.beta[u, h]
            adjoint = adjoints + n % ring * size
            _gather(
                adjoint, adjoints, ring, size, start, i, order.children, x.weight, h
            )
            _read_back(state, adjoint, node, d_error, sums, strength, num_keys, width)
            of_strength = inner_product(d_error, node.error, width)
            d.beta[u, h] = share * of_strength
            of_surprise = one - one
            if x.scale.shape[0] > 0:
                slope = of_strength * strength * _sigmoid(-excess[n], one)
                d.scale[block, h] += slope * inner_product(surprise, surprise, width)
                of_surprise = (slope + slope) * x.scale[h]
            for p in range(0, width, step):
                by_key = splat(strength) * load(d_error + p)
                by_query = splat(of_surprise) * load(surprise + p)
                store(d_error + p, by_key)
                store(d_read + p, by_query)
                store_part(pointer(d.value) + (row + p), by_key + by_query, P - p)
            _mend_back(
                state, adjoint, node, d_error, d_read, sums, strength, num_keys, width
            )
            row = (u * heads + h) * num_keys
            for a in range(0, num_keys, step):
                left, at = num_keys - a, a * step
                of_query, of_key = row_totals(to_query + at), row_totals(to_key + at)
                store_part(pointer(d.query) + (row + a), of_query, left)
                store_part(pointer(d.key) + (row + a), of_key, left)
            for e in range(order.parents.ptr[i], order.parents.ptr[i + 1]):
                before = states + (order.parents.other[e] - start) * size
                for c in range(x.weight.shape[2]):
                    d.weight[order.parents.edge[e], h, c] = inner_product(
                        adjoint + c * part, before + c * part, part
                    )


@jit
def _read_back(state, adjoint, node, found, sums, strength, num_keys, width):
    """Adds q dy^T to the adjoint Z of S, and sets `found` to Z^T k. Sets the gradients
    of the query from reading S and of the key from writing.
    """
    clear(found, width)
    b, step = splat(strength), lanes(state)
    for a in range(num_keys):
        of_query, of_key = zeros(state), zeros(state)
        by_query, by_key = splat(node.q[a]), splat(node.k[a])
        at = a * width
        for p in range(0, width, step):
            y = load(node.dy + p)
            z = fma(by_query, y, load(adjoint + at))
            store(adjoint + at, z)
            store(found + p, fma(by_key, z, load(found + p)))
            of_query = fma(load(state + at), y, of_query)
            of_key = fma(load(node.error + p), z, of_key)
            at += step
        store(sums.to_query + a * step, of_query)
        store(sums.to_key + a * step, b * of_key)


@jit
def _mend_back(state, adjoint, node, d_error, d_read, sums, strength, num_keys, width):
    """Adds the terms of predictions, by key and query, to the adjoint of the state S
    and to their own gradients. They have read S' = S - strength * k error^T.
    """
    step = lanes(state)
    for a in range(num_keys):
        of_query = load(sums.to_query + a * step)
        of_key = load(sums.to_key + a * step)
        by_query, by_key = splat(node.q[a]), splat(node.k[a])
        written = splat(strength * node.k[a])
        at = a * width
        for p in range(0, width, step):
            before = load(state + at) - written * load(node.error + p)
            x, e = load(d_error + p), load(d_read + p)
            of_key = of_key - before * x
            of_query = of_query - before * e
            store(adjoint + at, load(adjoint + at) - fma(by_key, x, by_query * e))
            at += step
        store(sums.to_query + a * step, of_query)
        store(sums.to_key + a * step, of_key)
