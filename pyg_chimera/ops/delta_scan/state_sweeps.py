"""The delta rule by states that move along a DAG, on the CPU, jitted.

A task is a head of a block: one pass along its nodes in topological order. A state
[N, P] is gathered from those of its parents and, on the way, read by key and query;
then it is mended. Forward holds as many states as edges lead back over. Backward runs
the same pass again, keeping all states, and its mirror image for the adjoints.

Rows of states are filled up to whole vectors with zeros.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.numba_runtime import arrays, jit, run, stopped
from pyg_chimera.ops.common.simd import (
    fma,
    lanes,
    load,
    load_part,
    pointer,
    splat,
    store,
    store_part,
    total,
    vector_lanes,
    zeros,
)
from pyg_chimera.ops.common.vector_kit import clear
from pyg_chimera.ops.delta_scan.graph import DeltaGraph
from pyg_chimera.ops.structure.csr import sorted_rows

__all__ = ["backward", "forward"]


class _Sweep(NamedTuple):
    """Nodes by position: block by block, in topological order."""

    ptr: np.ndarray  #: [T + 1], the first position of each block
    node: np.ndarray  #: [V], the node at each position
    parent_ptr: np.ndarray  #: [V + 1], first of the edges into each position, ...
    parent: np.ndarray  #: [E], ... the positions they come from ...
    edge: np.ndarray  #: [E], ... and their numbers
    child_ptr: np.ndarray  #: [V + 1], the same edges by where they come from
    child: np.ndarray  #: [E]
    child_edge: np.ndarray  #: [E]
    held: np.ndarray  #: [T], how many positions edges lead back at most, and one more


def _sweep(graph: DeltaGraph) -> _Sweep:
    """The positions of a DAG, found once."""
    if "sweep" not in graph.tables:
        position = np.empty_like(graph.order)
        position[graph.order] = np.arange(graph.num_nodes)
        tail, head = position[graph.col], position[graph.row]
        parents = sorted_rows(head, tail, graph.num_nodes)
        children = sorted_rows(tail, head, graph.num_nodes)
        held = np.ones(len(graph.sizes), np.int64)
        np.maximum.at(held, graph.block[graph.row], head - tail + 1)
        graph.tables["sweep"] = _Sweep(
            np.append(0, np.cumsum(graph.sizes)),
            graph.order,
            *(parents.ptr, parents.col, parents.entry),
            *(children.ptr, children.col, children.entry),
            held,
        )
    return graph.tables["sweep"]


def _operands(call: Call) -> tuple[_Sweep, list[np.ndarray], np.ndarray]:
    """Positions, the five inputs, and what errors are measured by, if at all."""
    surprise, value = call.inputs.surprise, call.inputs.value
    scale = value.new_empty(0)
    if surprise is not None:
        scale = 1 / (surprise * max(value.size(2), 1))
    return _sweep(call.structure), arrays(*call.inputs[:5]), scale.numpy()


def _width(value: np.ndarray) -> int:
    """Numbers of a row of a state."""
    vector, _ = vector_lanes(value.dtype)
    return max(1, -(-value.shape[2] // vector)) * vector


def _costs(sweep: _Sweep, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Of the tasks: block, head."""
    work = 0.3 * np.diff(sweep.ptr) * key.shape[2] * _width(value)
    return np.repeat(work, value.shape[1])


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output; states are computed anew for gradients."""
    sweep, (query, key, value, beta, weight), scale = _operands(call)
    out, width = np.empty_like(value), _width(value)
    held = int(sweep.held.max(initial=1))
    run(
        _forward_blocks,
        _costs(sweep, key, value),
        (held * key.shape[2] + 2) * width,
        value.dtype,
        *(sweep.ptr, sweep.node, sweep.parent_ptr, sweep.parent, sweep.edge),
        *(sweep.held, query, key, value, beta, weight, scale, out, width),
    )
    return torch.from_numpy(out), ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta, edge weight, and if given of surprise.

    With the adjoint Z of a state and a strength b, that of S' is Z - b k x^T - q e^T,
    where x = Z^T k, and e is the adjoint of what is read to be surprised.
    """
    sweep, (query, key, value, beta, weight), scale = _operands(call)
    (V, heads, _), (groups, N), width = value.shape, key.shape[1:], _width(value)
    # The heads of a group write to parts of their own, summed below.
    dq, dk = (np.empty((V, heads, N), value.dtype) for _ in range(2))
    dv, d_beta, d_weight = (np.empty_like(x) for x in (value, beta, weight))
    d_scale = np.zeros((len(sweep.held), heads), value.dtype)
    largest = int(np.diff(sweep.ptr).max(initial=0))
    held = int(sweep.held.max(initial=1))
    run(
        _backward_blocks,
        3 * _costs(sweep, key, value),
        ((largest + held) * N + 2 * largest + 3) * width + 2 * largest,
        value.dtype,
        *sweep,
        *(query, key, value, beta, weight, scale, *arrays(grad)),
        *(dq, dk, dv, d_beta, d_weight, d_scale, width, largest),
    )
    grads = [
        torch.from_numpy(x.reshape(V, groups, heads // groups, N).sum(2))
        for x in (dq, dk)
    ]
    grads += map(torch.from_numpy, (dv, d_beta, d_weight))
    surprise = call.inputs.surprise
    if surprise is not None:
        of_scale = torch.from_numpy(d_scale.sum(0))
        grads.append(-of_scale / (surprise.square() * max(value.shape[2], 1)))
    return tuple(grads)


@jit
def _gather(target, states, ring, size, start, i, ptr, other, edge, weight, h):  # type: ignore[no-untyped-def]
    """Sets a state to the weighted sum of its neighbours' on one side, in a ring."""
    begin, end = ptr[i], ptr[i + 1]
    if begin == end:
        clear(target, size)
        return
    row = states + (other[begin] - start) % ring * size
    w = splat(weight[edge[begin], h])
    for at in range(0, size, lanes(target)):
        store(target + at, w * load(row + at))
    for x in range(begin + 1, end):
        row = states + (other[x] - start) % ring * size
        w = splat(weight[edge[x], h])
        for at in range(0, size, lanes(target)):
            store(target + at, fma(w, load(row + at), load(target + at)))


@jit
def _read(state, q, k, v, error, surprise, num_keys, P, width):  # type: ignore[no-untyped-def]
    """How wrong what a key, and what a query reads of a state is; what it should be is
    zero past its end, and so are these.
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
def _product(x, y, size):  # type: ignore[no-untyped-def]
    """The product of two padded rows."""
    sums = zeros(x)
    for p in range(0, size, lanes(x)):
        sums = fma(load(x + p), load(y + p), sums)
    return total(sums)


@jit
def _excess(surprise, width, scale, h, most):  # type: ignore[no-untyped-def]
    """A node's surprise, of which the sigmoid is the share of beta that it writes."""
    if scale.shape[0] == 0:
        return most
    return _product(surprise, surprise, width) * scale[h]


@jit
def _sigmoid(x, one):  # type: ignore[no-untyped-def]
    return one / (one + np.exp(-x))


@jit
def _write(state, k, error, num_keys, width, strength):  # type: ignore[no-untyped-def]
    """Adds strength times key times error to a state."""
    for a in range(num_keys):
        w, row = splat(strength * k[a]), state + a * width
        for p in range(0, width, lanes(state)):
            store(row + p, fma(w, load(error + p), load(row + p)))


@jit
def _forward_blocks(  # type: ignore[no-untyped-def]
    first, last, stop, scratch, block_ptr, node, parent_ptr, parent, edge, held, query,
    key, value, beta, weight, scale, out, width,
):  # fmt: skip
    _, heads, P = value.shape
    _, groups, num_keys = key.shape
    size, one, most = num_keys * width, value.dtype.type(1), value.dtype.type(np.inf)
    error = pointer(scratch)
    surprise, states = error + width, error + 2 * width
    for task in range(first, last):
        block, h = task // heads, task % heads
        start, ring = block_ptr[block], held[block]
        for i in range(start, block_ptr[block + 1]):
            if stopped(stop):
                return
            row = node[i] * groups + h // (heads // groups)
            q, k = pointer(query) + row * num_keys, pointer(key) + row * num_keys
            row = (node[i] * heads + h) * P
            v, y = pointer(value) + row, pointer(out) + row
            state = states + (i - start) % ring * size
            _gather(
                state, states, ring, size, start, i, parent_ptr, parent, edge, weight, h
            )
            _read(state, q, k, v, error, surprise, num_keys, P, width)
            x = _excess(surprise, width, scale, h, most)
            strength = beta[node[i], h] * _sigmoid(x, one)
            _write(state, k, error, num_keys, width, strength)
            # What is read changes by as much as query and key agree.
            agree = one - one
            for a in range(num_keys):
                agree += q[a] * k[a]
            agree *= strength
            for p in range(0, P, lanes(v)):
                before = load_part(v + p, P - p) - load(surprise + p)
                store_part(y + p, fma(splat(agree), load(error + p), before), P - p)


@jit
def _backward_blocks(  # type: ignore[no-untyped-def]
    first, last, stop, scratch, block_ptr, node, parent_ptr, parent, edge, child_ptr,
    child, child_edge, held, query, key, value, beta, weight, scale, grad, dq, dk, dv,
    d_beta, d_weight, d_scale, width, largest,
):  # fmt: skip
    _, heads, P = value.shape
    _, groups, num_keys = key.shape
    size, one, most = num_keys * width, value.dtype.type(1), value.dtype.type(np.inf)
    # Of all nodes of a block: S, errors, surprises; then what one node needs.
    states = pointer(scratch)
    errors = states + largest * size
    surprises = errors + largest * width
    excess = surprises + largest * width
    dy = excess + largest
    d_error, d_read = dy + width, dy + 2 * width
    adjoints = dy + 3 * width
    for task in range(first, last):
        block, h = task // heads, task % heads
        g = h // (heads // groups)
        start, end, ring = block_ptr[block], block_ptr[block + 1], held[block]
        for i in range(start, end):
            if stopped(stop):
                return
            row = (node[i] * groups + g) * num_keys
            n, q, k = i - start, pointer(query) + row, pointer(key) + row
            state, error, surprise = (
                states + n * size, errors + n * width, surprises + n * width
            )  # fmt: skip
            _gather(
                state, states, largest, size, start, i, parent_ptr, parent, edge,
                weight, h,
            )  # fmt: skip
            v = pointer(value) + (node[i] * heads + h) * P
            _read(state, q, k, v, error, surprise, num_keys, P, width)
            excess[n] = _excess(surprise, width, scale, h, most)
            strength = beta[node[i], h] * _sigmoid(excess[n], one)
            _write(state, k, error, num_keys, width, strength)
        d_scale[block, h] = one - one
        for i in range(end - 1, start - 1, -1):
            if stopped(stop):
                return
            u, n = node[i], i - start
            row = (u * groups + g) * num_keys
            q, k = pointer(query) + row, pointer(key) + row
            row = (u * heads + h) * num_keys
            of_query, of_key = pointer(dq) + row, pointer(dk) + row
            row = (u * heads + h) * P
            for p in range(0, width, lanes(dy)):
                store(dy + p, load_part(pointer(grad) + (row + p), P - p))
            state, error, surprise = (
                states + n * size, errors + n * width, surprises + n * width
            )  # fmt: skip
            share = _sigmoid(excess[n], one)
            strength = share * beta[u, h]
            adjoint = adjoints + n % ring * size
            _gather(
                adjoint, adjoints, ring, size, start, i, child_ptr, child, child_edge,
                weight, h,
            )  # fmt: skip
            _read_back(
                state, adjoint, q, k, dy, error, d_error, of_query, of_key, strength,
                num_keys, width,
            )  # fmt: skip
            of_strength = _product(d_error, error, width)
            d_beta[u, h] = share * of_strength
            of_surprise = one - one
            if scale.shape[0] > 0:
                slope = of_strength * strength * _sigmoid(-excess[n], one)
                d_scale[block, h] += slope * _product(surprise, surprise, width)
                of_surprise = (slope + slope) * scale[h]
            for p in range(0, width, lanes(dy)):
                by_key = splat(strength) * load(d_error + p)
                by_query = splat(of_surprise) * load(surprise + p)
                store(d_error + p, by_key)
                store(d_read + p, by_query)
                store_part(pointer(dv) + (row + p), by_key + by_query, P - p)
            _mend_back(
                state, adjoint, q, k, error, d_error, d_read, of_query, of_key,
                strength, num_keys, width,
            )  # fmt: skip
            for x in range(parent_ptr[i], parent_ptr[i + 1]):
                before = states + (parent[x] - start) * size
                d_weight[edge[x], h] = _product(adjoint, before, size)


@jit
def _read_back(  # type: ignore[no-untyped-def]
    state, adjoint, q, k, dy, error, found, of_query, of_key, strength, num_keys, width,
):  # fmt: skip
    """Adds q dy^T to the adjoint Z of S, leaves Z^T k, and what of the gradients of
    query and key comes from reading S, and from writing.
    """
    clear(found, width)
    for a in range(num_keys):
        to_query, to_key = zeros(state), zeros(state)
        by_query, by_key = splat(q[a]), splat(k[a])
        at = a * width
        for p in range(0, width, lanes(state)):
            y = load(dy + p)
            z = fma(by_query, y, load(adjoint + at))
            store(adjoint + at, z)
            store(found + p, fma(by_key, z, load(found + p)))
            to_query = fma(load(state + at), y, to_query)
            to_key = fma(load(error + p), z, to_key)
            at += lanes(state)
        of_query[a] = total(to_query)
        of_key[a] = strength * total(to_key)


@jit
def _mend_back(  # type: ignore[no-untyped-def]
    state, adjoint, q, k, error, d_error, d_surprise, of_query, of_key, strength,
    num_keys, width,
):  # fmt: skip
    """Makes of the adjoint of S that of S', which key and query have read before."""
    for a in range(num_keys):
        to_query, to_key = zeros(state), zeros(state)
        by_query, by_key = splat(q[a]), splat(k[a])
        written = splat(strength * k[a])
        at = a * width
        for p in range(0, width, lanes(state)):
            before = load(state + at) - written * load(error + p)
            x, e = load(d_error + p), load(d_surprise + p)
            to_key = fma(before, x, to_key)
            to_query = fma(before, e, to_query)
            store(adjoint + at, load(adjoint + at) - fma(by_key, x, by_query * e))
            at += lanes(state)
        of_query[a] = of_query[a] - total(to_query)
        of_key[a] = of_key[a] - total(to_key)
