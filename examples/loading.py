"""The data sets of the examples, with what a recipe wants to know of each graph."""

import os
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.datasets import GNNBenchmarkDataset, LRGBDataset, MalNetTiny
from torch_geometric.transforms import BaseTransform, Compose, LocalDegreeProfile

from pyg_chimera.datasets import GeneratedPeptides, PeptidesFunctional

SPLITS = ("train", "val", "test")


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


class AppendPosition(BaseTransform):
    """Appends where pixels lie in the image to their colours."""

    def forward(self, data: Data) -> Data:
        """Adds the columns of ``pos`` to ``x`` of a copy of the data."""
        data.x = torch.cat([data.x, data.pos], dim=1).float()
        return data


class OneKindOfEdge(BaseTransform):
    """Gives all edges the same category, for models that update edge features."""

    def forward(self, data: Data) -> Data:
        """Sets ``edge_attr``, a column of zeros, of a copy of the data."""
        edge_index = data.edge_index
        data.edge_attr = edge_index.new_zeros(edge_index.size(1), 1)
        return data


class _Kept:
    """A data set whose processed files lie in a folder of this name."""

    def __init__(self, *args: Any, folder: str, **kwargs: Any) -> None:
        self.folder = folder
        super().__init__(*args, **kwargs)

    @property
    def processed_dir(self) -> str:
        return str(Path(super().processed_dir).with_name(self.folder))


class _Generated(_Kept, GeneratedPeptides):
    pass


class _Raw(_Kept, PeptidesFunctional):
    pass


class _LRGB(_Kept, LRGBDataset):
    pass


class _GNNBenchmark(_Kept, GNNBenchmarkDataset):
    pass


class _MalNetTiny(_Kept, MalNetTiny):
    pass


def get_datasets(
    args: Namespace,
    pre_transforms: Sequence[BaseTransform],
    adds: Sequence[str] = (),
    folder: str = "processed",
) -> dict[str, Any]:
    """The three splits, made or downloaded when needed.

    Args:
        args: The command line, see ``command.make_parser``.
        pre_transforms: What is computed once for each graph.
        adds: The attributes that they add. Should somebody else have made the
            processed files without them, they are computed at each access.
        folder: Where the processed files are kept, beside the raw ones. Recipes that
            store other things need folders of their own.
    """
    name, root = args.dataset, args.root
    features: list[BaseTransform] = []  # before the others
    if name in ("mnist", "cifar10"):
        features.append(AppendPosition())
    if name == "malnet-tiny":
        features.append(LocalDegreeProfile())
    steps = [*features, *pre_transforms]
    # On its own as it is: PyG compares the names that transforms print.
    stored = steps[0] if len(steps) == 1 else Compose(steps)

    options = {"folder": folder, "pre_transform": stored}
    if name == "generated":
        make = partial(
            _Generated,
            root,
            preset="small" if args.preset in ("demo", "smoke") else "full",
            num_graphs=36 if args.smoke else None,
            num_workers=args.num_workers,
        )
    elif name == "peptides-func" and PeptidesFunctional.holds_raw_files(root):
        writable = os.access(root, os.W_OK)
        processed_root = args.processed_root or (root if writable else None)
        if processed_root is None:
            raise SystemExit(f"{root} is read-only: pass --processed-root")
        make = partial(
            _Raw,
            root,
            processed_root=str(processed_root),
            num_workers=args.num_workers,
        )
    elif name in ("mnist", "cifar10", "pattern", "cluster"):
        make = partial(_GNNBenchmark, root, name.upper())
    elif name == "malnet-tiny":
        make = partial(_MalNetTiny, str(Path(root, name)))
    else:
        make = partial(_LRGB, root, name)
    datasets: dict[str, Any] = {split: make(split=split, **options) for split in SPLITS}

    transforms: list[BaseTransform] = []
    if any(attr not in datasets["train"][0] for attr in adds):
        transforms.append(Compose(pre_transforms))
    if name in ("pascalvoc-sp", "coco-sp"):
        transforms.append(Standardize(datasets["train"]))
    if name in ("pattern", "cluster", "malnet-tiny"):
        transforms.append(OneKindOfEdge())
    if transforms:
        for dataset in datasets.values():
            dataset.transform = Compose(transforms)
    if args.smoke:
        datasets = {split: dataset[:24] for split, dataset in datasets.items()}
    return datasets
