"""Attention by PyTorch's sparse matrices, in compressed rows.

Logits are products of queries and keys at the entries of a pattern, and outputs are
products of the matrix of weights with the values. Rows of different heads are rows of
one block-diagonal matrix.
"""

import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.neighborhood_attention.pattern import Pattern

DEVICES = None


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, H, P], and the softmax weights [H E]."""
    query, key, value, bias = call.inputs[:4]
    pairs = call.structure
    logits = _products(pairs, _rows(query), _rows(key)) * call.inputs.scale
    if bias is not None:
        logits += bias[pairs.edge].t().flatten()
    top = torch.segment_reduce(logits, "max", offsets=pairs.ptr, unsafe=True)
    top.masked_fill_(top == -torch.inf, 0)
    weight = logits.sub_(top[pairs.row]).exp_()
    total = _sums(pairs, weight).clamp_(min=1)  # the largest is exp(0), or all are zero
    weight.div_(total[pairs.row])
    out = _combined(pairs, weight, _rows(value))
    return _heads(out, *query.shape[:2]), (weight,)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of query, key, value and, if given, bias."""
    query, key, value, bias = call.inputs[:4]
    (weight,), pairs, grad = saved, call.structure, _rows(grad)
    dvalue = _combined_back(pairs, weight, grad)
    dweight = _products(pairs, grad, _rows(value))
    dlogits = weight * (dweight - _sums(pairs, weight * dweight)[pairs.row])
    more = []
    if bias is not None:
        by_head = dlogits.view(bias.size(1), -1).t()
        more.append(torch.empty_like(bias).index_copy_(0, pairs.edge, by_head))
    dlogits = dlogits * call.inputs.scale
    dquery = _combined(pairs, dlogits, _rows(key))
    dkey = _combined_back(pairs, dlogits, _rows(query))
    given = ((dquery, query), (dkey, key), (dvalue, value))
    return *(_heads(d, *x.shape[:2]) for d, x in given), *more


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
