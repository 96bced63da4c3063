"""Random layers against dense float64 computations of their formulas.

    python tests/campaign.py --cases 20000 --seed 0 --out campaign.json
    python tests/campaign.py --replay 1234

Each case is a layer with random options and parameters, on a random graph, with
features from 1e-3 to 1e5, in float64, float32, bfloat16 or float16 (of the whole layer,
or by autocast), on either backend, now and then compiled. `random_layers.check` says
what is compared, and when a case counts as wrong. A case follows from its number, and
can be replayed on its own. The results so far are written once a minute, and when
interrupted.
"""

import argparse
import json
import os
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from random_layers import CONVS, FAILED, Case, Result, check, draw
from tqdm import tqdm


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="the first case's number")
    parser.add_argument("--conv", choices=sorted(CONVS), help="only this layer")
    parser.add_argument("--compile", type=float, default=0.02, help="share compiled")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    parser.add_argument("--replay", type=int, help="the number of a single case")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if args.replay is not None:
        case = draw(args.replay, args.conv, compiling=args.compile)
        result = check(case)
        print(case, result, sep="\n")
        return int(result.status in FAILED)

    report: dict[str, Any] = {"command": sys.argv, "torch": torch.__version__}
    report |= {"done": 0, "convs": {}, "failures": []}
    written = time.monotonic()
    seeds = tqdm(range(args.seed, args.seed + args.cases), unit="case")
    try:
        for seed in seeds:
            case = draw(seed, args.conv, compiling=args.compile)
            add(report, case, check(case))
            seeds.set_postfix(failures=len(report["failures"]), refresh=False)
            if time.monotonic() - written > 60:
                write(report, args.out)
                written = time.monotonic()
    except KeyboardInterrupt:
        print(f"Interrupted after {report['done']} cases.")
    write(report, args.out)
    print(table(report))
    return int(bool(report["failures"]))


def add(report: dict[str, Any], case: Case, result: Result) -> None:
    kind = str(case.dtype).removeprefix("torch.")
    worst = {"worst error": 0.0, "worst excess": 0.0}
    row = report["convs"].setdefault(f"{case.name} {kind}", worst)
    report["done"] += 1
    row[result.status] = row.get(result.status, 0) + 1
    if result.status in ("right", "wrong"):
        row["worst error"] = max(row["worst error"], result.error)
        row["worst excess"] = max(row["worst excess"], result.excess)
    if result.status in FAILED:
        failure = result._asdict() | {"seed": case.seed, "case": str(case)}
        report["failures"].append({k: str(v) for k, v in failure.items()})


def write(report: dict[str, Any], path: Path | None) -> None:
    if path is None:
        return
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(report, indent=1) + "\n")
    os.replace(part, path)


def table(report: dict[str, Any]) -> str:
    statuses = (
        "right",
        "wrong",
        "not finite",
        "error",
        "ill-conditioned",
        "out of range",
    )
    lines = [f"{'':34}" + "".join(f"{name:>16}" for name in statuses)
             + f"{'worst error':>13}{'of allowed':>12}"]  # fmt: skip
    for name, row in sorted(report["convs"].items()):
        counts = "".join(f"{row.get(status, 0):16}" for status in statuses)
        worst = f"{row['worst error']:13.1e}{row['worst excess']:12.2g}"
        lines.append(f"{name:34}{counts}{worst}")
    total = Counter(failure["status"] for failure in report["failures"])
    lines.append(f"{report['done']} cases; failures: {dict(total) or 'none'}")
    for failure in report["failures"][:50]:
        lines.append(f"{failure['status']}: {failure['worst'][:99]}; {failure['case']}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
