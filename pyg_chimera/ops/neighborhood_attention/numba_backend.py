"""Attention on the CPU: jitted, one task per block of nodes.

A node's logits, one per source, are computed in whole vectors and stay in the cache
until the values are summed, as do those of a second map. Only the logarithm of the sum
of exponentials is saved. The backward pass first recomputes the weights, node by node,
with the gradients of logits and queries; then it computes the gradients of keys and
values, source by source, so that no two tasks add to the same memory.
"""

import math
from typing import NamedTuple

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


class _Operands(NamedTuple):
    """The inputs, for several maps of H heads."""

    query: np.ndarray  #: [V, maps * H, N]
    key: np.ndarray  #: [V, maps * G, N]
    value: np.ndarray  #: [V, G, P]
    bias: np.ndarray  #: [E, maps * H], without a bias no rows
    contrast: np.ndarray  #: [H], for one map empty
    scale: np.floating
    epsilon: np.floating
    padding: np.ndarray  #: a vector of zeros, and one of minus infinities


class _Gradients(NamedTuple):
    """What the backward pass computes node by node."""

    weight: np.ndarray  #: [E, H], not a gradient: by these, values are summed
    logits: np.ndarray  #: [E, maps * H]
    query: np.ndarray  #: [V, maps * H, N]
    contrast: np.ndarray  #: [V, H], each node's share


def why_not(call: Call) -> str | None:
    """It supports all calls."""


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, H, P], and each map's logarithms of sums, to base two."""
    query, key, value = call.inputs[:3]
    heads = query.size(1) * value.size(1) // key.size(1)
    out = value.new_empty(value.size(0), heads, value.size(2))
    kept = value.new_empty(query.shape[:2])
    _run(_forward, call, call.structure.sources, 1.0, _operands(call), out, kept)
    return out, (kept,)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of query, key, value and, if given, bias and contrast."""
    query, key, value, bias, contrast = call.inputs[:5]
    num_edges, (num_nodes, heads, _) = call.inputs.edge_index.size(1), grad.shape
    dquery, dkey, dvalue = (x.new_empty(x.shape) for x in (query, key, value))
    weight = query.new_empty(num_edges, heads)
    dlogits = query.new_empty(num_edges, query.size(1))
    of_contrast = query.new_empty(0 if contrast is None else num_nodes, heads)
    sources, targets = call.structure.sources, call.structure.targets
    x = _operands(call)
    d = _Gradients(*arrays(weight, dlogits, dquery, of_contrast))
    _run(_backward_nodes, call, sources, 2.0, x, *saved, grad, d)
    one = x.query.dtype.type(1)
    _run(_backward_sources, call, targets, 0.5, weight, grad, one, dvalue)
    _run(_backward_sources, call, targets, 0.5, dlogits, query, x.scale, dkey)
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
    scratch = step * step + 4 * (edges.most + step)
    taken = (arrays(x)[0] if isinstance(x, Tensor) else x for x in args)
    run(kernel, work * per_edge, scratch, dtype, edges, *taken)


def _operands(call: Call) -> _Operands:
    query, key, value, bias, contrast = call.inputs[:5]
    bias = query.new_empty(0, query.size(1)) if bias is None else bias
    contrast = query.new_empty(0) if contrast is None else contrast
    dtype = query.numpy().dtype
    padding = np.repeat([0, -np.inf], vector_lanes(dtype)[0]).astype(dtype)
    rest = dtype.type(call.inputs.scale), dtype.type(EPSILON), padding
    return _Operands._make([*arrays(query, key, value, bias, contrast), *rest])


@jit
def _forward(begin, end, stop, scratch, edges, x, out, kept):
    (num_nodes, heads, _), groups = out.shape, x.value.shape[1]
    maps, tile = x.query.shape[1] // heads, pointer(scratch)
    room = edges.most + lanes(tile)
    s = tile + lanes(tile) * lanes(tile)
    zero, one = x.query.dtype.type(0), x.query.dtype.type(1)
    for task in range(begin, end):
        if stopped(stop):
            return
        for i in range(task * _BLOCK, min((task + 1) * _BLOCK, num_nodes)):
            node = edges.node[edges.ptr[i] : edges.ptr[i + 1]]
            n = len(node)
            for h in range(heads):
                g = h * groups // heads
                for m in range(maps):
                    at, row = m * heads + h, s + m * room
                    top = _logits(row, i, at, m * groups + g, edges, x, tile)
                    kept[i, at] = _softmax(row, n, top, one)
                count, whole = n, one
                if maps == 2:
                    whole = x.epsilon + _difference(
                        s, s, s + room, n, x.contrast[h], zero
                    )
                elif kept[i, h] == np.inf:  # no sources with finite logits
                    count = 0
                target, scale = _row(out, i, h), one / whole
                _combine(target, s, x.value, g, node[:count], scale, False)


@jit
def _backward_nodes(begin, end, stop, scratch, edges, x, kept, grad, d):
    (num_nodes, heads, _), groups = grad.shape, x.value.shape[1]
    maps, tile = x.query.shape[1] // heads, pointer(scratch)
    step = lanes(tile)
    room, s = edges.most + step, tile + step * step
    of_weight, w, zero = s + 2 * room, s + 3 * room, x.query.dtype.type(0)
    for task in range(begin, end):
        if stopped(stop):
            return
        for i in range(task * _BLOCK, min((task + 1) * _BLOCK, num_nodes)):
            node = edges.node[edges.ptr[i] : edges.ptr[i + 1]]
            edge = edges.edge[edges.ptr[i] : edges.ptr[i + 1]]
            n = len(node)
            for h in range(heads):
                g = h * groups // heads
                for m in range(maps):
                    at, row = m * heads + h, s + m * room
                    _logits(row, i, at, m * groups + g, edges, x, tile)
                    for t in range(0, n, step):
                        store(row + t, exp2(load(row + t) - splat(kept[i, at])))
                _products(of_weight, _row(grad, i, h), x.value, g, node, tile)
                if maps == 2:
                    d.contrast[i, h] = _difference_back(
                        s, s + room, of_weight, w, n, x.contrast[h], x.epsilon, zero
                    )
                else:
                    _softmax_back(s, of_weight, w, n)
                for t in range(n):
                    d.weight[edge[t], h] = w[t]
                for m in range(maps):
                    at, row = m * heads + h, s + m * room
                    for t in range(n):
                        d.logits[edge[t], at] = row[t]
                    target = _row(d.query, i, at)
                    _combine(target, row, x.key, m * groups + g, node, x.scale, False)


@jit
def _backward_sources(begin, end, stop, scratch, edges, weight, rows, scale, out):
    """For each source, sums its targets' rows, with weights."""
    heads, (num_nodes, groups, _), s = rows.shape[1], out.shape, pointer(scratch)
    for task in range(begin, end):
        if stopped(stop):
            return
        for j in range(task * _BLOCK, min((task + 1) * _BLOCK, num_nodes)):
            node = edges.node[edges.ptr[j] : edges.ptr[j + 1]]
            edge = edges.edge[edges.ptr[j] : edges.ptr[j + 1]]
            for h in range(heads):
                g = h * groups // heads
                for t in range(len(edge)):
                    s[t] = weight[edge[t], h]
                more = h > g * heads // groups
                _combine(_row(out, j, g), s, rows, h, node, scale, more)


@inlined
def _row(x, i, h):
    """A pointer to a row of [nodes, heads, channels]."""
    return pointer(x) + (i * x.shape[1] + h) * x.shape[2]


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
def _logits(s, i, h, g, edges, x, tile):
    """Sets s to logits to base two, padded with minus infinity; returns the largest,
    or any if some are NaN.
    """
    start, end = edges.ptr[i], edges.ptr[i + 1]
    _products(s, _row(x.query, i, h), x.key, g, edges.node[start:end], tile)
    step, n, ends = lanes(s), end - start, pointer(x.padding)
    unit, top = x.query.dtype.type(1 / LOG_2), load(ends + step)
    for t in range(0, n, step):
        v = load(s + t) * splat(x.scale * unit)
        if x.bias.shape[0] > 0:
            for j in range(t, min(t + step, n)):
                tile[j - t] = x.bias[edges.edge[start + j], h]
            v = fma(load_part(tile, n - t), splat(unit), v)
        if n - t < step:
            v = v + load(ends + (step - n + t))
        store(s + t, v)
        top = larger(top, v)
    return largest(top)


@inlined
def _products(target, y, x, h, node, tile):
    """The inner products of the row y with those of nodes, zero-padded to vectors."""
    step, n, size = lanes(y), len(node), x.shape[2]
    for t in range(0, n, step):
        count = min(step, n - t)
        for i in range(count):
            row = _row(x, node[t + i], h)
            sums = zeros(y)
            for c in range(0, size, step):
                sums = fma(
                    load_part(y + c, size - c), load_part(row + c, size - c), sums
                )
            store(tile + i * step, sums)
        store(target + t, first(row_totals(tile), count))


@inlined
def _combine(target, w, x, h, node, scale, more):
    """The weighted sum of the rows of nodes; with `more`, added to the target.

    In four independent sums, to hide the latency of additions.
    """
    step, n, size, c = lanes(target), len(node), x.shape[2], 0
    while size - c >= 4 * step:
        s0, s1, s2, s3 = zeros(w), zeros(w), zeros(w), zeros(w)
        for t in range(n):
            row, v = _row(x, node[t], h) + c, splat(w[t])
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
        for t in range(0, n - 3, 4):
            s0 = fma(splat(w[t]), load_part(_row(x, node[t], h) + c, left), s0)
            s1 = fma(splat(w[t + 1]), load_part(_row(x, node[t + 1], h) + c, left), s1)
            s2 = fma(splat(w[t + 2]), load_part(_row(x, node[t + 2], h) + c, left), s2)
            s3 = fma(splat(w[t + 3]), load_part(_row(x, node[t + 3], h) + c, left), s3)
        for t in range(n - n % 4, n):
            s0 = fma(splat(w[t]), load_part(_row(x, node[t], h) + c, left), s0)
        _put(target + c, (s0 + s1) + (s2 + s3), left, scale, more)
        c += step


@inlined
def _put(target, v, n, scale, more):
    """Writes a vector, or the n numbers that are left of a row."""
    v = v * splat(scale)
    store_part(target, load_part(target, n) + v if more else v, n)
