r"""The delta rule by a linear system for each graph of a batch.

With L = (I - A)^-1 and F = (L - I) * K K^T, nodes write u = (I + diag(b) F)^-1 diag(b)
V and read Y = (L * Q K^T) u. Nodes of a DAG are in topological order, in which both
matrices are triangular.

A state may be much smaller than the entries of L, as nodes on its way erase it. On
cycles, where L may be large, everything is computed in float64, as otherwise rounding
errors of L might exceed the state.
"""

import torch
from torch import Tensor

from pyg_chimera.ops.common.autograd import by_autograd
from pyg_chimera.ops.common.cache import table
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.recurrence.plain.matrices import Group, groups, masked_mix
from pyg_chimera.ops.recurrence.plan.delta_graph import DeltaGraph

#: The number of entries that a padded group of matrices may have, on a CPU and else.
_MAX_NUMEL_CPU, _MAX_NUMEL = 1 << 16, 1 << 26
#: The least ratio of the sizes of the smallest and the largest block of a group.
_ALIKE = 0.8


def _groups(graph: DeltaGraph, device: torch.device, num_heads: int) -> list[Group]:
    most = _MAX_NUMEL_CPU if device.type == "cpu" else _MAX_NUMEL
    return groups(graph, device, most // num_heads, _ALIKE, graph.is_cyclic)


def _solve(M: Tensor, rhs: Tensor, is_cyclic: bool) -> Tensor:
    """M^-1 rhs; M is triangular, with a unit diagonal, without cycles.

    With cycles, nothing is checked: A is a contraction, so M is not singular.
    """
    if not is_cyclic:
        return torch.linalg.solve_triangular(M, rhs, upper=False, unitriangular=True)
    if M.device.type != "cpu":
        return torch.linalg.solve_ex(M, rhs)[0]
    # Batched LU is wrong with more than one thread (pytorch#142815).
    pairs = zip(M.flatten(0, 1), rhs.flatten(0, 1), strict=True)
    solved = [torch.linalg.solve_ex(*pair)[0] for pair in pairs]
    return torch.stack(solved).view(rhs.shape)


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P]."""
    query, key, value, beta, edge_weight = call.inputs[:5]
    repeats = value.size(1) // key.size(1)
    out = 0 * value  # so that there are gradients without nodes, too
    for group in table(_groups, call.structure, value.device, value.size(1)):
        dtype = torch.double if group.double else value.dtype
        given = (query, key, value, beta[..., None])
        q, k, v, b = (group.pad(x[group.node].to(dtype)) for x in given)
        A = group.matrices(edge_weight[group.edge].to(dtype))
        eye = torch.eye(A.size(-1), dtype=dtype, device=A.device)
        L = _solve(eye - A, eye.expand_as(A), group.double)
        F = (L - eye) * (k @ k.mT).repeat_interleave(repeats, 1)
        u = _solve(eye + b * F, b * v, group.double)
        found = group.unpad(masked_mix(L, q, k, u)).to(out.dtype)
        out.index_copy_(0, group.node, found)
    return out, ()


backward = by_autograd(forward)
