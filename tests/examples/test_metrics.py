import math

import numpy as np
import pytest
import torch
from metrics import average_precision, macro_f1, mean_absolute_error, mean_ranks
from sklearn.metrics import average_precision_score, f1_score

NAN = float("nan")


def test_average_precision_against_sklearn():
    score = torch.randn(50, 4)
    target = (torch.rand(50, 4) < 0.3).float()
    expected = average_precision_score(target.numpy(), score.numpy(), average="macro")
    assert average_precision(score, target) == pytest.approx(expected, abs=1e-12)
    # Ranks alone matter.
    assert average_precision(5 * score - 3, target) == pytest.approx(expected, abs=1e-6)


def test_average_precision_by_hand():
    # Task 0: positives are first and third of three known ones: (1 + 2/3) / 2.
    # Task 1 has one class only and is left out.
    score = torch.tensor([[3.0, 1.0], [2.0, 2.0], [1.0, 3.0], [9.0, 0.0]])
    target = torch.tensor([[1, 1], [0, 1], [1, 1], [NAN, NAN]])
    assert average_precision(score, target) == pytest.approx(5 / 6)
    assert math.isnan(average_precision(score[:, 1:], target[:, 1:]))


def test_mean_absolute_error():
    prediction, target = torch.randn(7, 3), torch.randn(7, 3)
    expected = np.abs(prediction.numpy() - target.numpy()).mean()
    assert mean_absolute_error(prediction, target) == pytest.approx(expected)
    target = torch.tensor([[1.0, NAN], [NAN, 4.0]])
    assert mean_absolute_error(torch.zeros(2, 2), target) == 2.5


def test_macro_f1_against_sklearn():
    prediction, target = torch.randint(5, (200,)), torch.randint(5, (200,))
    expected = f1_score(target.numpy(), prediction.numpy(), average="macro")
    assert macro_f1(prediction, target) == pytest.approx(expected, abs=1e-12)


def test_macro_f1_by_hand():
    prediction = torch.tensor([0, 0, 1, 5])
    target = torch.tensor([0, 1, 1, 7])
    # F1 of 0 and 1 is 2/3; 5 and 7 are never right; 2, 3, 4, 6 do not occur.
    assert macro_f1(prediction, target) == pytest.approx((2 / 3 + 2 / 3) / 4)


def ranks_by_loops(x, pairs, labels, ptr):
    """The definitions, one contact and one candidate at a time."""
    out = {"mrr_raw": [], "mrr_filtered": [], "mrr_extended_filtered": []}
    contacts = {(u, v) for (u, v), label in zip(pairs, labels, strict=True) if label}
    for begin, end in zip(ptr[:-1], ptr[1:], strict=True):
        values = {name: [] for name in out}
        for (u, v), label in zip(pairs, labels, strict=True):
            if not label or not begin <= u < end:
                continue
            own = float(x[u] @ x[v])
            rank = dict.fromkeys(out, 1.0)
            for w in range(begin, end):
                if w == v:
                    continue
                other = float(x[u] @ x[w])
                beats = 1.0 if other > own else 0.5 if other == own else 0.0
                rank["mrr_raw"] += beats
                if (u, w) not in contacts:
                    rank["mrr_filtered"] += beats
                    if w != u:
                        rank["mrr_extended_filtered"] += beats
            for name in out:
                values[name].append(1 / rank[name])
        for name in out:
            if values[name]:
                out[name].append(sum(values[name]) / len(values[name]))
    return out


@pytest.mark.parametrize("seed", range(5))
def test_mean_ranks_against_loops(seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = [6, 1, 9, 4, 12]
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    # Small integers make exact ties.
    x = torch.randint(-2, 3, (sum(sizes), 3), generator=generator).float()
    pairs, labels = [], []
    for begin, size in zip(ptr.tolist(), sizes, strict=False):
        for _ in range(2 * size if size > 1 else 0):
            u, v = torch.randperm(size, generator=generator)[:2].tolist()
            if (begin + u, begin + v) not in pairs:
                pairs.append((begin + u, begin + v))
                contact = torch.rand((), generator=generator) < 0.5
                labels.append(int(contact and size != 4))  # one graph has none
    order = torch.randperm(len(pairs), generator=generator).tolist()
    pairs, labels = [pairs[i] for i in order], [labels[i] for i in order]

    out = mean_ranks(x, torch.tensor(pairs).t(), torch.tensor(labels), ptr)
    expected = ranks_by_loops(x, pairs, labels, ptr.tolist())
    assert out.keys() == expected.keys()
    for name, values in expected.items():
        assert len(values) == 3
        assert out[name].tolist() == pytest.approx(values, abs=1e-12), name
    means = [float(out[name].mean()) for name in expected]
    assert means == sorted(means)  # each has fewer candidates than the one before
    assert means[0] < means[2]


def test_mean_ranks_by_hand():
    # Contacts of node 0 are 1 and 2. Scores of node 0 with 0, 1, 2, 3: 9, 6, 3, 4.5.
    x = torch.tensor([[3.0], [2.0], [1.0], [1.5]])
    pairs = torch.tensor([[0, 0, 0], [1, 2, 3]])
    label = torch.tensor([[1], [1], [0]])  # as stored: a column
    out = mean_ranks(x, pairs, label, torch.tensor([0, 4]))
    assert out["mrr_raw"].tolist() == pytest.approx([(1 / 2 + 1 / 4) / 2])
    assert out["mrr_filtered"].tolist() == pytest.approx([(1 / 2 + 1 / 3) / 2])
    assert out["mrr_extended_filtered"].tolist() == pytest.approx([(1 + 1 / 2) / 2])


def test_mean_ranks_without_contacts():
    out = mean_ranks(
        torch.randn(3, 2), torch.tensor([[0], [1]]), torch.zeros(1), torch.tensor([0, 3])
    )
    assert {name: value.numel() for name, value in out.items()} == {
        "mrr_raw": 0,
        "mrr_filtered": 0,
        "mrr_extended_filtered": 0,
    }
