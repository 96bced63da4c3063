"""How often a training step of each layer calls PyTorch, on any machine.

    python benchmarks/operations.py
    python benchmarks/operations.py ChimeraConv --names
    TRITON_INTERPRET=1 python benchmarks/operations.py --launches --names

Small graphs and GPUs wait for these calls. An operation that another one calls is not
counted, and neither is what does not go through PyTorch, such as jitted kernels.

`--launches` counts what a GPU would launch, within `unchecked`: Triton's kernels, and
the operators of PyTorch that compute. A few of these launch more than one kernel.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import networkx as nx
import torch
from json_files import write_json
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch_geometric.nn import GPSConv

import pyg_chimera.nn as nn
from pyg_chimera.ops import unchecked
from pyg_chimera.ops.common import fused, operator, triton_runtime, triton_trial

WIDTH, SIDE = 64, 10


#: Layers with kernels for all that is not PyTorch's, for `--launches`.
ON_GPUS = (
    "ChimeraConv", "ChimeraPathConv", "PLSTMConv", "PLSTMGridConv", "GatedDeltaConv",
    "GraphMambaConv",
)  # fmt: skip


def count(
    layer: torch.nn.Module, num_nodes: int, *inputs: Any, on_gpus: bool = False
) -> Counter[str]:
    """Operations by name, of a forward and a backward pass after the first ones; or
    what they would launch on a GPU.
    """
    x = torch.randn(num_nodes, WIDTH, requires_grad=True)

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        out = layer(x, *inputs)
        out.backward(torch.ones_like(out))

    for _ in range(2):
        step()
    if on_gpus:
        with unchecked():
            for _ in range(2):
                with launches() as found:
                    step()
        return found
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    events = profiler.events() or []
    return Counter(x.name for x in events if _is_operation(x) and not _is_inner(x))


class _Computing(TorchDispatchMode):
    """Counts operators that neither return views nor leave memory as it is."""

    def __init__(self, found: Counter[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name, returns = func.__name__.split(".")[0], func._schema.returns
        views = any(x.alias_info and not x.alias_info.is_write for x in returns)
        computes = not (views or "empty" in name or name == "promote_types")
        if func.namespace == "aten" and computes:
            self.found[name] += 1
        with _disable_current_modes():  # within an operator, there are two
            return func(*args, **(kwargs or {}))


@contextmanager
def launches() -> Iterator[Counter[str]]:
    """Counts what a GPU would launch, by name, while Triton's interpreter runs."""
    from triton.runtime.interpreter import GridExecutor

    found: Counter[str] = Counter()
    run = GridExecutor.__call__

    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        found[f"triton {self.fn.__name__}"] += 1
        with _disable_current_modes():
            return run(self, *args, **kwargs)

    with (
        patch.object(GridExecutor, "__call__", launch),
        as_on_gpus(),
        within_operators(partial(_Computing, found)),
    ):
        yield found


@contextmanager
def as_on_gpus() -> Iterator[None]:
    """What surrounds operators is computed as on a GPU."""
    with (
        patch.object(fused, "_are_ordinary", lambda _, devices: "cuda" in devices),
        patch.object(triton_trial, "by_triton", lambda _: True),
    ):
        yield


@contextmanager
def within_operators(mode: Callable[[], TorchDispatchMode]) -> Iterator[None]:
    """A dispatch mode that also sees what registered operators call."""
    plain = operator._plain

    @contextmanager
    def watched(inputs: Any) -> Iterator[None]:
        with plain(inputs), mode():
            yield

    with patch.object(operator, "_plain", watched), mode():
        yield


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

    def make(name: str, **kwargs: Any) -> tuple:
        torch.manual_seed(0)
        if name == "GPSConv":
            return GPSConv(WIDTH, None, heads=4), SIDE**2, *on[name]
        return getattr(nn, name)(WIDTH, WIDTH, **kwargs), SIDE**2, *on[name]

    return {name: partial(make, name) for name in on}


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    known = cases()
    parser.add_argument("layers", nargs="*", help=f"of {', '.join(known)}")
    parser.add_argument("--names", action="store_true", help="list the operations")
    parser.add_argument("--launches", action="store_true", help="as on a GPU")
    parser.add_argument("--out", type=Path, help="a JSON file to write")
    parser.add_argument("--smoke", action="store_true", help="two layers only")
    options = parser.parse_args(args)
    unknown = set(options.layers) - set(known)
    if unknown:
        parser.error(f"unknown layers {sorted(unknown)}; known are {list(known)}")
    kwargs = {"backend": "triton"} if options.launches else {}
    if options.launches and not triton_runtime.INTERPRETED:
        parser.error("--launches needs TRITON_INTERPRET=1 in the environment")
    found = {}
    layers = ON_GPUS if options.launches else [*known][: 2 if options.smoke else None]
    for name in options.layers or layers:
        names = count(*known[name](**kwargs), on_gpus=options.launches)
        found[name] = names.total()
        print(f"{name:18}{found[name]:5}")
        if options.names:
            for operation, number in names.most_common():
                print(f"{number:10} {operation}")
    if options.out is not None:
        write_json(options.out, {"torch": torch.__version__, "operations": found})


if __name__ == "__main__":
    main()
