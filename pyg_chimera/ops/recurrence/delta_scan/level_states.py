"""The delta rule by states that are carried along a DAG, level by level.

All nodes of a topological level are computed at once. Value channels are independent,
except in the surprise of a node, which depends on all of them, so without surprise,
states are computed for as many value channels at a time as fit in memory.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.recurrence.delta_scan.graph import DeltaGraph
from pyg_chimera.ops.structure.cache import table
from pyg_chimera.ops.structure.csr import grouped, inverse

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
    node, ptr = grouped(graph.rank, graph.depth)
    edge, edge_ptr = grouped(graph.rank[graph.row], graph.depth)
    position = inverse(node)
    arrays = (node, edge, position[graph.col[edge]], position[graph.row[edge]])
    nodes, edges, tail, head = (torch.from_numpy(x).to(device) for x in arrays)
    levels = []
    for i in range(graph.depth):
        here = slice(int(ptr[i]), int(ptr[i + 1]))
        into = slice(int(edge_ptr[i]), int(edge_ptr[i + 1]))
        levels.append(_Level(here, into, tail[into], head[into] - here.start))
    return _Levels(nodes, edges, levels)


class _Operands(NamedTuple):
    """The inputs level by level, with queries and keys repeated for each head."""

    levels: _Levels
    query: Tensor  #: [V, heads, N, 1]
    readers: Tensor  #: [V, heads, N, 1 or 2], what reads before a write: key, and query
    value: Tensor  #: [V, heads, 1, P]
    beta: Tensor  #: [V, heads, 1, 1]
    weight: Tensor  #: [E, heads, 1, 1]
    temperature: Tensor | None  #: [heads, 1, 1], that of surprise


def _operands(call: Call) -> _Operands:
    query, key, value, beta, edge_weight, surprise = call.inputs[:6]
    levels = table(_levels, call.structure, value.device)
    repeats, node = value.size(1) // key.size(1), levels.node
    query, key = (
        x[node].repeat_interleave(repeats, 1).unsqueeze(-1) for x in (query, key)
    )
    return _Operands(
        levels,
        query,
        key if surprise is None else torch.cat([key, query], -1),
        value[node].unsqueeze(-2),
        beta[node, :, None, None],
        edge_weight[levels.edge, :, None, None],
        None if surprise is None else surprise[:, None, None],
    )


def _slices(x: _Operands, copies: int) -> Iterator[slice]:
    """Slices of the value channels such that the states of one fit in memory."""
    channels = max(1, x.value.size(-1))
    lanes = max(1, MAX_NUMEL // max(1, x.query.numel() * copies))
    if x.temperature is not None:
        lanes = channels
    for a in range(0, channels, lanes):
        yield slice(a, a + lanes)


def _states(x: _Operands, part: slice) -> tuple[Tensor, Tensor]:
    """The states [V, heads, N, p], and what nodes write [V, heads, 1, p]."""
    value, written = x.value[..., part], torch.empty_like(x.value[..., part])
    S = value.new_zeros(*x.query.shape[:3], value.size(-1))
    for level in x.levels.levels:
        nodes = level.nodes
        here, strength, readers = S[nodes], x.beta[nodes], x.readers[nodes]
        if len(level.tail) > 0:
            moved = x.weight[level.edges] * S[level.tail]
            here.index_add_(0, level.head, moved)
        errors = value[nodes] - readers.mT @ here
        if x.temperature is not None:
            strength = strength * _excess(errors, x.temperature).sigmoid()
        u = torch.mul(strength, errors[..., :1, :], out=written[nodes])
        here += readers[..., :1] * u
    return S, written


def _excess(errors: Tensor, temperature: Tensor) -> Tensor:
    """Surprise, [..., heads, 1, 1], whose sigmoid is the share of beta that is used."""
    mean = errors[..., 1:, :].square().sum(-1, True) / max(errors.size(-1), 1)
    return mean / temperature


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output; states are recomputed for gradients."""
    x = _operands(call)
    read = torch.empty_like(x.value)
    for part in _slices(x, 2):
        read[..., part] = x.query.mT @ _states(x, part)[0]
    return _by_node(read.squeeze(-2), x.levels.node), ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta, edge weight, and if given of surprise.

    With the adjoint Z of a state, a strength b and x = Z^T k, the adjoint of S' is
    Z - b k x^T - q e^T, where e is the adjoint of the query's error, if there is a
    surprise.
    """
    x = _operands(call)
    dy = grad[x.levels.node].unsqueeze(-2)
    dq, d_readers, dv, d_beta, d_weight = (torch.zeros_like(y) for y in x[1:6])
    dk, d_temperature = d_readers[..., :1], []
    for part in _slices(x, 5):
        S, written = _states(x, part)
        before = S - x.readers[..., :1] * written
        errors, strength = x.value[..., part] - x.readers.mT @ before, x.beta
        wrong, slopes = errors[..., :1, :], None
        if x.temperature is not None:
            excess = _excess(errors, x.temperature)
            share = excess.sigmoid()
            strength = x.beta * share
            # Of the strength by the excess and, for each channel, by the query's error.
            slope = strength * (-excess).sigmoid() / x.temperature
            slopes = 2 / max(dy.size(-1), 1) * slope * errors[..., 1:, :]
        Z, found = x.query * dy[..., part], torch.empty_like(written)
        for level in reversed(x.levels.levels):
            nodes = level.nodes
            here, k = Z[nodes], x.readers[nodes][..., :1]
            dk[nodes] += here @ written[nodes].mT
            read = torch.matmul(k.mT, here, out=found[nodes])
            here -= k * (strength[nodes] * read)
            if slopes is not None:
                total = (read * wrong[nodes]).sum(-1, keepdim=True)
                here -= x.query[nodes] * (total * slopes[nodes])
            if len(level.tail) > 0:
                moved = here[level.head]
                both = (moved * S[level.tail]).sum((-2, -1), keepdim=True)
                d_weight[level.edges] += both
                Z.index_add_(0, level.tail, x.weight[level.edges] * moved)
        of_strength = (found * wrong).sum(-1, keepdim=True)
        d_errors = strength * found
        if slopes is not None:
            d_errors = torch.cat([d_errors, of_strength * slopes], -2)
        dq += S @ dy[..., part].mT
        d_readers -= before @ d_errors.mT
        dv[..., part] = d_errors.sum(-2, keepdim=True)
        if x.temperature is not None:
            d_temperature = [-(of_strength * slope * excess).sum((0, 2, 3))]
            of_strength = of_strength * share
        d_beta += of_strength
    if d_readers.size(-1) == 2:
        dq += d_readers[..., 1:]
    groups, (node, edge, _) = call.inputs.key.size(1), x.levels
    dq, dk = (y.squeeze(-1).unflatten(1, (groups, -1)).sum(2) for y in (dq, dk))
    of_nodes = (dq, dk, dv.squeeze(-2), d_beta[..., 0, 0])
    grads = [_by_node(y, node) for y in of_nodes]
    return *grads, _by_node(d_weight[..., 0, 0], edge), *d_temperature


def _by_node(x: Tensor, node: Tensor) -> Tensor:
    """Rows by position, in the order of nodes (or edges)."""
    return torch.empty_like(x).index_copy_(0, node, x)
