"""A graph of states in levels, for device-independent code."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.compilation import compiled
from pyg_chimera.ops.recurrence.states import StateGraph
from pyg_chimera.ops.structure.cache import table

__all__ = ["Level", "Levels", "levels_of"]


class Level(NamedTuple):
    """Edges between levels: all into states of one depth, or out of one height."""

    edge: Tensor
    tail: Tensor
    head: Tensor


class Levels(NamedTuple):
    """A graph of states on a device: S states, L edges."""

    writer: Tensor  #: [S], the node that writes each state
    reader: Tensor  #: [S], the node that reads each state
    tail: Tensor  #: [L], the state that each edge comes from
    head: Tensor  #: [L], the state that it leads to
    down: list[Level]  #: parents first
    up: list[Level]  #: children first


def levels_of(graph: StateGraph, device: torch.device) -> Levels:
    """The tables of a graph, made once per device."""
    return table(_levels, graph, device)


def _levels(graph: StateGraph, device: torch.device) -> Levels:
    head = graph.state[
        np.repeat(np.arange(len(graph.state)), np.diff(graph.parent_ptr))
    ]
    tail = graph.state[graph.parent]
    depth = _depths(graph.parent_ptr, graph.parent, True)
    height = _depths(graph.child_ptr, graph.child, False)
    at = np.empty_like(graph.state)
    at[graph.state] = np.arange(len(at))

    def levels(level: np.ndarray) -> list[Level]:
        order = np.argsort(level, kind="stable")
        sizes = np.bincount(level).tolist() if len(level) else []
        arrays = (graph.edge[order], tail[order], head[order])
        parts = (torch.from_numpy(x).to(device).split(sizes) for x in arrays)
        return [Level(*x) for x in zip(*parts, strict=True) if x[0].numel() > 0]

    edges = np.empty((2, len(graph.edge)), np.int64)
    edges[:, graph.edge] = tail, head
    arrays = (graph.writer, graph.reader, *edges)
    writer, reader, tails, heads = (torch.from_numpy(x).to(device) for x in arrays)
    return Levels(
        writer,
        reader,
        tails,
        heads,
        down=levels(depth[at[head]]),
        up=levels(height[at[tail]]),
    )


@compiled()
def _depths(ptr, other, ascending):
    """The length of the longest path to each position, or from it if descending."""
    n = ptr.shape[0] - 1
    depth = np.zeros(n, np.int64)
    for k in range(n):
        i = k if ascending else n - 1 - k
        for x in range(ptr[i], ptr[i + 1]):
            depth[i] = max(depth[i], depth[other[x]] + 1)
    return depth
