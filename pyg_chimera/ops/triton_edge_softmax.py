r"""`edge_softmax` on a GPU: one launch forward, two backward.

A program takes some nodes and all heads. It reads the edges into them, some at a time,
from lists by target, and backward also those out of them, from lists by source: sums
have one order, and nothing is added to memory that others write to. Formulas are those
of the kernels for the CPU.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_chimera.ops.common.cache import called_eagerly, remembered
from pyg_chimera.ops.common.checks import check_edge_index
from pyg_chimera.ops.common.triton_runtime import on_device_of
from pyg_chimera.ops.structure.csr import compress, to_numpy

#: Numbers at a time, and the most edges of a node among them.
_NUMEL, _STEP = 512, 128


class _Lists(NamedTuple):
    """The edges of each node, at one of their ends."""

    ptr: Tensor  #: the first one of each node, and their number
    edge: Tensor  #: the edge
    other: Tensor  #: the node at its other end


class _Tables(NamedTuple):
    into: _Lists
    out_of: _Lists
    most: tuple[int, int]  #: the most edges of a node, in each

    def with_room(self, _: float) -> "_Tables":
        """Itself: kernels take more edges of a node in more steps."""
        return self


class _Sizes(NamedTuple):
    """What kernels are compiled for."""

    heads: int
    width: int  #: a power of two
    rows: int  #: nodes of a program
    step: int  #: edges of a node at a time
    share: int
    gamma: float = 0.0
    margin: float = 0.0


def _tables(edge_index: Tensor, num_nodes: int) -> _Tables:
    check_edge_index(edge_index, num_nodes)
    ends, edges = to_numpy(edge_index), np.arange(edge_index.size(1))

    def lists(own: int) -> _Lists:
        ptr, edge = compress(ends[own], edges, num_nodes)
        parts = map(torch.from_numpy, (ptr, edge, ends[1 - own][edge]))
        return _Lists(*(x.to(edge_index.device, torch.int32) for x in parts))

    def most(own: int) -> int:
        return int(torch.from_numpy(ends[own]).bincount().max()) if len(edges) else 0

    return _Tables(lists(1), lists(0), (most(1), most(0)))


def _tables_of(edge_index: Tensor, num_nodes: int) -> _Tables:
    with called_eagerly():
        return remembered(_tables, (edge_index,), num_nodes)


def forward(
    given: Sequence[Any], options: Any
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor], _Tables]:
    """The weights and what they leave, and what `backward` needs: the weights, by how
    much the total of a row changes with the sum of its weights, over gamma, and its
    logarithm with that of the margin.
    """
    edge_index, *tensors = given
    tensors = [x if x is None or x.stride(1) == 1 else x.contiguous() for x in tensors]
    strides = tuple(0 if x is None else x.stride(0) for x in tensors)
    psi, tables = tensors[2], _tables_of(edge_index, len(tensors[2]))
    gamma, margin, wide = options
    weight = psi.new_empty(edge_index.size(1), psi.size(1), dtype=wide)
    rest = psi.new_empty(psi.shape)
    # Apart, as kernels are compiled for addresses that are multiples of 16.
    slopes = tuple(psi.new_empty(psi.shape, dtype=wide) for _ in range(2))
    sizes = _sizes(psi, tables.most[0], tensors[3])._replace(gamma=gamma, margin=margin)
    with on_device_of(psi):
        _forward[_grid(psi, sizes)](
            tuple(tensors), (weight, rest, *slopes), tables.into, len(psi), strides,
            sizes, num_warps=4,
        )  # fmt: skip
    return (weight, rest), (weight, *slopes), tables


def backward(
    given: Sequence[Any], saved: Sequence[Tensor], grads: Sequence[Any], tables: _Tables
) -> list[Tensor | None]:
    """The gradient of each tensor, None for those that are, and of edges."""
    psi, edge = given[3:]
    (weight, *slopes), (grad, grad_rest) = saved, grads
    grad = torch.zeros_like(weight) if grad is None else grad.contiguous()
    grad_rest = None if grad_rest is None else grad_rest.contiguous()
    found = [None if x is None else x.new_empty(x.shape) for x in given[1:]]
    turn = torch.empty_like(slopes[0])
    into, out_of = (_sizes(psi, most, edge) for most in tables.most)
    with on_device_of(psi):
        _backward[_grid(psi, into)](
            (weight, grad, grad_rest, *slopes), (found[0], found[2], found[3], turn),
            tables.into, len(psi), into, num_warps=4,
        )  # fmt: skip
        _sources[_grid(psi, out_of)](
            (weight, grad, turn), found[1], tables.out_of, len(psi), out_of,
            num_warps=4,
        )  # fmt: skip
    return [None, *found]


def _sizes(psi: Tensor, most: int, edge: Tensor | None) -> _Sizes:
    """For the most edges of a node."""
    heads = psi.size(1)
    width = triton.next_power_of_2(heads)
    step = min(triton.next_power_of_2(max(most, 2)), _STEP, max(1, _NUMEL // width))
    rows = max(1, _NUMEL // (width * step))
    return _Sizes(heads, width, rows, step, 2 if edge is None else 3)


def _grid(psi: Tensor, sizes: _Sizes) -> tuple[int]:
    return (triton.cdiv(len(psi), sizes.rows),)


# ------------------------------------------------------------------------- the kernels


@triton.jit
def _own(lists, nodes, sizes: tl.constexpr):
    """A program's nodes and heads, a mask of what exists, and the nodes' edges."""
    r = tl.program_id(0) * sizes.rows + tl.arange(0, sizes.rows)
    h = tl.arange(0, sizes.width)[None, :]
    exists = r < nodes
    begin = tl.load(lists.ptr + r, mask=exists, other=0)
    end = tl.load(lists.ptr + r + 1, mask=exists, other=0)
    there = exists[:, None] & (h < sizes.heads)
    return r.to(tl.int64)[:, None], h, there, begin, end


@triton.jit
def _edges(lists, begin, end, there, h, start, sizes: tl.constexpr):
    """Some edges of the nodes, those at the other ends, the heads, and a mask."""
    k = begin[:, None] + start + tl.arange(0, sizes.step)[None, :]
    known = k < end[:, None]
    e = tl.load(lists.edge + k, mask=known, other=0).to(tl.int64)
    other = tl.load(lists.other + k, mask=known, other=0).to(tl.int64)
    inside = known[:, :, None] & there[:, None, :]
    return e[:, :, None], other[:, :, None], h[:, None, :], inside


@triton.jit
def _exponents(
    tensors, lists, own, start, strides, wide: tl.constexpr, sizes: tl.constexpr
):
    """The exponents of some edges into the nodes, their places and a mask."""
    SOURCE, EDGE = tensors[1], tensors[3]
    _, h, there, begin, end = own
    e, j, o, inside = _edges(lists, begin, end, there, h, start, sizes)
    x = tl.load(SOURCE + j * strides[1] + o, mask=inside, other=0.0).to(wide)
    if EDGE is not None:
        x += tl.load(EDGE + e * strides[3] + o, mask=inside, other=0.0).to(wide)
    return -x / sizes.share, e * sizes.heads + o, inside


@triton.jit(do_not_specialize=["nodes"])
def _forward(tensors, outputs, lists, nodes, strides, sizes: tl.constexpr):
    """The weights of the edges into some nodes, and what those leave."""
    TARGET, PSI = tensors[0], tensors[2]
    W, REST, TOTAL, SQUARE = outputs
    wide: tl.constexpr = W.dtype.element_ty
    own = _own(lists, nodes, sizes)
    r, h, there, begin, end = own
    most = tl.max(end - begin, 0)
    # Relative to exp(-target), which is common to a row and cancels.
    least = tl.load(TARGET + r * strides[0] + h, mask=there, other=0.0).to(wide)
    psi = tl.load(PSI + r * strides[2] + h, mask=there, other=0.0).to(wide)
    least = least / sizes.share - psi
    shift = least
    for start in range(0, most, sizes.step):
        x, _, inside = _exponents(tensors, lists, own, start, strides, wide, sizes)
        shift = tl.maximum(shift, tl.max(tl.where(inside, x, float("-inf")), 1))
    sums = tl.zeros_like(least)
    for start in range(0, most, sizes.step):
        x, _, inside = _exponents(tensors, lists, own, start, strides, wide, sizes)
        sums += tl.sum(tl.where(inside, tl.exp(x - shift[:, None, :]), 0.0), 1)
    square, slope = tl.exp(2 * (least - shift)), sizes.margin * sums
    root = tl.sqrt(square + slope * slope)
    whole = sums + root
    at = r * sizes.heads + h
    tl.store(REST + at, (1 - sizes.gamma) + sizes.gamma * root / whole, mask=there)
    slope = 1 + sizes.margin * slope / root
    tl.store(TOTAL + at, slope / sizes.gamma, mask=there)
    tl.store(SQUARE + at, square / (root * whole), mask=there)
    factor = sizes.gamma / whole
    for start in range(0, most, sizes.step):
        x, place, inside = _exponents(tensors, lists, own, start, strides, wide, sizes)
        w = tl.exp(x - shift[:, None, :]) * factor[:, None, :]
        tl.store(W + place, w, mask=inside)


@triton.jit(do_not_specialize=["nodes"])
def _backward(saved, grads, lists, nodes, sizes: tl.constexpr):
    """The gradients of targets, of psi and of edges, and by what those of the exponents
    of edges into a node are less than those of its weights, over the weights.
    """
    W, DW, DREST, TOTAL, SQUARE = saved
    DTARGET, DPSI, DEDGE, TURN = grads
    r, h, there, begin, end = _own(lists, nodes, sizes)
    most, own = tl.max(end - begin, 0), r * sizes.heads + h
    square = tl.load(SQUARE + own, mask=there, other=0.0)
    turn = tl.zeros_like(square)
    if DREST is not None:  # what is left is one minus the sum of weights
        turn += tl.load(DREST + own, mask=there, other=0.0)
    sums = tl.zeros_like(square)
    for start in range(0, most, sizes.step):
        e, _, o, inside = _edges(lists, begin, end, there, h, start, sizes)
        w = tl.load(W + e * sizes.heads + o, mask=inside, other=0.0)
        d = tl.load(DW + e * sizes.heads + o, mask=inside, other=0.0)
        sums += tl.sum(tl.where(inside, w * (d - turn[:, None, :]), 0.0), 1)
    tl.store(DPSI + own, sums * square, mask=there)
    tl.store(DTARGET + own, -sums * square / sizes.share, mask=there)
    turn += sums * tl.load(TOTAL + own, mask=there, other=0.0)
    tl.store(TURN + own, turn, mask=there)
    if DEDGE is not None:
        for start in range(0, most, sizes.step):
            e, _, o, inside = _edges(lists, begin, end, there, h, start, sizes)
            w = tl.load(W + e * sizes.heads + o, mask=inside, other=0.0)
            d = tl.load(DW + e * sizes.heads + o, mask=inside, other=0.0)
            d = -w * (d - turn[:, None, :]) / sizes.share
            tl.store(DEDGE + e * sizes.heads + o, d, mask=inside)


@triton.jit(do_not_specialize=["nodes"])
def _sources(saved, DSOURCE, lists, nodes, sizes: tl.constexpr):
    """The gradients of some sources, from the edges out of them."""
    W, DW, TURN = saved
    r, h, there, begin, end = _own(lists, nodes, sizes)
    ROWS: tl.constexpr = sizes.rows
    WIDTH: tl.constexpr = sizes.width
    sums = tl.zeros([ROWS, WIDTH], W.dtype.element_ty)
    for start in range(0, tl.max(end - begin, 0), sizes.step):
        e, i, o, inside = _edges(lists, begin, end, there, h, start, sizes)
        w = tl.load(W + e * sizes.heads + o, mask=inside, other=0.0)
        d = tl.load(DW + e * sizes.heads + o, mask=inside, other=0.0)
        d -= tl.load(TURN + i * sizes.heads + o, mask=inside, other=0.0)
        sums += tl.sum(w * d, 1)
    tl.store(DSOURCE + r * sizes.heads + h, -sums / sizes.share, mask=there)
