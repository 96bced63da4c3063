r"""Trains on the nodes of one large graph: all at once, or by clusters.

Without arguments it plays Minesweeper, on a field that it makes, with no download::

    python benchmarks/comparisons/node_classification.py

The heterophilous graphs of Platonov et al. (2023), with their ten splits, are read from
``--root``, as ``tolokers.npz``, or downloaded by PyG where they are not there (but for
``actor.npz``, which is published beside the others)::

    python benchmarks/comparisons/node_classification.py --dataset tolokers --splits 3
    python benchmarks/comparisons/node_classification.py --dataset minesweeper \
        --models chimera gps gcn --splits 0 1 2 3 4 5 6 7 8 9
    python benchmarks/comparisons/node_classification.py --dataset minesweeper \
        --num-layers 10

What does not fit in memory is cut. Clusters, found by METIS, are graphs of their own,
and several processes share them out::

    torchrun --nproc_per_node=2 benchmarks/comparisons/node_classification.py \
        --clusters 16

Each model is trained on each split, in a folder of its own; ``results.json`` has a row
for each model. A run can be stopped (Ctrl-C, ``--time-limit``) and continued with
``--resume``.
"""

import math
import sys
from argparse import Namespace
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from common import (
    WORLD,
    Task,
    fit,
    fit_all,
    main,
    make_parser,
    natural,
    open_run,
    parse,
    positive_int,
    summarize,
)
from torch import Tensor
from torch_geometric import seed_everything
from torch_geometric.data import Batch, Data
from torch_geometric.datasets import HeterophilousGraphDataset
from torch_geometric.nn import GCNConv, GPSConv, SAGEConv
from torch_geometric.utils import (
    grid,
    scatter,
    to_undirected,
)
from torchmetrics.classification import BinaryAUROC, MulticlassAccuracy

from pyg_chimera.loader import ClusterData
from pyg_chimera.nn import (
    ChimeraConv,
    GPSLayer,
    GraphMambaConv,
    GraphModel,
    KHopAttentionConv,
    PLSTMConv,
)
from pyg_chimera.transforms import AddEliminationOrder

PARTS = ("train", "val", "test")
MODELS = ("chimera", "plstm", "graph-mamba", "k-hop", "gps", "sage", "gcn")
DOWNLOADS = ("amazon-ratings", "minesweeper", "questions", "roman-empire", "tolokers")
DATASETS = ("generated", "actor", *DOWNLOADS)
#: ``default`` is that of the released experiments on these graphs, with fewer epochs.
PRESETS: dict[str, dict[str, Any]] = {
    "default": dict(
        epochs=100, lr=3e-3, warmup_epochs=5, channels=64, num_layers=3, side=100
    ),
    "demo": dict(
        epochs=30, lr=1e-2, warmup_epochs=2, channels=32, num_layers=3, side=40
    ),
    "smoke": dict(
        epochs=2, lr=1e-2, warmup_epochs=0.5, channels=16, num_layers=2, side=12
    ),
}


# Data ----------------------------------------------------------------------------


def make_field(side: int, num_splits: int = 10) -> Data:
    """Minesweeper, like the data set: 20% of the squares of a field are mines.

    Half of the nodes show how many of their eight neighbours are mines.
    """
    generator = torch.Generator().manual_seed(0)
    edge_index, _ = grid(side, side)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    mine = torch.rand(side**2, generator=generator) < 0.2
    count = scatter(mine[edge_index[0]].long(), edge_index[1], dim_size=side**2)
    hidden = torch.rand(side**2, generator=generator) < 0.5
    x = F.one_hot(torch.where(hidden, 9, count), 10).float()
    share = torch.rand(side**2, num_splits, generator=generator)
    masks = {"train": share < 0.5, "val": (share >= 0.5) & (share < 0.75)}
    masks["test"] = share >= 0.75
    named = {f"{name}_mask": mask for name, mask in masks.items()}
    return Data(x=x, edge_index=edge_index, y=mine.long(), **named)


def load_graph(args: Namespace) -> Data:
    """The graph, with the masks of all its splits, one per column."""
    if args.dataset == "generated":
        return make_field(args.side)
    path = args.root / f"{args.dataset.replace('-', '_')}.npz"
    if path.exists():
        raw = np.load(path)
        arrays = {name: torch.from_numpy(raw[name]) for name in raw.files}
        edge_index = to_undirected(arrays["edges"].t().contiguous())
        data = Data(x=arrays["node_features"].float(), edge_index=edge_index)
        data.y = arrays["node_labels"]
        for name in PARTS:
            data[f"{name}_mask"] = arrays[f"{name}_masks"].t()
    elif args.dataset in DOWNLOADS:
        data = HeterophilousGraphDataset(str(args.root), args.dataset.title())[0]
        data.edge_index = to_undirected(data.edge_index)
    else:
        raise FileNotFoundError(
            f"there is no {path}: it is published at "
            "github.com/yandex-research/heterophilous-graphs, in data"
        )
    return data


#: Applied when graphs are made: layers would search for an order in each new graph.
order = AddEliminationOrder()


def get_parts(args: Namespace) -> list[Data]:
    """The whole graph, or its clusters, as used for training."""
    whole = load_graph(args)
    if args.clusters:
        return [order(part) for part in ClusterData(whole, args.clusters, log=False)]
    return [order(whole)]


def get_datasets(args: Namespace, parts: list[Data], split: int) -> dict[str, Any]:
    """Graphs for each part of the split, with a ``mask`` of the nodes that count."""

    def masked(part: Data, name: str) -> Data:
        mask = part[f"{name}_mask"][:, split]
        data = Data(x=part.x, edge_index=part.edge_index, y=part.y, mask=mask)
        data.elimination_rank = part.elimination_rank
        return data

    return {name: [masked(part, name) for part in parts] for name in PARTS}


def get_task(num_classes: int) -> Task:
    """Cross-entropy, and the area under the ROC curve or the accuracy."""

    def loss(out: Tensor, batch: Batch) -> Tensor:
        total = F.cross_entropy(out[batch.mask], batch.y[batch.mask], reduction="sum")
        return total / batch.mask.sum().clamp(min=1)

    def rows(out: Tensor, batch: Batch) -> dict[str, tuple[Tensor, ...]]:
        out, y = out[batch.mask], batch.y[batch.mask]
        if name == "auroc":
            # In [0, 1], as the metric would otherwise decide by batches whether values
            # are logits, and without ties of large ones.
            out = 0.5 + (out[:, 1] - out[:, 0]).double().atan() / math.pi
        return {name: (out, y)}

    name = "auroc" if num_classes == 2 else "accuracy"
    metric = BinaryAUROC() if num_classes == 2 else MulticlassAccuracy(
        num_classes, average="micro"
    )  # fmt: skip
    # Clusters have different numbers of such nodes, some perhaps none.
    return Task(loss, {name: metric}, rows, weight=lambda batch: int(batch.mask.sum()))


# Runs ----------------------------------------------------------------------------


def build_model(
    args: Namespace, name: str, in_channels: int, num_classes: int
) -> GraphModel:
    """Layers of GraphSAGE, each followed by a mixer (``gps``: beside attention), or of
    ``sage`` or ``gcn`` alone.
    """
    channels, dropout = args.channels, 0.2

    def mixer() -> torch.nn.Module:
        if name == "chimera":
            return ChimeraConv(channels, channels, heads=4, state_channels=16)
        if name == "plstm":
            return PLSTMConv(channels, heads=4, order="bfs")
        if name == "k-hop":
            return KHopAttentionConv(channels, heads=4, k=2)
        return GraphMambaConv(channels)

    def layer(_: int) -> torch.nn.Module:
        local = (GCNConv if name == "gcn" else SAGEConv)(channels, channels)
        if name == "gps":
            return GPSConv(channels, local, heads=4, dropout=dropout)
        far = None if name in ("sage", "gcn") else mixer()
        return GPSLayer(channels, local, far, dropout=dropout)

    return GraphModel(
        in_channels=in_channels,
        channels=channels,
        out_channels=num_classes,
        layers=layer,
        num_layers=args.num_layers,
        head="node",
        structure={"rank": "elimination_rank"} if name == "chimera" else None,
    )


def get_args(argv: list[str] | None = None) -> Namespace:
    """The command line, completed by a recipe."""
    parser = make_parser(__doc__, ["default", "demo"], root="data")
    add = parser.add_argument
    add("--dataset", choices=DATASETS, default="generated", help="default: generated")
    add("--splits", type=natural, nargs="+", default=[0], metavar="SPLIT",
        help="which of the ten; default: 0")  # fmt: skip
    add("--models", choices=MODELS, nargs="+", default=["chimera"], metavar="MODEL",
        help=f"of {', '.join(MODELS)}; default: chimera")  # fmt: skip
    add("--num-layers", type=positive_int, help="default: the preset's, 3")
    add("--clusters", type=positive_int, help="train and test on this number of parts")

    def recipe(args: Namespace) -> dict[str, Any]:
        preset = args.preset or ("demo" if args.dataset == "generated" else "default")
        shared = {"preset": preset, "optimizer": "AdamW", "weight_decay": 0.0}
        return shared | {"batch_size": WORLD} | PRESETS[preset]

    args = parse(parser, argv, recipe)
    args.models, args.splits = (
        list(dict.fromkeys(named)) for named in (args.models, args.splits)
    )
    if max(args.splits) >= 10:
        parser.error("--splits must be below 10")
    if (args.clusters or 1) < WORLD:
        parser.error(f"{WORLD} processes need --clusters, at least as many")
    if args.clusters and find_spec("pymetis") is None:
        parser.error("--clusters needs METIS: install the extra 'metis'")
    how = f"clusters{args.clusters or 1}"
    depth = f"layers{args.num_layers}"
    parts = [args.dataset, *args.models, how, args.preset, depth, f"seed{args.seed}"]
    name = "-".join(parts)
    args.out = args.out or Path("runs", "node-classification", name)
    return args


def run(args: Namespace) -> dict[str, Any]:
    """Trains according to the command line and returns the results."""
    open_run(args)  # before the graph is read
    parts = get_parts(args)
    num_classes = 1 + max(int(part.y.max()) for part in parts)

    def train(own: Namespace) -> dict[str, Any]:
        seed_everything(own.seed)
        model = build_model(own, own.model, parts[0].num_features, num_classes)
        title = f"{own.dataset}, {own.model}, split {own.split}, preset {own.preset}"
        datasets = get_datasets(own, parts, own.split)
        return fit(own, model, get_task(num_classes), lambda: datasets, title)

    runs = {
        f"{name}/split-{split}": {"model": name, "split": split}
        for name, split in product(args.models, args.splits)
    }
    metric = next(iter(get_task(num_classes).metrics))
    return fit_all(
        args, runs.items(), train, lambda found: summarize(found, metric, "splits")
    )


if __name__ == "__main__":
    sys.exit(main(run, get_args()))
