"""The delta rule by states that are carried along a DAG, level by level.

All nodes of a topological level are computed at once. Value channels are independent,
so states are computed for as many of them at a time as fit in memory.
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
    key: Tensor  #: [V, heads, N, 1]
    value: Tensor  #: [V, heads, 1, P]
    beta: Tensor  #: [V, heads, 1, 1]
    weight: Tensor  #: [E, heads, 1, 1]


def _operands(call: Call) -> _Operands:
    query, key, value, beta, edge_weight = call.inputs[:5]
    levels = table(_levels, call.structure, value.device)
    repeats, node = value.size(1) // key.size(1), levels.node
    query, key = (
        x[node].repeat_interleave(repeats, 1).unsqueeze(-1) for x in (query, key)
    )
    return _Operands(
        levels,
        query,
        key,
        value[node].unsqueeze(-2),
        beta[node, :, None, None],
        edge_weight[levels.edge, :, None, None],
    )


def _slices(x: _Operands, copies: int) -> Iterator[slice]:
    """Slices of the value channels such that the states of one fit in memory."""
    channels = max(1, x.value.size(-1))
    lanes = max(1, MAX_NUMEL // max(1, x.query.numel() * copies))
    for a in range(0, channels, lanes):
        yield slice(a, a + lanes)


def _states(x: _Operands, part: slice) -> tuple[Tensor, Tensor]:
    """The states [V, heads, N, p], and the errors of keys [V, heads, 1, p]."""
    value, errors = x.value[..., part], torch.empty_like(x.value[..., part])
    S = value.new_zeros(*x.query.shape[:3], value.size(-1))
    for level in x.levels.levels:
        nodes = level.nodes
        here, key = S[nodes], x.key[nodes]
        if len(level.tail) > 0:
            moved = x.weight[level.edges] * S[level.tail]
            here.index_add_(0, level.head, moved)
        error = torch.sub(value[nodes], key.mT @ here, out=errors[nodes])
        here += key * (x.beta[nodes] * error)
    return S, errors


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output; states are recomputed for gradients."""
    x = _operands(call)
    read = torch.empty_like(x.value)
    for part in _slices(x, 2):
        read[..., part] = x.query.mT @ _states(x, part)[0]
    return _by_node(read.squeeze(-2), x.levels.node), ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta and edge weight.

    With the adjoint Z of a state, the adjoint of S' is Z - b k (Z^T k)^T.
    """
    x = _operands(call)
    dy = grad[x.levels.node].unsqueeze(-2)
    dq, dk, dv, d_beta, d_weight = (torch.zeros_like(y) for y in x[1:])
    for part in _slices(x, 5):
        S, error = _states(x, part)
        written = x.beta * error
        Z, found = x.query * dy[..., part], torch.empty_like(written)
        for level in reversed(x.levels.levels):
            nodes = level.nodes
            here, key = Z[nodes], x.key[nodes]
            dk[nodes] += here @ written[nodes].mT
            read = torch.matmul(key.mT, here, out=found[nodes])
            here -= key * (x.beta[nodes] * read)
            if len(level.tail) > 0:
                moved = here[level.head]
                both = (moved * S[level.tail]).sum((-2, -1), keepdim=True)
                d_weight[level.edges] += both
                Z.index_add_(0, level.tail, x.weight[level.edges] * moved)
        d_error = x.beta * found
        dq += S @ dy[..., part].mT
        dk -= (S - x.key * written) @ d_error.mT
        dv[..., part] = d_error
        d_beta += (found * error).sum(-1, keepdim=True)
    groups, (node, edge, _) = call.inputs.key.size(1), x.levels
    dq, dk = (y.squeeze(-1).unflatten(1, (groups, -1)).sum(2) for y in (dq, dk))
    of_nodes = (dq, dk, dv.squeeze(-2), d_beta[..., 0, 0])
    grads = [_by_node(y, node) for y in of_nodes]
    return *grads, _by_node(d_weight[..., 0, 0], edge)


def _by_node(x: Tensor, node: Tensor) -> Tensor:
    """Rows by position, in the order of nodes (or edges)."""
    return torch.empty_like(x).index_copy_(0, node, x)
