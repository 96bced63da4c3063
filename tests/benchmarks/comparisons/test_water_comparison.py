"""The protocol by which models of water networks are compared."""

import json
from functools import partial

import common
import protocol
import pytest
import torch
from torch_geometric.data import Batch

from pyg_chimera.datasets import SampleSensors, WaterNetworks

pytest.importorskip("wntr", reason="reads networks: the extra 'water'")
import water_networks as compared


@pytest.fixture
def call(smoke, tmp_path):
    """Runs the comparison on few states of small networks."""
    fixed = compared.get_args, compared.STUDY.run, "--processed-root", str(tmp_path)
    return partial(smoke, *fixed)


def small(tmp_path, network="Net3"):
    sensors = SampleSensors(0.1, seed=0)
    return WaterNetworks(str(tmp_path), [network], num_states=2, sensors=sensors)


def test_no_network_is_on_two_sides():
    for train, tests in compared.SPLITS.values():
        names = [*train, *(name for names in tests.values() for name in names)]
        assert len(names) == len(set(names))
    train, tests = compared.SPLITS["default"]
    assert (len(train), len(tests)) == (9, 7)
    assert not any(name.startswith("ky") for name in compared.FOREIGN)


def test_no_state_is_on_two_sides(tmp_path):
    argv = ["--smoke", "--out", str(tmp_path / "out")]
    data = compared.get_datasets(
        compared.get_args([*argv, "--processed-root", str(tmp_path)])
    )
    assert list(data) == ["train", "val", "known", "Net2"]
    sides = [data["train"].graphs, data["val"], data["known"]]
    heads = [x for side in sides for x in side.heads[0].T]
    assert len(torch.stack(heads).unique(dim=0)) == 8 + 2 + 2
    anew, fixed = ([x[0].sensor_mask for _ in range(9)] for x in sides[:2])
    assert len(torch.stack(anew).unique(dim=0)) > 1
    assert len(torch.stack(fixed).unique(dim=0)) == 1


def test_graphs_count_alike_in_the_errors(tmp_path):
    graphs = [small(tmp_path, name)[0] for name in ("Net1", "Net3")]
    batch = Batch.from_data_list(graphs)
    shift = torch.where(batch.batch == 0, 1.0, 3.0)
    shift[~batch.in_zone] += 1000
    exact = (batch.y + shift - batch.sensor_mean) / batch.sensor_scale
    out = ((exact - batch.start) / batch.spread)[:, None]
    task = compared.get_task()
    for name, row in task.rows(out, batch).items():
        task.metrics[name].update(*row)
    assert task.metrics["zone_mae"].compute().item() == pytest.approx(2, abs=1e-2)
    assert (batch.target_mask & ~batch.in_zone).any()
    assert task.metrics["mae"].compute() > 5
    assert task.loss(out, batch) > 2.5  # most junctions are in the second


def test_an_epoch_is_drawn_from_all_states(tmp_path):
    drawn = protocol.DrawnGraphs(small(tmp_path), 20)
    assert len(drawn) == 20
    assert {drawn[0].state for _ in range(20)} == {0, 1}


def test_the_best_in_the_search_is_trained_with_seeds(tmp_path, monkeypatch):
    names = list(compared.STUDY.searches("gat"))
    scores = dict(zip(names, (3.0, float("nan"), 1.0, 2.0), strict=True))
    monkeypatch.setattr(
        protocol, "read", lambda out, name: {"best": {"val_mae": scores[name]}}
    )
    args = compared.get_args(["--out", str(tmp_path), "--minutes", "5"])
    runs = list(compared.STUDY.plan(args, ["gat"], long=True))
    assert [name for name, _ in runs[:4]] == names
    assert {changes["minutes"] for _, changes in runs[:4]} == {1.0}
    assert [changes for _, changes in runs[4:7]] == [
        {"arm": "gat", "option": 20, "lr": 1e-3, "seed": seed} for seed in range(3)
    ]
    changes = {"arm": "gat", "option": 20, "lr": 1e-3, "minutes": 30.0, "epochs": None}
    assert runs[7:] == [("gat/long", changes)]


def test_arms_come_in_any_order(call, tmp_path, capsys):
    first = call("--arms", "mlp")
    assert list(first["rows"]) == ["mean", "harmonic", "least-squares", "mlp"]
    both = call("--arms", "chebyshev", "--resume")
    assert list(both["rows"]) == [*first["rows"], "chebyshev"]
    assert both["rows"]["mlp"] == first["rows"]["mlp"]
    row = both["rows"]["mlp"]
    assert (row["seeds"], row["steps"]) == (1, 2)
    assert {
        "val_mae",
        "Net2_zone_mae",
        "Net2_mae_std",
        "depth",
        "lr",
        "parameters",
    } <= set(row)
    search = tmp_path / "out" / "mlp" / "search-depth-2-lr-0.001" / "results.json"
    assert "Net2_mae" not in json.loads(search.read_text())["best"]
    capsys.readouterr()
    call("--status")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 * len(compared.ARMS)
    for line in lines:
        done = line.startswith(("mlp/", "chebyshev/"))
        assert ("val_mae" in line) == done
        assert line.endswith("missing") != done


def test_a_long_run(call, capsys):
    first = call("--arms", "mlp")["rows"]
    capsys.readouterr()
    call("--status", "--long")
    assert capsys.readouterr().out.count("/long") == len(compared.ARMS)
    rows = call("--arms", "mlp", "--resume", "--long")["rows"]
    assert list(rows) == ["mean", "harmonic", "least-squares", "mlp", "mlp-long"]
    assert rows["mlp"] == first["mlp"]
    assert rows["mlp-long"]["steps"] == 6 * first["mlp"]["steps"]
    assert rows["mlp-long"]["val_mae"] != first["mlp"]["val_mae"]
    assert call("--arms", "mlp", "--resume")["rows"] == rows
    capsys.readouterr()
    call("--status")
    lines = capsys.readouterr().out.splitlines()
    (line,) = [x for x in lines if "/long" in x]
    assert line.startswith("mlp/long")
    assert "val_mae" in line


def test_a_rate_that_is_too_high_ends_no_campaign(call, monkeypatch):
    real = protocol.fit

    def fit(own, *args):
        if own.lr == 3e-3:
            common.open_run(own)
            raise FloatingPointError("the loss is nan in epoch 1")
        return real(own, *args)

    monkeypatch.setattr(protocol, "fit", fit)
    row = call("--arms", "mlp")["rows"]["mlp"]
    assert row["lr"] == 1e-3
