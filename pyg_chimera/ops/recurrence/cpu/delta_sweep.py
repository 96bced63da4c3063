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
from pyg_chimera.ops.recurrence.cpu.sweep import edge_pointers
from pyg_chimera.ops.recurrence.plan.delta_graph import DeltaGraph, Operands


class _Node(NamedTuple):
    """Pointers to what belongs to a node and a head."""

    q: Any
    k: Any
    v: Any
    state: Any
    error: Any  #: the value minus what the key reads of S'; beyond P, it is zero
    read: Any  #: what the query reads of S


class _Sums(NamedTuple):
    """Pointers to gradients of query and key, as vectors to be summed."""

    to_query: Any
    to_key: Any


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
    graph, x = call.structure.states.arrays(True), Operands(*arrays(*call.inputs[:5]))
    out, held = np.empty_like(x.value), int(graph.bandwidth.max(initial=0)) + 1
    run(
        _forward_blocks,
        _costs(call.structure, x.key, x.value),
        (held * x.key.shape[2] + 2) * _width(x.value),
        x.value.dtype,
        *(graph, x, out),
    )
    return torch.from_numpy(out), ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta and edge weight.

    With the adjoint Z of a state, the adjoint of S' is Z - b k (Z^T k)^T.
    """
    graph = call.structure.states.arrays(True)
    x = Operands(*arrays(*call.inputs[:5]))
    (V, heads, _), (groups, N), width = x.value.shape, x.key.shape[1:], _width(x.value)
    # The heads of a group write separate parts, which are summed below.
    dq, dk = (np.empty((V, heads, N), x.value.dtype) for _ in range(2))
    d = Operands(dq, dk, *map(np.empty_like, x[2:]))
    held = int(graph.bandwidth.max(initial=0)) + 1
    largest = int(np.diff(graph.ptr).max(initial=1))
    vector, _ = vector_lanes(x.value.dtype)
    run(
        _backward_blocks,
        3 * _costs(call.structure, x.key, x.value),
        ((largest + held) * N + largest + 2) * width + 2 * (N + vector) * vector,
        x.value.dtype,
        *(graph, x, *arrays(grad), d),
    )
    shape = (V, groups, heads // groups, N)
    sums = (summed(y.reshape(shape), (2,)) for y in (dq, dk))
    return tuple(torch.from_numpy(y) for y in (*sums, d.value, d.beta, d.weight))


@jit
def _gather(target, states, ring, size, start, i, edges, weights, heads):
    """Sets a state to the weighted sum of those of its parents (or children), in a ring
    buffer.
    """
    begin, end = edges.ptr[i], edges.ptr[i + 1]
    if begin == end:
        clear(target, size)
    for x in range(begin, end):
        row = states + (edges.col[x] - start) % ring * size
        w = splat(weights[edges.entry[x] * heads])
        if x > begin:
            for at in range(0, size, lanes(target)):
                store(target + at, fma(w, load(row + at), load(target + at)))
        else:
            for at in range(0, size, lanes(target)):
                store(target + at, w * load(row + at))


@jit
def _node(x, u, h, state, error, read):
    """Node u in head h, with its own pointers."""
    (_, heads, P), (_, groups, num_keys) = x.value.shape, x.key.shape
    row = (u * groups + h // (heads // groups)) * num_keys
    q, k, v = pointer(x.query), pointer(x.key), pointer(x.value)
    return _Node(q + row, k + row, v + (u * heads + h) * P, state, error, read)


@jit
def _overwrite(node, strength, num_keys, P, width):
    """Turns S' into S, and reads it: S^T q = S'^T q + strength * (k^T q) * error."""
    state, step = node.state, lanes(node.state)
    overlap = splat(strength * inner_product_of_rows(node.q, node.k, num_keys))
    for p in range(0, width, step):
        # Both sums in one loop, as each waits for its last addition.
        by_key, by_query = zeros(state), zeros(state)
        at = p
        for a in range(num_keys):
            s = load(state + at)
            by_key = fma(splat(node.k[a]), s, by_key)
            by_query = fma(splat(node.q[a]), s, by_query)
            at += width
        error = load_part(node.v + p, P - p) - by_key
        store(node.error + p, error)
        store(node.read + p, fma(overlap, error, by_query))
    for a in range(num_keys):
        w, row = splat(strength * node.k[a]), state + a * width
        for p in range(0, width, step):
            store(row + p, fma(w, load(node.error + p), load(row + p)))


@jit
def _forward_blocks(first, last, stop, scratch, graph, x, out):
    _, heads, P = x.value.shape
    num_keys, width, error = x.key.shape[2], _width(x.value), pointer(scratch)
    size = num_keys * width
    read, states = error + width, error + 2 * width
    order, parents = graph.state, edge_pointers(graph.parents)
    for task in range(first, last):
        block, h = task // heads, task % heads
        weights = pointer(x.weight) + h
        for c in range(graph.block[block], graph.block[block + 1]):
            start, ring = graph.ptr[c], graph.bandwidth[c] + 1
            for i in range(start, graph.ptr[c + 1]):
                if stopped(stop):
                    return
                u, state = order[i], states + (i - start) % ring * size
                _gather(state, states, ring, size, start, i, parents, weights, heads)
                node = _node(x, u, h, state, error, read)
                _overwrite(node, x.beta[u, h], num_keys, P, width)
                y = pointer(out) + (u * heads + h) * P
                for p in range(0, P, lanes(y)):
                    store_part(y + p, load(read + p), P - p)


@jit
def _backward_blocks(first, last, stop, scratch, graph, x, grad, d):
    heads = x.value.shape[1]
    for task in range(first, last):
        block, h = task // heads, task % heads
        for c in range(graph.block[block], graph.block[block + 1]):
            _backward(stop, pointer(scratch), graph, c, h, x, grad, d)


@jit
def _backward(stop, states, graph, c, h, x, grad, d):
    """The gradients of a component; its states are first in memory."""
    (_, heads, P), num_keys = x.value.shape, x.key.shape[2]
    start, end, ring = graph.ptr[c], graph.ptr[c + 1], graph.bandwidth[c] + 1
    step, width, number = lanes(states), _width(x.value), end - start
    size = num_keys * width
    errors = states + number * size
    dy = errors + number * width
    d_error, to_query = dy + width, dy + 2 * width
    to_key = to_query + (num_keys + step) * step
    sums = _Sums(to_query, to_key)
    adjoints = to_key + (num_keys + step) * step
    order, weights = graph.state, pointer(x.weight) + h
    parents, children = edge_pointers(graph.parents), edge_pointers(graph.children)
    for i in range(start, end):
        if stopped(stop):
            return
        u, n = order[i], i - start
        state = states + n * size
        _gather(state, states, number, size, start, i, parents, weights, heads)
        # What is read is not needed here, and overwritten by dy.
        node = _node(x, u, h, state, errors + n * width, dy)
        _overwrite(node, x.beta[u, h], num_keys, P, width)
    for i in range(end - 1, start - 1, -1):
        if stopped(stop):
            return
        u, n = order[i], i - start
        node = _node(x, u, h, states + n * size, errors + n * width, dy)
        row = (u * heads + h) * P
        for p in range(0, width, step):
            store(dy + p, load_part(pointer(grad) + (row + p), P - p))
        strength, adjoint = x.beta[u, h], adjoints + n % ring * size
        _gather(adjoint, adjoints, ring, size, start, i, children, weights, heads)
        _read_back(node, adjoint, dy, d_error, sums, strength, num_keys, width)
        d.beta[u, h] = inner_product(d_error, node.error, width)
        for p in range(0, width, step):
            by_key = splat(strength) * load(d_error + p)
            store(d_error + p, by_key)
            store_part(pointer(d.value) + (row + p), by_key, P - p)
        _correct_adjoint(node, adjoint, d_error, sums, strength, num_keys, width)
        row = (u * heads + h) * num_keys
        for a in range(0, num_keys, step):
            left, at = num_keys - a, a * step
            of_query, of_key = row_totals(to_query + at), row_totals(to_key + at)
            store_part(pointer(d.query) + (row + a), of_query, left)
            store_part(pointer(d.key) + (row + a), of_key, left)
        for e in range(parents.ptr[i], parents.ptr[i + 1]):
            before = states + (parents.col[e] - start) * size
            edge = parents.entry[e]
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
def _correct_adjoint(node, adjoint, d_error, sums, strength, num_keys, width):
    """Adds the terms of what the key has read, S' = S - strength * k error^T, to the
    adjoint of the state S and to the gradient of the key.
    """
    step = lanes(adjoint)
    for a in range(num_keys):
        of_key = load(sums.to_key + a * step)
        by_key, written = splat(node.k[a]), splat(strength * node.k[a])
        at = a * width
        for p in range(0, width, step):
            before = load(node.state + at) - written * load(node.error + p)
            x = load(d_error + p)
            of_key = of_key - before * x
            store(adjoint + at, load(adjoint + at) - by_key * x)
            at += step
        store(sums.to_key + a * step, of_key)
