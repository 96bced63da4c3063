"""Writes states of power flow as gridfm-graphkit (0.0.3 to 0.0.6) reads them.

``python benchmarks/comparisons/gridfm_scenarios.py data/power/ACTIVSg500.npz`` writes
``data/gridfm/ACTIVSg500/raw/pf_node.csv`` and ``pf_edge.csv``; the package's trainer is
then called with ``--data_path data/gridfm``.

States are those of ``power_states.py``. Powers are in MW and Mvar, 100 for one per
unit, and angles in degrees from the slack's. A bus with a generator has no load of its
own: it feeds in the difference. Edges are the entries of the admittance matrix, per
unit, with those of a bus to itself.

Prints root mean squared errors without learning, of what the package's report of power
flow has for models: the DC start of ``power_states.py``, a step of Newton's method from
there, and the mean over states of each bus.
"""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import numpy as np
import pandas as pd
from common import positive_int
from power_states import (
    PQ,
    PV,
    SLACK,
    Drawn,
    Grid,
    admittance,
    draw_states,
    read_grid,
    write_grid,
)
from power_states import describe as describe_state

Columns = dict[str, np.ndarray]

BASE = 100.0
#: By type, what is unknown.
UNKNOWN = {"PQ": ("Vm", "Va"), "PV": ("Qg", "Va"), "REF": ("Pg", "Qg")}


def describe(grid: Grid, kept: np.ndarray, voltage: np.ndarray) -> Columns:
    """The columns of a state's nodes [n]."""
    kind, matrix = grid.kind, admittance(grid, kept)
    power = BASE * voltage * (matrix @ voltage).conj()
    load, fed = np.where(kind == PQ, -power, 0), np.where(kind == PQ, 0, power)
    angle = np.angle(voltage / voltage[np.argmin(kind)], deg=True)
    nodes = {"bus": np.arange(len(kind)), "Pd": load.real, "Qd": load.imag}
    nodes |= {"Pg": fed.real, "Qg": fed.imag, "Vm": abs(voltage), "Va": angle}
    return nodes | {"PQ": kind == PQ, "PV": kind == PV, "REF": kind == SLACK}


def edges(grid: Grid, kept: np.ndarray) -> Columns:
    """The columns of its edges [e]."""
    entries = admittance(grid, kept).tocoo()
    ends = {"index1": entries.row, "index2": entries.col}
    return ends | {"G": entries.data.real, "B": entries.data.imag}


def untrained(grid: Grid, drawn: Drawn) -> dict[str, Columns]:
    """The columns of nodes that are known without learning."""
    known, found = describe_state(grid, drawn), {}
    for name, key in (("DC start", "start"), ("Newton's step", "step")):
        angle, magnitude = known[key].T
        voltage = magnitude * np.exp(1j * np.deg2rad(angle))
        found[name] = describe(grid, drawn.kept, voltage)
    return found


def join(states: list[Columns]) -> pd.DataFrame:
    """All states, with a column for their numbers."""
    rows = [pd.DataFrame({"scenario": i, **state}) for i, state in enumerate(states)]
    return pd.concat(rows, ignore_index=True).replace({True: 1, False: 0})


def errors(found: pd.DataFrame, nodes: pd.DataFrame) -> dict[str, float]:
    """Root mean squared errors of what is unknown."""
    return {
        f"{kind} {column}": float(
            ((found - nodes)[column][nodes[kind] == 1] ** 2).mean() ** 0.5
        )
        for kind, columns in UNKNOWN.items()
        for column in columns
    }


def main(argv: list[str] | None = None) -> None:
    """Draws and writes."""
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
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
    folder = args.out / (args.grid.stem if args.grid else "random") / "raw"
    if folder.exists():
        parser.error(f"there is {folder} already: remove it, or choose another --out")
    if args.grid and not args.grid.exists():
        parser.error(f"there is no {args.grid}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    path = args.grid or write_grid(folder.parent / "random.npz", 100, args.seed)
    grid, rng = read_grid(path), np.random.default_rng(args.seed)
    count = 2 if args.smoke else args.states
    try:
        states, _ = draw_states(grid, count, rng, path)
    except ValueError as error:
        parser.error(str(error))
    nodes = join([describe(grid, drawn.kept, x) for drawn, x in states])
    guesses = [untrained(grid, drawn) for drawn, _ in states]
    rows = {name: join([guess[name] for guess in guesses]) for name in guesses[0]}
    rows["mean of the bus"] = nodes.groupby("bus").transform("mean")
    table = {name: errors(found, nodes) for name, found in rows.items()}
    print(pd.DataFrame(table).T.to_string(float_format="{:.4g}".format))

    unfinished = folder.with_name("unfinished")
    unfinished.mkdir(exist_ok=True)
    nodes.to_csv(unfinished / "pf_node.csv", index=False)
    join([edges(grid, x.kept) for x, _ in states]).to_csv(
        unfinished / "pf_edge.csv", index=False
    )
    unfinished.rename(folder)


if __name__ == "__main__":
    sys.exit(main())
