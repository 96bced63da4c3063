"""Compares pLSTM, Chimera and PyG's layers on graph classification (TUDataset).

The protocol is that of appendix D.4 of the pLSTM paper: cross-validation with 10
folds, 100 epochs each of AdamW at 1e-3 with batches of 64, a cosine schedule with 5
warm-up epochs, and the test accuracy at the epoch of best validation accuracy::

    python examples/tudataset.py                        # MUTAG, pLSTM
    python examples/tudataset.py --models plstm chimera gcn gin gat
    python examples/tudataset.py --dataset PROTEINS --root data/TUDataset

PyG downloads the data below ``--root`` when they are not there. Each fold is a run in
a folder of its own; ``summary.json`` has one row per model. A run can be stopped
(Ctrl-C, ``--time-limit``) and continued with ``--resume``.

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
* The standard deviation is that of the folds, not of a sample (``ddof=0``).
"""

import json
import math
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from engine import Task, Trainer, count_parameters, start
from lightning_fabric import Fabric
from sklearn.model_selection import StratifiedKFold
from support import (
    Options,
    add_arguments,
    atomic_write,
    environment,
    exit_code,
)
from torch import Tensor
from torch.nn import Module
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.datasets import FakeDataset, TUDataset
from torch_geometric.nn import MLP, GATConv, GCNConv, GINConv, GINEConv
from torch_geometric.transforms import BaseTransform
from torch_geometric.utils import degree

from pyg_chimera.nn import ChimeraConv, GPSLayer, GraphModel, PLSTMConv
from pyg_chimera.transforms import AddEliminationOrder

MODELS = ("plstm", "chimera", "gcn", "gin", "gat")


@dataclass(frozen=True)
class Protocol:
    """How every model is trained."""

    folds: int = 10
    epochs: int = 100
    batch_size: int = 64
    lr: float = 1e-3
    warmup_epochs: float = 5
    optimizer: str = "adamw"
    weight_decay: float = 1e-2


# Data --------------------------------------------------------------------------


class Stored(TUDataset):
    """A ``TUDataset`` whose root may be read-only.

    Args:
        root: The folder that holds, or will hold, ``name/raw``.
        name: The name of the data set.
        processed_root: Where to store what PyG makes of the raw files, if not there.
    """

    def __init__(
        self,
        root: str | PathLike[str],
        name: str,
        processed_root: str | PathLike[str] | None = None,
    ) -> None:
        self.processed_root = root if processed_root is None else processed_root
        super().__init__(str(root), name)

    @property
    def processed_dir(self) -> str:
        """The folder of the processed file."""
        return str(Path(self.processed_root, self.name, "processed"))


class EncodeDegree(BaseTransform):
    r"""Appends the sinusoidal encoding of its number of neighbours to each node.

    As positions in `"Attention Is All You Need" <https://arxiv.org/abs/1706.03762>`_:
    sines and cosines of wavelengths between :math:`2 \pi` and :math:`20000 \pi`.

    Args:
        channels: The size of the encoding, even.
    """

    def __init__(self, channels: int = 32) -> None:
        exponent = torch.arange(0, channels, 2) / channels
        self.frequency = torch.exp(-math.log(10_000) * exponent)

    def forward(self, data: Data) -> Data:
        """Adds columns to ``x``, which need not exist, of a copy of the data."""
        assert data.edge_index is not None
        number = degree(data.edge_index[1], data.num_nodes).view(-1, 1)
        angle = number * self.frequency
        encoded = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)
        data.x = encoded if data.x is None else torch.cat([data.x, encoded], dim=1)
        return data


def get_graphs(args: Namespace) -> list[Data]:
    """All graphs of the data set, with what the models read."""
    if args.smoke and not Path(args.root, args.dataset, "raw").is_dir():
        # Nothing is worth a download that is over in seconds.
        seed_everything(args.seed)
        dataset = FakeDataset(48, 12, 3, num_channels=7, edge_dim=4, num_classes=2)
    else:
        dataset = Stored(args.root, args.dataset, args.processed_root)
    if args.smoke:  # of all classes, by which the files are often sorted
        dataset = dataset[:: max(1, len(dataset) // 48)]
    encode, order = EncodeDegree(), AddEliminationOrder()
    graphs = []
    for data in dataset:
        data = encode(data)
        if "chimera" in args.models:
            data = order(data)
            del data.fill_index
        if data.edge_attr is not None and data.edge_attr.size(1) == 0:
            del data.edge_attr
        graphs.append(data)
    return graphs


def split_folds(
    labels: Sequence[int], folds: int, seed: int
) -> list[dict[str, list[int]]]:
    """Stratified splits for cross-validation.

    Args:
        labels: The class of each graph.
        folds: The number of folds, at least 3.
        seed: What the folds depend on, besides the labels.

    Returns:
        For each fold the indices of ``train``, ``val`` and ``test``, ascending.
    """
    if folds < 3:
        raise ValueError(f"'folds' must be at least 3, got {folds}")
    splitter = StratifiedKFold(folds, shuffle=True, random_state=seed)
    parts = [part for _, part in splitter.split(np.zeros(len(labels)), labels)]
    out = []
    for i, test in enumerate(parts):
        val = parts[(i + 1) % folds]
        train = np.setdiff1d(np.arange(len(labels)), np.concatenate([val, test]))
        out.append(
            {"train": train.tolist(), "val": val.tolist(), "test": test.tolist()}
        )
    return out


def _accuracy(rows: dict[str, Tensor]) -> dict[str, float]:
    return {"accuracy": float((rows["out"] == rows["y"]).double().mean())}


TASK = Task(
    loss=lambda out, batch: F.cross_entropy(out, batch.y),
    collect=lambda out, batch: {"out": out.argmax(-1), "y": batch.y},
    metrics=_accuracy,
    metric="accuracy",
    tie="loss",
)


# Models ------------------------------------------------------------------------


def build_model(
    name: str,
    in_channels: int,
    edge_dim: int | None,
    out_channels: int,
    num_parameters: int = 300_000,
) -> GraphModel:
    """A model of four layers and of a given size.

    Args:
        name: One of ``MODELS``.
        in_channels: The size of each node's features.
        edge_dim: The size of each edge's features, or None. GCN has no use for them.
        out_channels: The number of classes.
        num_parameters: About how many parameters there are: the feed-forward
            networks behind the layers take what these leave over.
    """
    channels = 96 if name in ("plstm", "chimera") else 128
    edge_dim = None if name == "gcn" else edge_dim
    edge_channels = None if edge_dim is None else channels

    def conv(index: int) -> Module:
        if name == "plstm":
            return PLSTMConv(
                channels,
                heads=4,
                mode="PD"[index % 2],
                edge_dim=edge_channels,
                orient="order",
            )
        if name == "chimera":
            return ChimeraConv(
                channels, heads=4, state_channels=24, edge_dim=edge_channels
            )
        if name == "gcn":
            return GCNConv(channels, channels)
        if name == "gat":
            return GATConv(channels, channels // 4, heads=4, edge_dim=edge_channels)
        net = MLP([channels] * 3, norm=None)
        return GINConv(net) if edge_dim is None else GINEConv(net)

    def build(mlp_channels: int) -> GraphModel:
        # LayerNorm of each node by itself, not of the whole graph.
        style: dict[str, Any] = {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}}
        style["act"] = "gelu"

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
            structure={"rank": "elimination_rank"} if name == "chimera" else None,
            **style,
        )

    # The size is a linear function of the networks' width.
    first, second = (count_parameters(build(width)) for width in (1, 2))
    return build(1 + max(0, round((num_parameters - first) / (second - first))))


# Cross-validation ----------------------------------------------------------------


def run_fold(
    fabric: Fabric,
    name: str,
    graphs: list[Data],
    split: dict[str, list[int]],
    options: Options,
    info: dict[str, Any],
) -> tuple[dict[str, Any], str | None]:
    """Trains one model on one fold, or what is left of it.

    Returns:
        The run's summary, and why the next one should not start, if it should not.
    """
    last = options.out / "last.pt"
    options = replace(options, resume=options.resume and last.is_file())
    fabric.seed_everything(options.seed, verbose=False)
    classes = 1 + max(int(data.y) for data in graphs)
    first = graphs[0]
    edge_dim = None if first.edge_attr is None else first.num_edge_features
    model = build_model(name, first.num_node_features, edge_dim, classes)
    datasets = {part: [graphs[i] for i in rows] for part, rows in split.items()}
    trainer = Trainer(fabric, model, datasets, TASK, options, info)
    summary = trainer.finished()
    if summary is not None:
        return summary, None
    summary = trainer.fit()
    # Also what came too late to stop this run.
    return summary, summary["stopped_by"] or trainer.agreed_reason()


def summarize(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """A model's row in the table, of the summaries of its finished folds."""
    out: dict[str, Any] = {
        "parameters": summaries[0]["config"]["parameters"],
        "folds": len(summaries),
        "seconds": round(sum(summary["seconds"] for summary in summaries), 1),
    }
    for split in ("test", "val"):
        values = [summary["best"][split]["accuracy"] for summary in summaries]
        out[f"{split}_accuracy"] = float(np.mean(values))
        out[f"{split}_accuracy_std"] = float(np.std(values))
        out[f"{split}_accuracies"] = values
    out["best_epochs"] = [summary["best"]["epoch"] for summary in summaries]
    return out


def read_rows(path: Path, protocol: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The rows of models that an earlier command left there under this protocol."""
    if not path.is_file():
        return {}
    summary = json.loads(path.read_text())
    return summary["models"] if summary.get("protocol") == protocol else {}


def table(rows: dict[str, dict[str, Any]]) -> list[str]:
    """One line for each model."""
    if not rows:
        return ["No fold is finished"]
    lines = ["model    parameters  folds  test accuracy    validation       seconds"]
    for name, row in rows.items():
        test, val = (
            f"{row[f'{split}_accuracy']:.4f} +- {row[f'{split}_accuracy_std']:.4f}"
            for split in ("test", "val")
        )
        lines.append(
            f"{name:<8} {row['parameters']:>10,}  {row['folds']:>5}  {test} "
            f"{val} {row['seconds']:>7.0f}"
        )
    return lines


# Command line --------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> Namespace:
    """Reads the command line and fills in what depends on it."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--dataset", default="MUTAG", help="any name of a TUDataset")
    parser.add_argument(
        "--root", default="data/TUDataset", help="folder of the data sets"
    )
    parser.add_argument(
        "--processed-root", type=Path, help="for a --root that is read-only"
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=["plstm"], metavar="MODEL",
        help=f"of {', '.join(MODELS)}; default: plstm",
    )  # fmt: skip
    parser.add_argument("--folds", type=int, help="at least 3; default: 10")
    parser.add_argument("--smoke", action="store_true", help="run in a few seconds")
    add_arguments(parser)
    args = parser.parse_args(argv)

    if args.resume and args.overwrite:
        parser.error("--resume and --overwrite exclude each other")
    if args.folds is not None and args.folds < 3:
        parser.error("--folds must be at least 3: one to test, one to validate")
    if args.out is None:
        kind = "smoke" if args.smoke else f"seed{args.seed}"
        args.out = Path("runs", "tudataset", f"{args.dataset}-{kind}")
    if args.smoke:
        args.overwrite = not args.resume
    return args


def run(args: Namespace) -> dict[str, Any]:
    """Trains as told on the command line and returns the summary of all models."""
    protocol = Protocol(folds=3, epochs=2, batch_size=16) if args.smoke else Protocol()
    options = replace(Options.choose(args, protocol), quiet=True)
    folds = args.folds or protocol.folds
    fabric = start(options)
    with fabric.rank_zero_first():
        graphs = get_graphs(args)
    if args.resume and not any(options.out.glob("*/fold-*/last.pt")):
        raise SystemExit(f"--resume: there is no run in {options.out}")
    splits = split_folds([int(data.y) for data in graphs], folds, args.seed)

    def log(*lines: str) -> None:
        if fabric.is_global_zero:
            print(*lines, sep="\n", flush=True)

    stored = not args.smoke or Path(args.root, args.dataset, "raw").is_dir()
    name = args.dataset if stored else "generated"
    log(f"{name}: {len(graphs):,} graphs, {folds} folds; results in {options.out}")
    shared = {"dataset": args.dataset, "graphs": len(graphs), "folds": folds}
    shared |= {"split_seed": args.seed}
    result: dict[str, Any] = {"protocol": {**shared, **options.identity()}}
    result["protocol"]["epochs"] = options.epochs
    path = options.out / "summary.json"
    rows = read_rows(path, result["protocol"])
    result |= {**environment(fabric.device), "stopped_by": None, "models": rows}

    def write(part: Path) -> None:
        part.write_text(json.dumps(result, indent=2) + "\n")

    models = list(dict.fromkeys(args.models))
    for name, (fold, split) in product(models, enumerate(splits)):
        if fold == 0:
            summaries: list[dict[str, Any]] = []
            rows.pop(name, None)
        # Each run draws weights and orders of its own.
        at = options.out / name / f"fold-{fold}"
        own = replace(options, out=at, seed=args.seed * folds + fold)
        info = {**shared, "model": name, "fold": fold}
        summary, reason = run_fold(fabric, name, graphs, split, own, info)
        if summary["stopped_by"] is None:
            summaries.append(summary)
            rows[name] = summarize(summaries)
            best = summary["best"]
            log(
                f"{name} fold {fold + 1}/{folds}: validation "
                f"{best['val']['accuracy']:.4f} in epoch {best['epoch']}, test there "
                f"{best['test']['accuracy']:.4f}, {summary['seconds']:.1f} s"
            )
        complete = len(summaries) == folds and name == models[-1]
        result["stopped_by"] = None if complete else reason
        if fabric.is_global_zero:
            atomic_write(path, write)
        if result["stopped_by"] is not None:
            break
    log(*table(rows))
    return result


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    return exit_code(run(parse(argv))["stopped_by"])


if __name__ == "__main__":
    sys.exit(main())
