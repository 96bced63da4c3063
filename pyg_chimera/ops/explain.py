"""Which algorithm a call takes."""

from collections.abc import Callable
from functools import partial
from typing import Any

from pyg_chimera.ops.resolvent.mix import Choice, explain_mix
from pyg_chimera.ops.scan.stm import explain_grid_scan, explain_stm_scan
from pyg_chimera.ops.selective_scan.scan import explain_conv, explain_scan

__all__ = ["explain"]

_OPERATORS: dict[str, Callable[..., Choice]] = {
    "resolvent_mix": partial(explain_mix, "resolvent_mix"),
    "dag_scan": partial(explain_mix, "dag_scan"),
    "stm_scan": explain_stm_scan,
    "grid_scan": explain_grid_scan,
    "selective_scan": explain_scan,
    "causal_conv1d": explain_conv,
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
    if operator not in _OPERATORS:
        raise ValueError(
            f"'operator' must be one of {list(_OPERATORS)}, got {operator!r}"
        )
    return _OPERATORS[operator](*args, **kwargs)
