"""Attention on the CPU: jitted, one task per block of nodes.

A node's logits, one per source, are computed in whole vectors and stay in the cache
until the values are summed, as do those of a second map. Only the logarithm of the sum
of exponentials is saved. The backward pass first recomputes the weights, node by node,
with the gradients of logits and queries; then it computes the gradients of keys and
values, source by source, so that no two tasks add to the same memory.
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
from pyg_chimera.ops.common.vector_kit import LOG_2, clear, exp2
from pyg_chimera.ops.neighborhood_attention.pattern import EPSILON, Neighbours

DEVICES = ("cpu",)

#: Nodes per task.
_BLOCK = 32


def why_not(call: Call) -> str | None:
    """It supports all calls."""


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, H, P], and each map's logarithms of sums, to base two."""
    query, key, value = call.inputs[:3]
    heads = query.size(1) * value.size(1) // key.size(1)
    out = value.new_empty(value.size(0), heads, value.size(2))
    kept = value.new_empty(query.shape[:2])
    _run(
        _forward, call, call.structure.sources, 1.0, *_shared(call), *arrays(out, kept)
    )
    return out, (kept,)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of query, key, value and, if given, bias and contrast."""
    query, key, value, bias, contrast = call.inputs[:5]
    num_edges, (num_nodes, heads, _) = call.inputs.edge_index.size(1), grad.shape
    dquery, dkey, dvalue = (x.new_empty(x.shape) for x in (query, key, value))
    weight = query.new_empty(num_edges, heads)
    dlogits = query.new_empty(num_edges, query.size(1))
    of_contrast = query.new_empty(0 if contrast is None else num_nodes, heads)
    _run(
        _backward_nodes, call, call.structure.sources, 2.0, *_shared(call),
        *arrays(*saved, grad, weight, dlogits, dquery, of_contrast),
    )  # fmt: skip
    one = query.new_ones(()).numpy()[()]
    for share, rows, scale, target in (
        (weight, grad, one, dvalue), (dlogits, query, _scale(call), dkey)
    ):  # fmt: skip
        _run(
            _backward_sources, call, call.structure.targets, 0.5,
            *arrays(share, rows), scale, *arrays(target),
        )  # fmt: skip
    grads = [dquery, dkey, dvalue]
    if bias is not None:
        grads.append(dlogits)
    if contrast is not None:
        grads.append(of_contrast.sum(0))
    return tuple(grads)


def _run(kernel, call: Call, edges: Neighbours, cost: float, *args) -> None:
    """Runs a kernel on blocks of nodes."""
    query, _, value = call.inputs[:3]
    num_nodes, heads = query.size(0), query.size(1)
    block = np.append(np.arange(0, num_nodes, _BLOCK), num_nodes)
    # Nodes take time even without edges, as they are read and written.
    work = np.diff(edges.ptr[block]) + np.diff(block)
    per_edge = cost * heads * (2 + (query.size(2) + value.size(2)) / 16)
    dtype = query.numpy().dtype
    step = vector_lanes(dtype)[0]
    # Scratch: a square of vectors, and rows with one number per edge of a node.
    room = edges.most + step
    run(
        kernel, work * per_edge, step * step + 4 * room, dtype,
        block, room, edges.ptr, edges.node, edges.edge, *args,
    )  # fmt: skip


def _scale(call: Call) -> np.floating:
    return call.inputs.query.numpy().dtype.type(call.inputs.scale)


def _shared(call: Call) -> list:
    """The operands of both passes over targets; without a bias, it has no rows."""
    query, key, value, bias, contrast = call.inputs[:5]
    bias = query.new_empty(0, query.size(1)) if bias is None else bias
    contrast = query.new_empty(0) if contrast is None else contrast
    dtype = query.numpy().dtype
    padding = np.repeat([0, -np.inf], vector_lanes(dtype)[0]).astype(dtype)
    return [
        *arrays(query, key, value, bias, contrast), padding, _scale(call),
        dtype.type(EPSILON),
    ]  # fmt: skip


@jit
def _forward(
    begin, end, stop, scratch, block, room, ptr, node, edge, query, key, value, bias,
    contrast, padding, scale, epsilon, out, kept,
):  # fmt: skip
    N, groups, (_, heads, P) = query.shape[2], value.shape[1], out.shape
    maps, tile = query.shape[1] // heads, pointer(scratch)
    q, k, v, y, b = (
        pointer(query), pointer(key), pointer(value), pointer(out), pointer(bias)
    )  # fmt: skip
    s = tile + lanes(tile) * lanes(tile)
    zero, one = query.dtype.type(0), query.dtype.type(1)
    unit, ends = query.dtype.type(1 / LOG_2), pointer(padding)
    for task in range(begin, end):
        if stopped(stop):
            return
        for i in range(block[task], block[task + 1]):
            start, n = ptr[i], ptr[i + 1] - ptr[i]
            for h in range(heads):
                g = h * groups // heads
                for m in range(maps):
                    at, row = m * heads + h, s + m * room
                    top = _logits(
                        row, q + (i * maps * heads + at) * N, k + (m * groups + g) * N,
                        maps * groups * N, N, node, start, n, tile, ends, scale, unit,
                        b, bias.shape[0] > 0, edge, at, maps * heads,
                    )  # fmt: skip
                    kept[i, at] = _softmax(row, n, top, one)
                count, whole = n, one
                if maps == 2:
                    whole = epsilon + _difference(s, s, s + room, n, contrast[h], zero)
                elif kept[i, h] == np.inf:  # no sources with finite logits
                    count = 0
                _combine(
                    y + (i * heads + h) * P, s, v + g * P, groups * P, P, node, start,
                    count, one / whole, False,
                )  # fmt: skip


@jit
def _backward_nodes(
    begin, end, stop, scratch, block, room, ptr, node, edge, query, key, value, bias,
    contrast, padding, scale, epsilon, kept, grad, weight, dlogits, dquery, dcontrast,
):  # fmt: skip
    N, groups, (_, heads, P) = query.shape[2], value.shape[1], grad.shape
    maps, tile = query.shape[1] // heads, pointer(scratch)
    q, k, v, dy, dq, b = (
        pointer(query), pointer(key), pointer(value), pointer(grad), pointer(dquery),
        pointer(bias),
    )  # fmt: skip
    step = lanes(tile)
    s = tile + step * step
    d, w, zero = s + 2 * room, s + 3 * room, query.dtype.type(0)
    unit, ends = query.dtype.type(1 / LOG_2), pointer(padding)
    for task in range(begin, end):
        if stopped(stop):
            return
        for i in range(block[task], block[task + 1]):
            start, n = ptr[i], ptr[i + 1] - ptr[i]
            for h in range(heads):
                g = h * groups // heads
                for m in range(maps):
                    at, row = m * heads + h, s + m * room
                    _logits(
                        row, q + (i * maps * heads + at) * N, k + (m * groups + g) * N,
                        maps * groups * N, N, node, start, n, tile, ends, scale, unit,
                        b, bias.shape[0] > 0, edge, at, maps * heads,
                    )  # fmt: skip
                    for t in range(0, n, step):
                        store(row + t, exp2(load(row + t) - splat(kept[i, at])))
                _products(
                    d, dy + (i * heads + h) * P, v + g * P, groups * P, P, node, start,
                    n, tile,
                )  # fmt: skip
                if maps == 2:
                    dcontrast[i, h] = _difference_back(
                        s, s + room, d, w, n, contrast[h], epsilon, zero
                    )
                else:
                    _softmax_back(s, d, w, n)
                for t in range(n):
                    weight[edge[start + t], h] = w[t]
                for m in range(maps):
                    at, row = m * heads + h, s + m * room
                    for t in range(n):
                        dlogits[edge[start + t], at] = row[t]
                    _combine(
                        dq + (i * maps * heads + at) * N, row,
                        k + (m * groups + g) * N, maps * groups * N, N, node, start, n,
                        scale, False,
                    )  # fmt: skip


@jit
def _backward_sources(
    begin, end, stop, scratch, block, room, ptr, node, edge, weight, rows, scale, out,
):  # fmt: skip
    """For each source, sums its targets' rows, with weights."""
    (_, heads, size), groups = rows.shape, out.shape[1]
    s, x, y = pointer(scratch), pointer(rows), pointer(out)
    for task in range(begin, end):
        if stopped(stop):
            return
        for j in range(block[task], block[task + 1]):
            start, n = ptr[j], ptr[j + 1] - ptr[j]
            for h in range(heads):
                g = h * groups // heads
                for t in range(n):
                    s[t] = weight[edge[start + t], h]
                more = h > g * heads // groups
                _combine(
                    y + (j * groups + g) * size, s, x + h * size, heads * size, size,
                    node, start, n, scale, more,
                )  # fmt: skip


@inlined
def _softmax(s, n, top, one):
    """Turns logits with maximum `top` into weights; zeros if all are minus infinity.

    Returns the logarithm of the sum, or infinity in that case.
    """
    if top == -np.inf:  # unless logits are NaN, which a maximum ignores
        sums = splat(top)
        for t in range(0, n, lanes(s)):
            sums = sums + load(s + t)
        top = total(sums)
        if top == -np.inf:
            clear(s, n)
            return -top
    sums = zeros(s)
    for t in range(0, n, lanes(s)):
        e = exp2(load(s + t) - splat(top))
        store(s + t, e)
        sums = sums + e
    whole = total(sums)
    for t in range(0, n, lanes(s)):
        store(s + t, load(s + t) * splat(one / whole))
    return top + math.log2(whole)


@inlined
def _softmax_back(s, d, w, n):
    """Moves weights from s to w, and sets s to the gradients of the logits."""
    sums = zeros(s)
    for t in range(0, n, lanes(s)):
        p = load(s + t)
        store(w + t, p)
        sums = fma(p, load(d + t), sums)
    mean = splat(total(sums))
    for t in range(0, n, lanes(s)):
        store(s + t, load(s + t) * (load(d + t) - mean))


@inlined
def _difference(w, first, second, n, contrast, zero):
    """Sets w to the positive part of the maps' difference, and returns its sum."""
    whole = zero
    for t in range(n):
        x = first[t] - contrast * second[t]
        w[t] = zero if x < zero else x  # NaN propagates
        whole += w[t]
    return whole


@inlined
def _difference_back(first, second, d, w, n, contrast, epsilon, zero):
    """Sets w to the weights and both maps to the gradients of their logits; returns the
    gradient of the contrast.
    """
    whole = epsilon + _difference(w, first, second, n, contrast, zero)
    mean = of_first = of_second = zero
    for t in range(n):
        w[t] /= whole
        mean += w[t] * d[t]
    for t in range(n):
        d[t] = zero if w[t] <= zero else (d[t] - mean) / whole  # NaN propagates
        of_first += first[t] * d[t]
        of_second += second[t] * d[t]
    for t in range(n):
        first[t] *= d[t] - of_first
        second[t] *= contrast * (of_second - d[t])
    return -of_second


@inlined
def _logits(
    s, x, rows, stride, size, node, start, n, tile, ends, scale, unit, bias,
    biased, edge, h, heads,
):  # fmt: skip
    """Sets s to logits to base two, padded with minus infinity; returns the largest,
    or any if some are NaN.
    """
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
def _products(target, x, rows, stride, size, node, start, n, tile):
    """The inner products of x with the rows of n nodes, zero-padded to full vectors."""
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
def _combine(target, w, rows, stride, size, node, start, n, scale, more):
    """The weighted sum of the rows of n nodes; with `more`, added to the target.

    In four independent sums, to hide the latency of additions.
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
def _put(target, v, n, scale, more):
    """Writes a vector, or the n numbers that are left of a row."""
    v = v * splat(scale)
    store_part(target, load_part(target, n) + v if more else v, n)
