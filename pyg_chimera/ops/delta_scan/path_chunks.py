r"""The delta rule in chunks of directed paths, the WY form of `"Parallelizing Linear
Transformers with the Delta Rule over Sequence Length"
<https://arxiv.org/abs/2406.06484>`_ (Section 3) with the decay of `"Gated Delta
Networks" <https://arxiv.org/abs/2412.06464>`_ (Section 3.3).

With the decays D_ij = a_i a_{i-1} ... a_{j+1} within a chunk, which are products, so
that weights may be negative or zero, and r_i = a_i ... a_first from the state S before
it on, its nodes find u = T diag(b) (V - r K S) wrong, where T = (I + diag(b) F)^-1 and F
is the part of D * K K^T below the diagonal. They read

    Y = (D * Q K^T) u + r Q S,

and leave the state r_last S + (D_last * K)^T u: all is matrix products. States are held
between chunks only, and those of several paths are computed side by side.

Backward, with the adjoint Z of the state after a chunk, u has du = (D * Q K^T)^T dY +
(D_last * K) Z, and x = T^T du is the adjoint of diag(b) (V - r K S). What is predicted,
r K S + F u, has -b x.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.mask_form import Padding
from pyg_chimera.ops.delta_scan.graph import DeltaGraph
from pyg_chimera.ops.delta_scan.tensors import (
    positive,
    repeated,
    summed,
    unit_lower_inverse,
)

#: Nodes of a chunk, at most.
_CHUNK = 64


class _Step(NamedTuple):
    """The chunks of all paths that are as far from the first one of their path."""

    chunks: slice
    ongoing: slice  #: those of them that have a next one
    next: slice  #: which are these


class _Cut(NamedTuple):
    """Paths in chunks: first those that begin a path, then their next ones, ..."""

    padding: Padding
    steps: list[_Step]
    target: Tensor  #: [E], the node that each edge leads to


def _cut(graph: DeltaGraph, device: torch.device) -> _Cut:
    """The chunks of a graph, made once for each device."""
    name = ("chunks", device)
    if name not in graph.tables:
        node = np.lexsort((graph.rank, graph.component))
        length = np.bincount(graph.component)
        size = 16  # as `unit_lower_inverse` takes them
        while size < min(_CHUNK, length.max(initial=0)):
            size *= 2
        count = -(-length // size)
        step = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        first = np.repeat(np.cumsum(length) - length, count) + step * size
        sizes = np.minimum(size, np.repeat(length, count) - step * size)
        # The longest paths first, so that those which go on are always the first ones.
        order = np.lexsort((-np.repeat(count, count), step))
        first, sizes = first[order], sizes[order]
        inside = np.arange(len(node)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        padding = Padding(node[np.repeat(first, sizes) + inside], sizes, device, size)
        bounds = np.append(0, np.cumsum(np.bincount(step))).tolist()
        steps = []
        for i, (a, b) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            after = bounds[i + 2] if i + 2 < len(bounds) else b
            steps.append(_Step(slice(a, b), slice(a, a + after - b), slice(b, after)))
        target = torch.from_numpy(graph.row).to(device)
        graph.tables[name] = _Cut(padding, steps, target)
    return graph.tables[name]


class _Chunks(NamedTuple):
    """The inputs in chunks [K, heads or groups, C, ...], and products of them."""

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor  #: [K, heads, C, 1]
    weight: Tensor  #: [K, heads, C], from the node before; zero at the first of a path
    decay: Tensor  #: D, [K, heads, C, C]
    reach: Tensor  #: r, [K, heads, C, 1]
    scores: Tensor  #: Q K^T, [K, groups, C, C]
    overlap: Tensor  #: K K^T

    @property
    def writer(self) -> Tensor:
        """D_last * K, [K, heads, C, N]."""
        key = repeated(self.key, self.value.size(1))
        return self.decay[..., -1, :, None] * key

    @property
    def mask(self) -> Tensor:
        """D * Q K^T."""
        return self.decay * repeated(self.scores, self.value.size(1))

    @property
    def reader(self) -> Tensor:
        """r K, with which nodes predict of the state before the chunk."""
        return self.reach * repeated(self.key, self.value.size(1))


def _chunks(call: Call, cut: _Cut) -> _Chunks:
    query, key, value, beta, edge_weight = call.inputs[:5]
    weight = torch.zeros_like(beta).index_copy_(0, cut.target, edge_weight)
    q, k, v, b, a = (
        cut.padding.pad(x).contiguous()
        for x in (query, key, value, positive(beta)[..., None], weight[..., None])
    )
    decay = torch.zeros(*a.shape[:3], a.size(2), dtype=a.dtype, device=a.device)
    decay.diagonal(dim1=-2, dim2=-1).fill_(1)
    for i in range(1, a.size(2)):
        decay[..., i, :i] = decay[..., i - 1, :i] * a[..., i, :]
    reach = a[..., :1, :] * decay[..., :1]
    both = torch.cat([q, k], 2) @ k.mT
    scores, overlap = both.split(k.size(2), 2)
    return _Chunks(q, k, v, b, a.squeeze(-1), decay, reach, scores, overlap)


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output, and states between chunks, u and T."""
    cut = _cut(call.structure, call.inputs.value.device)
    x = _chunks(call, cut)
    heads = x.value.size(1)
    F = (x.decay * repeated(x.overlap, heads)).tril_(-1)
    T = unit_lower_inverse(x.beta * F)
    both = T @ (x.beta * torch.cat([x.value, x.reader], -1))
    u, wrong = both[..., : x.value.size(3)].contiguous(), both[..., x.value.size(3) :]
    writer, kept = x.writer.mT, x.reach[..., -1:, :]
    S = u.new_zeros(*u.shape[:2], x.key.size(3), u.size(3))
    for chunks, ongoing, after in cut.steps:
        if chunks.start > 0:  # states before the first chunk of a path are zero
            u[chunks] -= wrong[chunks] @ S[chunks]
        S[after] = kept[ongoing] * S[ongoing] + writer[ongoing] @ u[ongoing]
    out = x.mask @ u + x.reach * (repeated(x.query, heads) @ S)
    return cut.padding.unpad(out, len(call.inputs.value)), (S, u, T)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta and edge weight."""
    S, u, T = saved
    cut = _cut(call.structure, grad.device)
    x = _chunks(call, cut)
    dy = cut.padding.pad(grad).contiguous()
    heads, groups, size, P = x.value.size(1), x.key.size(1), u.size(2), u.size(3)
    q, k = repeated(x.query, heads), repeated(x.key, heads)

    # From the last chunks on: what u and the states before a chunk have.
    both = T.mT @ torch.cat([x.mask.mT @ dy, x.writer], -1)
    d_rhs, moved = both[..., :P].contiguous(), both[..., P:]
    before = (x.reach * q).mT @ dy
    predicted, kept = (x.beta * x.reader).mT, x.reach[..., -1:, :]
    Z = torch.zeros_like(S)
    for chunks, ongoing, after in reversed(cut.steps):
        if after.start < after.stop:
            Z[ongoing] = before[after]
            d_rhs[ongoing] += moved[ongoing] @ Z[ongoing]
            before[ongoing] += kept[ongoing] * Z[ongoing]
        if chunks.start > 0:
            before[chunks] -= predicted[chunks] @ d_rhs[chunks]

    dv = x.beta * d_rhs
    d_beta = (d_rhs * u).sum(-1, keepdim=True) / x.beta  # u is beta times an error
    read = torch.cat([dy, -dv], 2)  # by queries, and by keys that predict
    d_mask = read @ u.mT
    d_reads = (read @ S.mT).unflatten(2, (2, size))
    dq, dk = (x.reach.unsqueeze(2) * d_reads).unbind(2)
    d_reach = (d_reads[:, :, 0] * q + d_reads[:, :, 1] * k).sum(-1)
    d_writer = u @ Z.mT
    dk = dk + x.decay[..., -1, :, None] * d_writer
    d_reach[..., -1] += (Z * S).sum((-1, -2))

    d_scores, d_overlap = d_mask.split(size, 2)
    d_scores, d_overlap = d_scores.tril(), d_overlap.tril(-1)
    d_decay = d_scores * repeated(x.scores, heads)
    d_decay += d_overlap * repeated(x.overlap, heads)
    d_decay[..., -1, :] += (d_writer * k).sum(-1)
    d_decay[..., 0] += x.weight[..., :1] * d_reach
    both = torch.cat([d_scores * x.decay, d_overlap * x.decay], 2)
    both = summed(both, groups)
    dq, dk = summed(dq, groups), summed(dk, groups)
    of_query, of_key = (both @ x.key).split(size, 2)
    dq = dq + of_query
    dk = dk + of_key + both.mT @ torch.cat([x.query, x.key], 2)

    # D_ij has the factor a_t for j < t <= i, with D_it and D_{t-1,j} on its sides.
    d_weight = torch.zeros_like(x.weight)
    sides = (x.decay.mT @ d_decay)[..., 1:, :] * x.decay[..., :-1, :]
    d_weight[..., 1:] = sides.sum(-1)
    d_weight[..., 0] = (d_reach * x.decay[..., 0]).sum(-1)
    grads = (dq, dk, dv, d_beta, d_weight[..., None])
    grads = tuple(cut.padding.unpad(y, len(grad)) for y in grads)
    dq, dk, dv, d_beta, d_weight = grads
    return dq, dk, dv, d_beta.squeeze(-1), d_weight.squeeze(-1)[cut.target]
