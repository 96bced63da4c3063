"""Attention by edges in plain tensor operations, on any device.

Queries, keys and values are gathered for slices of the edges, to limit memory.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.neighborhood_attention.pattern import EPSILON

DEVICES = None

#: Bytes that are gathered at a time.
_CPU_BYTES, _GPU_BYTES = 1 << 22, 1 << 28


def why_not(call: Call) -> str | None:
    """It supports all calls."""


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, H, P], and the softmax weights [E, H], or [E, 2 H] of two maps."""
    query, key, value, bias, contrast, edge_index = call.inputs[:6]
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
    weight /= total.clamp_(min=1)[target]  # the largest is exp(0), or all are zero
    softmax = weight.flatten(1)
    if contrast is not None:
        weight, _ = _difference(softmax, contrast, target, query.size(0))
        weight = weight.unflatten(1, (value.size(1), -1))

    out = value.new_zeros(value.size(0), *weight.shape[1:], value.size(2))
    for e in _parts(out, source):
        out.index_add_(0, target[e], _scaled(weight[e], value[source[e]]))
    return out.flatten(1, 2), (softmax,)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of query, key, value and, if given, bias and contrast."""
    query, key, value, bias, contrast, edge_index = call.inputs[:6]
    (softmax,), (source, target) = saved, edge_index
    weight, num_nodes = softmax, query.size(0)
    if contrast is not None:
        weight, whole = _difference(softmax, contrast, target, num_nodes)
    weight = weight.unflatten(1, (value.size(1), -1))
    query, grad = _by_group(query, key), _by_group(grad, value)
    dvalue, dweight = torch.zeros_like(value), torch.empty_like(weight)
    for e in _parts(grad, source):
        dy = grad[target[e]]
        dweight[e] = _products(dy, value[source[e]])
        dvalue.index_add_(0, source[e], _summed(weight[e], dy))
    dweight, weight = dweight.flatten(1), weight.flatten(1)
    of_contrast = []
    if contrast is not None:
        dweight -= _totals(weight * dweight, target, num_nodes)
        dweight = (dweight / whole).masked_fill(weight <= 0, 0)
        of_contrast.append(-(softmax.chunk(2, dim=1)[1] * dweight).sum(0))
        dweight = torch.cat([dweight, -contrast * dweight], dim=1)
    dlogits = softmax * (dweight - _totals(softmax * dweight, target, num_nodes))
    flat, dlogits = dlogits, dlogits.unflatten(1, (key.size(1), -1))

    dquery, dkey = torch.zeros_like(query), torch.zeros_like(key)
    for e in _parts(query, source):
        d = dlogits[e] * call.inputs.scale
        dquery.index_add_(0, target[e], _scaled(d, key[source[e]]))
        dkey.index_add_(0, source[e], _summed(d, query[target[e]]))
    grads = (dquery.flatten(1, 2), dkey, dvalue)
    return (*grads, *([] if bias is None else [flat]), *of_contrast)


def _difference(
    maps: Tensor, contrast: Tensor, target: Tensor, num_nodes: int
) -> tuple[Tensor, Tensor]:
    """The weights [E, H] of two maps [E, 2 H], and the sums they were divided by."""
    first, second = maps.chunk(2, dim=1)
    weight = (first - contrast * second).relu_()
    whole = _totals(weight, target, num_nodes) + EPSILON
    return weight / whole, whole


def _totals(x: Tensor, target: Tensor, num_nodes: int) -> Tensor:
    """For each edge, the sum over the edges of its target."""
    return x.new_zeros(num_nodes, x.size(1)).index_add_(0, target, x)[target]


def _by_group(x: Tensor, shared: Tensor) -> Tensor:
    """Heads [V, H, C] as [V, G, H / G, C]."""
    return x.unflatten(1, (shared.size(1), x.size(1) // shared.size(1)))


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
    """Slices of the edges whose rows of [V, G, R, C] fit into the memory for them."""
    limit = _CPU_BYTES if x.device.type == "cpu" else _GPU_BYTES
    row = x[:1].numel() * x.element_size()
    size = max(1, limit // max(1, row))
    for start in range(0, len(source), size):
        yield slice(start, start + size)
