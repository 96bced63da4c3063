"""The steps that benchmarks repeat: forward and backward, compared and measured."""

import pickle
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from timing import (
    Rounds,
    Timing,
    UnfinishedError,
    in_fresh_process,
    interleave,
    peak_memory,
    ratio,
    reset_peak_memory,
    show,
    summary,
)
from torch import Tensor

#: Seconds for a fresh process to import, load compiled code and warm up.
START_UP = 15
#: The relative errors allowed, for outputs and all gradients.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}


class Step:
    """A forward and a backward pass of a function, once per call.

    `leaves` are the tensors that get gradients, by name.
    """

    def __init__(
        self, function: Callable[[], Tensor], leaves: dict[str, Tensor], grad: Tensor
    ) -> None:
        self.function = function
        self.leaves = leaves
        self.grad = grad
        self.synchronize = torch.cuda.synchronize if grad.is_cuda else lambda: None

    def __call__(self) -> Timing:
        """Forward and backward once."""
        for leaf in self.leaves.values():
            leaf.grad = None
        self.synchronize()
        start = time.perf_counter()
        out = self.function()
        self.synchronize()
        middle = time.perf_counter()
        out.backward(self.grad)
        self.synchronize()
        end = time.perf_counter()
        self.out = out.detach()
        return Timing(middle - start, end - start)

    def results(self) -> dict[str, Tensor]:
        """The output and all gradients."""
        self()
        grads = {f"gradient of {name}": x.grad for name, x in self.leaves.items()}
        return {"output": self.out} | grads


# Exactness ---------------------------------------------------------------------


def compare(
    case: str,
    workload: str,
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    against: str,
) -> dict[str, Any]:
    """A row of relative errors; ends the benchmark if one is too large."""
    errors = {key: relative_error(x, expected[key]) for key, x in found.items()}
    for key, error in errors.items():
        tolerance = TOLERANCE[found[key].dtype]
        if not error <= tolerance:
            raise SystemExit(
                f"\n{case} is wrong on {workload}: its {key} is off by {error:.1e}, "
                f"and {tolerance:.0e} is allowed. Nothing is timed."
            )
    row = {"workload": workload, "case": case, "errors": errors}
    return row | {"against": against, "worst": max(errors.values())}


def relative_error(found: Tensor, expected: Tensor) -> float:
    error = (found.double() - expected.double()).abs().max()
    return float(error / expected.double().abs().max())


# Memory, and whether a case can be measured at all -----------------------------


class Pilot(NamedTuple):
    """A first run of a case on a workload."""

    seconds: float = 0.0
    memory: int | None = None  #: peak in bytes, above what was allocated before
    problem: str | None = None  #: why there was no first run


def first_run(step: Step) -> Pilot:
    """Runs a step for the first time, and measures memory. On a CPU, this includes
    memory that other steps have freed, so call it in a fresh process.
    """
    if step.grad.is_cuda:
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        seconds = step().total
        return Pilot(seconds, torch.cuda.max_memory_allocated() - held)
    resident = reset_peak_memory()
    seconds = step().total
    return Pilot(seconds, None if resident is None else peak_memory() - resident)


def attempt(
    function: Callable[..., Pilot], job: tuple, device: str, limit: float
) -> Pilot:
    """The pilot that a function returns, on a CPU in a fresh process, or why not."""
    try:
        if device == "cuda":
            result = function(*job)
        else:
            result = in_fresh_process(function, *job, limit=limit + START_UP)
    except TimeoutError:
        result = Pilot(problem=f"takes more than {limit:g} s")
    except UnfinishedError as error:
        result = Pilot(problem=str(error))
    except torch.OutOfMemoryError:
        result = Pilot(problem="does not fit in memory")
    if result.seconds > limit:
        result = Pilot(problem=f"takes more than {limit:g} s")
    return result


class Sized(Protocol):
    """A workload."""

    part: str
    name: str
    num_nodes: int
    num_edges: int


#: First runs, and repetitions of those that succeeded, by workload and case.
Pilots = dict[tuple[str, str], Pilot]
Repetitions = dict[tuple[str, str], Rounds]


def pilots(
    function: Callable[..., Pilot],
    workloads: Iterable[Sized],
    cases: Callable[[Any], Iterable[str]],
    unable: Callable[[Any, str, str], str | None],
    args: Namespace,
) -> Pilots:
    """Runs all cases on all workloads; on larger ones only if smaller ones succeeded.

    `function` makes the pilot of a case on a pickled workload, on a device, with a
    number of threads; `unable` says why there can't be one.
    """
    found: Pilots = {}
    last: Pilots = {}
    for workload in workloads:
        pickled = pickle.dumps(workload)
        for name in cases(workload):
            show(f"memory: {name} on {workload.name}")
            result = last.get((workload.part, name), Pilot())
            problem = unable(workload, name, args.device)
            if problem is not None:
                result = Pilot(problem=problem)
            elif result.problem is None:
                job = (name, pickled, args.device, args.threads)
                result = attempt(function, job, args.device, args.limit)
            found[workload.name, name] = last[workload.part, name] = result
    return found


def compare_and_time(
    workloads: Sequence[Any],
    cases: Mapping[str, Any],
    names: Callable[[Any], list[str]],
    tiny: Callable[[str], Any],
    check: Callable[[Any, list[str], str], list[dict[str, Any]]],
    pilot: Callable[..., Pilot],
    args: Namespace,
) -> tuple[list[dict[str, Any]], Pilots, Repetitions]:
    """Compares all cases on all workloads, then times those that agree.

    `names` returns the cases of a workload, and `tiny` a small workload of a part, on
    which all cases are compared first; `check` compares, and `pilot` runs a case once.

    Returns:
        The rows of errors, the pilots, and the repetitions.
    """
    parts = dict.fromkeys(x.part for x in workloads)
    errors = [row for p in parts for row in check(tiny(p), names(tiny(p)), args.device)]
    first = pilots(pilot, workloads, names, lambda *_: None, args)
    fine = {key for key, result in first.items() if result.problem is None}
    for workload in workloads:
        left = [name for name in names(workload) if (workload.name, name) in fine]
        errors += check(workload, left, args.device)
    rounds: Repetitions = {}
    for part in parts:
        show(f"times: {part}")
        runs: dict[Any, Step] = {
            (x.name, name): cases[name].make(x, torch.float32, args.device)
            for x in workloads
            for name in names(x)
            if x.part == part and (x.name, name) in fine
        }
        rounds |= interleave(runs, args.repeats, args.limit)
    return errors, first, rounds


# Rows for reports --------------------------------------------------------------


def time_rows(
    workload: Sized,
    names: Iterable[str],
    base: str,
    first: Pilots,
    rounds: Repetitions,
) -> list[dict[str, Any]]:
    """The times of all cases on a workload, also relative to the case `base`."""
    rows = []
    auto = rounds.get((workload.name, base))
    for name in names:
        key = workload.name, name
        row = {"part": workload.part, "workload": workload.name, "case": name}
        row |= {"nodes": workload.num_nodes, "edges": workload.num_edges}
        row |= {"memory": first[key].memory, "problem": first[key].problem}
        if key in rounds:
            row |= summary(rounds[key])
            row["by_auto"] = ratio(rounds[key], auto) if auto else None
        rows.append(row | {"base": base})
    return rows


def growth_rows(
    workloads: Iterable[Sized], names: Iterable[str], first: Pilots, rounds: Repetitions
) -> list[dict[str, Any]]:
    """The growth of time and memory between workloads, with four times the nodes."""
    growth = []
    sizes = {(x.part, x.num_nodes): x.name for x in workloads}
    for (part, nodes), small in sizes.items():
        for name in names:
            a, b = (small, name), (sizes.get((part, 4 * nodes), ""), name)
            if a in rounds and b in rounds:
                row = {"part": part, "case": name, "from": nodes, "to": 4 * nodes}
                row |= {"time": ratio(rounds[b], rounds[a]), "memory": None}
                if first[a].memory and first[b].memory:
                    row["memory"] = first[b].memory / first[a].memory
                growth.append(row)
    return growth
