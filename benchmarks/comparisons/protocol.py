"""A comparison in which every model has the same search, time and size.

Each arm has a learning rate and an option of its own, with two values each: four runs,
for a fifth of the time, select on validation graphs. The best is trained for all of it,
with several seeds; with ``--long``, once more, with the first seed, for six times as
long, as the row ``ARM-long`` of the table. Time is the processor's. All have about as
many parameters as three blocks of GatedGCN and Chimera: other models are wider or
narrower.

Each run is a folder below ``--out``. Runs can be stopped (Ctrl-C, ``--time-limit``) and
continued with ``--resume``, and arms be added in any order.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from math import ceil, inf, isnan, nan
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from common import (
    LAST,
    RESULTS,
    Task,
    count_parameters,
    epochs_within,
    fit,
    fit_all,
    match_size,
    open_run,
    parse,
    planned_epochs,
    positive_float,
    positive_int,
    refuse,
)
from json_files import write_json
from torch import Tensor
from torch.nn import Dropout, LayerNorm, Linear, Module, ReLU, Sequential
from torch.utils.data import Dataset
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.nn import GATConv
from torch_geometric.transforms import AddRandomWalkPE, Compose

from pyg_chimera.nn import (
    ChimeraConv,
    GatedGCNConv,
    GPSLayer,
    GraphModel,
    RandomWalkEncoder,
    SelfAttention,
)
from pyg_chimera.transforms import AddEliminationOrder

#: Those of the search, and the share of the time that a run of it takes.
RATES = (1e-3, 3e-3)
SEARCH = 0.2
#: The time of a long run, in that of others.
LONG = 6
#: The arm whose size all have.
OURS = "chimera"
#: Norms of blocks, and of a model's end: of each node alone, or of a batch. Layers that
#: are no blocks have norms of their own, or none.
NORMS = ("layer_norm", "graph_batch_norm")

#: What the presets of studies have in common, unless they say otherwise.
RECIPES: dict[str, dict[str, Any]] = {
    "default": dict(minutes=10.0, seeds=3, channels=64, epochs=None, warmup_epochs=1),
    "smoke": dict(minutes=None, seeds=1, channels=16, epochs=1, warmup_epochs=0.5),
}
OPTIMIZER = {"lr": RATES[0], "optimizer": "AdamW", "weight_decay": 0.01}

Arms = dict[str, tuple[str, tuple[Any, Any]]]
Rows = dict[str, dict[str, Any]]

#: Those of `build_layer`, with the values of their options.
SHARED_ARMS: Arms = {
    OURS: ("depth", (3, 6)),
    "gated-gcn": ("depth", (10, 20)),
    "gps": ("encodings", ("none", "random-walk")),
    "gat": ("depth", (10, 20)),
    "mlp": ("depth", (2, 4)),
}


# Data ----------------------------------------------------------------------------


class DrawnGraphs(Dataset):
    """So many graphs in an epoch, drawn from all."""

    def __init__(self, graphs: Dataset, length: int) -> None:
        self.graphs, self.length = graphs, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, _: int) -> Data:
        return self.graphs[int(torch.randint(len(self.graphs), ()))]


#: Walks of encodings have up to so many steps.
WALK = 16
#: Adds what `reads` names.
PREPARE = Compose([AddEliminationOrder(), AddRandomWalkPE(WALK, "random_walk_pe")])


# Models --------------------------------------------------------------------------


def reads(arm: str, option: Any, channels: int) -> dict[str, Any]:
    """Arguments of `GraphModel`: what the arms of `build_layer` read of graphs, beside
    edges and features.
    """
    walks = {"random_walk_pe": RandomWalkEncoder(WALK, channels // 4)}
    return {
        "structure": {"rank": "elimination_rank"} if arm == OURS else None,
        "encodings": walks if option == "random-walk" else None,
    }


class Alone(Module):
    """A residual feed-forward network of each node."""

    def __init__(self, channels: int, hidden: int, dropout: float) -> None:
        super().__init__()
        net = Linear(channels, hidden), ReLU(), Linear(hidden, channels)
        self.net = Sequential(LayerNorm(channels), *net, Dropout(dropout))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x + self.net(x)


def build_layer(
    norm: str,
    arm: str,
    option: Any,
    place: int,
    channels: int,
    hidden: int,
    dropout: float = 0.0,
    **ours: Any,
) -> Module:
    """The layer at a place in a model of the arms that studies share: ``chimera`` (of
    three layers, each mixes, and of more, every third; ``ours`` are options of it),
    ``gated-gcn``, ``gps``, ``gat`` and ``mlp``. All but the last two have features of
    edges as wide as those of nodes. ``norm`` is not for ``mlp``.
    """
    if arm == "mlp":
        return Alone(channels, hidden, dropout)
    conv: Module = GatedGCNConv(channels, channels, channels, norm=norm)
    mixer: Module | None = None
    if arm == OURS and (option == 3 or place % 3 == 2):
        mixer = ChimeraConv(
            channels, heads=4, state_channels=16, edge_dim=channels, reach=(4, 256),
            **ours,
        )  # fmt: skip
    elif arm == "gps":
        mixer = SelfAttention(channels, 4)
    elif arm == "gat":
        conv = GATConv(channels, channels // 4, heads=4, edge_dim=channels)
    return GPSLayer(
        channels, conv, mixer, dropout=dropout, norm=norm, norm_first=True,
        mlp_channels=hidden,
    )  # fmt: skip


# Runs ----------------------------------------------------------------------------


def read(out: Path, name: str) -> dict[str, Any]:
    """The results so far of a run; none if it has not begun."""
    path = out / name / RESULTS
    return json.loads(path.read_text()) if path.exists() else {}


def finals(args: Namespace, arm: str) -> list[str]:
    """The runs with seeds."""
    return [f"{arm}/seed-{args.seed + seed}" for seed in range(args.seeds)]


def longer(arm: str) -> str:
    """The long run."""
    return f"{arm}/long"


def without_learning(
    guesses: dict[str, Callable[[Data], Tensor]],
    errors: Callable[[Tensor, Data], dict[str, Tensor]],
    data: dict[str, Any],
) -> Rows:
    """Rows of what does not learn: of each metric the mean over graphs of the mean
    error, graphs without any left out.
    """
    rows: Rows = {arm: {} for arm in guesses}
    for arm, guess in guesses.items():
        for name in [name for name in data if name != "train"]:
            found = [errors(guess(graph), graph) for graph in data[name]]
            for metric in found[0]:
                values = [error[metric] for error in found if len(error[metric])]
                rows[arm][f"{name}_{metric}"] = mean(float(x.mean()) for x in values)
    return rows


@dataclass(frozen=True, eq=False)
class Study:
    """What is compared.

    Args:
        arms: The own option of each arm, and its two values.
        build: A model, by norm, arm, option, width, and width of feed-forward networks.
        task: The metrics are those of the table; the first one selects.
        load: The data sets ``train``, ``val``, and those to test on.
        untrained: The rows of what does not learn, from all data sets.
    """

    arms: Arms
    build: Callable[[str, str, Any, int, int], GraphModel]
    task: Callable[[], Task]
    load: Callable[[Namespace], dict[str, Any]]
    untrained: Callable[[dict[str, Any]], Rows] = lambda _: {}

    def parse(
        self,
        parser: ArgumentParser,
        argv: list[str] | None,
        presets: dict[str, dict[str, Any]],
    ) -> Namespace:
        """The command line, with what all studies have, completed by a preset."""
        add = parser.add_argument_group("study").add_argument
        add("--arms", choices=self.arms, nargs="+", default=list(self.arms),
            metavar="ARM", help=f"of {', '.join(self.arms)}; default: all")  # fmt: skip
        add("--minutes", type=positive_float,
            help="of processor time for each run, unless --epochs is given; default: 10"
        )  # fmt: skip
        add("--norm", choices=NORMS, help="default: that of the study")
        add("--seeds", type=positive_int, help="default: 3")
        add("--long", action="store_true",
            help=f"train the best of each --arms once more, {LONG} times as long; give "
            "it again with --resume"
        )  # fmt: skip
        add("--status", action="store_true", help="only list what is missing in --out")

        def recipe(args: Namespace) -> dict[str, Any]:
            if args.lr is not None:
                refuse(
                    f"--lr is of no use here: each arm's is searched for, of {RATES}"
                )
            preset = args.preset or "default"
            common = OPTIMIZER | RECIPES[preset]
            return {"preset": preset, **common, **presets[preset]}

        return parse(parser, argv, recipe)

    @cache  # noqa: B019, as a study lasts as long as its script
    def sizes(self, arm: str, option: Any, channels: int) -> tuple[int, int]:
        """The width, and that of feed-forward networks, with which a model has about as
        many parameters as ours with `channels`, whatever the norm, as all norms have
        the same. Deep models are narrower.
        """
        if (arm, option) == (OURS, self.arms[OURS][1][0]):
            return channels, 2 * channels
        with torch.random.fork_rng([]):  # weights depend on the seed alone
            build = partial(self.build, NORMS[0])
            ours = build(OURS, self.arms[OURS][1][0], channels, 2 * channels)
            target = count_parameters(ours)
            for width in range(channels, 0, -8):  # for heads and encodings
                model = build(arm, option, width, width)
                if count_parameters(model) <= target:
                    break
            models = partial(build, arm, option, width)
            return width, match_size(models, target, range(width, 32 * channels))

    def searches(self, arm: str) -> dict[str, dict[str, Any]]:
        """The runs by which the learning rate and the option of an arm are chosen."""
        name, values = self.arms[arm]
        return {
            f"{arm}/search-{name}-{option}-lr-{lr:g}": {
                "arm": arm,
                "option": option,
                "lr": lr,
            }
            for option, lr in product(values, RATES)
        }

    def plan(
        self, args: Namespace, arms: list[str], long: bool
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Runs and what they change; those with seeds depend on the search."""
        task = self.task()
        key = f"val_{next(iter(task.metrics))}"
        sign = 1 if task.mode == "min" else -1
        for arm in arms:
            found = self.searches(arm)
            for name, changes in found.items():
                short = None if args.minutes is None else SEARCH * args.minutes
                few = args.epochs and max(1, round(SEARCH * args.epochs))
                yield name, changes | {"minutes": short, "epochs": few}
            scores = {x: sign * read(args.out, x)["best"][key] for x in found}
            best = min(scores, key=lambda x: inf if isnan(scores[x]) else scores[x])
            for number, name in enumerate(finals(args, arm)):
                yield name, found[best] | {"seed": args.seed + number}
            if long:
                times = (("minutes", args.minutes), ("epochs", args.epochs))
                yield longer(arm), found[best] | {x: t and LONG * t for x, t in times}

    def status(self, args: Namespace, long: bool) -> str:
        """What is finished, begun and missing."""
        key, lines = f"val_{next(iter(self.task().metrics))}", []
        for arm in self.arms:
            names = [*self.searches(arm), *finals(args, arm)]
            if long or read(args.out, longer(arm)):
                names.append(longer(arm))
            for name in names:
                found = read(args.out, name)
                text = "missing"
                if "best" in found:
                    text = f"{key} {found['best'][key]:.3g}"
                elif found:
                    begun = found.get("epochs_done", 0)
                    text = f"{begun} of {found['config']['epochs']} epochs"
                lines.append(f"{name:45} {text}")
        return "\n".join(lines)

    def tabulate(self, args: Namespace, data: dict[str, Any]) -> Rows:
        """Rows of what is finished: of an arm, mean and deviation of its seeds, and
        its long run.
        """
        steps = ceil(len(data["train"]) / args.batch_size)
        names = [name for name in data if name != "train"]
        metrics = self.task().metrics
        runs_of: dict[str, list[str]] = {}
        for arm in self.arms:
            runs_of |= {arm: finals(args, arm), f"{arm}-long": [longer(arm)]}
        rows: Rows = {}
        for row, folders in runs_of.items():
            runs = [read(args.out, folder) for folder in folders]
            found = [run for run in runs if "best" in run]
            if not found:
                continue
            config = found[0]["config"]
            rows[row] = {
                "parameters": found[0]["parameters"],
                self.arms[config["arm"]][0]: config["option"],
                "lr": config["lr"],
                "seeds": len(found),
                "steps": round(steps * mean(run["epochs_done"] for run in found)),
            }
            for name, metric in product(names, metrics):
                key = f"{name}_{metric}"
                values = [run["best"][key] for run in found]
                deviation = float(np.std(values))  # NaN if a run diverged
                rows[row] |= {key: mean(values), f"{key}_std": deviation}
        return rows

    def run(self, args: Namespace) -> dict[str, Any]:
        """Trains according to the command line and returns the results."""
        arms, long, asked = list(dict.fromkeys(args.arms)), args.long, args.status
        del args.arms, args.long, args.status  # a run that is resumed may have others
        if asked:
            print(self.status(args, long))
            return {"stopped_by": None}
        open_run(args)  # before data are made
        data = self.load(args)
        given = self.untrained(data)

        def train(own: Namespace) -> dict[str, Any]:
            if "search" in own.out.name:  # no graph to test on has a say
                sets = {name: data[name] for name in ("train", "val")}
            else:
                sets = data
            kind = own.arm, own.option
            sizes = self.sizes(*kind, own.channels)
            seed_everything(own.seed)
            model, task = self.build(own.norm, *kind, *sizes), self.task()
            estimate = partial(epochs_within, own.minutes, model, task, own, sets)
            own.epochs = planned_epochs(own, estimate)
            title = f"{own.out.relative_to(args.out)}, {own.epochs} epochs"
            try:
                found = fit(own, model, task, lambda: sets, title)
            except FloatingPointError as error:  # a rate too high is a result
                keys = product(list(sets)[1:], task.metrics)
                best = {f"{name}_{metric}": nan for name, metric in keys}
                found = read(own.out.parent, own.out.name) | {"best": best}
                found["problem"] = str(error)
                write_json(own.out / RESULTS, found)
            if "best" in found:
                (own.out / LAST).unlink(missing_ok=True)
            return found

        def table(_: Rows) -> Rows:
            return given | self.tabulate(args, data)

        return fit_all(args, self.plan(args, arms, long), train, table)
