"""Messages as in DyGLib: pairs that did not write, by hand, and what EdgeBank knows."""

from argparse import Namespace

import numpy as np
import pytest
import temporal
import temporal_links
import torch
from temporal import Links, batches, look_up_links, precision
from torch_geometric.data import TemporalData


def drawn(size: int = 4000, nodes: int = 60, seed: int = 0) -> Links:
    """Messages, of which some come at the same time. The first twenty nodes only write,
    and the last twenty only in the first half.
    """
    rng = np.random.default_rng(seed)
    src, dst = rng.integers(nodes, size=(2, size))
    dst = np.where(dst < 20, 20 + dst, dst)
    src[size // 2 :] %= nodes - 20
    dst[size // 2 :] = 20 + dst[size // 2 :] % (nodes - 40)
    t = np.sort(rng.integers(size, size=size))
    columns = {"src": src, "dst": dst, "t": t}
    return Links(TemporalData(**{x: torch.from_numpy(y) for x, y in columns.items()}))


def test_new_nodes_are_not_in_training():
    links = drawn()
    assert (links.val[0], links.test[0], links.test[-1]) == (2800, 3400, 3999)
    known = {*links.src[links.train], *links.dst[links.train]}
    assert len(known) == 54
    assert known >= set(range(40, 60))  # those that are not there later
    assert set(links.src[links.test]) - known
    first = links.events[: links.val[0]]
    has_new = [not known >= pair for pair in pairs_of(first)]
    assert len(links.train) == len(first) - sum(has_new)


def pairs_of(events: TemporalData) -> list[set[int]]:
    ends = zip(events.src.tolist(), events.dst.tolist(), strict=True)
    return [{u, v} for u, v in ends]


@pytest.mark.parametrize("kind", ["historical", "inductive"])
def test_pairs_of_before(kind):
    links = drawn(nodes=200)
    other = links.others(links.test, kind, seed=0)
    assert len(other) == len(links.test)
    before, late = set(links.pair[: links.test[0]]), 0
    for batch in batches(links.test):
        found = other[batch - links.test[0]]
        begin, end = links.t[batch[[0, -1]]]
        now = set(links.pair[(links.t >= begin) & (links.t <= end)])
        past = set(links.pair[links.t <= begin]) - now
        if kind == "inductive":
            past -= before
        # As many as there are; others did not write in the batch.
        assert len(past & set(found)) >= min(len(past), len(batch))
        assert not set(found) & set(links.pair[batch])
        late += len(past)
    assert late > 0
    assert (other != links.others(links.test, kind, seed=1)).mean() > 0.5


def test_anyone():
    links = drawn()
    other = links.others(links.test, "random", seed=0)
    src, dst = links.ends(other)
    assert (src.numpy() == links.src[links.test]).all()
    assert set(dst.tolist()) == set(links.dst) == set(range(20, 60))
    again = links.others(links.test, "random", seed=0)
    assert (other == again).all()


def test_what_edgebank_remembers():
    #         0 1 2 3 4 5 6, at the times
    src = [0, 2, 0, 4, 0, 2, 6]
    dst = [1, 3, 1, 5, 1, 3, 7]
    t = [0, 10, 20, 22, 26, 30, 31]
    events = dict(src=src, dst=dst, t=t)
    links = Links(TemporalData(**{x: torch.tensor(y) for x, y in events.items()}))
    past = np.arange(7)

    def known(memory: str) -> set[tuple[int, int]]:
        pairs = links.ends(links.remembered(past, memory))
        return set(zip(*pairs.tolist(), strict=True))

    assert known("any time") == {(0, 1), (2, 3), (4, 5), (6, 7)}
    assert known("last 15 %") == {(6, 7)}
    # Mean gaps of 13 and 20, and two links that are not repeated: 8.25 on average.
    assert known("repeated") == {(0, 1), (2, 3), (6, 7)}


def test_the_mean_of_batches():
    right, wrong = np.ones(250), np.zeros(250)
    wrong[200:] = 1
    assert precision(right, wrong) == pytest.approx((1 + 0.5) / 2)


def test_edgebank_has_its_published_precision(shared_data):
    """0.762, 0.655 and 0.574 (Yu et al., 2023, table 1); nodes that are new are another
    draw.
    """
    events = temporal_links.load("messages", str(shared_data / "temporal"))
    links = Links(events)
    assert look_up_links(links, "any time")["random"] == pytest.approx(0.762, abs=2e-3)
    found = look_up_links(links, "last 15 %")["historical"]
    assert found == pytest.approx(0.655, abs=5e-3)
    found = look_up_links(links, "repeated")["inductive"]
    assert found == pytest.approx(0.574, abs=2e-3)


def test_what_is_trained_on(monkeypatch):
    """Messages without new nodes, and recipients of these; and what is tested."""
    links, caught = drawn(), {}
    monkeypatch.setattr(temporal, "fit", lambda *args: caught.update(args=args) or {})
    temporal.train_links(Namespace(), links)
    _, draw, test = caught["args"]
    dag, number = draw(), len(links.train)
    assert dag.num_nodes == 2 * number + 2 * number
    assert dag.y.tolist() == [1.0] * number + [0.0] * number

    class Right(torch.nn.Module):
        """Knows what was sent."""

        def forward(self, dag):
            return dag.y

    assert test(Right()) == dict.fromkeys(("val", *temporal.KINDS), 1.0)


def test_the_mean_of_earlier_ratings():
    events = TemporalData(
        src=torch.arange(20), dst=torch.arange(20) % 2, t=torch.arange(20)
    )
    events.msg = torch.stack([1.0 - events.dst, events.dst.float()], 1)
    # All earlier ratings of a node are those that follow.
    assert temporal.look_up_ratings(events) == {"val": 0.0, "test": 0.0}
    events.msg[14:17, 0] += 0.5
    found = temporal.look_up_ratings(events)
    assert found["val"] < -0.4
    assert -0.1 < found["test"] < 0
