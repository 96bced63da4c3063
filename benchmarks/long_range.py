"""Measures what models learn on long-range tasks: our mixers and what else one picks.

Road networks, distances of up to 40 hops, energies of long-range spins, power flow on
unseen grids, sentences as trees, and images as superpixels::

    python benchmarks/long_range.py --only sssp --arms chimera gps --seconds 60
    python benchmarks/long_range.py --workers 2 --seeds 3   # everything: days
    python benchmarks/long_range.py --resume                # go on with it
    python benchmarks/long_range.py --report                # table and plots again
    python benchmarks/long_range.py --smoke --overwrite     # only see that it runs

All models of a task have about as many parameters in their layers, by the hidden size
of the feed-forward networks; where this would fall below half the width, as in deep
models, layers are narrower. Ours, and GPS and Exphormer, have three layers (or eight:
`chimera-8`): a local convolution, the mixer and a feed-forward network, in the
arrangement of the recipe in the docs of `GraphModel`. GCN, SAGE and GatedGCN of three
and more layers have no mixer. Where targets are amplitudes, our blocks have neither
local convolutions nor norms; `gatedgcn-10-plain` and `gps-plain` have no norms either.

All are trained alike, for equal seconds of processor time on one core. The learning
rate is chosen from a list by validation, in runs of a fifth of the time. In a run, the
model of the best of ten validations, which take none of its time, is tested.
"""

import json
import re
import time
import warnings
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Iterable
from itertools import product
from math import isfinite, nan
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import torch
from json_files import write_json
from long_range_tasks import (
    OPTIONS,
    PUBLISHED,
    SPLITS,
    TASKS,
    WALK,
    Source,
    Task,
    items,
    load,
    loss_of,
    measure,
    score,
)
from timing import out_of_memory, show, write_figure
from torch.nn import Module
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, SAGEConv, TransformerConv
from training import (
    add_results,
    count_parameters,
    fit,
    mlp_channels,
    open_results,
    trained,
)
from workloads import DATA, REPOSITORY, SHARED

from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraDAGConv,
    GatedDeltaConv,
    GatedGCNConv,
    GPSLayer,
    GraphMambaConv,
    GraphModel,
    LaplacianEncoder,
    PLSTMConv,
    RandomWalkEncoder,
    SelfAttention,
)
from pyg_chimera.ops import warn_above

#: The same for all models and tasks.
SETTINGS = {
    "heads": 4, "state_channels": 16, "warm_up": 0.05, "clip": 1.0, "search": 0.2,
    "validations": 10,
}  # fmt: skip
#: An extra test set is tested graph by graph, until this many seconds have passed.
EXTRA_SECONDS = 120.0
#: The longest that one call of a layer may take, as far as layers predict it.
CALL_SECONDS = 60.0
OURS = ("chimera", "chimera-8", "plstm", "graph-mamba", "gated-delta")
#: Layers, three for others. In eight layers of Chimera, heads have fewer states.
DEEP = {
    "chimera-8": 8, "sage-3": 3, "sage-16": 16, "gcn-3": 3, "gcn-16": 16,
    "gatedgcn-3": 3, "gatedgcn-10": 10,
}  # fmt: skip
OTHERS = (
    *(x for x in DEEP if x not in OURS),
    *("gps", "gps-lap", "gps-rw", "exphormer"),
    *("gatedgcn-10-plain", "gps-plain"),  # without norms
)
ARMS = (*OURS, *OTHERS)


# Models ------------------------------------------------------------------------------


def need_of(arm: str, task: Task) -> str | None:
    """The structure that a model reads beside the graph."""
    if arm.startswith("chimera"):
        return "topological" if task.directed else "elimination"
    named = {"gps-lap": "laplacian", "gps-rw": "walk", "exphormer": "expander"}
    return named.get(arm)


def reads_edges(arm: str, task: Task) -> bool:
    """Whether a model has a part for the task's edge features."""
    if task.edge_dim is None or arm.startswith(("sage", "gcn")):
        return False
    return arm != "graph-mamba" or task.local == "gatedgcn"


def options_of(name: str, arm: str) -> dict[str, Any]:
    """Arguments of a mixer's constructor for a task, whatever the number of layers."""
    return OPTIONS.get(name, {}).get(arm.removesuffix("-8"), {})


def build_mixer(arm: str, name: str, channels: int) -> Module | None:
    """A mixer, along the edges of a DAG if directed."""
    task, heads = TASKS[name], SETTINGS["heads"]
    edge_dim = None if task.edge_dim is None else channels
    states = {"state_channels": SETTINGS["state_channels"]}
    if arm == "chimera-8":
        states = {"state_channels": 4}
    options: dict[str, Any] = {"heads": heads, "edge_dim": edge_dim} | states
    if arm == "plstm":
        order = None if task.directed else "bfs"
        options = {"heads": heads, "edge_dim": edge_dim, "order": order}
    elif arm == "graph-mamba":
        options = states
    options = options | options_of(name, arm)
    match arm:
        case "chimera" | "chimera-8":
            kind = ChimeraDAGConv if task.directed else ChimeraConv
            return kind(channels, channels, **options)
        case "plstm":
            return PLSTMConv(channels, **options)
        case "graph-mamba":
            return GraphMambaConv(channels, **options)
        case "gated-delta":
            return GatedDeltaConv(channels, acyclic=task.directed, **options)
        case "gps" | "gps-lap" | "gps-rw":
            return SelfAttention(channels, heads)
        case "exphormer":
            return TransformerConv(channels, channels // heads, heads)
    return None


def build(arm: str, name: str) -> GraphModel:
    """A model whose layers have about the task's number of parameters."""
    task = TASKS[name]
    norm = None if arm.endswith("-plain") else task.norm
    arm = arm.removesuffix("-plain")
    edges = task.edge_dim if reads_edges(arm, task) else None
    depth, channels = DEEP.get(arm, 3), task.channels + 8
    kind = arm.split("-")[0]
    if arm in OURS:
        kind, norm = ("none", None) if task.plain else (task.local, norm)

    def layer(hidden: int) -> GPSLayer:
        conv: Module | None = None
        if kind in ("gatedgcn", "gps", "exphormer"):
            edge_dim = None if edges is None else channels
            conv = GatedGCNConv(channels, channels, edge_dim, norm=norm)
        elif kind == "gcn":
            conv = GCNConv(channels, channels)
        elif kind == "sage":
            conv = SAGEConv(channels, channels, aggr=task.aggr)
        return GPSLayer(
            channels,
            conv,
            build_mixer(arm, name, channels),
            dropout=task.dropout,
            norm=norm,
            norm_first=True,
            mlp_channels=hidden,
        )

    hidden = 0
    while hidden < channels // 2:
        channels -= 8
        hidden = mlp_channels(
            lambda hidden: depth * count_parameters(layer(hidden)), task.parameters
        )
    encodings: dict[str, Module] = {}
    if arm == "gps-lap":
        encodings["laplacian_pe"] = LaplacianEncoder(channels // 4)
    if arm == "gps-rw":
        encodings["random_walk_pe"] = RandomWalkEncoder(WALK, channels // 4)
    structure = {
        "elimination": {"rank": "elimination_rank"},
        "topological": {"rank": "topological_rank"},
        "expander": {"mixer_edge_index": "expander_index"},
    }
    return GraphModel(
        task.in_channels,
        channels,
        task.out_channels,
        lambda index: layer(hidden),
        depth,
        edge_dim=edges,
        head="graph" if task.graph else "node",
        pool=task.pool,
        norm=norm,
        dropout=task.dropout,
        structure=structure.get(need_of(arm, task) or ""),
        encodings=encodings or None,
    )


# Training ----------------------------------------------------------------------------


class Run(NamedTuple):
    """One model to train."""

    task: str
    arm: str
    seed: int
    lr: float
    seconds: float
    search: bool  #: whether only to validate
    source: Source
    memory: float


def train(run: Run) -> dict[str, Any]:
    """Trains and tests a model; the row has a `problem` instead if it can't be done."""
    row = {"task": run.task, "arm": run.arm, "seed": run.seed, "lr": run.lr}
    row["settings"] = settings_of(run.task, run.arm)
    try:
        with warnings.catch_warnings():
            # Layers predict how long a call takes. What takes too long is not tried.
            warnings.filterwarnings("error", message=r"[\s\S]*This call takes long")
            warn_above(CALL_SECONDS)
            return row | _train(run)
    except REFUSALS as error:
        return row | {"problem": why(error, run)}


#: What layers raise for graphs that they refuse, and PyTorch without memory.
REFUSALS = (RuntimeError, ValueError, MemoryError, NotImplementedError, UserWarning)


def why(error: Exception, run: Run) -> str:
    if isinstance(error, UserWarning):
        cost = re.search(r"([\d.e+]+) s, ([\d.e+]+) MiB", str(error))
        what = f"{float(cost[1]):,.0f} s and {float(cost[2]) / 1024:,.0f} GiB"
        return f"one call is predicted to take {what}"
    if out_of_memory(error):
        return f"does not fit in {run.memory:g} GiB"
    return (str(error) or repr(error)).splitlines()[0][:200]


def settings_of(name: str, arm: str) -> dict[str, Any]:
    """What was the same for all models of a task, and the options of this one."""
    left_out = ("load", "extra", "raw", "unit", "seconds", "rates")
    task = {k: v for k, v in TASKS[name]._asdict().items() if k not in left_out}
    settings = task | {"options": options_of(name, arm)}
    return json.loads(json.dumps(settings))  # as it will be read again


def _train(run: Run) -> dict[str, Any]:
    task = TASKS[run.task]
    torch.manual_seed(run.seed)
    model = build(run.arm, run.task)
    need = need_of(run.arm, task)

    def graphs(split: str) -> list[Data]:
        return load(run.task, split, need, run.source)

    data, val = graphs("train"), in_batches(graphs("val"), task.batch)
    loader: Iterable[Batch] = DataLoader(data, task.batch, shuffle=True)
    if len(data) == 1:  # the same tensors in each step, whose structure is known
        loader = in_batches(data, 1)
    curve: list[list[float]] = []
    best: dict[str, Any] = {}

    def validate(steps: int, seconds: float) -> None:
        value = score(evaluate(model, run.task, val))
        curve.append([round(seconds, 3), value])
        if isfinite(value) and task.better * (value - best.get("score", nan)) <= 0:
            return
        if isfinite(value):
            state = {key: x.clone() for key, x in model.state_dict().items()}
            best.update(score=value, steps=steps, state=state)

    done = fit(
        model,
        lambda batch: loss_of(task, model(**model.inputs(batch)), batch),
        next(iter(loader)),
        lambda: loader,
        *(run.lr, run.seconds, SETTINGS["warm_up"], SETTINGS["clip"]),
        pauses=3 if run.search else SETTINGS["validations"],
        pause=validate,
    )
    row = {"parameters": count_parameters(model), "seconds": run.seconds, **done}
    row["curve"] = curve
    if not best or not isfinite(done["loss"]):
        return row | {"problem": "diverged"}
    row |= {"validation": best["score"], "best_step": best["steps"]}
    if run.search:
        return row
    model.load_state_dict(best["state"])
    test = in_batches(graphs("test"), task.batch)
    row["test"] = evaluate(model, run.task, test)
    sets = task.extra[:1] if run.source.smoke else task.extra
    row["extra"] = {name: extra(model, run, name, need) for name in sets}
    return row


def in_batches(graphs: list[Data], size: int) -> list[Batch]:
    starts = range(0, len(graphs), size)
    return [Batch.from_data_list(graphs[i : i + size]) for i in starts]


@torch.no_grad()
def evaluate(model: GraphModel, task: str, batches: list[Batch]) -> dict[str, Any]:
    model.eval()
    found = [items(task, model(**model.inputs(batch)), batch) for batch in batches]
    return measure(task, found)


@torch.no_grad()
def extra(model: GraphModel, run: Run, name: str, need: str | None) -> dict[str, Any]:
    """The score on graphs of another size, as far as time and memory allow."""
    model.eval()
    warn_above(CALL_SECONDS)  # again
    found, nodes, start = [], 0, time.process_time()
    try:
        graphs = load(run.task, name, need, run.source)
        nodes = max(data.num_nodes for data in graphs)
        for data in graphs:
            batch = Batch.from_data_list([data])
            found.append(items(run.task, model(**model.inputs(batch)), batch))
            if time.process_time() - start > EXTRA_SECONDS:
                break
    except REFUSALS as error:
        return {"nodes": nodes, "problem": why(error, run)}
    means = measure(run.task, found)
    return {"nodes": nodes, "graphs": len(found), "score": score(means), **means}


# Results -----------------------------------------------------------------------------


def run_task(args: Namespace, results: dict[str, Any], name: str) -> None:
    """Chooses learning rates, then trains what is missing."""
    task, source = TASKS[name], Source(args.data, args.cache, args.smoke)
    if task.raw and not (args.data / task.raw).is_dir():
        print(f"{name}: skipped, as there is no {args.data / task.raw}")
        return
    for split in (*SPLITS, *(task.extra[:1] if args.smoke else task.extra)):
        # First, so that no two processes generate the same.
        show(f"{name}: {split}")
        load(name, split, None, source)
    load.cache_clear()
    rates = args.rates or task.rates
    seconds = task.seconds if args.seconds is None else args.seconds

    def do(key: str, rows: Iterable[tuple[str, int, float | None]]) -> None:
        names = ("task", "arm", "seed", "lr")[: 4 if key == "searches" else 3]
        for row in (x for x in results[key] if x["task"] == name):
            then, now = row["settings"], settings_of(name, row["arm"])
            if row["arm"] in args.arms and then != now:
                raise SystemExit(f"--resume: {args.out} has {then}, which is not {now}")
        done = {tuple(row[x] for x in names) for row in results[key]}
        search = key == "searches"
        taken = seconds * (SETTINGS["search"] if search else 1)
        runs = [
            Run(name, arm, seed, lr, taken, search, source, args.memory)
            for arm, seed, lr in rows
            if lr is not None and (name, arm, seed, lr)[: len(names)] not in done
        ]
        for row in trained(
            train, runs, args.workers, None if args.smoke else args.memory
        ):
            results[key].append(row)
            write_json(args.out, results)

    if len(rates) > 1:
        do("searches", ((arm, 0, lr) for arm, lr in product(args.arms, rates)))
    best = {arm: chosen(results, name, arm, rates) for arm in args.arms}
    every = product(range(args.seeds), args.arms)
    do("runs", ((arm, seed, best[arm]) for seed, arm in every))
    load.cache_clear()


def chosen(
    results: dict[str, Any], task: str, arm: str, rates: Iterable[float]
) -> float | None:
    """The learning rate with the best validation; None if no run was possible."""
    rates = list(rates)
    if len(rates) == 1:
        return rates[0]
    found = {
        row["validation"]: row["lr"]
        for row in results["searches"]
        if (row["task"], row["arm"]) == (task, arm)
        and row["lr"] in rates
        and "problem" not in row
    }
    return found[max(found, key=lambda x: TASKS[task].better * x)] if found else None


def rows_of(results: dict[str, Any], task: str, arm: str) -> list[dict[str, Any]]:
    return [x for x in results["runs"] if (x["task"], x["arm"]) == (task, arm)]


def spread(found: list[float]) -> str:
    text = f"{mean(found):.3f}" if found else "-"
    return f"{text} ± {stdev(found):.3f}" if len(found) > 1 else text


def report(results: dict[str, Any]) -> str:
    """Markdown: a table for each task, and published figures below our own."""
    host = results["machine"]
    seconds = results["settings"]["seconds"]
    blocks = [
        f"{host['cpu']}, one core for each model, torch {host['versions']['torch']}, "
        f"{'time by task' if seconds is None else f'{seconds:g} s'}; ± is the standard "
        "deviation of seeds."
    ]
    tried = [*results["runs"], *results["searches"]]
    for name in (x for x in TASKS if any(x == row["task"] for row in tried)):
        task = TASKS[name]
        keys = next(
            (
                list(x["test"])
                for x in results["runs"]
                if x["task"] == name and "test" in x
            ),
            [task.unit],
        )
        keys = [key for key in keys if key != "by_distance"]
        lines = [["", "parameters", "rate", "steps", *keys, *task.extra, ""]]
        for arm in ARMS:
            runs = rows_of(results, name, arm)
            fine = [row for row in runs if "problem" not in row]
            problems = {row["problem"] for row in runs if "problem" in row}
            if not runs:
                problems = {
                    row["problem"]
                    for row in results["searches"]
                    if (row["task"], row["arm"]) == (name, arm) and "problem" in row
                }
            if not fine and not problems:
                continue
            line = [arm, *["-"] * (len(lines[0]) - 2), "; ".join(sorted(problems))]
            if fine:
                line[1:4] = (
                    f"{fine[0]['parameters']:,}",
                    f"{fine[0]['lr']:g}",
                    f"{mean(row['steps'] for row in fine):,.0f}",
                )
                cells = [spread([row["test"][key] for row in fine]) for key in keys]
                for other in task.extra:
                    sets = [row["extra"].get(other, {}) for row in fine]
                    known = [x["score"] for x in sets if "score" in x]
                    problem = sets[0].get("problem", "-")
                    cells.append(spread(known) if known else problem)
                line[4:-1] = cells
            lines.append(line)
        lines.insert(1, ["---"] * len(lines[0]))
        text = [f"### {name}: {task.unit}", ""]
        text += ["| " + " | ".join(line) + " |" for line in lines]
        if name in PUBLISHED:
            text += ["", "Published:", ""]
            text += [f"* {who} {x} ({how})" for who, x, how in PUBLISHED[name]]
        blocks.append("\n".join(text))
    return "\n\n".join(blocks)


def plot(results: dict[str, Any], path: Path) -> list[Path]:
    """Plots errors by distance or size, and validation scores by time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    def by_distance(row: dict[str, Any]) -> list[list[float]]:
        return [x[:2] for x in row["test"].get("by_distance", []) if x[2] >= 30]

    def by_size(row: dict[str, Any]) -> list[list[float]]:
        sets = [x for x in row["extra"].values() if "score" in x and x["nodes"]]
        found = [[x["nodes"], x["score"]] for x in sets]
        if row["task"] == "ising":
            found.insert(0, [256, score(row["test"])])
        return sorted(found) if row["task"] in ("ising", "power-flow") else []

    fine = [row for row in results["runs"] if "problem" not in row]
    kinds = {
        "distance": (by_distance, "distance in hops"),
        "size": (by_size, "nodes of the graph"),
        "curves": (lambda row: row["curve"], "seconds of one core"),
    }
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in fine)]
    written = []
    for kind, (points_of, xlabel) in kinds.items():
        shown = [
            name
            for name in TASKS
            if any(row["task"] == name and points_of(row) for row in fine)
        ]
        if not shown:
            continue
        width = min(3, len(shown))
        figure, axes = plt.subplots(
            *(-(-len(shown) // width), width),
            figsize=(5.5 * width + 2, 4 * -(-len(shown) // width)),
            layout="constrained",
            squeeze=False,
        )
        handles = {}
        for axis, name in zip(axes.flat, shown, strict=False):
            for i, arm in enumerate(arms):
                points: dict[float, list[tuple[float, float]]] = {}
                rows = [x for x in rows_of(results, name, arm) if x in fine]
                for row in rows:
                    # Seeds stop at slightly different times.
                    for n, (x, value) in enumerate(points_of(row)):
                        key = n if kind == "curves" else x
                        points.setdefault(key, []).append((x, value))
                if points:
                    columns = [zip(*found, strict=True) for found in points.values()]
                    x, y = zip(*(map(mean, column) for column in columns), strict=True)
                    style = {"color": f"C{i % 10}", "ls": "-" if arm in OURS else "--"}
                    style |= {"marker": "o^sDvxP*<h"[i % 10], "markersize": 4}
                    handles[arm] = axis.plot(x, y, **style)[0]
            axis.set(title=name, xlabel=xlabel, ylabel=TASKS[name].unit)
            axis.grid(alpha=0.2)
            if kind == "size":
                axis.set_xscale("log")
        for axis in axes.flat[len(shown) :]:
            axis.axis("off")
        figure.legend(handles.values(), handles, loc="outside right upper")
        written.append(path.with_name(f"{path.stem}-{kind}.png"))
        write_figure(written[-1], figure, dpi=100)
    return written


def parse(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    # fmt: off
    for option, names in (("--only", tuple(TASKS)), ("--arms", ARMS)):
        text = f"of {', '.join(names)} (default: all)"
        add(option, nargs="+", choices=names, default=names, metavar="NAME", help=text)
    add("--seconds", type=float,
        help="of a core's time for each model (default: by task; --smoke: 0.02)")
    add("--seeds", type=int, default=1, metavar="N", help="(default: 1)")
    add("--rates", nargs="+", type=float, metavar="RATE",
        help="learning rates to choose from (default: by task; --smoke: 0.003)")
    add("--workers", type=int, default=1, metavar="N",
        help="models that are trained at a time (default: 1)")
    add("--memory", type=float, default=8.0, metavar="GIB",
        help="that a worker may take (default: 8); models that need more are skipped")
    add("--data", type=Path, default=SHARED / "data",
        help="with folders city-networks, power-grids, sst, images of raw files")
    add("--cache", type=Path, default=DATA / "long-range",
        help="for generated and processed files (default: %(default)s)")
    add("--report", action="store_true", help="only print --out, and plot it again")
    # fmt: on
    add_results(parser)
    args = parser.parse_args(argv)
    if args.smoke:
        args.seconds = 0.02 if args.seconds is None else args.seconds
        args.rates = args.rates or [3e-3]
    if args.out is None:
        name = "smoke" if args.smoke else "cpu"
        args.out = REPOSITORY / "runs" / f"long-range-{name}.json"
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    torch.set_num_threads(1)
    if args.report:
        results = json.loads(args.out.read_text())
    else:
        settings = SETTINGS | {"seconds": args.seconds, "smoke": args.smoke}
        results = open_results(args, settings, {"searches": [], "runs": []})
        try:
            for name in args.only:
                run_task(args, results, name)
        except KeyboardInterrupt:
            raise SystemExit(f"Stopped: --resume goes on with {args.out}") from None
        write_json(args.out, results)
    show("")
    print(report(results))
    plots = plot(results, args.out)
    print(f"\nWritten: {', '.join(str(x) for x in [args.out, *plots])}")


if __name__ == "__main__":
    main()
