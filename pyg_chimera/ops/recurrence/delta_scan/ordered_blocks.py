"""Blocks with their nodes in elimination order, or on DAGs in topological order."""

from typing import NamedTuple

import numpy as np
import torch

from pyg_chimera.ops.recurrence.delta_scan.graph import DeltaGraph
from pyg_chimera.ops.structure.symbolic_factor import SymbolicFactor, symbolic_factor

__all__ = ["OrderedBlocks", "factor_of_cycles", "ordered_blocks"]


class OrderedBlocks(NamedTuple):
    """Blocks, with nodes in topological order where there is one.

    Nodes of blocks with cycles are in a fill-reducing elimination order of I - A.
    Positions are numbered block by block; arrays are int64 unless stated otherwise.
    """

    ptr: np.ndarray  #: [T + 1], first position of each block
    acyclic: np.ndarray  #: [T], whether it has no cycle, bool
    node: np.ndarray  #: [V], node at each position
    edge_ptr: np.ndarray  #: [V + 1], first of the edges to each position in ...
    edge: np.ndarray  #: [E], ... the edges, by position of the target, ...
    edge_row: np.ndarray  #: [E], ... positions of their targets ...
    edge_col: np.ndarray  #: [E], ... and of their sources
    upper_ptr: np.ndarray  #: [V + 1], the pattern of I - A = L U by columns of L: ...
    upper_row: np.ndarray  #: [F], ... rows ...
    upper_entry: np.ndarray  #: [F], ... and indices of entries


def ordered_blocks(graph: DeltaGraph) -> OrderedBlocks:
    """The ordered blocks of a graph, cached in its tables."""
    if OrderedBlocks not in graph.tables:
        graph.tables[OrderedBlocks] = _ordered(graph)
    return graph.tables[OrderedBlocks]


def factor_of_cycles(graph: DeltaGraph) -> tuple[SymbolicFactor, np.ndarray]:
    """The symbolic factor of the blocks with cycles, and the indices of their edges."""
    if SymbolicFactor not in graph.tables:
        edge = np.flatnonzero(graph.is_cyclic[graph.block[graph.row]])
        edges = torch.from_numpy(np.stack([graph.col[edge], graph.row[edge]]))
        block = torch.from_numpy(graph.block)
        found = symbolic_factor(edges, block, None, graph.num_nodes)
        graph.tables[SymbolicFactor] = found, edge
    return graph.tables[SymbolicFactor]


def _ordered(graph: DeltaGraph) -> OrderedBlocks:
    factor, _ = factor_of_cycles(graph)
    is_cyclic = graph.is_cyclic[graph.block[graph.order]]
    node = np.where(is_cyclic, factor.node, graph.order)
    position = np.empty_like(node)
    position[node] = np.arange(len(node))
    edge = np.argsort(position[graph.row], kind="stable")
    row = position[graph.row[edge]]
    return OrderedBlocks(
        ptr=factor.ptr,
        acyclic=~graph.is_cyclic,
        node=node,
        edge_ptr=np.searchsorted(row, np.arange(len(node) + 1)),
        edge=edge,
        edge_row=row,
        edge_col=position[graph.col[edge]],
        upper_ptr=factor.upper_ptr,
        upper_row=factor.upper_row,
        upper_entry=factor.upper_entry,
    )
