"""How much memory there is left."""

import math
from pathlib import Path

import pytest
import torch

from pyg_chimera.ops.common import memory

CPU = torch.device("cpu")


@pytest.fixture
def files(monkeypatch):
    """Files of the system, and no others."""
    found = {}

    def read(path: Path) -> str:
        if str(path) not in found:
            raise FileNotFoundError(path)
        return found[str(path)]

    monkeypatch.setattr(Path, "read_text", read)
    return found


def test_memory_of_a_machine(files):
    assert memory.available_bytes(CPU) == math.inf
    assert memory.available_bytes(torch.device("meta")) == math.inf
    files["/proc/meminfo"] = "MemTotal:  900 kB\nMemAvailable:  500 kB\nHuge:  0\n"
    assert memory.available_bytes(CPU) == 500 * 1024


@pytest.mark.parametrize(
    ("own", "folder", "limit", "used", "cached"),
    [
        ("0::/", "", "memory.max", "memory.current", "inactive_file"),
        ("0::/job/step", "/job", "memory.max", "memory.current", "inactive_file"),
        (
            *("4:memory:/job", "/memory/job", "memory.limit_in_bytes"),
            *("memory.usage_in_bytes", "total_inactive_file"),
        ),
    ],
)
def test_limits_of_containers_and_jobs(own, folder, limit, used, cached, files):
    files["/proc/meminfo"] = "MemAvailable:  500 kB\n"
    files["/proc/self/cgroup"] = f"1:cpu:/x\n{own}\n"
    group = f"/sys/fs/cgroup{folder}"
    files |= {f"{group}/{used}": "3000", f"{group}/memory.stat": f"a 1\n{cached} 50\n"}
    files[f"{group}/{limit}"] = "max"
    assert memory.available_bytes(CPU) == 500 * 1024
    files[f"{group}/{limit}"] = "10000"
    assert memory.available_bytes(CPU) == 10000 - 3000 + 50
    files[f"{group}/{used}"] = "20000"
    assert memory.available_bytes(CPU) == 0


def test_memory_of_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 9000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300)
    assert memory.available_bytes(torch.device("cuda:0")) == 1400


def test_this_machine():
    left = memory.available_bytes(CPU)
    assert left > 1 << 20
