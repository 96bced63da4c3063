"""Attention by PyTorch's sparse matrices, in compressed rows.

Logits are products of queries and keys at the entries of a pattern, and outputs are
products of the matrix of weights with the values. Rows of different heads are rows of
one block-diagonal matrix.
"""

import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.neighborhood_attention.pattern import EPSILON, Pattern

DEVICES = None


def why_not(call: Call) -> str | None:
    """It supports all calls."""


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, H, P], and the softmax weights [H E], or [2 H E] of two maps."""
    query, key, value, bias, contrast = call.inputs[:5]
    pairs = call.structure
    logits = _products(pairs, _rows(query), _rows(key)) * call.inputs.scale
    if bias is not None:
        logits += bias[pairs.edge].t().flatten()
    top = torch.segment_reduce(logits, "max", offsets=pairs.ptr, unsafe=True)
    top.masked_fill_(top == -torch.inf, 0)
    weight = logits.sub_(top[pairs.row]).exp_()
    total = _sums(pairs, weight).clamp_(min=1)  # the largest is exp(0), or all are zero
    softmax = weight = weight.div_(total[pairs.row])
    if contrast is not None:
        pairs = pairs.first_half()
        weight, _ = _difference(pairs, softmax, contrast)
    heads = query.size(1) if contrast is None else len(contrast)
    out = _combined(pairs, weight, _rows(value))
    return _heads(out, value.size(0), heads), (softmax,)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of query, key, value and, if given, bias and contrast."""
    query, key, value, bias, contrast = call.inputs[:5]
    (softmax,), both = saved, call.structure
    weight, pairs, grad = softmax, both, _rows(grad)
    if contrast is not None:
        pairs = both.first_half()
        weight, whole = _difference(pairs, softmax, contrast)
    dvalue = _combined_back(pairs, weight, grad)
    dweight = _products(pairs, grad, _rows(value))
    more = []
    if contrast is not None:
        dweight -= _sums(pairs, weight * dweight)[pairs.row]
        dweight = (dweight / whole).masked_fill(weight <= 0, 0).view(len(contrast), -1)
        of_contrast = -(softmax.chunk(2)[1].view_as(dweight) * dweight).sum(1)
        more.append(of_contrast)
        dweight = torch.cat([dweight, -contrast[:, None] * dweight]).flatten()
    dlogits = softmax * (dweight - _sums(both, softmax * dweight)[both.row])
    if bias is not None:
        by_head = dlogits.view(bias.size(1), -1).t()
        more.insert(0, torch.empty_like(bias).index_copy_(0, both.edge, by_head))
    dlogits = dlogits * call.inputs.scale
    dquery = _combined(both, dlogits, _rows(key))
    dkey = _combined_back(both, dlogits, _rows(query))
    given = ((dquery, query), (dkey, key), (dvalue, value))
    return *(_heads(d, *x.shape[:2]) for d, x in given), *more


def _difference(
    pairs: Pattern, softmax: Tensor, contrast: Tensor
) -> tuple[Tensor, Tensor]:
    """The weights [H E] of two maps, and the sums they were divided by."""
    first, second = softmax.view(2, len(contrast), -1)
    weight = (first - contrast[:, None] * second).relu_().flatten()
    whole = (_sums(pairs, weight) + EPSILON)[pairs.row]
    return weight / whole, whole


def _sums(pairs: Pattern, x: Tensor) -> Tensor:
    """The sums of the entries of rows, [H V]."""
    return torch.segment_reduce(x, "sum", offsets=pairs.ptr, unsafe=True)


def _products(pairs: Pattern, x: Tensor, y: Tensor) -> Tensor:
    """The entries [H E] of X Y^T, for rows of heads and of groups."""
    zeros = _matrix(pairs.ptr, pairs.col, x.new_zeros(len(pairs.col)), len(y))
    return torch.sparse.sampled_addmm(zeros, x, y.t(), beta=0.0).values()


def _combined(pairs: Pattern, weight: Tensor, x: Tensor) -> Tensor:
    """The weighted sums of the rows of groups, for each row of a head."""
    return _matrix(pairs.ptr, pairs.col, weight, len(x)) @ x


def _combined_back(pairs: Pattern, weight: Tensor, x: Tensor) -> Tensor:
    """The weighted sums of the rows of heads, for each row of a group."""
    return _matrix(pairs.back_ptr, pairs.back_col, weight[pairs.back], len(x)) @ x


def _matrix(ptr: Tensor, col: Tensor, entries: Tensor, columns: int) -> Tensor:
    size = (len(ptr) - 1, columns)
    return torch.sparse_csr_tensor(ptr, col, entries, size, check_invariants=False)


def _rows(x: Tensor) -> Tensor:
    """Heads [V, H, C] as rows [H V, C]."""
    return x.transpose(0, 1).flatten(0, 1)


def _heads(rows: Tensor, num_nodes: int, heads: int) -> Tensor:
    """Rows [H V, C] as heads [V, H, C]."""
    return rows.view(heads, num_nodes, rows.size(1)).transpose(0, 1)
