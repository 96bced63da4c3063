"""What the examples' data sets hold, and how predictions for them are judged."""

from typing import Any

import torch
import torch.nn.functional as F
from engine import Task
from metrics import (
    accuracy,
    average_precision,
    macro_f1,
    mean_absolute_error,
    mean_ranks,
    mean_recall,
)
from torch import Tensor
from torch_geometric.data import Batch

from pyg_chimera.datasets import (
    ATOM_FEATURE_SIZES,
    BOND_FEATURE_SIZES,
    GeneratedPeptides,
)

_MOLECULE = {"in_channels": ATOM_FEATURE_SIZES, "edge_dim": BOND_FEATURE_SIZES}
_SUPERPIXEL = {"in_channels": 14, "edge_dim": 2}
_ONE_KIND = (1,)  # edges without features: all are of the same category
#: What a model must know about each data set.
DATASETS: dict[str, dict[str, Any]] = {
    "generated": {
        **_MOLECULE,
        "out_channels": GeneratedPeptides.num_tasks,
        "head": "graph",
    },
    # The Long Range Graph Benchmark.
    "peptides-func": {**_MOLECULE, "out_channels": 10, "head": "graph"},
    "peptides-struct": {**_MOLECULE, "out_channels": 11, "head": "graph"},
    "pascalvoc-sp": {**_SUPERPIXEL, "out_channels": 21, "head": "node"},
    "coco-sp": {**_SUPERPIXEL, "out_channels": 81, "head": "node"},
    # Node embeddings, whose inner products score pairs.
    "pcqm-contact": {**_MOLECULE, "out_channels": None, "head": "node"},
    # Benchmarking Graph Neural Networks. Pixels have colours and a position.
    "mnist": {"in_channels": 3, "edge_dim": 1, "out_channels": 10, "head": "graph"},
    "cifar10": {"in_channels": 5, "edge_dim": 1, "out_channels": 10, "head": "graph"},
    "pattern": {
        "in_channels": 3,
        "edge_dim": _ONE_KIND,
        "out_channels": 2,
        "head": "node",
    },
    "cluster": {
        "in_channels": 7,
        "edge_dim": _ONE_KIND,
        "out_channels": 6,
        "head": "node",
    },
    # The local degree profile has five entries.
    "malnet-tiny": {
        "in_channels": 5,
        "edge_dim": _ONE_KIND,
        "out_channels": 5,
        "head": "graph",
    },
}


def _multi_label_loss(out: Tensor, batch: Batch) -> Tensor:
    known = ~batch.y.isnan()
    return F.binary_cross_entropy_with_logits(out[known], batch.y[known])


def _cross_entropy(out: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(out, batch.y)


def _weighted_cross_entropy(out: Tensor, batch: Batch) -> Tensor:
    """The benchmarks' loss: classes weigh as much as the batch is of others."""
    counts = torch.bincount(batch.y, minlength=out.size(1))
    weight = (batch.y.numel() - counts) / batch.y.numel() * (counts > 0)
    if not weight.any():  # there is but one class
        weight = torch.ones_like(weight)
    return F.cross_entropy(out, batch.y, weight=weight.to(out.dtype))


def _contact_loss(out: Tensor, batch: Batch) -> Tensor:
    u, v = batch.edge_label_index
    score = (out[u] * out[v]).sum(-1)
    return F.binary_cross_entropy_with_logits(score, batch.edge_label.view(-1).float())


def get_task(name: str) -> Task:
    """Loss and metrics of a data set."""

    def pair(out: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"out": out.float(), "y": batch.y}

    def classes(out: Tensor, batch: Batch) -> dict[str, Tensor]:
        return {"out": out.argmax(-1), "y": batch.y}

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
    if name in ("pattern", "cluster"):
        return Task(
            _weighted_cross_entropy,
            classes,
            lambda rows: {"accuracy_sbm": mean_recall(rows["out"], rows["y"])},
            metric="accuracy_sbm",
        )
    if name in ("pascalvoc-sp", "coco-sp"):
        return Task(
            _weighted_cross_entropy,
            classes,
            lambda rows: {"macro_f1": macro_f1(rows["out"], rows["y"])},
            metric="macro_f1",
        )
    return Task(
        _cross_entropy,
        classes,
        lambda rows: {"accuracy": accuracy(rows["out"], rows["y"])},
        metric="accuracy",
    )
