import json

import long_range
import long_range_tasks as tasks
import networkx as nx
import numpy as np
import pytest
import torch
from torch_geometric.data import Batch, Data
from torch_geometric.utils import to_networkx


@pytest.mark.parametrize("name", ["pasadena", "sssp", "power-flow", "superpixels"])
def test_models_are_of_one_size(name):
    size = long_range.TASKS[name].parameters
    for arm in long_range.ARMS:
        model = long_range.build(arm, name)
        found = long_range.count_parameters(model.layers)
        assert found == pytest.approx(size, rel=0.01), arm
        depth = long_range.DEEP.get(arm.removesuffix("-plain"), 3)
        assert len(model.layers) == depth
        norms = [x for x in model.modules() if isinstance(x, torch.nn.BatchNorm1d)]
        plain = arm.endswith("-plain") or (
            arm in long_range.OURS and name == "power-flow"
        )
        assert bool(norms) != plain, arm


def test_expander():
    edge_index = tasks.expander(50, 3)
    assert torch.equal(edge_index, tasks.expander(50, 3))
    graph = to_networkx(Data(edge_index=edge_index, num_nodes=50), to_undirected=True)
    assert nx.is_connected(graph)
    assert nx.diameter(graph) <= 7
    assert (edge_index[1].bincount() == 4).all()


def test_relative_error():
    """Each graph about its own mean."""
    y = [torch.tensor([[1.0], [-1]]), torch.tensor([[3.0], [0], [-3]])]
    edges = torch.zeros(2, 0, dtype=torch.long)
    graphs = [Data(y=x, edge_index=edges, num_nodes=len(x)) for x in y]
    batch = Batch.from_data_list(graphs)
    out = torch.tensor([[8.0], [6], [1], [1], [1]])
    assert tasks.relative(out, batch).tolist() == [0, 1]


def test_measures():
    batch = Batch.from_data_list([Data(y=torch.tensor([[0.1], [0.2], [0.2]]))])
    found = tasks.items("sssp", batch.y + torch.tensor([[0.0], [0.1], [-0.2]]), batch)
    means = tasks.measure("sssp", [found, found])
    assert means["MAE"] == pytest.approx(4)
    assert [row[::2] for row in means["by_distance"]] == [[4, 2], [8, 4]]
    assert means["by_distance"][1][1] == pytest.approx(6)
    assert tasks.score(means) == means["MAE"]

    means = tasks.measure("ising", [{"log10 MSE": torch.tensor([0.1, 0.0])}])
    assert means["log10 MSE"] == pytest.approx(np.log10(0.05))

    batch = Data(y=torch.tensor([1, 0, 1]), mask=torch.tensor([True, True, False]))
    out = torch.tensor([[0.0, 1], [0, 1], [0, 1]])
    found = tasks.items("pasadena", out, batch)
    assert tasks.measure("pasadena", [found]) == {"accuracy": 0.5}


@pytest.mark.slow
def test_models_are_added_and_kept(tmp_path, capsys):
    out = tmp_path / "smoke.json"
    command = ["--smoke", "--out", str(out), "--cache", str(tmp_path / "cache")]
    command += ["--data", str(tmp_path), "--rates", "0.01", "0.001"]
    command += ["--only", "sssp", "power-flow", "--arms"]
    long_range.main([*command, "chimera", "sage-16"])
    results = json.loads(out.read_text())
    assert len(results["searches"]) == 2 * len(results["runs"]) == 4
    for row in results["runs"]:
        assert row["steps"] > 0
        assert row["validation"] == min(value for _, value in row["curve"])
        (extra,) = row["extra"].values()
        assert np.isfinite(extra["score"])
        total = sum(error * count for _, error, count in row["test"]["by_distance"])
        number = sum(count for *_, count in row["test"]["by_distance"])
        assert total / number == pytest.approx(row["test"]["MAE"], rel=1e-4)
    assert "power-flow: skipped, as there is no" in capsys.readouterr().out

    with pytest.raises(SystemExit, match="exists: pass --resume to go on with it"):
        long_range.main([*command, "gps-rw"])
    long_range.main([*command, "chimera", "gps-rw", "--resume"])
    more = json.loads(out.read_text())
    assert more["runs"][:2] == results["runs"]
    assert [row["arm"] for row in more["runs"][2:]] == ["gps-rw"]
    long_range.main(["--report", "--out", str(out)])
    assert "| gps-rw |" in capsys.readouterr().out
    assert json.loads(out.read_text()) == more


def test_refusals_are_recorded(tmp_path, monkeypatch):
    def build(arm, name):
        raise MemoryError

    monkeypatch.setattr(long_range, "build", build)
    source = tasks.Source(tmp_path, tmp_path, True)
    run = long_range.Run("sssp", "gps", 0, 1e-3, 0.01, False, source, 8.0)
    assert long_range.train(run)["problem"] == "does not fit in 8 GiB"


def test_learning_rate():
    """By validation, of those that were tried, without runs that failed."""
    row = {"task": "sssp", "arm": "gps"}
    searches = [
        row | {"lr": 1e-3, "validation": 2.0},
        row | {"lr": 3e-3, "validation": 1.0},
        row | {"lr": 1e-2, "problem": "diverged"},
    ]
    results = {"searches": searches}
    rates = [1e-3, 3e-3, 1e-2]
    assert long_range.chosen(results, "sssp", "gps", rates) == 3e-3
    assert long_range.chosen(results, "sssp", "gps", [1e-3, 1e-2]) == 1e-3
    assert long_range.chosen(results, "sssp", "sage-3", rates) is None
    for search in searches:
        search["task"] = "sst"
    assert long_range.chosen(results, "sst", "gps", rates) == 1e-3
