"""What a run needs besides training: options, order, signals, states, reports."""

import csv
import functools
import math
import os
import platform
import random
import shlex
import signal
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure  # draws with Agg, unlike pyplot, everywhere

_STARTED = time.monotonic()
_PACKAGES = (
    *("pyg-chimera", "torch", "torch-geometric", "lightning-fabric"),
    *("numba", "numpy", "scikit-learn", "ogb", "rdkit"),
)


@dataclass
class Options:
    """How to train. What to train on, and which model, is up to the example."""

    out: Path
    epochs: int
    batch_size: int  # of all processes together
    lr: float
    optimizer: str = "adamw"
    weight_decay: float = 0.0
    warmup_epochs: float = 0.0
    clip: float = 1.0
    seed: int = 0
    num_workers: int = 0
    device: str = "auto"
    precision: str = "32-true"
    time_limit: float | None = None  # minutes
    quiet: bool = False  # no line for each epoch
    resume: bool = False
    overwrite: bool = False

    def identity(self) -> dict[str, Any]:
        """What must stay when a run is resumed."""
        free = {"out", "epochs", "num_workers", "device", "time_limit"}
        free |= {"resume", "overwrite", "quiet"}
        return {k: v for k, v in asdict(self).items() if k not in free}

    @classmethod
    def choose(cls, args: Namespace, recipe: Any) -> "Options":
        """What the command line says, and where it is silent, the recipe."""
        chosen = {}
        for field in fields(cls):
            for source in (recipe, args):
                value = getattr(source, field.name, None)
                if value is not None:
                    chosen[field.name] = value
        return cls(**chosen)


def add_arguments(parser: ArgumentParser) -> None:
    """Adds what all examples understand. None means: the preset decides."""
    group = parser.add_argument_group("training")
    group.add_argument("--epochs", type=int)
    group.add_argument("--batch-size", type=int, help="of all processes together")
    group.add_argument("--lr", type=float)
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--num-workers", type=int, default=0, help="of the data loader")
    group.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    group.add_argument("--precision", default="32-true", help="e.g. bf16-mixed")
    group = parser.add_argument_group("run")
    group.add_argument("--out", type=Path, help="folder of this run")
    group.add_argument("--resume", action="store_true", help="continue from last.pt")
    group.add_argument("--overwrite", action="store_true", help="start again in --out")
    group.add_argument(
        "--time-limit",
        type=float,
        metavar="MINUTES",
        help="stop at a checkpoint after this time, to be resumed",
    )


class EpochBatches:
    """A batch sampler whose order is a function of seed and epoch alone.

    Args:
        size: Number of graphs.
        batch_size: Graphs in a batch of one process.
        seed: Seed of the order.
        rank: Number of this process.
        world: Number of processes. Each gets an equal share; the few graphs that are
            left over are other ones in every epoch.
    """

    def __init__(
        self, size: int, batch_size: int, seed: int, rank: int = 0, world: int = 1
    ) -> None:
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.rank, self.world = rank, world
        #: Also for the loader, which draws the seed of its workers from it.
        self.generator = torch.Generator()
        self.set_epoch(0)

    def set_epoch(self, epoch: int, skip: int = 0) -> None:
        """Prepares an epoch, without its first ``skip`` batches."""
        state = np.random.SeedSequence([self.seed, epoch]).generate_state(1)
        self.generator.manual_seed(int(state[0]))
        order = torch.randperm(self.size, generator=self.generator)
        order = order[: self.size // self.world * self.world]
        share = order[self.rank :: self.world]
        batches = share.split(self.batch_size) if len(share) else ()
        self.batches = [batch.tolist() for batch in batches][skip:]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class StopRequest:
    """Remembers a signal, or that time is up, until the training loop can act on it.

    Args:
        minutes: Time limit since the program started.
    """

    def __init__(self, minutes: float | None) -> None:
        self.limit = math.inf if minutes is None else 60 * minutes
        self.signal: signal.Signals | None = None

    def __enter__(self) -> "StopRequest":
        signals = (signal.SIGINT, signal.SIGTERM)
        self.previous = {s: signal.signal(s, self._receive) for s in signals}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _: object) -> None:
        self.signal = signal.Signals(number)
        signal.signal(number, self.previous[self.signal])  # the next one acts at once

    @property
    def reason(self) -> str | None:
        """Why to stop, or None."""
        if self.signal is not None:
            return self.signal.name
        return "time limit" if time.monotonic() - _STARTED > self.limit else None


def exit_code(stopped_by: str | None) -> int:
    """As shells have it: 130 after Ctrl-C. A time limit is a regular end."""
    return {"SIGINT": 130, "SIGTERM": 143}.get(stopped_by or "", 0)


def prepare_worker(_: int) -> None:
    """Lets Ctrl-C stop the program in its own time, not a worker of the loader."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # how PyTorch ends a worker


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of all generators, in types that ``weights_only`` loading allows."""
    name, keys, *rest = np.random.get_state()  # noqa: NPY002 (others may use it)
    state = {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restores what :func:`random_state` returned."""
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    keys = keys.numpy().astype(np.uint32)
    np.random.set_state((name, keys, *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def atomic_write(path: Path, write: Callable[[Path], Any]) -> None:
    """Lets ``write`` fill a file beside ``path``, then renames it."""
    part = path.with_name(path.name + ".part")
    write(part)
    os.replace(part, path)


@functools.cache  # it reads files, and short epochs would feel that
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def environment(device: torch.device) -> dict[str, Any]:
    """With what a run was made: command, device, versions."""
    out: dict[str, Any] = {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": torch.get_num_threads(),
        "versions": _versions(),
    }
    if device.type == "cuda":
        out["device"] = torch.cuda.get_device_name(device)
        out["peak_memory_mb"] = round(torch.cuda.max_memory_allocated(device) / 2**20)
    return out


def write_csv(path: Path, history: list[dict[str, Any]]) -> None:
    """Writes one row per epoch."""
    columns = dict.fromkeys(name for row in history for name in row)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(columns))
        writer.writeheader()
        writer.writerows(history)


def plot(path: Path, history: list[dict[str, Any]], metric: str, best: int) -> None:
    """Draws losses and the metric over epochs, the best of which is marked."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for axes, names in (
        (left, ("train_loss", "val_loss")),
        (right, (f"val_{metric}", f"test_{metric}")),
    ):
        for name in names:
            rows = [row for row in history if name in row]
            axes.plot(
                [row["epoch"] for row in rows],
                [row[name] for row in rows],
                marker="." if len(rows) < 30 else None,
                label=name.replace("_", " "),
            )
        axes.set_xlabel("epoch")
        axes.legend()
    left.set_ylabel("loss")
    right.set_ylabel(metric.replace("_", " "))
    right.axvline(best, color="grey", linewidth=0.5)
    figure.savefig(path, format="png", dpi=120)
