"""The operators, pure functions of tensors."""

from pyg_chimera.ops import structure
from pyg_chimera.ops.resolvent import Choice, dag_scan, explain, resolvent_mix
from pyg_chimera.ops.structure import CycleError
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
    "path_transition",
    "released_transition",
    "resolvent_mix",
    "structure",
]
