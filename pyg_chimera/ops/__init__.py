"""The operators, pure functions of tensors."""

from pyg_chimera.ops import structure
from pyg_chimera.ops.explain import explain
from pyg_chimera.ops.resolvent import Choice, dag_scan, resolvent_mix
from pyg_chimera.ops.scan import grid_scan, stm_scan
from pyg_chimera.ops.structure import CycleError, line_graph, multitree, node_order
from pyg_chimera.ops.tracking import householder_product
from pyg_chimera.ops.transition import (
    chimera_transition,
    dag_transition,
    path_transition,
    released_transition,
)

__all__ = [
    "Choice",
    "CycleError",
    "chimera_transition",
    "dag_scan",
    "dag_transition",
    "explain",
    "grid_scan",
    "householder_product",
    "line_graph",
    "multitree",
    "node_order",
    "path_transition",
    "released_transition",
    "resolvent_mix",
    "stm_scan",
    "structure",
]
