"""How much memory there is left."""

import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

CPU = torch.device("cpu")
#: Less than this is not checked for.
_FEW_BYTES = 1 << 30


def left_if_short(needed: float, device: torch.device) -> float | None:
    """The bytes that are left on a device if more are needed; None if there are enough,
    or few are needed, for which nothing is read.
    """
    if needed <= _FEW_BYTES:
        return None
    left = available_bytes(device)
    return left if needed > left else None


def check_memory(
    what: str, needed: float, advice: str, device: torch.device = CPU
) -> None:
    """Checks that so many bytes are left on a device, before they are allocated.

    Raises:
        ValueError: If not: `what` would take more, and the advice.
    """
    if torch.compiler.is_compiling():  # where sizes are unknown
        return
    left = left_if_short(needed, device)
    if left is not None:
        raise too_large(what, needed, left, advice)


def too_large(what: str, needed: float, left: float, advice: str) -> ValueError:
    """The error about what would take more bytes than are left."""
    return ValueError(
        f"{what} would take {needed / 2**30:.0f} GiB, more than the "
        f"{left / 2**30:.0f} GiB that are left; {advice}"
    )


def available_bytes(device: torch.device) -> float:
    """Bytes available for allocation on a device; inf if unknown."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    if device.type != "cpu":
        return math.inf
    found = [math.inf]
    with suppress(OSError, ValueError):  # other systems than Linux
        found.append(1024 * _entries("/proc/meminfo")["MemAvailable:"])
    with suppress(OSError, ValueError):
        found += _left_in_groups()
    return max(min(found), 0)


#: For both versions of cgroups: the marker of their line in /proc/self/cgroup, their
#: folder, and the names of limit, use, and what of that can be freed.
_GROUPS = (
    ("0::", "", "memory.max", "memory.current", "inactive_file"),
    (
        *(":memory:", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        "total_inactive_file",
    ),
)


def _left_in_groups() -> Iterator[float]:
    """What the limits of containers and jobs leave."""
    groups = Path("/proc/self/cgroup").read_text().splitlines()
    for marker, folder, limit, used, cached in _GROUPS:
        root = Path("/sys/fs/cgroup", folder)
        for own in (line.partition(marker)[2] for line in groups if marker in line):
            group = root / own.lstrip("/")
            for x in (group, *group.parents):
                with suppress(OSError, ValueError, KeyError):  # there is none, or "max"
                    free = int((x / limit).read_text()) - int((x / used).read_text())
                    yield free + _entries(x / "memory.stat")[cached]


def _entries(file: str | Path) -> dict[str, int]:
    """The numbers of a file whose lines are names and numbers."""
    lines = (line.split() for line in Path(file).read_text().splitlines())
    return {name: int(number) for name, number, *_ in lines}
