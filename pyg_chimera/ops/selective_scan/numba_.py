"""The recurrences on the CPU: jitted, one task per (block of sequences, channels).

A task's states [N, channels] stay in the nearest cache, and the states of all rows are
never written out: the forward pass keeps those before each 32nd row, from which the
backward pass computes 32 rows of them anew at a time. The innermost loops run over
channels, so the exponentials, and all else, are on full vectors.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload
from torch import Tensor

from pyg_chimera.ops.resolvent.numba_ import _jit, _run

__all__ = [
    "conv_backward",
    "conv_forward",
    "kept_shape",
    "scan_backward",
    "scan_forward",
]

#: Rows from one state that is kept to the next.
_SPAN = 32
#: Sequences go together to blocks of about this many rows.
_BLOCK_ROWS = 128
#: Channels of a task: a multiple of the one, and not more than the other.
_LANES, _MAX_WIDTH = 16, 128


# ---------------------------------------------------------------------- exponentials

_LOG_2 = math.log(2)
_TAYLOR = [_LOG_2**k / math.factorial(k) for k in range(13)]
_TAYLOR_64 = tuple(_TAYLOR[::-1])
_TAYLOR_32 = tuple(np.float32(c) for c in _TAYLOR[6::-1])


def _exp2(x: float) -> float:
    """2^x on vectors, to the last bits, where the C library goes one by one.

    x = n + r with an integer n, which becomes the exponent, and |r| <= 1/2, of which a
    polynomial is taken. What is below the smallest normal number becomes that.
    """
    return np.exp2(x)


# Sums must not be reordered here: x - n is exact, and only after n.
@overload(_exp2, jit_options={"fastmath": {"contract"}})
def _overload_exp2(x):  # type: ignore[no-untyped-def]
    if x == types.float32:
        real, integer, bias, shift = np.float32, np.int32, 127, 23
        coefficients = _TAYLOR_32
    else:
        real, integer, bias, shift = np.float64, np.int64, 1023, 52
        coefficients = _TAYLOR_64
    degree = len(coefficients)
    least, most, half = real(1 - bias), real(bias + 1), real(0.5)
    bias, shift = integer(bias), integer(shift)

    def exp2(x):  # type: ignore[no-untyped-def]
        # Comparisons with NaN are false: it passes.
        x = least if x < least else x
        x = most if x > most else x
        n = np.floor(x + half)
        r = x - n
        p = coefficients[0]
        for k in range(1, degree):
            p = p * r + coefficients[k]
        return p * integer((integer(n) + bias) << shift).view(real)

    return exp2


# ------------------------------------------------------------------------------ tasks


def _optimized() -> None:
    """Tells the compiler of the kernel that calls this what numba has no options for.

    That no two of its arrays overlap, so that one loop may write to several. And that
    it should use all of its vector units: half of them are preferred where that lets
    other programs run at a higher clock, which costs half as much again here.
    """


@overload(_optimized, inline="always")
def _overload_optimized():  # type: ignore[no-untyped-def]
    return lambda: _mark_caller()


@intrinsic
def _mark_caller(typing_context):  # type: ignore[no-untyped-def]
    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        for argument in builder.function.args:
            if isinstance(argument.type, ir.PointerType):
                argument.add_attribute("noalias")
        attributes = builder.function.attributes
        if isinstance(attributes, set):  # past its list, which has none with a value
            set.add(attributes, '"prefer-vector-width"="512"')
        return context.get_dummy_value()

    return types.void(), generate


class _Tasks(NamedTuple):
    """A task is a block of sequences, and the channels of a slice."""

    block: np.ndarray  #: the first sequence of each block, and last their number
    width: int  #: channels of a slice
    num_slices: int

    @classmethod
    def of(cls, ptr: np.ndarray, channels: int) -> "_Tasks":
        number = ptr[:-1] // _BLOCK_ROWS
        new = np.flatnonzero(np.diff(number, prepend=-1))
        # Few blocks are split by channels, for every thread to have something to do.
        wanted = -(-torch.get_num_threads() // max(1, new.shape[0]))
        wanted = max(wanted, -(-channels // _MAX_WIDTH), 1)
        width = max(-(-channels // (wanted * _LANES)) * _LANES, 1)
        return cls(
            np.append(new, number.shape[0]), width, max(1, -(-channels // width))
        )

    def costs(self, ptr: np.ndarray, per_row: float) -> np.ndarray:
        return np.repeat(np.diff(ptr[self.block]) * per_row, self.num_slices)


def kept_shape(num_rows: int, A: Tensor) -> tuple[int, int, int]:
    """The shape of the states that the forward pass keeps."""
    return -(-num_rows // _SPAN), A.size(1), A.size(0)


def _rates(A: Tensor) -> np.ndarray:
    """A as exponents of two, [N, D]."""
    return (A.t().double() / _LOG_2).to(A.dtype).contiguous().numpy()


def _arrays(*tensors: Tensor) -> list[np.ndarray]:
    return [x.contiguous().numpy() for x in tensors]


# ------------------------------------------------------------------------------- scan


def scan_forward(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, ptr: Tensor
) -> tuple[Tensor, Tensor]:
    """The outputs, [T, D], and the states before the first row of each span."""
    (num_rows, channels), num_states = u.shape, A.size(1)
    out, kept = u.new_empty(u.shape), u.new_empty(kept_shape(num_rows, A))
    tasks = _Tasks.of(ptr.numpy(), channels)
    _run(
        _forward,
        tasks.costs(ptr.numpy(), float(num_states * tasks.width)),
        (num_states + 2) * tasks.width,
        out.numpy().dtype,
        *(ptr.numpy(), *tasks, *_arrays(u, delta), _rates(A), *_arrays(B, C, D)),
        *(out.numpy(), kept.numpy()),
    )
    return out, kept


@_jit
def _forward(  # type: ignore[no-untyped-def]
    first, last, scratch, ptr, block, most, num_slices, u, delta, rate, B, C, D, out,
    kept,
):  # fmt: skip
    _optimized()
    num_states = rate.shape[0]
    h = scratch[: num_states * most].reshape(num_states, most)
    rest = scratch[num_states * most :][: 2 * most].reshape(2, most)
    x, y = rest[0], rest[1]
    for task in range(first, last):
        i, part = task // num_slices, task % num_slices
        # Unsigned, or each index would be looked at for being negative.
        a = np.uint64(part * most)
        width = np.uint64(min(most, u.shape[1] - part * most))
        for s in range(block[i], block[i + 1]):
            h[:] = 0
            for t in range(ptr[s], ptr[s + 1]):
                if t % _SPAN == 0:
                    for n in range(num_states):
                        for d in range(width):
                            kept[t // _SPAN, n, a + d] = h[n, d]
                for d in range(width):
                    x[d] = delta[t, a + d] * u[t, a + d]
                for d in range(width):
                    y[d] = D[a + d] * u[t, a + d]
                for n in range(num_states):
                    b, c = B[t, n], C[t, n]
                    for d in range(width):
                        e = _exp2(delta[t, a + d] * rate[n, a + d])
                        e = e * h[n, d] + b * x[d]
                        h[n, d] = e
                        y[d] += c * e
                for d in range(width):
                    out[t, a + d] = y[d]


def scan_backward(
    grad: Tensor,
    u: Tensor,
    delta: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    ptr: Tensor,
    kept: Tensor,
) -> tuple[Tensor, ...]:
    """The gradients of u, delta, A, B, C and D."""
    (num_rows, channels), num_states = u.shape, A.size(1)
    tasks = _Tasks.of(ptr.numpy(), channels)
    num_blocks = tasks.block.shape[0] - 1
    du, ddelta = u.new_empty(u.shape), u.new_empty(u.shape)
    # A sum for each task, as they run at the same time.
    dA = u.new_empty(num_blocks, num_states, channels)
    dB = u.new_empty(tasks.num_slices, num_rows, num_states)
    dC = u.new_empty(tasks.num_slices, num_rows, num_states)
    dD = u.new_empty(num_blocks, channels)
    _run(
        _backward,
        tasks.costs(ptr.numpy(), 4.0 * num_states * tasks.width),
        ((2 * _SPAN + 3) * num_states + 3) * tasks.width,
        du.numpy().dtype,
        *(ptr.numpy(), *tasks, *_arrays(grad, u, delta), _rates(A)),
        *_arrays(B, C, D, kept),
        *_arrays(du, ddelta, dA, dB, dC, dD),
    )
    dB, dC = (x[0] if tasks.num_slices == 1 else x.sum(0) for x in (dB, dC))
    return du, ddelta, dA.sum(0).t(), dB, dC, dD.sum(0)


@_jit
def _backward(  # type: ignore[no-untyped-def]
    first, last, scratch, ptr, block, most, num_slices, grad, u, delta, rate, B, C, D,
    kept, du, ddelta, dA, dB, dC, dD,
):  # fmt: skip
    num_states = rate.shape[0]
    size = num_states * most
    # States before and after each row of a span, decays, and the adjoint states.
    at = (_SPAN + 1) * size
    h = scratch[:at].reshape(_SPAN + 1, num_states, most)
    decay = scratch[at : at + _SPAN * size].reshape(_SPAN, num_states, most)
    at += _SPAN * size
    g = scratch[at : at + size].reshape(num_states, most)
    at += size
    sums = scratch[at : at + size].reshape(num_states, most)
    at += size
    rest = scratch[at : at + 3 * most].reshape(3, most)
    _backward_tasks(
        first, last, ptr, block, most, num_slices, grad, u, delta, rate, B, C, D, kept,
        du, ddelta, dA, dB, dC, dD, h, decay, g, sums, rest[0], rest[1],
        rest[2],
    )  # fmt: skip


@_jit
def _backward_tasks(  # type: ignore[no-untyped-def]
    first, last, ptr, block, most, num_slices, grad, u, delta, rate, B, C, D, kept, du,
    ddelta, dA, dB, dC, dD, h, decay, g, sums, x, read, rates,
):  # fmt: skip
    _optimized()
    num_states = rate.shape[0]
    zero, log_2 = rate.dtype.type(0), rate.dtype.type(_LOG_2)
    for task in range(first, last):
        i, part = task // num_slices, task % num_slices
        # Unsigned, or each index would be looked at for being negative.
        a = np.uint64(part * most)
        width = np.uint64(min(most, u.shape[1] - part * most))
        for d in range(width):
            dD[i, a + d] = 0
        sums[:] = 0
        for s in range(block[i], block[i + 1]):
            start, stop = ptr[s], ptr[s + 1]
            g[:] = 0
            while stop > start:
                low = max(start, (stop - 1) // _SPAN * _SPAN)
                for n in range(num_states):
                    for d in range(width):
                        h[0, n, d] = kept[low // _SPAN, n, a + d] if low > start else 0
                for t in range(low, stop):
                    k = t - low
                    for d in range(width):
                        x[d] = delta[t, a + d] * u[t, a + d]
                    for n in range(num_states):
                        b = B[t, n]
                        for d in range(width):
                            e = _exp2(delta[t, a + d] * rate[n, a + d])
                            decay[k, n, d] = e
                            h[k + 1, n, d] = e * h[k, n, d] + b * x[d]
                for t in range(stop - 1, low - 1, -1):
                    k = t - low
                    for d in range(width):
                        x[d] = delta[t, a + d] * u[t, a + d]
                        read[d] = 0
                        rates[d] = 0
                    for n in range(num_states):
                        b, c = B[t, n], C[t, n]
                        to_b, to_c = zero, zero
                        for d in range(width):
                            dy = grad[t, a + d]
                            dh = g[n, d] + c * dy
                            to_b += dh * x[d]
                            to_c += h[k + 1, n, d] * dy
                            read[d] += b * dh
                            dh *= decay[k, n, d]
                            g[n, d] = dh
                            dh *= h[k, n, d]
                            rates[d] += dh * rate[n, a + d]
                            sums[n, d] += dh * delta[t, a + d]
                        dB[part, t, n], dC[part, t, n] = to_b, to_c
                    for d in range(width):
                        dy = grad[t, a + d]
                        du[t, a + d] = delta[t, a + d] * read[d] + D[a + d] * dy
                        dD[i, a + d] += u[t, a + d] * dy
                        ddelta[t, a + d] = u[t, a + d] * read[d] + log_2 * rates[d]
                stop = low
        for n in range(num_states):
            for d in range(width):
                dA[i, n, a + d] = sums[n, d]


# ------------------------------------------------------------------------ convolution


def conv_forward(x: Tensor, weight: Tensor, bias: Tensor | None, ptr: Tensor) -> Tensor:
    """The outputs, [T, D]."""
    out = x.new_empty(x.shape)
    bias = weight.new_zeros(weight.size(0)) if bias is None else bias
    block = _Tasks.of(ptr.numpy(), x.size(1)).block
    _run(
        _conv_forward,
        np.diff(ptr.numpy()[block]) * float(weight.numel()),
        0,
        out.numpy().dtype,
        *(ptr.numpy(), block, *_arrays(x, weight.t(), bias, out)),
    )
    return out


@_jit
def _conv_forward(  # type: ignore[no-untyped-def]
    first, last, scratch, ptr, block, x, weight, bias, out
):
    size, channels = weight.shape
    for i in range(first, last):
        for s in range(block[i], block[i + 1]):
            for t in range(ptr[s], ptr[s + 1]):
                for d in range(channels):
                    out[t, d] = bias[d]
                for k in range(max(0, size - 1 - t + ptr[s]), size):
                    r = t + k - size + 1
                    for d in range(channels):
                        out[t, d] += weight[k, d] * x[r, d]


def conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, ptr: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of x and weight."""
    dx = x.new_empty(x.shape)
    block = _Tasks.of(ptr.numpy(), x.size(1)).block
    dweight = weight.new_empty(block.shape[0] - 1, weight.size(1), weight.size(0))
    _run(
        _conv_backward,
        np.diff(ptr.numpy()[block]) * (2.0 * weight.numel()),
        0,
        dx.numpy().dtype,
        *(ptr.numpy(), block, *_arrays(grad, x, weight.t(), dx, dweight)),
    )
    return dx, dweight.sum(0).t().contiguous()


@_jit
def _conv_backward(  # type: ignore[no-untyped-def]
    first, last, scratch, ptr, block, grad, x, weight, dx, dweight
):
    size, channels = weight.shape
    for i in range(first, last):
        dweight[i] = 0
        for s in range(block[i], block[i + 1]):
            for t in range(ptr[s], ptr[s + 1]):
                for d in range(channels):
                    dx[t, d] = 0
                for k in range(max(0, size - 1 - t + ptr[s]), size):
                    r = t + k - size + 1
                    for d in range(channels):
                        dx[r, d] += weight[k, d] * grad[t, d]
                    for d in range(channels):
                        dweight[i, k, d] += grad[t, d] * x[r, d]
