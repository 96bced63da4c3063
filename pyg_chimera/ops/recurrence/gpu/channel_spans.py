r"""The recurrence along directed paths on a GPU: within spans of rows, and between.

.. math::
    h_t = a_t h_{t-1} + x_t, \qquad g_t = a_{t+1} g_{t+1} + dy_t, \qquad
    da_t = g_t h_{t-1}

for each channel, where :math:`a_t` is the product of the node's decay and the weight of
the edge into it, and zero at the start of a path. So all paths are one sequence of
rows, which is cut into spans of equal size as in `selective_scan`: first the states
after spans that start from zero, then the states between spans (`carry`), then a
scan of each span from the state before it. Weights may be zero and of any sign, as
nothing is divided by them.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_chimera.ops.common.cache import table
from pyg_chimera.ops.common.triton_runtime import on_device_of
from pyg_chimera.ops.recurrence.gpu.carry import carry, compose, state_of
from pyg_chimera.ops.recurrence.plan.states import StateGraph

#: Rows of a span, and channels of a program.
_ROWS, _WIDTH = 64, 16
_OPTIONS = {"num_warps": 4, "num_stages": 1}


class _Rows(NamedTuple):
    """The nodes of all paths, path by path and in order along each, int32 [V]."""

    node: Tensor
    edge: Tensor  #: the edge into each node; -1 at the start of a path


def _rows(graph: StateGraph, device: torch.device) -> _Rows:
    edge = np.full(len(graph.state), -1)
    edge[np.diff(graph.parents.ptr) > 0] = graph.parents.entry
    moved = (torch.from_numpy(x.astype(np.int32)) for x in (graph.state, edge))
    return _Rows(*(x.to(device) for x in moved))


class _Sizes(NamedTuple):
    """What kernels are compiled for."""

    channels: int
    rows: int
    width: int
    weighted: bool  #: whether there are weights of edges
    decayed: bool  #: whether there are decays of nodes


class _Steps(NamedTuple):
    """Weights and decays, or unused substitutes."""

    weight: Tensor  #: [E, C]
    decay: Tensor  #: [V, C]


def scan(
    graph: StateGraph, value: Tensor, weight: Tensor | None, decay: Tensor | None
) -> Tensor:
    """The states, [V, C]."""
    out = torch.empty_like(value, memory_format=torch.contiguous_format)
    if out.numel() > 0:
        rows, value = table(_rows, graph, value.device), value.contiguous()
        steps, sizes = _steps_of(value, weight, decay)
        tables = (steps, rows, _carried(value, steps, rows, sizes))
        with on_device_of(value):
            _states[_programs(value)](
                value, *tables, out, len(value), sizes, **_OPTIONS
            )
    return out


def gradients(
    graph: StateGraph,
    state: Tensor,
    grad: Tensor,
    value: Tensor,
    weight: Tensor | None,
    decay: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """The gradients of value, weight and decay, given the states [V, C]."""
    given = (value, weight, decay)
    grads = [None if x is None else x.new_empty(x.shape) for x in given]
    if grad.numel() > 0:
        rows = table(_rows, graph, value.device)
        steps, sizes = _steps_of(grad, weight, decay)
        tables = (steps, rows, _carried(grad, steps, rows, sizes, reverse=True))
        outs = tuple(grad if x is None else x for x in grads)  # `grad` is never written
        with on_device_of(grad):
            _gradients[_programs(grad)](
                grad, state, *tables, outs, len(grad), sizes, **_OPTIONS
            )
    return tuple(grads)


def _steps_of(
    x: Tensor, weight: Tensor | None, decay: Tensor | None
) -> tuple[_Steps, _Sizes]:
    given = (weight, decay)
    steps = _Steps(*(x if y is None else y.contiguous() for y in given))
    are_given = (y is not None for y in given)
    return steps, _Sizes(x.size(1), _ROWS, _WIDTH, *are_given)


def _carried(
    x: Tensor, steps: _Steps, rows: _Rows, sizes: _Sizes, reverse: bool = False
) -> Tensor:
    """The states after each span, or the adjoints before each, [spans, C]."""
    end = x.new_empty(_programs(x)[0], x.size(1))
    factor = torch.empty_like(end)
    with on_device_of(x):
        _span_ends[_programs(x)](
            x, steps, rows, factor, end, len(x), sizes, reverse, **_OPTIONS
        )
    return carry(factor, end, reverse)


def _programs(x: Tensor) -> tuple[int, int]:
    return triton.cdiv(x.size(0), _ROWS), triton.cdiv(x.size(1), _WIDTH)


# --------------------------------------------------------------- the parts of kernels


@triton.jit
def _span(sizes: tl.constexpr):
    """A program's rows and channels."""
    t = tl.program_id(0) * sizes.rows + tl.arange(0, sizes.rows)
    return t, tl.program_id(1) * sizes.width + tl.arange(0, sizes.width)


@triton.jit
def _at(row, c, there, CHANNELS: tl.constexpr):
    """Offsets of rows and channels in [..., CHANNELS], and their mask."""
    at = row.to(tl.int64)[:, None] * CHANNELS + c[None, :]
    return at, there[:, None] & (c < CHANNELS)[None, :]


@triton.jit
def _factors(steps, rows, t, there, c, sizes: tl.constexpr):
    """Weights and decays, zero at the start of paths, and whether an edge enters."""
    node = tl.load(rows.node + t, mask=there, other=0)
    edge = tl.load(rows.edge + t, mask=there, other=-1)
    w = tl.where((edge >= 0)[:, None] & (c >= 0)[None, :], 1.0, 0.0)
    w = w.to(steps.weight.dtype.element_ty)
    d = w
    if sizes.weighted:
        at, mask = _at(edge, c, edge >= 0, sizes.channels)
        w = tl.load(steps.weight + at, mask=mask, other=0.0)
    if sizes.decayed:
        at, mask = _at(node, c, edge >= 0, sizes.channels)
        d = tl.load(steps.decay + at, mask=mask, other=0.0)
    return w, d, edge >= 0


# ------------------------------------------------------------------------- the kernels


@triton.jit(do_not_specialize=["num_rows"])
def _span_ends(
    X, steps, rows, FACTOR, END, num_rows, sizes: tl.constexpr, REVERSE: tl.constexpr
):
    """The state after a span that starts from zero, or its adjoint, and its decay."""
    CHANNELS: tl.constexpr = sizes.channels
    t, c = _span(sizes)
    there, o, ahead = t < num_rows, tl.arange(0, sizes.rows), t
    if REVERSE:
        ahead = t + 1
    w, d, _ = _factors(steps, rows, ahead, ahead < num_rows, c, sizes)
    at, mask = _at(tl.load(rows.node + t, mask=there, other=0), c, there, CHANNELS)
    x = tl.load(X + at, mask=mask, other=0.0)
    a, x = tl.associative_scan((w * d, x), 0, compose, reverse=REVERSE)
    outer = (o == (0 if REVERSE else sizes.rows - 1))[:, None]
    at = tl.program_id(0).to(tl.int64) * CHANNELS + c
    tl.store(FACTOR + at, tl.sum(tl.where(outer, a, 0.0), 0), mask=c < CHANNELS)
    tl.store(END + at, tl.sum(tl.where(outer, x, 0.0), 0), mask=c < CHANNELS)


@triton.jit(do_not_specialize=["num_rows"])
def _states(X, steps, rows, STATE, OUT, num_rows, sizes: tl.constexpr):
    """The states of a span."""
    CHANNELS: tl.constexpr = sizes.channels
    t, c = _span(sizes)
    there, first = t < num_rows, (tl.arange(0, sizes.rows) == 0)[:, None]
    w, d, _ = _factors(steps, rows, t, there, c, sizes)
    a = w * d
    at, mask = _at(tl.load(rows.node + t, mask=there, other=0), c, there, CHANNELS)
    x = tl.load(X + at, mask=mask, other=0.0)
    before = state_of(STATE, tl.program_id(0) - 1, 0, c, CHANNELS, 1)
    x = tl.where(first & (a != 0), a * before + x, x)
    _, h = tl.associative_scan((a, x), 0, compose)
    tl.store(OUT + at, h, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _gradients(DY, H, steps, rows, ADJOINT, outs, num_rows, sizes: tl.constexpr):
    """The gradients of a span."""
    CHANNELS: tl.constexpr = sizes.channels
    DX, DWEIGHT, DDECAY = outs
    t, c = _span(sizes)
    there, last = t < num_rows, (tl.arange(0, sizes.rows) == sizes.rows - 1)[:, None]
    w, d, _ = _factors(steps, rows, t + 1, t + 1 < num_rows, c, sizes)
    a = w * d
    at, mask = _at(tl.load(rows.node + t, mask=there, other=0), c, there, CHANNELS)
    x = tl.load(DY + at, mask=mask, other=0.0)
    after = state_of(ADJOINT, tl.program_id(0) + 1, 0, c, CHANNELS, 1)
    x = tl.where(last & (a != 0), a * after + x, x)
    _, g = tl.associative_scan((a, x), 0, compose, reverse=True)
    tl.store(DX + at, g, mask=mask)
    if sizes.weighted or sizes.decayed:
        w, d, entered = _factors(steps, rows, t, there, c, sizes)
        behind = tl.load(rows.node + t - 1, mask=entered, other=0)
        before, read = _at(behind, c, entered, CHANNELS)
        g *= tl.load(H + before, mask=read, other=0.0)
        if sizes.decayed:
            tl.store(DDECAY + at, g * w, mask=mask)
        if sizes.weighted:
            edge = tl.load(rows.edge + t, mask=entered, other=0)
            to, written = _at(edge, c, entered, CHANNELS)
            tl.store(DWEIGHT + to, g * d, mask=written)
