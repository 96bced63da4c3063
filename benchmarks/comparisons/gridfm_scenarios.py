"""Writes states of power flow as gridfm-graphkit (0.0.3 to 0.0.6) reads them.

``python benchmarks/comparisons/gridfm_scenarios.py data/power/ACTIVSg500.npz`` writes
``data/gridfm/ACTIVSg500/raw/pf_node.csv`` and ``pf_edge.csv``; the package's trainer is
then called with ``--data_path data/gridfm``.

States are those of ``power_states.py``. Powers are in MW and Mvar, 100 for one per
unit, and angles in degrees from the slack's. A bus with a generator has no load of its
own: it feeds in the difference. Edges are the entries of the admittance matrix, per
unit, with those of a bus to itself.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd
from common import positive_int
from power_states import (
    PQ,
    PV,
    SLACK,
    TRIES,
    Grid,
    admittance,
    draw,
    read_grid,
    removable,
    write_grid,
)
from tqdm import trange

BASE = 100.0


def describe(
    grid: Grid, kept: np.ndarray, voltage: np.ndarray
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The columns of a state's nodes [n] and edges [e]."""
    matrix, kind = admittance(grid, kept), grid.kind
    power = BASE * voltage * (matrix @ voltage).conj()
    load, fed = np.where(kind == PQ, -power, 0), np.where(kind == PQ, 0, power)
    angle = np.angle(voltage / voltage[np.argmin(kind)], deg=True)
    nodes = {"bus": np.arange(len(kind)), "Pd": load.real, "Qd": load.imag}
    nodes |= {"Pg": fed.real, "Qg": fed.imag, "Vm": abs(voltage), "Va": angle}
    nodes |= {"PQ": kind == PQ, "PV": kind == PV, "REF": kind == SLACK}
    entries = matrix.tocoo()
    edges = {"index1": entries.row, "index2": entries.col}
    edges |= {"G": entries.data.real, "B": entries.data.imag}
    return {x: 1 * y for x, y in nodes.items()}, edges


def write(path: Path, states: Iterable[dict[str, np.ndarray]]) -> None:
    """Writes a file with a column for the number of the state."""
    rows = [pd.DataFrame({"scenario": i, **state}) for i, state in enumerate(states)]
    pd.concat(rows).to_csv(path, index=False)


def main(argv: list[str] | None = None) -> None:
    """Draws and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("grid", type=Path, nargs="?",
        help="a file of MATPOWER (.m), or its matrices (.npz); default: a random grid"
    )  # fmt: skip
    add("--states", type=positive_int, default=1000, help="default: 1000")
    add("--seed", type=int, default=0, help="default: 0")
    add("--out", type=Path, default=Path("data", "gridfm"), help="default: data/gridfm")
    add("--smoke", action="store_true", help="two states")
    args = parser.parse_args(argv)
    folder = args.out / (args.grid.stem if args.grid else "random")
    if folder.exists():
        parser.error(f"there is {folder} already: remove it, or choose another --out")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.grid or write_grid(args.out / "random.npz", 100, args.seed)
    grid, rng = read_grid(path), np.random.default_rng(args.seed)
    count = 2 if args.smoke else args.states
    candidates, states = removable(grid), []
    for _ in trange(TRIES * count, disable=None):
        if (found := draw(grid, candidates, rng)) is not None:
            drawn, voltage = found
            states.append(describe(grid, drawn.kept, voltage))
        if len(states) == count:
            break
    else:
        parser.error(f"{path}: of {TRIES * count} draws, {len(states)} have a solution")
    (folder / "raw").mkdir(parents=True)
    for name, table in zip(("node", "edge"), zip(*states, strict=True), strict=True):
        write(folder / "raw" / f"pf_{name}.csv", table)


if __name__ == "__main__":
    sys.exit(main())
