"""What all examples share: the command line, training, results."""

import errno
import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import common
import pytest
import torch
from torch import Tensor
from torch_geometric import seed_everything
from torch_geometric.data import Batch, Data
from torch_geometric.nn import global_mean_pool
from torchmetrics import MeanMetric, MeanSquaredError

RECIPE = {
    **{"preset": "tiny", "epochs": 4, "batch_size": 8, "lr": 1e-2, "warmup_epochs": 1},
    **{"optimizer": "AdamW", "weight_decay": 0.01},
}


class Model(torch.nn.Module):
    """Small, and with everything that must survive: dropout and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8)
        self.head = torch.nn.Linear(8, 1)

    def inputs(self, batch):
        return {"x": batch.x, "batch": batch.batch}

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        x = torch.dropout(self.norm(self.lin(x)), 0.3, self.training)
        return global_mean_pool(self.head(x), batch)[:, 0]


def load() -> dict[str, list[Data]]:
    generator = torch.Generator().manual_seed(0)
    graphs = []
    for i in range(53):
        x = torch.randn(3 + i % 4, 5, generator=generator)
        graphs.append(Data(x=x, y=x.mean(0)[:1] * 3))
    return {"train": graphs[:30], "val": graphs[30:43], "test": graphs[43:]}


def get_task() -> common.Task:
    return common.Task(
        lambda out, batch: (out - batch.y).square().mean(),
        {"mse": MeanSquaredError()},
        lambda out, batch: {"mse": (out, batch.y)},
        mode="min",
    )


def get_args(out: Path, *argv: str):
    parser = common.make_parser("Tiny.", ["tiny"], root="data")
    return common.parse(parser, ["--out", str(out), *argv], lambda _: RECIPE)


def run(out: Path, *argv: str, task=None, load=load) -> dict:
    args = get_args(out, *argv)
    seed_everything(args.seed)
    return common.fit(args, Model(), task or get_task(), load, "tiny")


def run_main(*args, **kwargs) -> int:
    return common.main(lambda _: run(*args, **kwargs), None)


def read(path: Path) -> dict:
    if path.suffix == ".json":
        return json.loads(path.read_text())
    return torch.load(path, weights_only=True)


def assert_same_run(one: Path, two: Path) -> None:
    for name in ("last.ckpt", "best.ckpt"):
        a, b = read(one / name), read(two / name)
        assert (a["epoch"], a["global_step"]) == (b["epoch"], b["global_step"])
        assert a["state_dict"].keys() == b["state_dict"].keys()
        for key, value in a["state_dict"].items():
            assert torch.equal(value, b["state_dict"][key]), key
    a, b = (read(out / "results.json") for out in (one, two))
    for row in (*a["history"], *b["history"], a["best"], b["best"]):
        assert row.pop("seconds") >= 0
    assert (a["history"], a["best"]) == (b["history"], b["best"])


# Resuming ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("straight")
    assert run(out)["epochs_done"] == 4
    return out


@pytest.mark.parametrize(
    ("call", "epochs"),
    [(1, 0), (14, 2), (17, 2), (24, 4)],  # an epoch: 4 batches to train on, 2 of "val"
    ids=["first", "training", "validation", "test"],
)
def test_an_interrupted_run_goes_on_bit_for_bit(
    straight, tmp_path, capsys, interrupt, call, epochs
):
    results = run(tmp_path, task=interrupt(get_task(), call))
    assert (results["stopped_by"], results["epochs_done"]) == ("SIGINT", epochs)
    assert "best" not in results
    assert len(read(tmp_path / "last.ckpt")["history"]) == epochs
    printed = capsys.readouterr().out
    assert f"Stopped (SIGINT) after {epochs} of 4 epochs. To go on" in printed
    assert printed.endswith(" --resume\n")
    torch.rand(7)  # what has happened to the generators since does not matter
    assert run(tmp_path, "--resume")["stopped_by"] is None
    assert_same_run(straight, tmp_path)


class Noisy(torch.utils.data.Dataset):
    """Draws where graphs are loaded, as samplers of neighbourhoods do."""

    def __init__(self, graphs: list[Data]) -> None:
        self.graphs = graphs

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, i: int) -> Data:
        graph = self.graphs[i].clone()
        return graph.update({"x": graph.x + 0.1 * torch.rand(1)})


def noisy() -> dict:
    return {**load(), "train": Noisy(load()["train"])}


def test_workers_too_depend_on_seed_and_epoch_alone(tmp_path, interrupt):
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    run(one, "--num-workers", "1", load=noisy)
    task = interrupt(get_task(), 14)
    stopped = run(two, "--num-workers", "1", load=noisy, task=task)
    assert stopped["epochs_done"] == 2
    run(two, "--num-workers", "1", "--resume", load=noisy)
    assert_same_run(one, two)
    # Of all graphs, only the draws differ.
    drawn = []
    for seed in (0, 1):
        args = get_args(other, "--num-workers", "1")
        args.seed = seed
        own = common.Run(args, Model(), get_task(), noisy, {}, None)
        own.setup("fit")
        loader = own.loader("train")
        own.history.append({})
        again = own.loader("train")
        drawn += [sum(float(batch.x.sum()) for batch in x) for x in (loader, again)]
    assert len(set(drawn)) == 4


def run_all(out: Path, *argv: str, task=None) -> dict:
    def train(own):
        seed_everything(own.seed)
        return common.fit(own, Model(), task or get_task(), load)

    runs = [(f"{name}/run-0", {}) for name in ("a", "b")]
    args = get_args(out, *argv)
    return common.fit_all(
        args, runs, train, lambda found: common.summarize(found, "mse", "runs")
    )


def test_runs_of_a_replaced_table_are_replaced(tmp_path, interrupt):
    (tmp_path / "c" / "run-0").mkdir(parents=True)
    kept = tmp_path / "c" / "run-0" / "notes.txt"
    kept.touch()
    assert list(run_all(tmp_path)["rows"]) == ["a", "b"]
    stopped = run_all(tmp_path, "--overwrite", task=interrupt(get_task(), 14))
    assert stopped["stopped_by"] == "SIGINT"
    assert kept.exists()
    assert not list((tmp_path / "b" / "run-0").iterdir())
    assert list(run_all(tmp_path, "--resume")["rows"]) == ["a", "b"]


def test_a_metric_that_is_not_a_number_is_not_the_best():
    for mode, best in (("min", 2), ("max", 3)):
        own = SimpleNamespace(task=get_task()._replace(mode=mode), metric="mse")
        own.history = [
            {"epoch": epoch, "val_mse": value}
            for epoch, value in enumerate((math.nan, 1.0, 2.0, math.nan), start=1)
        ]
        assert common.Run.best.fget(own)["epoch"] == best


def test_a_run_that_failed_goes_on_where_it_was_moved_to(straight, tmp_path):
    task, calls = get_task(), iter(range(20))

    def die(out, batch):
        if next(calls) == 14:
            raise RuntimeError("out of memory")
        return task.loss(out, batch)

    with pytest.raises(RuntimeError, match="out of memory"):
        run(tmp_path / "a", task=task._replace(loss=die))
    assert len(read(tmp_path / "a" / "last.ckpt")["history"]) == 2
    (tmp_path / "a").rename(tmp_path / "b")
    run(tmp_path / "b", "--resume")
    assert_same_run(straight, tmp_path / "b")


def test_a_time_limit_ends_behind_an_epoch(straight, tmp_path, capsys, monkeypatch):
    assert run(tmp_path, "--time-limit", "1e-9")["epochs_done"] == 0
    task, calls = get_task(), iter(range(100))

    def loss(out, batch):
        if next(calls) == 7:  # time is up in the second epoch
            monkeypatch.setattr(common.TimeLimit, "time_elapsed", lambda *_: math.inf)
        return task.loss(out, batch)

    argv = ("--resume", "--time-limit", "5")
    results = run(tmp_path, *argv, task=task._replace(loss=loss))
    monkeypatch.undo()
    assert (results["stopped_by"], results["epochs_done"]) == ("time limit", 2)
    assert "Stopped (time limit) after 2 of 4 epochs" in capsys.readouterr().out
    run(tmp_path, *argv)
    assert_same_run(straight, tmp_path)


# Results -------------------------------------------------------------------------


def test_files_of_a_run(straight, capsys):
    names = {"best.ckpt", "curves.png", "last.ckpt", "results.json"}
    before = {path: path.stat().st_mtime_ns for path in straight.iterdir()}
    assert {path.name for path in before} == names
    results = read(straight / "results.json")
    assert results["config"] == RECIPE | {"seed": 0, "precision": "32-true"}
    assert results["parameters"] == 5 * 8 + 8 + 2 * 8 + 8 + 1
    assert results["versions"]["torch"] == torch.__version__
    assert [row["epoch"] for row in results["history"]] == [1, 2, 3, 4]
    assert results["history"][-1]["train_loss"] < results["history"][0]["train_loss"]
    # Linear warm-up for an epoch, then half a cosine.
    factors = [0.5 * (1 + math.cos(math.pi * i / 3)) for i in range(4)]
    rates = [row["lr"] for row in results["history"]]
    assert rates == pytest.approx([1e-2 * factor for factor in factors])
    state = torch.load(straight / "last.ckpt", weights_only=True)
    (group,) = state["optimizer_states"][0]["param_groups"]
    assert group["weight_decay"] == RECIPE["weight_decay"] > 0
    again = run(straight, "--resume")  # there is nothing left to do
    assert again | {"command": results["command"]} == results
    assert {path: path.stat().st_mtime_ns for path in straight.iterdir()} == before
    assert capsys.readouterr().out == ""


def test_large_gradients_are_clipped(tmp_path):
    def task(scale):
        mean = get_task()
        return mean._replace(loss=lambda out, y: scale * mean.loss(out, y))

    ends = []
    for scale in (1e4, 1e6):
        run(tmp_path / f"{scale}", "--epochs", "1", task=task(scale))
        state = torch.load(tmp_path / f"{scale}" / "last.ckpt", weights_only=True)
        moments = state["optimizer_states"][0]["state"].values()
        ends.append(torch.cat([m["exp_avg"].flatten() for m in moments]).norm().item())
    assert ends[0] == pytest.approx(ends[1], rel=1e-2)
    assert ends[1] <= 1


def test_other_numbers_of_processes_do_not_go_on(tmp_path, capsys):
    """Their batches would be others."""
    results = run(tmp_path, "--epochs", "1")
    (tmp_path / "results.json").write_text(json.dumps(results | {"processes": 2}))
    with pytest.raises(SystemExit):
        run(tmp_path, "--epochs", "1", "--resume")
    assert "has 2 process(es), not 1" in capsys.readouterr().err


def test_best_weights_have_the_reported_metrics(straight):
    best, model = read(straight / "results.json")["best"], Model()
    state = read(straight / "best.ckpt")["state_dict"]
    model.load_state_dict({k.removeprefix("model."): v for k, v in state.items()})
    for split in ("val", "test"):
        batch = Batch.from_data_list(load()[split])
        with torch.no_grad():
            out = model.eval()(**model.inputs(batch))
        expected = pytest.approx(float((out - batch.y).square().mean()), rel=1e-5)
        assert best[f"{split}_mse"] == expected
        assert best[f"{split}_loss"] == expected


@pytest.mark.parametrize(("mode", "best"), [("max", 2), ("min", 3)])
def test_the_best_epoch_is_the_first_with_the_best_value(tmp_path, mode, best):
    values = iter([2.0, 5.0, 1.0, 5.0, 0.5])  # of four epochs, and of the test

    def rows(out, batch):
        return {"score": (torch.tensor(next(values)),)}

    def load_few() -> dict:  # one batch each
        return {split: graphs[:8] for split, graphs in load().items()}

    task = get_task()._replace(metrics={"score": MeanMetric()}, rows=rows, mode=mode)
    results = run(tmp_path, task=task, load=load_few)
    assert (results["best"]["epoch"], results["best"]["test_score"]) == (best, 0.5)
    assert read(tmp_path / "best.ckpt")["epoch"] == best - 1


# What is refused -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--epochs -1", "--epochs: must be a positive integer, got '-1'"),
        ("--lr nan", "--lr: must be a positive number, got 'nan'"),
        ("--seed -1", "--seed: must be an integer, 0 or more"),
        ("--device tpu", "--device: invalid choice: 'tpu'"),
        ("--root no/such/folder", "--root: there is no folder 'no/such/folder'"),
        ("--resume --overwrite", "not allowed with argument --resume"),
        ("--smoke --preset tiny", "not allowed with argument --smoke"),
    ],
)
def test_command_lines_that_make_no_sense(refused, tmp_path, argv, words):
    text = refused(get_args, tmp_path / "out", *argv.split())
    assert words in text
    assert text.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_recorded_commands_hold_no_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [str(Path.cwd() / "examples" / "tiny.py")])
    args = get_args(tmp_path / "a b", f"--root={tmp_path}")
    out = os.path.relpath(tmp_path)
    assert args.command == f"python examples/tiny.py --out '{out}/a b' --root={out}"


def test_nothing_is_overwritten_by_accident(straight, tmp_path, refused):
    run(tmp_path, "--epochs", "1")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert "holds a run: pass --resume" in refused(run, tmp_path, "--epochs", "1")
    for argv in ([], ["--smoke"], ["--epochs", "2"], ["--seed", "1"]):
        assert "holds another run, with epochs 1" in refused(run, tmp_path, *argv)
    for name in before:  # even a single file may be what matters
        for path in before:
            path.unlink() if path != name else None
        assert "holds a run" in refused(run, tmp_path, "--epochs", "1")
        for path, content in before.items():
            path.write_bytes(content)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    run(tmp_path, "--overwrite")
    assert_same_run(straight, tmp_path)


def test_resuming_wants_the_same_run(tmp_path, refused):
    assert "there is no run in" in refused(run, tmp_path, "--resume")
    run(tmp_path, "--time-limit", "1e-9")
    for argv, was in (
        (["--lr", "0.1"], "lr 0.01"),
        (["--epochs", "2", "--batch-size", "4"], "batch_size 8, epochs 4"),
    ):
        assert f" has {was}\n" in refused(run, tmp_path, "--resume", *argv)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, refused):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        text = refused(lambda out=out: run_main(out, load=pytest.fail))
        assert str(out) in text


@pytest.mark.parametrize("what", ["write_text", "save_checkpoint"])
def test_a_full_disk(tmp_path, refused, monkeypatch, what):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    owner = Path if what == "write_text" else common.Trainer
    monkeypatch.setattr(owner, what, fail)
    task = get_task()._replace(loss=pytest.fail)  # no work is lost
    text = refused(lambda: run_main(tmp_path, task=task))
    assert "No space left on device" in text


def test_a_loss_that_is_not_finite_is_refused(tmp_path, refused):
    task = get_task()._replace(loss=lambda out, batch: out.sum() / 0)
    text = refused(lambda: run_main(tmp_path, task=task))
    assert "in epoch 1: try a smaller --lr" in text


def test_exit_codes():
    def interrupt(_):
        raise KeyboardInterrupt

    codes = {None: 0, "time limit": 0, "SIGINT": 130, "SIGTERM": 143}
    for reason, code in codes.items():
        assert common.main(lambda _, why=reason: {"stopped_by": why}, None) == code
    assert common.main(interrupt, None) == 130
