"""A graph of states in levels, for device-independent code."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.recurrence.states import StateGraph
from pyg_chimera.ops.structure.cache import table
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
    down: list[Level]  #: parents first

    @property
    def up(self) -> list[Level]:
        """The levels, children first."""
        return self.down[::-1]


def levels_of(graph: StateGraph, device: torch.device) -> Levels:
    """The tables of a graph, made once per device."""
    return table(_levels, graph, device)


def depth_of(graph: StateGraph) -> int:
    """The number of levels that edges lead to."""
    if "depth" not in graph.tables:
        graph.tables["depth"] = int(_depths(graph)[1].max(initial=0))
    return graph.tables["depth"]


def _depths(graph: StateGraph) -> tuple[np.ndarray, np.ndarray]:
    """Edges between states, [2, L], and the depth of each state."""
    edges = np.empty((2, len(graph.edge)), np.int64)
    edges[:, graph.edge] = graph.state[graph.parent], graph.state[graph.row]
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
