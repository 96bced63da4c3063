r"""Compares models on road networks of cities, where classes depend on distant roads.

Junctions have ten classes, by the largest distance to a junction up to 16 hops away.
Three fifths of them are to train on, a fifth is to select by, and a fifth to test on::

    python benchmarks/comparisons/roads.py                    # hours, downloads 4 MB
    python benchmarks/comparisons/roads.py --city huangpu
    python benchmarks/comparisons/roads.py --resume --arms chimera gps

Arms, with the option that each searches (see ``protocol.py``):

* ``chimera``: three blocks of GatedGCN, ChimeraConv and a feed-forward network, or six,
  of which every third has ChimeraConv
* ``gated-gcn``: blocks of GatedGCN and a feed-forward network; depth
* ``gps``: three blocks of GatedGCN, attention and a feed-forward network; encodings
* ``gat``: residual blocks of GAT; depth
* ``mlp``: a network of each node alone; depth

Beside them is the most frequent class in training. ``accuracy`` is that of junctions.
"""

import sys
from argparse import Namespace
from copy import copy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import Task, main, make_parser
from protocol import PREPARE, SHARED_ARMS, DrawnGraphs, Rows, Study, build_layer, reads
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Data
from torch_geometric.transforms import RandomNodeSplit
from torch_geometric.utils import grid
from torchmetrics.classification import MulticlassAccuracy

from pyg_chimera.datasets import CityRoads
from pyg_chimera.nn import GraphModel

CITIES, CLASSES = ("pasadena", "huangpu"), 10
#: Features of nodes and of edges.
SIZES = (37, 25)
DROPOUT = 0.2
#: An epoch is `length` steps, each with the whole city; with `side`, a chessboard.
PRESETS: dict[str, dict[str, Any]] = {
    "default": dict(side=None, length=10, batch_size=1, norm="graph_batch_norm"),
    "smoke": dict(side=8, length=2, batch_size=1, norm="graph_batch_norm"),
}  # fmt: skip


def chessboard(side: int) -> Data:
    """A small city: features are places, and classes distances from the centre."""
    edge_index, pos = grid(side, side)
    pos = (pos - pos.mean(dim=0)) / side
    x = F.pad(pos, (0, SIZES[0] - 2))
    edge_attr = torch.ones(edge_index.size(1), SIZES[1])
    y = (CLASSES * pos.norm(dim=1)).long()
    data = Data(x, edge_index, edge_attr, y)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return RandomNodeSplit(num_val=0.2, num_test=0.2)(data)


def get_datasets(args: Namespace) -> dict[str, Any]:
    """A city for each set, which differ in the junctions that are asked."""
    if args.side:
        data = chessboard(args.side)
    else:
        data = CityRoads(str(args.root), args.city, (0.6, 0.2))[0]
    data, found = PREPARE(data), {}
    for name in ("train", "val", "test"):
        found[name] = [copy(data)]
        found[name][0].asked = data[f"{name}_mask"]
    return found | {"train": DrawnGraphs(found["train"], args.length)}


def get_task() -> Task:
    """The accuracy of the junctions that are asked."""

    def asked(out: Tensor, batch: Data) -> tuple[Tensor, Tensor]:
        return out[batch.asked], batch.y[batch.asked]

    return Task(
        lambda out, batch: F.cross_entropy(*asked(out, batch)),
        {"accuracy": MulticlassAccuracy(CLASSES, average="micro")},
        lambda out, batch: {"accuracy": asked(out, batch)},
    )


def untrained(data: dict[str, Any]) -> Rows:
    """The row of the most frequent class."""

    def asked(graph: Data) -> Tensor:
        return graph.y[graph.asked]

    most = asked(data["train"].graphs[0]).mode().values
    return {
        "most frequent": {
            f"{name}_accuracy": float((asked(data[name][0]) == most).float().mean())
            for name in data
            if name != "train"
        }
    }


def build_model(
    norm: str, arm: str, option: Any, channels: int, hidden: int
) -> GraphModel:
    """A model of a width, with feed-forward networks of another."""

    def layer(place: int) -> Module:
        return build_layer(norm, arm, option, place, channels, hidden, DROPOUT)

    in_channels, edge_dim = SIZES
    return GraphModel(
        in_channels,
        channels,
        CLASSES,
        layer,
        option if SHARED_ARMS[arm][0] == "depth" else 3,
        edge_dim=None if arm == "mlp" else edge_dim,
        head="node",
        norm=norm,
        dropout=DROPOUT,
        **reads(arm, option, channels),
    )


STUDY = Study(SHARED_ARMS, build_model, get_task, get_datasets, untrained)


def get_args(argv: list[str] | None = None) -> Namespace:
    """The command line, completed by a recipe."""
    parser = make_parser(__doc__, ["default"], root="data/city-roads")
    add = parser.add_argument_group("task").add_argument
    add("--city", choices=CITIES, default=CITIES[0], help=f"default: {CITIES[0]}")
    args = STUDY.parse(parser, argv, PRESETS)
    args.out = args.out or Path("runs", "roads", args.city, args.preset)
    return args


if __name__ == "__main__":
    sys.exit(main(STUDY.run, get_args()))
