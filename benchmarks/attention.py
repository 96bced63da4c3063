"""Measures `neighborhood_attention` beside PyG's way and dense attention with masks.

Forward and backward, on neighbourhoods of peptides, windows of a path and a grid's
neighbourhoods::

    python benchmarks/attention.py                  # all of it, two minutes
    python benchmarks/attention.py --smoke          # tiny graphs, some seconds

Outputs and all gradients are compared with the float64 loop over nodes first, or for
many nodes with PyG's way in float64: nothing is timed that differs. Ratios are
medians of the ratios within rounds of interleaved repetitions, on one thread. They hold
on a busy machine too; times do not.
"""

import math
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from json_files import write_json
from options import add_output, output
from steps import Step, compare
from timing import interleave, machine, ratio, show, summary, table
from torch import Tensor
from torch_geometric.utils import scatter, softmax
from workloads import PEPTIDES, peptides

from pyg_chimera.ops import k_hop_index, neighborhood_attention

HEADS, CHANNELS = 4, (16, 64)
BASE = "torch"


class Graphs(NamedTuple):
    """A batch of graphs, sorted, and the pairs of nodes that attend."""

    name: str
    pairs: Tensor
    batch: Tensor


def workloads(args: Namespace) -> list[Graphs]:
    size, length, window, side = (2, 40, 5, 5) if args.smoke else (64, 4096, 64, 32)
    (molecules,) = peptides(args.root, [size], args.smoke)
    node, one = torch.arange(length), torch.zeros(length, dtype=torch.long)
    path = torch.stack([node[:-1], node[1:]])
    place = torch.arange(side * side).view(side, side)
    steps = [(place[:, :-1], place[:, 1:]), (place[:-1], place[1:])]
    half = torch.cat([torch.stack([a.flatten(), b.flatten()]) for a, b in steps], 1)
    grid, own = torch.cat([half, half.flip(0)], 1), one.new_zeros(side * side)
    rows = [
        (f"{molecules.name}, k = 4", molecules.edge_index, molecules.batch, 4),
        (f"path of {length:,}, window of {window}", path, one, window),
        (f"grid of {side} x {side}, k = 3", grid, own, 3),
    ]
    return [
        Graphs(name, k_hop_index(edges, len(batch), k).edge_index, batch)
        for name, edges, batch, k in rows
    ]


# Cases -------------------------------------------------------------------------


def by_edges(query: Tensor, key: Tensor, value: Tensor, graphs: Graphs) -> Tensor:
    """Gather, softmax, scatter: like PyG's `TransformerConv`."""
    source, target = graphs.pairs
    logits = (query[target] * key[source]).sum(-1) / math.sqrt(query.size(-1))
    weight = softmax(logits, target, num_nodes=query.size(0))
    return scatter(value[source] * weight.unsqueeze(-1), target, 0, query.size(0))


def dense(graphs: Graphs) -> Callable[..., Tensor]:
    """PyTorch's attention on padded graphs, with a mask that is made once."""
    sizes = graphs.batch.bincount()
    place = torch.arange(len(graphs.batch)) - (sizes.cumsum(0) - sizes)[graphs.batch]
    most, (source, target) = int(sizes.max()), graphs.pairs
    mask = torch.zeros(len(sizes), 1, most, most, dtype=torch.bool)
    mask[graphs.batch[target], 0, place[target], place[source]] = True
    # Rows of padding must attend to something, or they are NaN.
    mask |= torch.eye(most, dtype=torch.bool)

    def run(query: Tensor, key: Tensor, value: Tensor, graphs: Graphs) -> Tensor:
        padded = []
        for x in (query, key, value):
            y = x.new_zeros(len(sizes), most, *x.shape[1:])
            y = y.index_put((graphs.batch, place), x)
            padded.append(y.transpose(1, 2))
        out = F.scaled_dot_product_attention(*padded, mask).transpose(1, 2)
        return out[graphs.batch, place]

    return run


def ours(
    query: Tensor, key: Tensor, value: Tensor, graphs: Graphs, backend: str
) -> Tensor:
    return neighborhood_attention(query, key, value, graphs.pairs, backend=backend)


def cases(graphs: Graphs) -> dict[str, Callable[..., Tensor]]:
    """The functions to measure, by name."""
    mine = {BASE: partial(ours, backend=BASE)}
    return {**mine, "PyG, edge by edge": by_edges, "dense, masked": dense(graphs)}


def step(function: Callable, graphs: Graphs, channels: int, dtype: torch.dtype) -> Step:
    generator = torch.Generator().manual_seed(0)
    query, key, value, grad = (
        torch.randn(len(graphs.batch), HEADS, channels, generator=generator).to(dtype)
        for _ in range(4)
    )
    leaves = {"query": query, "key": key, "value": value}
    for x in leaves.values():
        x.requires_grad_()
    return Step(lambda: function(*leaves.values(), graphs), leaves, grad)


def measure(graphs: Graphs, channels: int, args: Namespace) -> dict[str, Any]:
    """Errors, times and ratios of all cases."""
    show(graphs.name)
    few = len(graphs.batch) < 200
    against = "reference" if few else "edge by edge"
    function = partial(ours, backend="reference") if few else by_edges
    exact = step(function, graphs, channels, torch.float64)
    expected = exact.results()
    steps = {
        name: step(function, graphs, channels, torch.float32)
        for name, function in cases(graphs).items()
    }
    errors = [
        compare(name, graphs.name, x.results(), expected, f"float64 {against}")
        for name, x in steps.items()
    ]
    rounds = interleave(steps, args.repeats, args.limit)
    row: dict[str, Any] = {"name": graphs.name, "channels": channels}
    row |= {"nodes": len(graphs.batch), "pairs": graphs.pairs.size(1)}
    return row | {
        "errors": errors,
        "times": {name: summary(x) for name, x in rounds.items()},
        "ratios": {name: ratio(x, rounds[BASE]) for name, x in rounds.items()},
    }


def report(rows: list[dict[str, Any]]) -> str:
    """A table: our time in milliseconds, and by how much others are slower."""
    others = [name for name in rows[0]["ratios"] if name != BASE]
    lines = [["", "channels", "nodes", "pairs", f"{BASE}: ms", *others]]
    for row in rows:
        line = [row["name"], *(f"{row[x]:,}" for x in ("channels", "nodes", "pairs"))]
        line.append(f"{1e3 * row['times'][BASE]['total']['median']:,.1f}")
        lines.append(line + [f"{row['ratios'][name]:.1f} x" for name in others])
    return table(lines)


def main() -> None:
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=9, help="rounds (default: 9)")
    parser.add_argument("--limit", type=float, default=20, help="seconds of a case")
    parser.add_argument("--root", type=Path, default=PEPTIDES)
    add_output(parser)
    args = parser.parse_args()
    out = output(args, "attention-cpu")
    torch.set_num_threads(1)
    if args.smoke:
        args.repeats = 1
    rows = [
        measure(graphs, channels, args)
        for graphs in workloads(args)
        for channels in CHANNELS[: 1 if args.smoke else None]
    ]
    show("")
    print(report(rows))
    write_json(out, {"machine": machine("cpu"), "attention": rows})
    print(f"\nWritten: {out}")


if __name__ == "__main__":
    main()
