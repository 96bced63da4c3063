"""The metrics of the benchmarks, each with its definition."""

import numpy as np
import torch
from sklearn.metrics import average_precision_score, f1_score
from torch import Tensor

__all__ = [
    "accuracy",
    "average_precision",
    "macro_f1",
    "mean_absolute_error",
    "mean_ranks",
    "mean_recall",
]


def accuracy(prediction: Tensor, target: Tensor) -> float:
    """The share of items whose class is predicted."""
    return float((prediction == target).double().mean())


def mean_recall(prediction: Tensor, target: Tensor) -> float:
    """Unweighted mean over classes of the share of their nodes that are found.

    This is the weighted accuracy of PATTERN and CLUSTER, over all nodes of a split
    together. As in the benchmark's code, the classes are those that occur in either
    argument, so one that occurs in the predictions alone counts as 0.

    Args:
        prediction: ``[nodes]``, the predicted class.
        target: ``[nodes]``, the true class.
    """
    classes = torch.cat([prediction, target]).unique()
    hits = torch.stack([target[prediction == target] == c for c in classes]).sum(1)
    sizes = torch.stack([target == c for c in classes]).sum(1)
    return float((hits / sizes.clamp(min=1)).double().mean())


def average_precision(score: Tensor, target: Tensor) -> float:
    """Unweighted mean over tasks of scikit-learn's average precision.

    Args:
        score: ``[graphs, tasks]``, any monotone score (logits will do).
        target: ``[graphs, tasks]`` of 0, 1, or NaN where unlabelled. As in OGB's
            evaluator, unlabelled entries are left out, and so are tasks without
            both classes.
    """
    values = []
    for s, t in zip(score.double().numpy().T, target.numpy().T, strict=True):
        known = ~np.isnan(t)
        if np.unique(t[known]).size == 2:
            values.append(average_precision_score(t[known], s[known]))
    return float(np.mean(values)) if values else float("nan")


def mean_absolute_error(prediction: Tensor, target: Tensor) -> float:
    """Mean over all graphs and tasks (unlabelled NaN entries left out)."""
    error = (prediction.double() - target.double()).abs()
    return float(error[~error.isnan()].mean())


def macro_f1(prediction: Tensor, target: Tensor) -> float:
    """Unweighted mean over classes of scikit-learn's F1, nodes pooled over graphs.

    Classes that occur in neither argument are left out.

    Args:
        prediction: ``[nodes]``, the predicted class.
        target: ``[nodes]``, the true class.
    """
    return float(
        f1_score(target.numpy(), prediction.numpy(), average="macro", zero_division=0)
    )


def mean_ranks(
    x: Tensor, edge_label_index: Tensor, edge_label: Tensor, ptr: Tensor
) -> dict[str, Tensor]:
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

    Args:
        x: ``[nodes, channels]``, node embeddings of a batch.
        edge_label_index: ``[2, pairs]``, numbered within the batch.
        edge_label: ``[pairs]``, 1 for contacts.
        ptr: ``[graphs + 1]``, where the nodes of each graph begin.
    """
    u, v = edge_label_index[:, edge_label.view(-1) == 1]
    sizes = ptr.diff()
    graph = torch.searchsorted(ptr, u, right=True) - 1

    # All candidates of all contacts side by side: (contact, candidate) pairs.
    counts = sizes[graph]
    contact = torch.repeat_interleave(counts)
    first = counts.cumsum(0) - counts
    candidate = torch.arange(contact.numel(), device=x.device) - first[contact]
    candidate = candidate + ptr[graph][contact]
    head = u[contact]

    x = x.double()
    score = (x[head] * x[candidate]).sum(-1)
    positive = (x[u] * x[v]).sum(-1)[contact]
    beats = (score > positive).double() + 0.5 * (score == positive).double()

    known = torch.unique(u * x.size(0) + v)
    is_contact = torch.isin(head * x.size(0) + candidate, known)
    keep = {
        "mrr_raw": candidate != v[contact],
        "mrr_filtered": ~is_contact,
        "mrr_extended_filtered": ~is_contact & (candidate != head),
    }
    contacts = torch.bincount(graph, minlength=sizes.numel())
    out = {}
    for name, mask in keep.items():
        rank = x.new_ones(u.numel()).index_add_(0, contact, beats * mask)
        total = x.new_zeros(sizes.numel()).index_add_(0, graph, 1 / rank)
        out[name] = (total / contacts)[contacts > 0]
    return out
