"""Attention edge by edge in plain tensor operations, on any device.

What is gathered for the edges, queries, keys and values, is worked on in parts.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call

DEVICES = None

#: Bytes that are gathered at a time.
_CPU_BYTES, _GPU_BYTES = 1 << 22, 1 << 28


def why_not(call: Call) -> str | None:
    """It computes everything."""


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, H, P], and the weights [E, H], which sum to one at each node."""
    query, key, value, bias, edge_index = call.inputs[:5]
    query, (source, target) = _by_group(query, key), edge_index
    logits = query.new_empty(len(source), *query.shape[1:3])
    for e in _parts(query, source):
        logits[e] = _products(query[target[e]], key[source[e]])
    logits *= call.inputs.scale
    if bias is not None:
        logits += bias.view_as(logits)

    top = logits.new_full((query.size(0), *logits.shape[1:]), -torch.inf)
    place = target.view(-1, 1, 1).expand_as(logits)
    top.scatter_reduce_(0, place, logits, "amax")
    top.masked_fill_(top == -torch.inf, 0)
    weight = logits.sub_(top[target]).exp_()
    total = torch.zeros_like(top).index_add_(0, target, weight)
    weight /= total.clamp_(min=1)[target]  # one of them is exp(0), or all are zero

    out = _zeros(query, value)
    for e in _parts(out, source):
        out.index_add_(0, target[e], _scaled(weight[e], value[source[e]]))
    return out.flatten(1, 2), (weight,)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of query, key, value and, if there is one, bias."""
    query, key, value, bias, edge_index = call.inputs[:5]
    (weight,), (source, target) = saved, edge_index
    query, grad = _by_group(query, key), _by_group(grad, value)
    dvalue, dlogits = torch.zeros_like(value), torch.empty_like(weight)
    for e in _parts(grad, source):
        dy = grad[target[e]]
        dlogits[e] = _products(dy, value[source[e]])
        dvalue.index_add_(0, source[e], _summed(weight[e], dy))
    dlogits *= weight
    total = dlogits.new_zeros(query.size(0), *weight.shape[1:])
    total.index_add_(0, target, dlogits)
    dlogits -= weight * total[target]

    dquery, dkey = torch.zeros_like(query), torch.zeros_like(key)
    for e in _parts(query, source):
        d = dlogits[e] * call.inputs.scale
        dquery.index_add_(0, target[e], _scaled(d, key[source[e]]))
        dkey.index_add_(0, source[e], _summed(d, query[target[e]]))
    grads = (dquery.flatten(1, 2), dkey, dvalue)
    return grads if bias is None else (*grads, dlogits.flatten(1))


def _by_group(x: Tensor, shared: Tensor) -> Tensor:
    """Heads [V, H, C] as [V, G, H / G, C]."""
    return x.unflatten(1, (shared.size(1), x.size(1) // shared.size(1)))


def _zeros(query: Tensor, value: Tensor) -> Tensor:
    return value.new_zeros(*query.shape[:3], value.size(2))


def _products(x: Tensor, y: Tensor) -> Tensor:
    """[e, G, R, C], [e, G, C] -> [e, G, R]."""
    return (x * y.unsqueeze(2)).sum(-1)


def _scaled(weight: Tensor, x: Tensor) -> Tensor:
    """[e, G, R], [e, G, C] -> [e, G, R, C]."""
    return weight.unsqueeze(-1) * x.unsqueeze(2)


def _summed(weight: Tensor, x: Tensor) -> Tensor:
    """[e, G, R], [e, G, R, C] -> [e, G, C]."""
    return (weight.unsqueeze(-1) * x).sum(2)


def _parts(x: Tensor, source: Tensor) -> Iterator[slice]:
    """Edges in parts of which the rows of [V, G, R, C] fit into the memory for them."""
    limit = _CPU_BYTES if x.device.type == "cpu" else _GPU_BYTES
    row = x[:1].numel() * x.element_size()
    size = max(1, limit // max(1, row))
    for start in range(0, len(source), size):
        yield slice(start, start + size)
