"""Overhead before the mixing itself: structure, compiled code, imports."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from timing import show
from workloads import Workload, all_peptides

from pyg_chimera.ops.common import cache as caches
from pyg_chimera.ops.structure import elimination_rank
from pyg_chimera.ops.structure.symbolic_factor import symbolic_factor
from pyg_chimera.transforms import AddEliminationOrder


@contextmanager
def new_graphs() -> Iterator[None]:
    """A context in which no graph is cached."""
    empty = type(caches._CACHE)(caches._CACHE.size)
    with patch.object(caches, "_CACHE", empty):
        yield


def structure_times(workload: Workload, repeats: int) -> dict[str, Any]:
    """Seconds to compute a graph's structure: uncached, with a stored rank, cached."""
    show(f"structure: {workload.name}")
    edge_index, num_nodes = workload.edge_index, workload.num_nodes
    stored = elimination_rank(edge_index, num_nodes)
    times: dict[str, list[float]] = {"cold": [], "with rank": [], "warm": []}
    for _ in range(repeats + 1):
        for name, samples in times.items():
            with nullcontext() if name == "warm" else new_graphs():
                start = time.perf_counter()
                rank = stored if name == "with rank" else None
                tensors = (edge_index, workload.batch, rank)
                factor = caches.remembered(symbolic_factor, tensors, num_nodes)
                samples.append(time.perf_counter() - start)
    row = {"workload": workload.name, "fill": factor.num_entries}
    return row | {name: median(samples[1:]) for name, samples in times.items()}


def dataset_time(root: Path, smoke: bool) -> dict[str, Any]:
    """The time of the transform for a whole data set that is in memory."""
    show("structure of a whole data set")
    name, graphs = all_peptides(root, smoke)
    transform = AddEliminationOrder()
    transform(graphs[0])  # compiles the code, or loads it
    start = time.perf_counter()
    for graph in graphs:
        transform(graph)
    seconds = time.perf_counter() - start
    return {"name": name, "graphs": len(graphs), "seconds": seconds}


FIRST_CALL = """
import json, sys, time
times = [time.perf_counter()]
import torch, torch_geometric.nn
times.append(time.perf_counter())
from pyg_chimera.nn import ChimeraConv
times.append(time.perf_counter())
form, *numbers, device = sys.argv[1:]
channels, heads, states, threads = map(int, numbers)
torch.set_num_threads(threads)
ring = torch.arange(16 * 150).view(16, 150)
edge_index = torch.stack([ring.flatten(), ring.roll(1, 1).flatten()])
edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1).to(device)
conv = ChimeraConv(channels, None, heads, states, form=form).to(device)
x = torch.randn(16 * 150, channels, device=device)
times.append(time.perf_counter())
out = conv(x, edge_index)
if device == "cuda":
    torch.cuda.synchronize()
times.append(time.perf_counter())
out.sum().backward()
if device == "cuda":
    torch.cuda.synchronize()
times.append(time.perf_counter())
a, b, c, d, e, f = times
print(json.dumps({"import torch": b - a, "import": c - b, "forward": e - d,
                  "total": f - d}))
"""


def first_calls(
    sizes: tuple[int, ...], device: str, smoke: bool
) -> list[dict[str, Any]]:
    """Times imports and first calls in fresh processes; the first fills the cache."""
    rows = []
    numbers = map(str, (*sizes, torch.get_num_threads()))
    rest = [*numbers, device]
    for form in ("auto",) if smoke else ("auto", "state", "mask"):
        show(f"first call, form {form}")
        command = [sys.executable, "-c", FIRST_CALL, form, *rest]
        samples = []
        for _ in range(1 if smoke else 4):
            out = subprocess.run(command, capture_output=True, text=True, check=True)
            samples.append(json.loads(out.stdout))
        medians = {key: median(x[key] for x in samples[-3:]) for key in samples[0]}
        rows.append({"form": form} | medians)
    return rows
