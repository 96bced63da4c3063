"""The benchmarks of ``lrgb.py`` and ``graph_mamba.py``: data sets, losses, metrics."""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import Task
from sklearn.metrics import average_precision_score
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.datasets import GNNBenchmarkDataset, LRGBDataset, MalNetTiny
from torch_geometric.transforms import BaseTransform, Compose, LocalDegreeProfile
from torchmetrics import MeanAbsoluteError, MeanMetric, Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score
from torchmetrics.utilities import dim_zero_cat
from tqdm import tqdm

from pyg_chimera.datasets import (
    ATOM_FEATURE_SIZES,
    BOND_FEATURE_SIZES,
    GeneratedPeptides,
    PeptidesFunctional,
)

MOLECULE = {"in_channels": ATOM_FEATURE_SIZES, "edge_dim": BOND_FEATURE_SIZES}
SUPERPIXEL = {"in_channels": 14, "edge_dim": 2, "head": "node"}
PIXEL = {"edge_dim": 1, "out_channels": 10, "head": "graph"}
BARE = {"edge_dim": (1,)}  # edges have no features: all are of one category
#: The arguments of a model for each data set.
LRGB: dict[str, dict[str, Any]] = {
    "generated": {**MOLECULE, "out_channels": 6, "head": "graph"},
    "peptides-func": {**MOLECULE, "out_channels": 10, "head": "graph"},
    "peptides-struct": {**MOLECULE, "out_channels": 11, "head": "graph"},
    "pascalvoc-sp": {**SUPERPIXEL, "out_channels": 21},
    "coco-sp": {**SUPERPIXEL, "out_channels": 81},
    # Node embeddings as wide as the model, whose inner products score pairs.
    "pcqm-contact": {**MOLECULE, "out_channels": None, "head": "node"},
}
DATASETS = LRGB | {
    "mnist": {**PIXEL, "in_channels": 3},  # colours and position
    "cifar10": {**PIXEL, "in_channels": 5},
    "pattern": {**BARE, "in_channels": 3, "out_channels": 2, "head": "node"},
    "cluster": {**BARE, "in_channels": 7, "out_channels": 6, "head": "node"},
    # The local degree profile has five entries.
    "malnet-tiny": {**BARE, "in_channels": 5, "out_channels": 5, "head": "graph"},
}


# Losses and metrics --------------------------------------------------------------


def weighted_cross_entropy(out: Tensor, batch: Batch) -> Tensor:
    """The benchmarks' loss: a class is weighted by the share of the other classes."""
    counts = torch.bincount(batch.y, minlength=out.size(1))
    weight = (batch.y.numel() - counts) / batch.y.numel() * (counts > 0)
    if not weight.any():  # there is only one class
        weight = torch.ones_like(weight)
    return F.cross_entropy(out, batch.y, weight=weight.to(out.dtype))


def multi_label_loss(out: Tensor, batch: Batch) -> Tensor:
    """Binary cross-entropy of the known labels."""
    known = ~batch.y.isnan()
    return F.binary_cross_entropy_with_logits(out[known], batch.y[known])


def contact_loss(out: Tensor, batch: Batch) -> Tensor:
    """Binary cross-entropy of inner products."""
    u, v = batch.edge_label_index
    label = batch.edge_label.view(-1).to(out.dtype)
    return F.binary_cross_entropy_with_logits((out[u] * out[v]).sum(-1), label)


class AveragePrecision(Metric):
    """The mean of scikit-learn's average precision over labels with both classes.

    As in OGB's evaluator, entries without a label (NaN) are left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.add_state("scores", [], dist_reduce_fx="cat")
        self.add_state("labels", [], dist_reduce_fx="cat")

    def update(self, out: Tensor, y: Tensor) -> None:
        self.scores.append(out)
        self.labels.append(y)

    def compute(self) -> Tensor:
        scores, labels = (dim_zero_cat(x).cpu() for x in (self.scores, self.labels))
        values = [
            average_precision_score(label[label >= 0], score[label >= 0])
            for score, label in zip(scores.T, labels.T, strict=True)
            if (label == 0).any() and (label == 1).any()
        ]
        return torch.tensor(values).mean()


def mean_ranks(out: Tensor, batch: Batch) -> dict[str, Tensor]:
    r"""Mean reciprocal ranks of contacts, one value per graph and definition.

    The score of a pair is :math:`x_u^T x_v`. For each contact :math:`(u, v)`, that
    is, each labelled pair with label 1, the tail :math:`v` is ranked among
    candidates :math:`w` of the same graph by the score of :math:`(u, w)`. Ties count
    half. The published numbers for PCQM-Contact use three sets of candidates, which
    must not be compared with each other:

    * ``mrr_raw``: every node but :math:`v`, so the other contacts of :math:`u` and
      :math:`u` itself compete. This is the benchmark's own code.
    * ``mrr_filtered``: without the other contacts of :math:`u`.
    * ``mrr_extended_filtered``: without these and without :math:`u` itself.

    Reciprocal ranks are averaged within a graph first, then over graphs. Graphs
    without contacts have no value.
    """
    u, v = batch.edge_label_index[:, batch.edge_label.view(-1) == 1]
    graph = batch.batch[u]
    # All pairs (contact, candidate), concatenated.
    counts = batch.ptr.diff()[graph]
    contact = torch.repeat_interleave(counts)
    first = counts.cumsum(0) - counts - batch.ptr[graph]
    candidate = torch.arange(contact.numel(), device=out.device) - first[contact]
    head = u[contact]

    x = out.double()
    score = (x[head] * x[candidate]).sum(-1)
    positive = (x[u] * x[v]).sum(-1)[contact]
    beats = (score > positive).double() + 0.5 * (score == positive).double()

    n = x.size(0)
    is_contact = torch.isin(head * n + candidate, u * n + v)
    competes = {
        "mrr_raw": candidate != v[contact],
        "mrr_filtered": ~is_contact,
        "mrr_extended_filtered": ~is_contact & (candidate != head),
    }
    contacts = torch.bincount(graph, minlength=batch.num_graphs)
    values = {}
    for name, mask in competes.items():
        rank = x.new_ones(u.numel()).index_add_(0, contact, beats * mask)
        total = x.new_zeros(contacts.numel()).index_add_(0, graph, 1 / rank)
        values[name] = (total / contacts)[contacts > 0]
    return values


def get_task(name: str) -> Task:
    """Loss and metrics of a data set."""
    classes = DATASETS[name]["out_channels"]
    if name in ("generated", "peptides-func"):
        return Task(
            multi_label_loss,
            {"ap": AveragePrecision()},
            lambda out, b: {"ap": (out, b.y)},
        )
    if name == "peptides-struct":
        return Task(
            lambda out, b: F.l1_loss(out, b.y),
            {"mae": MeanAbsoluteError()},
            lambda out, b: {"mae": (out, b.y)},
            mode="min",
        )
    if name == "pcqm-contact":
        kinds = ("mrr_raw", "mrr_filtered", "mrr_extended_filtered")
        return Task(
            contact_loss,
            {kind: MeanMetric() for kind in kinds},
            lambda out, b: {k: (v.float(),) for k, v in mean_ranks(out, b).items()},
        )
    if name in ("pascalvoc-sp", "coco-sp"):
        key, metric = "macro_f1", MulticlassF1Score(classes)
    elif name in ("pattern", "cluster"):  # the mean of the classes' accuracies
        key, metric = "accuracy_sbm", MulticlassAccuracy(classes)
    else:
        key, metric = "accuracy", MulticlassAccuracy(classes, average="micro")
    plain = key == "accuracy"
    return Task(
        (lambda out, b: F.cross_entropy(out, b.y)) if plain else weighted_cross_entropy,
        {key: metric},
        lambda out, b: {key: (out, b.y)},
    )


# Data sets -----------------------------------------------------------------------


class Standardize(BaseTransform):
    """Scales features of nodes and edges to mean 0 and std 1 on the training set."""

    def __init__(self, train: LRGBDataset) -> None:
        self.stats = {
            name: (values.mean(0), values.std(0).clamp(min=1e-6))
            for name, values in (("x", train.x), ("edge_attr", train.edge_attr))
        }

    def forward(self, data: Data) -> Data:
        for name, (mean, std) in self.stats.items():
            data[name] = (data[name] - mean) / std
        return data


class AppendPosition(BaseTransform):
    """Appends the positions of pixels to their colours."""

    def forward(self, data: Data) -> Data:
        data.x = torch.cat([data.x, data.pos], dim=1).float()
        return data


class OneKindOfEdge(BaseTransform):
    """Gives all edges one category, for models that update edge features."""

    def forward(self, data: Data) -> Data:
        data.edge_attr = data.edge_index.new_zeros(data.num_edges, 1)
        return data


class Progress(BaseTransform):
    """Shows how many graphs have been processed, where PyG does not."""

    bar: tqdm | None = None

    def forward(self, data: Data) -> Data:
        if self.bar is None:
            self.bar = tqdm(desc="Processing", unit=" graphs")
        self.bar.update()
        return data

    def __getstate__(self) -> dict[str, Any]:
        return {}  # worker processes of a loader show nothing


class Stored:
    """A data set with its own folder for processed files."""

    def __init__(self, *args: Any, folder: Path, **kwargs: Any) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OSError(f"{error}: pass --processed-root") from None
        self.folder = folder
        super().__init__(*args, **kwargs)

    @property
    def processed_dir(self) -> str:
        return str(self.folder)


class _Generated(Stored, GeneratedPeptides): ...


class _Raw(Stored, PeptidesFunctional): ...


class _LRGB(Stored, LRGBDataset): ...


class _GNNBenchmark(Stored, GNNBenchmarkDataset): ...


class _MalNetTiny(Stored, MalNetTiny): ...


def choose_dataset(parser: ArgumentParser, args: Namespace) -> str:
    """The requested data set, or the one that ``--root`` holds."""
    if args.dataset is not None:
        return args.dataset
    if PeptidesFunctional.holds_raw_files(args.root):
        return "peptides-func"
    if args.root != parser.get_default("root"):
        parser.error(f"--root {args.root} has no raw Peptides-func: pass --dataset")
    return "generated"


def get_datasets(
    args: Namespace, transforms: Mapping[str, BaseTransform]
) -> dict[str, Any]:
    """The three splits, generated or downloaded if necessary.

    Args:
        args: The command line.
        transforms: Transforms to apply once, before graphs are stored. Their names
            become part of the name of the folder of processed files.
    """
    name, root, smoke = args.dataset, str(args.root), args.preset == "smoke"
    steps, place = [*transforms.values()], name
    if name == "generated":
        size = "small" if args.preset in ("demo", "smoke") else "full"
        num_graphs, place = 36 if smoke else None, f"generated-{args.preset}"
        make = partial(_Generated, root, preset=size, num_graphs=num_graphs)
    elif name == "peptides-func" and PeptidesFunctional.holds_raw_files(root):
        make, place = partial(_Raw, root), ""
    elif name in ("mnist", "cifar10", "pattern", "cluster"):
        make, place = partial(_GNNBenchmark, root, name.upper()), name.upper()
    elif name == "malnet-tiny":
        make = partial(_MalNetTiny, str(args.root / name))
    else:
        make = partial(_LRGB, root, name)
    if name in ("mnist", "cifar10"):
        steps.insert(0, AppendPosition())
    if name == "malnet-tiny":
        steps.insert(0, LocalDegreeProfile())
    if name not in LRGB:  # the classes of these show progress themselves
        steps.append(Progress())
    folder = (args.processed_root or args.root) / place
    folder = folder / "-".join(["processed", *transforms])
    datasets = {
        split: make(split=split, folder=folder, pre_transform=Compose(steps))
        for split in ("train", "val", "test")
    }
    transform = None
    if name in ("pascalvoc-sp", "coco-sp"):
        transform = Standardize(datasets["train"])
    if name in ("pattern", "cluster", "malnet-tiny"):
        transform = OneKindOfEdge()
    for dataset in datasets.values():
        dataset.transform = transform
    return {s: d[:24] if smoke else d for s, d in datasets.items()}
