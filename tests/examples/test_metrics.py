import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from metrics import average_precision, macro_f1, mean_absolute_error, mean_ranks

NAN = float("nan")


def test_average_precision_by_hand():
    score = torch.tensor([[0.9], [0.8], [0.7], [0.6]])
    target = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    # Precision at the two positives: 1/1 and 2/3.
    assert average_precision(score, target) == pytest.approx((1 + 2 / 3) / 2)
    assert average_precision(-score, target) == pytest.approx((1 / 2 + 2 / 4) / 2)


def literal_average_precision(score, target):
    """Sum over distinct thresholds of the recall gained times the precision there."""
    total, recall = 0.0, 0.0
    for threshold in sorted(set(score), reverse=True):
        taken = [t for s, t in zip(score, target, strict=True) if s >= threshold]
        now = sum(taken) / sum(target)
        total += (now - recall) * sum(taken) / len(taken)
        recall = now
    return total


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 10**6))
def test_average_precision_is_the_mean_over_tasks_with_both_classes(n, tasks, seed):
    generator = torch.Generator().manual_seed(seed)
    score = torch.randint(0, 4, (n, tasks), generator=generator).float()  # with ties
    target = torch.randint(0, 2, (n, tasks), generator=generator).float()
    target[torch.rand(n, tasks, generator=generator) < 0.2] = NAN
    expected = []
    for s, t in zip(score.T.tolist(), target.T.tolist(), strict=True):
        known = [(a, b) for a, b in zip(s, t, strict=True) if not math.isnan(b)]
        if {b for _, b in known} == {0.0, 1.0}:
            expected.append(literal_average_precision(*zip(*known, strict=True)))
    found = average_precision(score, target)
    if expected:
        assert found == pytest.approx(sum(expected) / len(expected))
    else:
        assert math.isnan(found)


def test_mean_absolute_error_leaves_out_unlabelled_entries():
    prediction = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    target = torch.tensor([[0.0, NAN], [5.0, 4.5]])
    assert mean_absolute_error(prediction, target) == pytest.approx((1 + 2 + 0.5) / 3)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 40), st.integers(2, 5), st.integers(0, 10**6))
def test_macro_f1_is_the_mean_over_classes_that_occur(n, classes, seed):
    generator = torch.Generator().manual_seed(seed)
    prediction, target = torch.randint(0, classes, (2, n), generator=generator)
    scores = []
    for c in set(prediction.tolist()) | set(target.tolist()):
        hits = int(((prediction == c) & (target == c)).sum())
        scores.append(2 * hits / int((prediction == c).sum() + (target == c).sum()))
    assert macro_f1(prediction, target) == pytest.approx(sum(scores) / len(scores))


def test_ranks_by_hand():
    # One graph of four nodes on a line: the score of (u, w) is x_u * x_w.
    x = torch.tensor([[1.0], [4.0], [3.0], [2.0]])
    index = torch.tensor([[0, 0, 1], [2, 1, 0]])
    label = torch.tensor([1, 1, 0])
    found = mean_ranks(x, index, label, torch.tensor([0, 4]))
    # Tails of head 0 by score: node 1 (4), 2 (3), 3 (2), 0 (1). Contacts are 2 and 1.
    assert found["mrr_raw"].tolist() == [(1 / 2 + 1 / 1) / 2]
    assert found["mrr_filtered"].tolist() == [1.0]  # node 1 doesn't compete with 2
    assert found["mrr_extended_filtered"].tolist() == [1.0]
    # From the node that likes itself most, it only goes without itself.
    found = mean_ranks(x, torch.tensor([[1], [2]]), torch.ones(1), torch.tensor([0, 4]))
    ranks = {key: 1 / value.item() for key, value in found.items()}
    assert ranks == {"mrr_raw": 2, "mrr_filtered": 2, "mrr_extended_filtered": 1}


def literal_ranks(x, contacts, kind):
    """Reciprocal ranks of a graph's contacts, candidate by candidate."""
    out = []
    for u, v in contacts:
        rank = 1.0
        for w in range(len(x)):
            if w == v or (kind != "mrr_raw" and (u, w) in contacts):
                continue
            if kind == "mrr_extended_filtered" and w == u:
                continue
            mine, other = (x[u] * x[v]).sum(), (x[u] * x[w]).sum()
            rank += 1.0 if other > mine else 0.5 if other == mine else 0.0
        out.append(1 / rank)
    return sum(out) / len(out)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(0, 10**6))
def test_ranks_against_a_loop(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-2, 3, (sum(sizes), 2), generator=generator).double()  # ties
    ptr = torch.tensor([0, *sizes]).cumsum(0)
    index, label, graphs = [], [], []
    for begin, end in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True):
        pairs = [(u, v) for u in range(begin, end) for v in range(begin, end)]
        chosen = torch.rand(len(pairs), generator=generator) < 0.5
        pairs = [pair for pair, keep in zip(pairs, chosen, strict=True) if keep]
        found = torch.rand(len(pairs), generator=generator) < 0.6
        index += pairs
        label += found.int().tolist()
        contacts = [pair for pair, is_one in zip(pairs, found, strict=True) if is_one]
        graphs.append((begin, end, contacts))
    edge_label_index = torch.tensor(index, dtype=torch.long).view(-1, 2).T
    order = torch.randperm(len(index), generator=generator)  # need not be sorted
    result = mean_ranks(x, edge_label_index[:, order], torch.tensor(label)[order], ptr)
    assert set(result) == {"mrr_raw", "mrr_filtered", "mrr_extended_filtered"}
    for kind, values in result.items():
        expected = [
            literal_ranks(x[b:e], [(u - b, v - b) for u, v in contacts], kind)
            for b, e, contacts in graphs
            if contacts  # graphs without a contact have no rank
        ]
        assert values.tolist() == pytest.approx(expected)
