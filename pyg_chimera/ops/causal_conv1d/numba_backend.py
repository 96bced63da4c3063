"""The convolution on the CPU: jitted, one task per block of sequences."""

from typing import NamedTuple

import numpy as np
from torch import Tensor

from pyg_chimera.ops.common.array_views import as_array
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.numba_runtime import arrays, jit, run, stopped
from pyg_chimera.ops.common.sequences import row_blocks

DEVICES = ("cpu",)


class _Operands(NamedTuple):
    """The rows and their filters, or the gradients of both."""

    x: np.ndarray  #: [T, D]
    weight: np.ndarray  #: [K, D], and its gradient [blocks, K, D]


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs, [T, D]."""
    x, weight, bias, ptr = call.inputs[:4]
    out = x.new_empty(x.shape)
    bias = weight.new_zeros(weight.size(0)) if bias is None else bias
    block, operands = row_blocks(as_array(ptr)), _Operands(*arrays(x, weight.t()))
    _run(_forward, call, 1.0, block, operands, *arrays(bias, out))
    return out, ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of x, weight and, if given, bias."""
    x, weight, bias, ptr = call.inputs[:4]
    block, operands = row_blocks(as_array(ptr)), _Operands(*arrays(x, weight.t()))
    dx = x.new_empty(x.shape)
    dweight = weight.new_empty(len(block) - 1, weight.size(1), weight.size(0))
    d = _Operands(*arrays(dx, dweight))
    _run(_backward, call, 2.0, block, operands, *arrays(grad), d)
    grads = (dx, dweight.sum(0).t())
    return grads if bias is None else (*grads, grad.sum(0))


def _run(kernel, call: Call, cost: float, block: np.ndarray, *args: object) -> None:
    """Runs a kernel on blocks of sequences."""
    ptr = as_array(call.inputs.ptr)
    costs = np.diff(ptr[block]) * (cost * call.inputs.weight.numel())
    run(kernel, costs, 0, as_array(call.inputs.x).dtype, ptr, block, *args)


@jit
def _forward(first, last, stop, scratch, ptr, block, operands, bias, out):
    x, weight = operands
    size, channels = weight.shape
    for i in range(first, last):
        for s in range(block[i], block[i + 1]):
            if stopped(stop):
                return
            for t in range(ptr[s], ptr[s + 1]):
                for c in range(channels):
                    out[t, c] = bias[c]
                for k in range(max(0, size - 1 - t + ptr[s]), size):
                    r = t + k - size + 1
                    for c in range(channels):
                        out[t, c] += weight[k, c] * x[r, c]


@jit
def _backward(first, last, stop, scratch, ptr, block, operands, grad, d):
    (x, weight), (dx, dweight) = operands, d
    size, channels = weight.shape
    for i in range(first, last):
        dweight[i] = 0
        for s in range(block[i], block[i + 1]):
            if stopped(stop):
                return
            for t in range(ptr[s], ptr[s + 1]):
                for c in range(channels):
                    dx[t, c] = 0
                for k in range(max(0, size - 1 - t + ptr[s]), size):
                    r = t + k - size + 1
                    for c in range(channels):
                        dx[r, c] += weight[k, c] * grad[t, c]
                    for c in range(channels):
                        dweight[i, k, c] += grad[t, c] * x[r, c]
