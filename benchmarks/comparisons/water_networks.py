r"""Compares models that find the heads in water networks from sensors at 5 % of them.

Trains on states of nine networks of Kentucky and selects on others, with sensors at
other junctions in each state. Tests on further states of them (``known``), on two
networks of Kentucky that were not in training (``other``), on four of other origin, and
on two large ones, one of Kentucky and one of 12,523 junctions. Their ``.inp`` files are
read from ``--root``, plain or compressed: ``ky1`` to ``ky14``, ``L-TOWN``, ``KL``,
``Richmond_standard``, ``Balerma`` and ``BWSN_Network_2``, as the packages ``epyt`` and
``wntr`` ship them::

    python benchmarks/comparisons/water_networks.py --root data/water     # days
    python benchmarks/comparisons/water_networks.py --root data/water --status
    python benchmarks/comparisons/water_networks.py --root data/water --resume \
        --arms chimera gps

Arms, with the option that each searches (see ``protocol.py``):

* ``chimera``: three blocks of GatedGCN, ChimeraConv and a feed-forward network, or six,
  of which every third has ChimeraConv
* ``chimera-reach``: the same with ``reach_nodes=1000``: ranges grow with a network
* ``gated-gcn``: blocks of GatedGCN and a feed-forward network; depth
* ``gps``: three blocks of GatedGCN, attention and a feed-forward network; encodings
* ``gat``: residual blocks of GAT (as GATRes, arXiv 2311.10579); depth
* ``chebyshev``: three filters by conductance (as GraphConvWat, arXiv 2104.13619); order
* ``mlp``: a network of each node alone; depth

Beside them, without learning, are the mean of the sensors, harmonic interpolation, and
least squares, which know the laws of flow. All models read these, and predict what is
to be added, in units of their deviation (`SampleSensors`). ``mae`` is of all junctions
without a sensor, ``zone_mae`` of those to which pipes lead from one.
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Task, main, make_parser
from protocol import (
    PREPARE,
    SHARED_ARMS,
    DrawnGraphs,
    Study,
    build_layer,
    reads,
    without_learning,
)
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Batch, Data
from torch_geometric.nn import ChebConv
from torchmetrics import MeanMetric

from pyg_chimera.datasets import SampleSensors, WaterNetworks
from pyg_chimera.nn import GPSLayer, GraphModel

ARMS = SHARED_ARMS | {
    "chimera-reach": SHARED_ARMS["chimera"],
    "chebyshev": ("order", (24, 120)),
}
KENTUCKY = ("ky1", "ky2", "ky3", "ky4", "ky5", "ky7", "ky8", "ky10", "ky11")
FOREIGN = ("L-TOWN", "KL", "Richmond_standard", "Balerma")
#: Networks to train on, and by name those to test on that are not among them.
SPLITS: dict[str, tuple[tuple[str, ...], dict[str, tuple[str, ...]]]] = {
    "default": (
        KENTUCKY,
        {"other": ("ky13", "ky14")}
        | {name: (name,) for name in (*FOREIGN, "ky12", "BWSN_Network_2")},
    ),
    "smoke": (("Net3",), {"Net2": ("Net2",)}),  # those of wntr
}
#: `length` is the number of states in an epoch, drawn from `states` of each network.
#: `val_states` of each select, and `held_out` are for tests.
PRESETS: dict[str, dict[str, Any]] = {
    "default": dict(
        states=200, length=240, val_states=5, held_out=20, batch_size=4,
        norm="graph_batch_norm",
    ),
    "smoke": dict(
        states=8, length=8, val_states=2, held_out=2, batch_size=4,
        norm="graph_batch_norm",
    ),
}  # fmt: skip


# Data ----------------------------------------------------------------------------


def find(root: Path, network: str) -> str:
    """The file of a network, or its name, which `wntr` may know."""
    paths = (root / f"{network}.inp{end}" for end in ("", ".gz"))
    return next((str(path) for path in paths if path.exists()), network)


def get_datasets(args: Namespace) -> dict[str, Any]:
    """States to train on, to select by and, by name, to test on."""
    train, tests = SPLITS[args.preset]

    def load(names: tuple[str, ...], states: int, seed: int) -> WaterNetworks:
        return WaterNetworks(
            str(args.processed_root or args.root),
            [find(args.root, name) for name in names],
            states,
            SampleSensors(0.05, seed=seed or None),  # drawn anew for training
            seed,
            pre_transform=PREPARE,
        )

    return {
        "train": DrawnGraphs(load(train, args.states, 0), args.length),
        "val": load(train, args.val_states, 1),
        "known": load(train, args.held_out, 2),
        **{name: load(names, args.held_out, 1) for name, names in tests.items()},
    }


def asked(data: Data) -> dict[str, Tensor]:
    """By metric, junctions without sensors: all, and those in zones with sensors."""
    return {"mae": data.target_mask, "zone_mae": data.target_mask & data.in_zone}


def errors(guess: Tensor, data: Data) -> dict[str, Tensor]:
    """In metres, at the junctions of each metric."""
    miss = (data.sensor_mean + data.sensor_scale * guess - data.y).abs()
    return {name: miss[mask] for name, mask in asked(data).items()}


def get_task() -> Task:
    """Mean absolute errors in metres; the first one is the loss. Outputs are what is
    added to the start, in units of its spread.
    """

    def evaluate(out: Tensor, batch: Batch) -> dict[str, Tensor]:
        return errors(batch.start + batch.spread * out[:, 0], batch)

    def loss(out: Tensor, batch: Batch) -> Tensor:
        return evaluate(out, batch)["mae"].mean()

    def rows(out: Tensor, batch: Batch) -> dict[str, tuple[Tensor, ...]]:
        number = {name: batch.batch[mask] for name, mask in asked(batch).items()}
        return {
            name: (values, 1.0 / number[name].bincount()[number[name]])
            for name, values in evaluate(out, batch).items()
        }

    metrics = {name: MeanMetric() for name in ("mae", "zone_mae")}
    return Task(loss, metrics, rows, mode="min")


# Without learning ----------------------------------------------------------------


UNTRAINED: dict[str, Callable[[Data], Tensor]] = {
    "mean": lambda data: torch.zeros_like(data.start),
    "harmonic": lambda data: data.harmonic,
    "least-squares": lambda data: data.start,
}


# Models --------------------------------------------------------------------------


def build_model(
    norm: str, arm: str, option: Any, channels: int, hidden: int
) -> GraphModel:
    """A model of a width, with feed-forward networks of another."""
    grows = arm == "chimera-reach"
    arm = "chimera" if grows else arm
    wide = arm in ("chimera", "gated-gcn", "gps", "gat")
    depth = option if ARMS[arm][0] == "depth" else 3

    def layer(place: int) -> Module:
        if arm == "chebyshev":
            conv = ChebConv(channels, channels, option)
            return GPSLayer(
                channels, conv, norm=norm, norm_first=True, mlp_channels=hidden
            )
        reach = 1000 if grows else None
        return build_layer(
            norm, arm, option, place, channels, hidden, reach_nodes=reach
        )

    given = reads(arm, option, channels)
    if arm == "chebyshev":
        given["structure"] = {"edge_weight": "conductance"}
    return GraphModel(
        9,
        channels,
        1,
        layer,
        depth,
        edge_dim=7 if wide else None,
        head="node",
        norm=norm,
        **given,
    )


# Runs ----------------------------------------------------------------------------


GIVEN = partial(without_learning, UNTRAINED, errors)
STUDY = Study(ARMS, build_model, get_task, get_datasets, GIVEN)


def get_args(argv: list[str] | None = None) -> Namespace:
    """The command line, completed by a recipe."""
    parser = make_parser(__doc__, ["default"], root=".", processed=True)
    args = STUDY.parse(parser, argv, PRESETS)
    args.out = args.out or Path("runs", "water-networks", args.preset)
    return args


if __name__ == "__main__":
    sys.exit(main(STUDY.run, get_args()))
