"""Measures on a GPU where one algorithm becomes faster than another::

    python benchmarks/crossovers.py            # a few minutes
    python benchmarks/crossovers.py --smoke    # tiny graphs, on the CPU

`ON_GPUS` in `pyg_chimera/ops/common/coefficients.py` has what was found: nodes of a
block up to which dense matrices are faster than elimination, nodes of a path from which
chunks are faster than states, and entries of factors from which dense matrices are
faster, or elimination fails. Times are forward and backward, medians of repetitions
that take turns; between two sizes, times are taken to be powers of the size.
"""

import math
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import torch
from json_files import write_json
from options import add_output, output
from steps import Step
from timing import interleave, machine, show, table
from torch import Tensor
from torch_geometric.utils import grid

from pyg_chimera import ops
from pyg_chimera.ops.structure.symbolic_factor import symbolic_factor

HEADS, KEYS, CHANNELS = 4, 16, 16
REPEATS, LIMIT = 9, 20.0  #: seconds of a step, in all its repetitions


class Case(NamedTuple):
    """Two algorithms on one graph."""

    name: str  #: the entry of `ON_GPUS`
    size: int  #: in its unit
    function: Callable[..., Tensor]
    edge_index: Tensor
    num_nodes: int
    options: tuple[dict[str, Any], dict[str, Any]]  #: of small sizes, of large ones


def path(number: int, size: int) -> Tensor:
    node = torch.arange(number * size).view(number, size)
    return torch.stack([node[:, :-1].ravel(), node[:, 1:].ravel()])


def both_ways(edges: Tensor) -> Tensor:
    return torch.cat([edges, edges.flip(0)], 1)


def expander(size: int, degree: int) -> Tensor:
    """A graph whose factors fill up."""
    generator = torch.Generator().manual_seed(0)
    node = torch.arange(size).repeat(degree)
    return both_ways(
        torch.stack([node, torch.randint(size, node.shape, generator=generator)])
    )


def cases(smoke: bool, device: str) -> Iterator[Case]:
    """All pairs, by name, and from small to large."""
    dense, sparse = {"solver": "dense"}, {"solver": "sparse", "form": "state"}
    chunk, state = {"form": "chunk"}, {"form": "state"}
    for side in (3, 5) if smoke else (8, 12, 16, 20, 24, 32, 45):
        edges, _ = grid(side, side)
        for_all = (ops.resolvent_mix, edges, side * side, (dense, sparse))
        yield Case("dense: nodes", side * side, *for_all)
    for size in (4, 70) if smoke else (8, 16, 32, 64, 128, 256, 1024):
        number = 2 if smoke else max(1, 8192 // size)
        edges, nodes = path(number, size), number * size
        yield Case("chunk: nodes", size, ops.dag_scan, edges, nodes, (state, chunk))
        pair = (sparse, {**sparse, **chunk})
        both = both_ways(edges)
        yield Case("chunk: nodes", size, ops.resolvent_mix, both, nodes, pair)
        if device == "cuda":  # which has chunks of the delta rule
            yield Case(
                "chunk: nodes", size, ops.delta_scan, edges, nodes, (state, chunk)
            )
    for nodes in (30, 60) if smoke else (2048, 4096, 8192, 16_384):
        edges = expander(nodes, 4)
        entries = symbolic_factor(edges, None, None, nodes).num_entries
        for_all = (ops.resolvent_mix, edges, nodes, (sparse, dense))
        yield Case("elimination: entries", entries, *for_all)


def step(case: Case, options: dict[str, Any], device: str) -> Step:
    """Forward and backward, on weights with which rows of |A| sum to less than one."""
    torch.manual_seed(0)
    nodes, target = case.num_nodes, case.edge_index[1]
    degree = target.bincount(minlength=nodes)[target]
    key = torch.nn.functional.normalize(torch.randn(nodes, HEADS, KEYS), dim=-1)
    leaves = {
        "query": torch.randn(nodes, HEADS, KEYS),
        "key": key,
        "value": torch.randn(nodes, HEADS, CHANNELS),
        "edge_weight": 0.8 / degree[:, None].repeat(1, HEADS),
    }
    if case.function is ops.delta_scan:
        leaves["beta"] = torch.rand(nodes, HEADS)
    leaves = {name: x.to(device).requires_grad_() for name, x in leaves.items()}
    edges = case.edge_index.to(device)

    def run() -> Tensor:
        with ops.unchecked():
            return case.function(**leaves, edge_index=edges, **options)

    return Step(run, leaves, torch.randn(nodes, HEADS, CHANNELS, device=device))


def measure(case: Case, device: str, repeats: int) -> dict[str, Any]:
    """A row of results: the seconds of both, or why there are none."""
    show(f"{case.name}: {case.function.__name__}, {case.size:,}")
    row: dict[str, Any] = {"name": case.name, "size": case.size}
    row["operator"] = case.function.__name__
    steps: dict[Any, Step] = {}
    for which, options in zip(("small", "large"), case.options, strict=True):
        try:
            steps[which] = step(case, options, device)
            steps[which]()
        except (ValueError, RuntimeError) as error:
            row[f"{which} problem"] = str(error)[:200]
            del steps[which]
    for which, times in interleave(steps, repeats, LIMIT).items():
        row[str(which)] = median(x.total for x in times if x is not None)
    return row


def crossover(rows: list[dict[str, Any]]) -> float | None:
    """The size from which on the algorithm for large ones is faster, for good.

    None unless both were measured on both sides of it.
    """
    known = [x for x in rows if "small" in x and "large" in x]
    known = sorted(known, key=lambda x: x["size"])
    logs = [(math.log(x["size"]), math.log(x["large"] / x["small"])) for x in known]
    found = None
    for (a, before), (b, after) in pairwise(logs):
        if before > 0 >= after:
            found = math.exp(a + (b - a) * before / (before - after))
        elif before <= 0 < after:
            found = None
    return found


def report(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The crossovers, by name and operator."""
    keys = dict.fromkeys((x["name"], x["operator"]) for x in rows)
    found = []
    for name, operator in keys:
        of = [x for x in rows if (x["name"], x["operator"]) == (name, operator)]
        found.append({"name": name, "operator": operator, "at": crossover(of)})
    return found


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add_output(parser)
    args: Namespace = parser.parse_args()
    device = "cpu" if args.smoke else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no GPU; --smoke needs none")
    torch.set_num_threads(1)
    name = "smoke" if args.smoke else torch.cuda.get_device_name().lower()
    out = output(args, "crossovers-" + re.sub(r"\W+", "-", name))
    results: dict[str, Any] = {"machine": machine(device), "times": []}
    for case in cases(args.smoke, device):
        results["times"].append(measure(case, device, 1 if args.smoke else REPEATS))
        results["crossovers"] = report(results["times"])
        write_json(out, results)
    show("")
    lines = [["", "operator", "at"]]
    for row in results["crossovers"]:
        at = "not found" if row["at"] is None else f"{row['at']:.3g}"
        lines.append([row["name"], row["operator"], at])
    print(table(lines))
    print(f"\nWritten: {out}")


if __name__ == "__main__":
    main()
