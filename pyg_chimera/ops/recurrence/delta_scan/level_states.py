"""The delta rule by states that are carried along a DAG, level by level.

All nodes of a topological level are computed at once. Value channels are independent,
except in the surprise of a node, which depends on all of them, so without surprise,
states are computed for as many value channels at a time as fit in memory.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.recurrence.delta_scan.graph import DeltaGraph
from pyg_chimera.ops.structure.cache import table

#: The number of entries that one slice of states may have.
MAX_NUMEL = 1 << 26


class _Level(NamedTuple):
    """Nodes of one rank, and the edges that lead to them."""

    nodes: slice  #: positions
    edges: slice
    tail: Tensor  #: the positions of the edges' sources
    head: Tensor  #: the indices of their targets among the nodes of the level


class _Levels(NamedTuple):
    """Nodes and edges, level by level."""

    node: Tensor  #: [V], the node at each position
    edge: Tensor  #: [E], the edges
    levels: list[_Level]


def _levels(graph: DeltaGraph, device: torch.device) -> _Levels:
    """The levels of a DAG."""

    def moved(x: np.ndarray) -> Tensor:
        return torch.from_numpy(x).to(device)

    node = np.argsort(graph.rank, kind="stable")
    position = np.empty_like(node)
    position[node] = np.arange(len(node))
    edge = np.argsort(graph.rank[graph.row], kind="stable")
    last = np.cumsum(np.bincount(graph.rank, minlength=graph.depth))
    last_edge = np.cumsum(np.bincount(graph.rank[graph.row], minlength=graph.depth))
    tail, head = (moved(position[x[edge]]) for x in (graph.col, graph.row))
    levels, i, e = [], 0, 0
    for j, f in zip(last.tolist(), last_edge.tolist(), strict=True):
        edges = slice(e, f)
        levels.append(_Level(slice(i, j), edges, tail[edges], head[edges] - i))
        i, e = j, f
    return _Levels(moved(node), moved(edge), levels)


class _Operands(NamedTuple):
    """The inputs level by level, with queries and keys repeated for each head."""

    levels: _Levels
    query: Tensor  #: [V, heads, N]
    key: Tensor
    value: Tensor  #: [V, heads, P]
    beta: Tensor  #: [V, heads, 1]
    weight: Tensor  #: [E, heads, 1 or N, 1]
    temperature: Tensor | None  #: [heads, 1], that of surprise


def _operands(call: Call) -> _Operands:
    query, key, value, beta, edge_weight, surprise = call.inputs[:6]
    levels = table(_levels, call.structure, value.device)
    repeats = value.size(1) // key.size(1)
    return _Operands(
        levels,
        query[levels.node].repeat_interleave(repeats, 1),
        key[levels.node].repeat_interleave(repeats, 1),
        value[levels.node],
        beta[levels.node, :, None],
        edge_weight[levels.edge][(..., *[None] * (4 - edge_weight.dim()))],
        None if surprise is None else surprise.unsqueeze(-1),
    )


def _slices(x: _Operands, copies: int) -> Iterator[slice]:
    """Slices of the value channels such that the states of one fit in memory."""
    nodes, heads, channels = x.value.shape
    if x.temperature is not None:
        yield slice(0, channels)
        return
    lanes = max(1, MAX_NUMEL // max(1, nodes * heads * x.key.size(2) * copies))
    for a in range(0, channels, lanes):
        yield slice(a, a + lanes)


class _States(NamedTuple):
    """The states of a slice, and the errors that nodes correct."""

    S: Tensor  #: [V, heads, N, p]
    error: Tensor  #: [V, heads, p], value minus prediction by the key
    strength: Tensor  #: [V, heads, 1], the share of the error that nodes correct
    surprise: Tensor  #: [V, heads, p], value minus prediction by the query


def _states(x: _Operands, part: slice) -> _States:
    """Carries the states along the DAG."""
    key, query, value = x.key.unsqueeze(-1), x.query.unsqueeze(-1), x.value[..., part]
    error, surprise = torch.empty_like(value), value.new_empty(0)
    strength = x.beta
    if x.temperature is not None:
        surprise, strength = torch.empty_like(value), torch.empty_like(x.beta)
    S = value.new_zeros(*x.key.shape, value.size(2))
    for level in x.levels.levels:
        nodes = level.nodes
        here = S[nodes]
        if len(level.tail) > 0:
            moved = x.weight[level.edges] * S[level.tail]
            here.index_add_(0, level.head, moved)
        k = key[nodes]
        torch.sub(value[nodes], (k.mT @ here).squeeze(-2), out=error[nodes])
        if x.temperature is not None:
            read = (query[nodes].mT @ here).squeeze(-2)
            torch.sub(value[nodes], read, out=surprise[nodes])
            share = _excess(surprise[nodes], x.temperature).sigmoid()
            strength[nodes] = x.beta[nodes] * share
        here += k * (strength[nodes] * error[nodes]).unsqueeze(-2)
    return _States(S, error, strength, surprise)


def _excess(error: Tensor, temperature: Tensor) -> Tensor:
    """Surprise, [..., heads, 1], whose sigmoid is the share of beta that is used."""
    mean = error.square().sum(-1, keepdim=True) / max(error.size(-1), 1)
    return mean / temperature


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output; states are recomputed for gradients."""
    x = _operands(call)
    read = torch.empty_like(x.value)
    for part in _slices(x, 2):
        S = _states(x, part).S
        read[..., part] = (x.query.unsqueeze(-2) @ S).squeeze(-2)
    return torch.empty_like(read).index_copy_(0, x.levels.node, read), ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta, edge weight, and if given of surprise.

    With the adjoint Z of a state, a strength b and x = Z^T k, the adjoint of S' is
    Z - b k x^T - q e^T, where e is the adjoint of the query's error, if there is a
    surprise.
    """
    x = _operands(call)
    dy, key, query = grad[x.levels.node], x.key.unsqueeze(-1), x.query.unsqueeze(-1)
    dq, dk, dv = (torch.zeros_like(y) for y in (x.query, x.key, x.value))
    d_beta, d_weight = torch.zeros_like(x.beta), torch.zeros_like(x.weight)
    d_temperature = torch.zeros_like(x.beta)
    for part in _slices(x, 5):
        S, error, strength, surprise = _states(x, part)
        Z = query * dy[..., part].unsqueeze(-2)
        written = strength * error
        dq += (S @ dy[..., part, None]).squeeze(-1)
        for level in reversed(x.levels.levels):
            nodes = level.nodes
            here, before = Z[nodes], S[nodes]
            k, b, u = key[nodes], strength[nodes], written[nodes]
            found = (k.mT @ here).squeeze(-2)
            d_predicted = -b * found
            dv[nodes, :, part] = -d_predicted
            d_strength = (found * error[nodes]).sum(-1, keepdim=True)
            dk[nodes] += (here @ u.unsqueeze(-1)).squeeze(-1)
            known = before - k * u.unsqueeze(-2)
            dk[nodes] += (known @ d_predicted.unsqueeze(-1)).squeeze(-1)
            of_known = k * d_predicted.unsqueeze(-2)
            if x.temperature is not None:
                e = surprise[nodes]
                excess = _excess(e, x.temperature)
                d_excess = d_strength * b * (-excess).sigmoid()
                d_strength = d_strength * excess.sigmoid()
                d_read = -2 / max(e.size(-1), 1) * d_excess / x.temperature * e
                dv[nodes] -= d_read
                dq[nodes] += (known @ d_read.unsqueeze(-1)).squeeze(-1)
                of_known += query[nodes] * d_read.unsqueeze(-2)
                d_temperature[nodes] = -d_excess * excess / x.temperature
            d_beta[nodes] += d_strength
            here += of_known
            if len(level.tail) > 0:
                moved = here[level.head]
                both = (moved * S[level.tail]).sum(-1, keepdim=True)
                d_weight[level.edges] += both.sum_to_size(d_weight[level.edges].shape)
                Z.index_add_(0, level.tail, x.weight[level.edges] * moved)
    groups = call.inputs.key.size(1)
    dq, dk = (y.unflatten(1, (groups, -1)).sum(2) for y in (dq, dk))
    places = [x.levels.node] * 4 + [x.levels.edge]
    d_weight = d_weight.view_as(call.inputs.edge_weight)
    of_rows = (dq, dk, dv, d_beta.squeeze(-1), d_weight)
    grads = tuple(
        torch.empty_like(y).index_copy_(0, place, y)
        for y, place in zip(of_rows, places, strict=True)
    )
    return grads if x.temperature is None else (*grads, d_temperature.sum((0, 2)))
