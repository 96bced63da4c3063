"""What `explain` predicts for the rows of `benchmarks/layers.py`, beside measurements.

Both are of the operators of our layers alone, forward and backward, on one thread: the
time that the processor spends on this process, and the memory that a call adds, in a
process of its own::

    python benchmarks/predictions.py                # ten minutes
    python benchmarks/predictions.py --only "planar, 2,000 nodes"
    python benchmarks/predictions.py --smoke

The layer's time, with its projections and gates, is measured for comparison, and the
multiply-adds of the operator and of matrix products are counted, beside those of what
one would use instead.
"""

import os
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

# Freed memory goes back, and is not there when it is needed again unseen.
os.environ |= {f"MALLOC_{x}_": "65536" for x in ("MMAP_THRESHOLD", "TRIM_THRESHOLD")}

import torch
from layers import Case, rows
from options import add_output, measure_rows
from timing import (
    in_fresh_process,
    peak_memory,
    reset_peak_memory,
    show,
    table,
)
from torch import Tensor
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)
from workloads import PEPTIDES

from pyg_chimera.ops.common.operator import Operator, explained

MIB, LIMIT = 2**20, 600  #: seconds of a process


def calls(case: Case) -> list[tuple[Operator, Any]]:
    """The operators that a layer calls, if they have costs, and their inputs."""
    found, called = [], Operator._called

    def spied(self: Operator, inputs: Any, report: Any) -> Tensor:
        found.append((self, inputs))
        return called(self, inputs, report)

    with patch.object(Operator, "_called", spied), torch.no_grad():
        case()
    return [(x, inputs) for x, inputs in found if x.plan(inputs).choice.cost]


def both_passes(operator: Operator, inputs: Any) -> float:
    """Calls an operator, and returns the seconds."""
    inputs = type(inputs)(*(
        x.detach().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x
        for x in inputs
    ))  # fmt: skip
    start = time.process_time()
    out = operator(inputs)
    out.backward(torch.ones_like(out))
    return time.process_time() - start


def layer(case: Case) -> float:
    start = time.process_time()
    case().sum().backward()
    return time.process_time() - start


def products(case: Case) -> float:
    """The multiply-adds of matrix products and attention, forward and backward."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    formulas = {
        getattr(torch.ops.aten, name): lambda *x, **_: sdpa_flop_count(*x[:3]),
        getattr(torch.ops.aten, f"{name}_backward"): lambda *x, **_: (
            sdpa_backward_flop_count(*x[:4])
        ),
    }
    case.x.requires_grad_()
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        case().sum().backward()
    return counter.get_total_flops() / 2


def cases_of(name: str, root: Path, smoke: bool) -> list[Case]:
    """The layers of a row, ours first."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    return dict(rows(Namespace(root=root, smoke=smoke, device="cpu")))[name]()


def mebibytes(name: str, root: Path, smoke: bool) -> float:
    """The most memory that a call adds to its inputs, after one to load the code."""
    ((operator, inputs),) = calls(cases_of(name, root, smoke)[0])
    both_passes(operator, inputs)
    before = reset_peak_memory()
    both_passes(operator, inputs)
    return (peak_memory() - before) / MIB


def measure(name: str, args: Namespace) -> dict[str, Any] | None:
    """A row of results; None for a layer whose operators have no predicted costs."""
    show(name)
    case, *others = cases_of(name, args.root, args.smoke)
    found = calls(case)
    if not found:
        return None
    ((operator, inputs),) = found
    (choice,) = (x for x in explained(case) if x.cost is not None)
    times: dict[str, list[float]] = {"seconds": [], "layer": []}
    for _ in range(1 + args.repeats):  # the first loads compiled code
        times["seconds"].append(both_passes(operator, inputs))
        times["layer"].append(layer(case))
    measured = {key: median(samples[1:]) for key, samples in times.items()}
    process = (mebibytes, name, args.root, args.smoke)
    measured["mebibytes"] = in_fresh_process(*process, limit=LIMIT)
    predicted = {"seconds": choice.cost.seconds, "mebibytes": choice.cost.memory / MIB}
    operations = [choice.cost.operations + products(case), *map(products, others)]
    algorithm = f"{choice.operator}: {choice.solver}, {choice.form}"
    return {"name": name, "algorithm": algorithm, "operations": operations} | {
        "predicted": predicted, "measured": measured
    }  # fmt: skip


def report(results: list[dict[str, Any]]) -> str:
    names = "", "multiply-adds", "instead", "predicted, s", "measured, s", "layer, s"
    lines = [[*names, "MiB", "measured, MiB"]]
    for row in results:
        ours, real = row["predicted"], row["measured"]
        seconds = (ours["seconds"], real["seconds"], real["layer"])
        memory = (ours["mebibytes"], real["mebibytes"])
        cells = [*(f"{x:.2g}" for x in seconds), *(f"{x:.3g}" for x in memory)]
        counts = [f"{x:.2g}" for x in row["operations"]] + ["", ""]
        lines.append([row["name"], *counts[:2], *cells])
    return table(lines)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="names of rows")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--root", type=Path, default=PEPTIDES)
    add_output(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    named = rows(Namespace(root=args.root, smoke=args.smoke, device="cpu"))
    measure_rows("predictions", named, lambda x, _: measure(x, args), report, args)


if __name__ == "__main__":
    main()
