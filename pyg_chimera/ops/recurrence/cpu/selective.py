"""Mamba's recurrence on the CPU: jitted, one task per (block of sequences, channels).

A task's states [N, channels] stay in the innermost cache, and the states of all rows
are never stored: the forward pass stores those before every 32nd row, from which the
backward pass recomputes 32 rows at a time. The innermost loops run over channels, so
that everything, exponentials included, is vectorized.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.array_views import as_array
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.numba_runtime import arrays, jit, run, stopped
from pyg_chimera.ops.common.sequences import row_blocks
from pyg_chimera.ops.common.vector_kit import LANES, LOG_2, exp2, optimized

DEVICES = ("cpu",)

#: Rows between stored states.
_SPAN = 32
#: The most channels of a task.
_MAX_WIDTH = 128


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs, [T, D], and the states before the first row of each span."""
    u, A = call.inputs.u, call.inputs.A
    (num_rows, channels), num_states = u.shape, A.size(1)
    kept = u.new_empty(-(-num_rows // _SPAN), num_states, channels)
    out = u.new_empty(u.shape)
    tasks, written = _Tasks.of(as_array(call.inputs.ptr), channels), arrays(out, kept)
    run(
        _forward,
        tasks.costs(float(num_states * tasks.width)),
        (num_states + 2) * tasks.width,
        written[0].dtype,
        *(tasks, _Operands.of(call), *written),
    )
    return out, (kept,)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of u, delta, A, B, C and D."""
    u, A = call.inputs.u, call.inputs.A
    (num_rows, channels), num_states = u.shape, A.size(1)
    tasks = _Tasks.of(as_array(call.inputs.ptr), channels)
    num_blocks = tasks.block.shape[0] - 1
    du, ddelta = u.new_empty(u.shape), u.new_empty(u.shape)
    # Each task has its own part of a sum, as tasks run in parallel.
    dA = u.new_empty(num_blocks, num_states, channels)
    shape = (tasks.num_slices, num_rows, num_states)
    dB, dC = u.new_empty(shape), u.new_empty(shape)
    dD = u.new_empty(num_blocks, channels)
    grads = _Operands(*arrays(du, ddelta, dA, dB, dC, dD))
    run(
        _backward,
        tasks.costs(4.0 * num_states * tasks.width),
        ((2 * _SPAN + 3) * num_states + 3) * tasks.width,
        grads.u.dtype,
        *(tasks, _Operands.of(call), *arrays(*saved, grad), grads),
    )
    dB, dC = (x[0] if tasks.num_slices == 1 else x.sum(0) for x in (dB, dC))
    return du, ddelta, dA.sum(0).t(), dB, dC, dD.sum(0)


class _Operands(NamedTuple):
    """The inputs; or their gradients, with parts of those of A, B, C and D."""

    u: np.ndarray  #: [T, D]
    delta: np.ndarray  #: [T, D]
    rate: np.ndarray  #: [N, D], A in units of log(2), for `exp2`
    B: np.ndarray  #: [T, N]
    C: np.ndarray  #: [T, N]
    D: np.ndarray  #: [D]

    @classmethod
    def of(cls, call: Call) -> "_Operands":
        u, delta, A, *rest = call.inputs[:6]
        rate = (A.t().double() / LOG_2).to(A.dtype)
        return cls(*arrays(u, delta, rate, *rest))


class _Tasks(NamedTuple):
    """A task is a block of sequences with a slice of the channels."""

    ptr: np.ndarray  #: the first row of each sequence
    block: np.ndarray  #: the first sequence of each block, followed by their number
    width: int  #: channels of a slice
    num_slices: int

    @classmethod
    def of(cls, ptr: np.ndarray, channels: int) -> "_Tasks":
        block = row_blocks(ptr)
        # If there are few blocks, split the channels to keep all threads busy.
        wanted = -(-torch.get_num_threads() // max(1, block.shape[0] - 1))
        wanted = max(wanted, -(-channels // _MAX_WIDTH), 1)
        width = max(-(-channels // (wanted * LANES)) * LANES, 1)
        return cls(ptr, block, width, max(1, -(-channels // width)))

    def costs(self, per_row: float) -> np.ndarray:
        return np.repeat(np.diff(self.ptr[self.block]) * per_row, self.num_slices)


@jit
def _forward(first, last, stop, scratch, tasks, operands, out, kept):
    optimized()
    ptr, block, most, num_slices = tasks
    u, delta, rate, B, C, D = operands
    num_states, zero = rate.shape[0], rate.dtype.type(0)
    h = scratch[: num_states * most].reshape(num_states, most)
    rest = scratch[num_states * most :][: 2 * most].reshape(2, most)
    x, y = rest[0], rest[1]
    for task in range(first, last):
        i, part = task // num_slices, task % num_slices
        # Unsigned, as numba would check signed indices for being negative.
        a = np.uint64(part * most)
        width = np.uint64(min(most, u.shape[1] - part * most))
        for s in range(block[i], block[i + 1]):
            if stopped(stop):
                return
            h[:] = 0
            begin = ptr[s]
            for t in range(begin, ptr[s + 1]):
                if t % _SPAN == 0:
                    if stopped(stop):
                        return
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
                        e = exp2(delta[t, a + d] * rate[n, a + d])
                        e = e if t > begin else zero  # as infinity times 0 is NaN
                        e = e * h[n, d] + b * x[d]
                        h[n, d] = e
                        y[d] += c * e
                for d in range(width):
                    out[t, a + d] = y[d]


@jit
def _backward(first, last, stop, scratch, tasks, operands, kept, grad, grads):
    num_states, most = operands.rate.shape[0], tasks.width
    size = num_states * most
    # States before and after each row of a span, decays, adjoint states, and sums.
    at = (_SPAN + 1) * size
    h = scratch[:at].reshape(_SPAN + 1, num_states, most)
    decay = scratch[at : at + _SPAN * size].reshape(_SPAN, num_states, most)
    at += _SPAN * size
    g = scratch[at : at + size].reshape(num_states, most)
    at += size
    sums = scratch[at : at + size].reshape(num_states, most)
    at += size
    rest = scratch[at : at + 3 * most].reshape(3, most)
    work = h, decay, g, sums, rest[0], rest[1], rest[2]
    _backward_tasks(first, last, stop, tasks, operands, kept, grad, grads, work)


@jit
def _backward_tasks(first, last, stop, tasks, operands, kept, grad, grads, work):
    optimized()
    ptr, block, most, num_slices = tasks
    u, delta, rate, B, C, D = operands
    du, ddelta, dA, dB, dC, dD = grads
    h, decay, g, sums, x, read, rates = work
    num_states = rate.shape[0]
    zero, log_2 = rate.dtype.type(0), rate.dtype.type(LOG_2)
    for task in range(first, last):
        i, part = task // num_slices, task % num_slices
        # Unsigned, as numba would check signed indices for being negative.
        a = np.uint64(part * most)
        width = np.uint64(min(most, u.shape[1] - part * most))
        for d in range(width):
            dD[i, a + d] = 0
        sums[:] = 0
        for s in range(block[i], block[i + 1]):
            start, end = ptr[s], ptr[s + 1]
            g[:] = 0
            while end > start:
                if stopped(stop):
                    return
                low = max(start, (end - 1) // _SPAN * _SPAN)
                for n in range(num_states):
                    for d in range(width):
                        h[0, n, d] = kept[low // _SPAN, n, a + d] if low > start else 0
                for t in range(low, end):
                    k = t - low
                    for d in range(width):
                        x[d] = delta[t, a + d] * u[t, a + d]
                    for n in range(num_states):
                        b = B[t, n]
                        for d in range(width):
                            e = exp2(delta[t, a + d] * rate[n, a + d])
                            e = e if t > start else zero
                            decay[k, n, d] = e
                            h[k + 1, n, d] = e * h[k, n, d] + b * x[d]
                for t in range(end - 1, low - 1, -1):
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
                end = low
        for n in range(num_states):
            for d in range(width):
                dA[i, n, a + d] = sums[n, d]
