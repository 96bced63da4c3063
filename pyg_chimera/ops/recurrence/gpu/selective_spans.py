r"""Mamba's recurrence on a GPU, on two levels: within spans of rows and between them.

.. math::
    h_t = a_t h_{t-1} + \delta_t u_t b_t, \quad a_t = e^{\delta_t A}, \qquad
    g_t = a_{t+1} g_{t+1} + c_t dy_t

for each channel and state. All sequences are treated as one, with :math:`a_t = 0` at
their first rows, and cut into spans of equal size regardless of their bounds. So the
lengths of sequences do not matter, even if one is much longer than the others. In the
forward pass,

1. a program for each span and some channels computes the state after its rows, from
   zero, as :math:`h = \sum_t e^{(\delta_{t+1} + \delta_{t+2} + \dots) A} \delta_t u_t
   b_t`,
2. states are carried from span to span (`carry`),
3. a program for each span and some channels scans its rows, one state channel at a
   time, from the state before the span, the only states that are stored.

The backward pass does the same with the adjoints :math:`g`, from the last row to the
first one. Its third step also scans the states once more, with

.. math::
    db_t = \sum g_t \delta_t u_t, \quad dc_t = \sum h_t dy_t, \quad
    dA = \sum g_t a_t h_{t-1} \delta_t, \quad
    du_t = \delta_t g_t^{\top} b_t + D dy_t, \quad
    d\delta_t = u_t g_t^{\top} b_t + \sum g_t a_t h_{t-1} A.

Each program writes its own part of sums over channels and spans, which are added
afterwards.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_chimera.ops.common.sequences import places
from pyg_chimera.ops.common.triton_runtime import on_device_of
from pyg_chimera.ops.recurrence.gpu.carry import carry, compose, state_of

#: Rows of a span, and channels of a program.
_ROWS, _WIDTH = 64, 16
_OPTIONS = {"num_warps": 4, "num_stages": 1}


def scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, ptr: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs, [T, D], and the states after each span, [spans, N, D]."""
    if u.numel() == 0 or A.numel() == 0:
        return u * D, (u.new_empty(0),)
    place, rate, y = _place(ptr, u), A.t().contiguous(), torch.empty_like(u)
    state = _carried(u, delta, rate, B, place)
    with on_device_of(u):
        _outputs[_programs(u)](
            u, delta, rate, B, C, D, place, state, y, *_sizes(u, A), **_OPTIONS
        )
    return y, (state,)


def scan_gradients(
    grad: Tensor,
    state: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    ptr: Tensor,
) -> tuple[Tensor, ...]:
    """The gradients of u, delta, A, B, C and D."""
    dD = (grad * u).sum(0)
    if u.numel() == 0 or A.numel() == 0:
        return grad * D, *(torch.zeros_like(x) for x in (delta, A, B, C)), dD
    place, rate = _place(ptr, u), A.t().contiguous()
    adjoint = _carried(grad, delta, rate, C, place, reverse=True)
    du, ddelta, dA = (torch.empty_like(x) for x in (u, delta, state))
    spans, slices = _programs(u)
    dB, dC = (u.new_empty(slices, *B.shape) for _ in range(2))
    with on_device_of(u):
        _gradients[spans, slices](
            u, delta, rate, B, C, D, place, state, adjoint, grad, du, ddelta, dA, dB,
            dC, *_sizes(u, A), **_OPTIONS,
        )  # fmt: skip
    return du, ddelta, dA.sum(0).t(), dB.sum(0), dC.sum(0), dD


def _carried(
    x: Tensor,
    delta: Tensor,
    rate: Tensor,
    by: Tensor,
    place: Tensor,
    reverse: bool = False,
) -> Tensor:
    """The states after each span, or the adjoints before each, [spans, N, D]."""
    end = x.new_empty(_programs(x)[0], *rate.shape)
    decay = torch.empty_like(end)
    with on_device_of(x):
        _span_ends[_programs(x)](
            x, delta, rate, by, place, decay, end, *_sizes(x, rate.t()), reverse,
            **_OPTIONS,
        )  # fmt: skip
    return carry(decay, end, reverse)


def _place(ptr: Tensor, u: Tensor) -> Tensor:
    """How many rows of its sequence precede each row."""
    return places(ptr, u.size(0))[0].int()


def _programs(u: Tensor) -> tuple[int, int]:
    return triton.cdiv(u.size(0), _ROWS), triton.cdiv(u.size(1), _WIDTH)


def _sizes(u: Tensor, A: Tensor) -> tuple[int, ...]:
    return u.size(0), *A.shape, _ROWS, _WIDTH


# --------------------------------------------------------------- the parts of kernels


@triton.jit
def _span(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """A program's rows and channels."""
    t = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return t, tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)


@triton.jit
def _load(X, t, d, there, CHANNELS: tl.constexpr):
    """Rows of X [T, CHANNELS], masked by `there`."""
    mask = there[:, None] & (d < CHANNELS)[None, :]
    return tl.load(X + t[:, None] * CHANNELS + d[None, :], mask=mask, other=0.0)


@triton.jit
def _column(X, t, n, there, STATES: tl.constexpr):
    """Column n of X [T, STATES], masked by `there`."""
    return tl.load(X + t * STATES + n, mask=there, other=0.0)[:, None]


@triton.jit
def _begins(PLACE, t, there):
    """Whether a sequence begins at each row."""
    return tl.load(PLACE + t, mask=there, other=1)[:, None] == 0


# ------------------------------------------------------------------------- the kernels


@triton.jit(do_not_specialize=["num_rows"])
def _span_ends(
    X, DELTA, RATE, BY, PLACE, DECAY, END, num_rows, CHANNELS: tl.constexpr,
    STATES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """The state after a span that starts from zero, and the span's total decay."""
    t, d = _span(ROWS, WIDTH)
    there = t < num_rows
    o = tl.arange(0, ROWS)
    begins = tl.load(PLACE + t, mask=there, other=1) == 0
    x = _load(X, t, d, there, CHANNELS)
    delta = _load(DELTA, t, d, there, CHANNELS)
    total = tl.sum(delta, 0)
    if REVERSE:  # adjoints leave from the rows before the first start of a sequence
        own = o < tl.min(tl.where(begins, o, ROWS), 0)
        way = tl.cumsum(delta, 0)
    else:  # states leave from the rows of the last sequence
        own = o >= tl.max(tl.where(begins, o, -1), 0)
        x *= delta
        later = there & (o < ROWS - 1) & (t + 1 < num_rows)
        way = tl.cumsum(_load(DELTA, t + 1, d, later, CHANNELS), 0, reverse=True)
    whole = tl.max(begins.to(tl.int32), 0) == 0
    for n in range(0, STATES):
        rate = tl.load(RATE + n * CHANNELS + d, mask=d < CHANNELS, other=0.0)
        by = _column(BY, t, n, there, STATES)
        left = tl.where(own[:, None], tl.exp(way * rate[None, :]) * (x * by), 0.0)
        at = (tl.program_id(0).to(tl.int64) * STATES + n) * CHANNELS + d
        tl.store(END + at, tl.sum(left, 0), mask=d < CHANNELS)
        decay = tl.where(whole, tl.exp(total * rate), 0.0)
        tl.store(DECAY + at, decay, mask=d < CHANNELS)


@triton.jit(do_not_specialize=["num_rows"])
def _outputs(
    U, DELTA, RATE, B, C, D, PLACE, STATE, Y, num_rows, CHANNELS: tl.constexpr,
    STATES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The outputs of a span and some channels."""
    t, d = _span(ROWS, WIDTH)
    there, span = t < num_rows, tl.program_id(0)
    first = (tl.arange(0, ROWS) == 0)[:, None]
    begins = _begins(PLACE, t, there)
    u = _load(U, t, d, there, CHANNELS)
    delta = _load(DELTA, t, d, there, CHANNELS)
    y = tl.zeros([ROWS, WIDTH], U.dtype.element_ty)
    for n in range(0, STATES):
        rate = tl.load(RATE + n * CHANNELS + d, mask=d < CHANNELS, other=0.0)
        a = tl.where(begins, 0.0, tl.exp(delta * rate[None, :]))
        x = delta * u * _column(B, t, n, there, STATES)
        before = state_of(STATE, span - 1, n, d, CHANNELS, STATES)
        x = tl.where(first & (a != 0), a * before + x, x)
        _, h = tl.associative_scan((a, x), 0, compose)
        y += h * _column(C, t, n, there, STATES)
    y += u * tl.load(D + d, mask=d < CHANNELS, other=0.0)[None, :]
    mask = there[:, None] & (d < CHANNELS)[None, :]
    tl.store(Y + t[:, None] * CHANNELS + d[None, :], y, mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _gradients(
    U, DELTA, RATE, B, C, D, PLACE, STATE, ADJOINT, DY, DU, DDELTA, DA, DB, DC,
    num_rows, CHANNELS: tl.constexpr, STATES: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """The gradients of a span and some channels; h is the state before each row."""
    t, d = _span(ROWS, WIDTH)
    span, o = tl.program_id(0), tl.arange(0, ROWS)
    there, first, last = t < num_rows, (o == 0)[:, None], (o == ROWS - 1)[:, None]
    behind, ahead = there & (o > 0), t + 1 < num_rows
    begins, begun = _begins(PLACE, t, there), _begins(PLACE, t - 1, behind)
    ends = _begins(PLACE, t + 1, ahead)
    u = _load(U, t, d, there, CHANNELS)
    delta = _load(DELTA, t, d, there, CHANNELS)
    delta_behind = _load(DELTA, t - 1, d, behind, CHANNELS)
    delta_ahead = _load(DELTA, t + 1, d, ahead, CHANNELS)
    x_behind = delta_behind * _load(U, t - 1, d, behind, CHANNELS)
    dy = _load(DY, t, d, there, CHANNELS)
    written = tl.zeros([ROWS, WIDTH], U.dtype.element_ty)
    moved = tl.zeros([ROWS, WIDTH], U.dtype.element_ty)
    for n in range(0, STATES):
        rate = tl.load(RATE + n * CHANNELS + d, mask=d < CHANNELS, other=0.0)
        a = tl.where(ends, 0.0, tl.exp(delta_ahead * rate[None, :]))
        x = dy * _column(C, t, n, there, STATES)
        after = state_of(ADJOINT, span + 1, n, d, CHANNELS, STATES)
        x = tl.where(last, x + after, x)
        _, g = tl.associative_scan((a, x), 0, compose, reverse=True)

        b = _column(B, t, n, there, STATES)
        written += g * b
        at = (tl.program_id(1).to(tl.int64) * num_rows + t) * STATES + n
        tl.store(DB + at, tl.sum(g * delta * u, 1), mask=there)
        a = tl.where(begun, 0.0, tl.exp(delta_behind * rate[None, :]))
        x = x_behind * _column(B, t - 1, n, behind, STATES)
        x = tl.where(first, state_of(STATE, span - 1, n, d, CHANNELS, STATES), x)
        _, h = tl.associative_scan((a, x), 0, compose)
        h = tl.where(begins, 0.0, tl.exp(delta * rate[None, :]) * h)
        g *= h
        moved += g * rate[None, :]
        h += delta * u * b
        tl.store(DC + at, tl.sum(h * dy, 1), mask=there)
        at = (span.to(tl.int64) * STATES + n) * CHANNELS + d
        tl.store(DA + at, tl.sum(g * delta, 0), mask=d < CHANNELS)
    at = t[:, None] * CHANNELS + d[None, :]
    mask = there[:, None] & (d < CHANNELS)[None, :]
    skip = dy * tl.load(D + d, mask=d < CHANNELS, other=0.0)[None, :]
    tl.store(DU + at, delta * written + skip, mask=mask)
    tl.store(DDELTA + at, u * written + moved, mask=mask)
