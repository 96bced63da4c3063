"""The reference: dense states in float64, directly from the rule."""

import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.operator import without_autocast
from pyg_chimera.ops.recurrence.plan.delta_graph import DeltaGraph

DEVICES = None


def forward(call: Call) -> Tensor:
    """The output, which autograd differentiates."""
    query, key, value, beta, edge_weight = (x.double() for x in call.inputs[:5])
    with without_autocast(value):
        repeats = value.size(1) // query.size(1)
        query, key = (x.repeat_interleave(repeats, 1) for x in (query, key))
        out = _output(call.structure, query, key, value, beta, edge_weight)
        return out.to(call.inputs.value.dtype)


def _output(
    graph: DeltaGraph,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    edge_weight: Tensor,
) -> Tensor:
    r"""Solves :math:`S = (I - b k k^T) (A S) + b k v^T` for all states of a block."""
    out, device = torch.zeros_like(value), value.device
    for block in range(len(graph.sizes)):
        inside = torch.from_numpy(graph.block == block)
        node = inside.nonzero().view(-1).to(device)
        place = inside.long().cumsum(0) - 1
        edge = torch.from_numpy(graph.block[graph.row] == block).nonzero().view(-1)
        col, row = (
            place[torch.from_numpy(x)[edge]].to(device) for x in (graph.col, graph.row)
        )
        n, N = node.numel(), key.size(2)
        eye = torch.eye(N, dtype=value.dtype, device=device)
        heads = []
        for h in range(value.size(1)):
            k, b = key[node, h], beta[node, h]
            A = value.new_zeros(n, n)
            A = A.index_put((row, col), edge_weight[edge.to(device), h], True)
            erase = eye - b[:, None, None] * k[:, :, None] * k[:, None, :]
            moved = torch.einsum("iab,ij->iajb", erase, A).reshape(n * N, n * N)
            written = b[:, None, None] * k[:, :, None] * value[node, h][:, None, :]
            whole = torch.eye(n * N, dtype=value.dtype, device=device)
            S = torch.linalg.solve(whole - moved, written.flatten(0, 1))
            heads.append((S.unflatten(0, (n, N)) * query[node, h, :, None]).sum(1))
        out = out.index_put((node,), torch.stack(heads, 1))
    return out
