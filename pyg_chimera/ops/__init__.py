"""The operators, pure functions of tensors."""

from pyg_chimera.ops import structure
from pyg_chimera.ops.explain import explain
from pyg_chimera.ops.resolvent import Choice, dag_scan, resolvent_mix
from pyg_chimera.ops.scan import grid_scan, stm_scan
from pyg_chimera.ops.selective_scan import causal_conv1d, selective_scan
from pyg_chimera.ops.structure import (
    CycleError,
    line_graph,
    multitree,
    node_order,
    node_score,
    node_sequences,
)
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
    "causal_conv1d",
    "chimera_transition",
    "dag_scan",
    "dag_transition",
    "explain",
    "grid_scan",
    "householder_product",
    "line_graph",
    "multitree",
    "node_order",
    "node_score",
    "node_sequences",
    "path_transition",
    "released_transition",
    "resolvent_mix",
    "selective_scan",
    "stm_scan",
    "structure",
]
