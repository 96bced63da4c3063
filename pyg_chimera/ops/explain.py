"""Which algorithm a call takes."""

from collections.abc import Callable
from typing import Any

from pyg_chimera.ops.causal_conv1d import causal_conv1d
from pyg_chimera.ops.common.checks import check_option
from pyg_chimera.ops.common.dispatch import Choice
from pyg_chimera.ops.common.operator import explained
from pyg_chimera.ops.dag_scan import dag_scan, grid_scan, stm_scan
from pyg_chimera.ops.resolvent import resolvent_mix
from pyg_chimera.ops.selective_scan import selective_scan

__all__ = ["explain"]

_OPERATORS: dict[str, Callable] = {
    "resolvent_mix": resolvent_mix,
    "dag_scan": dag_scan,
    "stm_scan": stm_scan,
    "grid_scan": grid_scan,
    "selective_scan": selective_scan,
    "causal_conv1d": causal_conv1d,
}


def explain(operator: str, *args: Any, **kwargs: Any) -> Choice:
    """Tells which solver, form and backend a call takes, and why.

    Args:
        operator (str): ``"resolvent_mix"``, ``"dag_scan"``, ``"stm_scan"``,
            ``"grid_scan"``, ``"selective_scan"`` or ``"causal_conv1d"``.
        *args: The arguments of the call.
        **kwargs: The options of the call.

    Returns:
        Choice: The operator, solver, form, backend and the reason.

    Raises:
        ValueError: If the operator is unknown, or where the call would raise.
        TypeError: Where the call would raise.
    """
    check_option("operator", operator, tuple(_OPERATORS))
    return explained(_OPERATORS[operator], *args, **kwargs)
