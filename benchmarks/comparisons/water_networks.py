r"""Compares models that find the heads in water networks from sensors at 5 % of them.

Trains on nine networks of Kentucky, selects on two others, and tests on four networks
of other origin, then on a large one of Kentucky and one of 12,523 junctions, with
sensors at other junctions in each state. Their ``.inp`` files are read from ``--root``,
plain or compressed: ``ky1`` to ``ky14``, ``L-TOWN``, ``KL``, ``Richmond_standard``,
``Balerma`` and ``BWSN_Network_2``, as the packages ``epyt`` and ``wntr`` ship them::

    python benchmarks/comparisons/water_networks.py --root data/water     # days
    python benchmarks/comparisons/water_networks.py --root data/water --status
    python benchmarks/comparisons/water_networks.py --root data/water --resume \
        --arms chimera gps

Every arm has the same search: two learning rates times two values of its own most
important option, each trained for a fifth of ``--minutes`` of processor time; the best
on validation networks is trained for all of them, with three seeds. All have about as
many parameters as three blocks of GatedGCN and Chimera of width 64, by their widths.

* ``chimera``: three blocks of GatedGCN, ChimeraConv and a feed-forward network; reach
* ``gated-gcn``: blocks of GatedGCN and a feed-forward network; depth
* ``gps``: three blocks of GatedGCN, attention and a feed-forward network; encodings
* ``gat``: residual blocks of GAT (as GATRes, arXiv 2311.10579); depth
* ``chebyshev``: three filters by conductance (as GraphConvWat, arXiv 2104.13619); order
* ``mlp``: a network of each node alone, which knows the mean of the sensors; depth

Beside them are the mean of the sensors and harmonic interpolation, without learning.
Each run is a folder below ``--out``. Runs can be stopped (Ctrl-C, ``--time-limit``) and
continued with ``--resume``, and arms be added in any order.
"""

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import product
from math import ceil, inf, isnan, nan
from pathlib import Path
from statistics import mean, pstdev
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
    main,
    make_parser,
    match_size,
    open_run,
    parse,
    planned_epochs,
    positive_float,
    positive_int,
)
from json_files import write_json
from scipy.sparse import coo_array, diags_array
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import spsolve
from torch import Tensor
from torch.nn import LayerNorm, Linear, Module, ReLU, Sequential
from torch.utils.data import Dataset
from torch_geometric import seed_everything
from torch_geometric.data import Batch, Data
from torch_geometric.nn import ChebConv, GATConv
from torch_geometric.transforms import AddRandomWalkPE, Compose
from torchmetrics import MeanMetric

from pyg_chimera.datasets import SampleSensors, WaterNetworks
from pyg_chimera.nn import (
    ChimeraConv,
    GatedGCNConv,
    GPSLayer,
    GraphModel,
    RandomWalkEncoder,
    SelfAttention,
)
from pyg_chimera.transforms import AddEliminationOrder

#: The own option of each arm, and its two values.
ARMS: dict[str, tuple[str, tuple[Any, Any]]] = {
    "chimera": ("reach", (64, 256)),
    "gated-gcn": ("depth", (10, 20)),
    "gps": ("encodings", ("none", "random-walk")),
    "gat": ("depth", (10, 20)),
    "chebyshev": ("order", (24, 120)),
    "mlp": ("depth", (2, 4)),
}
RATES = (1e-3, 3e-3)
#: The share of the time that a run of the search takes.
SEARCH = 0.2
WALK = 16
KENTUCKY = ("ky1", "ky2", "ky3", "ky4", "ky5", "ky7", "ky8", "ky10", "ky11")
FOREIGN = ("L-TOWN", "KL", "Richmond_standard", "Balerma")
#: Networks to train, to select and to test on.
SPLITS = {
    "default": (KENTUCKY, ("ky13", "ky14"), (*FOREIGN, "ky12", "BWSN_Network_2")),
    "smoke": (("Net3",), ("Net1",), ("Net2",)),  # those of wntr
}
#: `length` is the number of states in an epoch, drawn from `states` of each network.
PRESETS: dict[str, dict[str, Any]] = {
    "default": dict(
        states=200, length=240, held_out=20, minutes=10.0, seeds=3, channels=64,
        epochs=None, batch_size=4, lr=RATES[0], warmup_epochs=1,
        optimizer="AdamW", weight_decay=0.01,
    ),
    "smoke": dict(
        states=8, length=8, held_out=2, minutes=None, seeds=1, channels=16,
        epochs=1, batch_size=4, lr=RATES[0], warmup_epochs=0.5,
        optimizer="AdamW", weight_decay=0.01,
    ),
}  # fmt: skip


# Data ----------------------------------------------------------------------------


class DrawnStates(Dataset):
    """So many states in an epoch, drawn from all; sensors are drawn, too."""

    def __init__(self, states: WaterNetworks, length: int) -> None:
        self.states, self.length = states, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, _: int) -> Data:
        return self.states[int(torch.randint(len(self.states), ()))]


def find(root: Path, network: str) -> str:
    """The file of a network, or its name, which `wntr` may know."""
    paths = (root / f"{network}.inp{end}" for end in ("", ".gz"))
    return next((str(path) for path in paths if path.exists()), network)


def get_datasets(args: Namespace) -> dict[str, Any]:
    """States to train on, to select by and, by network, to test on."""
    train, val, test = SPLITS[args.preset]
    prepare = Compose([AddEliminationOrder(), AddRandomWalkPE(WALK, "random_walk_pe")])

    def load(names: tuple[str, ...], states: int, **kwargs: Any) -> WaterNetworks:
        return WaterNetworks(
            str(args.processed_root or args.root),
            [find(args.root, name) for name in names],
            states,
            pre_transform=prepare,
            **kwargs,
        )

    fixed = {"sensors": SampleSensors(0.05, seed=0), "seed": 1}
    return {
        "train": DrawnStates(load(train, args.states), args.length),
        "val": load(val, args.held_out, **fixed),
        **{name: load((name,), args.held_out, **fixed) for name in test},
    }


def errors(out: Tensor, data: Data) -> Tensor:
    """In metres, at junctions without sensors; outputs are in tens of metres."""
    return (data.sensor_mean + 10 * out[:, 0] - data.y).abs()[data.target_mask]


def get_task() -> Task:
    """The mean absolute error in metres."""

    def loss(out: Tensor, batch: Batch) -> Tensor:
        return errors(out, batch).mean()

    def rows(out: Tensor, batch: Batch) -> dict[str, tuple[Tensor, ...]]:
        number = batch.batch[batch.target_mask]
        return {"mae": (errors(out, batch), 1.0 / number.bincount()[number])}

    return Task(loss, {"mae": MeanMetric()}, rows, mode="min")


# Without learning ----------------------------------------------------------------


def harmonic_interpolation(data: Data) -> Tensor:
    """Heads that are means of their neighbours', weighted by conductance: the Laplacian
    system of nodes without sensors. Parts without any get the mean of the sensors.
    """
    source, target = data.edge_index.numpy()
    weight, shape = data.conductance.double().numpy(), 2 * (data.num_nodes,)
    adjacency = coo_array((weight, (target, source)), shape).tocsr()
    rows = (diags_array(adjacency.sum(axis=1)) - adjacency).tocsr()
    at, heads = data.sensor_mask.numpy(), data.x[:, 0].double().numpy()
    _, part = connected_components(adjacency)
    free = ~at & np.isin(part, part[at])
    heads[free] = spsolve(rows[free][:, free].tocsc(), -rows[free][:, at] @ heads[at])
    return torch.from_numpy(heads).float().view(-1, 1)


UNTRAINED: dict[str, Callable[[Data], Tensor]] = {
    "mean": lambda data: torch.zeros(data.num_nodes, 1),
    "harmonic": harmonic_interpolation,
}


# Models --------------------------------------------------------------------------


class Alone(Module):
    """A residual feed-forward network of each node."""

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()
        net = Linear(channels, hidden), ReLU(), Linear(hidden, channels)
        self.net = Sequential(LayerNorm(channels), *net)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        return x + self.net(x)


def build_model(arm: str, option: Any, channels: int, hidden: int) -> GraphModel:
    """A model of a width, with feed-forward networks of another."""
    local = arm in ("chimera", "gated-gcn", "gps")
    edge_dim = channels if local or arm == "gat" else None
    depth = option if ARMS[arm][0] == "depth" else 3

    def layer(_: int) -> Module:
        if arm == "mlp":
            return Alone(channels, hidden)
        conv: Module = GatedGCNConv(channels, channels, edge_dim)
        mixer: Module | None = None
        if arm == "chimera":
            mixer = ChimeraConv(
                channels, heads=4, state_channels=16, edge_dim=channels,
                reach=(4, option),
            )  # fmt: skip
        elif arm == "gps":
            mixer = SelfAttention(channels, 4)
        elif arm == "gat":
            conv = GATConv(channels, channels // 4, heads=4, edge_dim=channels)
        elif arm == "chebyshev":
            conv = ChebConv(channels, channels, option)
        return GPSLayer(channels, conv, mixer, norm_first=True, mlp_channels=hidden)

    structure = {"chimera": {"rank": "elimination_rank"}}
    structure["chebyshev"] = {"edge_weight": "conductance"}
    walks = {"random_walk_pe": RandomWalkEncoder(WALK, channels // 4)}
    return GraphModel(
        7,
        channels,
        1,
        layer,
        depth,
        edge_dim=None if edge_dim is None else 7,
        head="node",
        norm="graph_batch_norm",
        structure=structure.get(arm),
        encodings=walks if option == "random-walk" else None,
    )


@cache
def sizes(arm: str, option: Any, channels: int) -> tuple[int, int]:
    """The width, and that of feed-forward networks, with which a model has about as
    many parameters as ours with `channels`. Deep models are narrower.
    """
    if arm == "chimera":
        return channels, 2 * channels
    with torch.random.fork_rng([]):  # weights depend on the seed alone
        ours = build_model("chimera", 64, channels, 2 * channels)
        target = count_parameters(ours)
        for width in range(channels, 0, -8):  # for heads and encodings
            model = build_model(arm, option, width, width)
            if count_parameters(model) <= target:
                break
        models = partial(build_model, arm, option, width)
        return width, match_size(models, target, range(width, 32 * channels))


# Runs ----------------------------------------------------------------------------


def get_args(argv: list[str] | None = None) -> Namespace:
    """The command line, completed by a recipe."""
    parser = make_parser(__doc__, ["default"], root=".", processed=True)
    add = parser.add_argument
    add("--arms", choices=ARMS, nargs="+", default=list(ARMS), metavar="ARM",
        help=f"of {', '.join(ARMS)}; default: all")  # fmt: skip
    add("--minutes", type=positive_float,
        help="of processor time for each run, unless --epochs is given; default: 10"
    )  # fmt: skip
    add("--seeds", type=positive_int, help="default: 3")
    add("--status", action="store_true", help="only list what is missing in --out")

    def recipe(args: Namespace) -> dict[str, Any]:
        preset = args.preset or "default"
        return {"preset": preset, **PRESETS[preset]}

    args = parse(parser, argv, recipe)
    args.out = args.out or Path("runs", "water-networks", args.preset)
    return args


def searches(arm: str) -> dict[str, dict[str, Any]]:
    """The runs by which the learning rate and the option of an arm are chosen."""
    name, values = ARMS[arm]
    return {
        f"{arm}/search-{name}-{option}-lr-{lr:g}": dict(arm=arm, option=option, lr=lr)
        for option, lr in product(values, RATES)
    }


def finals(args: Namespace, arm: str) -> list[str]:
    return [f"{arm}/seed-{args.seed + seed}" for seed in range(args.seeds)]


def read(out: Path, name: str) -> dict[str, Any]:
    """The results so far of a run; none if it has not begun."""
    path = out / name / RESULTS
    return json.loads(path.read_text()) if path.exists() else {}


def plan(args: Namespace, arms: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Runs and what they change; those with seeds depend on the search."""
    for arm in arms:
        found = searches(arm)
        for name, changes in found.items():
            short = None if args.minutes is None else SEARCH * args.minutes
            yield name, changes | {"minutes": short}
        scores = {x: read(args.out, x)["best"]["val_mae"] for x in found}
        best = min(scores, key=lambda x: inf if isnan(scores[x]) else scores[x])
        for number, name in enumerate(finals(args, arm)):
            yield name, found[best] | {"seed": args.seed + number}


def status(args: Namespace) -> str:
    """What is finished, begun and missing."""
    lines = []
    for arm in ARMS:
        for name in (*searches(arm), *finals(args, arm)):
            found = read(args.out, name)
            text = "missing"
            if "best" in found:
                text = f"validation {found['best']['val_mae']:.3g} m"
            elif found:
                begun = found.get("epochs_done", 0)
                text = f"{begun} of {found['config']['epochs']} epochs"
            lines.append(f"{name:45} {text}")
    return "\n".join(lines)


def tabulate(args: Namespace) -> dict[str, dict[str, Any]]:
    """A row for each arm that is finished, in metres: mean and deviation of seeds."""
    rows: dict[str, dict[str, Any]] = {}
    for arm in ARMS:
        runs = [read(args.out, name) for name in finals(args, arm)]
        found = [run for run in runs if "best" in run]
        if not found:
            continue
        config, steps = found[0]["config"], ceil(args.length / args.batch_size)
        rows[arm] = {
            "parameters": found[0]["parameters"],
            ARMS[arm][0]: config["option"],
            "lr": config["lr"],
            "seeds": len(found),
            "steps": round(steps * mean(run["epochs_done"] for run in found)),
        }
        for name in ("val", *SPLITS[args.preset][2]):
            values = [run["best"][f"{name}_mae"] for run in found]
            rows[arm] |= {name: mean(values), f"{name}_std": pstdev(values)}
    return rows


def untrained(data: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The rows of what does not learn."""
    return {
        arm: {
            name: mean(float(errors(guess(x), x).mean()) for x in data[name])
            for name in data
            if name != "train"
        }
        for arm, guess in UNTRAINED.items()
    }


def run(args: Namespace) -> dict[str, Any]:
    """Trains according to the command line and returns the results."""
    arms, asked = list(dict.fromkeys(args.arms)), args.status
    del args.arms, args.status  # a run that is resumed may have others
    if asked:
        print(status(args))
        return {"stopped_by": None}
    open_run(args)  # before states are computed
    data = get_datasets(args)
    given = untrained(data)

    def train(own: Namespace) -> dict[str, Any]:
        if "search" in own.out.name:  # no network to test on has a say
            sets = {name: data[name] for name in ("train", "val")}
        else:
            sets = data
        width, hidden = sizes(own.arm, own.option, own.channels)
        seed_everything(own.seed)
        model = build_model(own.arm, own.option, width, hidden)
        estimate = partial(epochs_within, own.minutes, model, get_task(), own, sets)
        own.epochs = planned_epochs(own, estimate)
        title = f"{own.out.relative_to(args.out)}, {own.epochs} epochs"
        try:
            found = fit(own, model, get_task(), lambda: sets, title)
        except FloatingPointError as error:  # a rate too high for an arm is a result
            best = {f"{name}_mae": nan for name in sets if name != "train"}
            found = read(own.out.parent, own.out.name) | {"best": best}
            found["problem"] = str(error)
            write_json(own.out / RESULTS, found)
        if "best" in found:
            (own.out / LAST).unlink(missing_ok=True)
        return found

    return fit_all(args, plan(args, arms), train, lambda _: given | tabulate(args))


if __name__ == "__main__":
    sys.exit(main(run, get_args()))
