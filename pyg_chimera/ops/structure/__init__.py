"""Functions of the graph alone, whose results can be computed once and reused."""

from pyg_chimera.ops.common.errors import CycleError
from pyg_chimera.ops.structure.centrality import ORDERS, node_score
from pyg_chimera.ops.structure.checksum import check_stored
from pyg_chimera.ops.structure.distance import connected_components, diameter
from pyg_chimera.ops.structure.elimination import elimination_rank
from pyg_chimera.ops.structure.grid import grid_parents
from pyg_chimera.ops.structure.k_hop import KHop, k_hop_index
from pyg_chimera.ops.structure.line_graph import LineGraph, line_graph, multitree
from pyg_chimera.ops.structure.node_order import node_order
from pyg_chimera.ops.structure.node_sequences import NodeSequences, node_sequences
from pyg_chimera.ops.structure.parent_scale import parent_scale
from pyg_chimera.ops.structure.topological import find_cycle, topological_rank

__all__ = [
    "ORDERS",
    "CycleError",
    "KHop",
    "LineGraph",
    "NodeSequences",
    "check_stored",
    "connected_components",
    "diameter",
    "elimination_rank",
    "find_cycle",
    "grid_parents",
    "k_hop_index",
    "line_graph",
    "multitree",
    "node_order",
    "node_score",
    "node_sequences",
    "parent_scale",
    "topological_rank",
]
