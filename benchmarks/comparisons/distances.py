r"""Compares models on distances of up to 40 hops: the synthetic tasks of ECHO.

How far is each node from a source (``sssp``), and from the farthest node
(``eccentricity``), and how far are the farthest two nodes apart (``diameter``)? Graphs
are paths, ladders, grids with holes and trees, of six families, 10,080 in all, made by
``echo_graphs`` of ``benchmarks/long_range_data``, which says how they differ from those
of the benchmark (arXiv 2512.17762)::

    python benchmarks/comparisons/distances.py                     # hours
    python benchmarks/comparisons/distances.py --task eccentricity --degrees
    python benchmarks/comparisons/distances.py --resume --arms chimera gps

Arms, with the option that each searches (see ``protocol.py``):

* ``chimera``: three blocks of GatedGCN, ChimeraConv and a feed-forward network;
  logarithms of sums that decay with distance
* ``gated-gcn``: blocks of GatedGCN and a feed-forward network; depth
* ``gps``: three blocks of GatedGCN, attention and a feed-forward network; encodings
* ``gat``: residual blocks of GAT; depth
* ``mlp``: a network of each node alone; depth

Beside them is the median of the distances in training. ``mae`` is the mean absolute
error in hops, of all nodes or graphs.

Features of nodes are random numbers, and in ``sssp`` the mark of the source. With
``--degrees``, models read numbers of neighbours, too.
"""

import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import Task, main, make_parser
from long_range_data import HOPS, echo_graphs
from protocol import PREPARE, SHARED_ARMS, DrawnGraphs, Rows, Study, build_layer, reads
from torch import Tensor
from torch.nn import Module
from torch_geometric.data import Data
from torch_geometric.utils import degree
from torchmetrics import MeanAbsoluteError

from pyg_chimera.nn import GraphModel

ARMS = SHARED_ARMS | {"chimera": ("log_sums", (0, 2))}
TASKS = ("sssp", "eccentricity", "diameter")
#: An epoch is `length` graphs, drawn from those to train on, 80 % of `graphs`.
PRESETS: dict[str, dict[str, Any]] = {
    "default": dict(graphs=10_080, length=2000, batch_size=32, norm="graph_batch_norm"),
    "smoke": dict(graphs=18, length=8, batch_size=4, norm="graph_batch_norm"),
}  # fmt: skip


def prepare(data: Data, degrees: bool) -> Data:
    """A graph as models read it: all edges are alike."""
    if degrees:
        around = degree(data.edge_index[0], data.num_nodes).view(-1, 1)
        data.x = torch.cat([data.x, around / 4], dim=1)
    data.edge_attr = torch.ones(data.num_edges, 1)
    return PREPARE(data)


def get_datasets(args: Namespace) -> dict[str, Any]:
    """Graphs to train on, to select by and to test on."""
    data: dict[str, Any] = {
        split: [
            prepare(x, args.degrees) for x in echo_graphs(args.task, split, args.graphs)
        ]
        for split in ("train", "val", "test")
    }
    return data | {"train": DrawnGraphs(data["train"], args.length)}


def get_task() -> Task:
    """The error in hops; the loss is that of outputs."""
    return Task(
        lambda out, batch: F.l1_loss(out, batch.y),
        {"mae": MeanAbsoluteError()},
        lambda out, batch: {"mae": (HOPS * out, HOPS * batch.y)},
        mode="min",
    )


def untrained(data: dict[str, Any]) -> Rows:
    """The row of the median."""

    def hops(graphs: list[Data]) -> Tensor:
        return HOPS * torch.cat([graph.y for graph in graphs])

    median = hops(data["train"].graphs).median()
    names = [name for name in data if name != "train"]
    found = {f"{x}_mae": float((hops(data[x]) - median).abs().mean()) for x in names}
    return {"median": found}


def build_model(
    task: str,
    degrees: bool,
    norm: str,
    arm: str,
    option: Any,
    channels: int,
    hidden: int,
) -> GraphModel:
    """A model of a width, with feed-forward networks of another."""
    ours = {"log_sums": option} if arm == "chimera" else {}

    def layer(place: int) -> Module:
        kind = 3 if ours else option
        return build_layer(norm, arm, kind, place, channels, hidden, **ours)

    return GraphModel(
        1 + (task == "sssp") + degrees,
        channels,
        1,
        layer,
        option if ARMS[arm][0] == "depth" else 3,
        edge_dim=None if arm == "mlp" else 1,
        head="graph" if task == "diameter" else "node",
        pool="max",  # a diameter is one
        norm=norm,
        **reads(arm, option, channels),
    )


def get_study(task: str, degrees: bool = False) -> Study:
    """The comparison on a task."""
    build = partial(build_model, task, degrees)
    return Study(ARMS, build, get_task, get_datasets, untrained)


def get_args(argv: list[str] | None = None) -> Namespace:
    """The command line, completed by a recipe."""
    parser = make_parser(__doc__, ["default"], root="")
    add = parser.add_argument_group("task").add_argument
    add("--task", choices=TASKS, default="sssp", help="default: sssp")
    add("--degrees", action="store_true", help="nodes have their degrees as features")
    args = get_study("sssp").parse(parser, argv, PRESETS)
    name = f"{args.task}-degrees" if args.degrees else args.task
    args.out = args.out or Path("runs", "distances", name, args.preset)
    return args


if __name__ == "__main__":
    args = get_args()
    sys.exit(main(get_study(args.task, args.degrees).run, args))
