"""The reference: the softmax of one node after the other, in float64."""

import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.operator import without_autocast

DEVICES = None


def forward(call: Call) -> Tensor:
    """The output, which autograd differentiates."""
    query, key, value, bias = call.inputs[:4]
    dtype, (source, target) = value.dtype, call.inputs.edge_index
    with without_autocast(value):
        repeats = query.size(1) // key.size(1)
        query = query.double() * call.inputs.scale
        key, value = (x.double().repeat_interleave(repeats, 1) for x in (key, value))
        outs = []
        for i in range(query.size(0)):
            edges = (target == i).nonzero().view(-1)
            read = source[edges]
            logits = (query[i] * key[read]).sum(-1)  # [edges, heads]
            if bias is not None:
                logits = logits + bias[edges].double()
            weight = _softmax(logits)
            outs.append((weight.unsqueeze(-1) * value[read]).sum(0))
        return (torch.stack(outs) if outs else value).to(dtype)


def _softmax(logits: Tensor) -> Tensor:
    """Softmax over rows; zeros if all logits are minus infinity or there are none."""
    if len(logits) == 0:
        return logits
    top = logits.detach().amax(0)
    weight = (logits - top.masked_fill(top == -torch.inf, 0)).exp()
    return weight / weight.sum(0).clamp(min=1)  # the largest is exp(0), or all are zero
