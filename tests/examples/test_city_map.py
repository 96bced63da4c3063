"""The map of a city, from a chessboard and from a real one."""

import re
from argparse import Namespace
from itertools import count
from pathlib import Path

import city_roads
import pytest
import torch
from matplotlib import pyplot as plt
from torch_geometric.data import Data


@pytest.fixture(autouse=True)
def _tidy():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    plt.close("all")


@pytest.fixture
def epochs(monkeypatch):
    """A clock by which each epoch takes a second."""
    ticks = count()
    monkeypatch.setattr(city_roads.time, "process_time", lambda: float(next(ticks)))


def chessboard() -> Data:
    return city_roads.load(Namespace(smoke=True))


def rows(text: str) -> dict[str, tuple[str, ...]]:
    """Epochs, seconds and accuracies, by model."""
    pattern = r"(.+): (\d+) epochs, (\S+) s, val (\S+), test (\S+)"
    return {name: row for name, *row in re.findall(pattern, text)}


def test_a_page():
    text = Path(city_roads.__file__).read_text(encoding="utf-8")
    assert not re.search(r"\b(common|graph_data|lightning)\b", text)


def test_smoke(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(city_roads, "CityRoads", None)  # nothing is downloaded
    city_roads.main(["--smoke", "--out", str(tmp_path / "map.png")])
    found = rows(capsys.readouterr().out)
    assert list(found) == list(city_roads.MODELS)
    assert (tmp_path / "map.png").stat().st_size > 10_000
    first, *titles = [ax.get_title() for ax in plt.gcf().axes[:4]]
    assert first == "Class"
    for title, (name, row) in zip(titles, found.items(), strict=True):
        percent = float(re.fullmatch(rf"{name}: (\S+)% right", title)[1])
        assert percent == pytest.approx(100 * float(row[3]), abs=0.1)


def test_colours_of_roads(tmp_path):
    pos = torch.tensor([[0.0, 60.0], [1.0, 60.0], [2.0, 60.0]])
    data = Data(pos=pos, edge_index=torch.tensor([[0, 1, 2], [1, 2, 2]]))
    panels = {"Class": torch.tensor([0.0, 1.0, 9.0])}
    for name in "abc":
        panels[name] = torch.tensor([2.0, float("nan"), float("nan")])
    city_roads.draw(data, panels, str(tmp_path / "map.png"))
    first, second = plt.gcf().axes[:2]
    (roads,) = first.collections
    assert roads.get_array().tolist() == [0.5, 5.0, 9.0]
    assert roads.get_segments()[0].tolist() == [[0, 60], [1, 60]]
    (roads,) = second.collections
    assert roads.get_array().tolist() == [2.0, None, None]  # grey, if nothing is known
    assert roads.to_rgba(roads.get_array())[1].tolist() == [0.8, 0.8, 0.8, 1.0]
    assert roads.get_clim() == (0, 3)
    assert first.get_aspect() == pytest.approx(2.0)  # a degree of longitude is half


def train(data: Data, mixing: bool, seconds: float) -> tuple[torch.Tensor, float, int]:
    torch.manual_seed(0)
    return city_roads.train(city_roads.build_model(data, 1, mixing), data, seconds)


@pytest.mark.parametrize("mixing", [False, True])
def test_test_nodes_are_never_asked(epochs, mixing):
    data = chessboard()
    predicted, val, number = train(data, mixing, 7)
    assert number == 7
    right = predicted == data.y
    assert val == pytest.approx(right[data.val_mask].float().mean().item())
    data.y = torch.where(data.test_mask, 0, data.y)
    again, same, _ = train(data, mixing, 7)
    assert torch.equal(again, predicted)
    assert same == val


def test_what_is_learnt(epochs):
    data = chessboard()
    predicted, val, _ = train(data, True, 101)
    assert val > 0.5  # the most frequent class has a fifth
    assert (predicted == data.y)[data.test_mask].float().mean() > 0.4


def test_a_real_city(shared_data, tmp_path, capsys):
    (tmp_path / "raw").symlink_to(shared_data / "city-networks")
    argv = ["--root", str(tmp_path), "--seconds", "0.3", "--seed", "3"]
    city_roads.main([*argv, "--out", str(tmp_path / "map.png")])
    assert len(rows(capsys.readouterr().out)) == 3
    for ax in plt.gcf().axes[:4]:
        assert len(ax.collections[0].get_segments()) == 12_902
    # A fifth of the nodes are for tests, and roads have a colour by either end.
    known = ~ax.collections[0].get_array().mask
    assert 0.25 < known.mean() < 0.45
