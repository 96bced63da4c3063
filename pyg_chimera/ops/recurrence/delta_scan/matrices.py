r"""The delta rule by a linear system for each graph of a batch.

With L = (I - A)^-1 and F = (L - I) * K K^T, nodes write u = (I + diag(b) F)^-1 diag(b)
V and read Y = (L * Q K^T) u. Nodes of a DAG are in topological order, in which both
matrices are triangular.

A state may be much smaller than the entries of L, as nodes on its way erase it. On
cycles, where L may be large, everything is computed in float64, as otherwise rounding
errors of L might exceed the state.

Backward, x = (I + diag(b) F)^-T du is the adjoint of diag(b) V, and -b x is that of the
predictions F u. The gradient of A is L^T dL L^T.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.recurrence.delta_scan.graph import DeltaGraph
from pyg_chimera.ops.recurrence.delta_scan.tensors import positive, repeated, summed
from pyg_chimera.ops.recurrence.mask_form import Padding
from pyg_chimera.ops.structure.cache import table

#: The number of entries that a padded group of matrices may have, on a CPU and else.
_MAX_NUMEL_CPU, _MAX_NUMEL = 1 << 16, 1 << 26
#: The least ratio of the sizes of the smallest and the largest block of a group.
_ALIKE = 0.8


class _Group(NamedTuple):
    """Blocks of about one size, padded to the largest."""

    padding: Padding
    edge: Tensor  #: [e], their edges
    place: Tensor  #: [e], index of each in a flattened [B, n, n]
    cyclic: bool

    def pad(self, x: Tensor) -> Tensor:
        """[V, heads, C] -> [B, heads, n, C]."""
        padded = self.padding.pad(x)
        return padded.double() if self.cyclic else padded

    def unpad(self, x: Tensor, out: Tensor) -> None:
        """[B, heads, n, C] -> [V, heads, C], or [V, heads] if C is one."""
        rows = x.transpose(1, 2).flatten(0, 1)[self.padding.place].to(out.dtype)
        out[self.padding.node] = rows if out.dim() == 3 else rows.squeeze(-1)

    def adjacency(self, edge_weight: Tensor) -> Tensor:
        """[E, heads] -> [B, heads, n, n]."""
        (size, n), heads = self.padding.shape, edge_weight.size(1)
        weight = edge_weight[self.edge]
        weight = weight.double() if self.cyclic else weight
        A = weight.new_zeros(size * n * n, heads).index_add_(0, self.place, weight)
        return A.view(size, n, n, heads).permute(0, 3, 1, 2).contiguous()

    def to_edges(self, dA: Tensor, out: Tensor) -> None:
        """[B, heads, n, n] -> [E, heads]."""
        of_edges = dA.permute(0, 2, 3, 1).flatten(0, 2)[self.place]
        out[self.edge] = of_edges.to(out.dtype)


def _groups(call: Call) -> list[_Group]:
    value = call.inputs.value
    return table(_grouped, call.structure, value.device, value.size(1))


def _grouped(graph: DeltaGraph, device: torch.device, num_heads: int) -> list[_Group]:
    most = _MAX_NUMEL_CPU if device.type == "cpu" else _MAX_NUMEL
    ptr = np.append(0, np.cumsum(graph.sizes))
    local = np.empty(graph.num_nodes, np.int64)
    local[graph.order] = np.arange(graph.num_nodes) - ptr[graph.block[graph.order]]
    # Cyclic groups, which are saved in float64, come first, so that they are aligned.
    blocks = np.lexsort((-graph.sizes, ~graph.is_cyclic))
    group_of = np.empty(len(blocks), np.int64)
    place_of = np.empty(len(blocks), np.int64)
    groups: list[np.ndarray] = []
    first = 0
    while first < len(blocks):
        n, cyclic = graph.sizes[blocks[first]], graph.is_cyclic[blocks[first]]
        fits = blocks[first : first + max(1, int(most // (n * n * num_heads)))]
        alike = (graph.sizes[fits] >= _ALIKE * n) & (graph.is_cyclic[fits] == cyclic)
        found = fits[alike]
        group_of[found], place_of[found] = len(groups), np.arange(len(found))
        groups.append(found)
        first += len(found)
    edges = np.argsort(group_of[graph.block[graph.row]], kind="stable")
    counts = np.bincount(group_of[graph.block[graph.row]], minlength=len(groups))
    parts = np.split(edges, np.cumsum(counts)[:-1]) if len(groups) else []
    made = []
    for found, edge in zip(groups, parts, strict=True):
        node = np.concatenate([graph.order[ptr[b] : ptr[b + 1]] for b in found])
        padding = Padding(node, graph.sizes[found], device)
        n = padding.shape[1]
        row, col = graph.row[edge], graph.col[edge]
        place = (place_of[graph.block[row]] * n + local[row]) * n + local[col]
        at, to = (torch.from_numpy(x).to(device) for x in (edge, place))
        made.append(_Group(padding, at, to, bool(graph.is_cyclic[found[0]])))
    return made


class _System(NamedTuple):
    """The matrices of a group, and a function that solves I + diag(b) F."""

    resolvent: Tensor  #: L, [B, heads, n, n]
    scores: Tensor  #: Q K^T, [B, groups, n, n]
    overlap: Tensor  #: K K^T
    solve: Callable[[Tensor, bool], Tensor]  #: the transposed system if True


def _system(
    group: _Group, q: Tensor, k: Tensor, b: Tensor, resolvent: Tensor
) -> _System:
    overlap, heads = k @ k.mT, b.size(1)
    F = (resolvent * repeated(overlap, heads)).mul_(b)
    if group.cyclic:
        # L - I has a nonzero diagonal, due to cycles.
        lengths = repeated(overlap, heads).diagonal(0, -2, -1)
        F.diagonal(0, -2, -1).add_(1 - b.squeeze(-1) * lengths)
        factors = _factors(F)

        def solve(rhs: Tensor, transposed: bool) -> Tensor:
            return _solve(*factors, rhs, transposed)

    else:  # only entries below the diagonal are read

        def solve(rhs: Tensor, transposed: bool) -> Tensor:
            matrix = F.mT if transposed else F
            return torch.linalg.solve_triangular(
                matrix, rhs, upper=transposed, unitriangular=True
            )

    return _System(resolvent, q @ k.mT, overlap, solve)


def _resolvent(group: _Group, A: Tensor) -> Tensor:
    """(I - A)^-1."""
    eye = torch.eye(A.size(-1), dtype=A.dtype, device=A.device)
    if group.cyclic:
        return _solve(*_factors(eye - A), eye.expand_as(A), False)
    return torch.linalg.solve_triangular(
        -A, eye.expand_as(A), upper=False, unitriangular=True
    )


def _factors(X: Tensor) -> tuple[Tensor, Tensor]:
    """LU factors: one matrix at a time on the CPU, where batched LU is wrong with more
    than one thread (pytorch#142815). No error check: A is a contraction, so neither
    system is singular.
    """
    if X.device.type != "cpu":
        return torch.linalg.lu_factor_ex(X)[:2]
    flat = [torch.linalg.lu_factor_ex(x)[:2] for x in X.flatten(0, 1)]
    factors, pivots = (
        torch.stack(x).unflatten(0, X.shape[:2]) for x in zip(*flat, strict=True)
    )
    return factors, pivots


def _solve(factors: Tensor, pivots: Tensor, rhs: Tensor, transposed: bool) -> Tensor:
    if factors.device.type != "cpu":
        return torch.linalg.lu_solve(factors, pivots, rhs, adjoint=transposed)
    flat = zip(*(x.flatten(0, 1) for x in (factors, pivots, rhs)), strict=True)
    solved = [torch.linalg.lu_solve(*x, adjoint=transposed) for x in flat]
    return torch.stack(solved).view(rhs.shape)


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output; saves u and the resolvent of each group."""
    query, key, value, beta, edge_weight = call.inputs[:5]
    out, saved = torch.empty_like(value), []
    for group in _groups(call):
        q, k, v, b = (group.pad(x) for x in (query, key, value, beta[..., None]))
        b = positive(b)
        L = _resolvent(group, group.adjacency(edge_weight))
        system = _system(group, q, k, b, L)
        u = system.solve(b * v, False)
        group.unpad((L * repeated(system.scores, b.size(1))) @ u, out)
        saved += [u, L]
    return out, tuple(x.flatten().view(value.dtype) for x in saved)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta and edge weight."""
    query, key, _, beta, _ = call.inputs[:5]
    grads = [torch.empty_like(x) for x in call.inputs[:5]]
    heads, num_groups = beta.size(1), key.size(1)
    parts = iter(saved)
    for group in _groups(call):
        q, k, dy, b = (group.pad(x) for x in (query, key, grad, beta[..., None]))
        b, n = positive(b), b.size(2)
        u = next(parts).view(q.dtype).view(dy.shape)
        L = next(parts).view(q.dtype).view(*b.shape[:2], n, n)
        system = _system(group, q, k, b, L)
        scores, overlap = (repeated(x, heads) for x in (system.scores, system.overlap))
        d_rhs = system.solve((L * scores).mT @ dy, True)
        dv = b * d_rhs
        d_beta = (d_rhs * u).sum(-1, keepdim=True) / b  # u is beta times an error

        d_mask, d_F = dy @ u.mT, -(dv @ u.mT)
        dL = (d_mask * scores).addcmul_(d_F, overlap)
        lengths = d_F.diagonal(0, -2, -1).clone()
        d_scores, d_overlap = d_mask.mul_(L), d_F.mul_(L)
        d_overlap.diagonal(0, -2, -1).sub_(lengths)  # F lacks I * K K^T
        d_scores, d_overlap = (summed(x, num_groups) for x in (d_scores, d_overlap))
        dq = d_scores @ k
        dk = d_scores.mT @ q + (d_overlap + d_overlap.mT) @ k
        for part, whole in zip((dq, dk, dv, d_beta), grads, strict=False):
            group.unpad(part, whole)
        group.to_edges(L.mT @ dL @ L.mT, grads[4])
    return tuple(grads)
