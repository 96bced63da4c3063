"""Links in streams of events: negatives by hand, and what is learnt."""

from argparse import Namespace

import pytest
import temporal_links
import torch
from torch_geometric.data import TemporalData


def stream(*rows: tuple) -> TemporalData:
    src, dst = torch.tensor(rows).t()
    return TemporalData(src=src, dst=dst, t=torch.arange(len(rows)))


def test_a_page():
    with open(temporal_links.__file__, encoding="utf-8") as file:
        assert len(file.readlines()) <= 150


def test_historical_negatives_are_earlier_partners():
    events = stream((0, 1), (0, 2), (3, 5), (0, 1), (0, 4), (3, 5), (0, 1))
    which = torch.arange(len(events)).repeat(200)
    found = temporal_links.negatives(events, which, "historical").view(200, -1)
    assert set(found[:, 1].tolist()) == {1}
    assert set(found[:, 3].tolist()) == {2}
    assert set(found[:, 4].tolist()) == {1, 2}
    assert set(found[:, 6].tolist()) == {2, 4}
    anyone = set(range(6))  # there is no earlier one, or no other
    for event in (0, 2, 5):
        assert set(found[:, event].tolist()) == anyone
    found = temporal_links.negatives(events, which, "random").view(200, -1)
    assert all(set(column.tolist()) == anyone for column in found.t())


@pytest.mark.parametrize("negatives", ["random", "historical"])
def test_queries_and_answers(negatives):
    events = stream((0, 1), (0, 2), (3, 5), (0, 1))
    args = Namespace(task="messages", negatives=negatives)
    dag = temporal_links.ask(args, events, torch.tensor([1, 3]), 3)
    assert dag.num_nodes == 2 * 3 + 4
    assert dag.y.tolist() == [1, 1, 0, 0]
    seen = dag.x[dag.query_index, 2].expm1().round()  # states of the source
    assert seen.tolist() == [1, 2, 1, 2]


def test_what_is_learnt(capsys):
    """Each node writes to the next two, again and again."""
    torch.manual_seed(0)
    src = torch.randint(40, (1500,))
    dst = (src + torch.randint(1, 3, src.shape)) % 40
    events = TemporalData(src=src, dst=dst, t=torch.arange(1500))
    args = Namespace(task="messages", negatives="random", epochs=20)
    val, test, seconds = temporal_links.train(args, events)
    assert min(val, test) > 0.85  # one negative in ten looks right
    assert seconds > 0
    assert f"epoch 20: val {val:.4f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("task", "size", "nodes"), [("messages", 59_835, 1899), ("ratings", 35_592, 5881)]
)
def test_real_streams(shared_data, task, size, nodes):
    events = temporal_links.load(task, str(shared_data / "temporal"))
    assert (len(events), events.num_nodes) == (size, nodes)
    assert (events.t[1:] >= events.t[:-1]).all()
    if task == "ratings":
        assert events.msg[:, 0].abs().max() == 1
        assert 0.05 < events.msg[:, 1].mean() < 0.15
