"""Measures what small models learn: each mixer on graph tasks with known answers.

Information has to travel: from the nearest source, around rings, up trees, along paths,
over weighted edges, through DAGs, across peptides. A layer that is fast and exact but
learns none of it is of no use::

    python benchmarks/learning.py                           # ten minutes on two cores
    python benchmarks/learning.py --only parity --mixers plstm gcn --seeds 3
    python benchmarks/learning.py --resume                  # go on with it
    python benchmarks/learning.py --smoke --overwrite       # only see that it runs

All models have two layers, 32 channels and as many parameters as the others. In each
layer the mixer follows a GatedGCNConv, in the arrangement of the recipe in the docs of
`GraphModel`; `gcn` and `gatedgcn` have a convolution and no mixer. Nothing is tuned,
neither for a task nor for a mixer: layers are as their constructors make them, and all
are trained alike, for equal seconds of processor time on one core. That clock stands
still while others use the core, so that a busy machine changes little.
"""

import os
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from json_files import write_json
from learning_tasks import NOT_ASKED, TASKS, WALK, Task, load
from sklearn.metrics import average_precision_score
from timing import show, table, write_figure
from torch import Tensor
from torch.nn import Module, MultiheadAttention
from torch_geometric.nn import GCNConv
from training import (
    add_results,
    count_parameters,
    fit,
    mlp_channels,
    open_results,
    trained,
)
from workloads import REPOSITORY

from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraDAGConv,
    GatedGCNConv,
    GPSLayer,
    GraphMambaConv,
    GraphModel,
    PLSTMConv,
    RandomWalkEncoder,
)

#: The same for all models and tasks.
SETTINGS = {
    "layers": 2, "channels": 32, "heads": 4, "state_channels": 16,
    "parameters_of_layers": 32_000, "lr": 3e-3, "warm_up": 0.05, "clip": 1.0,
}  # fmt: skip
MIXERS = (
    "chimera", "plstm", "graph-mamba", "attention", "attention-rw", "gcn", "gatedgcn",
)  # fmt: skip

#: Why a mixer can learn a task only in part, where that is known beforehand.
REASONS = {
    "a": "two local layers see two steps",
    "b": "attention knows no distances; returning walks tell the shape around a node",
    "c": "the order by degree leaves alike nodes in random order",
    "d": "transitions are positive: sums along a path never change sign",
}
TRAVEL = ("nearest-source", "path-sum", "weighted-nearest", "reachability", "parity")
LIMITS = {
    **{(mixer, task): "a" for mixer in ("gcn", "gatedgcn") for task in TASKS},
    **{
        (mixer, task): "b" for mixer in ("attention", "attention-rw") for task in TRAVEL
    },
    **{("graph-mamba", task): "c" for task in TRAVEL},
    ("chimera", "parity"): "d",
}

# Models ------------------------------------------------------------------------------


def build_mixer(name: str, task: Task) -> Module | None:
    """A mixer of the settings' size, along the edges of a DAG if directed."""
    channels, heads, states = (
        SETTINGS[key] for key in ("channels", "heads", "state_channels")
    )
    edge_dim = None if task.edge_dim is None else channels
    if name == "chimera":
        kind = ChimeraDAGConv if task.directed else ChimeraConv
        return kind(channels, channels, heads, states, edge_dim=edge_dim)
    if name == "plstm":
        order = None if task.directed else "bfs"
        return PLSTMConv(channels, heads=heads, edge_dim=edge_dim, order=order)
    if name == "graph-mamba":
        return GraphMambaConv(channels, state_channels=states)
    if name in ("attention", "attention-rw"):
        return MultiheadAttention(channels, heads, batch_first=True)
    return None


def build(name: str, task: Task) -> GraphModel:
    """A model whose layers have about the same number of parameters as the others', by
    the hidden size of their feed-forward networks.
    """
    channels = SETTINGS["channels"]

    def layer(mlp_channels: int) -> GPSLayer:
        edge_dim = None if task.edge_dim is None else channels
        conv: Module = GatedGCNConv(channels, channels, edge_dim)
        if name == "gcn":
            conv = GCNConv(channels, channels)
        return GPSLayer(
            channels,
            conv,
            build_mixer(name, task),
            arrangement="sequential",
            norm_first=True,
            mlp_channels=mlp_channels,
        )

    layers = range(SETTINGS["layers"])
    hidden = mlp_channels(
        lambda hidden: sum(count_parameters(layer(hidden)) for _ in layers),
        SETTINGS["parameters_of_layers"],
    )
    encodings = {"random_walk_pe": RandomWalkEncoder(WALK, channels // 4)}
    rank = "topological_rank" if task.directed else "elimination_rank"
    return GraphModel(
        task.in_channels,
        channels,
        task.out_channels,
        lambda _: layer(hidden),
        SETTINGS["layers"],
        edge_dim=None if name == "gcn" else task.edge_dim,
        head="node" if task.distance else "graph",
        norm="graph_batch_norm",
        structure={"rank": rank} if name == "chimera" else None,
        encodings=encodings if name == "attention-rw" else None,
    )


# Training ----------------------------------------------------------------------------


class Run(NamedTuple):
    """One model to train."""

    task: str
    mixer: str
    seed: int
    seconds: float
    smoke: bool


def loss_of(out: Tensor, y: Tensor) -> Tensor:
    """The loss, for classes or for binary labels."""
    if y.is_floating_point():
        return F.binary_cross_entropy_with_logits(out, y)
    return F.cross_entropy(out, y, ignore_index=NOT_ASKED)


def train(run: Run) -> dict[str, Any]:
    """Trains a model and evaluates it on other graphs."""
    task, batches = TASKS[run.task], load(run.task, "train", run.smoke)
    torch.manual_seed(run.seed)
    model = build(run.mixer, task)

    def epoch() -> Iterator[Any]:
        return (batches[i] for i in torch.randperm(len(batches)).tolist())

    done = fit(
        model,
        lambda batch: loss_of(model(**model.inputs(batch)), batch.y),
        batches[0],
        epoch,
        *(SETTINGS["lr"], run.seconds, SETTINGS["warm_up"], SETTINGS["clip"]),
    )
    return {
        "task": run.task,
        "mixer": run.mixer,
        "seed": run.seed,
        "parameters": count_parameters(model),
        **done,
        **evaluate(model, run.task, run.smoke),
    }


def evaluate(model: GraphModel, name: str, smoke: bool) -> dict[str, Any]:
    """Scores on all nodes, on hard ones, and by distance, with numbers of nodes."""
    task, batches = TASKS[name], load(name, "test", smoke)
    model.eval()
    with torch.no_grad():
        out = torch.cat([model(**model.inputs(batch)) for batch in batches])
    y = torch.cat([batch.y for batch in batches])
    if not task.distance:
        return {"score": score(out, y, task.metric)}
    asked = y != NOT_ASKED
    hard = asked & torch.cat([batch.hard for batch in batches])
    distance = torch.cat([batch.distance for batch in batches])

    def among(nodes: Tensor) -> float:
        return score(out[nodes], y[nodes], task.metric)

    found = {"score": among(asked), "hard": among(hard), "by_distance": []}
    for steps in distance[asked].unique().tolist():
        here = asked & (distance == steps)
        found["by_distance"].append([steps, among(here), int(here.sum())])
    return found


def score(out: Tensor, y: Tensor, metric: str) -> float:
    """The score of outputs, by the name of a metric."""
    if metric == "average precision":
        return float(average_precision_score(y.numpy(), out.numpy(), average="macro"))
    right = (out.argmax(1) == y).float()
    if metric == "balanced accuracy":
        return mean(right[y == label].mean().item() for label in y.unique())
    return right.mean().item()


def guess(name: str, smoke: bool) -> dict[str, float]:
    """The score of always giving the most frequent answer."""
    task, batches = TASKS[name], load(name, "test", smoke)
    y = torch.cat([batch.y for batch in batches])
    if not task.distance:
        return {"score": y.mean().item()}
    asked = y != NOT_ASKED
    hard = asked & torch.cat([batch.hard for batch in batches])
    if task.metric == "balanced accuracy":
        return {"score": 1 / task.out_channels, "hard": 1 / task.out_channels}
    return {
        key: (y[here].bincount().max() / here.sum()).item()
        for key, here in (("score", asked), ("hard", hard))
    }


# Results -----------------------------------------------------------------------------


def measure(args: Namespace, results: dict[str, Any]) -> None:
    """Trains the missing models, and writes results after each of them."""
    done = {(row["task"], row["mixer"], row["seed"]) for row in results["runs"]}
    runs = [
        Run(task, mixer, seed, args.seconds, args.smoke)
        for task, mixer, seed in product(args.only, args.mixers, range(args.seeds))
        if (task, mixer, seed) not in done
    ]
    for task in dict.fromkeys(run.task for run in runs):
        show(f"{task}: what guessing gives")
        # First, so that no two processes generate peptides at the same time.
        results["guess"].setdefault(task, guess(task, args.smoke))
    for row in trained(train, runs, args.jobs):
        results["runs"].append(row)
        write_json(args.out, results)


def rows_of(results: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The lines of the table: a task, a key of the score, and a title."""
    measured = {row["task"] for row in results["runs"]}
    for name, task in TASKS.items():
        if name in measured:
            yield name, "score", name
            if task.distance:
                yield name, "hard", f"  {task.hard}"


def values(results: dict[str, Any], task: str, mixer: str, key: str) -> list[float]:
    """The values of a key for all seeds."""
    return [
        row[key]
        for row in results["runs"]
        if (row["task"], row["mixer"]) == (task, mixer) and key in row
    ]


def report(results: dict[str, Any]) -> str:
    """The table, and the reasons that it refers to."""
    mixers = [x for x in MIXERS if any(x == row["mixer"] for row in results["runs"])]
    lines, named = [["", "guessing", *mixers]], set()
    for task, key, title in rows_of(results):
        line = [title, f"{results['guess'][task][key]:.3f}"]
        for mixer in mixers:
            found = values(results, task, mixer, key)
            cell = f"{mean(found):.3f}" if found else "-"
            if len(found) > 1:
                cell += f" ± {stdev(found):.3f}"
            reason = LIMITS.get((mixer, task), " ")
            line.append(f"{cell} {reason}")
            named.add(reason)
        lines.append(line)
    host, settings = results["machine"], results["settings"]
    seeds = 1 + max((row["seed"] for row in results["runs"]), default=0)
    blocks = [
        f"{settings['seconds']:g} s of one core's time for each model, "
        f"seeds: at most {seeds}; {host['cpu']}, torch {host['versions']['torch']}",
        table(lines),
        "\n".join(f"  {key}: {why}" for key, why in REASONS.items() if key in named),
        f"Steps of training\n{table(steps_of(results, mixers))}",
    ]
    return "\n\n".join(filter(None, blocks))


def steps_of(results: dict[str, Any], mixers: list[str]) -> list[list[str]]:
    lines = [["", *mixers]]
    for task in dict.fromkeys(task for task, *_ in rows_of(results)):
        found = [values(results, task, mixer, "steps") for mixer in mixers]
        lines.append([task, *(f"{mean(x):,.0f}" if x else "-" for x in found)])
    return lines


def plot(results: dict[str, Any], path: Path) -> None:
    """Plots scores by distance, one panel per task; bands contain all seeds, and grey
    lines are what guessing gives.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 4, figsize=(17, 7), layout="constrained")
    shown = [name for name, task in TASKS.items() if task.distance]
    panels = dict(zip(shown, axes.flat, strict=False))
    for (task, axis), (i, mixer) in product(panels.items(), enumerate(MIXERS)):
        points: dict[int, list[float]] = {}
        for row in results["runs"]:
            if (row["task"], row["mixer"]) == (task, mixer):
                for distance, value, number in row["by_distance"]:
                    if number >= 30:  # fewer nodes are not significant
                        points.setdefault(distance, []).append(value)
        if points:
            x, found = list(points), list(points.values())
            color = f"C{i}"
            style = {"color": color, "marker": "o^sDvxP*<h"[i], "markersize": 4}
            # The first mixers are drawn on top of the others.
            axis.plot(x, list(map(mean, found)), label=mixer, zorder=9 - i, **style)
            low, high = (list(map(f, found)) for f in (min, max))
            axis.fill_between(x, low, high, color=color, alpha=0.2)
    for task, axis in panels.items():
        if task in results["guess"]:
            axis.axhline(results["guess"][task]["score"], color="grey", ls=":")
        axis.set(title=task, xlabel=TASKS[task].distance, ylabel=TASKS[task].metric)
        axis.set_ylim(0, 1.03)
    handles = {}
    for axis in panels.values():
        lines, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, lines, strict=True))
    axes.flat[-1].axis("off")
    axes.flat[-1].legend(handles.values(), handles, loc="center")
    write_figure(path, figure, dpi=100)


def parse(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--only", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK",
        help=f"of {', '.join(TASKS)} (default: all)")  # fmt: skip
    add("--mixers", nargs="+", choices=MIXERS, default=list(MIXERS), metavar="MIXER",
        help=f"of {', '.join(MIXERS)} (default: all)")  # fmt: skip
    add("--seconds", type=float,
        help="of a core's time for each model (default: 15; --smoke: 0.1)")  # fmt: skip
    add("--seeds", type=int, default=1, metavar="N",
        help="models of a mixer on a task (default: 1)")  # fmt: skip
    add("--jobs", type=int, default=min(2, os.cpu_count() or 1), metavar="N",
        help="models that are trained at a time (default: %(default)s)")  # fmt: skip
    add_results(parser)
    args = parser.parse_args(argv)
    if args.seconds is None:
        args.seconds = 0.1 if args.smoke else 15.0
    if args.out is None:
        args.out = REPOSITORY / "runs" / "learning-cpu.json"
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(1)
    settings = SETTINGS | {"seconds": args.seconds, "smoke": args.smoke}
    results = open_results(args, settings, {"guess": {}, "runs": []})
    try:
        measure(args, results)
    except KeyboardInterrupt:
        raise SystemExit(f"Stopped: --resume goes on with {args.out}") from None
    write_json(args.out, results)
    plot(results, args.out.with_suffix(".png"))
    show("")
    print(report(results))
    print(f"\nWritten: {args.out}, and a plot beside it.")


if __name__ == "__main__":
    main()
