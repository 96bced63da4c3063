"""What the benchmarks that train models share: sizes, a clock, processes, results."""

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from math import cos, isfinite, pi
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from timing import machine, show
from torch import Tensor
from torch.nn import Module

__all__ = [
    "add_results", "count_parameters", "fit", "mlp_channels", "open_results", "trained",
]  # fmt: skip


def count_parameters(model: Module) -> int:
    return sum(x.numel() for x in model.parameters())


def mlp_channels(count: Callable[[int], int], parameters: int) -> int:
    """The hidden size of the feed-forward networks with which layers have about so many
    parameters; `count` gives their number for a hidden size. May be negative.
    """
    one, two = count(1), count(2)
    return 1 + round((parameters - one) / (two - one))


def fit(
    model: Module,
    loss_of: Callable[[Any], Tensor],
    first: Any,
    epoch: Callable[[], Iterable[Any]],
    lr: float,
    seconds: float,
    warm_up: float,
    clip: float,
) -> dict[str, Any]:
    """Trains for seconds of processor time, by AdamW with warm-up and cosine decay.

    The clock stands still while others use the core. Stops if the loss is not finite.
    """
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Any) -> float:
        loss = loss_of(batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        return float(loss.detach())

    step(first)  # loads compiled code, which is not training
    steps, done, loss = 0, 0.0, 0.0
    wall, start = time.perf_counter(), time.process_time()
    batches = iter(epoch())
    while done < 1 and isfinite(loss):
        batch = next(batches, None)
        if batch is None:
            batches = iter(epoch())
            continue
        loss = step(batch)
        rise = min(1, (done + 0.1 / (10 + steps)) / warm_up)
        for group in optimizer.param_groups:
            group["lr"] = lr * rise * (1 + cos(pi * done)) / 2
        optimizer.step()
        steps += 1
        done = (time.process_time() - start) / max(seconds, 1e-3)
    wall = time.perf_counter() - wall
    return {"steps": steps, "wall_seconds": wall, "loss": loss}


def trained(
    train: Callable[[Any], dict[str, Any]], runs: list[Any], jobs: int
) -> Iterator[dict[str, Any]]:
    """The results of runs, as they are completed, in so many processes of one thread;
    one job is run in this one.
    """
    if jobs == 1:
        for number, run in enumerate(runs, start=1):
            name = ", ".join(str(x) for x in run[:3])
            show(f"{name} ({number} of {len(runs)})")
            yield train(run)
        return
    if not runs:
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(jobs, context, torch.set_num_threads, (1,)) as pool:
        futures = [pool.submit(train, run) for run in runs]
        try:
            for number, future in enumerate(as_completed(futures), start=1):
                show(f"{number} of {len(runs)} runs done")
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


# Results -----------------------------------------------------------------------------


def add_results(parser: ArgumentParser) -> None:
    """Adds options for where to write, and what to do with earlier results."""
    add = parser.add_argument
    add("--out", type=Path, help="of the JSON; plots beside it have its name")
    add("--smoke", action="store_true", help="only see that it runs")
    add = parser.add_mutually_exclusive_group().add_argument
    add("--resume", action="store_true", help="train what is missing in --out")
    add("--overwrite", action="store_true", help="replace --out")


def open_results(
    args: Namespace, settings: dict[str, Any], empty: dict[str, Any]
) -> dict[str, Any]:
    """The results to write, including earlier runs if resuming."""
    results = {"machine": machine("cpu"), "settings": settings, **empty}
    if args.overwrite or not args.out.exists():
        return results
    if not args.resume:
        raise SystemExit(
            f"{args.out} exists: pass --resume to go on with it, --overwrite to "
            "replace it, or another --out"
        )
    before = json.loads(args.out.read_text())
    then, now = before["machine"]["versions"], results["machine"]["versions"]
    if then != now:
        raise SystemExit(f"--resume: {args.out} was measured with {then}, not {now}")
    if before["settings"] != settings:
        raise SystemExit(
            f"--resume: {args.out} was measured with {before['settings']}, "
            f"which is not {settings}"
        )
    return before
