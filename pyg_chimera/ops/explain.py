"""Reports which algorithm a call uses."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any, overload

import torch

from pyg_chimera.ops.common.checks import check_option
from pyg_chimera.ops.common.dispatch import Choice
from pyg_chimera.ops.common.operator import OPERATORS, explained


@overload
def explain(operator: str, *args: Any, **kwargs: Any) -> Choice: ...
@overload
def explain(operator: Callable, *args: Any, **kwargs: Any) -> list[Choice]: ...


def explain(
    operator: str | Callable, *args: Any, **kwargs: Any
) -> Choice | list[Choice]:
    r"""Reports which solver, form and backend a call uses, why, and at what cost. ::

        print(explain("resolvent_mix", query, key, value, edge_index, edge_weight))
        print(*explain(conv, x, edge_index, batch=batch), sep="\n")

    The costs of the call and of its alternatives are predicted: operations, seconds on
    this machine while nothing else runs, and bytes that are added to the inputs. They
    include the backward pass, but not what a layer computes around the operator. They
    are :obj:`None` where there is no cost model: on GPUs, and for operators with a
    single algorithm. On a GPU, as before a call, kernels that
    are new to a machine are tested first.

    Args:
        operator (str or callable): ``"resolvent_mix"``, ``"dag_scan"``,
            ``"delta_scan"``, ``"channel_scan"``, ``"stm_scan"``, ``"grid_scan"``,
            ``"grid_dag_scan"``, ``"selective_scan"``, ``"causal_conv1d"``,
            ``"grid_conv"`` or ``"neighborhood_attention"``; or a layer or a model.
            Layers and models are copied, and the copy is called with all operators
            returning zeros, so that neither the original nor the state of random number
            generators changes. Functions are called without a copy.
        *args: The arguments of the call.
        **kwargs: The options of the call.

    Returns:
        Choice or list[Choice]: The operator, solver, form, backend, reason, cost and
        alternatives; for a layer or model, those of each of its calls.

    Raises:
        ValueError: If the operator is unknown, or where the call would raise.
        TypeError: Where the call would raise.
    """
    if isinstance(operator, type):
        raise TypeError(
            f"'operator' must be a layer, not its class: make a {operator.__name__} "
            "first"
        )
    if callable(operator):
        devices = torch.cuda.device_count() if torch.cuda.is_initialized() else 0
        args = tuple(map(_own, args))
        kwargs = {name: _own(value) for name, value in kwargs.items()}
        with torch.random.fork_rng(range(devices)):
            return explained(deepcopy(operator), *args, **kwargs)
    check_option("operator", operator, tuple(OPERATORS))
    return OPERATORS[operator].choice(*args, **kwargs)


def _own(value: Any) -> Any:
    """The value, or a generator in the same state."""
    return value.clone_state() if isinstance(value, torch.Generator) else value
