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

Arms, with the option that each searches (see ``protocol.py``):

* ``chimera``: three blocks of GatedGCN, ChimeraConv and a feed-forward network; input
  gate
* ``chimera-reach``: the same with ``reach_nodes=1000``: ranges grow with a network
* ``gated-gcn``: blocks of GatedGCN and a feed-forward network; depth
* ``gps``: three blocks of GatedGCN, attention and a feed-forward network; encodings
* ``gat``: residual blocks of GAT (as GATRes, arXiv 2311.10579); depth
* ``chebyshev``: three filters by conductance (as GraphConvWat, arXiv 2104.13619); order
* ``mlp``: a network of each node alone, which knows the mean of the sensors; depth

Beside them are the mean of the sensors and harmonic interpolation, without learning.
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from common import Task, main, make_parser
from protocol import RATES, SHARED_ARMS, DrawnGraphs, Study, build_layer
from scipy.sparse import coo_array, diags_array
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import spsolve
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Batch, Data
from torch_geometric.nn import ChebConv
from torch_geometric.transforms import AddRandomWalkPE, Compose
from torchmetrics import MeanMetric

from pyg_chimera.datasets import SampleSensors, WaterNetworks
from pyg_chimera.nn import GPSLayer, GraphModel, RandomWalkEncoder
from pyg_chimera.transforms import AddEliminationOrder

ARMS = SHARED_ARMS | {
    "chimera-reach": SHARED_ARMS["chimera"],
    "chebyshev": ("order", (24, 120)),
}
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
        optimizer="AdamW", weight_decay=0.01, norm="graph_batch_norm",
    ),
    "smoke": dict(
        states=8, length=8, held_out=2, minutes=None, seeds=1, channels=16,
        epochs=1, batch_size=4, lr=RATES[0], warmup_epochs=0.5,
        optimizer="AdamW", weight_decay=0.01, norm="graph_batch_norm",
    ),
}  # fmt: skip


# Data ----------------------------------------------------------------------------


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
        "train": DrawnGraphs(load(train, args.states), args.length),
        "val": load(val, args.held_out, **fixed),
        **{name: load((name,), args.held_out, **fixed) for name in test},
    }


def errors(out: Tensor, data: Data) -> Tensor:
    """In metres, at junctions without sensors."""
    heads = data.sensor_mean + data.sensor_scale * out[:, 0]
    return (heads - data.y).abs()[data.target_mask]


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


def untrained(data: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of what does not learn."""
    return {
        arm: {
            f"{name}_mae": mean(float(errors(guess(x), x).mean()) for x in data[name])
            for name in data
            if name != "train"
        }
        for arm, guess in UNTRAINED.items()
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

    def layer(_: int) -> Module:
        if arm == "chebyshev":
            conv = ChebConv(channels, channels, option)
            return GPSLayer(
                channels, conv, norm=norm, norm_first=True, mlp_channels=hidden
            )
        reach = 1000 if grows else None
        return build_layer(norm, arm, option, channels, hidden, reach_nodes=reach)

    structure = {"chimera": {"rank": "elimination_rank"}}
    structure["chebyshev"] = {"edge_weight": "conductance"}
    walks = {"random_walk_pe": RandomWalkEncoder(WALK, channels // 4)}
    return GraphModel(
        7,
        channels,
        1,
        layer,
        depth,
        edge_dim=7 if wide else None,
        head="node",
        norm=norm,
        structure=structure.get(arm),
        encodings=walks if option == "random-walk" else None,
    )


# Runs ----------------------------------------------------------------------------


STUDY = Study(ARMS, build_model, get_task, get_datasets, untrained)


def get_args(argv: list[str] | None = None) -> Namespace:
    """The command line, completed by a recipe."""
    parser = make_parser(__doc__, ["default"], root=".", processed=True)
    args = STUDY.parse(parser, argv, PRESETS)
    args.out = args.out or Path("runs", "water-networks", args.preset)
    return args


if __name__ == "__main__":
    sys.exit(main(STUDY.run, get_args()))
