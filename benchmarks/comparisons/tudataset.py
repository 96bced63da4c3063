"""Compares pLSTM, Chimera and PyG's layers on graph classification (TUDataset).

The protocol is that of appendix D.4 of the pLSTM paper: cross-validation with 10
folds, 100 epochs each of AdamW at 1e-3 with batches of 64, a cosine schedule with 5
warm-up epochs, and the test accuracy at the epoch of best validation accuracy::

    python benchmarks/comparisons/tudataset.py                        # MUTAG, pLSTM
    python benchmarks/comparisons/tudataset.py --models plstm chimera gcn gin gat
    python benchmarks/comparisons/tudataset.py --dataset PROTEINS --root data/TUDataset

PyG downloads the data below ``--root`` when they are not there; ``--dataset generated``
needs none. Each fold is a run in a folder of its own; ``results.json`` has one row per
model. A run can be stopped (Ctrl-C, ``--time-limit``) and continued with ``--resume``.

What the paper leaves open is settled thus:

* Folds are stratified and a function of ``--seed`` alone. Fold ``i`` is the test set of
  run ``i``, fold ``i + 1`` its validation set, so that with 10 folds the shares are 80,
  10 and 10 %.
* Validation sets are small, so epochs tie. Of those with the best accuracy, the one
  with the lowest validation loss counts, and of equal ones the first. The test set has
  no say.
* Every model has the same encoder (one-hot labels of nodes and, where there are any, of
  edges, and the number of neighbours in a sinusoidal encoding, which the paper gives
  to pLSTM only), the same decoder, and four of the same blocks, whose feed-forward
  networks are as wide as 300,000 parameters allow.
* Graphs are pooled by a sum. In PROTEINS, the label depends on how large a graph is,
  which a mean does not tell.
* Edges are directed by a breadth-first search, and signals turn (``turns`` of
  ``PLSTMConv``), which joins all nodes of a graph.
* The standard deviation is that of the folds, not of a sample (``ddof=0``).
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import (
    Task,
    fit,
    fit_all,
    main,
    make_parser,
    match_size,
    number,
    open_run,
    parse,
    refuse,
    summarize,
)
from graph_data import Stored
from sklearn.model_selection import StratifiedKFold
from torch import Tensor
from torch.nn import Module
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.datasets import FakeDataset, TUDataset
from torch_geometric.nn import MLP, GATConv, GCNConv, GINConv, GINEConv
from torch_geometric.nn.encoding import PositionalEncoding
from torch_geometric.transforms import BaseTransform
from torch_geometric.utils import degree
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy
from tqdm import tqdm

from pyg_chimera.nn import ChimeraConv, GPSLayer, GraphModel, PLSTMConv
from pyg_chimera.transforms import AddEliminationOrder

MODELS = ("plstm", "chimera", "gcn", "gin", "gat")
PAPER = dict(
    folds=10, epochs=100, batch_size=64, lr=1e-3, warmup_epochs=5,
    optimizer="AdamW", weight_decay=1e-2,
)  # fmt: skip
PRESETS = {"paper": PAPER, "smoke": PAPER | {"folds": 3, "epochs": 2, "batch_size": 16}}


def get_args(argv: list[str] | None = None) -> Namespace:
    """The command line, with the protocol's values for what it does not set."""
    parser = make_parser(__doc__, ["paper"], root="data/TUDataset", processed=True)
    parser.add_argument(
        "--dataset",
        help="any name of a TUDataset, or generated; default: MUTAG, with --smoke "
        "generated",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=["plstm"],
        metavar="MODEL",
        help=f"of {', '.join(MODELS)}; default: plstm",
    )
    parser.add_argument("--folds", type=number(int, 3, "3 or more"), help="default: 10")

    def recipe(args: Namespace) -> dict[str, Any]:
        preset = args.preset or "paper"
        dataset = args.dataset or ("generated" if preset == "smoke" else "MUTAG")
        return {"preset": preset, "dataset": dataset, **PRESETS[preset]}

    args = parse(parser, argv, recipe)
    args.models = list(dict.fromkeys(args.models))
    name = "-".join([args.dataset, *args.models, args.preset, f"seed{args.seed}"])
    args.out = args.out or Path("runs", "tudataset", name)
    return args


class _TUDataset(Stored, TUDataset): ...


class EncodeDegree(BaseTransform):
    """Appends a sinusoidal encoding of the number of neighbours to each node."""

    def __init__(self, channels: int = 32) -> None:
        self.encoding = PositionalEncoding(channels)

    def forward(self, data: Data) -> Data:
        encoded = self.encoding(degree(data.edge_index[1], data.num_nodes))
        data.x = encoded if data.x is None else torch.cat([data.x, encoded], dim=1)
        return data


def get_graphs(args: Namespace) -> list[Data]:
    """All graphs of the data set, with the attributes that the models read."""
    if args.dataset == "generated":
        seed_everything(args.seed)
        dataset = FakeDataset(48, 12, 3, num_channels=7, edge_dim=4, num_classes=2)
    else:
        folder = (args.processed_root or args.root) / args.dataset / "processed"
        dataset = _TUDataset(str(args.root), args.dataset, folder=folder)
    if args.preset == "smoke":  # from all classes, by which files are often sorted
        dataset = dataset[:: max(1, len(dataset) // 48)]
    encode, order, graphs = EncodeDegree(), AddEliminationOrder(), []
    for data in tqdm(dataset, desc="Processing", unit=" graphs"):
        data = encode(data)
        if "chimera" in args.models:
            data = order(data)
        if data.edge_attr is not None and data.edge_attr.size(1) == 0:
            del data.edge_attr
        graphs.append(data)
    return graphs


def split_folds(
    labels: Sequence[int], folds: int, seed: int
) -> list[dict[str, list[int]]]:
    """For each fold, the indices of ``train``, ``val`` and ``test``, ascending."""
    splitter = StratifiedKFold(folds, shuffle=True, random_state=seed)
    parts = [part for _, part in splitter.split(np.zeros(len(labels)), labels)]
    out = []
    for i, test in enumerate(parts):
        val = parts[(i + 1) % folds]
        train = np.setdiff1d(np.arange(len(labels)), np.concatenate([val, test]))
        split = {"train": train, "val": val, "test": test}
        out.append({name: rows.tolist() for name, rows in split.items()})
    return out


class AccuracyThenLoss(Metric):
    """The number of correct graphs, plus a bonus below 1 that grows with lower loss."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("right", "loss", "total"):
            self.add_state(name, torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, out: Tensor, y: Tensor) -> None:
        self.right += (out.argmax(-1) == y).sum()
        self.loss += F.cross_entropy(out, y, reduction="sum")
        self.total += len(y)

    def compute(self) -> Tensor:
        return self.right + 1 / (1 + self.loss / self.total)


def get_task(classes: int) -> Task:
    """The loss, accuracy, and the choice of the best epoch."""
    accuracy = MulticlassAccuracy(classes, average="micro")
    metrics = {"choice": AccuracyThenLoss(), "accuracy": accuracy}
    return Task(
        lambda out, batch: F.cross_entropy(out, batch.y),
        metrics,
        lambda out, batch: dict.fromkeys(metrics, (out, batch.y)),
    )


@cache
def _mlp_channels(*sizes: Any) -> int:
    """How wide feed-forward networks are, found once for all folds."""
    with torch.random.fork_rng([]):  # weights depend on the seed alone
        return match_size(partial(_build, *sizes), 300_000, range(1, 1000))


def build_model(
    name: str, in_channels: int, edge_dim: int | None, out_channels: int
) -> GraphModel:
    """A model of four layers and about 300,000 parameters.

    Args:
        name: One of ``MODELS``.
        in_channels: The size of each node's features.
        edge_dim: The size of each edge's features, or None. GCN ignores them.
        out_channels: The number of classes.
    """
    sizes = name, in_channels, edge_dim, out_channels
    return _build(*sizes, _mlp_channels(*sizes))


def _build(
    name: str,
    in_channels: int,
    edge_dim: int | None,
    out_channels: int,
    mlp_channels: int,
) -> GraphModel:
    channels = 96 if name in ("plstm", "chimera") else 128
    edge_dim = None if name == "gcn" else edge_dim
    edges = None if edge_dim is None else channels

    def conv(index: int) -> Module:
        if name == "plstm":
            mode = "PD"[index % 2]
            return PLSTMConv(channels, heads=4, mode=mode, edge_dim=edges, order="bfs")
        if name == "chimera":
            return ChimeraConv(channels, heads=4, state_channels=24, edge_dim=edges)
        if name == "gcn":
            return GCNConv(channels, channels)
        if name == "gat":
            return GATConv(channels, channels // 4, heads=4, edge_dim=edges)
        net = MLP([channels] * 3, norm=None)
        return GINConv(net) if edge_dim is None else GINEConv(net)

    style: dict[str, Any] = {"norm": "layer_norm", "act": "gelu"}

    def layer(index: int) -> GPSLayer:
        return GPSLayer(
            channels,
            conv(index),
            norm_first=True,
            mlp_channels=mlp_channels,
            **style,
        )

    return GraphModel(
        in_channels,
        channels,
        out_channels,
        layer,
        num_layers=4,
        edge_dim=edge_dim,
        pool="add",
        structure={"rank": "elimination_rank"} if name == "chimera" else None,
        **style,
    )


def run(args: Namespace) -> dict[str, Any]:
    """Trains according to the command line and returns the results."""
    open_run(args)  # before the graphs are read
    graphs = get_graphs(args)
    if any(data.y.numel() != 1 or data.y.is_floating_point() for data in graphs):
        refuse(f"--dataset: the graphs of {args.dataset} have no single class each")
    labels = [int(data.y) for data in graphs]
    if args.folds > (most := max(np.bincount(labels))):
        refuse(f"--folds must be at most {most} for {args.dataset}, got {args.folds}")
    splits = split_folds(labels, args.folds, args.seed)
    first, classes = graphs[0], 1 + max(labels)
    edge_dim = None if first.edge_attr is None else first.num_edge_features

    def train(own: Namespace) -> dict[str, Any]:
        split = splits[own.fold]
        data = {part: [graphs[i] for i in rows] for part, rows in split.items()}
        seed_everything(own.seed)
        model = build_model(own.model, first.num_node_features, edge_dim, classes)
        return fit(own, model, get_task(classes), lambda: data)

    runs = {
        # Each run has its own initial weights and order of graphs.
        f"{name}/fold-{i}": {
            "model": name,
            "fold": i,
            "seed": (args.seed * args.folds + i) % 2**32,
        }
        for name, i in product(args.models, range(args.folds))
    }
    return fit_all(
        args, runs.items(), train, lambda found: summarize(found, "accuracy", "folds")
    )


if __name__ == "__main__":
    sys.exit(main(run, get_args()))
