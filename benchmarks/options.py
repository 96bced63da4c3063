"""The command line options that benchmarks share, and what they do."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from json_files import write_json
from timing import machine, show
from workloads import PEPTIDES, REPOSITORY


def add_output(parser: ArgumentParser) -> None:
    """Adds options for where to write."""
    parser.add_argument(
        "--out", type=Path, help="of the JSON; a plot has the same name (default: runs)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace --out")
    parser.add_argument("--smoke", action="store_true", help="only see that it runs")


def add_rows(parser: ArgumentParser) -> None:
    """Adds options for which rows to measure, how often, and where to write."""
    add = parser.add_argument
    add("--only", nargs="+", help="names of rows")
    add("--repeats", type=int, default=7, help="rounds (default: 7)")
    add("--limit", type=float, default=15, help="seconds of one thing (default: 15)")
    add("--root", type=Path, default=PEPTIDES, help="of Peptides-func")
    add_output(parser)


def output(args: Namespace, name: str) -> Path:
    """Where to write: not over earlier results, except where asked to, or those of a
    smoke run.
    """
    out = args.out or REPOSITORY / "runs" / f"{name}{'-smoke' * args.smoke}.json"
    if out.exists() and not args.overwrite and (args.out or not args.smoke):
        raise SystemExit(f"{out} exists: pass --overwrite, or another --out")
    return out


def measure_rows(
    key: str,
    rows: Iterable[tuple[str, Any]],
    measure: Callable[[str, Any], dict[str, Any] | None],
    report: Callable[[list[dict[str, Any]]], str],
    args: Namespace,
    device: str = "cpu",
) -> None:
    """Measures what has a name that is asked for, and writes results as they come."""
    out, results, host = output(args, f"{key}-{device}"), [], machine(device)
    names = []
    for name, row in rows:
        names.append(name)
        if args.only is None or name in args.only:
            found = measure(name, row)
            results += [] if found is None else [found]
            write_json(out, {"machine": host, key: results})
    show("")
    if results:
        print(f"{report(results)}\n\nWritten: {out}")
    if unknown := set(args.only or ()).difference(names):
        raise SystemExit(f"--only: unknown rows {sorted(unknown)}; there are {names}")
