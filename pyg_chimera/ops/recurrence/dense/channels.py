"""The reference: one node after the other, parents first, in float64."""

import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.operator import without_autocast

DEVICES = None


def forward(call: Call) -> Tensor:
    """The states, which autograd differentiates."""
    value, edge_weight, decay, edge_index = call.inputs[:4]
    with without_autocast(value):
        x = value.double()
        ones = x.new_ones(x.size(1))
        parents: list[list[tuple[int, int]]] = [[] for _ in x]
        for edge, (j, i) in enumerate(edge_index.t().tolist()):
            parents[i].append((edge, j))
        states: dict[int, Tensor] = {}
        for i in call.structure.state.tolist():  # in topological order
            arrived = torch.zeros_like(x[i])
            for edge, j in parents[i]:
                w = ones if edge_weight is None else edge_weight[edge].double()
                arrived = arrived + w * states[j]
            d = ones if decay is None else decay[i].double()
            states[i] = d * arrived + x[i]
        rows = [states[i] for i in range(len(x))]
        return (torch.stack(rows) if rows else x.clone()).to(value.dtype)
