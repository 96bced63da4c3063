"""The measured numbers that the choice of an algorithm depends on.

Those of CPUs can be measured anew: ``python -m pyg_chimera.calibrate`` keeps what it
finds in the user's cache folder, where `nanoseconds` reads it once.
"""

import json
import math
import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from warnings import warn

import torch

from pyg_chimera.ops.common.user_files import user_file, write_json


class Step(NamedTuple):
    """What one step of an algorithm takes, forward and backward."""

    nanoseconds: float  #: on one core
    operations: float = 0.0  #: multiply-adds


#: `ops/recurrence/choose.py` counts how many of each a call takes. Their times were
#: measured one after the other on an AMD EPYC of the fourth generation (Zen 4), with
#: vectors of 64 bytes, and are right to a factor of about two there; those of
#: elimination, dense matrices, chunks and masks of grids were set later, by what they
#: take beside others on an Intel Xeon. A *lane* is a number of a state; those of the
#: last vector count, even if they are not used.
STEPS = MappingProxyType({
    # What any call takes beside its algorithm.
    "call": Step(1.5e6),
    # Resolvents: reading and checking the transitions, and their gradients.
    "resolvent: node": Step(330.0), "resolvent: edge": Step(210.0),
    # In mask form: products, and passes over resolvents.
    "mask: key of a pair": Step(0.1, 3), "mask: channel of a pair": Step(0.08, 3),
    "mask: pair": Step(1.5), "mask: block": Step(1e3), "mask: solving": Step(0.3, 3),
    "dense: multiply-add": Step(0.08, 1), "dense: block": Step(2e5),
    # By elimination in state form.
    "elimination: entry and lane": Step(0.22, 6.3),
    "elimination: node and lane": Step(1.2, 15),
    "elimination: multiply-add": Step(0.15, 1),
    # Products with A, by whether the states of one vector are in the cache.
    "iteration: near": Step(0.14, 1), "iteration: far": Step(0.35, 1),
    # Chunks of paths.
    "chunk: within": Step(0.0265, 1.2), "chunk: between": Step(0.02, 0.75),
    "chunk: decay": Step(1.0), "chunk: path": Step(100.0),
    # States of a graph. The more there are, the more often they are read from memory.
    "scan: state and lane": Step(0.45, 6), "scan: edge and lane": Step(0.2, 3),
    "scan: state": Step(300.0), "scan: edge": Step(150.0),
    "scan: far state and lane": Step(0.8),
    # Grids: the mask form, and scans with states on nodes or on edges.
    "grid mask: multiply-add": Step(0.0183, 1), "grid mask: pair": Step(0.4, 12),
    "grid mask: node": Step(60.0), "grid nodes: state and lane": Step(0.4, 12),
    "grid nodes: state": Step(50.0), "grid nodes: row and lane": Step(0.5),
    "grid edges: state and lane": Step(0.8, 27), "grid edges: state": Step(70.0),
    # The delta rule.
    "delta mask: multiply-add": Step(0.05, 1), "delta mask: pair": Step(4.0),
    "delta mask: node": Step(1.2e3), "delta mask: block": Step(8e3),
    "delta state: number": Step(0.35, 7), "delta state: byte": Step(0.06),
    "delta state: far byte": Step(0.08), "delta state: node": Step(200.0),
})  # fmt: skip

#: Each from one run on an H200; `benchmarks/crossovers.py` measures the first three.
ON_GPUS = {
    # Blocks of so many nodes take as long by dense matrices, each of which one program
    # inverts (40 ms for 1,024 nodes), as by fronts.
    "dense: nodes": 448,
    # Paths of more nodes, two chunks, are computed in chunks.
    "chunk: nodes": 64,
    # Factors of more entries are given up: the largest front that kernels take has as
    # many.
    "elimination: entries": 1 << 27,
    # Seconds: of a position of a walk along states, of which four programs run at a
    # time on each multiprocessor; of a level in plain PyTorch, and of an entry of its
    # states; of paths in chunks.
    "walk: position": 5e-6,
    "walk: at once": 132 * 4,
    "level": 8e-5,
    "level: entry": 5e-11,
    "chunk: scan": 1e-4,
    # The delta rule: nodes up to which levels are not worth while, and how many take as
    # long as a level (4 us a node, about 500 us a level).
    "delta: nodes": 1024,
    "delta: nodes a level": 120,
}

#: What to set to 0 in the environment for what is committed here.
VARIABLE = "PYG_CHIMERA_CALIBRATION"


def nanoseconds() -> Mapping[str, float]:
    """The time of each of `STEPS` on one core: fitted to this machine, or as here."""
    return calibration() or COMMITTED


COMMITTED = MappingProxyType({name: x.nanoseconds for name, x in STEPS.items()})


@cache
def calibration() -> Mapping[str, float] | None:
    """What was fitted to this machine; None if nothing was, or it is not wanted.

    Warns, once, if what is kept was written by something else, by another version, or
    for other machines only.
    """
    if os.environ.get(VARIABLE) == "0":
        return None
    kept, problem = _kept()
    found = kept.get(machine()) if kept else None
    if kept and found is None:
        problem = f"is of {' and '.join(kept)}, not of {machine()}"
    elif kept and not _is_fine(found):
        problem = "is of another version of this package"
    if problem:
        warn(
            f"{_file()} {problem}, and is ignored; run 'python -m "
            f"pyg_chimera.calibrate' again, or set {VARIABLE}=0",
            stacklevel=2,
        )
        return None
    return found and MappingProxyType(found)


def keep(times: Mapping[str, float]) -> Path:
    """Keeps what was fitted to this machine, beside that of others.

    Raises:
        OSError: If the file cannot be written.
    """
    kept, _ = _kept()
    write_json(_file(), {**kept, machine(): dict(times)})
    calibration.cache_clear()
    return _file()


def machine() -> str:
    """The processor, and the vectors that PyTorch uses on it."""
    cpus = ""
    with suppress(OSError):
        cpus = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^model name\s*: (.*)$", cpus, re.MULTILINE)
    name = found[1] if found else platform.processor() or platform.machine()
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}"


def _file() -> Path:
    return user_file("calibration.json")


def _kept() -> tuple[dict[str, Any], str]:
    """What is kept, by machine, and what is wrong with the file."""
    try:
        found = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, RuntimeError):  # there is none, or no home
        return {}, ""
    except ValueError:
        return {}, "is not JSON"
    return (found, "") if isinstance(found, dict) else ({}, "is not a dictionary")


def _is_fine(times: Any) -> bool:
    return (
        isinstance(times, dict)
        and times.keys() == STEPS.keys()
        and all(type(x) is float and 0 <= x < math.inf for x in times.values())
    )
