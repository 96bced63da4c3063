r"""The delta rule by a linear system for each graph of a batch.

With L = (I - A)^-1 and F = (L - I) * K K^T, nodes write u = (I + diag(b) F)^-1 diag(b)
V and read Y = (L * Q K^T) u. Nodes of a DAG are in topological order, in which both
matrices are triangular.

A state may be much smaller than the entries of L, as nodes on its way erase it. On
cycles, where L may be large, everything is computed in float64, as otherwise rounding
errors of L might exceed the state.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.autograd import by_autograd
from pyg_chimera.ops.common.cache import table
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.recurrence.plain.matrices import Padding, masked_mix
from pyg_chimera.ops.recurrence.plan.delta_graph import DeltaGraph
from pyg_chimera.ops.structure.csr import grouped

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

    def pad(self, *tensors: Tensor) -> list[Tensor]:
        """[V, heads, C] -> [B, heads, n, C], each."""
        padded = [self.padding.pad(x) for x in tensors]
        return [x.double() for x in padded] if self.cyclic else padded

    def difference(self, edge_weight: Tensor) -> Tensor:
        """I - A, [B, heads, n, n]."""
        (size, n), heads = self.padding.shape, edge_weight.size(1)
        weight = edge_weight[self.edge]
        weight = weight.double() if self.cyclic else weight
        A = weight.new_zeros(size * n * n, heads).index_add_(0, self.place, -weight)
        A = A.view(size, n, n, heads).permute(0, 3, 1, 2).contiguous()
        A.diagonal(0, -2, -1).add_(1)
        return A

    def solve(self, M: Tensor, rhs: Tensor) -> Tensor:
        """M^-1 rhs; M is triangular, with a unit diagonal, without cycles.

        With cycles, nothing is checked: A is a contraction, so M is not singular.
        """
        if not self.cyclic:
            return torch.linalg.solve_triangular(
                M, rhs, upper=False, unitriangular=True
            )
        if M.device.type != "cpu":
            return torch.linalg.solve_ex(M, rhs)[0]
        # Batched LU is wrong with more than one thread (pytorch#142815).
        pairs = zip(M.flatten(0, 1), rhs.flatten(0, 1), strict=True)
        solved = [torch.linalg.solve_ex(*pair)[0] for pair in pairs]
        return torch.stack(solved).view(rhs.shape)


def _groups(call: Call) -> list[_Group]:
    value = call.inputs.value
    return table(_grouped, call.structure, value.device, value.size(1))


def _grouped(graph: DeltaGraph, device: torch.device, num_heads: int) -> list[_Group]:
    most = _MAX_NUMEL_CPU if device.type == "cpu" else _MAX_NUMEL
    sizes, ptr = graph.sizes, np.append(0, np.cumsum(graph.sizes))
    edges, edge_ptr = grouped(graph.block[graph.row], len(sizes))
    local = np.empty(graph.num_nodes, np.int64)
    local[graph.order] = np.arange(graph.num_nodes) - ptr[graph.block[graph.order]]
    blocks = np.lexsort((-sizes, graph.is_cyclic))
    groups: list[_Group] = []
    while len(blocks) > 0:
        n, cyclic = sizes[blocks[0]], graph.is_cyclic[blocks[0]]
        fits = blocks[: max(1, int(most // (n * n * num_heads)))]
        found = fits[(sizes[fits] >= _ALIKE * n) & (graph.is_cyclic[fits] == cyclic)]
        blocks = blocks[len(found) :]
        nodes = [graph.order[ptr[b] : ptr[b + 1]] for b in found]
        parts = [edges[edge_ptr[b] : edge_ptr[b + 1]] for b in found]
        edge = np.concatenate(parts)
        index = np.repeat(np.arange(len(found)), [len(x) for x in parts])
        place = (index * n + local[graph.row[edge]]) * n + local[graph.col[edge]]
        padding = Padding(np.concatenate(nodes), sizes[found], device)
        at, to = (torch.from_numpy(x).to(device) for x in (edge, place))
        groups.append(_Group(padding, at, to, bool(cyclic)))
    return groups


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P]."""
    query, key, value, beta, edge_weight = call.inputs[:5]
    repeats = value.size(1) // key.size(1)
    out = 0 * value  # so that there are gradients without nodes, too
    for group in _groups(call):
        q, k, v, b = group.pad(query, key, value, beta[..., None])
        M = group.difference(edge_weight)
        eye = torch.eye(M.size(-1), dtype=M.dtype, device=M.device)
        L = group.solve(M, eye.expand_as(M))
        F = (L - eye) * (k @ k.mT).repeat_interleave(repeats, 1)
        u = group.solve(eye + b * F, b * v)
        group.padding.unpad_into(out, masked_mix(L, q, k, u).to(out.dtype))
    return out, ()


backward = by_autograd(forward)
