"""Messages as in DyGLib: pairs that did not write, by hand, and what EdgeBank knows."""

import numpy as np
import pytest
import temporal_links
import torch
from temporal import Links, batches, look_up_links, precision
from torch_geometric.data import TemporalData


def drawn(size: int = 4000, nodes: int = 60, seed: int = 0) -> Links:
    """Messages of which some come at the same time."""
    rng = np.random.default_rng(seed)
    src, dst = torch.from_numpy(rng.integers(nodes, size=(2, size)))
    t = torch.from_numpy(np.sort(rng.integers(size, size=size)))
    return Links(TemporalData(src=src, dst=dst, t=t))


def test_new_nodes_are_not_in_training():
    links = drawn()
    known = {*links.src[links.train], *links.dst[links.train]}
    assert len(known) == 54
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
        assert len(set(found)) == len(batch)
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


def test_anyone():
    links = drawn()
    other = links.others(links.test, "random", seed=0)
    src, dst = links.ends(other)
    assert (src.numpy() == links.src[links.test]).all()
    assert set(dst.tolist()) == set(links.dst)
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
    assert found == pytest.approx(0.655, abs=8e-3)
    found = look_up_links(links, "repeated")["inductive"]
    assert found == pytest.approx(0.574, abs=8e-3)
