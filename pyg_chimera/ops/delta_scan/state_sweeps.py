"""The delta rule by states that are carried along a DAG, on the CPU, jitted.

A task is a (block, head): one pass over its nodes in topological order. Each state
[N, P] is gathered from those of its parents; key and query read it, or the mean of the
parents' states; then the key's write is added. A ring buffer, as long as edges lead
back, holds the states. The backward pass runs the same pass again, storing all states,
and then its mirror image for the adjoints, in a ring buffer.

Rows of states are padded with zeros to whole vectors.
"""

from typing import NamedTuple

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
from pyg_chimera.ops.delta_scan.graph import DeltaGraph
from pyg_chimera.ops.delta_scan.ordered_blocks import ordered_blocks
from pyg_chimera.ops.structure.csr import sorted_rows

__all__ = ["backward", "forward"]


class _Children(NamedTuple):
    """The edges by the positions of their sources."""

    ptr: np.ndarray  #: [V + 1], first of the edges from each position in ...
    child: np.ndarray  #: [E], ... the positions of their targets ...
    edge: np.ndarray  #: [E], ... and their indices
    held: np.ndarray  #: [T], one more than the most positions that an edge spans


def _children(graph: DeltaGraph) -> _Children:
    """The children of a DAG, cached in its tables."""
    if _Children not in graph.tables:
        blocks = ordered_blocks(graph)
        rows = sorted_rows(blocks.edge_col, blocks.edge_row, graph.num_nodes)
        held = np.ones(len(graph.sizes), np.int64)
        back = blocks.edge_row - blocks.edge_col + 1
        np.maximum.at(held, graph.block[graph.row[blocks.edge]], back)
        edge = blocks.edge[rows.entry]
        graph.tables[_Children] = _Children(rows.ptr, rows.col, edge, held)
    return graph.tables[_Children]


def _scale(call: Call) -> np.ndarray:
    """The factor of squared errors in the surprise, [heads]; empty without surprise."""
    surprise, value = call.inputs.surprise, call.inputs.value
    if surprise is None:
        return value.new_empty(0).numpy()
    return (1 / (surprise * max(value.size(2), 1))).numpy()


def _moves(call: Call) -> tuple[np.ndarray, np.ndarray]:
    """The edges' weights, [E, heads, 1 or N], and if predictions are from the mean of
    the parents' states, their shares in it, [E, 1, 1], otherwise an empty array.
    """
    (weight,) = arrays(call.inputs.edge_weight)
    shares = np.empty(0)
    if call.inputs.prediction == "undecayed":
        shares = call.structure.shares
    shares = shares.astype(weight.dtype)[:, None, None]
    return (weight if weight.ndim == 3 else weight[:, :, None]), shares


def _width(value: np.ndarray) -> int:
    """The length of a row of a state, in whole vectors."""
    vector, _ = vector_lanes(value.dtype)
    return max(1, -(-value.shape[2] // vector)) * vector


def _costs(graph: DeltaGraph, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """The cost of each task (block, head)."""
    work = 0.3 * graph.sizes * key.shape[2] * _width(value)
    return np.repeat(work, value.shape[1])


def forward(call: Call) -> Tensor:
    """The output [V, heads, P]."""
    graph, children = call.structure, _children(call.structure)
    query, key, value, beta = arrays(*call.inputs[:4])
    out, width = np.empty_like(value), _width(value)
    held = int(children.held.max(initial=1))
    run(
        _forward_blocks,
        _costs(graph, key, value),
        ((held + 1) * key.shape[2] + 2) * width,
        value.dtype,
        *(ordered_blocks(graph), children, query, key, value, beta, *_moves(call)),
        *(_scale(call), out, width),
    )
    return torch.from_numpy(out)


def backward(call: Call, grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta, edge weight, and if given of surprise.

    With the adjoint Z of a state, a strength b and x = Z^T k, the adjoint of S' is
    Z - b k x^T - q e^T, where e is the adjoint of the query's error, if there is a
    surprise. If predictions are from the mean of the parents' states, Z is the adjoint
    of S', and the other terms are that of the mean.
    """
    graph, children = call.structure, _children(call.structure)
    query, key, value, beta = arrays(*call.inputs[:4])
    weight, shares = _moves(call)
    (V, heads, P), (groups, N), width = value.shape, key.shape[1:], _width(value)
    # The heads of a group write separate parts, which are summed below.
    dq, dk = (np.empty((V, heads, N), value.dtype) for _ in range(2))
    dv, d_beta, d_weight = (np.empty_like(x) for x in (value, beta, weight))
    d_scale = np.zeros((len(graph.sizes), heads), value.dtype)
    largest, held = (int(x.max(initial=1)) for x in (graph.sizes, children.held))
    vector, _ = vector_lanes(value.dtype)
    run(
        _backward_blocks,
        3 * _costs(graph, key, value),
        ((largest + (2 if shares.size else 1) * held + 1) * N + 2 * largest + 3) * width
        + (largest // vector + 1 + 2 * (N + vector)) * vector,
        value.dtype,
        *(ordered_blocks(graph), children, query, key, value, beta, weight, shares),
        *(_scale(call), *arrays(grad), dq, dk, dv, d_beta, d_weight, d_scale),
        *(width, largest),
    )
    shape = (V, groups, heads // groups, N)
    sums = (summed(x.reshape(shape), (2,)) for x in (dq, dk))
    d_weight = d_weight.reshape(call.inputs.edge_weight.shape)
    grads = [torch.from_numpy(x) for x in (*sums, dv, d_beta, d_weight)]
    surprise = call.inputs.surprise
    if surprise is not None:
        of_scale = torch.from_numpy(d_scale.sum(0))
        grads.append(-of_scale / (surprise.square() * max(P, 1)))
    return tuple(grads)


@jit
def _gather(  # type: ignore[no-untyped-def]
    target, states, ring, size, start, i, ptr, other, edge, weight, h, more,
):  # fmt: skip
    """Sets a state to the weighted sum of those of its parents (or children), in a ring
    buffer; with `more`, adds the sum to it.
    """
    begin, end, part = ptr[i], ptr[i + 1], size // weight.shape[2]
    if begin == end and not more:
        clear(target, size)
    for x in range(begin, end):
        row = states + (other[x] - start) % ring * size
        add = more or x > begin
        for c in range(weight.shape[2]):
            w = splat(weight[edge[x], h, c])
            if add:
                for at in range(c * part, (c + 1) * part, lanes(target)):
                    store(target + at, fma(w, load(row + at), load(target + at)))
            else:
                for at in range(c * part, (c + 1) * part, lanes(target)):
                    store(target + at, w * load(row + at))


@jit
def _read(state, q, k, v, error, surprise, num_keys, P, width):  # type: ignore[no-untyped-def]
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
def _excess(surprise, width, scale, h, most):  # type: ignore[no-untyped-def]
    """A node's surprise, whose sigmoid is the share of beta that is used; or `most`."""
    if scale.shape[0] == 0:
        return most
    return inner_product(surprise, surprise, width) * scale[h]


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
    first, last, stop, scratch, blocks, children, query, key, value, beta, weight,
    shares, scale, out, width,
):  # fmt: skip
    _, heads, P = value.shape
    _, groups, num_keys = key.shape
    size, one, most = num_keys * width, value.dtype.type(1), value.dtype.type(np.inf)
    error = pointer(scratch)
    surprise, mean = error + width, error + 2 * width
    states, undecayed = mean + size, shares.shape[0] > 0
    for task in range(first, last):
        block, h = task // heads, task % heads
        start, ring = blocks.ptr[block], children.held[block]
        for i in range(start, blocks.ptr[block + 1]):
            if stopped(stop):
                return
            u = blocks.node[i]
            row = (u * groups + h // (heads // groups)) * num_keys
            q, k = pointer(query) + row, pointer(key) + row
            row = (u * heads + h) * P
            v, y = pointer(value) + row, pointer(out) + row
            state = states + (i - start) % ring * size
            _gather(
                state, states, ring, size, start, i, blocks.edge_ptr, blocks.edge_col,
                blocks.edge, weight, h, False,
            )  # fmt: skip
            known = state
            if undecayed:
                known = mean
                _gather(
                    mean, states, ring, size, start, i, blocks.edge_ptr,
                    blocks.edge_col, blocks.edge, shares, 0, False,
                )  # fmt: skip
            _read(known, q, k, v, error, surprise, num_keys, P, width)
            x = _excess(surprise, width, scale, h, most)
            strength = beta[u, h] * _sigmoid(x, one)
            _write(state, k, error, num_keys, width, strength)
            # The write changes what the query reads by q^T k times strength * error.
            agree = one - one
            for a in range(num_keys):
                agree += q[a] * k[a]
            agree *= strength
            if undecayed:  # the query has read the mean so far, not the state
                agree = one - one
                _read(state, q, k, v, error, surprise, num_keys, P, width)
            for p in range(0, P, lanes(v)):
                before = load_part(v + p, P - p) - load(surprise + p)
                store_part(y + p, fma(splat(agree), load(error + p), before), P - p)


@jit
def _backward_blocks(  # type: ignore[no-untyped-def]
    first, last, stop, scratch, blocks, children, query, key, value, beta, weight,
    shares, scale, grad, dq, dk, dv, d_beta, d_weight, d_scale, width, largest,
):  # fmt: skip
    _, heads, P = value.shape
    _, groups, num_keys = key.shape
    size, one, most = num_keys * width, value.dtype.type(1), value.dtype.type(np.inf)
    # For all nodes of a block: S, errors, surprises; the rest is for one node.
    states = pointer(scratch)
    step = lanes(states)
    errors = states + largest * size
    surprises = errors + largest * width
    excess = surprises + largest * width
    dy = excess + (largest // step + 1) * step
    d_error, d_read = dy + width, dy + 2 * width
    to_query = dy + 3 * width
    to_key = to_query + (num_keys + step) * step
    mean = to_key + (num_keys + step) * step
    adjoints, undecayed = mean + size, shares.shape[0] > 0
    part = size // weight.shape[2]
    for task in range(first, last):
        block, h = task // heads, task % heads
        g = h // (heads // groups)
        start, end = blocks.ptr[block], blocks.ptr[block + 1]
        ring = children.held[block]
        # Adjoints of the means of parents' states, if predictions are from these.
        predictions = adjoints + ring * size
        for i in range(start, end):
            if stopped(stop):
                return
            u, n = blocks.node[i], i - start
            row = (u * groups + g) * num_keys
            q, k = pointer(query) + row, pointer(key) + row
            state, error, surprise = (
                states + n * size, errors + n * width, surprises + n * width
            )  # fmt: skip
            _gather(
                state, states, largest, size, start, i, blocks.edge_ptr,
                blocks.edge_col, blocks.edge, weight, h, False,
            )  # fmt: skip
            known = state
            if undecayed:
                known = mean
                _gather(
                    mean, states, largest, size, start, i, blocks.edge_ptr,
                    blocks.edge_col, blocks.edge, shares, 0, False,
                )  # fmt: skip
            v = pointer(value) + (u * heads + h) * P
            _read(known, q, k, v, error, surprise, num_keys, P, width)
            excess[n] = _excess(surprise, width, scale, h, most)
            strength = beta[u, h] * _sigmoid(excess[n], one)
            _write(state, k, error, num_keys, width, strength)
        d_scale[block, h] = one - one
        for i in range(end - 1, start - 1, -1):
            if stopped(stop):
                return
            u, n = blocks.node[i], i - start
            row = (u * groups + g) * num_keys
            q, k = pointer(query) + row, pointer(key) + row
            row = (u * heads + h) * P
            for p in range(0, width, step):
                store(dy + p, load_part(pointer(grad) + (row + p), P - p))
            state, error, surprise = (
                states + n * size, errors + n * width, surprises + n * width
            )  # fmt: skip
            share = _sigmoid(excess[n], one)
            strength = share * beta[u, h]
            adjoint = adjoints + n % ring * size
            _gather(
                adjoint, adjoints, ring, size, start, i, children.ptr, children.child,
                children.edge, weight, h, False,
            )  # fmt: skip
            if undecayed:
                _gather(
                    adjoint, predictions, ring, size, start, i, children.ptr,
                    children.child, children.edge, shares, 0, True,
                )  # fmt: skip
            _read_back(
                state, adjoint, q, k, dy, error, d_error, to_query, to_key, strength,
                num_keys, width,
            )  # fmt: skip
            of_strength = inner_product(d_error, error, width)
            d_beta[u, h] = share * of_strength
            of_surprise = one - one
            if scale.shape[0] > 0:
                slope = of_strength * strength * _sigmoid(-excess[n], one)
                d_scale[block, h] += slope * inner_product(surprise, surprise, width)
                of_surprise = (slope + slope) * scale[h]
            for p in range(0, width, step):
                by_key = splat(strength) * load(d_error + p)
                by_query = splat(of_surprise) * load(surprise + p)
                store(d_error + p, by_key)
                store(d_read + p, by_query)
                store_part(pointer(dv) + (row + p), by_key + by_query, P - p)
            known, of_known, written = state, adjoint, strength
            if undecayed:
                known, of_known = mean, predictions + n % ring * size
                written = one - one
                _gather(
                    mean, states, largest, size, start, i, blocks.edge_ptr,
                    blocks.edge_col, blocks.edge, shares, 0, False,
                )  # fmt: skip
                clear(of_known, size)
            _mend_back(
                known, of_known, q, k, error, d_error, d_read, to_query, to_key,
                written, num_keys, width,
            )  # fmt: skip
            row = (u * heads + h) * num_keys
            for a in range(0, num_keys, step):
                left, at = num_keys - a, a * step
                store_part(pointer(dq) + (row + a), row_totals(to_query + at), left)
                store_part(pointer(dk) + (row + a), row_totals(to_key + at), left)
            for x in range(blocks.edge_ptr[i], blocks.edge_ptr[i + 1]):
                before = states + (blocks.edge_col[x] - start) * size
                for c in range(weight.shape[2]):
                    d_weight[blocks.edge[x], h, c] = inner_product(
                        adjoint + c * part, before + c * part, part
                    )


@jit
def _read_back(  # type: ignore[no-untyped-def]
    state, adjoint, q, k, dy, error, found, to_query, to_key, strength, num_keys, width,
):  # fmt: skip
    """Adds q dy^T to the adjoint Z of S, and sets `found` to Z^T k. Sets the gradients
    of the query from reading S and of the key from writing, as vectors to be summed.
    """
    clear(found, width)
    b, step = splat(strength), lanes(state)
    for a in range(num_keys):
        of_query, of_key = zeros(state), zeros(state)
        by_query, by_key = splat(q[a]), splat(k[a])
        at = a * width
        for p in range(0, width, step):
            y = load(dy + p)
            z = fma(by_query, y, load(adjoint + at))
            store(adjoint + at, z)
            store(found + p, fma(by_key, z, load(found + p)))
            of_query = fma(load(state + at), y, of_query)
            of_key = fma(load(error + p), z, of_key)
            at += step
        store(to_query + a * step, of_query)
        store(to_key + a * step, b * of_key)


@jit
def _mend_back(  # type: ignore[no-untyped-def]
    state, adjoint, q, k, error, d_error, d_surprise, to_query, to_key, strength,
    num_keys, width,
):  # fmt: skip
    """Adds the terms of predictions, by key and query, to the adjoint of what they have
    read and to their own gradients. They have read S' = S - strength * k error^T, for
    the state S; if it is a mean instead, the strength is zero.
    """
    step = lanes(state)
    for a in range(num_keys):
        of_query, of_key = load(to_query + a * step), load(to_key + a * step)
        by_query, by_key = splat(q[a]), splat(k[a])
        written = splat(strength * k[a])
        at = a * width
        for p in range(0, width, step):
            before = load(state + at) - written * load(error + p)
            x, e = load(d_error + p), load(d_surprise + p)
            of_key = of_key - before * x
            of_query = of_query - before * e
            store(adjoint + at, load(adjoint + at) - fma(by_key, x, by_query * e))
            at += step
        store(to_query + a * step, of_query)
        store(to_key + a * step, of_key)
