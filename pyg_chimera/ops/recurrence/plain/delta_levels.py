"""The delta rule by states that are carried along a DAG, level by level.

All nodes of a topological level are computed at once. Value channels are independent,
so states are computed for as many of them at a time as fit in memory.

Autograd does not see the levels, each of which would copy all states. It sees the rule
once, for all nodes, given the states S of their parents; with the gradient G of S from
what queries read, the adjoint of the whole recurrence is Z = G + A^T E Z, where E =
I - b k k^T, level by level in reverse.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyg_chimera.ops.common.autograd import by_autograd
from pyg_chimera.ops.common.cache import table
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.recurrence.plan.delta_graph import DeltaGraph
from pyg_chimera.ops.structure.csr import grouped, inverse

#: The number of entries that one slice of states may have.
MAX_NUMEL = 1 << 26


class _Level(NamedTuple):
    """Nodes of one rank, and the edges that lead to them."""

    nodes: slice  #: positions
    edges: slice
    tail: Tensor  #: the positions of the edges' sources
    head: Tensor  #: the indices of their targets among the nodes


class _Levels(NamedTuple):
    """Nodes and edges, level by level."""

    node: Tensor  #: [V], the node at each position
    edge: Tensor  #: [E], the edges
    whole: _Level  #: all of them
    levels: list[_Level]


def levels_of(graph: DeltaGraph, device: torch.device) -> _Levels:
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
    return _Levels(nodes, edges, _Level(slice(None), slice(None), tail, head), levels)


class _Operands(NamedTuple):
    """The inputs level by level, with queries and keys repeated for each head."""

    query: Tensor  #: [V, heads, N, 1]
    key: Tensor  #: [V, heads, N, 1]
    value: Tensor  #: [V, heads, 1, P]
    beta: Tensor  #: [V, heads, 1, 1]
    weight: Tensor  #: [E, heads, 1, 1]

    def written(self, S: Tensor, value: Tensor | float, nodes: slice) -> Tensor:
        """S + b k (value - S^T k)^T."""
        key = self.key[nodes]
        return S + key * (self.beta[nodes] * (value - key.mT @ S))

    def states(self, S: Tensor, level: _Level) -> Tensor:
        """The states of a level, given those of its parents."""
        before = S.new_zeros(len(self.key[level.nodes]), *S.shape[1:])
        before.index_add_(0, level.head, self.weight[level.edges] * S[level.tail])
        return self.written(before, self.value[level.nodes], level.nodes)


def _operands(call: Call, levels: _Levels) -> _Operands:
    query, key, value, beta, edge_weight = call.inputs[:5]
    repeats, node = value.size(1) // key.size(1), levels.node
    query, key = (
        x[node].repeat_interleave(repeats, 1).unsqueeze(-1) for x in (query, key)
    )
    beta, edge_weight = (x[..., None, None] for x in (beta[node], edge_weight))
    return _Operands(
        query, key, value[node].unsqueeze(-2), beta, edge_weight[levels.edge]
    )


def _states(x: _Operands, levels: _Levels) -> Tensor:
    """The states, [V, heads, N, P]."""
    with torch.no_grad():
        S = x.value.new_empty(*x.key.shape[:3], x.value.size(-1))
        for level in levels.levels:
            S[level.nodes] = x.states(S, level)
    if not torch.is_grad_enabled():
        return S

    def adjoint(grad: Tensor) -> Tensor:
        Z = grad.clone()
        for level in reversed(levels.levels):
            moved = x.written(Z[level.nodes], 0, level.nodes)[level.head]
            Z.index_add_(0, level.tail, x.weight[level.edges] * moved)
        return Z

    S = x.states(S, levels.whole)
    S.register_hook(adjoint)
    return S


def _slices(call: Call) -> Iterator[slice]:
    """Slices of the value channels such that the states of one fit in memory."""
    (V, heads, P), N = call.inputs.value.shape, call.inputs.key.size(2)
    rows = 6 * V + 3 * call.inputs.edge_weight.size(0)
    lanes = max(1, MAX_NUMEL // max(1, rows * heads * N))
    for a in range(0, max(1, P), lanes):
        yield slice(a, a + lanes)


def _slice_of(call: Call, part: slice) -> Call:
    value = call.inputs.value[..., part]
    return call.with_inputs(call.inputs._replace(value=value))


def _forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    levels = table(levels_of, call.structure, call.inputs.value.device)
    x = _operands(call, levels)
    read = (x.query.mT @ _states(x, levels)).squeeze(-2)
    return torch.empty_like(read).index_copy(0, levels.node, read), ()


_backward = by_autograd(_forward)


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output; states are recomputed for gradients."""
    outs = [_forward(_slice_of(call, part))[0] for part in _slices(call)]
    return torch.cat(outs, -1), ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta and edge weight."""
    parts = [
        _backward(_slice_of(call, part), saved, grad[..., part])
        for part in _slices(call)
    ]
    query, key, value, beta, weight = zip(*parts, strict=True)
    return sum(query), sum(key), torch.cat(value, -1), sum(beta), sum(weight)
