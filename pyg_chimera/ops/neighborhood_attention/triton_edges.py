r"""Attention along edges on a GPU: a program per tile of nodes and head.

The nodes of a tile visit their edges together, some of each at a time. In the forward
pass, the softmax is accumulated relative to the largest logit so far, and only the
logarithm of its sum, :math:`z_i`, is saved. In the backward pass, :math:`\alpha_{ij} =
e^{\ell_{ij} - z_i}` again, and

.. math::
    d\ell_{ij} = \alpha_{ij} (dy_i^{\top} v_j - dy_i^{\top} y_i), \quad
    dq_i = s \sum_{j} d\ell_{ij} k_j, \quad dk_j = s \sum_{i} d\ell_{ij} q_i, \quad
    dv_j = \sum_{i} \alpha_{ij} dy_i,

computed once by target (for queries) and once by source (for keys and values), with the
edges sorted accordingly, so that no two programs write to the same memory.

With a contrast, there are two maps, whose sums must be known before their difference,
so nodes go through their edges twice. With :math:`d\delta_{ij} = (dy_i^{\top} v_j -
dy_i^{\top} y_i) / (\sum_j \delta_{ij} + 10^{-6})` where the difference is positive, or
else zero, and :math:`t_i = \sum_j \alpha_{ij} d\delta_{ij}`, and likewise :math:`t'_i`,

.. math::
    d\ell_{ij} = \alpha_{ij} (d\delta_{ij} - t_i), \quad
    d\ell'_{ij} = -\lambda \alpha'_{ij} (d\delta_{ij} - t'_i), \quad
    d\lambda = -\sum_i t'_i.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_chimera.ops.common.triton_runtime import on_device_of
from pyg_chimera.ops.neighborhood_attention import pattern
from pyg_chimera.ops.neighborhood_attention.pattern import Neighbours, Pattern
from pyg_chimera.ops.structure.cache import table

__all__ = ["attend", "gradients"]

#: The most nodes per program, edges per node and step, and numbers gathered for them.
_NODES, _EDGES, _NUMBERS = 32, 8, 1024
_OPTIONS = {"num_warps": 4, "num_stages": 1}
_EPSILON = tl.constexpr(pattern.EPSILON)


class _Lists(NamedTuple):
    """The edges of each node on a device, int32; see `Neighbours`."""

    ptr: Tensor
    node: Tensor
    edge: Tensor

    @classmethod
    def of(cls, neighbours: Neighbours, device: torch.device) -> "_Lists":
        arrays = (neighbours.ptr, neighbours.node, neighbours.edge)
        return cls(*(torch.from_numpy(x.astype(np.int32)).to(device) for x in arrays))


def _lists(pattern: Pattern, device: torch.device) -> tuple[_Lists, _Lists]:
    """The sources and the targets of each node."""
    return _Lists.of(pattern.sources, device), _Lists.of(pattern.targets, device)


def attend(
    pattern: Pattern,
    scale: float,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    contrast: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, H, P], and what to save: the output, or the sums of differences of
    two maps, and the logarithms of each map's sums.
    """
    sources, _ = table(_lists, pattern, value.device)
    given = _operands(query, key, value, bias)
    (num_nodes, heads), (groups, channels) = query.shape[:2], value.shape[1:]
    log_sum = value.new_empty(num_nodes, heads)
    sizes = (query.size(2), channels, *_blocks(query, value))
    options = (scale, bias is not None)
    maps = 1 if contrast is None else 2
    out = value.new_empty(num_nodes, heads // maps, channels)
    with on_device_of(value):
        _softmax[_programs(sizes, query)](
            *given, log_sum, out, *sources, num_nodes, heads, key.size(1), *sizes,
            *options, contrast is None, **_OPTIONS,
        )  # fmt: skip
        if contrast is None:
            return out, (out, log_sum)
        whole = value.new_empty(out.shape[:2])
        _difference[_programs(sizes, out)](
            *given, contrast, log_sum, whole, out, *sources, num_nodes, heads // 2,
            groups, *sizes, *options, **_OPTIONS,
        )  # fmt: skip
        return out, (whole, log_sum)


def gradients(
    pattern: Pattern,
    scale: float,
    saved: tuple[Tensor, ...],
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    contrast: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of query, key, value, bias and contrast."""
    sources, targets = table(_lists, pattern, value.device)
    given = _operands(query, key, value, bias)
    (kept, log_sum), (num_nodes, heads) = saved, grad.shape[:2]
    dq, dk, dv, dbias = (torch.empty_like(x) for x in given)
    if contrast is None:
        own = (grad * kept).sum(2)
        of_maps = (own, grad, log_sum, own, own, own)  # with unused substitutes
    else:
        own, pull = torch.empty_like(kept), torch.empty_like(log_sum)
        of_maps = (contrast, grad, log_sum, kept, own, pull)
    sizes = (query.size(2), value.size(2), *_blocks(query, value))
    options = (scale, bias is not None, 1 if contrast is None else 2)
    constants = (num_nodes, heads, value.size(1), *sizes, *options)
    with on_device_of(value):
        _query_gradients[_programs(sizes, grad)](
            *given, *of_maps, dq, dbias, *sources, *constants, **_OPTIONS
        )
        _source_gradients[_programs(sizes, value)](
            *given, *of_maps, dk, dv, *targets, *constants, **_OPTIONS
        )
    return (
        dq, dk, dv, None if bias is None else dbias,
        None if contrast is None else -pull[:, heads:].sum(0),
    )  # fmt: skip


def _operands(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None
) -> tuple[Tensor, ...]:
    """Contiguous operands; a missing bias is empty and never read."""
    bias = value.new_empty(0) if bias is None else bias
    return tuple(x.contiguous() for x in (query, key, value, bias))


def _blocks(query: Tensor, value: Tensor) -> tuple[int, int, int, int]:
    """Padded channels of queries and values, nodes per program, and edges per node."""
    n, p = (triton.next_power_of_2(max(x.size(2), 1)) for x in (query, value))
    edges = min(_EDGES, _NUMBERS // max(n, p))
    return n, p, max(1, min(_NODES, _NUMBERS // (edges * max(n, p)))), edges


def _programs(sizes: tuple, x: Tensor) -> tuple[int]:
    """One program per tile of nodes and head of x; `sizes[4]` is the tile's nodes."""
    return (triton.cdiv(x.size(0), sizes[4]) * x.size(1),)


# --------------------------------------------------------------- the parts of kernels


@triton.jit
def _tile(PTR, num_nodes, HEADS: tl.constexpr, NODES: tl.constexpr):
    """A program's nodes, their mask and head, and the bounds of their edges."""
    i = (tl.program_id(0) // HEADS).to(tl.int64) * NODES + tl.arange(0, NODES)
    there = i < num_nodes
    first = tl.load(PTR + i, mask=there, other=0)
    last = tl.load(PTR + i + 1, mask=there, other=0)
    return i, there, tl.program_id(0) % HEADS, first, last


@triton.jit
def _edges(NODE, EDGE, first, last, EDGES: tl.constexpr):
    """The next edges of each node: a mask, the nodes at the other end, edge indices."""
    e = first[:, None] + tl.arange(0, EDGES)[None, :]
    on = e < last[:, None]
    node = tl.load(NODE + e, mask=on, other=0).to(tl.int64)
    return on, node, tl.load(EDGE + e, mask=on, other=0).to(tl.int64)


@triton.jit
def _rows(X, at, there, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of X [..., SIZE]."""
    c = tl.arange(0, BLOCK)
    mask = tl.expand_dims(there, -1) & (c < SIZE)
    return tl.load(X + (tl.expand_dims(at, -1) * SIZE + c), mask=mask, other=0.0)


@triton.jit
def _store_rows(X, at, there, x, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Stores rows to X [..., SIZE]."""
    c = tl.arange(0, BLOCK)
    mask = tl.expand_dims(there, -1) & (c < SIZE)
    tl.store(X + (tl.expand_dims(at, -1) * SIZE + c), x, mask=mask)


@triton.jit
def _logits(q, k, BIAS, at, on, SCALE: tl.constexpr, BIASED: tl.constexpr):
    """The logits of edges; minus infinity where there is none."""
    x = tl.sum(q * k, 2) * SCALE
    if BIASED:
        x += tl.load(BIAS + at, mask=on, other=0.0)
    return tl.where(on, x, float("-inf"))


@triton.jit
def _rectified(p, p2, contrast):
    """The positive part of the difference of two maps; NaN propagates."""
    x = p - contrast * p2
    return tl.where(x <= 0, 0.0, x)


# ------------------------------------------------------------------------- the kernels


@triton.jit(do_not_specialize=["num_nodes"])
def _softmax(
    Q, K, V, BIAS, LOG_SUM, OUT, PTR, NODE, EDGE, num_nodes, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, N_BLOCK: tl.constexpr,
    P_BLOCK: tl.constexpr, NODES: tl.constexpr, EDGES: tl.constexpr,
    SCALE: tl.constexpr, BIASED: tl.constexpr, WITH_VALUES: tl.constexpr,
):  # fmt: skip
    """The logarithms of sums and, if there is only one map, the output."""
    i, there, h, first, last = _tile(PTR, num_nodes, HEADS, NODES)
    g = h // (HEADS // GROUPS)
    q = _rows(Q, i * HEADS + h, there, N, N_BLOCK)[:, None, :]
    top = tl.full([NODES], float("-inf"), Q.dtype.element_ty)
    total = tl.zeros([NODES], Q.dtype.element_ty)
    out = tl.zeros([NODES, P_BLOCK], Q.dtype.element_ty)
    for step in range(0, tl.max(last - first, 0), EDGES):
        on, j, edge = _edges(NODE, EDGE, first + step, last, EDGES)
        k = _rows(K, j * GROUPS + g, on, N, N_BLOCK)
        logits = _logits(q, k, BIAS, edge * HEADS + h, on, SCALE, BIASED)
        largest = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(largest == float("-inf"), 0.0, largest)
        p = tl.exp(logits - base[:, None])
        before = tl.exp(top - base)
        total = before * total + tl.sum(p, 1)
        if WITH_VALUES:
            v = _rows(V, j * GROUPS + g, on, P, P_BLOCK)
            out = before[:, None] * out + tl.sum(p[:, :, None] * v, 1)
        top = largest
    # Without edges, all weights are zero.
    none, total = total == 0, tl.where(total == 0, 1.0, total)
    log_sum = tl.where(none, float("inf"), top + tl.log(total))
    tl.store(LOG_SUM + i * HEADS + h, log_sum, mask=there)
    if WITH_VALUES:
        _store_rows(OUT, i * HEADS + h, there, out / total[:, None], P, P_BLOCK)


@triton.jit(do_not_specialize=["num_nodes"])
def _difference(
    Q, K, V, BIAS, CONTRAST, LOG_SUM, WHOLE, OUT, PTR, NODE, EDGE, num_nodes,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    N_BLOCK: tl.constexpr, P_BLOCK: tl.constexpr, NODES: tl.constexpr,
    EDGES: tl.constexpr, SCALE: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """The output of two maps, and the sums of their differences."""
    i, there, h, first, last = _tile(PTR, num_nodes, HEADS, NODES)
    g = h // (HEADS // GROUPS)
    at, at2 = i * (2 * HEADS) + h, i * (2 * HEADS) + HEADS + h
    q = _rows(Q, at, there, N, N_BLOCK)[:, None, :]
    q2 = _rows(Q, at2, there, N, N_BLOCK)[:, None, :]
    z = tl.load(LOG_SUM + at, mask=there, other=0.0)[:, None]
    z2 = tl.load(LOG_SUM + at2, mask=there, other=0.0)[:, None]
    contrast = tl.load(CONTRAST + h)
    total = tl.zeros([NODES], Q.dtype.element_ty)
    out = tl.zeros([NODES, P_BLOCK], Q.dtype.element_ty)
    for step in range(0, tl.max(last - first, 0), EDGES):
        on, j, edge = _edges(NODE, EDGE, first + step, last, EDGES)
        k = _rows(K, j * (2 * GROUPS) + g, on, N, N_BLOCK)
        k2 = _rows(K, j * (2 * GROUPS) + GROUPS + g, on, N, N_BLOCK)
        to = edge * (2 * HEADS) + h
        p = tl.exp(_logits(q, k, BIAS, to, on, SCALE, BIASED) - z)
        p2 = tl.exp(_logits(q2, k2, BIAS, to + HEADS, on, SCALE, BIASED) - z2)
        weight = _rectified(p, p2, contrast)
        v = _rows(V, j * GROUPS + g, on, P, P_BLOCK)
        total += tl.sum(weight, 1)
        out += tl.sum(weight[:, :, None] * v, 1)
    whole = total + _EPSILON
    tl.store(WHOLE + i * HEADS + h, whole, mask=there)
    _store_rows(OUT, i * HEADS + h, there, out / whole[:, None], P, P_BLOCK)


@triton.jit(do_not_specialize=["num_nodes"])
def _query_gradients(
    Q, K, V, BIAS, CONTRAST, DY, LOG_SUM, WHOLE, OWN, PULL, DQ, DBIAS, PTR, NODE, EDGE,
    num_nodes, HEADS: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr, N_BLOCK: tl.constexpr, P_BLOCK: tl.constexpr, NODES: tl.constexpr,
    EDGES: tl.constexpr, SCALE: tl.constexpr, BIASED: tl.constexpr, MAPS: tl.constexpr,
):  # fmt: skip
    """The gradients of queries and biases, and the terms that a node's logits share."""
    i, there, h, first, last = _tile(PTR, num_nodes, HEADS, NODES)
    g = h // (HEADS // GROUPS)
    at, at2 = i * (MAPS * HEADS) + h, i * (MAPS * HEADS) + HEADS + h
    q = _rows(Q, at, there, N, N_BLOCK)[:, None, :]
    dy = _rows(DY, i * HEADS + h, there, P, P_BLOCK)[:, None, :]
    z = tl.load(LOG_SUM + at, mask=there, other=0.0)[:, None]
    dq = tl.zeros([NODES, N_BLOCK], Q.dtype.element_ty)
    if MAPS == 1:
        own = tl.load(OWN + i * HEADS + h, mask=there, other=0.0)[:, None]
    else:
        q2 = _rows(Q, at2, there, N, N_BLOCK)[:, None, :]
        z2 = tl.load(LOG_SUM + at2, mask=there, other=0.0)[:, None]
        whole = tl.load(WHOLE + i * HEADS + h, mask=there, other=1.0)[:, None]
        contrast = tl.load(CONTRAST + h)
        dq2 = tl.zeros([NODES, N_BLOCK], Q.dtype.element_ty)
        own = tl.zeros([NODES], Q.dtype.element_ty)
        part = tl.zeros([NODES], Q.dtype.element_ty)
        part2 = tl.zeros([NODES], Q.dtype.element_ty)
        pull = tl.zeros([NODES], Q.dtype.element_ty)
        pull2 = tl.zeros([NODES], Q.dtype.element_ty)
        for step in range(0, tl.max(last - first, 0), EDGES):
            on, j, edge = _edges(NODE, EDGE, first + step, last, EDGES)
            k = _rows(K, j * (2 * GROUPS) + g, on, N, N_BLOCK)
            k2 = _rows(K, j * (2 * GROUPS) + GROUPS + g, on, N, N_BLOCK)
            to = edge * (2 * HEADS) + h
            p = tl.exp(_logits(q, k, BIAS, to, on, SCALE, BIASED) - z)
            p2 = tl.exp(_logits(q2, k2, BIAS, to + HEADS, on, SCALE, BIASED) - z2)
            v = _rows(V, j * GROUPS + g, on, P, P_BLOCK)
            weight, d = _rectified(p, p2, contrast), tl.sum(dy * v, 2)
            p, p2 = tl.where(weight == 0, 0.0, p), tl.where(weight == 0, 0.0, p2)
            own += tl.sum(weight * d, 1)
            part += tl.sum(p, 1)
            part2 += tl.sum(p2, 1)
            pull += tl.sum(p * d, 1)
            pull2 += tl.sum(p2 * d, 1)
        own = own[:, None] / whole
        pull = (pull[:, None] - own * part[:, None]) / whole
        pull2 = (pull2[:, None] - own * part2[:, None]) / whole
        tl.store(OWN + (i * HEADS + h)[:, None], own, mask=there[:, None])
        tl.store(PULL + at[:, None], pull, mask=there[:, None])
        tl.store(PULL + at2[:, None], pull2, mask=there[:, None])
    for step in range(0, tl.max(last - first, 0), EDGES):
        on, j, edge = _edges(NODE, EDGE, first + step, last, EDGES)
        v = _rows(V, j * GROUPS + g, on, P, P_BLOCK)
        d = tl.sum(dy * v, 2) - own
        to = edge * (MAPS * HEADS) + h
        k = _rows(K, j * (MAPS * GROUPS) + g, on, N, N_BLOCK)
        p = tl.exp(_logits(q, k, BIAS, to, on, SCALE, BIASED) - z)
        if MAPS == 2:
            k2 = _rows(K, j * (2 * GROUPS) + GROUPS + g, on, N, N_BLOCK)
            p2 = tl.exp(_logits(q2, k2, BIAS, to + HEADS, on, SCALE, BIASED) - z2)
            d = tl.where(_rectified(p, p2, contrast) == 0, 0.0, d / whole)
            moves = -contrast * p2 * (d - pull2)
            dq2 += tl.sum(moves[:, :, None] * k2, 1)
            if BIASED:
                tl.store(DBIAS + to + HEADS, moves, mask=on)
            d -= pull
        moves = p * d
        dq += tl.sum(moves[:, :, None] * k, 1)
        if BIASED:
            tl.store(DBIAS + to, moves, mask=on)
    _store_rows(DQ, at, there, dq * SCALE, N, N_BLOCK)
    if MAPS == 2:
        _store_rows(DQ, at2, there, dq2 * SCALE, N, N_BLOCK)


@triton.jit(do_not_specialize=["num_nodes"])
def _source_gradients(
    Q, K, V, BIAS, CONTRAST, DY, LOG_SUM, WHOLE, OWN, PULL, DK, DV, PTR, NODE, EDGE,
    num_nodes, HEADS: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr, N_BLOCK: tl.constexpr, P_BLOCK: tl.constexpr, NODES: tl.constexpr,
    EDGES: tl.constexpr, SCALE: tl.constexpr, BIASED: tl.constexpr, MAPS: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values, for all heads that share them."""
    j, there, g, first, last = _tile(PTR, num_nodes, GROUPS, NODES)
    at, at2 = j * (MAPS * GROUPS) + g, j * (MAPS * GROUPS) + GROUPS + g
    k = _rows(K, at, there, N, N_BLOCK)[:, None, :]
    v = _rows(V, j * GROUPS + g, there, P, P_BLOCK)[:, None, :]
    dk = tl.zeros([NODES, N_BLOCK], Q.dtype.element_ty)
    dv = tl.zeros([NODES, P_BLOCK], Q.dtype.element_ty)
    if MAPS == 2:
        k2 = _rows(K, at2, there, N, N_BLOCK)[:, None, :]
        dk2 = tl.zeros([NODES, N_BLOCK], Q.dtype.element_ty)
    for step in range(0, tl.max(last - first, 0), EDGES):
        on, i, edge = _edges(NODE, EDGE, first + step, last, EDGES)
        for r in range(0, HEADS // GROUPS):
            h = g * (HEADS // GROUPS) + r
            of, to = i * (MAPS * HEADS) + h, edge * (MAPS * HEADS) + h
            q = _rows(Q, of, on, N, N_BLOCK)
            dy = _rows(DY, i * HEADS + h, on, P, P_BLOCK)
            z = tl.load(LOG_SUM + of, mask=on, other=0.0)
            own = tl.load(OWN + i * HEADS + h, mask=on, other=0.0)
            p = tl.exp(_logits(q, k, BIAS, to, on, SCALE, BIASED) - z)
            d, weight = tl.sum(dy * v, 2) - own, p
            if MAPS == 2:
                q2 = _rows(Q, of + HEADS, on, N, N_BLOCK)
                z2 = tl.load(LOG_SUM + of + HEADS, mask=on, other=0.0)
                whole = tl.load(WHOLE + i * HEADS + h, mask=on, other=1.0)
                contrast = tl.load(CONTRAST + h)
                p2 = tl.exp(_logits(q2, k2, BIAS, to + HEADS, on, SCALE, BIASED) - z2)
                weight = _rectified(p, p2, contrast) / whole
                d = tl.where(weight == 0, 0.0, d / whole)
                pull2 = tl.load(PULL + of + HEADS, mask=on, other=0.0)
                moves = -contrast * p2 * (d - pull2)
                dk2 += tl.sum(moves[:, :, None] * q2, 1)
                d -= tl.load(PULL + of, mask=on, other=0.0)
            dk += tl.sum((p * d)[:, :, None] * q, 1)
            dv += tl.sum(weight[:, :, None] * dy, 1)
    _store_rows(DK, at, there, dk * SCALE, N, N_BLOCK)
    _store_rows(DV, j * GROUPS + g, there, dv, P, P_BLOCK)
    if MAPS == 2:
        _store_rows(DK, at2, there, dk2 * SCALE, N, N_BLOCK)
