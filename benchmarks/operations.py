"""How often a training step of each layer calls PyTorch, on any machine.

    python benchmarks/operations.py
    python benchmarks/operations.py ChimeraConv --names

Small graphs and GPUs wait for these calls. An operation that another one calls is not
counted, and neither is what does not go through PyTorch, such as jitted kernels.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networkx as nx
import torch
from json_files import write_json
from torch.profiler import ProfilerActivity, profile
from torch_geometric.nn import GPSConv

import pyg_chimera.nn as nn

WIDTH, SIDE = 64, 10


def count(layer: torch.nn.Module, num_nodes: int, *inputs: Any) -> Counter[str]:
    """Operations by name, of a forward and a backward pass after the first ones."""
    x = torch.randn(num_nodes, WIDTH, requires_grad=True)

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        out = layer(x, *inputs)
        out.backward(torch.ones_like(out))

    for _ in range(2):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    events = profiler.events() or []
    return Counter(x.name for x in events if _is_operation(x) and not _is_inner(x))


def _is_operation(event: Any) -> bool:
    return event.name.startswith(("aten::", "pyg_chimera::"))


def _is_inner(event: Any) -> bool:
    while (event := event.cpu_parent) is not None:
        if event.name.startswith("aten::"):
            return True
    return False


def cases() -> dict[str, Callable[[], tuple]]:
    """By name, makes a layer, a number of nodes and what else the layer takes."""
    grid = nx.convert_node_labels_to_integers(nx.grid_2d_graph(SIDE, SIDE))
    pairs = torch.tensor([*grid.edges]).t()
    graph = torch.cat([pairs, pairs.flip(0)], 1)
    dag = graph[:, graph[0] < graph[1]]
    path = torch.arange(SIDE**2).unfold(0, 2, 1).t()
    path = torch.cat([path, path.flip(0)], 1)
    sides: list[Any] = [None, None, None, SIDE, SIDE]
    on: dict[str, list[Any]] = {
        "GPSConv": [graph],
        "GatedGCNConv": [graph],
        "ChimeraConv": [graph],
        "ChimeraDAGConv": [dag],
        "ChimeraPathConv": [path],
        "ChimeraGridConv": sides,
        "PLSTMConv": [dag],
        "PLSTMGridConv": sides,
        "GatedDeltaConv": [dag],
        "GraphMambaConv": [graph],
        "RGLRUConv": [dag],
    }

    def make(name: str) -> tuple:
        torch.manual_seed(0)
        if name == "GPSConv":
            return GPSConv(WIDTH, None, heads=4), SIDE**2, *on[name]
        return getattr(nn, name)(WIDTH, WIDTH), SIDE**2, *on[name]

    return {name: lambda name=name: make(name) for name in on}


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    known = cases()
    parser.add_argument("layers", nargs="*", help=f"of {', '.join(known)}")
    parser.add_argument("--names", action="store_true", help="list the operations")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument("--smoke", action="store_true", help="two layers only")
    options = parser.parse_args(args)
    unknown = set(options.layers) - set(known)
    if unknown:
        parser.error(f"unknown layers {sorted(unknown)}; known are {list(known)}")
    found = {}
    for name in options.layers or [*known][: 2 if options.smoke else None]:
        names = count(*known[name]())
        found[name] = names.total()
        print(f"{name:18}{found[name]:5}")
        if options.names:
            for operation, number in names.most_common():
                print(f"{number:10} {operation}")
    if options.out is not None:
        write_json(options.out, {"torch": torch.__version__, "operations": found})


if __name__ == "__main__":
    main()
