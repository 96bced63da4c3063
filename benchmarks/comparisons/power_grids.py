r"""Compares models that find the voltages of grids never seen before (AC power flow).

Trains on parts, of 100 to 1,000 buses, of the French grid at four times, selects on a
part of the European one, and tests on four synthetic grids of the United States, on two
larger parts of the European grid, and on the French one with its lower voltages, at two
times. Grids are read from ``--root``, as MATPOWER's case files (``1888rte.m``) or their
matrices as ``.npz``::

    python benchmarks/comparisons/power_grids.py --root data/power-grids     # hours
    python benchmarks/comparisons/power_grids.py --root data/power-grids --status
    python benchmarks/comparisons/power_grids.py --root data/power-grids --resume \
        --arms chimera gps

In each state, loads, generation and set-points are random, and a branch is out
(``power_states.py``). In trials of a minute, models that started from nothing stayed
far behind DC power flow. So all read where solvers start, DC angles and interpolated
set-points, and what these miss of the balance of power at each bus, as voltages that it
would lead to; they predict what is left, which is nothing if no power is missing.

Arms, with the option that each searches (see ``protocol.py``):

* ``chimera``: three blocks of GatedGCN, ChimeraConv and a feed-forward network, or six,
  of which every third has ChimeraConv
* ``gated-gcn``: blocks of GatedGCN and a feed-forward network; depth
* ``gps``: three blocks of GatedGCN, attention and a feed-forward network; encodings,
  of the grid with all its branches
* ``gat``: residual blocks of GAT and a feed-forward network; depth
* ``hops``: three blocks of messages along edges, a filter of K hops and a feed-forward
  network (as PowerFlowNet, arXiv 2311.03415); K
* ``mlp``: a network of each node alone; depth

Beside them, without learning: the flat start, the DC start, and one step of Newton's
method from the latter. All its steps give the targets.
"""

import sys
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Task, main, make_parser
from power_states import MISSES, PQ, SLACK, PowerStates, write_grid
from protocol import (
    PREPARE,
    SHARED_ARMS,
    DrawnGraphs,
    Study,
    build_layer,
    reads,
    without_learning,
)
from torch import Tensor
from torch.nn import Linear, Module, ReLU, Sequential
from torch_geometric.data import Batch, Data
from torch_geometric.nn import TAGConv
from torch_geometric.utils import scatter
from torchmetrics import MeanMetric

from pyg_chimera.nn import GPSLayer, GraphModel

ARMS = SHARED_ARMS | {"hops": ("K", (4, 16))}
FRENCH = ("1888rte", "1951rte", "2848rte", "2868rte")
#: By these, models were also chosen; the others were not tested before.
SEEN = ("ACTIVSg500", "ACTIVSg2000", "ACTIVSg10k", "9241pegase", "6515rte")
BLIND = ("ACTIVSg200", "2869pegase", "6468rte")
#: Grids to train, to select and to test on.
SPLITS = {
    "default": (FRENCH, ("1354pegase",), (*SEEN, *BLIND)),
    "smoke": (("generated-20",), ("generated-25",), ("generated-30",)),  # with so many
}
#: `length` is the number of states in an epoch, drawn from `states` of each of `parts`
#: of each grid.
PRESETS: dict[str, dict[str, Any]] = {
    "default": dict(
        parts=100, states=4, length=240, held_out=20, channels=32, batch_size=8,
        norm="layer_norm",
    ),
    "smoke": dict(
        parts=4, states=2, length=8, held_out=2, batch_size=4, norm="layer_norm",
    ),
}  # fmt: skip


# Data ----------------------------------------------------------------------------


def find(folder: Path, grid: str) -> Path:
    """The file of a grid, which is written if it is a generated one."""
    paths = [folder / f"{grid}{end}" for end in (".npz", ".m")]
    found = next((path for path in paths if path.exists()), None)
    if found is None and grid.startswith("generated-"):
        buses = int(grid.removeprefix("generated-"))
        return write_grid(paths[0], buses, seed=buses)
    if found is None:
        raise FileNotFoundError(f"there is no {grid}.npz or {grid}.m in {folder}")
    return found


def get_datasets(args: Namespace) -> dict[str, Any]:
    """States to train on, to select by and, by grid, to test on."""
    train, val, test = SPLITS[args.preset]
    folder = args.processed_root or args.root
    source = folder if args.preset == "smoke" else args.root

    def load(
        grids: tuple[str, ...], states: int, seed: int, parts: int | None = None
    ) -> PowerStates:
        paths = [find(source, grid) for grid in grids]
        found = PowerStates(folder, paths, states, seed, PREPARE, parts)
        print(f"{states} states each, and drawn again without solution:", found.dropped)
        return found

    return {
        "train": DrawnGraphs(load(train, args.states, 0, args.parts), args.length),
        "val": load(val, args.held_out, 1),
        **{name: load((name,), args.held_out, 1) for name in test},
    }


def errors(found: Tensor, data: Data) -> dict[str, Tensor]:
    """The mean absolute errors of each graph: of angles in degrees, but for the slack,
    of magnitudes in per unit, at PQ, and a sum in which 1 degree is 0.01 per unit.
    """
    batch = data.kind.new_zeros(len(found)) if data.batch is None else data.batch
    miss, size = (found - data.y).abs(), int(batch[-1]) + 1

    def average(values: Tensor, at: Tensor) -> Tensor:
        return scatter(values[at], batch[at], 0, size, "mean")

    angle = average(miss[:, 0], data.kind != SLACK)
    magnitude = average(miss[:, 1], data.kind == PQ)
    return {"error": angle + 100 * magnitude, "angle": angle, "magnitude": magnitude}


def get_task() -> Task:
    """Outputs are what is added to the start, in degrees and hundredths of a unit."""

    def evaluate(out: Tensor, batch: Batch) -> dict[str, Tensor]:
        return errors(batch.start + out * out.new_tensor([1.0, 0.01]), batch)

    def loss(out: Tensor, batch: Batch) -> Tensor:
        return evaluate(out, batch)["error"].mean()

    def rows(out: Tensor, batch: Batch) -> dict[str, tuple[Tensor, ...]]:
        return {name: (values,) for name, values in evaluate(out, batch).items()}

    metrics = {name: MeanMetric() for name in ("error", "angle", "magnitude")}
    return Task(loss, metrics, rows, mode="min")


# Without learning ----------------------------------------------------------------


UNTRAINED = {
    "flat": lambda data: data.y.new_tensor([0.0, 1.0]).expand_as(data.y),
    "dc": lambda data: data.start,
    "newton-step": lambda data: data.step,
}


# Models --------------------------------------------------------------------------


class EdgesThenHops(Module):
    """Messages along edges, which read both ends, and a filter of K hops."""

    def __init__(self, channels: int, hops: int) -> None:
        super().__init__()
        first, last = Linear(3 * channels, channels), Linear(channels, channels)
        self.message = Sequential(first, ReLU(), last)
        self.filter = TAGConv(channels, channels, hops)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, target = edge_index
        message = self.message(torch.cat([x[source], x[target], edge_attr], dim=1))
        return self.filter(x + scatter(message, target, 0, len(x)), edge_index)


class Correction(GraphModel):
    """What a model says, less what it would say if no power were missing: then, nothing
    is added. Batch norms would have statistics of both.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        balanced = x.clone()
        balanced[:, MISSES] = 0
        found = super().forward(x, *args, **kwargs)
        return found - super().forward(balanced, *args, **kwargs)


def build_model(
    norm: str, arm: str, option: Any, channels: int, hidden: int
) -> GraphModel:
    """A model of a width, with feed-forward networks of another."""

    def layer(place: int) -> Module:
        if arm == "hops":
            conv = EdgesThenHops(channels, option)
            return GPSLayer(
                channels, conv, norm=norm, norm_first=True, mlp_channels=hidden
            )
        return build_layer(norm, arm, option, place, channels, hidden)

    return Correction(
        17,
        channels,
        2,
        layer,
        option if ARMS[arm][0] == "depth" else 3,
        edge_dim=None if arm == "mlp" else 8,
        head="node",
        norm=norm,
        **reads(arm, option, channels),
    )


# Runs ----------------------------------------------------------------------------


GIVEN = partial(without_learning, UNTRAINED, errors)
STUDY = Study(ARMS, build_model, get_task, get_datasets, GIVEN)


def get_args(argv: list[str] | None = None) -> Namespace:
    """The command line, completed by a recipe."""
    parser = make_parser(__doc__, ["default"], root=".", processed=True)
    args = STUDY.parse(parser, argv, PRESETS)
    args.out = args.out or Path("runs", "power-grids", args.preset)
    return args


if __name__ == "__main__":
    sys.exit(main(STUDY.run, get_args()))
