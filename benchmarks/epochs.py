"""Profiles epochs of training: what takes the time of a step, by kind of operation.

The usual models with each mixer, on batches of Peptides-func, on the road network of
Pasadena, and on MNIST in patches; without these files, on generated peptides and on
grids::

    python benchmarks/epochs.py                     # five minutes
    python benchmarks/epochs.py --only mnist --mixers chimera attention
    python benchmarks/epochs.py --smoke

Steps are measured without the profiler first, by processor time, on one thread. What
the profiler then finds in operators counts as their kind, a backward pass as that of
its forward pass; the rest of a step is Python, dispatch and autograd. Prints the table
of the documentation, with the ratio of steps under autocast to bfloat16.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from json_files import write_json
from options import add_output, output
from timing import machine, new_graphs, show
from torch import Tensor
from torch.autograd import DeviceType
from torch.nn import Module, MultiheadAttention
from torch.profiler import ProfilerActivity, profile, record_function
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.utils import grid
from workloads import DATA, SHARED

from pyg_chimera.datasets import (
    ATOM_FEATURE_SIZES,
    BOND_FEATURE_SIZES,
    CityRoads,
    GeneratedPeptides,
    PeptidesFunctional,
)
from pyg_chimera.nn import (
    ChimeraConv,
    GatedDeltaConv,
    GatedGCNConv,
    GPSLayer,
    GraphMambaConv,
    GraphModel,
    ImageClassifier,
    PLSTMConv,
)
from pyg_chimera.ops.common.cache import Recipe
from pyg_chimera.transforms import AddEliminationOrder, ImageToGraph

CHANNELS, HEADS, STATES, LAYERS, BATCH = 64, 4, 16, 3, 64
EDGES = {"edge_dim": CHANNELS}
MIXERS: dict[str, Callable[[], Module]] = {
    "chimera": lambda: ChimeraConv(CHANNELS, None, HEADS, STATES, **EDGES),
    "plstm": lambda: PLSTMConv(CHANNELS, None, HEADS, order="bfs", **EDGES),
    "graph_mamba": lambda: GraphMambaConv(CHANNELS),
    "gated_delta": lambda: GatedDeltaConv(CHANNELS, None, HEADS, STATES, **EDGES),
    "attention": lambda: MultiheadAttention(CHANNELS, HEADS, batch_first=True),
}


# Models and data ---------------------------------------------------------------------


class Task(NamedTuple):
    """What is trained: all graphs of an epoch, a model by its mixer, and the loss."""

    graphs: Any
    model: Callable[[str], Module]
    loss: Callable[[Tensor, Batch], Tensor]


def graph_model(sizes: tuple, mixer: str, **options: Any) -> GraphModel:
    """Layers as in `examples/lrgb.py` and `examples/city_roads.py`."""

    def layer(_: int) -> GPSLayer:
        conv, mix = GatedGCNConv(CHANNELS, CHANNELS, edge_dim=CHANNELS), MIXERS[mixer]()
        return GPSLayer(CHANNELS, conv, mix, dropout=0.1, norm_first=True)

    structure = {"rank": "elimination_rank"} if mixer == "chimera" else None
    inputs, classes = sizes
    return GraphModel(
        inputs, CHANNELS, classes, layer, LAYERS, structure=structure,
        norm="graph_batch_norm", **options,
    )  # fmt: skip


def peptides(root: Path, smoke: bool) -> Task:
    order = AddEliminationOrder()
    root = root / "peptides-functional"
    if smoke or not PeptidesFunctional.holds_raw_files(str(root)):
        size, count = ("small", 20) if smoke else ("full", 1000)
        graphs, classes = GeneratedPeptides(
            str(DATA / "ordered"), preset=size, num_graphs=count, pre_transform=order,
            log=False,
        ), 6  # fmt: skip
    else:
        place = str(DATA / "peptides-functional-ordered")
        graphs, classes = PeptidesFunctional(
            str(root), "train", processed_root=place, pre_transform=order
        ), 10  # fmt: skip
    return Task(
        graphs,
        partial(
            graph_model, (ATOM_FEATURE_SIZES, classes),
            edge_dim=BOND_FEATURE_SIZES, head="graph",
        ),
        lambda out, batch: F.binary_cross_entropy_with_logits(out, batch.y),
    )  # fmt: skip


def pasadena(root: Path, smoke: bool) -> Task:
    if smoke or not (root / "city-networks").exists():
        edges, pos = grid(*((8, 8) if smoke else (110, 110)))
        size = pos.size(0)
        graph = Data(torch.randn(size, 37), edges, torch.randn(edges.size(1), 25))
        graph.y, graph.mask = torch.zeros(size).long(), torch.ones(size).bool()
    else:
        raw = DATA / "city-networks" / "raw"  # processed files lie beside it
        raw.parent.mkdir(parents=True, exist_ok=True)
        raw.unlink(missing_ok=True)  # may lead to another root
        raw.symlink_to((root / "city-networks").resolve())
        data = CityRoads(str(raw.parent), "pasadena", (0.6, 0.2))[0]
        graph = Data(data.x, data.edge_index, data.edge_attr, data.y)
        graph.mask = data.train_mask
    return Task(
        [AddEliminationOrder()(graph)],
        partial(graph_model, (37, 10), edge_dim=25, head="node"),
        lambda out, batch: F.cross_entropy(out[batch.mask], batch.y[batch.mask]),
    )


def mnist(root: Path, smoke: bool) -> Task:
    path, to_graph = root / "images" / "mnist.npz", ImageToGraph(patch_size=4)
    images, labels = np.random.default_rng(0).random((24, 28, 28)), np.zeros(24)
    if path.exists() and not smoke:
        raw = np.load(path)
        images, labels = raw["x_train"][:12_000] / 255, raw["y_train"]
    graphs = [to_graph(image.astype(np.float32)) for image in images]
    for graph, label in zip(graphs, labels, strict=False):
        graph.y = torch.tensor([int(label)])

    def model(mixer: str) -> ImageClassifier:
        made: Any = mixer
        if mixer == "gated_delta":
            made = lambda _: GatedDeltaConv(CHANNELS, None, HEADS, STATES)  # noqa: E731
        return ImageClassifier(16, CHANNELS, 10, LAYERS, made, HEADS, dropout=0.1)

    return Task(graphs, model, lambda out, batch: F.cross_entropy(out, batch.y))


TASKS = {"peptides": peptides, "pasadena": pasadena, "mnist": mnist}


# Kinds of operations -----------------------------------------------------------------

#: The kinds, and the names of operators and ranges of each, in parts.
KINDS: dict[str, tuple[str, ...]] = {
    "loader": ("enumerate(DataLoader)", "loader"),
    "structure": ("structure",),
    "kernels": ("pyg_chimera::", "edge_softmax", "scaled_dot_product"),
    "their backward": (),
    "products": ("mm", "linear", "matmul", "einsum", "projections"),
    "norms": ("norms", "_norm", "gated_inputs"),
    "elementwise": (),
    "dropout": ("dropout",),
    "indexing": ("index", "scatter", "gather", "embedding", "sort", "unique", "nonzero",
                 "bincount", "where", "repeat_interleave"),
    "optimizer": ("optimizer", "Optimizer"),
}  # fmt: skip
NODE = "autograd::engine::evaluate_function: "


def kind_of(name: str) -> str | None:
    """The kind of an operator or a range, unless it is Python's."""
    for kind, parts in KINDS.items():
        if any(part in name for part in parts):
            return kind
    return "elementwise" if name.startswith("aten::") else None


def times_by_kind(events: Iterable[Any]) -> dict[str, float]:
    """Seconds in operators. What is within another operator is of its kind, and a
    backward pass of that of the operator which was the last to begin before its node.
    """
    times = dict.fromkeys(KINDS, 0.0)
    found: dict[int, str | None] = {}
    forward: dict[int, str | None] = {}
    cpu = (x for x in events if x.device_type == DeviceType.CPU)
    for event in sorted(cpu, key=lambda x: (x.time_range.start, -x.time_range.end)):
        parent, own = event.cpu_parent, kind_of(event.name)
        above = found.get(id(parent))
        if event.name.startswith(NODE):
            kind = forward.get(event.sequence_nr)
            found[id(event)] = "their backward" if kind == "kernels" else kind
            continue  # its own time is autograd's
        within = above is not None and own not in ("structure", "optimizer")
        kind = found[id(event)] = above if within else own
        if event.sequence_nr >= 0 and not (parent and parent.name.startswith(NODE)):
            forward[event.sequence_nr] = kind
        if kind is not None:
            times[kind] += event.self_cpu_time_total / 1e6
    return times


# Measurement -------------------------------------------------------------------------


def ranged(name: str, function: Callable) -> Callable:
    """The function, as one range in profiles."""

    def within(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return function(*args, **kwargs)

    return within


class Training:
    """A model's steps, batch after batch and epoch after epoch."""

    def __init__(self, task: Task, mixer: str, half: bool = False) -> None:
        torch.manual_seed(0)
        self.model, self.loss, self.half = task.model(mixer), task.loss, half
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        order = torch.Generator().manual_seed(0)
        self.loader = DataLoader(task.graphs, BATCH, shuffle=True, generator=order)
        self.batches = self.endless()

    def endless(self) -> Iterator[Batch]:
        """The batches of all epochs."""
        while True:
            yield from self.loader

    def step(self) -> float:
        """The processor time of a step."""
        start = time.process_time()
        batch = next(self.batches)
        with record_function("loader"):
            inputs = self.model.inputs(batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            loss = self.loss(self.model(**inputs), batch)
        self.optimizer.zero_grad()
        loss.backward()
        with record_function("optimizer"):
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
        return time.process_time() - start


def shares(training: Training, seconds: float) -> tuple[dict[str, float], float]:
    """The part of each kind of operation in the time of steps, and such a step."""
    build = ranged("structure", Recipe.build)
    for module in training.model.modules():
        for part, kind in (("Norm", "norms"), ("Dropout", "dropout")):
            if part in type(module).__name__:
                module.forward = ranged(kind, module.forward)
    trace, steps = profile(activities=[ProfilerActivity.CPU]), [0.0]
    with patch.object(Recipe, "build", build), trace:
        start = time.perf_counter()
        while len(steps) < 2 or sum(steps[1:]) < seconds:
            steps.append(training.step())
        wall = time.perf_counter() - start  # the clock of events
    found = {kind: x / wall for kind, x in times_by_kind(trace.events()).items()}
    return found | {"rest": 1 - sum(found.values())}, median(steps[1:])


def measure(task: Task, mixer: str, seconds: float) -> dict[str, Any]:
    """The seconds of a step, the shares in it, and a step in bfloat16, relative to it.

    Steps of both are of the same batches.
    """
    training, half = (Training(task, mixer, x) for x in (False, True))
    pairs: list[tuple[float, float]] = []
    while len(pairs) < 3 or sum(map(sum, pairs[1:])) < seconds:
        with new_graphs():
            whole = training.step()
        with new_graphs():
            pairs.append((whole, half.step()))
    step = median(x for x, _ in pairs[1:])  # the first loads compiled code
    found, profiled = shares(training, seconds / 3)
    return {
        "step": step,
        "epoch": step * len(training.loader),
        "steps": len(pairs) - 1,
        "profiled": profiled,
        "shares": found,
        "bfloat16": median(y / x for x, y in pairs[1:]),
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table of shares, in per cent."""
    head = ["", "mixer", "step, ms", "epoch, s", *KINDS, "rest", "bfloat16"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        cells = [row["task"], row["mixer"], f"{1e3 * row['step']:.0f}"]
        cells += [f"{row['epoch']:.1f}"]
        cells += [f"{100 * x:.0f}" for x in row["shares"].values()]
        lines.append([*cells, f"{row['bfloat16']:.2f}"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parse(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--root", type=Path, default=SHARED / "data", help="of the raw data")
    add("--only", nargs="+", choices=list(TASKS), default=list(TASKS))
    add("--mixers", nargs="+", choices=list(MIXERS), default=list(MIXERS))
    add("--seconds", type=float, default=7, help="for each model (default: 7)")
    add_output(parser)
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    out = output(args, "epochs-cpu")
    torch.set_num_threads(1)
    seconds, rows = 0.0 if args.smoke else args.seconds, []
    for name in args.only:
        task = TASKS[name](args.root, args.smoke)
        for mixer in args.mixers:
            if (name, mixer) == ("pasadena", "gated_delta"):
                continue  # matrices of all pairs of nodes: gigabytes, and minutes
            show(f"{name}, {mixer}")
            row = measure(task, mixer, seconds)
            rows.append({"task": name, "mixer": mixer, **row})
    write_json(out, {"machine": machine("cpu"), "epochs": rows})
    show("")
    print(f"{markdown(rows)}\n\nWritten: {out}")


if __name__ == "__main__":
    main()
