"""A graph of states in levels, and its linear system, on any device."""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.cache import table
from pyg_chimera.ops.recurrence.plan.states import StateGraph
from pyg_chimera.ops.structure.csr import grouped, to_numpy
from pyg_chimera.ops.structure.topological import topological_rank


class Level(NamedTuple):
    """Edges into states of one depth."""

    edge: Tensor
    tail: Tensor
    head: Tensor


class Levels(NamedTuple):
    """A graph of states on a device: S states, L edges."""

    writer: Tensor  #: [S], the node that writes each state
    reader: Tensor  #: [S], the node that reads each state
    tail: Tensor  #: [L], the state that each edge comes from
    head: Tensor  #: [L], the state that it leads to
    levels: list[Level]  #: parents first


def levels_of(graph: StateGraph, device: torch.device) -> Levels:
    """The tables of a graph, made once per device."""
    return table(_levels, graph, device)


def solve_by_levels(levels: Levels, weight: Tensor, X: Tensor) -> Tensor:
    """Solves C = A C + X, in place of X.

    Args:
        levels: The graph of states.
        weight: The entries of A, [L, ...], broadcast to the rows of X.
        X: [S, ...].
    """
    return _Solution.apply(weight, X, levels)


class _Solution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, X: Tensor, levels: Levels) -> Tensor:
        for edge, tail, head in levels.levels:
            X.index_add_(0, head, weight[edge] * X[tail])
        ctx.mark_dirty(X)
        ctx.save_for_backward(weight, X)
        ctx.levels = levels
        return X

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (weight, C), levels = ctx.saved_tensors, ctx.levels
        Z, dw = grad.clone(), None
        for edge, tail, head in reversed(levels.levels):
            Z.index_add_(0, tail, weight[edge] * Z[head])
        if ctx.needs_input_grad[0]:
            dw = (Z[levels.head] * C[levels.tail]).sum_to_size(weight.shape)
        return dw, Z, None


def depth_of(graph: StateGraph) -> int:
    """The number of levels that edges lead to."""
    if "depth" not in graph.tables:
        graph.tables["depth"] = int(_depths(graph)[1].max(initial=0))
    return graph.tables["depth"]


def _depths(graph: StateGraph) -> tuple[np.ndarray, np.ndarray]:
    """Edges between states, [2, L], and the depth of each state."""
    parents, state = graph.parents, graph.state
    edges = np.empty((2, len(parents.col)), np.int64)
    edges[:, parents.entry] = state[parents.col], state[parents.row]
    depth = topological_rank(torch.from_numpy(edges), len(graph.state))
    return edges, to_numpy(depth)


def _levels(graph: StateGraph, device: torch.device) -> Levels:
    edges, depth = _depths(graph)
    order, bounds = grouped(depth[edges[1]], int(depth.max(initial=0)) + 1)
    sizes = np.diff(bounds)[1:].tolist()  # no edge leads to depth 0
    arrays = (order, *edges[:, order])
    parts = (torch.from_numpy(x).to(device).split(sizes) for x in arrays)
    levels = [Level(*x) for x in zip(*parts, strict=True)]
    arrays = (graph.writer, graph.reader, *edges)
    writer, reader, tail, head = (torch.from_numpy(x).to(device) for x in arrays)
    return Levels(writer, reader, tail, head, levels)
