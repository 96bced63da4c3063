"""The convolution on the CPU: jitted, one task per block of sequences."""

import numpy as np
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.numba_runtime import arrays, jit, run, stopped
from pyg_chimera.ops.common.sequences import row_blocks

DEVICES = ("cpu",)


def why_not(call: Call) -> str | None:
    """It supports all calls."""


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs, [T, D]."""
    x, weight, bias, ptr = call.inputs[:4]
    out = x.new_empty(x.shape)
    bias = weight.new_zeros(weight.size(0)) if bias is None else bias
    block = row_blocks(ptr.numpy())
    run(
        _forward,
        np.diff(ptr.numpy()[block]) * float(weight.numel()),
        0,
        out.numpy().dtype,
        *(ptr.numpy(), block, *arrays(x, weight.t(), bias, out)),
    )
    return out, ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of x, weight and, if given, bias."""
    x, weight, bias, ptr = call.inputs[:4]
    dx = x.new_empty(x.shape)
    block = row_blocks(ptr.numpy())
    dweight = weight.new_empty(block.shape[0] - 1, weight.size(1), weight.size(0))
    run(
        _backward,
        np.diff(ptr.numpy()[block]) * (2.0 * weight.numel()),
        0,
        dx.numpy().dtype,
        *(ptr.numpy(), block, *arrays(grad, x, weight.t(), dx, dweight)),
    )
    grads = (dx, dweight.sum(0).t())
    return grads if bias is None else (*grads, grad.sum(0))


@jit
def _forward(first, last, stop, scratch, ptr, block, x, weight, bias, out):
    size, channels = weight.shape
    for i in range(first, last):
        for s in range(block[i], block[i + 1]):
            if stopped(stop):
                return
            for t in range(ptr[s], ptr[s + 1]):
                for d in range(channels):
                    out[t, d] = bias[d]
                for k in range(max(0, size - 1 - t + ptr[s]), size):
                    r = t + k - size + 1
                    for d in range(channels):
                        out[t, d] += weight[k, d] * x[r, d]


@jit
def _backward(first, last, stop, scratch, ptr, block, grad, x, weight, dx, dweight):
    size, channels = weight.shape
    for i in range(first, last):
        dweight[i] = 0
        for s in range(block[i], block[i + 1]):
            if stopped(stop):
                return
            for t in range(ptr[s], ptr[s + 1]):
                for d in range(channels):
                    dx[t, d] = 0
                for k in range(max(0, size - 1 - t + ptr[s]), size):
                    r = t + k - size + 1
                    for d in range(channels):
                        dx[r, d] += weight[k, d] * grad[t, d]
                    for d in range(channels):
                        dweight[i, k, d] += grad[t, d] * x[r, d]
