"""The training engine that the examples share, on Lightning Fabric.

It trains a model on one device, or on several when started by ``torchrun``, and
keeps everything about a run in one folder::

    metrics.csv    one row per epoch
    metrics.json   configuration, command, versions, best epoch, its test metrics
    curves.png     losses and metrics
    last.pt        checkpoint to resume from (``--resume``)
    best.pt        weights of the best validation epoch

Files appear by an atomic rename, so a run may be killed at any time. Resuming
continues bit for bit on a CPU, even from within an epoch: the order of training graphs
is a function of seed and epoch alone, and all else that a run depends on is in
``last.pt``. (The exception are random transforms in worker processes of the loader, of
which a run that stopped within an epoch will draw other ones.)
"""

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import DDPStrategy
from support import (
    EpochBatches,
    Options,
    StopRequest,
    atomic_write,
    environment,
    plot,
    prepare_worker,
    random_state,
    set_random_state,
    write_csv,
)
from torch import Tensor
from torch.nn import Module
from torch_geometric.loader import DataLoader
from tqdm import tqdm


@dataclass(frozen=True)
class Task:
    """What a model's output means.

    Args:
        loss: ``(output, batch) -> scalar``, a mean over the batch.
        collect: ``(output, batch) -> {name: tensor}``, what the metrics need, one
            row per evaluated item, so that rows of batches can be concatenated.
        metrics: ``{name: tensor} -> {metric: value}`` over a whole split.
        metric: The metric by which the best validation epoch is chosen.
        maximize: Whether more of it is better.
        tie: Of epochs with the same metric, the one with less of this (``"loss"``, or
            another metric) is the best; without it, the first.
    """

    loss: Callable[[Any, Any], Tensor]
    collect: Callable[[Any, Any], dict[str, Tensor]]
    metrics: Callable[[dict[str, Tensor]], dict[str, float]]
    metric: str
    maximize: bool = True
    tie: str | None = None


def start(options: Options) -> Fabric:
    """Joins the processes that ``torchrun`` started, if it did, and seeds them."""
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    world = int(environ.get("WORLD_SIZE", 1))
    local = int(environ.get("LOCAL_WORLD_SIZE", world))
    if options.batch_size % world:
        raise SystemExit(f"--batch-size must be a multiple of {world}, the processes")
    fabric = Fabric(
        accelerator=device,
        devices=local,
        num_nodes=world // local,
        precision=options.precision,  # type: ignore[arg-type]
        # The last layer's edge features, for one, do not reach a graph head.
        strategy=DDPStrategy(find_unused_parameters=True) if world > 1 else "auto",
    )
    fabric.launch()
    fabric.seed_everything(options.seed, verbose=False)
    return fabric


def count_parameters(model: Module) -> int:
    """The number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


class _InterruptedError(Exception):
    """Evaluation was given up."""


class Trainer:
    """Trains, evaluates, logs and checkpoints one model.

    Args:
        fabric: From :func:`start`.
        model: As ``GraphModel``, it has a method ``inputs`` that turns a batch into
            the arguments of ``forward``; ``task`` understands its output.
        datasets: ``train``, ``val`` and ``test``.
        task: Loss and metrics.
        options: How to train.
        info: What else identifies the run; a resumed run must agree.
    """

    def __init__(
        self,
        fabric: Fabric,
        model: Module,
        datasets: dict[str, Any],
        task: Task,
        options: Options,
        info: dict[str, Any],
    ) -> None:
        self.fabric, self.task, self.options = fabric, task, options
        self.datasets = datasets
        self.rank, self.world = fabric.global_rank, fabric.world_size
        self.share = options.batch_size // self.world
        self.batches = EpochBatches(
            len(datasets["train"]), self.share, options.seed, self.rank, self.world
        )
        self.steps_per_epoch = len(self.batches)
        if self.steps_per_epoch == 0:
            raise SystemExit("There are fewer training graphs than processes")
        parameters = count_parameters(model)
        optimizer = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[
            options.optimizer
        ](model.parameters(), lr=options.lr, weight_decay=options.weight_decay)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._schedule)
        self.model, self.optimizer = fabric.setup(model, optimizer)
        self.module = model
        config = {**info, "parameters": parameters, **options.identity()}
        self.config = json.loads(json.dumps(config))  # as it will be read back
        self.begin = time.monotonic()
        self.history: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None
        self.epoch = self.step = 0
        self.elapsed = 0.0  # in this epoch, before a run was resumed
        self.total = torch.zeros(2, dtype=torch.double, device=fabric.device)
        # From here on, each process draws its own dropout masks.
        fabric.seed_everything(options.seed + self.rank, verbose=False)

    def _schedule(self, step: int) -> float:
        """Linear warm-up, then half a cosine, in steps."""
        warmup = self.options.warmup_epochs * self.steps_per_epoch
        total = self.options.epochs * self.steps_per_epoch
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = (step - warmup) / max(1, total - warmup)
        return 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    def log(self, *lines: str) -> None:
        """Prints, on the first process."""
        if self.fabric.is_global_zero:
            for line in lines:
                tqdm.write(line)
            sys.stdout.flush()

    # Training and evaluation -------------------------------------------------

    def finished(self) -> dict[str, Any] | None:
        """The summary of this very run, if an earlier command took it to its end."""
        report = self.options.out / "metrics.json"
        if not self.options.resume or not report.is_file():
            return None
        summary = json.loads(report.read_text())
        done = summary["epochs_done"] == summary["epochs"] == self.options.epochs
        return summary if done and summary["config"] == self.config else None

    def fit(self) -> dict[str, Any]:
        """Trains to the end, or until asked to stop; returns the summary."""
        out = self.options.out
        self._open(out)
        reason = None
        with StopRequest(self.options.time_limit) as self.stop:
            while self.epoch < self.options.epochs:
                self.begin = time.monotonic() - self.elapsed
                reason = self._train_epoch()
                snapshot = self._state()
                if reason is None:
                    try:
                        row = self._finish_epoch()
                    except _InterruptedError:
                        reason = self.stop.reason
                if reason is not None:
                    self._save("last.pt", snapshot)
                    break
                if row["best"]:
                    weights = {"model": self.model.state_dict(), **(self.best or {})}
                    self._save("best.pt", weights)
                self._save("last.pt", self._state())
                self._write_metrics(out)
                reason = self.agreed_reason()
                if reason is not None:
                    break
        if self.epoch == self.options.epochs:
            reason = None  # it came too late to matter
        summary = self._write_metrics(out, reason)
        if self.fabric.is_global_zero and self.best is not None:
            best, metric = self.best["epoch"], self.task.metric
            atomic_write(
                out / "curves.png", lambda path: plot(path, self.history, metric, best)
            )
        if reason is not None:
            step = f", step {self.step}/{self.steps_per_epoch}" if self.step else ""
            self.log(
                f"Stopped ({reason}) in epoch {self.epoch + 1}/{self.options.epochs}"
                f"{step}. The checkpoint {out / 'last.pt'} is complete: run the same "
                f"command with --resume to go on from there."
            )
        self.fabric.barrier()
        return summary

    def _train_epoch(self) -> str | None:
        """Trains the rest of an epoch; returns why it had to stop, if it had to."""
        self.model.train()
        self.batches.set_epoch(self.epoch, skip=self.step)
        loader = DataLoader(
            self.datasets["train"],
            batch_sampler=self.batches,
            num_workers=self.options.num_workers,
            worker_init_fn=prepare_worker,
            generator=self.batches.generator,
            pin_memory=self.fabric.device.type == "cuda",
        )
        progress = tqdm(
            loader,
            desc=f"epoch {self.epoch + 1}/{self.options.epochs}",
            initial=self.step,
            total=self.steps_per_epoch,
            leave=False,
            disable=None if self.fabric.is_global_zero else True,
        )
        reason = self.agreed_reason()
        for batch in progress if reason is None else ():
            batch = batch.to(self.fabric.device, non_blocking=True)
            out = self.model(**self.module.inputs(batch))
            loss = self.task.loss(out, batch)
            value = loss.item()
            if not math.isfinite(value):
                raise FloatingPointError(
                    f"The loss is {value} in epoch {self.epoch + 1}, step "
                    f"{self.step + 1}; last.pt is from before"
                )
            self.optimizer.zero_grad()
            self.fabric.backward(loss)
            self.fabric.clip_gradients(
                self.model, self.optimizer, max_norm=self.options.clip
            )
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            weight = batch.num_graphs
            self.total += self.total.new_tensor([value * weight, weight])
            progress.set_postfix(
                loss=f"{self.total[0] / self.total[1]:.4f}", refresh=False
            )
            # Before the next batch is drawn: a random transform may draw, too.
            reason = self.agreed_reason()
            if reason is not None:
                break
        progress.close()
        return reason

    def _finish_epoch(self) -> dict[str, Any]:
        """Validates, tests if this is the best epoch so far, and logs."""
        last_step = (self.epoch + 1) * self.steps_per_epoch - 1
        lr = self.options.lr * self._schedule(last_step)
        total = self.fabric.all_reduce(self.total.clone(), reduce_op="sum")
        row = {
            "epoch": self.epoch + 1,
            "lr": lr,
            "train_loss": float(total[0] / total[1]),
        }
        val = self.evaluate("val")
        metric, better = self.task.metric, self._is_better(val)
        test = self.evaluate("test") if better else {}
        if better:
            self.best = {"epoch": self.epoch + 1, "val": val, "test": test}
        row |= {f"val_{name}": value for name, value in val.items()}
        row |= {f"test_{name}": value for name, value in test.items()}
        row["best"] = int(better)
        row["seconds"] = round(time.monotonic() - self.begin, 2)
        self.history.append(row)
        tested = f"  test {metric} {test[metric]:.4f}" if better else ""
        if not self.options.quiet:
            self.log(
                f"epoch {row['epoch']:>3}/{self.options.epochs}  "
                f"loss {row['train_loss']:.4f}  val {metric} {val[metric]:.4f}{tested}"
                f"  lr {lr:.2g}  {row['seconds']:.1f} s"
            )
        self.epoch, self.step, self.elapsed = self.epoch + 1, 0, 0.0
        self.begin = time.monotonic()
        self.total.zero_()
        return row

    def _is_better(self, val: dict[str, float]) -> bool:
        """Whether validation says that this is the best epoch so far."""
        if self.best is None:
            return True
        best, metric, tie = self.best["val"], self.task.metric, self.task.tie
        if tie is not None and val[metric] == best[metric]:
            return val[tie] < best[tie]
        sign = 1 if self.task.maximize else -1
        return sign * val[metric] > sign * best[metric] or math.isnan(best[metric])

    @torch.no_grad()
    def evaluate(self, split: str) -> dict[str, float]:
        """Loss and metrics of a split; each graph counts once on any number of
        processes.
        """
        self.model.eval()
        if self.world > 1:  # running statistics are the first process's
            for buffer in self.module.buffers():
                torch.distributed.broadcast(buffer, 0)
        loader = DataLoader(
            self.datasets[split][self.rank :: self.world],
            batch_size=self.share,
            num_workers=self.options.num_workers,
            worker_init_fn=prepare_worker,
        )
        total, rows = np.zeros(2), []
        for batch in tqdm(
            loader,
            desc=split,
            leave=False,
            disable=None if self.fabric.is_global_zero else True,
        ):
            if self.world == 1 and self.stop.reason is not None:
                raise _InterruptedError
            batch = batch.to(self.fabric.device, non_blocking=True)
            with self.fabric.autocast():
                # Not by self.model: the shares of the processes differ in length.
                out = self.module(**self.module.inputs(batch))
                loss = self.task.loss(out, batch)
            collected = self.task.collect(out, batch)
            rows.append({name: value.cpu() for name, value in collected.items()})
            total += np.array([loss.item() * batch.num_graphs, batch.num_graphs])
        gathered = self._gather((total, rows))
        total = sum(part for part, _ in gathered)
        rows = [row for _, part in gathered for row in part]
        values = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
        return {"loss": float(total[0] / total[1]), **self.task.metrics(values)}

    def _gather(self, value: Any) -> list[Any]:
        """The value of every process, on every process."""
        if self.world == 1:
            return [value]
        out: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(out, value)
        return out

    def agreed_reason(self) -> str | None:
        """Why to stop, agreed by all processes, or one would wait for another."""
        reason = self.stop.reason
        if self.world == 1:
            return reason
        flag = torch.tensor(float(reason is not None), device=self.fabric.device)
        if self.fabric.all_reduce(flag, reduce_op="max") == 0:
            return None
        return next(r for r in self._gather(reason) if r is not None)

    # Checkpoints ---------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {
            "config": self.config,
            "epoch": self.epoch,
            "step": self.step,
            "epochs": self.options.epochs,
            "elapsed": time.monotonic() - self.begin,
            "total": self._gather(self.total.cpu().clone()),
            "rng": self._gather(random_state(self.fabric.device)),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
            "best": self.best,
            "history": list(self.history),
        }

    def _save(self, name: str, state: dict[str, Any]) -> None:
        if self.fabric.is_global_zero:
            atomic_write(self.options.out / name, lambda path: torch.save(state, path))

    def _open(self, out: Path) -> None:
        """Starts afresh, or where the checkpoint is."""
        last = out / "last.pt"
        if self.options.resume:
            if not last.is_file():
                raise SystemExit(f"--resume: there is no checkpoint {last}")
            self._restore(torch.load(last, "cpu", weights_only=True))
            self.log(f"Resuming {last} after {self.epoch} epochs, {self.step} steps")
            return
        if last.is_file() and not self.options.overwrite:
            raise SystemExit(
                f"{out} holds a run: pass --resume to continue it, --overwrite to "
                f"start again, or another --out"
            )
        self.fabric.barrier()  # nobody writes before everybody has looked
        if self.fabric.is_global_zero:
            out.mkdir(parents=True, exist_ok=True)
            for name in ("last.pt", "best.pt", "metrics.csv", "curves.png"):
                (out / name).unlink(missing_ok=True)
        self._save("last.pt", self._state())

    def _restore(self, state: dict[str, Any]) -> None:
        then, now = state["config"], self.config
        changed = [
            f"{name}: {then.get(name)!r} then, {now.get(name)!r} now"
            for name in sorted({*then, *now})
            if then.get(name) != now.get(name)
        ]
        if changed:
            raise SystemExit("--resume: the run differs in " + "; ".join(changed))
        if len(state["rng"]) != self.world:
            if state["step"]:
                raise SystemExit(
                    f"--resume: the checkpoint is from within an epoch of "
                    f"{len(state['rng'])} processes (got {self.world})"
                )
            self.log("The number of processes has changed: not an exact continuation")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch, self.step = state["epoch"], state["step"]
        self.elapsed = state["elapsed"]
        if state["epochs"] != self.options.epochs:
            self.log(
                f"The learning rate now falls over {self.options.epochs} epochs, "
                f"before over {state['epochs']}: not an exact continuation"
            )
        self.best, self.history = state["best"], state["history"]
        if self.rank < len(state["rng"]):
            self.total.copy_(state["total"][self.rank])
            set_random_state(state["rng"][self.rank], self.fabric.device)

    def _write_metrics(self, out: Path, stopped: str | None = None) -> dict[str, Any]:
        summary = {
            "config": self.config,
            "seed": self.options.seed,
            **environment(self.fabric.device),
            "processes": self.world,
            "epochs": self.options.epochs,
            "epochs_done": self.epoch,
            "stopped_by": stopped,
            "seconds": round(sum(row["seconds"] for row in self.history), 1),
            "metric": self.task.metric,
            "best": self.best,
        }
        if self.fabric.is_global_zero:
            text = json.dumps(summary, indent=2) + "\n"
            atomic_write(out / "metrics.json", lambda path: path.write_text(text))
            atomic_write(
                out / "metrics.csv", lambda path: write_csv(path, self.history)
            )
        return summary
