"""What layers compute around their recurrence, fused: SiLU, RMS norms, gates and the
skip connection.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_chimera.ops.common import triton_trial
from pyg_chimera.ops.common.array_views import as_array, as_view
from pyg_chimera.ops.common.fused import Fused
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
from pyg_chimera.ops.common.vector_kit import LOG_2, exp2

#: The most rows of a task, which has its own sums of the gradients of weights.
_ROWS = 128
#: Sums of squares from which on rows are divided first.
_LARGE = 1e30
#: The most channels that kernels for GPUs take.
_MOST = 2048
#: Of whatever default device.
_NONE = {
    x: as_array(torch.empty(0, dtype=x, device="cpu"))
    for x in (torch.float32, torch.float64)
}


class _Rows(NamedTuple):
    """Rows, and what belongs to them."""

    x: Tensor  #: [V, ..., N]
    weight: Tensor | None = None  #: [..., N]
    gate: Tensor | None = None  #: [V, ..., N]
    factor: Tensor | None = None  #: [V, ...]
    value: Tensor | None = None  #: [V, ..., N], of the skip connection
    skip: Tensor | None = None  #: its weights, one for a part of N


class _Options(NamedTuple):
    eps: float = 1e-5
    scale: float = 1.0
    activated: bool = False  #: SiLU of rows comes first
    normed: bool = True


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
    return _GATED(_Rows(x, weight, gate), _Options(eps, scale, activated))


def gated_output(
    y: Tensor,
    value: Tensor,
    skip: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    eps: float,
) -> Tensor:
    r"""What follows the recurrence of a layer, [V, H P]:

    .. math::
        \mathbf{w} \odot \text{SiLU}(\mathbf{z}) \odot \text{RMSNorm}(\mathbf{y} +
        \mathbf{d} \odot \text{SiLU}(\mathbf{v}))

    y, the values v before SiLU and the gate z are [V, H P], d [H], and w [H P];
    without weights, there is no norm.
    """
    rows = _Rows(y, weight, gate, value=value, skip=skip)
    return _GATED(rows, _Options(eps, normed=weight is not None))


def gated_inputs(
    query: Tensor, key: Tensor, value: Tensor, factor: Tensor | None, normed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    r"""What the recurrence of a layer reads: SiLU of query and key [V, G, N], perhaps
    `normed`, and of the value [V, H, P] times a factor [V, H].

    Norms are RMS norms, of the query divided by :math:`\sqrt{N}`.
    """
    return _INPUTS((query, key, value, factor), normed)


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


# ------------------------------------------------------- by PyTorch's operators, or not


def _composed(
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    factor: Tensor | None,
    value: Tensor | None,
    skip: Tensor | None,
    options: _Options,
) -> Tensor:
    eps, scale, activated, normed = options
    x = F.silu(x) if activated else x
    if value is not None and skip is not None:
        heads = skip.numel(), -1
        more = skip.unsqueeze(-1) * F.silu(value).unflatten(-1, heads)
        x = (x.unflatten(-1, heads) + more).flatten(-2)
    x = rms_norm(x, None, eps) if normed else x
    x = x if weight is None else x * weight
    x = x if gate is None else x * F.silu(gate)
    x = x if factor is None else x * factor.unsqueeze(-1)
    return x if scale == 1 else x * scale


def _fits(
    x: Tensor,
    weight: Tensor | None,
    gate: Tensor | None,
    factor: Tensor | None,
    value: Tensor | None,
    skip: Tensor | None,
    options: _Options,
) -> bool:
    shapes = (
        (weight, x.shape[1:]),
        (gate, x.shape),
        (factor, x.shape[:-1]),
        (value, x.shape),
        (skip, None),
    )
    return (
        x.dim() > 1
        and x.numel() > 0
        and (
            not triton_trial.by_triton(x)
            or (x.size(-1) <= _MOST and _TRIAL.passed(x.device))
        )
        and x.is_floating_point()
        and all(
            y is None or (y.dtype == x.dtype and shape in (None, y.shape))
            for y, shape in shapes
        )
    )


def _forward(*args: Any) -> tuple[Tensor, Sequence[Tensor], None]:
    *given, options = args
    if triton_trial.by_triton(given[0]):
        from pyg_chimera.ops import triton_gated_norm

        return triton_gated_norm.forward(given, options), (), None
    return _one_forward(given, options), (), None


def _backward(
    given: Any, options: _Options, _: Any, grads: Sequence[Tensor], __: None = None
) -> list[Tensor | None]:
    if triton_trial.by_triton(given[0]):
        from pyg_chimera.ops import triton_gated_norm

        return triton_gated_norm.backward(given, options, grads[0])
    return _one_backward(given, options, grads[0])


_DEVICES = ("cpu", "cuda")
_GATED = Fused(
    "pyg_chimera.gated_norm", _composed, _fits, _forward, _backward, _DEVICES
)


def _compare(device: torch.device) -> tuple[Callable[[], Iterable], Iterable[Tensor]]:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, device="cpu")
        return x.to(device).requires_grad_()

    given = drawn(9, 20), drawn(20), drawn(9, 20), drawn(9), drawn(9, 20), drawn(2)
    inputs = drawn(9, 2, 6), drawn(9, 2, 6), drawn(9, 3, 20), drawn(9, 3)
    options = _Options(scale=0.5, activated=True)
    outs = _composed(*given, options), *_compose_inputs(*inputs, True)
    grad, *grads = (drawn(*x.shape).detach() for x in outs)

    def compute() -> Iterable:
        yield _forward(*given, options)[0]
        yield from _forward_inputs(*inputs, True)[0]
        yield from _backward(given, options, (), [grad])
        yield from _backward_inputs(inputs, True, (), grads, None)

    found = torch.autograd.grad(outs, (*given, *inputs), (grad, *grads))
    return compute, [*(x.detach() for x in outs), *found]


_TRIAL = triton_trial.Trial("fused norms", _compare)


def _parts(
    query: Tensor, key: Tensor, value: Tensor, factor: Tensor | None, normed: bool
) -> list[tuple[_Rows, _Options]]:
    scale = query.size(-1) ** -0.5 if normed else 1.0
    return [
        (_Rows(query), _Options(1e-5, scale, activated=True, normed=normed)),
        (_Rows(key), _Options(activated=True, normed=normed)),
        (_Rows(value, factor=factor), _Options(activated=True, normed=False)),
    ]


def _fit_inputs(*args: Any) -> bool:
    """Without norms, PyTorch's operators are as fast on CPUs, and start faster."""
    *given, normed = args
    one_dtype = len({x.dtype for x in given if x is not None}) == 1
    return (
        (normed or triton_trial.by_triton(given[0]))
        and one_dtype
        and all(_fits(*rows, options) for rows, options in _parts(*args))
    )


def _compose_inputs(*args: Any) -> tuple[Tensor, ...]:
    return tuple(_composed(*rows, options) for rows, options in _parts(*args))


def _forward_inputs(*args: Any) -> tuple[tuple[Tensor, ...], Sequence[Tensor], None]:
    if triton_trial.by_triton(args[0]):
        from pyg_chimera.ops import triton_gated_norm

        return triton_gated_norm.inputs_forward(_parts(*args)), (), None
    return tuple(_one_forward(*part) for part in _parts(*args)), (), None


def _backward_inputs(
    given: Any, normed: bool, _: Any, grads: Sequence[Tensor], __: None
) -> list[Tensor | None]:
    if triton_trial.by_triton(given[0]):
        from pyg_chimera.ops import triton_gated_norm

        return triton_gated_norm.inputs_backward(_parts(*(*given, normed)), grads)
    parts = zip(_parts(*(*given, normed)), grads, strict=True)
    query, key, value = (_one_backward(*part, grad) for part, grad in parts)
    return [query[0], key[0], value[0], value[3]]


_INPUTS = Fused(
    "pyg_chimera.gated_inputs",
    _compose_inputs,
    _fit_inputs,
    _forward_inputs,
    _backward_inputs,
    _DEVICES,
)


# ------------------------------------------------------------------------------ kernels


class _Size(NamedTuple):
    """Of rows of groups of channels, and how far they are apart."""

    rows: int
    groups: int
    channels: int
    share: float  #: one over them
    x_stride: int
    gate_stride: int
    value_stride: int
    factor_stride: int


class _Arrays(NamedTuple):
    """The inputs or their gradients; all of one dimension, or kernels would be compiled
    for each layout, and without numbers if they are absent.
    """

    x: np.ndarray
    weight: np.ndarray
    gate: np.ndarray
    factor: np.ndarray
    value: np.ndarray
    skip: np.ndarray


def _one_forward(given: Any, options: _Options) -> Tensor:
    """The output, of the fields of `_Rows`."""
    out = given[0].new_empty(given[0].shape)
    _run(_forward_rows, given, options, as_array(out).reshape(-1))
    return out


def _one_backward(given: Any, options: _Options, grad: Tensor) -> list[Tensor | None]:
    """The gradients of all fields."""
    x, weight, gate, factor, value, skip = given
    dx, dgate, dfactor, dvalue = (
        None if y is None else y.new_empty(y.shape) for y in (x, gate, factor, value)
    )
    tasks = -(-x.size(0) // _ROWS)
    dweight = None if weight is None else weight.new_zeros(tasks, *weight.shape)
    dskip = None if skip is None else x.new_zeros(tasks, x[0].numel())
    found = [dx, dweight, dgate, dfactor, dvalue, dskip]
    d = _Arrays(*(_flat(y, x.dtype) for y in found))
    _run(_backward_rows, given, options, _flat(grad, x.dtype), d)
    if dweight is not None:
        found[1] = dweight.sum(0)
    if dskip is not None:
        found[5] = dskip.view(tasks, len(skip), -1).sum((0, 2))
    return found


def _run(kernel: Any, given: Any, options: _Options, *others: Any) -> None:
    """Runs a kernel in tasks of some rows."""
    x, weight, gate, factor, value, skip = given
    rows, channels = x.size(0), x.size(-1)
    width = x.numel() // rows
    xs, x_stride = _rows(x, x.dtype)
    gates, gate_stride = _rows(gate, x.dtype)
    values, value_stride = _rows(value, x.dtype)
    factors, factor_stride = _rows(factor, x.dtype)
    skips = _flat(skip, x.dtype)
    if skip is not None:
        skips = skips.repeat(width // len(skips))
    strides = x_stride, gate_stride, value_stride, factor_stride
    size = _Size(rows, width // channels, channels, 1 / channels, *strides)
    operands = _Arrays(xs, _flat(weight, x.dtype), gates, factors, values, skips)
    costs = np.full(-(-rows // _ROWS), 1.0 * _ROWS * width)
    scratch = 3 * (channels + 16)
    run(kernel, costs, scratch, xs.dtype, size, options, operands, *others)


def _flat(x: Tensor | None, dtype: torch.dtype) -> np.ndarray:
    return _NONE[dtype] if x is None else as_array(x).reshape(-1)


def _rows(x: Tensor | None, dtype: torch.dtype) -> tuple[np.ndarray, int]:
    """All numbers from the first to the last, and how far rows are apart."""
    if x is None:
        return _NONE[dtype], 0
    shape, width, (stride, *strides) = x.shape, 1, x.stride()
    for size, found in zip(shape[:0:-1], strides[::-1], strict=True):
        if size > 1 and found != width:  # rows are not contiguous
            return as_array(x).reshape(-1), x.numel() // len(x)
        width *= size
    if len(x) == 1:
        return as_array(x).reshape(-1), width
    return as_view(x, (len(x) - 1) * stride + width), stride


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
def _start(row, slope, p, value, skip, skips, size, options, real):
    """Sets a row to f(x), with the skip connection if there is one, and the slope of f
    unless it is None. Returns one over the root of the mean square, or one without
    norm, and the factor that keeps squares from overflowing.
    """
    (eps, _, activated, normed), channels = options, size.channels
    sums, small = zeros(p), 1.0
    for at in range(0, channels, lanes(p)):
        n = channels - at
        v = load_part(p + at, n)
        if activated:
            v, s = _silu(v, real)
            if slope is not None:
                store(slope + at, s)
        if skips:
            t, _ = _silu(load_part(value + at, n), real)
            v = fma(load_part(skip + at, n), t, v)
        store(row + at, v)
        sums = fma(v, v, sums)
    if not normed:
        return 1.0, 1.0
    squares = float(total(sums))
    if not squares < _LARGE:
        squares, small = _divide(row, channels, real)
    mean = squares * size.share + eps
    return (math.inf if mean == 0 else 1 / math.sqrt(mean)), small


@jit
def _forward_rows(first, last, stop, scratch, size, options, operands, out):
    rows, groups, channels = size.rows, size.groups, size.channels
    weighted, gated = len(operands.weight) > 0, len(operands.gate) > 0
    scaled, skips = len(operands.factor) > 0, len(operands.skip) > 0
    X, W, Z = pointer(operands.x), pointer(operands.weight), pointer(operands.gate)
    U, V, S = pointer(operands.factor), pointer(operands.value), pointer(operands.skip)
    Y, real, normed = pointer(out), scratch.dtype.type, pointer(scratch)
    for r in range(first * _ROWS, min(last * _ROWS, rows)):
        if stopped(stop):
            return
        for g in range(groups):
            c = g * channels
            p, z = X + (r * size.x_stride + c), Z + (r * size.gate_stride + c)
            w, y = W + c, Y + (r * groups * channels + c)
            q, s = V + (r * size.value_stride + c), S + c
            root, _ = _start(normed, None, p, q, s, skips, size, options, real)
            root *= options.scale
            if scaled:
                root *= U[r * size.factor_stride + g]
            factor = splat(real(root))
            for at in range(0, channels, lanes(p)):
                n, v = channels - at, load(normed + at) * factor
                if weighted:
                    v = v * load_part(w + at, n)
                if gated:
                    t, _ = _silu(load_part(z + at, n), real)
                    v = v * t
                store_part(y + at, v, n)


@jit
def _backward_rows(first, last, stop, scratch, size, options, operands, grad, d):
    rows, groups, channels, share = size.rows, size.groups, size.channels, size.share
    weighted, gated = len(operands.weight) > 0, len(operands.gate) > 0
    scaled, skips = len(operands.factor) > 0, len(operands.skip) > 0
    X, W, Z = pointer(operands.x), pointer(operands.weight), pointer(operands.gate)
    U, V, S = pointer(operands.factor), pointer(operands.value), pointer(operands.skip)
    DX, DW, DZ, DY = pointer(d.x), pointer(d.weight), pointer(d.gate), pointer(grad)
    DU, DV, DS = pointer(d.factor), pointer(d.value), pointer(d.skip)
    real, normed, padded = scratch.dtype.type, pointer(scratch), len(scratch) // 3
    passed, slope, one = normed + padded, normed + 2 * padded, splat(real(1))
    width = groups * channels
    for r in range(first * _ROWS, min(last * _ROWS, rows)):
        if stopped(stop):
            return
        for g in range(groups):
            c = g * channels
            p, z = X + (r * size.x_stride + c), Z + (r * size.gate_stride + c)
            q, skip = V + (r * size.value_stride + c), S + c
            w, dw, ds = (
                W + c,
                DW + (r // _ROWS * width + c),
                DS + (r // _ROWS * width + c),
            )
            c += r * width
            dy, dp, dz, dq = DY + c, DX + c, DZ + c, DV + c
            root, small = _start(normed, slope, p, q, skip, skips, size, options, real)
            outer = options.scale
            if scaled:
                outer *= U[r * size.factor_stride + g]
            factor, product, own = splat(real(root)), zeros(p), zeros(p)
            for at in range(0, channels, lanes(p)):
                n, v = channels - at, load(normed + at) * factor
                u = load_part(dy + at, n)
                h = load_part(w + at, n) if weighted else one
                if gated:
                    t, s = _silu(load_part(z + at, n), real)
                    store_part(dz + at, u * v * h * s * splat(real(outer)), n)
                    u = u * t
                if weighted:
                    more = u * splat(real(outer))
                    store_part(dw + at, fma(more, v, load_part(dw + at, n)), n)
                u = u * h
                own = fma(u, v, own)
                u = u * splat(real(outer))
                store(normed + at, v)
                store(passed + at, u)
                product = fma(u, v, product)
            if scaled:
                DU[r * groups + g] = real(total(own) * options.scale)
            mean = total(product) * share if options.normed else 0.0
            mean, shrunk = splat(real(mean)), splat(real(small))
            for at in range(0, channels, lanes(p)):
                v = (load(passed + at) - load(normed + at) * mean) * factor
                n, v = channels - at, v * shrunk
                if skips:
                    t, s = _silu(load_part(q + at, n), real)
                    store_part(dq + at, v * s * load_part(skip + at, n), n)
                    store_part(ds + at, fma(v, t, load_part(ds + at, n)), n)
                if options.activated:
                    v = v * load(slope + at)
                store_part(dp + at, v, n)
