"""Attention on the CPU: jitted, one task per block of nodes.

A node's logits are computed in whole vectors, as many as it has sources, and stay in
the cache until the values are summed. Of the forward pass, only the logarithm of the
sum of exponentials is kept. The backward pass first computes the weights anew, node by
node, with the gradients of logits and queries; then the gradients of keys and values,
source by source, so that no two tasks add to the same place.
"""

import math

import numpy as np
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.numba_runtime import arrays, inlined, jit, run, stopped
from pyg_chimera.ops.common.simd import (
    first,
    fma,
    lanes,
    larger,
    largest,
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
from pyg_chimera.ops.common.vector_kit import LOG_2, exp2
from pyg_chimera.ops.neighborhood_attention.pattern import Neighbours

DEVICES = ("cpu",)

#: Nodes of a task.
_BLOCK = 32


def why_not(call: Call) -> str | None:
    """It computes everything."""


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, H, P], and logarithms of sums, to the base of two, [V, H]."""
    query, _, value = call.inputs[:3]
    out = value.new_empty(*query.shape[:2], value.size(2))
    kept = value.new_empty(query.shape[:2])
    _run(
        _forward, call, call.structure.sources, 1.0, *_shared(call), *arrays(out, kept)
    )
    return out, (kept,)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of query, key, value and, if there is one, bias."""
    query, key, value, bias = call.inputs[:4]
    dquery, dkey, dvalue = (x.new_empty(x.shape) for x in (query, key, value))
    weight, dlogits = (
        query.new_empty(call.inputs.edge_index.size(1), query.size(1)) for _ in range(2)
    )
    _run(
        _backward_nodes, call, call.structure.sources, 2.0,
        *_shared(call), *arrays(*saved, grad, weight, dlogits, dquery),
    )  # fmt: skip
    _run(
        _backward_sources, call, call.structure.targets, 1.0,
        *arrays(query, grad), _scale(call), *arrays(weight, dlogits, dkey, dvalue),
    )  # fmt: skip
    grads = (dquery, dkey, dvalue)
    return grads if bias is None else (*grads, dlogits)


def _run(kernel, call: Call, edges: Neighbours, cost: float, *args) -> None:  # type: ignore[no-untyped-def]
    """Runs a kernel on blocks of nodes."""
    query, key, value = call.inputs[:3]
    num_nodes, heads, groups = query.size(0), query.size(1), key.size(1)
    block = np.append(np.arange(0, num_nodes, _BLOCK), num_nodes)
    # A node has to be read and written, even one that has no edges.
    work = np.diff(edges.ptr[block]) + np.diff(block)
    per_edge = cost * heads * (2 + (query.size(2) + value.size(2)) / 16)
    dtype = query.numpy().dtype
    step = vector_lanes(dtype)[0]
    scratch = step * step + 2 * (edges.most + step)
    run(
        kernel, work * per_edge, scratch, dtype,
        block, groups, edges.ptr, edges.node, edges.edge, *args,
    )  # fmt: skip


def _scale(call: Call) -> np.floating:
    return call.inputs.query.numpy().dtype.type(call.inputs.scale)


def _shared(call: Call) -> list:
    """What both passes over the targets read. Without a bias, it has no rows."""
    query, key, value, bias = call.inputs[:4]
    bias = query.new_empty(0, query.size(1)) if bias is None else bias
    dtype = query.numpy().dtype
    padding = np.repeat([0, -np.inf], vector_lanes(dtype)[0]).astype(dtype)
    return [*arrays(query, key, value, bias), padding, _scale(call)]


@jit
def _forward(  # type: ignore[no-untyped-def]
    begin, end, stop, scratch, block, groups, ptr, node, edge, query, key, value, bias,
    padding, scale, out, kept,
):  # fmt: skip
    (_, heads, N), P = query.shape, value.shape[2]
    s, _, tile = _buffers(pointer(scratch), scratch.shape[0])
    q, k, v, y, b = (
        pointer(query), pointer(key), pointer(value), pointer(out), pointer(bias)
    )  # fmt: skip
    step, dtype = lanes(q), query.dtype
    zero, one = dtype.type(0), dtype.type(1)
    unit, ends = dtype.type(1 / LOG_2), pointer(padding)
    for task in range(begin, end):
        if stopped(stop):
            return
        for i in range(block[task], block[task + 1]):
            start, n = ptr[i], ptr[i + 1] - ptr[i]
            for h in range(heads):
                g, at = h * groups // heads, i * heads + h
                top = _logits(
                    s, q + at * N, k + g * N, groups * N, N, node, start, n, tile, ends,
                    scale, unit, b, bias.shape[0] > 0, edge, h, heads,
                )  # fmt: skip
                if top == -np.inf:  # nobody to attend to
                    kept[i, h] = np.inf
                    _combine(y + at * P, s, v, 0, P, node, start, 0, zero, False)
                    continue
                sums = zeros(q)
                for t in range(0, n, step):
                    e = exp2(load(s + t) - splat(top))
                    store(s + t, e)
                    sums = sums + e
                whole = total(sums)
                kept[i, h] = top + math.log2(whole)
                _combine(
                    y + at * P, s, v + g * P, groups * P, P, node, start, n,
                    one / whole, False,
                )  # fmt: skip


@jit
def _backward_nodes(  # type: ignore[no-untyped-def]
    begin, end, stop, scratch, block, groups, ptr, node, edge, query, key, value, bias,
    padding, scale, kept, grad, weight, dlogits, dquery,
):  # fmt: skip
    (_, heads, N), P = query.shape, value.shape[2]
    s, d, tile = _buffers(pointer(scratch), scratch.shape[0])
    q, k, v, dy, dq, b = (
        pointer(query), pointer(key), pointer(value), pointer(grad), pointer(dquery),
        pointer(bias),
    )  # fmt: skip
    w, dw = pointer(weight), pointer(dlogits)
    step, dtype = lanes(q), query.dtype
    unit, ends = dtype.type(1 / LOG_2), pointer(padding)
    for task in range(begin, end):
        if stopped(stop):
            return
        for i in range(block[task], block[task + 1]):
            start, n = ptr[i], ptr[i + 1] - ptr[i]
            for h in range(heads):
                g, at = h * groups // heads, i * heads + h
                _logits(
                    s, q + at * N, k + g * N, groups * N, N, node, start, n, tile, ends,
                    scale, unit, b, bias.shape[0] > 0, edge, h, heads,
                )  # fmt: skip
                _products(
                    d, dy + at * P, v + g * P, groups * P, P, node, start, n, tile
                )
                sums = zeros(q)
                for t in range(0, n, step):
                    p = exp2(load(s + t) - splat(kept[i, h]))
                    store(s + t, p)
                    sums = fma(p, load(d + t), sums)
                mean = splat(total(sums))
                for t in range(0, n, step):
                    store(d + t, load(s + t) * (load(d + t) - mean))
                for t in range(n):
                    e = edge[start + t] * heads + h
                    w[e] = s[t]
                    dw[e] = d[t]
                _combine(
                    dq + at * N, d, k + g * N, groups * N, N, node, start, n, scale,
                    False,
                )  # fmt: skip


@jit
def _backward_sources(  # type: ignore[no-untyped-def]
    begin, end, stop, scratch, block, groups, ptr, node, edge, query, grad, scale,
    weight, dlogits, dkey, dvalue,
):  # fmt: skip
    (_, heads, N), P = query.shape, grad.shape[2]
    s, d, _ = _buffers(pointer(scratch), scratch.shape[0])
    q, dy, dk, dv = pointer(query), pointer(grad), pointer(dkey), pointer(dvalue)
    w, dw = pointer(weight), pointer(dlogits)
    one = query.dtype.type(1)
    for task in range(begin, end):
        if stopped(stop):
            return
        for j in range(block[task], block[task + 1]):
            start, n = ptr[j], ptr[j + 1] - ptr[j]
            for h in range(heads):
                g = h * groups // heads
                at = j * groups + g
                for t in range(n):
                    e = edge[start + t] * heads + h
                    s[t] = w[e]
                    d[t] = dw[e]
                more = h > g * heads // groups
                _combine(
                    dv + at * P, s, dy + h * P, heads * P, P, node, start, n, one, more
                )
                _combine(
                    dk + at * N, d, q + h * N, heads * N, N, node, start, n, scale, more
                )


@jit
def _buffers(scratch, size):  # type: ignore[no-untyped-def]
    """Two rows with a number for each edge of a node, and a square of vectors."""
    square = lanes(scratch) * lanes(scratch)
    return scratch + square, scratch + (square + size) // 2, scratch


@inlined
def _logits(  # type: ignore[no-untyped-def]
    s, x, rows, stride, size, node, start, n, tile, ends, scale, unit, bias,
    biased, edge, h, heads,
):  # fmt: skip
    """To the base of two; minus infinity fills up the last vector. The largest one."""
    _products(s, x, rows, stride, size, node, start, n, tile)
    step = lanes(s)
    top = load(ends + step)
    for t in range(0, n, step):
        v = load(s + t) * splat(scale * unit)
        if biased:
            for i in range(t, min(t + step, n)):
                tile[i - t] = bias[edge[start + i] * heads + h]
            v = fma(load_part(tile, n - t), splat(unit), v)
        if n - t < step:
            v = v + load(ends + (step - n + t))
        store(s + t, v)
        top = larger(top, v)
    return largest(top)


@inlined
def _products(target, x, rows, stride, size, node, start, n, tile):  # type: ignore[no-untyped-def]
    """The inner products of x with the rows of n nodes; zeros fill the last vector."""
    step = lanes(x)
    for t in range(0, n, step):
        count = min(step, n - t)
        for i in range(count):
            row = rows + node[start + t + i] * stride
            sums = zeros(x)
            for c in range(0, size, step):
                sums = fma(
                    load_part(x + c, size - c), load_part(row + c, size - c), sums
                )
            store(tile + i * step, sums)
        store(target + t, first(row_totals(tile), count))


@inlined
def _combine(target, w, rows, stride, size, node, start, n, scale, more):  # type: ignore[no-untyped-def]
    """The sum of the rows of n nodes with weights; `more`, in addition to the target.

    In four sums: one has to wait for itself.
    """
    step, c = lanes(target), 0
    while size - c >= 4 * step:
        s0, s1, s2, s3 = zeros(w), zeros(w), zeros(w), zeros(w)
        for t in range(n):
            row = rows + (node[start + t] * stride + c)
            v = splat(w[t])
            s0 = fma(v, load(row), s0)
            s1 = fma(v, load(row + step), s1)
            s2 = fma(v, load(row + 2 * step), s2)
            s3 = fma(v, load(row + 3 * step), s3)
        _put(target + c, s0, step, scale, more)
        _put(target + (c + step), s1, step, scale, more)
        _put(target + (c + 2 * step), s2, step, scale, more)
        _put(target + (c + 3 * step), s3, step, scale, more)
        c += 4 * step
    while c < size:
        left = size - c
        s0, s1, s2, s3 = zeros(w), zeros(w), zeros(w), zeros(w)
        t = 0
        while t + 4 <= n:
            at = start + t
            s0 = fma(splat(w[t]), load_part(rows + (node[at] * stride + c), left), s0)
            at += 1
            s1 = fma(
                splat(w[t + 1]), load_part(rows + (node[at] * stride + c), left), s1
            )
            at += 1
            s2 = fma(
                splat(w[t + 2]), load_part(rows + (node[at] * stride + c), left), s2
            )
            at += 1
            s3 = fma(
                splat(w[t + 3]), load_part(rows + (node[at] * stride + c), left), s3
            )
            t += 4
        while t < n:
            at = start + t
            s0 = fma(splat(w[t]), load_part(rows + (node[at] * stride + c), left), s0)
            t += 1
        _put(target + c, (s0 + s1) + (s2 + s3), left, scale, more)
        c += step


@inlined
def _put(target, v, n, scale, more):  # type: ignore[no-untyped-def]
    """Writes what is left of a row of n more numbers, up to a vector."""
    v = v * splat(scale)
    store_part(target, load_part(target, n) + v if more else v, n)
