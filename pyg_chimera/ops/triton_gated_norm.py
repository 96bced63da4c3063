r"""`gated_norm` on a GPU: one launch forward, one backward, and PyTorch's sums over the
nodes for the gradients of weights.

A program takes some nodes and one of the groups of channels; its part of these sums is
a row of its own. `gated_inputs` is one launch each way, too: of the groups of query,
key and value, one after the other. Formulas are those of the kernels for the CPU.
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


def inputs_forward(parts: Sequence[tuple[Any, Any]]) -> tuple[Tensor, ...]:
    """The outputs of query, key and value, each with its tensors and options."""
    outs = tuple(x[0].new_empty(x[0].shape) for x, _ in parts)
    grid, tensors, strides, sizes = _launch_inputs(parts)
    with on_device_of(outs[0]):
        _forward_inputs[grid](tensors, outs, len(outs[0]), strides, *sizes, num_warps=4)
    return outs


def inputs_backward(
    parts: Sequence[tuple[Any, Any]], grads: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradients of query, key and value, and of the factor."""
    grid, tensors, strides, sizes = _launch_inputs(parts)
    found = [None if x is None else x.new_empty(x.shape) for x in tensors]
    with on_device_of(grads[0]):
        _backward_inputs[grid](
            tensors, tuple(x.contiguous() for x in grads), tuple(found), len(grads[0]),
            strides, *sizes, num_warps=4,
        )  # fmt: skip
    return found


def _launch_inputs(parts: Sequence[tuple[Any, Any]]) -> tuple[Any, ...]:
    """The grid, query, key, value and factor, how far rows are apart, and sizes."""
    _, tensors, strides, sizes = zip(*(_launch(*x) for x in parts), strict=True)
    at_once = min(x.rows for x in sizes)
    nodes, groups = len(tensors[0][0]), sum(x.groups for x in sizes)
    return (
        (triton.cdiv(nodes, at_once), groups),
        (*(x[0] for x in tensors), tensors[2][3]),
        (*(x[0] for x in strides), strides[2][2]),
        tuple(x._replace(rows=at_once) for x in sizes),
    )


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
def _places(rows, group, sizes: tl.constexpr):
    """A program's nodes, and channels among those of all groups, and what exists."""
    r = tl.program_id(0) * sizes.rows + tl.arange(0, sizes.rows)
    c = tl.arange(0, sizes.width)
    own = group * sizes.channels + c
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


@triton.jit
def _output(tensors, OUT, rows, strides, group, sizes: tl.constexpr):
    """The output of some rows of a group."""
    _, W, Z, U, _, _ = tensors
    r, own, exists, inside = _places(rows, group, sizes)
    known, there = inside[None, :], exists[:, None] & inside[None, :]
    y, _, _ = _start(tensors, strides, r, own, there, known, sizes)
    if W is not None:
        y *= tl.load(W + own, mask=known, other=0.0)
    if Z is not None:
        y *= _silu(tl.load(Z + r * strides[1] + own, mask=there, other=0.0))[0]
    if U is not None:
        at = r * strides[2] + group
        y *= tl.load(U + at, mask=exists[:, None], other=0.0)
    out = r * (sizes.groups * sizes.channels) + own
    tl.store(OUT + out, y * sizes.scale, mask=there)


@triton.jit
def _gradients(tensors, DY, grads, rows, strides, group, sizes: tl.constexpr):
    """The gradients of some rows of a group."""
    _, W, Z, U, V, S = tensors
    DX, DW, DZ, DU, DV, DS = grads
    r, own, exists, inside = _places(rows, group, sizes)
    known, there = inside[None, :], exists[:, None] & inside[None, :]
    y, root, slope = _start(tensors, strides, r, own, there, known, sizes)
    out = r * (sizes.groups * sizes.channels) + own
    d = tl.load(DY + out, mask=there, other=0.0) * sizes.scale
    factor = 1.0
    if U is not None:
        at = r * strides[2] + group
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
        at = r * sizes.groups + group
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


@triton.jit(do_not_specialize=["rows"])
def _forward(tensors, OUT, rows, strides, sizes: tl.constexpr):
    _output(tensors, OUT, rows, strides, tl.program_id(1), sizes)


@triton.jit(do_not_specialize=["rows"])
def _backward(tensors, DY, grads, rows, strides, sizes: tl.constexpr):
    _gradients(tensors, DY, grads, rows, strides, tl.program_id(1), sizes)


# Tuples are written out, as functions of Triton 3.6 return none with a None in it.


@triton.jit(do_not_specialize=["rows"])
def _forward_inputs(
    tensors, outs, rows, strides, query: tl.constexpr, key: tl.constexpr,
    value: tl.constexpr,
):  # fmt: skip
    """The output of some rows of a group of query, key or value."""
    Q, K, V, U = tensors
    q, k, v, u = strides
    group = tl.program_id(1)
    if group < query.groups:
        _output(
            (Q, None, None, None, None, None), outs[0], rows, (q, 0, 0, 0), group, query
        )
    elif group < query.groups + key.groups:
        group -= query.groups
        _output(
            (K, None, None, None, None, None), outs[1], rows, (k, 0, 0, 0), group, key
        )
    else:
        group -= query.groups + key.groups
        _output(
            (V, None, None, U, None, None), outs[2], rows, (v, 0, u, 0), group, value
        )


@triton.jit(do_not_specialize=["rows"])
def _backward_inputs(
    tensors, grads, found, rows, strides, query: tl.constexpr, key: tl.constexpr,
    value: tl.constexpr,
):  # fmt: skip
    """The gradients of some rows of a group of query, key or value."""
    Q, K, V, U = tensors
    q, k, v, u = strides
    group = tl.program_id(1)
    if group < query.groups:
        _gradients(
            (Q, None, None, None, None, None), grads[0],
            (found[0], None, None, None, None, None), rows, (q, 0, 0, 0), group, query,
        )  # fmt: skip
    elif group < query.groups + key.groups:
        group -= query.groups
        _gradients(
            (K, None, None, None, None, None), grads[1],
            (found[1], None, None, None, None, None), rows, (k, 0, 0, 0), group, key,
        )  # fmt: skip
    else:
        group -= query.groups + key.groups
        _gradients(
            (V, None, None, U, None, None), grads[2],
            (found[2], None, None, found[3], None, None), rows, (v, 0, u, 0), group,
            value,
        )  # fmt: skip
