"""The operators: pure functions of tensors."""

from pyg_chimera.ops import (
    portable_forms,  # noqa: F401  (they are found by name)
    structure,
)
from pyg_chimera.ops.causal_conv1d import causal_conv1d
from pyg_chimera.ops.chimera_transition import (
    balanced_path_transition,
    chimera_transition,
    dag_transition,
    grid_transition,
    path_transition,
    released_transition,
)
from pyg_chimera.ops.common.checks import unchecked
from pyg_chimera.ops.common.dispatch import Choice, Cost
from pyg_chimera.ops.common.errors import CycleError
from pyg_chimera.ops.common.portability import portable
from pyg_chimera.ops.common.predicted_time import warn_above
from pyg_chimera.ops.common.static_tables import StaticTables
from pyg_chimera.ops.explain import explain
from pyg_chimera.ops.grid_conv import grid_conv
from pyg_chimera.ops.householder import householder_product
from pyg_chimera.ops.neighborhood_attention import neighborhood_attention
from pyg_chimera.ops.recurrence.channel_scan import channel_scan
from pyg_chimera.ops.recurrence.dag_scan import (
    dag_scan,
    grid_dag_scan,
    grid_scan,
    stm_scan,
)
from pyg_chimera.ops.recurrence.delta_scan import delta_scan
from pyg_chimera.ops.recurrence.resolvent_mix import resolvent_mix
from pyg_chimera.ops.recurrence.selective_scan import selective_scan
from pyg_chimera.ops.recurrence.solve import solve
from pyg_chimera.ops.structure import (
    k_hop_index,
    line_graph,
    multitree,
    node_order,
    node_score,
    node_sequences,
)

__all__ = [
    "Choice",
    "Cost",
    "CycleError",
    "StaticTables",
    "balanced_path_transition",
    "causal_conv1d",
    "channel_scan",
    "chimera_transition",
    "dag_scan",
    "dag_transition",
    "delta_scan",
    "explain",
    "grid_conv",
    "grid_dag_scan",
    "grid_scan",
    "grid_transition",
    "householder_product",
    "k_hop_index",
    "line_graph",
    "multitree",
    "neighborhood_attention",
    "node_order",
    "node_score",
    "node_sequences",
    "path_transition",
    "portable",
    "released_transition",
    "resolvent_mix",
    "selective_scan",
    "solve",
    "stm_scan",
    "structure",
    "unchecked",
    "warn_above",
]
