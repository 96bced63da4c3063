"""What bounds two of the long-range tasks, without training a mixer.

* Ising: a model that is trained at side 16 has seen couplings of up to eight steps. The
  exact couplings up to there, and nothing beyond, are the best that it can know of
  larger lattices without extrapolating.
* Eccentricity: exact sums (I - A)^-1 m of constants, degrees and leaves, over ranges of
  1.5 to 48 steps, which is what one layer can pass on; a network regresses on them.

::

    python benchmarks/long_range_bounds.py           # two minutes of one core
    python benchmarks/long_range_bounds.py --smoke
"""

import math
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import numpy as np
import torch
from json_files import write_json
from long_range_data import (
    HOPS,
    Kept,
    couplings_of,
    echo_graphs,
    fields_of,
    ising_graphs,
)
from options import add_output, output
from timing import machine
from torch import Tensor
from torch.nn import GELU, Linear, Sequential
from torch_geometric.data import Data
from torch_geometric.utils import to_dense_adj
from workloads import DATA

#: Lattices for tests, by side, and the range of couplings at side 16.
LATTICES, SEEN = {16: 400, 32: 100, 64: 40, 128: 20}, 8
RANGES = (1.5, 3.0, 6.0, 12.0, 24.0, 48.0)


def truncated(side: int, spins: np.ndarray) -> np.ndarray:
    """Energies [side, side] from couplings of up to `SEEN` steps along each axis."""
    steps = np.minimum(np.arange(side), side - np.arange(side))
    near = np.maximum.outer(steps, steps) <= SEEN
    return spins * fields_of(spins, near * couplings_of(side))


def ising(cache: Path, smoke: bool) -> dict[str, float]:
    """log10(MSE / variance) of exact couplings up to eight steps, by side."""

    def load(side: int, split: str, number: int) -> Kept:
        return Kept(cache, ising_graphs, side, split, 10 if smoke else number)

    variance = float(load(16, "train", 1000).y.var())
    found = {}
    for side, number in LATTICES.items():
        errors = []
        for data in load(side, "test", number):
            spins, wanted = (
                x.view(side, side).double().numpy() for x in (data.x, data.y)
            )
            errors.append(np.square(truncated(side, spins) - wanted).mean())
        found[str(side)] = math.log10(np.mean(errors) / variance)
    return found


def sums(data: Data) -> Tensor:
    """Exact sums over each range, divided by the root of their mean square."""
    adjacency = to_dense_adj(data.edge_index, max_num_nodes=data.num_nodes)[0].double()
    degree = adjacency.sum(1)
    sources = torch.stack([torch.ones_like(degree), degree, (degree == 1).double()], 1)
    found = [sources[:, 1:]]
    for steps in RANGES:
        decay = 1 - 1 / steps  # of a step along a path, whose rows then sum to
        weight = 2 * decay / (1 + decay**2) * adjacency / degree.view(-1, 1)
        total = torch.linalg.solve(torch.eye(len(degree)).double() - weight, sources)
        found.append(total / total.square().mean().sqrt())
    return torch.cat(found, 1).float()


def eccentricity(cache: Path, smoke: bool) -> dict[str, float]:
    """Mean absolute errors in hops."""
    number, steps = (60, 20) if smoke else (1800, 3000)

    def load(split: str) -> tuple[Tensor, Tensor]:
        graphs = Kept(cache, echo_graphs, "eccentricity", split, number)
        y = torch.cat([data.y for data in graphs]) * HOPS
        return torch.cat([sums(data) for data in graphs]), y

    torch.manual_seed(0)
    (x, y), (x_test, y_test) = load("train"), load("test")
    center, scale = x.mean(0), x.std(0) + 1e-9
    x, x_test = (x - center) / scale, ((x_test - center) / scale).clamp(-6, 6)
    model = Sequential(
        *(Linear(x.size(1), 128), GELU(), Linear(128, 128), GELU(), Linear(128, 1))
    )
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps)
    for _ in range(steps):
        batch = torch.randint(len(x), (2048,))
        loss = (20 + 10 * model(x[batch]) - y[batch]).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        error = (20 + 10 * model(x_test) - y_test).abs().mean()
    guess = (y_test - y.median()).abs().mean()
    return {
        "regression on exact sums": error.item(),
        "the same in training": loss.item(),
        "the median of training": guess.item(),
    }


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser(description="What bounds two of the long-range tasks.")
    parser.add_argument(
        "--cache", type=Path, default=DATA / "long-range",
        help="for generated graphs (default: %(default)s)",
    )  # fmt: skip
    add_output(parser)
    args = parser.parse_args(argv)
    path = output(args, "long-range-bounds")
    torch.set_num_threads(1)
    results: dict[str, Any] = {"machine": machine("cpu")}
    for task in (ising, eccentricity):
        found = task(args.cache, args.smoke)
        results[task.__name__] = found
        print(f"{task.__name__}: {task.__doc__}")
        for name, value in found.items():
            print(f"  {name}: {value:.2f}", flush=True)
    if not args.smoke:
        write_json(path, results)


if __name__ == "__main__":
    main()
