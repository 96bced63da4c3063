"""The command line options that benchmarks share."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

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
    """Where to write: not over earlier results, except where asked to."""
    out = args.out or REPOSITORY / "runs" / f"{name}.json"
    if out.exists() and not (args.overwrite or args.smoke):
        raise SystemExit(f"{out} exists: pass --overwrite, or another --out")
    return out
