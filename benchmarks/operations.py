"""Operations that a training step of each layer asks PyTorch for, on any machine.

    python benchmarks/operations.py                     all layers
    python benchmarks/operations.py --by-part ChimeraConv

Small graphs and GPUs wait for them. What is counted is below autograd, where a linear
layer is two operations forward and three or four backward; a kernel of this library is
one, or none where autograd calls it directly.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import networkx as nx
import torch
from json_files import write_json
from torch.utils._python_dispatch import TorchDispatchMode
from torch_geometric.nn import GPSConv

import pyg_chimera.nn as nn

#: What functions of the package belong to, by a part of their module's name.
PARTS = {
    "_projection": "projection",
    "gated_norm": "gates and norms",
    "edge_softmax": "transition",
    "chimera_transition": "transition",
    "recurrence": "recurrence",
    "common.operator": "recurrence",
    "common.checks": "checks",
    "_inputs": "checks",
}


class Operations(TorchDispatchMode):
    """Counts operations, by the part of the layer that calls them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.found[_part(), str(function)] += 1
        return function(*args, **(kwargs or {}))


def _part() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("pyg_chimera."):
            found = (part for key, part in PARTS.items() if key in name)
            return next(found, "layer")
        frame = frame.f_back
    return "autograd and others"


def count(layer: torch.nn.Module, *inputs: Any) -> tuple[Counter, Counter]:
    """Operations of the second step, forward and backward."""
    x = torch.randn(inputs[0], WIDTH, requires_grad=True)
    # Layers notice such a mode, and would leave out their kernels.
    with patch.object(torch._C, "_len_torch_dispatch_stack", lambda: 0):
        for _ in range(2):
            layer.zero_grad()
            x.grad = None
            with Operations() as forward:
                out = layer(x, *inputs[1:])
            with Operations() as backward:
                out.backward(torch.ones_like(out))
    return forward.found, backward.found


WIDTH, SIDE = 64, 10


def cases() -> dict[str, Callable[[], tuple]]:
    """Layers by name, with a number of nodes and what else they take."""
    grid = nx.convert_node_labels_to_integers(nx.grid_2d_graph(SIDE, SIDE))
    pairs = torch.tensor([*grid.edges]).t()
    graph = torch.cat([pairs, pairs.flip(0)], 1)
    dag = graph[:, graph[0] < graph[1]]
    path = torch.arange(SIDE**2).unfold(0, 2, 1).t()
    path = torch.cat([path, path.flip(0)], 1)
    sides: list[Any] = [None, None, None, SIDE, SIDE]
    on: dict[str, tuple[Any, ...]] = {
        "GPSConv": (graph,),
        "ChimeraConv": (graph,),
        "ChimeraDAGConv": (dag,),
        "ChimeraPathConv": (path,),
        "ChimeraGridConv": (*sides,),
        "PLSTMConv": (dag,),
        "PLSTMGridConv": (*sides,),
        "GatedDeltaConv": (dag,),
        "GraphMambaConv": (graph,),
        "RGLRUConv": (dag,),
        "GatedGCNConv": (graph,),
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
    parser.add_argument("--by-part", action="store_true", help="break counts down")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    options = parser.parse_args(args)
    unknown = set(options.layers) - set(known)
    if unknown:
        parser.error(f"unknown layers {sorted(unknown)}; known are {list(known)}")
    rows = []
    for name in options.layers or known:
        forward, backward = count(*known[name]())
        row = {"forward": forward.total(), "backward": backward.total()}
        print(
            f"{name:18}{row['forward']:5} + {row['backward']:3} = {sum(row.values())}"
        )
        rows.append({"layer": name, **row})
        if options.by_part:
            _show_parts(forward, backward)
    if options.out is not None:
        write_json(options.out, {"torch": torch.__version__, "rows": rows})


def _show_parts(forward: Counter, backward: Counter) -> None:
    for part in sorted({part for part, _ in [*forward, *backward]}):
        each = [
            Counter({f: n for (p, f), n in found.items() if p == part})
            for found in (forward, backward)
        ]
        print(f"  {part:20}{each[0].total():3} + {each[1].total():3}")
        for function, number in (each[0] + each[1]).most_common():
            print(f"    {number:3} {function}")


if __name__ == "__main__":
    main()
