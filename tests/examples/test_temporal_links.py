"""Links in streams of events: queries by hand, and what is learnt."""

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


def test_queries_and_answers():
    events = stream((0, 1), (0, 2), (3, 5), (0, 1))
    which, wrong = torch.tensor([1, 3]), torch.tensor([[0, 3], [4, 2]])
    dag = temporal_links.ask(events[:3], which[:1], wrong[:, :1])
    assert dag.num_nodes == 2 * 3 + 2
    dag = temporal_links.ask(events, which, wrong)
    assert dag.num_nodes == 2 * 4 + 4
    assert dag.y.tolist() == [1, 1, 0, 0]
    seen = dag.x[dag.query_index, 2].expm1().round()  # states of the source
    assert seen.tolist() == [1, 2, 1, 1]
    events.msg = torch.arange(8.0).view(4, 2)
    dag = temporal_links.ask(events, which, None)
    assert dag.num_nodes == 2 * 4 + 2
    assert dag.y.tolist() == [2, 6]


def test_what_is_learnt(capsys):
    """Each node writes to the next two, again and again."""
    torch.manual_seed(0)
    src = torch.randint(40, (1500,))
    dst = (src + torch.randint(1, 3, src.shape)) % 40
    events = TemporalData(src=src, dst=dst, t=torch.arange(1500))
    args = Namespace(task="messages", epochs=20)
    best = temporal_links.train(args, events)
    assert list(best) == ["val", "test"]
    assert min(best.values()) > 0.85  # one negative in ten looks right
    printed = capsys.readouterr().out
    assert "epoch 20: val " in printed
    assert f"val {best['val']:.4f}, test {best['test']:.4f}" in printed


@pytest.mark.parametrize("epochs", [1, 2, 3, 10, 19])
def test_any_number_of_epochs(epochs):
    events = stream(*[(i % 7, (i + 1) % 7) for i in range(100)])
    scores = temporal_links.train(Namespace(task="messages", epochs=epochs), events)
    assert 0 <= scores["test"] <= 1


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
