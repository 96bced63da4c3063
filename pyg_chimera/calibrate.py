"""Fits the predicted costs of algorithms, between which calls choose, to this machine.

``python -m pyg_chimera.calibrate`` measures each algorithm at a few sizes, forward and
backward, on one core, in about two minutes. Each predicted time is a sum of the times
of an algorithm's steps; those are fitted, and kept in the user's cache folder. They
change which algorithm is chosen and what `explain` predicts, but no results beyond
rounding. ``--show`` prints what is kept, ``--overwrite`` replaces it.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from statistics import median
from typing import Any

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor
from tqdm import tqdm

from pyg_chimera.ops.common import coefficients
from pyg_chimera.ops.common.operator import OPERATORS
from pyg_chimera.ops.common.simd import vector_lanes
from pyg_chimera.ops.recurrence.choose import NEAR_BYTES

__all__ = ["main"]

#: How much steps are pulled towards their committed times, by a factor common to all:
#: what so few calls do not determine stays near.
_PULL = 0.3
#: A call is repeated until it took so many seconds, and at least so often.
_SECONDS, _LEAST = 0.2, 3

Call = tuple[str, dict[str, Any]]  #: an operator, and its arguments

# ---------------------------------------------------------------------------- the calls


def _lattice(side: int) -> Tensor:
    node = torch.arange(side * side).view(side, side)
    pairs = ((node[:, :-1], node[:, 1:]), (node[:-1], node[1:]))
    return torch.cat([torch.stack([x.ravel(), y.ravel()]) for x, y in pairs], 1)


def _paths(number: int, size: int) -> Tensor:
    node = torch.arange(number * size).view(number, size)
    return torch.stack([node[:, :-1].ravel(), node[:, 1:].ravel()])


def _trees(number: int, size: int) -> Tensor:
    node, first = torch.arange(1, size), size * torch.arange(number)[:, None]
    return torch.stack([(first + (node - 1) // 2).ravel(), (first + node).ravel()])


def _scattered(size: int, degree: int) -> Tensor:
    """Edges into each node, from anywhere before it."""
    generator = torch.Generator().manual_seed(0)
    node = torch.arange(1, size).repeat(degree)
    share = torch.rand(len(node), generator=generator)
    return torch.stack([(share * node).long(), node])


def _mix(edges: Tensor, heads: int, keys: int, channels: int) -> dict[str, Any]:
    """Nodes, and weights with which rows of |A| sum to less than one."""
    nodes = int(edges.max()) + 1
    key = torch.nn.functional.normalize(torch.randn(nodes, heads, keys), dim=-1)
    degree = edges[1].bincount(minlength=nodes)[edges[1]]
    weight = (0.8 / degree).unsqueeze(1).repeat(1, heads)
    value = torch.randn(nodes, heads, channels)
    inputs = {"query": key.clone(), "key": key, "value": value}
    return {**inputs, "edge_index": edges, "edge_weight": weight}


def _both_ways(edges: Tensor) -> Tensor:
    return torch.cat([edges, edges.flip(0)], 1)


def _grid(operator: str, number: int, side: int, *sizes: int) -> dict[str, Any]:
    inputs = _mix(_paths(1, number * side**2), *sizes)
    del inputs["edge_index"], inputs["edge_weight"]
    nodes, heads, extent = number * side**2, sizes[0], torch.full((number,), side)
    inputs |= {"height": extent, "width": extent}
    if operator == "grid_dag_scan":
        gates: dict[str, tuple[int, ...]] = {"source": (2,), "transition": (2, 2)}
    else:
        gates = {"source": (4, 2), "mark": (4, 2), "transition": (4, 2, 2)}
        gates["direct"] = ()
    return inputs | {x: torch.rand(nodes, *y, heads) / 4 for x, y in gates.items()}


_NARROW, _WIDE = (1, 4, 8), (4, 16, 16)  #: heads, state channels and value channels
_WIDTHS = (_NARROW, _WIDE, (2, 48, 32))
_MOLECULES, _SMALL = _trees(64, 24), _trees(300, 7)


def _calls() -> Iterator[Call]:
    """At least two sizes for each algorithm."""
    numbers, _ = vector_lanes(np.dtype("f4"))
    far = NEAR_BYTES // (4 * numbers) + 600  # a few more than the cache holds
    for width, (solver, form), graph in (
        *product(_WIDTHS, [("sparse", "state"), ("sparse", "mask"), ("dense", "mask")],
                 (_MOLECULES, _SMALL, _lattice(15))),
        *product(_WIDTHS, [("sparse", "state")],
                 (_lattice(45), _trees(1, 3000), _scattered(500, 4))),
        *product(_WIDTHS, [("sparse", "chunk")],
                 (_paths(1, 3000), _paths(100, 20), _paths(20, 100))),
        *product(_WIDTHS, [("iterative", "state")],
                 (_scattered(2000, 8), _scattered(300, 4), _lattice(40))),
        *product(_WIDTHS[:2], [("iterative", "state")], (_scattered(far, 4),)),
    ):  # fmt: skip
        inputs = _mix(_both_ways(graph), *width)
        yield "resolvent_mix", {**inputs, "solver": solver, "form": form}
    for width, form, graph in (
        *product(_WIDTHS, ["state"],
                 (_MOLECULES, _trees(1, 3000), _scattered(3000, 4), _lattice(30))),
        *product(_WIDTHS, ["chunk", "state"],
                 (_paths(1, 3000), _paths(100, 20), _paths(20, 100))),
        *product(_WIDTHS[1:], ["state"], (_trees(1, 15_000),)),
    ):  # fmt: skip
        yield "dag_scan", {**_mix(graph, *width), "form": form}
    for width, (number, side) in product(_WIDTHS, ((16, 6), (4, 16), (1, 40))):
        for form in ("state", "mask") if side < 40 else ("state",):
            yield (
                "grid_scan",
                {**_grid("grid_scan", number, side, *width), "form": form},
            )
        yield "grid_dag_scan", _grid("grid_dag_scan", number, side, *width)
    for width, (form, graph) in product(
        _WIDTHS,
        (("state", _MOLECULES), ("state", _scattered(1000, 3)), ("mask", _MOLECULES),
         ("mask", _both_ways(_MOLECULES)), ("mask", _SMALL), ("mask", _lattice(12)),
         ("mask", _both_ways(_lattice(10))), ("state", _trees(1, 12_000))),
    ):  # fmt: skip
        inputs = _mix(graph, *width)
        beta = torch.rand(inputs["value"].shape[:2])
        yield "delta_scan", {**inputs, "beta": beta, "form": form}


# ------------------------------------------------------------------------ the times


def _processor_time() -> Callable[[], float]:
    """A clock that stands still while others use the processor, where there is one."""
    fine = time.get_clock_info("process_time").resolution < 1e-5  # not on Windows
    return time.process_time if fine else time.perf_counter


def _measured(call: Call, clock: Callable[[], float]) -> float:
    """Seconds of a call, forward and backward: the median, after a first one."""
    name, inputs = call
    leaves = {
        key: x.requires_grad_()
        for key, x in inputs.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    times: list[float] = []
    while len(times) <= _LEAST or sum(times[1:]) < _SECONDS:
        start = clock()
        out = OPERATORS[name].function(**inputs)
        torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))
        times.append(clock() - start)
    return median(times[1:])


def _counted(call: Call) -> dict[str, float]:
    """The steps that a call takes."""
    name, inputs = call
    cost = OPERATORS[name].choice(**inputs).cost
    assert cost is not None
    return {"call": 1.0, **dict(cost.steps)}


# -------------------------------------------------------------------------- the fit


def _matrix(counts: Sequence[Mapping[str, float]]) -> np.ndarray:
    """Seconds of each step [calls, steps] at the committed times."""
    each = {name: 1e-9 * time for name, time in coefficients.COMMITTED.items()}
    return np.array([[x.get(name, 0.0) * each[name] for name in each] for x in counts])


def _fitted(parts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """How much longer each step takes than the committed time, by nonnegative least
    squares of relative errors.
    """
    relative = parts / seconds[:, None]
    total = relative.sum(1)
    common = total.sum() / (total @ total)
    pulls = _PULL * np.eye(parts.shape[1])
    wanted = np.append(np.ones(len(parts)), _PULL * common * np.ones(len(pulls)))
    return nnls(np.vstack([relative, pulls]), wanted)[0]


def _left_out(parts: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Predictions of each call from a fit to all others."""
    rows = np.arange(len(parts))
    return np.array(
        [x @ _fitted(parts[rows != i], seconds[rows != i]) for i, x in enumerate(parts)]
    )


# -------------------------------------------------------------------------- the report


def _show(times: Mapping[str, float]) -> None:
    print(f"{'nanoseconds on one core':32} {'committed':>10} {'here':>10}")
    for name, time_ in times.items():
        print(f"{name:32} {coefficients.COMMITTED[name]:10.3g} {time_:10.3g}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, fits, reports and keeps.

    Returns:
        int: 0; 1 if the file cannot be written or there is none to show; 2 if there is
        one already; 130 if interrupted, which leaves it as it was.
    """
    parser = argparse.ArgumentParser("pyg_chimera.calibrate", description=__doc__)
    parser.add_argument("--show", action="store_true", help="print what is kept")
    parser.add_argument("--overwrite", action="store_true", help="replace what is kept")
    args = parser.parse_args(arguments)
    kept = coefficients.calibration()
    print(f"machine: {coefficients.machine()}")
    if args.show:
        print("nothing is kept" if kept is None else "")
        _show(kept or coefficients.COMMITTED)
        return int(kept is None)
    if kept is not None and not args.overwrite:
        print("measured before: use --overwrite, or --show")
        return 2
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _calibrate()
    except KeyboardInterrupt:
        print("interrupted: nothing has changed")
        return 130
    finally:
        torch.set_num_threads(threads)


def _calibrate() -> int:
    torch.manual_seed(0)
    calls, clock = list(_calls()), _processor_time()
    counts, seconds = [], []
    for call in tqdm(calls, "measuring", disable=None):
        counts.append(_counted(call))
        seconds.append(_measured(call, clock))
    parts, measured = _matrix(counts), np.array(seconds)
    ratios = _fitted(parts, measured)
    before = parts.sum(1)
    before *= np.exp(np.median(np.log(measured / before)))
    found = {
        name: float(ratio * time_)
        for (name, time_), ratio in zip(
            coefficients.COMMITTED.items(), ratios, strict=True
        )
    }
    _show(found)
    print(f"\n{len(calls)} calls; predictions are off by a factor of")
    for what, predicted in (
        ("before, but for a common factor", before),
        ("after, of calls that were left out", _left_out(parts, measured)),
    ):
        off = np.exp(np.abs(np.log(np.maximum(predicted, 1e-12) / measured)))
        worst = int(off.argmax())
        name, inputs = calls[worst]
        options = [inputs[x] for x in ("solver", "form") if x in inputs]
        algorithm = f"{' '.join([name, *options])}, {measured[worst]:.2g} s"
        print(f"  {median(off):.2f} (median), {off.max():.2f} ({algorithm}): {what}")
    try:
        print(f"kept in {coefficients.keep(found)}")
    except (OSError, RuntimeError) as error:
        print(f"not kept: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
