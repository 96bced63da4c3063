"""The command line options that benchmarks share."""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from pathlib import Path

import torch
from workloads import PEPTIDES, REPOSITORY


def add_options(
    parser: ArgumentParser, parts: Iterable[str], cases: Iterable[str]
) -> None:
    """Adds options for what to measure, on what, and for how long."""
    parser.add_argument("--only", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--cases", nargs="+", choices=list(cases), default=list(cases))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="(default: all; --smoke: 1)")
    parser.add_argument("--repeats", type=int, default=9, help="rounds (default: 9)")
    parser.add_argument(
        "--limit",
        type=float,
        default=20,
        help="seconds that a run, and all repetitions of one together, may take "
        "(default: 20)",
    )
    parser.add_argument(
        "--root", type=Path, default=PEPTIDES, help="where Peptides-func is"
    )
    add_output(parser)


def add_output(parser: ArgumentParser) -> None:
    """Adds options for where to write."""
    parser.add_argument(
        "--out", type=Path, help="of the JSON; a plot has the same name (default: runs)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace --out")
    parser.add_argument("--smoke", action="store_true", help="only see that it runs")


def output(args: Namespace, name: str) -> Path:
    """Where to write: not over earlier results, except where asked to."""
    out = args.out or REPOSITORY / "runs" / f"{name}.json"
    if out.exists() and not (args.overwrite or args.smoke):
        raise SystemExit(f"{out} exists: pass --overwrite, or another --out")
    return out


def settle(args: Namespace, name: str) -> None:
    """Fills in defaults for the benchmark of that name."""
    if args.threads is None:
        args.threads = 1 if args.smoke else torch.get_num_threads()
    if args.smoke:
        args.repeats = 1
    args.out = output(args, f"{name}-{args.device}")
