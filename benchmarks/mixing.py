"""Measures `ChimeraConv` and `GatedDeltaConv` beside dense inverses and attention.

Forward, backward and peak memory on batches of peptides, on random planar graphs and on
graphs whose factors fill up; what depends on structure alone; the first call of a
process::

    python benchmarks/mixing.py                     # all of it, up to an hour
    python benchmarks/mixing.py --smoke             # tiny graphs, half a minute
    python benchmarks/mixing.py --only planar --threads 1
    python benchmarks/mixing.py --root peptides-functional --out results/mine.json

Outputs and all gradients are compared with dense float64 inverses first: nothing is
timed that differs, or that cannot be compared. Ratios are medians of the ratios within
rounds of interleaved repetitions. They hold on a busy machine too; times do not.
"""

import pickle
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from options import add_options, settle
from overhead import dataset_time, first_calls, new_graphs, structure_times
from report import Figures, run, verdicts
from steps import (
    Pilot,
    Step,
    compare,
    first_run,
    growth_rows,
    pilots,
    time_rows,
)
from timing import Rounds, Timing, interleave, show
from torch import Tensor
from torch_geometric.nn import GPSConv
from torch_geometric.utils import to_dense_adj, to_dense_batch
from workloads import MAX_DENSE, Workload, filling, peptides, planar

from pyg_chimera.nn import ChimeraConv, GatedDeltaConv
from pyg_chimera.nn.conv import chimera_conv

CHANNELS, HEADS, STATE_CHANNELS = 64, 2, 96
PARTS = ("peptides", "planar", "filling", "dataset", "first-call")
INVERSES = (
    "float64 inverse by graph",
    "float64 inverse, padded",
    "float64 inverse of all",
    "float64 reference",
)


# Cases -------------------------------------------------------------------------


def chimera(**options: Any) -> ChimeraConv:
    # With the paper's initial values: with long ranges, the problem is conditioned
    # worse, and equally accurate solvers differ by more.
    own = {"reach": None, "qk_norm": False, **options}
    return ChimeraConv(CHANNELS, CHANNELS, HEADS, STATE_CHANNELS, **own)


def delta(**options: Any) -> GatedDeltaConv:
    return GatedDeltaConv(CHANNELS, CHANNELS, HEADS, reach=None, **options)


def attention(kind: str) -> GPSConv:
    return GPSConv(CHANNELS, None, heads=HEADS, attn_type=kind)


class DenseInverse(torch.nn.Module):
    """`ChimeraConv` with dense inverses in place of `resolvent_mix`."""

    def __init__(self, mix: Callable[..., Tensor]) -> None:
        super().__init__()
        self.conv = chimera(solver="neumann")  # which passes `num_terms` on
        self.mix = mix

    def forward(
        self, x: Tensor, edge_index: Tensor, batch: Tensor, num_terms: int = -1
    ) -> Tensor:
        """As `ChimeraConv`; with finite sums if `num_terms` is not -1."""
        with patch.object(chimera_conv, "resolvent_mix", self.mix):
            return self.conv(x, edge_index, batch=batch, num_terms=num_terms)


def inverse_by_graph(query, key, value, edge_index, edge_weight, batch, num_terms, **_):
    """One inverse per graph and head; of finite sums if `num_terms` is not -1."""
    sizes = batch.bincount().tolist()
    edges = batch[edge_index[0]].bincount(minlength=len(sizes)).tolist()
    outs, first = [], 0
    for n, q, k, v, edge, weight in zip(
        sizes,
        *(x.split(sizes) for x in (query, key, value)),
        edge_index.split(edges, dim=1),
        edge_weight.split(edges),
        strict=True,
    ):
        col, row = edge - first
        first += n
        eye = torch.eye(n, dtype=v.dtype, device=v.device)
        scores = q[:, 0] @ k[:, 0].t()
        heads = []
        for w, u in zip(weight.unbind(1), v.unbind(1), strict=True):
            A = torch.zeros_like(eye).index_put((row, col), w, accumulate=True)
            L = torch.linalg.inv(eye - A)
            if num_terms >= 0:
                L = L @ (eye - torch.linalg.matrix_power(A, num_terms + 1))
            heads.append((L * scores) @ u)
        outs.append(torch.stack(heads, 1))
    return torch.cat(outs)


def inverse_of_all(query, key, value, edge_index, edge_weight, batch, num_terms, **_):
    """One inverse per head, of the whole batch as one graph."""
    whole = torch.zeros_like(batch)
    return inverse_by_graph(
        query, key, value, edge_index, edge_weight, whole, num_terms
    )


def inverse_padded(query, key, value, edge_index, edge_weight, batch, **_):
    """All inverses at once, padded to the largest graph."""
    A = to_dense_adj(edge_index, batch, edge_weight).permute(0, 3, 2, 1)
    (q, real), (k, _) = (to_dense_batch(x[:, 0], batch) for x in (query, key))
    v = to_dense_batch(value, batch)[0].transpose(1, 2)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # batched LU is wrong with more (pytorch#142815)
    L = torch.linalg.inv(torch.eye(A.size(-1), dtype=A.dtype, device=A.device) - A)
    torch.set_num_threads(threads)
    return ((L * (q @ k.mT).unsqueeze(1)) @ v).transpose(1, 2)[real]


class Case(NamedTuple):
    """A layer to measure."""

    make: Callable[[], torch.nn.Module]
    #: The result it is compared with; also "finite sum", "delta rule"; None: no other.
    computes: str | None = "inverse"
    dtype: torch.dtype = torch.float32
    cold: bool = False  #: whether graphs are uncached in each repetition
    cpu_only: bool = False


def solver_case(solver: str, form: str, backend: str) -> Case:
    def make() -> ChimeraConv:
        return chimera(solver=solver, form=form, backend=backend)

    computes = "finite sum" if solver == "neumann" else "inverse"
    return Case(make, computes, cpu_only=backend == "numba")


BY_GRAPH = Case(lambda: DenseInverse(inverse_by_graph), dtype=torch.float64)
WHOLE = Case(lambda: DenseInverse(inverse_of_all), dtype=torch.float64)
PADDED = Case(lambda: DenseInverse(inverse_padded), dtype=torch.float64)
REFERENCE = Case(lambda: chimera(backend="reference"), dtype=torch.float64)
SPARSE = Case(lambda: chimera(solver="sparse", form="state"), dtype=torch.float64)
# The tests compare it with dense states, which would take gigabytes for a peptide.
DELTA = Case(lambda: delta(backend="torch"), "delta rule", dtype=torch.float64)

CASES: dict[str, Case] = {
    "auto": Case(chimera),
    "auto, new graphs": Case(chimera, cold=True),
    "numba sparse state": solver_case("sparse", "state", "numba"),
    "numba sparse mask": solver_case("sparse", "mask", "numba"),
    "numba iterative": solver_case("iterative", "state", "numba"),
    "numba neumann state": solver_case("neumann", "state", "numba"),
    "torch dense mask": solver_case("dense", "mask", "torch"),
    "torch neumann mask": solver_case("neumann", "mask", "torch"),
    "float64 inverse by graph": BY_GRAPH,
    "float64 inverse, padded": PADDED,
    "float64 inverse of all": WHOLE,
    "float64 reference": REFERENCE,
    "GatedDeltaConv": Case(delta, "delta rule"),
    "GatedDeltaConv torch": Case(lambda: delta(backend="torch"), "delta rule"),
    "GPSConv multihead": Case(lambda: attention("multihead"), None),
    "GPSConv performer": Case(lambda: attention("performer"), None),
}


class Run(Step):
    """A case on a workload. All cases start from the same parameters and inputs."""

    def __init__(self, case: Case, workload: Workload, device: str) -> None:
        torch.manual_seed(0)
        module = case.make().to(device, case.dtype)
        torch.manual_seed(1)
        x, grad = torch.randn(2, workload.num_nodes, CHANNELS).to(device, case.dtype)
        x.requires_grad_()
        edge_index = workload.edge_index.to(device)
        options: dict[str, Any] = {"batch": workload.batch.to(device)}
        if case.computes == "finite sum":
            options["num_terms"] = workload.num_terms
        leaves = {"x": x}
        for name, parameter in module.named_parameters():
            leaves[name.removeprefix("conv.")] = parameter
        super().__init__(lambda: module(x, edge_index, **options), leaves, grad)
        self.cold = case.cold

    def __call__(self) -> Timing:
        """Forward and backward once."""
        if not self.cold:
            return super().__call__()
        with new_graphs():
            return super().__call__()


# Exactness ---------------------------------------------------------------------


def check(workload: Workload, names: list[str], device: str) -> list[dict[str, Any]]:
    """Compares outputs and all gradients, and ends the benchmark if one is wrong."""
    dense = workload.largest <= MAX_DENSE
    exact = BY_GRAPH if dense else SPARSE  # compared where dense inverses fit
    expected: dict[str, dict[str, Tensor]] = {}
    rows = []
    for name in names:
        case = CASES[name]
        if case.computes is None:
            continue
        show(f"exactness: {name} on {workload.name}")
        if case.computes not in expected:
            right = exact._replace(computes=case.computes)
            run = Run(
                DELTA if case.computes == DELTA.computes else right, workload, device
            )
            expected[case.computes] = run.results()
        found = Run(case, workload, device).results()
        against = f"{'dense' if dense else 'sparse'} float64 {case.computes}"
        rows.append(
            compare(name, workload.name, found, expected[case.computes], against)
        )
    return rows


# Memory, and whether a case can be measured at all -----------------------------


def pilot(name: str, pickled: bytes, device: str, threads: int) -> Pilot:
    """Runs a case once, in a fresh process on the CPU."""
    torch.set_num_threads(threads)
    tiny, names = planar(100), [name]
    if name.startswith("auto") and device == "cpu":  # larger graphs use other code
        names.append("numba sparse state")
    for warm_up in names:  # do not measure the memory of compiled code and libraries
        Run(CASES[warm_up], tiny, device)()
    return first_run(Run(CASES[name], pickle.loads(pickled), device))


def unable(workload: Workload, name: str, device: str) -> str | None:
    """Why a case can't be measured, if that is known without trying."""
    case = CASES[name]
    if device == "cuda" and case.cpu_only:
        return "runs on the CPU"
    if case.computes in ("finite sum", "delta rule") and workload.num_terms < 0:
        return "too large to compare"
    return None


# The parts of the benchmark ----------------------------------------------------


def measure_layers(args: Namespace) -> dict[str, Any]:
    """Compares, then times, all cases on the graphs of the requested parts."""
    workloads: list[Workload] = []
    if "peptides" in args.only:
        sizes = [2] if args.smoke else [16, 64]
        workloads += peptides(args.root, sizes, args.smoke)
    if "planar" in args.only:
        workloads += map(planar, (32, 128) if args.smoke else args.nodes)
    if "filling" in args.only:
        workloads += filling(args.smoke)
    if not workloads:
        return {"errors": [], "layers": [], "growth": [], "structure": []}

    on_device = [n for n, c in CASES.items() if args.device == "cpu" or not c.cpu_only]
    errors = check(planar(16, 30, 50), on_device, args.device)
    first = pilots(pilot, workloads, lambda _: CASES, unable, args)
    fine = {key for key, result in first.items() if result.problem is None}
    for workload in workloads:
        names = [name for name in CASES if (workload.name, name) in fine]
        errors += check(workload, names, args.device)

    rounds: dict[Any, Rounds] = {}
    for part in dict.fromkeys(x.part for x in workloads):
        show(f"times: {part}")
        runs: dict[Any, Run] = {
            (workload.name, name): Run(case, workload, args.device)
            for workload in workloads
            for name, case in CASES.items()
            if workload.part == part and (workload.name, name) in fine
        }
        rounds |= interleave(runs, args.repeats, args.limit)

    layers = []
    for workload in workloads:
        layers += time_rows(workload, CASES, "auto", first, rounds)
    planar_graphs = [x for x in workloads if x.part == "planar"]
    growth = growth_rows(planar_graphs, CASES, first, rounds)
    structure = [structure_times(x, args.repeats) for x in workloads]
    results = {"errors": errors, "layers": layers, "growth": growth}
    return results | {"structure": structure}


def measure(args: Namespace) -> dict[str, Any]:
    """All that was asked for."""
    results = measure_layers(args) | {"dataset": None, "first_call": []}
    if "dataset" in args.only:
        results["dataset"] = dataset_time(args.root, args.smoke)
    if "first-call" in args.only:
        sizes = (CHANNELS, HEADS, STATE_CHANNELS)
        results["first_call"] = first_calls(sizes, args.device, args.smoke)
    return results


def targets(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets for mixing layers, with measured values."""
    at_most: Figures = {}
    at_least: Figures = {}
    rows = [row for row in results["layers"] if row["workload"].endswith("batch of 64")]
    by_auto = {row["case"]: row.get("by_auto") for row in rows}
    medians = {row["case"]: row["total"]["median"] for row in rows if "total" in row}
    attention = by_auto.get("GPSConv multihead")
    by_attention = None if attention is None else 1 / attention
    at_most["batch of 64: auto / GPSConv multihead"] = 0.6, by_attention
    both = [medians.get(name) for name in ("GatedDeltaConv", "GPSConv multihead")]
    delta = both[0] / both[1] if all(both) else None  # "auto" may not have been run
    at_most["batch of 64: GatedDeltaConv / GPSConv multihead"] = 1, delta
    for name in INVERSES:
        at_least[f"batch of 64: {name} / auto"] = 100, by_auto.get(name)
    steps = {row["from"]: row for row in results["growth"] if row["case"] == "auto"}
    for nodes in (1024, 4096):
        step = steps.get(nodes, {"time": None, "memory": None})
        text = f"planar, {nodes:,} -> {4 * nodes:,} nodes: auto, growth of"
        at_most[f"{text} time"] = 6, step["time"]
        at_most[f"{text} memory"] = 5, step["memory"]
    errors = [row["worst"] for row in results["errors"]]
    at_most["largest relative error"] = 1e-5, max(errors, default=None)
    calls = [row["total"] for row in results["first_call"]]
    at_most["first call, forward and backward, s"] = 2, max(calls, default=None)
    dataset = results["dataset"] or {"graphs": 0}
    whole = dataset["seconds"] if dataset["graphs"] == 15_535 else None
    at_most["structure of all 15,535 Peptides-func graphs, s"] = 30, whole
    return verdicts(at_most, at_least)


def parse(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    add_options(parser, PARTS, CASES)
    parser.add_argument(
        "--nodes",
        nargs="+",
        type=int,
        default=[512 * 2**i for i in range(6)],
        help="of the planar graphs (default: 512 to 16384)",
    )
    args = parser.parse_args(argv)
    settle(args, "mixing")
    return args


def main() -> None:
    settings = ("only", "cases", "nodes", "device", "threads", "repeats", "limit")
    run(parse(), CASES, settings, measure, targets)


if __name__ == "__main__":
    main()
