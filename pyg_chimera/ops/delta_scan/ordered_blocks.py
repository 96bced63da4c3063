"""Blocks with their nodes in an order for elimination, or along a DAG."""

from typing import NamedTuple

import numpy as np
import torch

from pyg_chimera.ops.delta_scan.graph import DeltaGraph
from pyg_chimera.ops.structure.symbolic_factor import SymbolicFactor, symbolic_factor

__all__ = ["OrderedBlocks", "factor_of_cycles", "ordered_blocks"]


class OrderedBlocks(NamedTuple):
    """Blocks, in topological order where there is one.

    Blocks with cycles are in an order in which I - A fills up little when it is
    eliminated. Positions are numbered block by block; all arrays are int64.
    """

    ptr: np.ndarray  #: [T + 1], first position of each block
    acyclic: np.ndarray  #: [T], whether it has no cycle, bool
    node: np.ndarray  #: [V], node at each position
    edge_ptr: np.ndarray  #: [V + 1], the first edge that leads to each position ...
    edge: np.ndarray  #: [E], ... its number ...
    edge_row: np.ndarray  #: [E], ... where it leads to ...
    edge_col: np.ndarray  #: [E], ... and the position that it comes from
    column_ptr: np.ndarray  #: [V + 1], the pattern of factors of I - A, by columns ...
    column_row: np.ndarray  #: [F], ... with rows ...
    column_entry: np.ndarray  #: [F], ... and numbers of entries


def ordered_blocks(graph: DeltaGraph) -> OrderedBlocks:
    """The ordered blocks of a graph, made once."""
    if OrderedBlocks not in graph.tables:
        graph.tables[OrderedBlocks] = _ordered(graph)
    return graph.tables[OrderedBlocks]


def factor_of_cycles(graph: DeltaGraph) -> tuple[SymbolicFactor, np.ndarray]:
    """Where factors of I - A have entries, in blocks with cycles, and their edges."""
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
        column_ptr=factor.upper_ptr,
        column_row=factor.upper_row,
        column_entry=factor.upper_entry,
    )
