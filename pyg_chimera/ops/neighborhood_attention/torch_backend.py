"""Attention by PyTorch's sparse matrices, in compressed rows.

Logits are products of queries and keys at the entries of a pattern, and outputs are
products of the matrix of weights with the values. Rows of different heads are rows of
one block-diagonal matrix.
"""

import warnings
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.checks import (
    check_batch,
    check_edge_index,
    check_within_graphs,
)
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.memory import check_memory
from pyg_chimera.ops.structure.csr import compress, to_numpy

DEVICES = None


class Pattern(NamedTuple):
    """The edges as compressed rows, with a block of rows for each of the H heads, and a
    block of columns for each of the G groups. All tensors are int64.
    """

    ptr: Tensor  #: [H V + 1], where the edges into each row begin
    row: Tensor  #: [H E], the row that reads
    col: Tensor  #: [H E], the column that is read
    edge: Tensor  #: [E], the index of each edge of a head
    back_ptr: Tensor  #: [G V + 1], of the transpose
    back_col: Tensor  #: [H E]
    back: Tensor  #: [H E], the place of an entry of the transpose


def pattern(
    edge_index: Tensor, batch: Tensor | None, num_nodes: int, heads: int, groups: int
) -> Pattern:
    """Compresses the edges by target and by source.

    Raises:
        ValueError: If a shape is wrong, an index is out of range, an edge joins two
            graphs of the batch, or there are more edges than fit into memory.
    """
    check_edge_index(edge_index, num_nodes)
    source, target = to_numpy(edge_index)
    if batch is not None:
        check_batch(batch, num_nodes)
        check_within_graphs(source, target, to_numpy(batch))
    check_memory(
        f"Attention of {heads} heads over {len(source):,} pairs of nodes",
        52 * heads * len(source),  # four indices, places, and logits with gradients
        "use fewer heads, fewer neighbours (a smaller 'k'), or samples of the graph",
    )
    ptr, edge = compress(target, np.arange(len(target)), num_nodes)
    head = np.arange(heads)[:, None]
    row = (head * num_nodes + target[edge]).ravel()
    col = (head * groups // heads * num_nodes + source[edge]).ravel()
    ptr = np.append((head * len(edge) + ptr[:-1]).ravel(), len(row))
    back_ptr, back = compress(col, np.arange(len(col)), groups * num_nodes)
    arrays = (ptr, row, col, edge, back_ptr, row[back], back)
    with warnings.catch_warnings():  # PyTorch warns once that CSR is a beta feature
        warnings.simplefilter("ignore")
        none: list[int] = []
        torch.sparse_csr_tensor([0], none, none, (0, 0), device="cpu")
    return Pattern(*(torch.from_numpy(x).to(edge_index.device) for x in arrays))


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
    if len(pairs.col) > len(x) * len(y):  # duplicates, with which it would fail
        return (x[pairs.row] * y[pairs.col]).sum(1)
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
    return torch.sparse_csr_tensor(
        ptr, col, entries, size, device=ptr.device, check_invariants=False
    )


def _rows(x: Tensor) -> Tensor:
    """Heads [V, H, C] as rows [H V, C]."""
    return x.transpose(0, 1).flatten(0, 1)


def _heads(rows: Tensor, num_nodes: int, heads: int) -> Tensor:
    """Rows [H V, C] as heads [V, H, C]."""
    return rows.view(heads, num_nodes, rows.size(1)).transpose(0, 1)
