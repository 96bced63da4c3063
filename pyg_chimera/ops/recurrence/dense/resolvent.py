"""The reference: dense matrices and plain autograd, for any floating dtype."""

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.operator import without_autocast
from pyg_chimera.ops.recurrence.plan.pivot_growth import named_if_singular

DEVICES = None


def forward(call: Call) -> Tensor:
    r"""Computes :math:`y = (L \odot Q K^T) V` with a dense :math:`L` for each graph.

    :math:`L = (I - A)^{-1}`, or :math:`\sum_{t=0}^{k} A^t` if :obj:`num_terms` is
    given. Cubic in the nodes of a graph, quadratic in memory.
    """
    with without_autocast(call.inputs.value), named_if_singular():
        return _mix(call)


def _mix(call: Call) -> Tensor:
    query, key, value, edge_weight, edge_index = call.inputs[:5]
    num_terms, sizes = call.inputs.num_terms, call.structure.sizes
    blocks = np.empty(value.size(0), np.int64)
    blocks[call.structure.node] = np.repeat(np.arange(len(sizes)), sizes)
    batch = torch.from_numpy(blocks).to(value.device)
    num_heads = value.size(1)
    query, key = (x.repeat_interleave(num_heads // x.size(1), 1) for x in (query, key))
    out = 0 * value  # all rows are replaced; even without nodes, it has a gradient
    for graph in batch.unique().tolist():
        node = (batch == graph).nonzero().view(-1)
        place = torch.zeros_like(batch, dtype=torch.int64)
        place[node] = torch.arange(node.numel(), device=place.device)
        inside = batch[edge_index[1]] == graph
        col, row = place[edge_index[:, inside]]
        weight = edge_weight[inside]
        eye = torch.eye(node.numel(), dtype=value.dtype, device=value.device)
        heads = []
        for h in range(num_heads):
            A = torch.zeros_like(eye).index_put((row, col), weight[:, h], True)
            if num_terms is None:
                # One matrix per call: batched LU is wrong on CPU (pytorch#142815).
                L = torch.linalg.inv(eye - A)
            else:
                L = eye
                for _ in range(num_terms):
                    L = eye + A @ L
            scores = query[node, h] @ key[node, h].t()
            heads.append((L * scores) @ value[node, h])
        out = out.index_put((node,), torch.stack(heads, 1))
    return out
