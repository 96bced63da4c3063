import json
import math
import os
import shutil
import signal
import statistics
from dataclasses import replace
from pathlib import Path

import engine
import numpy as np
import pytest
import torch
import tudataset
from engine import count_parameters
from torch_geometric.data import Batch, Data


def write_raw(root: Path, name: str, *, num_graphs: int = 36, labelled: bool) -> Path:
    """A TUDataset of paths (class 1) and stars (class 2), as a download leaves it."""
    raw = root / name / "raw"
    raw.mkdir(parents=True)
    edges, nodes, labels, first = [], [], [], 1
    for i in range(num_graphs):
        size, is_star = 4 + i % 3, i >= num_graphs // 2
        for v in range(1, size):
            u = 0 if is_star else v - 1
            edges += [(first + u, first + v), (first + v, first + u)]
        nodes += [i + 1] * size
        labels.append(1 + is_star)
        first += size

    def write(kind: str, rows: list) -> None:
        (raw / f"{name}_{kind}.txt").write_text("".join(f"{row}\n" for row in rows))

    write("A", [f"{u}, {v}" for u, v in edges])
    write("graph_indicator", nodes)
    write("graph_labels", labels)
    if labelled:
        write("node_labels", [v % 3 for v in range(len(nodes))])
        write("edge_labels", [(u + v) % 2 for u, v in edges])
    return root


@pytest.fixture(autouse=True)
def _no_curves(monkeypatch):
    """They take longer than these small runs, and have a test elsewhere."""
    monkeypatch.setattr(engine, "plot", lambda path, *_: path.touch())


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("tudataset")
    write_raw(root, "LABELLED", labelled=True)
    return write_raw(root, "BARE", labelled=False)


def parse(root: Path, *args: str):
    return tudataset.parse(["--root", str(root), "--device", "cpu", *args])


def run(root: Path, out: Path, *args: str) -> dict:
    smoke = ("--dataset", "LABELLED", "--smoke", "--out", str(out))
    return tudataset.run(parse(root, *smoke, *args))


# Data ------------------------------------------------------------------------------


def test_degrees_are_encoded_as_positions_are():
    edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    data = Data(x=torch.ones(4, 1), edge_index=edge_index)
    out = tudataset.EncodeDegree(4)(data)
    assert data.x.shape == (4, 1)  # a copy was changed
    for row, number in zip(out.x, [1, 2, 1, 0], strict=True):
        angles = [number, number / 100]
        expected = [f(a) for a in angles for f in (math.sin, math.cos)]
        assert row.tolist() == pytest.approx([1.0, *expected], abs=1e-6)
    bare = tudataset.EncodeDegree(4)(Data(edge_index=edge_index, num_nodes=4))
    assert torch.equal(bare.x, out.x[:, 1:])


def test_graphs_have_what_the_models_read(root):
    args = parse(root, "--dataset", "LABELLED", "--models", "gin", "chimera")
    graphs = tudataset.get_graphs(args)
    assert len(graphs) == 36
    assert [int(data.y) for data in graphs] == [0] * 18 + [1] * 18
    for data in graphs:
        assert data.x.shape == (data.num_nodes, 3 + 32)
        assert data.edge_attr.shape == (data.num_edges, 2)
        assert sorted(data.elimination_rank.tolist()) == list(range(data.num_nodes))
    graphs = tudataset.get_graphs(parse(root, "--dataset", "BARE"))
    assert set(graphs[0].keys()) == {"x", "edge_index", "y", "num_nodes"}
    assert graphs[0].x.shape == (4, 32)
    star = graphs[-1].x
    assert not torch.equal(star[0], star[1])
    assert torch.equal(star[1], star[2])


def test_a_root_may_be_read_only(tmp_path):
    root = write_raw(tmp_path / "root", "BARE", labelled=False)
    elsewhere = tmp_path / "elsewhere"
    args = ("--dataset", "BARE", "--processed-root", str(elsewhere))
    assert len(tudataset.get_graphs(parse(root, *args))) == 36
    assert [path.name for path in (root / "BARE").iterdir()] == ["raw"]
    assert (elsewhere / "BARE" / "processed" / "data.pt").is_file()


# Folds -----------------------------------------------------------------------------

MUTAG = [1] * 125 + [0] * 63


@pytest.mark.parametrize("folds", [3, 10])
def test_folds_are_disjoint_stratified_and_cover_everything(folds):
    splits = tudataset.split_folds(MUTAG, folds, seed=0)
    assert len(splits) == folds
    share = sum(MUTAG) / len(MUTAG)
    for split in splits:
        rows = [i for part in ("train", "val", "test") for i in split[part]]
        assert sorted(rows) == list(range(len(MUTAG)))
        for part in split.values():
            positive = sum(MUTAG[i] for i in part)
            assert abs(positive - share * len(part)) <= 1.5
            assert part == sorted(part)
        for part in ("val", "test"):
            assert abs(len(split[part]) - len(MUTAG) / folds) <= 1
    for part in ("val", "test"):
        rows = [i for split in splits for i in split[part]]
        assert sorted(rows) == list(range(len(MUTAG)))  # each graph once


def test_folds_depend_on_the_seed_only():
    def folds(seed):
        return tudataset.split_folds(MUTAG, 10, seed)

    np.random.seed(1)  # noqa: NPY002 (no other generator matters)
    first = folds(0)
    np.random.seed(2)  # noqa: NPY002
    assert folds(0) == first
    assert folds(1) != first


def test_fewer_than_three_folds_make_no_sense():
    with pytest.raises(ValueError, match="at least 3, got 2"):
        tudataset.split_folds(MUTAG, 2, 0)


# Models ----------------------------------------------------------------------------


@pytest.mark.parametrize("edge_dim", [None, 4])
@pytest.mark.parametrize("name", tudataset.MODELS)
def test_models_have_about_300_000_parameters(name, edge_dim):
    model = tudataset.build_model(name, 39, edge_dim, 2)
    assert count_parameters(model) == pytest.approx(300_000, rel=0.002)
    assert len(model.layers) == 4
    assert model.channels == (96 if name in ("plstm", "chimera") else 128)


def test_plstm_alternates_its_modes():
    model = tudataset.build_model("plstm", 39, None, 2)
    assert [layer.conv.mode for layer in model.layers] == ["P", "D", "P", "D"]


@pytest.mark.parametrize("name", tudataset.MODELS)
def test_bonds_matter_to_all_but_gcn(root, name):
    args = parse(root, "--dataset", "LABELLED", "--models", name)
    batch = Batch.from_data_list(tudataset.get_graphs(args)[::5])
    model = tudataset.build_model(name, 35, 2, 2).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # gates may start at zero
            parameter.add_(0.1 * torch.randn_like(parameter))
        out = model(**model.inputs(batch))
        batch.edge_attr = batch.edge_attr.flip(1)
        other = model(**model.inputs(batch))
    assert out.shape == (batch.num_graphs, 2)
    assert torch.equal(out, other) == (name == "gcn")


# Runs ------------------------------------------------------------------------------


@pytest.mark.parametrize("dataset", ["LABELLED", "BARE"])
def test_all_models_in_one_table(root, tmp_path, capsys, dataset):
    args = ("--dataset", dataset, "--models", *tudataset.MODELS)
    result = run(root, tmp_path, *args)
    assert json.loads((tmp_path / "summary.json").read_text()) == result
    assert list(result["models"]) == list(tudataset.MODELS)
    assert result["protocol"]["folds"] == 3
    assert result["protocol"]["epochs"] == 2
    printed = capsys.readouterr().out
    for name, row in result["models"].items():
        found = []
        for fold in range(3):
            path = tmp_path / name / f"fold-{fold}" / "metrics.json"
            found.append(json.loads(path.read_text()))
        assert {f["config"]["parameters"] for f in found} == {row["parameters"]}
        for split in ("test", "val"):
            values = [f["best"][split]["accuracy"] for f in found]
            assert row[f"{split}_accuracies"] == values
            assert row[f"{split}_accuracy"] == pytest.approx(statistics.mean(values))
            std = statistics.pstdev(values)
            assert row[f"{split}_accuracy_std"] == pytest.approx(std)
        mean, std = row["test_accuracy"], row["test_accuracy_std"]
        assert f"{row['parameters']:>10,}      3  {mean:.4f} +- {std:.4f}" in printed


def test_runs_are_a_function_of_the_seed(root, tmp_path):
    rows = [
        run(root, tmp_path / str(i), "--models", "gin", "--seed", seed)["models"]["gin"]
        for i, seed in enumerate(("0", "0", "1"))
    ]
    histories = []
    for i in range(3):
        path = tmp_path / str(i) / "gin" / "fold-2" / "last.pt"
        history = torch.load(path, weights_only=True)["history"]
        histories.append([(row["train_loss"], row["val_loss"]) for row in history])
    assert histories[0] == histories[1] != histories[2]
    assert {**rows[0], "seconds": 0} == {**rows[1], "seconds": 0}


def test_paths_and_stars_are_learnt(root, tmp_path):
    args = ("--models", "gin", "--epochs", "12", "--lr", "0.01")
    row = run(root, tmp_path, *args)["models"]["gin"]
    assert row["test_accuracy"] == 1
    # Of the epochs without an error, the one with the lowest loss on validation.
    for fold, best in enumerate(row["best_epochs"]):
        path = tmp_path / "gin" / f"fold-{fold}" / "last.pt"
        history = torch.load(path, weights_only=True)["history"]
        losses = {r["epoch"]: r["val_loss"] for r in history if r["val_accuracy"] == 1}
        assert best == min(losses, key=losses.get)


def same_weights(one: Path, two: Path) -> bool:
    states = [torch.load(path, weights_only=True)["model"] for path in (one, two)]
    return all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def test_a_killed_run_resumes_where_it_was(root, tmp_path, monkeypatch, capsys):
    args = ("--models", "gin", "plstm")
    straight = run(root, tmp_path / "a", *args)

    steps = iter(range(10_000))

    def die(out, batch):
        if next(steps) == 17:
            raise RuntimeError("killed")
        return loss(out, batch)

    loss = tudataset.TASK.loss
    with monkeypatch.context() as patch:
        patch.setattr(tudataset, "TASK", replace(tudataset.TASK, loss=die))
        with pytest.raises(RuntimeError, match="killed"):
            run(root, tmp_path / "b", *args)
    done = tmp_path / "b" / "gin" / "fold-0"
    before = {path: path.stat().st_mtime_ns for path in done.iterdir()}
    unfinished = json.loads((tmp_path / "b" / "summary.json").read_text())
    assert unfinished["models"]["gin"]["folds"] < 3

    capsys.readouterr()
    resumed = run(root, tmp_path / "b", *args, "--resume")
    assert "Resuming" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in done.iterdir()} == before
    for name, row in straight["models"].items():
        assert {**row, "seconds": 0} == {**resumed["models"][name], "seconds": 0}
        for fold in range(3):
            last = Path(name, f"fold-{fold}", "last.pt")
            assert same_weights(tmp_path / "a" / last, tmp_path / "b" / last)


def test_ctrl_c_ends_with_a_checkpoint(root, tmp_path, monkeypatch, capsys):
    args = ["--root", str(root), "--dataset", "LABELLED", "--device", "cpu", "--smoke"]
    args += ["--models", "gin", "gcn", "--out", str(tmp_path)]
    loss = tudataset.TASK.loss
    steps = iter(range(10_000))

    def interrupt(out, batch):
        if next(steps) == 9:
            os.kill(os.getpid(), signal.SIGINT)
        return loss(out, batch)

    # A process in the background of a shell script is started with Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with monkeypatch.context() as patch:
        task = replace(tudataset.TASK, loss=interrupt)
        patch.setattr(tudataset, "TASK", task)
        assert tudataset.main(args) == 130
    signal.signal(signal.SIGINT, before)
    printed = capsys.readouterr().out
    assert "Stopped (SIGINT)" in printed
    assert "--resume" in printed
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["stopped_by"] == "SIGINT"
    assert "gcn" not in summary["models"]
    assert tudataset.main([*args, "--resume"]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["stopped_by"] is None
    assert [row["folds"] for row in summary["models"].values()] == [3, 3]


def test_a_time_limit_ends_the_whole_run(root, tmp_path, capsys):
    result = run(root, tmp_path, "--time-limit", "0")
    assert result["stopped_by"] == "time limit"
    assert result["models"] == {}
    assert "No fold is finished" in capsys.readouterr().out
    assert not (tmp_path / "plstm" / "fold-1").exists()
    result = run(root, tmp_path, "--resume")
    assert result["stopped_by"] is None
    assert result["models"]["plstm"]["folds"] == 3


def test_a_request_to_stop_that_ends_a_fold_ends_the_run(root, tmp_path, monkeypatch):
    fit = tudataset.Trainer.fit

    def fit_until_late(trainer):
        summary = fit(trainer)
        trainer.stop.limit = -1.0  # time was up in the last epoch
        return summary

    monkeypatch.setattr(tudataset.Trainer, "fit", fit_until_late)
    result = run(root, tmp_path, "--models", "gin")
    assert result["stopped_by"] == "time limit"
    assert result["models"]["gin"]["folds"] == 1


def test_models_may_come_one_command_after_the_other(root, tmp_path):
    run(root, tmp_path, "--models", "gcn")
    result = run(root, tmp_path, "--models", "gin")
    assert list(result["models"]) == ["gcn", "gin"]
    # But not under another protocol.
    result = run(root, tmp_path, "--models", "gin", "--epochs", "1")
    assert list(result["models"]) == ["gin"]


def test_resuming_wants_a_run(root, tmp_path):
    with pytest.raises(SystemExit, match="there is no run in"):
        run(root, tmp_path, "--resume")
    run(root, tmp_path, "--models", "gin")
    with pytest.raises(SystemExit, match=r"lr: 0\.001 then, 0\.1 now"):
        run(root, tmp_path, "--models", "gin", "--resume", "--lr", "0.1")


@pytest.mark.parametrize(
    "args", [["--resume", "--overwrite"], ["--folds", "2"], ["--models", "mlp"]]
)
def test_command_lines_that_make_no_sense(args, capsys):
    with pytest.raises(SystemExit):
        tudataset.parse(args)
    assert "error" in capsys.readouterr().err


def test_the_default_is_the_protocol_of_the_paper():
    args = tudataset.parse(["--seed", "7"])
    assert (args.dataset, args.models) == ("MUTAG", ["plstm"])
    assert args.out == Path("runs/tudataset/MUTAG-seed7")
    options = tudataset.Options.choose(args, tudataset.Protocol())
    assert (options.epochs, options.batch_size, options.lr) == (100, 64, 1e-3)
    assert (options.optimizer, options.warmup_epochs) == ("adamw", 5)
    assert tudataset.Protocol().folds == 10


# Real data -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "graphs", "columns", "bonds"),
    [("MUTAG", 188, 7, 4), ("PROTEINS", 1113, 3, None)],
)
def test_real_graphs(shared_data, tmp_path, name, graphs, columns, bonds):
    shutil.copytree(shared_data / "TUDataset" / name / "raw", tmp_path / name / "raw")
    found = tudataset.get_graphs(parse(tmp_path, "--dataset", name))
    assert len(found) == graphs
    for data in found[::50]:
        assert data.x.size(1) == columns + 32
        assert torch.equal(data.x[:, :columns].sum(1), torch.ones(data.num_nodes))
        assert (None if bonds is None else data.edge_attr.size(1)) == bonds
    if name == "MUTAG":
        args = ("--dataset", name, "--out", str(tmp_path / "run"), "--smoke")
        result = tudataset.run(parse(tmp_path, *args))
        assert result["models"]["plstm"]["folds"] == 3
        assert 0.4 < result["models"]["plstm"]["val_accuracy"] <= 1
