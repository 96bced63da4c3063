"""Trains Chimera, or a baseline, on the Long Range Graph Benchmark.

Without arguments it trains a small model on generated peptides, with no download::

    python examples/lrgb.py

The five data sets are downloaded by PyG below ``--root`` when they are not there;
Peptides-func is also read from its raw file of SMILES strings, when ``--root`` holds
``raw/peptide_multi_class_dataset.csv.gz`` and ``splits.json``::

    python examples/lrgb.py --dataset peptides-struct --preset paper
    python examples/lrgb.py --root peptides-functional --preset released
    python examples/lrgb.py --baseline gps              # the same budget
    torchrun --nproc_per_node=2 examples/lrgb.py        # several processes

A run can be stopped (Ctrl-C, ``--time-limit``) and continued with ``--resume``.
"""

import os
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from engine import Task, Trainer, count_parameters, start
from metrics import average_precision, macro_f1, mean_absolute_error, mean_ranks
from presets import BASELINES, PRESETS, build_model, get_recipe, match_width
from support import Options, add_arguments
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.datasets import LRGBDataset
from torch_geometric.transforms import BaseTransform, Compose

from pyg_chimera.datasets import (
    ATOM_FEATURE_SIZES,
    BOND_FEATURE_SIZES,
    GeneratedPeptides,
    PeptidesFunctional,
)
from pyg_chimera.transforms import AddEliminationOrder

SPLITS = ("train", "val", "test")
_MOLECULE = {"in_channels": ATOM_FEATURE_SIZES, "edge_dim": BOND_FEATURE_SIZES}
_SUPERPIXEL = {"in_channels": 14, "edge_dim": 2}
#: What ``build_model`` must know about each data set.
DATASETS: dict[str, dict[str, Any]] = {
    "generated": {
        **_MOLECULE,
        "out_channels": GeneratedPeptides.num_tasks,
        "head": "graph",
    },
    "peptides-func": {**_MOLECULE, "out_channels": 10, "head": "graph"},
    "peptides-struct": {**_MOLECULE, "out_channels": 11, "head": "graph"},
    "pascalvoc-sp": {**_SUPERPIXEL, "out_channels": 21, "head": "node"},
    "coco-sp": {**_SUPERPIXEL, "out_channels": 81, "head": "node"},
    # Node embeddings, whose inner products score pairs.
    "pcqm-contact": {**_MOLECULE, "out_channels": None, "head": "node"},
}


# Tasks -------------------------------------------------------------------------


def _multi_label_loss(out: Tensor, batch: Batch) -> Tensor:
    known = ~batch.y.isnan()
    return F.binary_cross_entropy_with_logits(out[known], batch.y[known])


def _weighted_cross_entropy(out: Tensor, batch: Batch) -> Tensor:
    """The benchmark's loss: classes weigh as much as the batch is of others."""
    counts = torch.bincount(batch.y, minlength=out.size(1))
    weight = (batch.y.numel() - counts) / batch.y.numel() * (counts > 0)
    return F.cross_entropy(out, batch.y, weight=weight.to(out.dtype))


def _contact_loss(out: Tensor, batch: Batch) -> Tensor:
    u, v = batch.edge_label_index
    score = (out[u] * out[v]).sum(-1)
    return F.binary_cross_entropy_with_logits(score, batch.edge_label.view(-1).float())


def get_task(name: str) -> Task:
    """Loss and metrics of a data set."""

    def pair(out: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"out": out.float(), "y": batch.y}

    if name in ("generated", "peptides-func"):
        return Task(
            _multi_label_loss,
            pair,
            lambda rows: {"ap": average_precision(rows["out"], rows["y"])},
            metric="ap",
        )
    if name == "peptides-struct":
        return Task(
            lambda out, batch: F.l1_loss(out, batch.y),
            pair,
            lambda rows: {"mae": mean_absolute_error(rows["out"], rows["y"])},
            metric="mae",
            maximize=False,
        )
    if name == "pcqm-contact":
        return Task(
            _contact_loss,
            lambda out, batch: mean_ranks(
                out, batch.edge_label_index, batch.edge_label, batch.ptr
            ),
            lambda rows: {key: float(value.mean()) for key, value in rows.items()},
            metric="mrr_raw",
        )
    return Task(
        _weighted_cross_entropy,
        lambda out, batch: {"out": out.argmax(-1), "y": batch.y},
        lambda rows: {"macro_f1": macro_f1(rows["out"], rows["y"])},
        metric="macro_f1",
    )


# Data --------------------------------------------------------------------------


class EliminationRank(AddEliminationOrder):
    """The elimination order without the fill-in, which is large on large graphs."""

    def forward(self, data: Data) -> Data:
        """Adds the rank to a copy of the data."""
        data = super().forward(data)
        del data[self.index_name]
        return data


class Standardize(BaseTransform):
    """Gives every feature of nodes and edges the training set's mean 0 and std 1."""

    def __init__(self, train: LRGBDataset) -> None:
        self.stats = {
            name: (values.mean(0), values.std(0).clamp(min=1e-6))
            for name, values in (("x", train.x), ("edge_attr", train.edge_attr))
        }

    def forward(self, data: Data) -> Data:
        """Standardizes a copy of the data."""
        for name, (mean, std) in self.stats.items():
            data[name] = (data[name] - mean) / std
        return data


def get_datasets(args: Namespace) -> dict[str, Any]:
    """The three splits, made or downloaded when needed."""
    rank = EliminationRank()
    if args.dataset == "generated":
        size = "small" if args.preset in ("demo", "smoke") else "full"
        datasets = {
            split: GeneratedPeptides(
                args.root,
                split,
                size,
                num_graphs=36 if args.smoke else None,
                num_workers=args.num_workers,
                pre_transform=rank,
            )
            for split in SPLITS
        }
    elif args.dataset == "peptides-func" and PeptidesFunctional.holds_raw_files(
        args.root
    ):
        writable = os.access(args.root, os.W_OK)
        processed_root = args.processed_root or (args.root if writable else None)
        if processed_root is None:
            raise SystemExit(f"{args.root} is read-only: pass --processed-root")
        datasets = {
            split: PeptidesFunctional(
                args.root,
                split,
                str(processed_root),
                num_workers=args.num_workers,
                pre_transform=rank,
            )
            for split in SPLITS
        }
    else:
        datasets = {
            split: LRGBDataset(args.root, args.dataset, split, pre_transform=rank)
            for split in SPLITS
        }
    transforms: list[BaseTransform] = []
    if "elimination_rank" not in datasets["train"][0]:
        transforms.append(rank)  # somebody else made the processed files
    if args.dataset in ("pascalvoc-sp", "coco-sp"):
        transforms.append(Standardize(datasets["train"]))
    if transforms:
        for dataset in datasets.values():
            dataset.transform = Compose(transforms)
    if args.smoke:
        datasets = {split: dataset[:24] for split, dataset in datasets.items()}
    return datasets


# Command line --------------------------------------------------------------------


def parse(argv: list[str] | None = None) -> Namespace:
    """Reads the command line and fills in what depends on it."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dataset",
        choices=sorted(DATASETS),
        help="default: peptides-func if --root holds its raw file, else generated",
    )
    parser.add_argument("--root", default="data", help="folder of the data")
    parser.add_argument(
        "--processed-root", type=Path, help="for a --root that is read-only"
    )
    parser.add_argument(
        "--preset",
        choices=[name for name in PRESETS if name != "smoke"],
        help="default: demo for generated peptides, else released",
    )
    parser.add_argument("--baseline", choices=BASELINES, help="instead of Chimera")
    parser.add_argument("--smoke", action="store_true", help="run in a few seconds")
    add_arguments(parser)
    args = parser.parse_args(argv)

    if args.dataset is None:
        raw = PeptidesFunctional.holds_raw_files(args.root)
        args.dataset = "peptides-func" if raw else "generated"
    if args.smoke:
        if args.preset is not None:
            parser.error("--smoke has a preset of its own")
        args.preset = "smoke"
        args.overwrite = not args.resume
    elif args.preset is None:
        args.preset = "demo" if args.dataset == "generated" else "released"
    if args.resume and args.overwrite:
        parser.error("--resume and --overwrite exclude each other")
    if args.out is None:
        name = args.baseline or "chimera"
        run = f"{args.dataset}-{name}-{args.preset}-seed{args.seed}"
        args.out = Path("runs", "lrgb", run)
    return args


def run(args: Namespace) -> dict[str, Any]:
    """Trains as told on the command line and returns the summary."""
    data = DATASETS[args.dataset]
    name = args.baseline or "chimera"
    recipe = get_recipe(args.preset, args.dataset)
    options = Options.choose(args, recipe)
    fabric = start(options)
    with fabric.rank_zero_first():
        datasets = get_datasets(args)
    budget = ""
    if args.baseline:
        target = count_parameters(build_model(recipe, **data))
        recipe = match_width(recipe, name, **data)
        budget = f" (Chimera: {target:,})"
    fabric.seed_everything(args.seed, verbose=False)
    model = build_model(recipe, name, **data)
    info = {"dataset": args.dataset, "model": name, "preset": args.preset}
    info |= {key: value for key, value in asdict(recipe).items() if key != "epochs"}
    task = get_task(args.dataset)
    trainer = Trainer(fabric, model, datasets, task, options, info)
    sizes = " / ".join(f"{len(datasets[split]):,}" for split in SPLITS)
    trainer.log(
        f"{args.dataset}: {sizes} graphs; {name}, preset {args.preset}: "
        f"{recipe.num_layers} layers, width {recipe.channels}, "
        f"{count_parameters(model):,} parameters{budget}",
        f"{fabric.world_size} process(es) on {fabric.device.type}; results in "
        f"{options.out}",
    )
    summary = trainer.fit()
    best, metric = summary["best"], summary["metric"]
    if best is not None:
        tested = "  ".join(
            f"{key} {value:.4f}" for key, value in best["test"].items() if key != "loss"
        )
        trainer.log(
            f"Best validation {metric} {best['val'][metric]:.4f} in epoch "
            f"{best['epoch']}; test there: {tested}"
        )
    return summary


def main(argv: list[str] | None = None) -> int:
    """Runs the command line and returns the exit code."""
    summary = run(parse(argv))
    # As shells have it: 130 after Ctrl-C. A time limit is a regular end.
    return {"SIGINT": 130, "SIGTERM": 143}.get(summary["stopped_by"], 0)


if __name__ == "__main__":
    sys.exit(main())
