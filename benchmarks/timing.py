"""Measurements: interleaved repetitions, and memory in fresh processes."""

import gc
import multiprocessing
import os
import platform
import resource
import shlex
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

import pyg_chimera
from pyg_chimera.ops.common import cache as caches

# ------------------------------------------------------------------------------- time


class Timing(NamedTuple):
    """One repetition, in seconds."""

    forward: float
    total: float  #: forward and backward


#: The repetitions of a case by round: None where its time was used up.
Rounds = list[Timing | None]
#: Seconds of a step that is short.
_SHORT = 0.5


def interleave(
    steps: dict[Hashable, Callable[[], Timing]], repeats: int, budget: float
) -> dict[Hashable, Rounds]:
    """Times all steps in turn, round after round: A B C A B C ...

    Disturbances of a round affect all of its steps, so that ratios within rounds hold
    even if absolute times don't. The first call of a step, which may compile kernels,
    is not timed, however long it takes. It is then repeated until it has taken `budget`
    seconds, but at least once.

    In training, a step follows the same one. So if any is short, all are called twice,
    and timed the second time: the first call finds the caches and the memory that
    another step has left, or between rounds the collection of garbage.
    """
    rounds: dict[Hashable, Rounds] = {key: [] for key in steps}
    spent, first = dict.fromkeys(steps, 0.0), list[float]()
    gc.collect()
    gc.disable()
    try:
        for number in range(repeats + 1):
            for key, step in steps.items():
                if spent[key] > budget:
                    rounds[key].append(None)
                    continue
                start = time.perf_counter()
                timing = step()
                if number == 0:
                    first.append(timing.total)
                elif min(first) < _SHORT:
                    timing = step()
                if number > 0:
                    spent[key] += time.perf_counter() - start
                rounds[key].append(timing if number > 0 else None)
            gc.collect()
    finally:
        gc.enable()
    return rounds


def summary(rounds: Rounds) -> dict[str, Any]:
    """The median, the minimum and all repetitions."""
    timings = [timing for timing in rounds if timing is not None]
    columns = zip(Timing._fields, zip(*timings, strict=True), strict=True)
    return {
        name: {"median": median(column), "min": min(column), "all": list(column)}
        for name, column in columns
    }


def ratio(rounds: Rounds, others: Rounds) -> float | None:
    """How much longer a step takes than another: the median of the ratios by round."""
    pairs = zip(rounds, others, strict=True)
    ratios = [a.total / b.total for a, b in pairs if a is not None and b is not None]
    if ratios:
        return median(ratios)
    # Slow steps may not have run in the same rounds.
    both = [[x.total for x in y if x is not None] for y in (rounds, others)]
    return median(both[0]) / median(both[1]) if all(both) else None


@contextmanager
def new_graphs() -> Iterator[None]:
    """A context in which no graph is cached."""
    empty = type(caches._CACHE)(caches._CACHE.size)
    with patch.object(caches, "_CACHE", empty):
        yield


# ----------------------------------------------------------------------------- memory


def reset_peak_memory() -> int | None:
    """Resets the peak of resident memory; returns the bytes that are resident now."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:  # not Linux, or not allowed
        return None
    return _status("VmRSS")


def peak_memory() -> int:
    """The most bytes that have been resident since `reset_peak_memory`."""
    return _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return 1024 * int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field!r}")


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    table = dict(line.split(":") for line in lines)
    return 1024 * int(table["MemAvailable"].split()[0])


def limit_memory(size: int) -> None:
    """Lets this process allocate so many more bytes: what exceeds them fails here, and
    does not run the machine out of memory. Does nothing on other systems than Linux.
    """
    try:
        limit = _status("VmSize") + size
    except OSError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def out_of_memory(error: Exception) -> bool:
    """Whether an error says that memory could not be allocated."""
    return isinstance(error, MemoryError) or "allocate memory" in str(error)


class UnfinishedError(RuntimeError):
    """Raised if a function did not complete in another process."""


_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["preload"])


def _start_server() -> None:
    """Starts the fork server, unless it runs, such that it can import `preload`."""
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH")]
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, path))):
        forkserver.ensure_running()


def in_fresh_process(function: Callable[..., Any], *args: Any, limit: float) -> Any:
    """Calls a function in a fresh process, with a time limit in seconds.

    Raises:
        TimeoutError: If it takes longer.
        UnfinishedError: If it takes more memory than there is, or fails.
    """
    _start_server()
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_answer, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit):
            raise TimeoutError(f"more than {limit:g} s")
        result, problem = receiver.recv()
    except EOFError:
        process.join()
        raise UnfinishedError(
            f"process ended with exit code {process.exitcode}"
        ) from None
    finally:
        process.kill()
        process.join()
    if problem is not None:
        raise UnfinishedError(problem)
    return result


def _answer(sender: Connection, function: Callable[..., Any], args: tuple) -> None:
    available = _available()
    if available is not None:
        limit_memory(int(0.8 * available))
    try:
        sender.send((function(*args), None))
    except Exception as error:
        problem = "does not fit in memory" if out_of_memory(error) else repr(error)
        sender.send((None, problem))


# ---------------------------------------------------------------------------- reports


def machine(device: str) -> dict[str, Any]:
    """The machine and software on which figures were measured."""
    names = ("torch", "torch_geometric", "numba", "numpy", "scipy")
    cpu = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(x.split(":")[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "threads": torch.get_num_threads(),
        "load_at_start": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "command": shlex.join(
            ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]
        ),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": {name: version(name) for name in names}
        | {"pyg_chimera": pyg_chimera.__version__},  # that of a clone may be stale
    }


def show(text: str) -> None:
    """Shows the current activity, if on a terminal."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def shown(seconds: float) -> str:
    """Seconds, as in tables."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    return f"{1e3 * seconds:.{0 if seconds > 0.01 else 1}f} ms"


def table(rows: Iterable[Iterable[str]]) -> str:
    """Rows with aligned columns: the first to the left, the others to the right."""
    cells = [list(row) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        padded = zip(row[1:], widths[1:], strict=True)
        line = [row[0].ljust(widths[0]), *(x.rjust(width) for x, width in padded)]
        lines.append("  " + "  ".join(line).rstrip())
    return "\n".join(lines)


def write_figure(path: Path, figure: Any, dpi: int) -> None:
    """Writes a figure of Matplotlib atomically, and closes it."""
    from matplotlib import pyplot as plt

    part = path.with_name(path.name + ".part")
    figure.savefig(part, format="png", dpi=dpi)
    plt.close(figure)
    os.replace(part, path)
