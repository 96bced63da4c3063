import csv
import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import support
import torch
from engine import Task, Trainer, start
from support import EpochBatches, Options, StopRequest, atomic_write
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.nn import global_mean_pool
from torch_geometric.transforms import BaseTransform


class Jitter(BaseTransform):
    """A random transform, drawn from all three generators."""

    def forward(self, data: Data) -> Data:
        noise = torch.rand(1) + random.random() + np.random.rand()  # noqa: NPY002
        data.x = data.x + 1e-3 * noise.float()
        return data


class Graphs(torch.utils.data.Dataset):
    def __init__(self, indices: range, transform: BaseTransform | None = None) -> None:
        self.indices, self.transform = indices, transform

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, i):
        if isinstance(i, slice):
            return Graphs(self.indices[i], self.transform)
        generator = torch.Generator().manual_seed(self.indices[i])
        x = torch.randn(3 + i % 4, 5, generator=generator)
        data = Data(x=x, edge_index=torch.empty(2, 0).long(), y=x.mean(0)[:1] * 3)
        return data if self.transform is None else self.transform(data)


class Model(torch.nn.Module):
    """Small, and with everything that must survive: dropout and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(5, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.ReLU(),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(8, 1),
        )
        self.unused = torch.nn.Parameter(torch.ones(2))

    def inputs(self, batch):
        return {"x": batch.x, "batch": batch.batch}

    def forward(self, x: Tensor, batch: Tensor) -> Tensor:
        return global_mean_pool(self.net(x), batch)


def loss(out: Tensor, batch) -> Tensor:
    return (out.view(-1) - batch.y).square().mean()


TASK = Task(
    loss,
    lambda out, batch: {"out": out.view(-1), "y": batch.y},
    lambda rows: {"mse": float((rows["out"] - rows["y"]).square().mean())},
    metric="mse",
    maximize=False,
)


def make(out: Path, task: Task = TASK, transform=None, **kwargs) -> Trainer:
    defaults = {"epochs": 4, "batch_size": 8, "lr": 1e-2, "warmup_epochs": 1}
    options = Options(out, **{**defaults, "device": "cpu", **kwargs})
    fabric = start(options)
    sizes = {"train": range(30), "val": range(30, 43), "test": range(43, 53)}
    datasets = {split: Graphs(indices, transform) for split, indices in sizes.items()}
    return Trainer(fabric, Model(), datasets, task, options, {"model": "tiny"})


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)


def assert_same(one, two) -> None:
    """Nested containers are equal, tensors bit for bit; times may differ."""
    assert type(one) is type(two)
    if isinstance(one, Tensor):
        assert torch.equal(one, two)
    elif isinstance(one, dict):
        assert one.keys() == two.keys()
        for key in one.keys() - {"seconds", "elapsed"}:
            assert_same(one[key], two[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert_same(a, b)
    else:
        assert one == two


def assert_same_run(one: Path, two: Path) -> None:
    for name in ("last.pt", "best.pt"):
        assert_same(load(one / name), load(two / name))
    rows = []
    for out in (one, two):
        with (out / "metrics.csv").open() as file:
            rows.append([{**row, "seconds": ""} for row in csv.DictReader(file)])
    assert rows[0] == rows[1]


def interrupting(where: str, call: int) -> Task:
    """A task that sends a signal to this process in the given call of a part."""
    calls = 0

    def wrap(part):
        def wrapped(*args):
            nonlocal calls
            calls += 1
            if calls == call:
                os.kill(os.getpid(), signal.SIGTERM)
            return part(*args)

        return wrapped

    parts = {name: getattr(TASK, name) for name in ("loss", "collect", "metrics")}
    parts[where] = wrap(parts[where])
    return Task(**parts, metric="mse", maximize=False)


# Resuming ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("straight")
    summary = make(out, transform=Jitter()).fit()
    assert summary["epochs_done"] == 4
    assert summary["stopped_by"] is None
    return out


@pytest.mark.parametrize(
    ("where", "call", "epoch", "step"),
    [
        # An epoch trains 4 batches and, as the first two are the best so far,
        # evaluates 2 of validation and 2 of the test.
        ("metrics", 4, 2, 0),  # at the very end of the second epoch
        ("loss", 2, 0, 2),  # within the first epoch
        ("loss", 13, 1, 4),  # in an evaluation: its epoch is trained
        ("loss", 4, 0, 4),
    ],
    ids=["boundary", "step", "evaluation", "last-step"],
)
def test_an_interrupted_run_goes_on_bit_for_bit(
    straight, tmp_path, capsys, where, call, epoch, step
):
    summary = make(tmp_path, interrupting(where, call), Jitter()).fit()
    assert summary["stopped_by"] == "SIGTERM"
    state = load(tmp_path / "last.pt")
    assert (state["epoch"], state["step"]) == (epoch, step)
    assert "Stopped (SIGTERM)" in capsys.readouterr().out

    torch.rand(7)  # what has happened to the generators since does not matter
    summary = make(tmp_path, transform=Jitter(), resume=True).fit()
    assert summary["epochs_done"] == 4
    assert_same_run(straight, tmp_path)


def test_a_run_that_was_killed_goes_on_bit_for_bit(straight, tmp_path):
    calls = iter(range(5))

    def die(rows):
        if next(calls) == 4:  # validation of the third epoch
            raise RuntimeError("out of memory")
        return TASK.metrics(rows)

    task = Task(TASK.loss, TASK.collect, die, "mse", maximize=False)
    with pytest.raises(RuntimeError, match="out of memory"):
        make(tmp_path, task, Jitter()).fit()
    assert load(tmp_path / "last.pt")["epoch"] == 2
    make(tmp_path, transform=Jitter(), resume=True).fit()
    assert_same_run(straight, tmp_path)


def test_two_and_two_epochs_are_four(straight, tmp_path):
    """By the time limit, which is checked before the first step of an epoch."""
    trainer = make(tmp_path, transform=Jitter())
    original = trainer._finish_epoch

    def finish():
        row = original()
        if trainer.epoch == 2:
            trainer.stop.limit = -1.0
        return row

    trainer._finish_epoch = finish
    summary = trainer.fit()
    assert (summary["stopped_by"], summary["epochs_done"]) == ("time limit", 2)
    make(tmp_path, transform=Jitter(), resume=True).fit()
    assert_same_run(straight, tmp_path)


def test_time_limit_stops_at_a_checkpoint(straight, tmp_path, capsys):
    summary = make(tmp_path, transform=Jitter(), time_limit=0.0).fit()
    assert summary["stopped_by"] == "time limit"
    assert load(tmp_path / "last.pt")["step"] == 0
    message = capsys.readouterr().out
    assert "Stopped (time limit) in epoch 1/4" in message
    assert "--resume" in message
    make(tmp_path, transform=Jitter(), resume=True).fit()
    assert_same_run(straight, tmp_path)


def test_resuming_a_complete_run_changes_nothing(tmp_path):
    make(tmp_path, epochs=1).fit()
    before = load(tmp_path / "last.pt")
    summary = make(tmp_path, epochs=1, resume=True).fit()
    assert summary["epochs_done"] == 1
    assert_same(before, load(tmp_path / "last.pt"))


def test_a_run_can_be_extended(tmp_path, capsys):
    make(tmp_path, epochs=1).fit()
    summary = make(tmp_path, epochs=2, resume=True).fit()
    assert summary["epochs_done"] == 2
    assert "not an exact continuation" in capsys.readouterr().out
    assert len(load(tmp_path / "last.pt")["history"]) == 2


def test_worker_processes_make_no_difference(tmp_path):
    make(tmp_path / "0", epochs=2).fit()
    make(tmp_path / "1", epochs=2, num_workers=1).fit()
    assert_same_run(tmp_path / "0", tmp_path / "1")


def test_resuming_wants_the_same_run(tmp_path):
    with pytest.raises(SystemExit, match="no checkpoint"):
        make(tmp_path, resume=True).fit()
    make(tmp_path, epochs=1).fit()
    with pytest.raises(SystemExit, match=r"lr: 0\.01 then, 0\.1 now"):
        make(tmp_path, epochs=1, resume=True, lr=0.1).fit()
    with pytest.raises(SystemExit, match="batch_size: 8 then, 4 now"):
        make(tmp_path, epochs=1, resume=True, batch_size=4).fit()


def test_a_run_is_not_overwritten_by_accident(tmp_path):
    make(tmp_path, epochs=1).fit()
    before = (tmp_path / "last.pt").read_bytes()
    with pytest.raises(SystemExit, match=r"--resume.*--overwrite"):
        make(tmp_path, epochs=1).fit()
    assert (tmp_path / "last.pt").read_bytes() == before
    assert make(tmp_path, epochs=1, seed=5, overwrite=True).fit()["seed"] == 5


def test_a_crash_while_saving_leaves_the_old_file(tmp_path):
    path = tmp_path / "file"
    atomic_write(path, lambda part: part.write_text("old"))

    def fail(part: Path) -> None:
        part.write_text("half of the n")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        atomic_write(path, fail)
    assert path.read_text() == "old"
    atomic_write(path, lambda part: part.write_text("new"))
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


# Results -------------------------------------------------------------------------


def test_files_of_a_run(straight):
    names = {"best.pt", "curves.png", "last.pt", "metrics.csv", "metrics.json"}
    assert {path.name for path in straight.iterdir()} == names
    assert (straight / "curves.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((straight / "metrics.json").read_text())
    assert summary["config"]["model"] == "tiny"
    assert summary["config"]["parameters"] == 5 * 8 + 8 + 2 * 8 + 8 + 1 + 2
    assert summary["seed"] == 0
    assert "pytest" in summary["command"]
    assert summary["versions"]["torch"] == torch.__version__
    assert summary["device"]
    assert summary["processes"] == 1
    with (straight / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["epoch"] for row in rows] == ["1", "2", "3", "4"]
    best = min(rows, key=lambda row: float(row["val_mse"]))
    assert summary["best"]["epoch"] == int(best["epoch"])
    assert summary["best"]["val"]["mse"] == float(best["val_mse"])
    assert summary["best"]["test"]["mse"] == float(best["test_mse"])
    # The test split is looked at where validation improves, and nowhere else.
    assert all((row["test_mse"] != "") == (row["best"] == "1") for row in rows)


def test_best_weights_have_the_reported_metrics(tmp_path):
    trainer = make(tmp_path)
    trainer.fit()
    best = load(tmp_path / "best.pt")
    model = Model()
    model.load_state_dict(best["model"])
    model.eval()
    for split in ("val", "test"):
        errors = []
        for data in trainer.datasets[split]:  # one by one
            out = model(data.x, torch.zeros(data.num_nodes).long())
            errors.append((out.view(-1) - data.y).square().item())
        assert best[split]["mse"] == pytest.approx(np.mean(errors), rel=1e-5)
        assert best[split]["loss"] == pytest.approx(np.mean(errors), rel=1e-5)


@pytest.mark.parametrize(("maximize", "expected"), [(True, 2), (False, 3)])
def test_the_best_epoch_is_the_first_with_the_best_value(tmp_path, maximize, expected):
    values = iter([2.0, 0.0, 5.0, 0.0, 1.0, 0.0, 5.0, 0.0])  # some for tests

    def metrics(rows):
        return {"score": next(values)}

    if maximize:  # epochs: 2, 5 (each followed by a test), 1, 5
        values = iter([2.0, 0.0, 5.0, 0.0, 1.0, 5.0])
    else:  # epochs: 2, 5, 1, 5
        values = iter([2.0, 0.0, 5.0, 1.0, 0.0, 5.0])
    task = Task(TASK.loss, TASK.collect, metrics, "score", maximize)
    assert make(tmp_path, task).fit()["best"]["epoch"] == expected
    assert next(values, None) is None


def test_a_tie_may_be_broken_by_another_metric(tmp_path, capsys):
    rows = [  # epochs 1, 3 and 4 are the best so far, each followed by a test
        *[{"score": 2.0, "other": 5.0}, {"score": 0.0, "other": 0.0}],
        {"score": 1.0, "other": 0.0},
        *[{"score": 2.0, "other": 4.0}, {"score": 0.0, "other": 0.0}],
        *[{"score": 3.0, "other": 9.0}, {"score": 7.0, "other": 0.0}],
        {"score": 3.0, "other": 9.0},
    ]
    values = iter(rows)
    task = Task(TASK.loss, TASK.collect, lambda _: next(values), "score", tie="other")
    summary = make(tmp_path, task, epochs=5, quiet=True).fit()
    assert summary["best"]["epoch"] == 4
    assert summary["best"]["test"]["score"] == 7.0
    assert next(values, None) is None
    assert capsys.readouterr().out == ""


def test_a_loss_that_is_not_finite_is_an_error(tmp_path):
    task = Task(
        lambda out, batch: loss(out, batch) / 0,
        TASK.collect,
        TASK.metrics,
        "mse",
        maximize=False,
    )
    with pytest.raises(FloatingPointError, match="epoch 1, step 1"):
        make(tmp_path, task).fit()


def test_training_reduces_the_loss(tmp_path):
    make(tmp_path, epochs=15).fit()
    history = load(tmp_path / "last.pt")["history"]
    assert history[-1]["train_loss"] < 0.7 * history[0]["train_loss"]


def test_learning_rate_warms_up_and_falls_to_nothing(tmp_path):
    trainer = make(tmp_path, epochs=3, warmup_epochs=1)  # 4 steps an epoch
    factors = [trainer._schedule(step) for step in range(12)]
    assert factors[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert factors[4] == 1.0
    assert factors[8] == pytest.approx(0.5)
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert trainer._schedule(12) == 0.0


def test_options_come_from_the_command_line_then_from_the_recipe(tmp_path):
    from argparse import Namespace

    args = Namespace(out=tmp_path, epochs=None, lr=0.5, seed=3)
    recipe = Namespace(epochs=7, lr=0.1, batch_size=4, optimizer="adam", width=9)
    options = Options.choose(args, recipe)
    assert (options.epochs, options.lr, options.seed) == (7, 0.5, 3)
    assert (options.batch_size, options.optimizer) == (4, "adam")
    assert options.time_limit is None


# Order and signals -----------------------------------------------------------------


@pytest.mark.parametrize(("size", "world"), [(10, 1), (10, 3), (7, 2), (2, 2), (1, 2)])
def test_processes_share_the_graphs_of_an_epoch(size, world):
    shares = []
    for rank in range(world):
        batches = EpochBatches(size, batch_size=2, seed=3, rank=rank, world=world)
        batches.set_epoch(5)
        assert len(batches) == -(-(size // world) // 2)
        shares.append([i for batch in batches for i in batch])
    seen = [i for share in shares for i in share]
    assert len({len(share) for share in shares}) == 1
    assert len(seen) == len(set(seen)) == size // world * world
    assert set(seen) <= set(range(size))


def test_order_depends_on_seed_and_epoch_only():
    def order(seed, epoch, skip=0):
        batches = EpochBatches(20, batch_size=3, seed=seed)
        batches.set_epoch(1)
        batches.set_epoch(epoch, skip)
        return list(batches)

    assert order(0, 2) == order(0, 2)
    assert order(0, 2) != order(0, 3)
    assert order(0, 2) != order(1, 2)
    assert order(0, 2, skip=4) == order(0, 2)[4:]


def test_a_second_signal_acts_at_once(request):
    # A process in the background of a shell script is started with Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with StopRequest(None) as stop:
        assert stop.reason is None
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.reason == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == (
        handlers
    )


def test_time_limit_counts_from_the_start_of_the_program(monkeypatch):
    monkeypatch.setattr(support, "_STARTED", support.time.monotonic() - 90)
    assert StopRequest(1.0).reason == "time limit"
    assert StopRequest(2.0).reason is None
