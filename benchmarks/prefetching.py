"""Measures what a training step waits for if graphs' structure is not loaded with them.

What a layer makes of the structure of a batch that is new to it, if line graphs or
elimination orders are found in the step, and if a transform has stored them, in the
workers of a loader; and what the transform takes there::

    python benchmarks/prefetching.py                # a minute
    python benchmarks/prefetching.py --smoke

Times are of the processor (``time.process_time``), of one thread: what other processes
take does not count. Tables for a GPU, which are made of the structure, are not in them.
Outputs are compared first.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from json_files import write_json
from options import add_output, output
from timing import machine, new_graphs, show, table
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import BaseTransform
from workloads import PEPTIDES, Workload, peptides

from pyg_chimera.nn import ChimeraConv, PLSTMConv
from pyg_chimera.ops.common.cache import Recipe
from pyg_chimera.transforms import (
    AddEliminationOrder,
    DirectedLineGraph,
    MultitreePruning,
)

CHANNELS, HEADS = 64, 4


class Case(NamedTuple):
    """A layer, what is stored for it, and how to pass that to it."""

    conv: torch.nn.Module
    transform: BaseTransform
    stored: Callable[[Batch], dict[str, Any]]
    acyclic: bool = False


def cases() -> dict[str, Case]:
    torch.manual_seed(0)
    return {
        "ChimeraConv": Case(
            ChimeraConv(CHANNELS, CHANNELS, HEADS, 16),
            AddEliminationOrder(),
            lambda batch: {"rank": batch.elimination_rank},
        ),
        "PLSTMConv": Case(
            PLSTMConv(CHANNELS, CHANNELS, heads=HEADS),
            DirectedLineGraph(),
            lambda batch: {"line_edge_index": batch.line_edge_index},
            acyclic=True,
        ),
        "PLSTMConv, mode D": Case(
            PLSTMConv(CHANNELS, CHANNELS, heads=HEADS, mode="D"),
            MultitreePruning(),
            lambda batch: {"line_edge_index": batch.line_edge_index_pruned},
            acyclic=True,
        ),
    }


def graphs_of(workload: Workload, acyclic: bool) -> list[Data]:
    """The graphs of a batch, as DAGs if `acyclic`."""
    graphs, first = [], 0
    for size in workload.batch.bincount().tolist():
        col, row = workload.edge_index
        inside = (col >= first) & (col < first + size)
        if acyclic:
            inside &= col < row
        edges = (workload.edge_index[:, inside] - first).contiguous()
        graphs.append(Data(edge_index=edges, num_nodes=size))
        first += size
    return graphs


@contextmanager
def time_of_structure() -> Iterator[list[float]]:
    """The seconds it takes to make structures, one entry for each time."""
    times: list[float] = []
    build, depth = Recipe.build, 0

    def timed(recipe: Recipe) -> Any:
        nonlocal depth
        start, depth = time.process_time(), depth + 1
        try:
            return build(recipe)
        finally:
            depth -= 1
            if depth == 0:  # structures within structures count once
                times.append(time.process_time() - start)

    with new_graphs(), patch.object(Recipe, "build", timed):
        yield times


def measure(name: str, case: Case, workload: Workload, repeats: int) -> dict[str, Any]:
    """The seconds that a step spends on structure, and those of the transform."""
    show(name)
    graphs = graphs_of(workload, case.acyclic)
    batch = Batch.from_data_list([case.transform(graph) for graph in graphs])
    x = torch.randn(batch.num_nodes, CHANNELS)
    ways = {"in the step": {}, "by workers": case.stored(batch)}
    times: dict[str, list[float]] = {way: [] for way in (*ways, "transform")}
    outs = {}
    for _ in range(repeats + 1):  # the first one loads compiled code
        for way, options in ways.items():
            with time_of_structure() as parts:
                outs[way] = case.conv(x, batch.edge_index, batch=batch.batch, **options)
            times[way].append(sum(parts))
        start = time.process_time()
        with new_graphs():
            for graph in graphs:
                case.transform(graph)
        times["transform"].append(time.process_time() - start)
    if not torch.allclose(*outs.values(), rtol=1e-4, atol=1e-5):
        raise SystemExit(f"{name}: not what it gives without the transform")
    found = {way: median(samples[1:]) for way, samples in times.items()}
    return {"layer": name, "batch": workload.name, "nodes": batch.num_nodes} | found


def parse(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=PEPTIDES, help="of Peptides-func")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=7)
    add_output(parser)
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    out = output(args, "prefetching-cpu")
    torch.set_num_threads(1)
    size, repeats = (2, 1) if args.smoke else (args.batch_size, args.repeats)
    (workload,) = peptides(args.root, [size], args.smoke)
    rows = [measure(name, x, workload, repeats) for name, x in cases().items()]
    write_json(out, {"machine": machine("cpu"), "layers": rows})
    columns = ("in the step", "by workers", "transform")
    lines = [("ms", *columns)]
    for row in rows:
        lines.append((row["layer"], *(f"{1e3 * row[x]:.1f}" for x in columns)))
    show("")
    print(table(lines))
    print(f"\nWritten: {out}")


if __name__ == "__main__":
    main()
