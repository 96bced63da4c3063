"""Linear recurrences on DAGs: on their nodes, on their edges, and on grids."""

from pyg_chimera.ops.recurrence.dag_scan.op import (
    dag_scan,
    grid_dag_scan,
    grid_scan,
    stm_scan,
)

__all__ = ["dag_scan", "grid_dag_scan", "grid_scan", "stm_scan"]
