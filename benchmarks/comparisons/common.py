"""Shared by all comparisons: the command line, training with Lightning, results.

A run is a folder::

    results.json   configuration, command, versions, all epochs, the test of the best
    curves.png     losses and the metric
    last.ckpt      after the last finished epoch: where ``--resume`` continues
    best.ckpt      after the epoch that was best on validation graphs

An epoch is a function of the weights, the seed and its number alone. So a run that was
stopped and resumed ends like one that was not, on a CPU bit for bit.
"""

import contextlib
import json
import logging
import os
import platform
import shlex
import signal
import sys
import time
import warnings
from argparse import (
    ArgumentParser,
    ArgumentTypeError,
    Namespace,
    RawDescriptionHelpFormatter,
)
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from datetime import timedelta
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from math import cos, inf, isnan, pi
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple, NoReturn
from urllib.error import URLError

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure  # draws with Agg, unlike pyplot, everywhere
from pytorch_lightning import Callback, LightningModule, Trainer
from pytorch_lightning.callbacks import Timer, TQDMProgressBar
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor
from torch.nn import Module, ModuleDict
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DistributedSampler, Subset
from torch_geometric import seed_everything
from torch_geometric.data import Batch
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage
from torch_geometric.loader import DataLoader
from torchmetrics import MeanMetric, Metric
from tqdm import tqdm

import pyg_chimera

sys.path.append(str(Path(__file__).parents[1]))
from json_files import write_json

#: The rank of this process among those that `torchrun` started, and their number.
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
RESULTS, CURVES, LAST, BEST = "results.json", "curves.png", "last.ckpt", "best.ckpt"
PACKAGES = (
    *("torch", "torch-geometric", "pytorch-lightning", "torchmetrics"),
    *("numba", "numpy", "scikit-learn", "ogb", "rdkit"),
)

# Lightning's remarks on its usage: the examples print what matters.
logging.getLogger("pytorch_lightning").setLevel(logging.WARNING)
for remark in ("does not have many workers", "LeafSpec", "`broadcast_buffers`"):
    warnings.filterwarnings("ignore", f".*{remark}")


# Command line --------------------------------------------------------------------


def number(
    kind: Callable[[str], Any], least: float, words: str, below: float = 2**31
) -> Callable:
    """The type of a numeric argument, with bounds."""

    def convert(text: str) -> Any:
        with contextlib.suppress(ValueError):
            if least <= (value := kind(text)) < below:
                return value
        raise ArgumentTypeError(f"must be {words}, got {text!r}")

    return convert


natural = number(int, 0, "an integer, 0 or more")
positive_int = number(int, 1, "a positive integer")
positive_float = number(float, sys.float_info.min, "a positive number")


def folder(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_dir():
        raise ArgumentTypeError(f"there is no folder {text!r} (make it to download)")
    return path


def make_parser(
    doc: str | None, presets: Iterable[str], root: str, processed: bool = False
) -> ArgumentParser:
    """A parser with the arguments of all examples; without a root, none for files.

    With `processed`, the processed files of PyG's data sets may be in another folder.
    """
    style = RawDescriptionHelpFormatter
    parser = ArgumentParser(description=doc, formatter_class=style)
    parser.error = refuse  # without the usage
    add = parser.add_mutually_exclusive_group().add_argument
    add("--preset", choices=list(presets), help="the model's size and its training")
    add("--smoke", dest="preset", action="store_const", const="smoke",
        help="train for seconds, on a few graphs of the data set")  # fmt: skip
    if root:
        add = parser.add_argument_group("data").add_argument
        add("--root", type=folder, default=Path(root), help=f"default: {root}")
        if processed:
            add("--processed-root", type=folder, help="for a --root that is read-only")
    add = parser.add_argument_group("training (default: the preset's)").add_argument
    add("--epochs", type=positive_int)
    add("--batch-size", type=positive_int, help="of all processes together")
    add("--lr", type=positive_float)
    add("--seed", type=natural, default=0, help="default: 0")
    group = parser.add_argument_group("run")
    add = group.add_argument
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    add("--device", choices=devices, default=devices[0], help=f"default: {devices[0]}")
    precisions = ["32-true", "16-mixed", "bf16-mixed"]
    add("--precision", choices=precisions, default="32-true", help="default: 32-true")
    add("--num-workers", type=natural, default=0, help="processes that load graphs")
    add("--out", type=Path, help="folder of the run; default: one below runs")
    add("--time-limit", type=positive_float, metavar="MINUTES",
        help="stop after the epoch in which it is over, to be resumed")  # fmt: skip
    add = group.add_mutually_exclusive_group().add_argument
    add("--resume", action="store_true", help="go on with the run in --out")
    add("--overwrite", action="store_true", help="replace the run in --out")
    return parser


def parse(
    parser: ArgumentParser,
    argv: list[str] | None,
    recipe: Callable[[Namespace], Mapping[str, Any]],
) -> Namespace:
    """The command line, with the recipe's values for what it does not set."""
    parser.set_defaults(**recipe(parser.parse_args(argv)))
    args = parser.parse_args(argv)
    if args.batch_size % WORLD:
        parser.error(f"--batch-size must be a multiple of {WORLD}, the processes")
    if args.time_limit is not None:
        args.time_limit = time.monotonic() + 60 * args.time_limit
    words = [sys.argv[0], *(sys.argv[1:] if argv is None else argv)]
    args.command = shlex.join(["python", *map(_relative, words)])
    return args


def _relative(word: str) -> str:
    """A word of a command, with a relative instead of an absolute path."""
    option, sign, path = word.rpartition("=")
    return f"{option}{sign}{os.path.relpath(path)}" if os.path.isabs(path) else word


def refuse(message: object) -> NoReturn:
    """Ends the program with a single line, in the style of ``ArgumentParser``."""
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    raise SystemExit(2)


def loading_ogb() -> contextlib.AbstractContextManager[None]:
    """Allows PyG's classes that are in the files of OGB's data sets."""
    return torch.serialization.safe_globals(
        [DataEdgeAttr, DataTensorAttr, GlobalStorage]
    )


def main(run: Callable[[Namespace], Mapping[str, Any]], args: Namespace) -> int:
    """Runs an example and returns the exit code of the program."""
    try:
        stopped_by = run(args)["stopped_by"]
    except KeyboardInterrupt:  # when there was nothing to save
        print("Interrupted before or after training", file=sys.stderr)
        stopped_by = "SIGINT"
    except URLError as error:
        refuse(
            f"the data could not be downloaded: {error}. Pass a --root that was copied "
            "from where this has run with a network"
        )
    except (OSError, FloatingPointError) as error:
        refuse(error)
    return {"SIGINT": 130, "SIGTERM": 143}.get(stopped_by, 0)


# Folders of runs -----------------------------------------------------------------


def read_run(out: Path) -> dict[str, Any]:
    """The results so far of the run in a folder, which must hold one."""
    path = out / RESULTS
    if not path.exists():
        refuse(f"--resume: there is no run in {out}")
    return json.loads(path.read_text())


def _versions() -> dict[str, str]:
    # The metadata of a clone may be stale.
    found = {"pyg-chimera": pyg_chimera.__version__}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _other(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """What a run was started with, where that is not what is asked for now."""
    names = [k for k in sorted({*then, *now}) if then.get(k) != now.get(k)]
    return ", ".join(f"{name} {then.get(name)!r}" for name in names)


def open_run(args: Namespace) -> dict[str, Any]:
    """Checks that a run can be written, before there is any work to lose.

    Returns:
        The results to write, including those so far if the run is resumed.
    """
    free = ("out", "root", "processed_root", "num_workers", "device", "command")
    free += ("time_limit", "resume", "overwrite")
    config = {name: value for name, value in vars(args).items() if name not in free}
    on_gpu = args.device == "cuda"
    results = {
        "config": json.loads(json.dumps(config)),  # as it will be read back
        "command": args.command,
        "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
        "processes": WORLD,
        "threads": torch.get_num_threads(),
        "versions": _versions(),
        "stopped_by": None,
    }
    files = RESULTS, CURVES, LAST, BEST
    found = [name for name in files if (args.out / name).exists()]
    if args.resume:
        before = read_run(args.out)
        then, now = before["config"], results["config"]
        if was := _other(then, now):
            refuse(f"--resume: the run in {args.out} has {was}")
        if before["processes"] != WORLD:  # batches, and their norms, would differ
            refuse(
                f"--resume: the run in {args.out} has {before['processes']} "
                f"process(es), not {WORLD}: start it in the same way"
            )
        return before | results
    if RANK == 0:
        if found and not args.overwrite:
            what = "a run: pass --resume to go on with it,"
            if RESULTS in found:
                then = read_run(args.out).get("config", {})
                if was := _other(then, results["config"]):
                    what = f"another run, with {was}: pass"
            refuse(
                f"{args.out} holds {what} --overwrite to replace it, or another --out"
            )
        args.out.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=args.out) as probe:
            probe.write(bytes(2**20))
        replaced = [args.out / name for name in found]
        if RESULTS in found and "rows" in read_run(args.out):
            # Runs below it, else those not reached would pass for this one's.
            for name in files:
                replaced += args.out.glob(f"*/**/{name}")
        for path in replaced:
            path.unlink()
    return results


def draw_curves(path: Path, history: list[dict[str, float]], metric: str) -> None:
    """Draws losses and the metric of all epochs."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    epochs = [row["epoch"] for row in history]
    shown = (("train_loss", "val_loss"), (f"val_{metric}",))
    for axes, names in zip(figure.subplots(1, 2), shown, strict=True):
        for name in names:
            axes.plot(epochs, [row[name] for row in history], ".-", label=name)
        axes.set_xlabel("epoch")
        axes.legend()
    figure.savefig(path, dpi=120)


# Training ------------------------------------------------------------------------


def count_parameters(model: Module) -> int:
    """The number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def match_size(build: Callable[[int], Module], target: int, widths: range) -> int:
    """The width in a range for which a model's number of parameters is closest to a
    target. Models grow with their width.
    """

    def size(width: int) -> int:
        return count_parameters(build(width))

    at = bisect_left(widths, target, key=size)
    sizes = {width: size(width) for width in widths[max(0, at - 1) : at + 1]}
    best = min(sizes, key=lambda width: abs(sizes[width] - target))
    if RANK == 0 and abs(sizes[best] - target) > 0.1 * target:
        print(
            f"A model has {sizes[best]:,} parameters, as none is closer to {target:,}: "
            "keep this in mind when comparing",
            file=sys.stderr,
        )
    return best


class Task(NamedTuple):
    """How to interpret a model's output: the loss, a mean over the batch; metrics by
    name, the first of which selects the best epoch; and the arguments of their
    ``update``. ``mode`` is ``"max"`` if more is better, otherwise ``"min"``. ``weight``
    is that of a batch in the mean loss of an epoch.
    """

    loss: Callable[[Tensor, Batch], Tensor]
    metrics: dict[str, Metric]
    rows: Callable[[Tensor, Batch], dict[str, tuple[Tensor, ...]]]
    mode: str = "max"
    weight: Callable[[Batch], int] = attrgetter("num_graphs")


class Run(LightningModule):
    """A model with its data and its task, and the record of its training.

    Like ``GraphModel``, the model has a method ``inputs`` that turns a batch into the
    arguments of ``forward``. ``load`` returns the data sets ``train``, ``val``, and
    those to test on, in this order. Without a title, nothing is printed.
    """

    test_name = "test"

    def __init__(
        self,
        args: Namespace,
        model: Module,
        task: Task,
        load: Callable[[], dict[str, Any]],
        results: dict[str, Any],
        title: str | None,
    ) -> None:
        super().__init__()
        self.args, self.model, self.task, self.title = args, model, task, title
        self.metric = next(iter(task.metrics))
        self.metrics = ModuleDict(task.metrics | {"loss": MeanMetric()})
        self.train_loss = MeanMetric()
        self.load = cache(load)
        self.results = results | {"parameters": count_parameters(model)}
        self.history: list[dict[str, float]] = []
        self.generator = torch.Generator()  # of seeds for workers
        self.interrupted = False

    def interrupt(self, *_: object) -> NoReturn:
        """Handles Ctrl-C, and records it: Python drops exceptions in destructors, and
        that of a loader, which waits for its workers, takes a while.
        """
        self.interrupted = True
        raise KeyboardInterrupt

    def obey(self) -> None:
        if self.interrupted:
            raise KeyboardInterrupt

    def prepare_data(self) -> None:
        self.load()  # in one process, while the others wait for the files it writes

    def setup(self, stage: str) -> None:
        self.datasets = self.load()

    def loader(self, name: str) -> DataLoader:
        dataset, sampler = self.datasets[name], None
        if name == "train":  # shuffled by seed and epoch
            seed = 1000 * self.args.seed
            sampler = DistributedSampler(dataset, WORLD, RANK, seed=seed)
            # Lightning does this too, but after workers have begun the first one.
            sampler.set_epoch(len(self.history))
            self.generator.manual_seed(self.epoch_seed(len(self.history)))
        elif WORLD > 1:  # each graph counts once
            dataset = Subset(dataset, range(RANK, len(dataset), WORLD))
        return DataLoader(
            dataset,
            self.args.batch_size // WORLD,
            sampler=sampler,
            num_workers=self.args.num_workers,
            pin_memory=self.args.device == "cuda",
            generator=self.generator,  # leaves the global one alone
        )

    def epoch_seed(self, epoch: int) -> int:
        state = np.random.SeedSequence([self.args.seed, epoch, RANK])
        return int(state.generate_state(1)[0])

    def transfer_batch_to_device(
        self, batch: Batch, device: torch.device, dataloader_idx: int
    ) -> Batch:
        return batch.to(device, non_blocking=True)  # from pinned memory

    def train_dataloader(self) -> DataLoader:
        return self.loader("train")

    def val_dataloader(self) -> DataLoader:
        return self.loader("val")

    def test_dataloader(self) -> DataLoader:
        return self.loader(self.test_name)

    def training_step(self, batch: Batch) -> Tensor:
        self.obey()
        loss = self.task.loss(self.model(**self.model.inputs(batch)), batch)
        if not loss.isfinite():
            raise FloatingPointError(
                f"the loss is {float(loss)} in epoch {self.current_epoch + 1}: try a "
                "smaller --lr"
            )
        self.train_loss.update(loss.detach(), self.task.weight(batch))
        self.log("train_loss", self.train_loss, on_step=False, on_epoch=True)
        return loss

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        norm = clip_grad_norm_(self.model.parameters(), gradient_clip_val or inf)
        # Mixed precision skips steps that overflow.
        if self.args.precision != "16-mixed" and not norm.isfinite():
            raise FloatingPointError(
                f"a gradient is not finite in epoch {self.current_epoch + 1}: try a "
                "smaller --lr"
            )

    def evaluate(self, batch: Batch, split: str) -> None:
        self.obey()
        out = self.model(**self.model.inputs(batch))
        rows = {"loss": (self.task.loss(out, batch), self.task.weight(batch))}
        for name, row in (rows | self.task.rows(out.float(), batch)).items():
            self.metrics[name].update(*row)
            self.log(f"{split}_{name}", self.metrics[name])

    def validation_step(self, batch: Batch) -> None:
        self.evaluate(batch, "val")

    def test_step(self, batch: Batch) -> None:
        self.evaluate(batch, self.test_name)

    def configure_optimizers(self) -> dict[str, Any]:
        args, total = self.args, int(self.trainer.estimated_stepping_batches)
        # In a short run, a recipe's warm-up would leave no time for the rest.
        warmup = min(args.warmup_epochs / args.epochs, 0.25) * total

        def factor(step: int) -> float:
            """Linear warm-up, then half a cosine."""
            if step < warmup:
                return (step + 1) / (warmup + 1)
            return (1 + cos(pi * min(1, (step - warmup) / max(1, total - warmup)))) / 2

        optimizer = getattr(torch.optim, args.optimizer)(
            self.model.parameters(), args.lr, weight_decay=args.weight_decay
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        schedule = {"scheduler": scheduler, "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_train_start(self) -> None:
        sizes = " / ".join(f"{len(dataset):,}" for dataset in self.datasets.values())
        self.say(
            f"{self.title}, {self.results['parameters']:,} parameters; {sizes} graphs; "
            f"{WORLD} process(es) on {self.args.device}; results in {self.args.out}"
        )
        self.record()
        if self.global_step == 0:
            self.save(LAST)

    def on_train_epoch_start(self) -> None:
        self.begin = time.monotonic()
        seed = self.epoch_seed(self.current_epoch)
        seed_everything(seed)
        self.generator.manual_seed(seed)

    def on_validation_start(self) -> None:
        if WORLD > 1:  # use the running statistics of the first process, as stored
            for buffer in self.model.buffers():
                torch.distributed.broadcast(buffer, 0)

    def on_train_epoch_end(self) -> None:
        metrics = sorted(self.trainer.callback_metrics.items())
        row = {"epoch": self.current_epoch + 1, **{k: float(v) for k, v in metrics}}
        row["lr"] = self.trainer.optimizers[0].param_groups[0]["lr"]
        row["seconds"] = round(time.monotonic() - self.begin, 2)
        self.history.append(row)
        # Not with ModelCheckpoint, which loses the best score if the folder is moved.
        for name in (BEST, LAST) if self.best is row else (LAST,):
            self.save(name)
        self.record()
        self.say("  ".join(f"{name} {value:.4g}" for name, value in row.items()))

    @property
    def best(self) -> dict[str, float]:
        """The first of the epochs that are best on validation graphs."""
        sign = 1 if self.task.mode == "max" else -1

        def score(row: dict[str, float]) -> float:
            value = sign * row[f"val_{self.metric}"]
            return -inf if isnan(value) else value

        return max(self.history, key=score)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["history"] = self.history

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.training:
            self.history = checkpoint["history"]

    def save(self, name: str) -> None:
        path = self.args.out / name
        part = path.with_name(f"{name}.part")
        self.trainer.save_checkpoint(part)
        if RANK == 0:
            os.replace(part, path)

    def say(self, text: str) -> None:
        if RANK == 0 and self.title is not None:
            tqdm.write(text)
            sys.stdout.flush()

    def record(self) -> None:
        """Writes the results."""
        seconds = round(sum(row["seconds"] for row in self.history), 1)
        self.results |= {"epochs_done": len(self.history), "seconds": seconds}
        self.results["history"] = self.history
        if RANK == 0:
            write_json(self.args.out / RESULTS, self.results)


def epochs_within(
    minutes: float, model: Module, task: Task, args: Namespace, data: dict[str, Any]
) -> int:
    """How many epochs fit into some minutes, estimated by timing a few training and
    evaluation steps of a copy.

    On the CPU, processor time is measured, which other processes do not affect.
    """
    on_cpu = torch.device(args.device).type == "cpu"
    clock = time.process_time if on_cpu else time.monotonic
    threads = torch.get_num_threads() if on_cpu else 1
    model = deepcopy(model).to(args.device)
    kind = torch.device(args.device).type
    mixed = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}
    dtype = mixed.get(args.precision)
    optimizer = getattr(torch.optim, args.optimizer)(model.parameters(), args.lr)

    def step(batch: Batch, training: bool) -> None:
        batch = batch.to(args.device)
        model.train(training)
        with (
            torch.set_grad_enabled(training),
            torch.autocast(kind, dtype, enabled=dtype is not None),
        ):
            loss = task.loss(model(**model.inputs(batch)), batch)
        if training:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        float(loss.detach())  # waits for it

    total = 0.0
    for split in ("train", "val"):
        batches = DataLoader(data[split], args.batch_size)
        times = []
        for _, batch in zip(range(8), cycle(batches), strict=False):
            begin = clock()
            step(batch, split == "train")
            times.append((clock() - begin) / threads)
        # The first ones load compiled code.
        total += sorted(times[2:])[3] * len(batches)
    return max(1, round(60 * minutes / total))


def planned_epochs(args: Namespace, plan: Callable[[], int]) -> int:
    """The requested epochs, those planned when the run began, or those planned now."""
    if args.resume:
        return read_run(args.out)["config"]["epochs"]
    if args.epochs is None and WORLD > 1:
        refuse("--minutes plans for one process: pass --epochs")
    return plan() if args.epochs is None else args.epochs


class TimeLimit(Timer):
    """A timer that ignores the time before a run was resumed."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def fit(
    args: Namespace,
    model: Module,
    task: Task,
    load: Callable[[], dict[str, Any]],
    title: str | None = None,
) -> dict[str, Any]:
    """Trains a model, or resumes its training, and tests it with its best weights.

    See :class:`Run`. Returns the contents of ``results.json``, with ``best`` if
    finished.
    """
    results = open_run(args)
    if "best" in results:
        return results
    run = Run(args, model, task, load, results, title)
    results, last, best = run.results, args.out / LAST, args.out / BEST
    callbacks: list[Callback] = []
    if args.time_limit is not None:
        left = timedelta(seconds=args.time_limit - time.monotonic())
        callbacks.append(TimeLimit(left, interval="epoch", verbose=False))
    if sys.stdout.isatty():
        callbacks.append(TQDMProgressBar(leave=False))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    # For example, the edge features of the last layer do not reach a graph head.
    ddp = DDPStrategy(find_unused_parameters=True, broadcast_buffers=False)
    trainer = Trainer(
        accelerator=args.device,
        devices=local,
        num_nodes=WORLD // local,
        strategy=ddp if WORLD > 1 else "auto",
        precision=args.precision,
        max_epochs=args.epochs,
        gradient_clip_val=1.0,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stdout.isatty(),
    )
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # which a shell sets for background processes
        signal.signal(signal.SIGINT, run.interrupt)
    try:
        resumed = last if args.resume and last.exists() else None
        trainer.fit(run, ckpt_path=resumed, weights_only=True)
        if len(run.history) < args.epochs:
            results["stopped_by"] = "time limit"
        else:
            found = run.best
            for name in list(run.datasets)[2:]:
                run.test_name = name
                (test,) = trainer.test(run, None, best, False, weights_only=True)
                found = found | test
            results["best"] = found
            run.say("Best: " + "  ".join(f"{k} {v:.4g}" for k, v in found.items()))
    except (SystemExit, RuntimeError) as stop:
        # Lightning exits upon a signal. Where Python dropped its exception, the loader
        # finds workers that it has ended.
        if isinstance(stop, RuntimeError) and not run.interrupted:
            raise
        results["stopped_by"] = "SIGTERM" if trainer.received_sigterm else "SIGINT"
        if last.exists():
            run.history = torch.load(last, weights_only=True)["history"]
    finally:
        signal.signal(signal.SIGINT, before)
    run.record()
    if RANK == 0 and run.history:
        draw_curves(args.out / CURVES, run.history, run.metric)
    if RANK == 0 and results["stopped_by"] is not None:
        command = args.command.replace(" --overwrite", "").replace(" --resume", "")
        if WORLD > 1:
            start = f"torchrun --nproc_per_node={local}"
            command = start + command.removeprefix("python")
        print(
            f"Stopped ({results['stopped_by']}) after {len(run.history)} of "
            f"{args.epochs} epochs. To go on from there: {command} --resume"
        )
    return results


def load_best(args: Namespace, model: Module) -> None:
    """Loads the weights of a finished run's best epoch into a model."""
    state = torch.load(args.out / BEST, weights_only=True)["state_dict"]
    model.load_state_dict({k.removeprefix("model."): v for k, v in state.items()})


def summarize(
    runs: Mapping[str, Mapping[str, Any]], metric: str, unit: str
) -> dict[str, dict[str, Any]]:
    """A row for each model, from the results of its finished runs, ``model/...``: means
    and standard deviations (``ddof=0``) of a metric, and how many runs (``unit``).
    """
    rows: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(run.partition("/")[0] for run in runs):
        found = [run for key, run in runs.items() if key.startswith(f"{name}/")]
        rows[name] = {"parameters": found[0]["parameters"], unit: len(found)}
        for split in ("test", "val"):
            values = [run["best"][f"{split}_{metric}"] for run in found]
            rows[name][f"{split}_{metric}"] = float(np.mean(values))
            rows[name][f"{split}_std"] = float(np.std(values))
        rows[name]["seconds"] = round(sum(run["seconds"] for run in found), 1)
    return rows


def fit_all(
    args: Namespace,
    runs: Iterable[tuple[str, Mapping[str, Any]]],
    train: Callable[[Namespace], dict[str, Any]],
    tabulate: Callable[[dict[str, dict[str, Any]]], dict[str, dict[str, Any]]],
) -> dict[str, Any]:
    """Trains models one after the other, and compares them in a table.

    ``runs`` yields the names of their folders, and the arguments that differ from the
    command line, which may depend on earlier runs; ``train`` trains one with
    :func:`fit`, and ``tabulate`` turns the results of finished runs into the rows of
    the table, by name. Returns the contents of ``results.json``.
    """
    results = {"rows": {}, **open_run(args)}
    finished: dict[str, dict[str, Any]] = {}
    for name, changes in runs:
        if RANK == 0:
            write_json(args.out / RESULTS, results)
        out = args.out / name
        own = {
            **changes,
            "out": out,
            "resume": args.resume and (out / RESULTS).exists(),
        }
        found = train(Namespace(**{**vars(args), **own}))
        if "best" not in found:
            results["stopped_by"] = found["stopped_by"]
            break
        finished[name] = found
        results["rows"] |= tabulate(finished)
    if RANK == 0:
        write_json(args.out / RESULTS, results)
    if RANK == 0 and results["rows"]:
        rows = pd.DataFrame.from_dict(results["rows"], orient="index")
        print(rows.to_string(float_format="{:.4g}".format))
    return results
