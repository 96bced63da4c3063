"""Layers with their default settings beside what one would use instead.

Forward and backward in float32, with 64 channels and 4 heads unless a row says
otherwise, and Chimera with 16 state channels::

    python benchmarks/layers.py                     # five minutes: all rows
    python benchmarks/layers.py --only "planar, 16,384 nodes"
    python benchmarks/layers.py --device cuda       # two minutes
    python benchmarks/layers.py --smoke

Prints the table of the documentation. Outputs of up to 2,048 nodes are compared with
those of the layers in float64 before anything is timed. On a GPU, our layers are also
timed within `ops.unchecked()`, where the host need not wait for it.
"""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import torch
from options import add_rows, measure_rows
from timing import Timing, interleave, ratio, show, shown, summary
from torch import Tensor
from torch.nn import Module, MultiheadAttention
from torch_geometric.nn import GPSConv
from workloads import Workload, filling, peptides, planar

from pyg_chimera import ops
from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraPathConv,
    GraphMambaConv,
    PLSTMConv,
    PLSTMGridConv,
)

COMPARED = 2048  #: the most nodes whose outputs are compared with float64


class Case(NamedTuple):
    """A module, and how it is called on features and a graph."""

    name: str
    module: Module
    call: Callable[..., Tensor]
    x: Tensor
    graph: tuple[Tensor, ...] = ()

    def to(self, device: str) -> "Case":
        return self._replace(
            module=self.module.to(device),
            x=self.x.to(device),
            graph=tuple(y.to(device) for y in self.graph),
        )

    def __call__(self) -> Tensor:
        return self.call(self.module, self.x, *self.graph)

    @property
    def unchecked(self) -> "Case":
        """The same, where contents of tensors are trusted."""

        def call(*args: Any) -> Tensor:
            with ops.unchecked():
                return self.call(*args)

        return self._replace(name=f"{self.name}, unchecked", call=call)


def chimera(graph: Workload, heads: int = 4, states: int = 16) -> Case:
    module = ChimeraConv(64, 64, heads=heads, state_channels=states)
    return on(graph, "ChimeraConv", module, 64)


def gps(graph: Workload, width: int = 64) -> Case:
    """Attention and a feed-forward network."""
    module = GPSConv(width, None, heads=4, attn_type="multihead")
    return on(graph, "GPSConv", module, width)


def on(graph: Workload, name: str, module: Module, width: int) -> Case:
    call = lambda m, x, index, batch: m(x, index, batch=batch)  # noqa: E731
    x = torch.randn(graph.num_nodes, width)
    return Case(name, module, call, x, (graph.edge_index, graph.batch))


def grids(count: int, side: int) -> list[Case]:
    size = {"height": side, "width": side}
    nodes = torch.randn(count * side * side, 64)
    ours = PLSTMGridConv(64, heads=4)
    attention = MultiheadAttention(64, 4, batch_first=True)
    images = nodes.view(count, side * side, 64)
    return [
        Case("PLSTMGridConv", ours, lambda m, x: m(x, **size), nodes),
        Case(
            "MultiheadAttention",
            attention,
            lambda m, x: m(x, x, x, need_weights=False)[0],
            images,
        ),
    ]


def rows(args: Namespace) -> Iterator[tuple[str, Callable[[], list[Case]]]]:
    """Names of workloads, and functions that make their cases: ours first."""
    smoke = args.smoke

    def both(make: Callable[[], Workload]) -> Callable[[], list[Case]]:
        return lambda: [chimera(graph := make()), gps(graph)]

    def molecules(count: int) -> Workload:
        return next(iter(peptides(args.root, [count], smoke)))

    count, on_gpu = 4 if smoke else 64, args.device == "cuda"
    yield f"{count} peptides", both(lambda: molecules(count))
    if on_gpu:
        yield "512 peptides", both(lambda: molecules(512))
    yield (
        f"{count} peptides, width 96",
        lambda: [
            on(graph := molecules(count), "GraphMambaConv", GraphMambaConv(96), 96),
            gps(graph, 96),
        ],
    )
    yield "16 planar graphs of 300 nodes", both(lambda: planar(*range(292, 308)))
    for nodes in (60,) if smoke else (300, 1024, 2000, 4096, 16_384):
        yield f"planar, {nodes:,} nodes", both(lambda nodes=nodes: planar(nodes))
    for graph in filling(smoke):
        yield graph.name, both(lambda graph=graph: graph)
        if graph.name.startswith("random"):
            yield (
                f"{graph.name}, 2 heads of 96 states",
                lambda graph=graph: [
                    chimera(graph, 2, 96),
                    gps(graph),
                ],
            )
    for side in (4,) if smoke else (12, 24):
        yield f"{count} grids of {side} x {side}", lambda side=side: grids(count, side)
    length = 50 if smoke else 4096
    node = torch.arange(length)
    one_way = torch.stack([node[:-1], node[1:]])
    path = Workload("path", torch.cat([one_way, one_way.flip(0)], 1), 0 * node)
    yield (
        f"an undirected path of {length:,} nodes",
        lambda: [
            on(path, "ChimeraPathConv", ChimeraPathConv(64, 64, heads=4), 64),
            gps(path),
        ],
    )
    if not smoke:
        yield (
            "planar, 114,000 nodes",
            both(lambda: planar(114_000))
            if on_gpu
            else lambda: [chimera(planar(114_000))],
        )
        yield (
            "the same, edges in one direction",
            lambda: [one_way_only(planar(114_000))],
        )


def one_way_only(graph: Workload) -> Case:
    forward = graph.edge_index[0] < graph.edge_index[1]
    dag = Workload(graph.name, graph.edge_index[:, forward], graph.batch)
    return on(dag, "PLSTMConv", PLSTMConv(64, heads=4), 64)


def check(case: Case) -> float:
    """The largest error, relative to the largest output in float64.

    Chimera's longest ranges are a little shorter in float32, by definition, which makes
    for errors of 1e-4.
    """
    module = deepcopy(case.module).eval()  # GraphMambaConv breaks ties at random else
    with torch.no_grad():
        out = case._replace(module=module)()
        exact = case._replace(module=module.double(), x=case.x.double())()
        error = (out - exact).abs().max() / exact.abs().max()
    if not error < 1e-3:
        raise AssertionError(f"{case.name} differs from float64 by {error:.1e}")
    return float(error)


def step(case: Case) -> Callable[[], Timing]:
    x = case.x.requires_grad_()
    synchronize = torch.cuda.synchronize if x.is_cuda else lambda: None

    def run() -> Timing:
        synchronize()
        start = perf_counter()
        out = case()
        synchronize()
        middle = perf_counter()
        out.sum().backward()
        synchronize()
        return Timing(middle - start, perf_counter() - start)

    return run


def fits(case: Case) -> bool:
    """Whether a step fits in the memory of a GPU."""
    try:
        step(case)()
    except torch.OutOfMemoryError:
        fit = False  # the traceback still holds the tensors of the step
    else:
        fit = True
    torch.cuda.empty_cache()
    return fit


def measure(
    name: str, make: Callable[[], list[Case]], args: Namespace
) -> dict[str, Any]:
    show(name)
    cases = [case.to(args.device) for case in make()]
    nodes = cases[0].x.numel() // cases[0].x.size(-1)
    errors = {case.name: check(case) for case in cases if nodes <= COMPARED}
    if args.device == "cuda":
        cases = [cases[0], *filter(fits, cases[1:]), cases[0].unchecked]
    rounds = interleave(
        {case.name: step(case) for case in cases}, args.repeats, args.limit
    )
    ours, *others = [case for case in rounds if not case.endswith("unchecked")]
    return {
        "name": name,
        "nodes": nodes,
        "errors": errors,
        "times": {case: summary(timings) for case, timings in rounds.items()},
        "ratio": ratio(rounds[ours], rounds[others[0]]) if others else None,
    }


def report(results: list[dict[str, Any]]) -> str:
    """The table of the documentation, in Markdown."""
    lines = ["| graphs | ours | instead | ratio |", "| --- | --- | --- | --- |"]
    for row in results:
        texts = {x: shown(y["total"]["median"]) for x, y in row["times"].items()}
        ours, *others = [name for name in texts if not name.endswith("unchecked")]
        cells = [f"`{name}` {texts[name]}" for name in (ours, *others)]
        if f"{ours}, unchecked" in texts:
            cells[0] += f" ({texts[f'{ours}, unchecked']} unchecked)"
        last = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        instead = cells[1] if others else "not tried"
        lines.append(f"| {row['name']} | {cells[0]} | {instead} | {last} |")
    return "\n".join(lines)


def main() -> None:
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    add_rows(parser)
    args = parser.parse_args()
    if args.smoke:
        args.repeats = 1
    torch.manual_seed(0)
    measure_rows(
        "layers", rows(args), partial(measure, args=args), report, args, args.device
    )


if __name__ == "__main__":
    main()
