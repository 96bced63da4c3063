"""The convolution on the CPU: jitted, one task per block of rows."""

import numpy as np
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.numba_runtime import arrays, jit, run, stopped
from pyg_chimera.ops.common.simd import (
    fma,
    lanes,
    load_part,
    pointer,
    store_part,
)

DEVICES = ("cpu",)

#: Rows of a task, and the most tasks that have their own sum of filter gradients.
_ROWS, _SUMS = 64, 16


def why_not(call: Call) -> str | None:
    """It supports all calls."""


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The outputs, [T, F]."""
    x, weight, bias = call.inputs[:3]
    return _convolved(x, weight, bias, call.structure.reads), ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of x, weight and, if given, bias."""
    x, weight, bias = call.inputs[:3]
    dx = _convolved(grad, weight, None, call.structure.read_by)
    num_rows, count = len(x), max(1, min(_SUMS, len(x) // _ROWS))
    dweight = weight.new_zeros(count, weight.size(1), weight.size(0))
    block = np.linspace(0, num_rows, count + 1).astype(np.int64)
    _run(_weight_gradients, block, *arrays(call.structure.reads, x, grad, dweight))
    grads = (dx, dweight.sum(0).t())
    return grads if bias is None else (*grads, grad.sum(0))


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, reads: Tensor) -> Tensor:
    out, bias = x.new_empty(x.shape), weight[:, 0] * 0 if bias is None else bias
    block = np.append(np.arange(0, len(x), _ROWS), len(x))
    _run(_convolve, block, *arrays(reads, x, out, weight.t(), bias))
    return out


def _run(kernel, block: np.ndarray, *args: np.ndarray) -> None:
    """Runs a kernel on blocks of rows."""
    reads, x = args[:2]
    costs = np.diff(block) * (0.2 * (1 + reads.shape[1]) * x.shape[1])
    run(kernel, costs, 0, x.dtype, block, *args)


@jit
def _convolve(first, last, stop, scratch, block, reads, x, out, weight, bias):
    size, channels = weight.shape
    X, Y, W, B = pointer(x), pointer(out), pointer(weight), pointer(bias)
    for task in range(first, last):
        if stopped(stop):
            return
        for t in range(block[task], block[task + 1]):
            for c in range(0, channels, lanes(Y)):
                n = channels - c
                y = load_part(B + c, n)
                for k in range(size):
                    r = reads[t, k]
                    if r >= 0:
                        seen = load_part(X + (r * channels + c), n)
                        y = fma(load_part(W + (k * channels + c), n), seen, y)
                store_part(Y + (t * channels + c), y, n)


@jit
def _weight_gradients(first, last, stop, scratch, block, reads, x, grad, out):
    _, size, channels = out.shape
    X, dY = pointer(x), pointer(grad)
    for task in range(first, last):
        for t in range(block[task], block[task + 1]):
            if stopped(stop):
                return
            for k in range(size):
                r = reads[t, k]
                if r < 0:
                    continue
                dW = pointer(out) + (task * size + k) * channels
                for c in range(0, channels, lanes(X)):
                    n = channels - c
                    dy = load_part(dY + (t * channels + c), n)
                    seen = load_part(X + (r * channels + c), n)
                    store_part(dW + c, fma(dy, seen, load_part(dW + c, n)), n)
