r"""`gated_norm` on a GPU: one launch forward, one backward, and PyTorch's sums over the
nodes for the gradients of weights.

A program takes some nodes and one of the groups of channels; its part of these sums is
a row of its own. Formulas are those of the kernels for the CPU.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_chimera.ops.common.triton_runtime import on_device_of

#: Numbers at a time.
_NUMEL = 1024


class _Sizes(NamedTuple):
    """What kernels are compiled for."""

    groups: int
    channels: int
    width: int  #: a power of two
    rows: int  #: nodes of a program
    part: int  #: channels that share a weight of the skip connection
    eps: float
    scale: float
    activated: bool
    normed: bool


def forward(given: Sequence[Tensor | None], options: Any) -> Tensor:
    """The output, contiguous."""
    out = torch.empty_like(given[0], memory_format=torch.contiguous_format)  # type: ignore[arg-type]
    grid, tensors, strides, sizes = _launch(given, options)
    with on_device_of(out):
        _forward[grid](tensors, out, len(out), strides, sizes, num_warps=4)
    return out


def backward(
    given: Sequence[Tensor | None], options: Any, grad: Tensor
) -> list[Tensor | None]:
    """The gradient of each tensor, None for those that are."""
    grid, tensors, strides, sizes = _launch(given, options)
    weight, skip = given[1], given[5]
    found = [None if y is None else y.new_empty(y.shape) for y in given]
    for k in (1, 5):  # sums over the nodes of each program
        if (y := given[k]) is not None:
            found[k] = y.new_empty(grid[0], sizes.groups * sizes.channels)
    with on_device_of(grad):
        _backward[grid](
            tensors, grad.contiguous(), tuple(found), len(grad), strides, sizes,
            num_warps=4,
        )  # fmt: skip
    dx, dweight, dgate, dfactor, dvalue, dskip = found
    if weight is not None and dweight is not None:
        dweight = dweight.sum(0).view(weight.shape)
    if skip is not None and dskip is not None:
        dskip = dskip.view(grid[0], len(skip), -1).sum((0, 2))
    return [dx, dweight, dgate, dfactor, dvalue, dskip]


def _launch(given: Sequence[Any], options: Any) -> tuple[Any, ...]:
    """The grid, tensors of contiguous rows, how far these are apart, and sizes."""
    x, weight, gate, factor, value, skip = given
    rows = [
        y if y is None or y[:1].is_contiguous() else y.contiguous()
        for y in (x, gate, factor, value)
    ]
    strides = tuple(0 if y is None else y.stride(0) for y in rows)
    channels = x.size(-1)
    groups, width = x[0].numel() // channels, triton.next_power_of_2(channels)
    part = 1 if skip is None else groups * channels // len(skip)
    at_once = max(1, _NUMEL // width)
    sizes = _Sizes(groups, channels, width, at_once, part, *options)
    weight = None if weight is None else weight.contiguous()
    tensors = (rows[0], weight, *rows[1:], skip)
    return (triton.cdiv(len(x), at_once), groups), tensors, strides, sizes


# ------------------------------------------------------------------------- the kernels


@triton.jit
def _silu(x):
    """SiLU, and its slope."""
    s = 1 / (1 + tl.exp(-x))
    return x * s, s * (1 + x * (1 - s))


@triton.jit
def _places(rows, sizes: tl.constexpr):
    """A program's nodes, channels, and channels of all groups, and what exists."""
    r = tl.program_id(0) * sizes.rows + tl.arange(0, sizes.rows)
    c = tl.arange(0, sizes.width)
    own = tl.program_id(1) * sizes.channels + c
    return r.to(tl.int64)[:, None], own[None, :], r < rows, c < sizes.channels


@triton.jit
def _start(tensors, strides, r, own, there, known, sizes: tl.constexpr):
    """Rows, normed; one over their root mean square; and the slope of SiLU."""
    X, _, _, _, V, S = tensors
    x = tl.load(X + r * strides[0] + own, mask=there, other=0.0)
    slope = 1.0
    if sizes.activated:
        x, slope = _silu(x)
    if S is not None:
        v = tl.load(V + r * strides[3] + own, mask=there, other=0.0)
        x += tl.load(S + own // sizes.part, mask=known, other=0.0) * _silu(v)[0]
    root = 1.0
    if sizes.normed:
        # Squares do not overflow.
        small = tl.maximum(tl.max(tl.abs(x), 1, keep_dims=True) * 2.0**-30, 1.0)
        x /= small
        mean = tl.sum(x * x, 1, keep_dims=True) / sizes.channels
        root = 1 / tl.sqrt(mean + sizes.eps)
        x *= root
        root /= small
    return x, root, slope


@triton.jit(do_not_specialize=["rows"])
def _forward(tensors, OUT, rows, strides, sizes: tl.constexpr):
    """The output of some rows of a group."""
    _, W, Z, U, _, _ = tensors
    r, own, exists, inside = _places(rows, sizes)
    known, there = inside[None, :], exists[:, None] & inside[None, :]
    y, _, _ = _start(tensors, strides, r, own, there, known, sizes)
    if W is not None:
        y *= tl.load(W + own, mask=known, other=0.0)
    if Z is not None:
        y *= _silu(tl.load(Z + r * strides[1] + own, mask=there, other=0.0))[0]
    if U is not None:
        at = r * strides[2] + tl.program_id(1)
        y *= tl.load(U + at, mask=exists[:, None], other=0.0)
    out = r * (sizes.groups * sizes.channels) + own
    tl.store(OUT + out, y * sizes.scale, mask=there)


@triton.jit(do_not_specialize=["rows"])
def _backward(tensors, DY, grads, rows, strides, sizes: tl.constexpr):
    """The gradients of some rows of a group."""
    _, W, Z, U, V, S = tensors
    DX, DW, DZ, DU, DV, DS = grads
    r, own, exists, inside = _places(rows, sizes)
    known, there = inside[None, :], exists[:, None] & inside[None, :]
    y, root, slope = _start(tensors, strides, r, own, there, known, sizes)
    out = r * (sizes.groups * sizes.channels) + own
    d = tl.load(DY + out, mask=there, other=0.0) * sizes.scale
    factor = 1.0
    if U is not None:
        at = r * strides[2] + tl.program_id(1)
        factor = tl.load(U + at, mask=exists[:, None], other=0.0)
    w = 1.0
    if W is not None:
        w = tl.load(W + own, mask=known, other=0.0)
    if Z is not None:
        t, s = _silu(tl.load(Z + r * strides[1] + own, mask=there, other=0.0))
        tl.store(DZ + out, d * y * w * s * factor, mask=there)
        d *= t
    sums = tl.program_id(0) * (sizes.groups * sizes.channels) + own
    if W is not None:
        part = tl.sum(d * y * factor, 0, keep_dims=True)
        tl.store(DW + sums, part, mask=known)
        d *= w
    if U is not None:
        at = r * sizes.groups + tl.program_id(1)
        tl.store(DU + at, tl.sum(d * y, 1, keep_dims=True), mask=exists[:, None])
        d *= factor
    if sizes.normed:
        mean = tl.sum(d * y, 1, keep_dims=True) / sizes.channels
        d = (d - y * mean) * root
    if S is not None:
        v = tl.load(V + r * strides[3] + own, mask=there, other=0.0)
        t, s = _silu(v)
        skip = tl.load(S + own // sizes.part, mask=known, other=0.0)
        tl.store(DV + out, d * s * skip, mask=there)
        tl.store(DS + sums, tl.sum(d * t, 0, keep_dims=True), mask=known)
    tl.store(DX + out, d * slope, mask=there)
