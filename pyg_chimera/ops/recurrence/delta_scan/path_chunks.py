r"""The delta rule in chunks of directed paths, the WY form of `"Parallelizing Linear
Transformers with the Delta Rule over Sequence Length"
<https://arxiv.org/abs/2406.06484>`_ (Section 3) with the decay of `"Gated Delta
Networks" <https://arxiv.org/abs/2412.06464>`_ (Section 3.3).

Within a chunk, let D_ij = a_i a_{i-1} ... a_{j+1} be the decays and r_i = a_i ...
a_first those from the state S before the chunk. They are products, so weights may be
negative or zero. The nodes of a chunk write u = T diag(b) (V - r K S), where T = (I +
diag(b) F)^-1, and F is the part of D * K K^T below the diagonal. They read

    Y = (D * Q K^T) u + r Q S,

and the state after the chunk is r_last S + (D_last * K)^T u. All of this is matrix
products. States are stored between chunks only, and only these are computed one after
the other; everything else is computed for many chunks of all paths at once.

Backward, with the adjoint Z of the state after a chunk, the adjoint of u is du = (D * Q
K^T)^T dY + (D_last * K) Z, and that of diag(b) (V - r K S) is x = T^T du. The adjoint
of the predictions r K S + F u is -b x.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.recurrence.delta_scan.graph import DeltaGraph
from pyg_chimera.ops.recurrence.delta_scan.tensors import positive, repeated, summed
from pyg_chimera.ops.structure.cache import table
from pyg_chimera.ops.structure.csr import runs, starts

#: The most nodes of a chunk on a CPU, and on other devices, where steps are expensive.
_CHUNK_CPU, _CHUNK = 32, 64
#: The most entries of a [C, C] product over all chunks that are computed together, on a
#: CPU (to stay in the cache) and on other devices.
_MAX_NUMEL_CPU, _MAX_NUMEL = 1 << 16, 1 << 26


class _Step(NamedTuple):
    """Chunks of a slab that have the same index on their paths."""

    chunks: slice
    before: slice  #: their predecessors; empty if these are the first chunks
    ongoing: slice  #: those that have a successor
    after: slice  #: the successors


class _Slab(NamedTuple):
    """Chunks that are computed together."""

    chunks: slice
    node: Tensor  #: [S * C], the node at each place, 0 where there is none
    empty: Tensor  #: the places without a node
    place: Tensor  #: the places with a node
    span: slice | None  #: the nodes, if they are consecutive and no place is empty
    steps: list[_Step]

    def gather(self, x: Tensor) -> Tensor:
        """[V, heads, ...] -> [S, heads, C, ...], as a view."""
        if self.span is not None:
            rows = x[self.span]
        else:
            rows = x.index_select(0, self.node).index_fill_(0, self.empty, 0)
        size = self.chunks.stop - self.chunks.start
        return rows.unflatten(0, (size, -1)).transpose(1, 2)

    def scatter(self, x: Tensor, out: Tensor) -> None:
        """[S, heads, C, ...] -> [V, heads, ...]."""
        if self.span is not None:
            rows = out[self.span].unflatten(0, (x.size(0), -1))
            rows.copy_(x.transpose(1, 2))
            return
        rows = x.transpose(1, 2).flatten(0, 1).index_select(0, self.place)
        out.index_copy_(0, self.node[self.place], rows)

    def local(self, chunks: slice) -> slice:
        """Chunks, counted from the first one of the slab."""
        first = self.chunks.start
        return slice(chunks.start - first, chunks.stop - first)


class _Cut(NamedTuple):
    """Paths in chunks: the first ones of all paths, then the second ones, ..."""

    shape: tuple[int, int]  #: number of chunks, and places per chunk
    slabs: list[_Slab]
    target: Tensor  #: [E], the target of each edge


def _cut(call: Call) -> _Cut:
    value = call.inputs.value
    return table(_cut_paths, call.structure, value.device, value.size(1))


def _cut_paths(graph: DeltaGraph, device: torch.device, num_heads: int) -> _Cut:
    by_path, length = graph.states.state, np.diff(graph.states.component_ptr)
    on_cpu = device.type == "cpu"
    size = int(min(_CHUNK_CPU if on_cpu else _CHUNK, length.max(initial=1)))
    count = -(-length // size)
    step = runs(0, count)
    first = np.repeat(starts(length), count) + step * size
    last = np.repeat(np.cumsum(length), count)
    # The longest paths first, so that the chunks with a successor come first.
    order = np.lexsort((-np.repeat(count, count), step))
    at = first[order, None] + np.arange(size)
    empty = at >= last[order, None]
    node = np.append(by_path, 0)[np.where(empty, -1, at)]

    bounds = np.append(0, np.cumsum(np.bincount(step))).tolist()
    most = _MAX_NUMEL_CPU if on_cpu else _MAX_NUMEL
    width = max(1, most // (size * size * num_heads))
    slabs = []
    for a in range(0, len(order), width):
        b = min(a + width, len(order))
        part, gaps = node[a:b].ravel(), empty[a:b].ravel()
        span = None
        if not gaps.any() and (np.diff(part) == 1).all():
            span = slice(int(part[0]), int(part[-1]) + 1)
        slabs.append(
            _Slab(
                slice(a, b),
                torch.from_numpy(part).to(device),
                torch.from_numpy(np.flatnonzero(gaps)).to(device),
                torch.from_numpy(np.flatnonzero(~gaps)).to(device),
                span,
                list(_steps(bounds, a, b)),
            )
        )
    target = torch.from_numpy(graph.row).to(device)
    return _Cut((len(order), size), slabs, target)


def _steps(bounds: list[int], first: int, last: int) -> Iterator[_Step]:
    """The steps of the chunks from first to last; `bounds` are those of all steps."""
    for i, (a, b) in enumerate(pairwise(bounds)):
        c, d = max(a, first), min(b, last)
        if c < d:
            before = slice(0, 0)
            if i > 0:
                shift = a - bounds[i - 1]
                before = slice(c - shift, d - shift)
            end = min(d, a + (bounds[i + 2] - b if i + 2 < len(bounds) else 0))
            end = max(c, end)
            after = slice(b + c - a, b + end - a)
            yield _Step(slice(c, d), before, slice(c, end), after)


def _weights(call: Call, cut: _Cut) -> Tensor:
    """The weight of the edge to each node, [V, heads]; zero if a path begins."""
    weight = torch.zeros_like(call.inputs.beta)
    return weight.index_copy_(0, cut.target, call.inputs.edge_weight)


class _Chunks(NamedTuple):
    """The inputs of a slab, [S, heads or groups, C, ...], and products of them."""

    key: Tensor
    both: Tensor  #: queries, then keys, [S, groups, 2 C, N]
    beta: Tensor  #: [S, heads, C, 1]
    weight: Tensor  #: [S, heads, C, 1], that of the edge from the node before
    decay: Tensor  #: D, [S, heads, C, C]
    reach: Tensor  #: r, [S, heads, C, 1]
    scores: Tensor  #: Q K^T, then K K^T, [S, groups, 2 C, C]
    mask: Tensor  #: D * Q K^T, [S, heads, C, C]
    system: Tensor  #: diag(b) F below the diagonal, [S, heads, C, C]
    writer: Tensor  #: D_last * K, [S, heads, C, N]
    predictor: Tensor  #: diag(b) r K
    kept: Tensor  #: r_last, [S, heads, 1, 1]

    def reads(self, num_heads: int) -> Tensor:
        """How queries read the state before a chunk: r Q, [S, heads, C, N]."""
        query = self.both[..., : self.key.size(2), :]
        return self.reach * repeated(query, num_heads)


def _chunks(call: Call, slab: _Slab, weight: Tensor) -> _Chunks:
    query, key, _, beta, _ = call.inputs[:5]
    heads = beta.size(1)
    b, a = (slab.gather(x).contiguous()[..., None] for x in (beta, weight))
    both = torch.cat([slab.gather(query), slab.gather(key)], 2)
    b, size = positive(b), b.size(2)
    k = both[..., size:, :]
    ones = a.new_ones(size, size)
    decay = torch.where(ones.tril(-1) > 0, a, ones).cumprod(-2).tril_()
    reach = a[..., :1, :] * decay[..., :1]
    scores, own = both @ k.mT, repeated(k, heads)
    of_query, of_key = repeated(scores, heads).split(size, 2)
    return _Chunks(
        k,
        both,
        b,
        a,
        decay,
        reach,
        scores,
        decay * of_query,
        b * decay * of_key,
        decay[..., -1, :, None] * own,
        b * reach * own,
        reach[..., -1:, :],
    )


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output; saves S before each chunk, [K, heads, N, P], and u."""
    cut, value = _cut(call), call.inputs.value
    heads, P = value.shape[1:]
    S = value.new_empty(cut.shape[0], heads, call.inputs.key.size(2), P)
    u = value.new_empty(cut.shape[0], heads, cut.shape[1], P)
    weight, out = _weights(call, cut), torch.empty_like(value)
    for slab in cut.slabs:
        x, here = _chunks(call, slab, weight), slab.chunks
        rhs = torch.cat([x.beta * slab.gather(value), x.predictor], -1)
        both = torch.linalg.solve_triangular(
            x.system, rhs, upper=False, unitriangular=True
        )
        u[here], predictor = both[..., :P], both[..., P:]
        for chunks, before, ongoing, after in slab.steps:
            if before.start == before.stop:  # the first chunks of their paths
                S[chunks] = 0
            else:
                u[chunks] -= predictor[slab.local(chunks)] @ S[chunks]
            i = slab.local(ongoing)
            torch.mul(x.kept[i], S[ongoing], out=S[after])
            S[after] += x.writer[i].mT @ u[ongoing]
        y = x.mask @ u[here] + x.reads(heads) @ S[here]
        slab.scatter(y, out)
    return out, (S, u)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta and edge weight."""
    cut, (S, u) = _cut(call), saved
    query, key, value, beta, _ = call.inputs[:5]
    weight = _weights(call, cut)
    grads = [torch.empty_like(x) for x in (query, key, value, beta, beta)]
    Z = torch.empty_like(S)
    for slab in reversed(cut.slabs):
        x = _chunks(call, slab, weight)
        dy = slab.gather(grad).contiguous()
        d_rhs = _solve_back(x, slab, dy, Z)
        here = (y[slab.chunks] for y in (S, u, Z))
        for whole, part in zip(grads, _gradients(x, dy, d_rhs, *here), strict=True):
            slab.scatter(part, whole)
    *of_nodes, d_weight = grads
    return *of_nodes, d_weight.index_select(0, cut.target)


def _solve_back(x: _Chunks, slab: _Slab, dy: Tensor, Z: Tensor) -> Tensor:
    """The adjoint of diag(b) (V - r K S); also sets Z, the adjoints of the states after
    each chunk.
    """
    P = dy.size(-1)
    both = torch.linalg.solve_triangular(
        x.system.mT,
        torch.cat([x.mask.mT @ dy, x.writer], -1),
        upper=True,
        unitriangular=True,
    )
    d_rhs, writer = both[..., :P].contiguous(), both[..., P:]
    read = x.reads(dy.size(1)).mT @ dy
    for chunks, before, ongoing, _ in reversed(slab.steps):
        Z[ongoing.stop : chunks.stop] = 0  # these have no successor
        i = slab.local(ongoing)
        d_rhs[i] += writer[i] @ Z[ongoing]
        if before.start < before.stop:
            i = slab.local(chunks)
            torch.mul(x.kept[i], Z[chunks], out=Z[before])
            Z[before] += read[i] - x.predictor[i].mT @ d_rhs[i]
    return d_rhs


def _gradients(
    x: _Chunks, dy: Tensor, d_rhs: Tensor, S: Tensor, u: Tensor, Z: Tensor
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta and the weights from the nodes before."""
    heads, groups, size = dy.size(1), x.key.size(1), dy.size(2)
    k = repeated(x.key, heads)
    dv = x.beta * d_rhs
    d_beta = (d_rhs * u).sum(-1) / x.beta.squeeze(-1)  # u is beta times an error

    # Queries and keys (to predict) read u and the state before the chunk.
    read = torch.cat([dy, dv.neg()], 2)
    d_reads = read @ S.mT
    d_reach = (repeated(x.both, heads) * d_reads).sum(-1).unflatten(2, (2, size)).sum(2)
    dq, dk = d_reads.unflatten(2, (2, size)).mul_(x.reach.unsqueeze(2)).unbind(2)
    d_writer = u @ Z.mT
    dk.addcmul_(x.decay[..., -1, :, None], d_writer)
    d_reach[..., -1] += (Z * S).sum((-1, -2))

    # Entries above the diagonal, where D is zero, and the diagonal of K K^T are unused.
    d_products = (read @ u.mT).unflatten(2, (2, size))
    scores = repeated(x.scores, heads).unflatten(2, (2, size))
    d_decay = (d_products * scores).sum(2)
    d_decay[..., -1, :] += (d_writer * k).sum(-1)
    d_decay[..., 0] += x.weight[..., :1, 0] * d_reach
    d_scores = d_products.mul_(x.decay.unsqueeze(2))
    d_scores[:, :, 1].diagonal(dim1=-2, dim2=-1).zero_()
    d_scores = summed(d_scores.flatten(2, 3), groups)
    of_query, of_key = (d_scores @ x.key).split(size, 2)
    dq = summed(dq, groups) + of_query
    dk = summed(dk, groups) + of_key + d_scores.mT @ x.both

    # For j < t <= i, D_ij = D_it a_t D_{t-1,j}.
    d_weight = torch.zeros_like(d_beta)
    sides = (x.decay.mT @ d_decay)[..., 1:, :] * x.decay[..., :-1, :]
    d_weight[..., 1:] = sides.sum(-1)
    d_weight[..., 0] = (d_reach * x.decay[..., 0]).sum(-1)
    return dq, dk, dv, d_beta, d_weight
