"""The softmax over the edges into each node that transitions of Chimera are, fused."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common import triton_trial
from pyg_chimera.ops.common.array_views import as_array, as_view, in_range
from pyg_chimera.ops.common.fused import Fused
from pyg_chimera.ops.common.numba_runtime import jit
from pyg_chimera.ops.common.simd import (
    lanes,
    load_part,
    pointer,
    splat,
    store_part,
)
from pyg_chimera.ops.common.vector_kit import LOG_2, exp2

#: The most heads that kernels for GPUs take.
_MOST = 256


class _Options(NamedTuple):
    gamma: float
    margin: float
    wide: torch.dtype  #: to compute in, where it is not a kernel


def edge_softmax(
    edge_index: Tensor,
    target: Tensor,
    source: Tensor,
    psi: Tensor,
    edge: Tensor | None,
    gamma: float,
    margin: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    r"""The weights of edges, [E, H], in a dtype, and what those of a row leave of one,
    [V, H], in that of selectivities. With the sum :math:`s_i` of :math:`a_{ij}` over
    the edges into node i,

    .. math::
        A_{ij} = \gamma \frac{a_{ij}}{s_i + \sqrt{\exp(-2 \Psi_i) + (m s_i)^2}},
        \qquad a_{ij} = \exp(-(\Delta^{(1)}_i + \Delta^{(2)}_j + \Delta'_{ij}) / 3)

    Without edge selectivities, the exponent is divided by 2. Node selectivities are
    [V, H], those of edges [E, H]. Exponents are shifted by the largest one of a row.
    """
    wide = torch.promote_types(dtype, torch.float32)
    given = edge_index, target, source, psi, edge
    weight, rest = _SOFTMAX(given, _Options(float(gamma), margin, wide))
    return weight if weight.dtype == dtype else weight.to(dtype), rest


def _composed(
    edge_index: Tensor,
    target: Tensor,
    source: Tensor,
    psi: Tensor,
    edge: Tensor | None,
    options: _Options,
) -> tuple[Tensor, Tensor]:
    (col, row), share, wide = edge_index, 2 if edge is None else 3, options.wide
    # Relative to exp(-target), which is common to a row and cancels.
    least = target.to(wide) / share - psi.to(wide)
    exponent = source.to(wide)[col]
    exponent = -(exponent if edge is None else exponent + edge.to(wide)) / share
    with torch.no_grad():  # any shift cancels, too
        index = row.long().unsqueeze(1).expand_as(exponent)
        shift = least.scatter_reduce(0, index, exponent, "amax")
    weight = torch.exp(exponent - shift[row])
    sums = torch.zeros_like(least).index_add(0, row, weight)
    # Not `hypot`, which ONNX does not have. One of the squares is not small.
    square = torch.exp(2 * (least - shift)) + (options.margin * sums).square()
    root = square.sqrt()
    whole = sums + root
    rest = (1 - options.gamma) + options.gamma * root / whole
    return options.gamma * weight / whole[row], rest.to(psi.dtype)


def _fits(edge_index: Tensor, _: Tensor, __: Tensor, psi: Tensor, *___: Any) -> bool:
    if not triton_trial.by_triton(psi):
        return edge_index.dtype == torch.long
    return (
        0 < psi.numel() < 1 << 31
        and 0 < edge_index.numel() < 1 << 31
        and psi.size(1) <= _MOST
        and _TRIAL.passed(psi.device)
    )


def _forward(
    edge_index: Tensor,
    target: Tensor,
    source: Tensor,
    psi: Tensor,
    edge: Tensor | None,
    options: _Options,
) -> tuple[tuple[Tensor, Tensor], Sequence[Tensor], Any]:
    """Saves, [2, V, H], by how much the total of a row changes with the sum of its
    weights, over gamma, and its logarithm with that of the margin.
    """
    if triton_trial.by_triton(psi):
        from pyg_chimera.ops import triton_edge_softmax

        given = edge_index, target, source, psi, edge
        return triton_edge_softmax.forward(given, options)
    share, edges = 2 if edge is None else 3, in_range(edge_index, target.size(0))
    least = _divided(target, share) - as_view(psi)
    shape = edge_index.size(1), least.shape[1]
    shapes = shape, (2, *least.shape)
    out, slopes = (target.new_empty(x, dtype=torch.float64) for x in shapes)
    weight, exponents = as_array(out), _divided(source, -share)
    weight[:] = 0 if edge is None else _divided(edge, -share)
    shift = least.copy()  # here, as pointers do not keep an array of the kernel alive
    found = weight, np.empty_like(least), as_array(slopes)
    _normalize(edges, exponents, least, shift, options[:2], found)
    narrow = psi.new_empty(least.shape)  # the kernel is compiled for float64 alone
    as_array(narrow)[:] = found[1]
    return (out, narrow), (out, slopes), None


def _divided(x: Tensor, by: int) -> np.ndarray:
    return np.divide(as_view(x), by, dtype=np.float64, order="C")


def _backward(
    given: Any,
    options: _Options,
    saved: Sequence[Tensor],
    grads: Sequence[Any],
    tables: Any,
) -> list[Tensor | None]:
    edge_index, target, source, psi, edge = given
    if triton_trial.by_triton(psi):
        from pyg_chimera.ops import triton_edge_softmax

        return triton_edge_softmax.backward(given, saved, grads, tables)
    whole = (
        saved[0].new_zeros(x) if y is None else y
        for x, y in zip((saved[0].shape, psi.shape), grads, strict=True)
    )
    weight, slopes = map(as_array, saved)
    sums, sources = np.zeros((2, *slopes.shape[1:]))
    passed = np.empty_like(weight)
    index, (grad, grad_rest) = as_array(edge_index), map(as_array, whole)
    wide = grad, grad_rest.astype(np.float64, copy=False)
    _differentiate(index, weight, wide, slopes, sums, sources, passed)
    share, least = 2 if edge is None else 3, sums * slopes[1]
    factors = (
        (least, -1 / share),
        (sources, -1 / share),
        (least, 1),
        (passed, -1 / share),
    )
    found: list[Tensor | None] = [None]
    for x, (array, factor) in zip((target, source, psi, edge), factors, strict=True):
        y = None if x is None else x.new_empty(x.shape)
        if y is not None:
            np.multiply(array, factor, out=as_array(y), casting="same_kind")
        found.append(y)
    return found


_SOFTMAX = Fused(
    "pyg_chimera.edge_softmax",
    _composed,
    _fits,
    _forward,
    _backward,
    devices=("cpu", "cuda"),
    partial=True,
)


def _compare(device: torch.device) -> tuple[Callable[[], Iterable], Iterable[Tensor]]:
    edges = [[0, 1, 2, 3, 3, 0, 1], [1, 0, 1, 1, 3, 2, 1]]  # none into node 4
    edge_index = torch.tensor(edges, device="cpu")
    generator = torch.Generator().manual_seed(0)

    def drawn(rows: int) -> Tensor:
        x = torch.rand(rows, 3, generator=generator, dtype=torch.double, device="cpu")
        return x.to(device).requires_grad_()

    given: Any = [edge_index.to(device), *(drawn(x) for x in (5, 5, 5, 7))]
    options = _Options(0.9, 1e-3, torch.double)
    out = _composed(*(*given, options))
    grads = [drawn(7).detach(), drawn(5).detach()]

    def compute() -> Iterable:
        got, saved, tables = _forward(*(*given, options))
        return *got, *_backward(given, options, saved, grads, tables)[1:]

    want = torch.autograd.grad(out, given[1:], grads)
    return compute, [*(x.detach() for x in out), *want]


_TRIAL = triton_trial.Trial("fused transitions", _compare)


# Rows of a few heads are too short for vectors, but all of them together are not.


@jit
def _normalize(edge_index, exponents, least, shift, options, found):
    """Turns exponents of edges into weights."""
    weight, rest, slopes = found
    (edges, heads), nodes = weight.shape, len(least)
    gamma, margin = options
    total, squares = slopes[0], slopes[1]
    total[:] = 0
    for e in range(edges):
        j, i = edge_index[0, e], edge_index[1, e]
        for h in range(heads):
            weight[e, h] += exponents[j, h]
            if weight[e, h] > shift[i, h]:
                shift[i, h] = weight[e, h]
    for e in range(edges):
        i = edge_index[1, e]
        for h in range(heads):
            weight[e, h] -= shift[i, h]
    _exponential(pointer(weight), edges * heads)
    for e in range(edges):
        i = edge_index[1, e]
        for h in range(heads):
            total[i, h] += weight[e, h]
    for i in range(nodes):
        for h in range(heads):
            squares[i, h] = 2 * (least[i, h] - shift[i, h])
    _exponential(pointer(squares), nodes * heads)
    for i in range(nodes):
        for h in range(heads):
            sums, square = total[i, h], squares[i, h]
            root = math.sqrt(square + (margin * sums) ** 2)
            whole = sums + root
            shift[i, h] = gamma / whole
            rest[i, h] = (1 - gamma) + gamma * root / whole
            total[i, h] = (1 + margin * margin * sums / root) / gamma
            squares[i, h] = square / (root * whole)
    for e in range(edges):
        i = edge_index[1, e]
        for h in range(heads):
            weight[e, h] *= shift[i, h]


@jit
def _exponential(p, size):
    """Replaces numbers by their exponentials."""
    step, per_log = lanes(p), splat(np.float64(1 / LOG_2))
    for k in range(0, size, step):
        store_part(p + k, exp2(load_part(p + k, size - k) * per_log), size - k)


@jit
def _differentiate(edge_index, weight, grads, slopes, sums, sources, passed):
    """Fills the sum of a weight times its gradient over each row, and the gradients of
    exponents, of edges and summed over those out of each node.
    """
    (edges, heads), (grad, grad_rest) = weight.shape, grads
    for e in range(edges):
        i = edge_index[1, e]
        for h in range(heads):  # what is left is one minus the sum of weights
            passed[e, h] = weight[e, h] * (grad[e, h] - grad_rest[i, h])
            sums[i, h] += passed[e, h]
    for e in range(edges):
        j, i = edge_index[0, e], edge_index[1, e]
        for h in range(heads):
            passed[e, h] -= weight[e, h] * (sums[i, h] * slopes[0, i, h])
            sources[j, h] += passed[e, h]
