"""Predicted run times: scaled to this machine, with a warning if they are long."""

import time
from functools import cache
from numbers import Real
from warnings import warn

import torch

from pyg_chimera.ops.common.dispatch import Choice

#: Multiply-adds per nanosecond and core in `torch.mm` where the costs were measured.
_REFERENCE = 50.0


class _Limit:
    seconds = 60.0
    warned: set[Choice] = set()  # noqa: RUF012


def warn_above(seconds: float) -> None:
    """Sets the predicted time, forward and backward, above which a call warns.

    Each algorithm warns once, with the prediction and suggestions. The limit is 60
    seconds by default.

    Args:
        seconds (float): The limit; :obj:`float("inf")` disables warnings.

    Raises:
        ValueError: If it is negative or not a number.
        TypeError: If it is something else.
    """
    if not isinstance(seconds, Real):
        raise TypeError(f"'seconds' must be a number, got {seconds!r}")
    if not seconds >= 0:
        raise ValueError(f"'seconds' must be 0 or more, got {seconds}")
    _Limit.seconds = seconds
    _Limit.warned.clear()


def warn_if_long(choice: Choice) -> None:
    """Warns, once per algorithm, if it is predicted to take long."""
    if choice.cost is None or choice.cost.seconds < _Limit.seconds / 100:
        return
    scaled = on_this_machine(choice)
    if scaled.cost.seconds > _Limit.seconds and choice.algorithm not in _Limit.warned:  # type: ignore[union-attr]
        _Limit.warned.add(choice.algorithm)
        warn(
            f"{scaled}\nThis call takes long. Fewer state channels or heads take less, "
            "and so do clusters of the graph, and finite sums of few terms. "
            "'pyg_chimera.ops.warn_above' sets the limit of this warning",
            stacklevel=2,
        )


def on_this_machine(choice: Choice) -> Choice:
    """The choice, with all costs (also of alternatives) scaled to this machine."""
    cost = choice.cost
    if cost is not None:
        cost = cost._replace(seconds=cost.seconds * _slowness(torch.get_num_threads()))
    others = tuple(map(on_this_machine, choice.alternatives))
    return choice._replace(cost=cost, alternatives=others)


@cache
def _slowness(num_threads: int) -> float:
    """How much longer a matrix product takes here than where costs were measured."""
    n, best = 512, float("inf")
    x = torch.ones(n, n, dtype=torch.float32, device="cpu")
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for _ in range(4):
            start = time.perf_counter()
            x @ x
            best = min(best, time.perf_counter() - start)
    return _REFERENCE * num_threads * best * 1e9 / n**3
