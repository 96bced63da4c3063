"""The delta rule by states that are carried along a DAG, on the CPU, jitted.

A task is a (block, head): one pass over its nodes in topological order. Each state
[N, P] is gathered from those of its parents; key and query read it; then the key's
write is added. A ring buffer, as long as edges lead back, holds the states. The
backward pass runs the same pass again, storing all states, and then its mirror image
for the adjoints, in a ring buffer.

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
from pyg_chimera.ops.common.vector_kit import (
    clear,
    inner_product,
    inner_product_of_rows,
)
from pyg_chimera.ops.recurrence.delta_scan.graph import DeltaGraph


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
    weight: np.ndarray  #: [E, heads]
    scale: np.ndarray  #: [heads], that of squared errors; empty without surprise


class _Node(NamedTuple):
    """Pointers to what belongs to a node and a head."""

    q: Any
    k: Any
    v: Any
    state: Any
    error: Any  #: the value minus what the key reads of S'; beyond P, it is zero
    surprise: Any  #: the value minus what the query reads of S'


class _Sums(NamedTuple):
    """Pointers to gradients of query and key, as vectors to be summed."""

    to_query: Any
    to_key: Any


def _order(graph: DeltaGraph) -> _Order:
    """The order of a DAG, cached in its tables."""
    if _Order not in graph.tables:
        x = graph.states
        parents = _Edges(x.parent_ptr, x.parent, x.edge)
        children = _Edges(x.child_ptr, x.child, x.edge[x.child_entry])
        held = x.block_bandwidth + 1
        graph.tables[_Order] = _Order(x.ptr, x.state, parents, children, held)
    return graph.tables[_Order]


def _inputs(call: Call) -> _Inputs:
    inputs = call.inputs
    scale = torch.empty(0, dtype=inputs.value.dtype)
    if inputs.surprise is not None:
        scale = 1 / (inputs.surprise * max(inputs.value.size(2), 1))
    return _Inputs(*arrays(*inputs[:5], scale))


@jit
def _width(value):
    """The length of a row of a state, in whole vectors."""
    vector = lanes(pointer(value))
    return max(1, -(-value.shape[2] // vector)) * vector


def _costs(graph: DeltaGraph, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The cost of each task (block, head)."""
    work = 0.3 * graph.sizes * key.shape[2] * _width(value)
    return np.repeat(work, value.shape[1])


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P]; states are recomputed for gradients."""
    order, x = _order(call.structure), _inputs(call)
    out, held = np.empty_like(x.value), int(order.held.max(initial=1))
    run(
        _forward_blocks,
        _costs(call.structure, x.key, x.value),
        (held * x.key.shape[2] + 2) * _width(x.value),
        x.value.dtype,
        *(order, x, out),
    )
    return torch.from_numpy(out), ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
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
    d = _Inputs(dq, dk, *map(np.empty_like, x[2:5]), of_scale)  # type: ignore[call-arg]
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
    grads = [torch.from_numpy(y) for y in (*sums, d.value, d.beta, d.weight)]
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
    begin, end = edges.ptr[i], edges.ptr[i + 1]
    if begin == end:
        clear(target, size)
    for x in range(begin, end):
        row = states + (edges.other[x] - start) % ring * size
        w = splat(weight[edges.edge[x], h])
        if x > begin:
            for at in range(0, size, lanes(target)):
                store(target + at, fma(w, load(row + at), load(target + at)))
        else:
            for at in range(0, size, lanes(target)):
                store(target + at, w * load(row + at))


@jit
def _node(x, u, h, state, error, surprise):
    """Node u in head h, with its own pointers."""
    (_, heads, P), (_, groups, num_keys) = x.value.shape, x.key.shape
    row = (u * groups + h // (heads // groups)) * num_keys
    q, k, v = pointer(x.query), pointer(x.key), pointer(x.value)
    return _Node(q + row, k + row, v + (u * heads + h) * P, state, error, surprise)


@jit
def _sigmoid(x, one):
    return one / (one + np.exp(-x))


@jit
def _overwrite(node, x, u, h, width):
    """Turns S' into S; returns the surprise, whose sigmoid is the share of beta that is
    used (infinity if it is all), and the product of both.
    """
    num_keys, P = x.key.shape[2], x.value.shape[2]
    state, step = node.state, lanes(node.state)
    one, excess = x.value.dtype.type(1), x.value.dtype.type(np.inf)
    for p in range(0, width, step):
        by_key, by_query = zeros(state), zeros(state)
        at = p
        for a in range(num_keys):
            s = load(state + at)
            by_key = fma(splat(node.k[a]), s, by_key)
            by_query = fma(splat(node.q[a]), s, by_query)
            at += width
        wanted = load_part(node.v + p, P - p)
        store(node.error + p, wanted - by_key)
        store(node.surprise + p, wanted - by_query)
    if x.scale.shape[0] > 0:
        excess = inner_product(node.surprise, node.surprise, width) * x.scale[h]
    strength = x.beta[u, h] * _sigmoid(excess, one)
    for a in range(num_keys):
        w, row = splat(strength * node.k[a]), state + a * width
        for p in range(0, width, step):
            store(row + p, fma(w, load(node.error + p), load(row + p)))
    return excess, strength


@jit
def _forward_blocks(first, last, stop, scratch, order, x, out):
    _, heads, P = x.value.shape
    num_keys, width, error = x.key.shape[2], _width(x.value), pointer(scratch)
    size = num_keys * width
    surprise, states = error + width, error + 2 * width
    for task in range(first, last):
        block, h = task // heads, task % heads
        start, ring = order.ptr[block], order.held[block]
        for i in range(start, order.ptr[block + 1]):
            if stopped(stop):
                return
            u, state = order.node[i], states + (i - start) % ring * size
            _gather(state, states, ring, size, start, i, order.parents, x.weight, h)
            node = _node(x, u, h, state, error, surprise)
            _, agree = _overwrite(node, x, u, h, width)
            # The write changes what the query reads by q^T k times strength * error.
            agree *= inner_product_of_rows(node.q, node.k, num_keys)
            y = pointer(out) + (u * heads + h) * P
            for p in range(0, P, lanes(y)):
                before = load_part(node.v + p, P - p) - load(surprise + p)
                store_part(y + p, fma(splat(agree), load(error + p), before), P - p)


@jit
def _backward_blocks(first, last, stop, scratch, order, x, grad, d, largest):
    (_, heads, P), num_keys = x.value.shape, x.key.shape[2]
    one = x.value.dtype.type(1)
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
    for task in range(first, last):
        block, h = task // heads, task % heads
        start, end = order.ptr[block], order.ptr[block + 1]
        ring = order.held[block]
        for i in range(start, end):
            if stopped(stop):
                return
            u, n = order.node[i], i - start
            state = states + n * size
            _gather(state, states, largest, size, start, i, order.parents, x.weight, h)
            node = _node(x, u, h, state, errors + n * width, surprises + n * width)
            excess[n], _ = _overwrite(node, x, u, h, width)
        d.scale[block, h] = one - one
        for i in range(end - 1, start - 1, -1):
            if stopped(stop):
                return
            u, n = order.node[i], i - start
            state, surprise = states + n * size, surprises + n * width
            node = _node(x, u, h, state, errors + n * width, surprise)
            row = (u * heads + h) * P
            for p in range(0, width, step):
                store(dy + p, load_part(pointer(grad) + (row + p), P - p))
            share = _sigmoid(excess[n], one)
            strength = share * x.beta[u, h]
            adjoint = adjoints + n % ring * size
            _gather(
                adjoint, adjoints, ring, size, start, i, order.children, x.weight, h
            )
            _read_back(node, adjoint, dy, d_error, sums, strength, num_keys, width)
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
            _mend_back(node, adjoint, d_error, d_read, sums, strength, num_keys, width)
            row = (u * heads + h) * num_keys
            for a in range(0, num_keys, step):
                left, at = num_keys - a, a * step
                of_query, of_key = row_totals(to_query + at), row_totals(to_key + at)
                store_part(pointer(d.query) + (row + a), of_query, left)
                store_part(pointer(d.key) + (row + a), of_key, left)
            for e in range(order.parents.ptr[i], order.parents.ptr[i + 1]):
                before = states + (order.parents.other[e] - start) * size
                edge = order.parents.edge[e]
                d.weight[edge, h] = inner_product(adjoint, before, size)


@jit
def _read_back(node, adjoint, dy, found, sums, strength, num_keys, width):
    """Adds q dy^T to the adjoint Z of S, and sets `found` to Z^T k. Sets the gradients
    of the query from reading S and of the key from writing.
    """
    clear(found, width)
    b, step = splat(strength), lanes(adjoint)
    for a in range(num_keys):
        of_query, of_key = zeros(adjoint), zeros(adjoint)
        by_query, by_key = splat(node.q[a]), splat(node.k[a])
        at = a * width
        for p in range(0, width, step):
            y = load(dy + p)
            z = fma(by_query, y, load(adjoint + at))
            store(adjoint + at, z)
            store(found + p, fma(by_key, z, load(found + p)))
            of_query = fma(load(node.state + at), y, of_query)
            of_key = fma(load(node.error + p), z, of_key)
            at += step
        store(sums.to_query + a * step, of_query)
        store(sums.to_key + a * step, b * of_key)


@jit
def _mend_back(node, adjoint, d_error, d_read, sums, strength, num_keys, width):
    """Adds the terms of predictions, by key and query, to the adjoint of the state S
    and to their own gradients. They have read S' = S - strength * k error^T.
    """
    step = lanes(adjoint)
    for a in range(num_keys):
        of_query = load(sums.to_query + a * step)
        of_key = load(sums.to_key + a * step)
        by_query, by_key = splat(node.q[a]), splat(node.k[a])
        written = splat(strength * node.k[a])
        at = a * width
        for p in range(0, width, step):
            before = load(node.state + at) - written * load(node.error + p)
            x, e = load(d_error + p), load(d_read + p)
            of_key = of_key - before * x
            of_query = of_query - before * e
            store(adjoint + at, load(adjoint + at) - fma(by_key, x, by_query * e))
            at += step
        store(sums.to_query + a * step, of_query)
        store(sums.to_key + a * step, of_key)
