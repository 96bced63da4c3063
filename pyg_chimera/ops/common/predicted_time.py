"""Predicted run times: scaled to this machine, with a warning if they are long."""

import time
from functools import cache
from numbers import Real
from warnings import warn

import torch

from pyg_chimera.ops.common.coefficients import calibration, nanoseconds
from pyg_chimera.ops.common.dispatch import Choice

#: Multiply-adds per nanosecond and core in `torch.mm` where the costs were measured.
_REFERENCE = 50.0
#: Copies of the inputs, of the output and of its gradient that a call holds at once.
_COPIES = 1.75


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


def warn_if_long(choice: Choice, tensors: int) -> None:
    """Warns, once per algorithm, if it is predicted to take long."""
    if choice.cost is None or choice.cost.seconds < _Limit.seconds / 100:
        return
    scaled = on_this_machine(choice, tensors)
    if scaled.cost.seconds > _Limit.seconds and choice.algorithm not in _Limit.warned:  # type: ignore[union-attr]
        _Limit.warned.add(choice.algorithm)
        warn(
            f"{scaled}\nThis call takes long. Fewer state channels or heads take less, "
            "and so do clusters of the graph, and finite sums of few terms. "
            "'pyg_chimera.ops.warn_above' sets the limit of this warning",
            stacklevel=2,
        )


def on_this_machine(choice: Choice, tensors: int) -> Choice:
    """The choice, with all costs (also of alternatives) those of a whole call here.

    The costs of algorithms, which decide between them, leave out what all calls take.

    Args:
        choice: The algorithm and its alternatives.
        tensors: The bytes of the inputs, of the output and of its gradient.
    """
    cost = choice.cost
    if cost is not None:
        seconds = cost.seconds + 1e-9 * nanoseconds()["call"]
        if calibration() is None:
            seconds *= _slowness(torch.get_num_threads())
        memory = cost.memory + _COPIES * tensors
        cost = cost._replace(seconds=seconds, memory=memory)
    others = tuple(on_this_machine(x, tensors) for x in choice.alternatives)
    return choice._replace(cost=cost, alternatives=others)


@cache
def _slowness(num_threads: int) -> float:
    """How much longer a matrix product takes here than where costs were measured.

    By the time that the processor spends on this thread, where it is told finely, as
    others may be waiting for the same processor. The first products are slower.
    """
    n, best = 512, float("inf")
    fine = time.get_clock_info("thread_time").resolution < 1e-5  # not on Windows
    clock = time.thread_time if fine else time.perf_counter
    x = torch.ones(n, n, dtype=torch.float32, device="cpu")
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        for _ in range(12):
            start = clock()
            x @ x
            best = min(best, clock() - start)
    return _REFERENCE * num_threads * best * 1e9 / n**3
