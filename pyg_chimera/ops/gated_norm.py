"""What layers compute around their recurrence: SiLU, the RMS norm and a gate, fused.

On a CPU, PyTorch passes over memory about ten times for it, and as often for gradients.
The jitted kernels pass once. Registered operators take longer than all of that for
small graphs, so this is a plain autograd function of ordinary tensors on the CPU. All
else, such as compilers, transforms and second derivatives, sees PyTorch's operators.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from pyg_chimera.ops.common.array_views import as_array
from pyg_chimera.ops.common.numba_runtime import (
    inlined,
    jit,
    run,
    stopped,
)
from pyg_chimera.ops.common.simd import (
    fma,
    lanes,
    load,
    load_part,
    pointer,
    splat,
    store,
    store_part,
    total,
    zeros,
)
from pyg_chimera.ops.common.torch_private import is_batched, is_followed
from pyg_chimera.ops.common.vector_kit import LOG_2, exp2

#: The most rows of a task, which has its own sum of the gradient of weights.
_ROWS = 128
#: Sums of squares from which on rows are divided first.
_LARGE = 1e30
_ORDINARY = (Tensor, Parameter)
_NONE = {x: as_array(torch.empty(0, dtype=x)) for x in (torch.float32, torch.float64)}


class _Options(NamedTuple):
    eps: float
    scale: float
    activated: bool


def gated_norm(
    x: Tensor,
    weight: Tensor | None = None,
    gate: Tensor | None = None,
    *,
    eps: float | None = 1e-5,
    scale: float = 1.0,
    activated: bool = False,
) -> Tensor:
    r"""The RMS norm of each row, or of its SiLU, times a SiLU-activated gate:

    .. math::
        \mathbf{y} = s \, \mathbf{w} \odot \text{SiLU}(\mathbf{z}) \odot
        \text{RMSNorm}(f(\mathbf{x})), \qquad f \in \{\text{id}, \text{SiLU}\}

    Rows x [V, ..., N] may be columns of a larger matrix, weights are [..., N], and
    gates have the shape of x. If `eps` is None, it is the machine epsilon.
    """
    if eps is None:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps
    options, given = _Options(eps, scale, activated), (x, weight, gate)
    if _is_fusable(*given):
        return _GatedNorm.apply(*given, options)
    return _composed(*given, options)


def rms_norm(
    x: Tensor, weight: Tensor | None = None, eps: float | None = 1e-5
) -> Tensor:
    """The RMS norm of rows, with a `weight` [..., C]. Squares do not overflow, and half
    precision is widened: what recurrences return is of the third degree in features.
    """
    y = x.to(torch.promote_types(x.dtype, torch.float32))
    # Where a row is divided, eps is far below rounding. The divisor cancels.
    y = y / (y.detach().abs().amax(-1, keepdim=True) * 2.0**-30).clamp(min=1)
    y = F.rms_norm(y, y.shape[-1:], eps=eps)
    return (y if weight is None else y * weight).to(x.dtype)


def _composed(
    x: Tensor, weight: Tensor | None, gate: Tensor | None, options: _Options
) -> Tensor:
    eps, scale, silu = options
    x = rms_norm(F.silu(x) if silu else x, None, eps)
    x = x if weight is None else x * weight
    x = x if gate is None else x * F.silu(gate)
    return x if scale == 1 else x * scale


def _is_fusable(x: Tensor, weight: Tensor | None, gate: Tensor | None) -> bool:
    """Whether these are ordinary tensors on the CPU, and nothing follows what is done
    with them but autograd.
    """
    if is_followed() or not (
        type(x) in _ORDINARY
        and x.is_cpu
        and x.dim() > 1
        and x.numel() > 0
        and x.dtype in (torch.float32, torch.float64)
    ):
        return False
    for y, shape in ((weight, x.shape[1:]), (gate, x.shape)):
        if y is not None and not (
            type(y) in _ORDINARY and y.is_cpu and (y.dtype, y.shape) == (x.dtype, shape)
        ):
            return False
    return True


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *given, options = args
        ctx.save_for_backward(*given)
        ctx.options = options
        out = given[0].new_empty(given[0].shape)
        _run(_forward, given, options, as_array(out).reshape(-1))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,), (x, weight, gate), options = grads, ctx.saved_tensors, ctx.options
        if torch.is_grad_enabled() or is_followed() or is_batched(grad):
            again, given = torch.is_grad_enabled(), (x, weight, gate)
            with torch.enable_grad():  # of views, as one may depend on another
                views: list[Any] = [None if y is None else y.view_as(y) for y in given]
                out = _composed(views[0], views[1], views[2], options)
            wanted = [y is not None and y.requires_grad for y in views]
            leaves = [y for y, needed in zip(views, wanted, strict=True) if needed]
            found = iter(torch.autograd.grad(out, leaves, grad, create_graph=again))
            return *(next(found) if needed else None for needed in wanted), None
        dx, dgate = (None if y is None else y.new_empty(y.shape) for y in (x, gate))
        sums = None
        if weight is not None:
            sums = weight.new_zeros(-(-len(x) // _ROWS), *weight.shape)
        d = _Arrays(*(_flat(y, x.dtype) for y in (dx, sums, dgate)))
        _run(_backward, (x, weight, gate), options, _flat(grad, x.dtype), d)
        return dx, None if sums is None else sums.sum(0), dgate, None


# ------------------------------------------------------------------------------ kernels


class _Size(NamedTuple):
    """Of rows of groups of channels, and how far they are apart."""

    rows: int
    groups: int
    channels: int
    share: float  #: one over them
    x_stride: int
    gate_stride: int


class _Arrays(NamedTuple):
    """The inputs or their gradients; all of one dimension, or kernels would be compiled
    for each layout, and without numbers if they are absent.
    """

    x: np.ndarray
    weight: np.ndarray
    gate: np.ndarray


def _run(kernel: Any, given: Any, options: _Options, *others: Any) -> None:
    """Runs a kernel in tasks of some rows."""
    x, weight, gate = given
    flat, x_stride = _rows(x)
    gates, gate_stride = (_NONE[x.dtype], 0) if gate is None else _rows(gate)
    rows, channels = len(x), x.size(-1)
    width = x.numel() // rows
    groups = width // channels
    size = _Size(rows, groups, channels, 1 / channels, x_stride, gate_stride)
    operands = _Arrays(flat, _flat(weight, x.dtype), gates)
    costs = np.full(-(-rows // _ROWS), 1.0 * _ROWS * width)
    scratch = 3 * (channels + 16)
    run(kernel, costs, scratch, flat.dtype, size, options, operands, *others)


def _flat(x: Tensor | None, dtype: torch.dtype) -> np.ndarray:
    return _NONE[dtype] if x is None else as_array(x).reshape(-1)


def _rows(x: Tensor) -> tuple[np.ndarray, int]:
    """All numbers from the first to the last, and how far rows are apart."""
    if not x.is_contiguous():
        row = x[0]
        if row.is_contiguous():
            size = (len(x) - 1) * x.stride(0) + row.numel()
            return as_array(x.as_strided((size,), (1,))), x.stride(0)
        x = x.contiguous()
    return as_array(x).reshape(-1), x.stride(0)


@inlined
def _silu(v, real):
    """SiLU, and its slope."""
    one = splat(real(1))
    s = one / (one + exp2(v * splat(real(-1 / LOG_2))))
    return v * s, s * (one + v * (one - s))


@jit
def _divide(row, n, real):
    """Divides a large row. Returns its sum of squares, and the factor."""
    small, squares = 1.0, 0.0
    for i in range(n):
        small = max(small, abs(row[i]) * 2.0**-30)
    for i in range(n):
        row[i] = real(row[i] / small)
        squares += row[i] * row[i]
    return squares, 1 / small


@inlined
def _start(row, slope, p, size, options, real):
    """Sets a row to f(x), and the slope unless it is None. Returns one over the root of
    the mean square, and the factor that keeps squares from overflowing.
    """
    (eps, _, activated), channels = options, size.channels
    sums, small = zeros(p), 1.0
    for at in range(0, channels, lanes(p)):
        v = load_part(p + at, channels - at)
        if activated:
            v, s = _silu(v, real)
            if slope is not None:
                store(slope + at, s)
        store(row + at, v)
        sums = fma(v, v, sums)
    squares = float(total(sums))
    if not squares < _LARGE:
        squares, small = _divide(row, channels, real)
    mean = squares * size.share + eps
    return (math.inf if mean == 0 else 1 / math.sqrt(mean)), small


@jit
def _forward(first, last, stop, scratch, size, options, operands, out):
    rows, groups, channels, _, x_stride, gate_stride = size
    weighted, gated = len(operands.weight) > 0, len(operands.gate) > 0
    X, W, Z = pointer(operands.x), pointer(operands.weight), pointer(operands.gate)
    Y, real, normed = pointer(out), scratch.dtype.type, pointer(scratch)
    for r in range(first * _ROWS, min(last * _ROWS, rows)):
        if stopped(stop):
            return
        for g in range(groups):
            c = g * channels
            p, z = X + (r * x_stride + c), Z + (r * gate_stride + c)
            w, y = W + c, Y + (r * groups * channels + c)
            root, _ = _start(normed, None, p, size, options, real)
            factor = splat(real(root * options.scale))
            for at in range(0, channels, lanes(p)):
                n, v = channels - at, load(normed + at) * factor
                if weighted:
                    v = v * load_part(w + at, n)
                if gated:
                    t, _ = _silu(load_part(z + at, n), real)
                    v = v * t
                store_part(y + at, v, n)


@jit
def _backward(first, last, stop, scratch, size, options, operands, grad, d):
    rows, groups, channels, share, x_stride, gate_stride = size
    weighted, gated = len(operands.weight) > 0, len(operands.gate) > 0
    X, W, Z = pointer(operands.x), pointer(operands.weight), pointer(operands.gate)
    DX, DW, DZ, DY = pointer(d.x), pointer(d.weight), pointer(d.gate), pointer(grad)
    real, normed, padded = scratch.dtype.type, pointer(scratch), len(scratch) // 3
    passed, slope, one = normed + padded, normed + 2 * padded, splat(real(1))
    width = groups * channels
    for r in range(first * _ROWS, min(last * _ROWS, rows)):
        if stopped(stop):
            return
        for g in range(groups):
            c = g * channels
            p, z = X + (r * x_stride + c), Z + (r * gate_stride + c)
            w, dw = W + c, DW + (r // _ROWS * width + c)
            c += r * width
            dy, dp, dz = DY + c, DX + c, DZ + c
            root, small = _start(normed, slope, p, size, options, real)
            factor, product = splat(real(root)), zeros(p)
            for at in range(0, channels, lanes(p)):
                n, v = channels - at, load(normed + at) * factor
                u = load_part(dy + at, n) * splat(real(options.scale))
                h = load_part(w + at, n) if weighted else one
                if gated:
                    t, s = _silu(load_part(z + at, n), real)
                    store_part(dz + at, u * v * h * s, n)
                    u = u * t
                if weighted:
                    store_part(dw + at, fma(u, v, load_part(dw + at, n)), n)
                u = u * h
                store(normed + at, v)
                store(passed + at, u)
                product = fma(u, v, product)
            mean, shrunk = splat(real(total(product) * share)), splat(real(small))
            for at in range(0, channels, lanes(p)):
                v = (load(passed + at) - load(normed + at) * mean) * factor
                v = v * shrunk
                if options.activated:
                    v = v * load(slope + at)
                store_part(dp + at, v, channels - at)
