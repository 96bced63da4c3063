"""Measures `ChimeraConv` beside dense inverses and attention, on real graphs.

Forward, backward and peak memory on batches of peptides and on random planar graphs;
what depends on structure alone; the first call of a process::

    python benchmarks/mixing.py                     # all of it, half an hour
    python benchmarks/mixing.py --smoke             # tiny graphs, half a minute
    python benchmarks/mixing.py --only planar --threads 1
    python benchmarks/mixing.py --root peptides-functional --out results/mine.json

Outputs and all gradients are compared with dense float64 inverses first: nothing is
timed that differs, or that cannot be compared. Ratios are medians of the ratios within
rounds of interleaved repetitions. They hold on a busy machine too; times do not.
"""

import pickle
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from overhead import dataset_time, first_calls, new_graphs, structure_times
from report import plot, report, targets
from timing import (
    Rounds,
    Timing,
    UnfinishedError,
    in_fresh_process,
    interleave,
    machine,
    peak_memory,
    ratio,
    reset_peak_memory,
    show,
    summary,
    write_json,
)
from torch import Tensor
from torch_geometric.nn import GPSConv
from torch_geometric.utils import to_dense_adj, to_dense_batch
from workloads import (
    MAX_DENSE,
    PEPTIDES,
    REPOSITORY,
    Workload,
    peptides,
    planar,
)

from pyg_chimera.nn import ChimeraConv
from pyg_chimera.nn.conv import chimera_conv

CHANNELS, HEADS, STATE_CHANNELS = 64, 2, 96
PARTS = ("peptides", "planar", "dataset", "first-call")
#: Seconds for a fresh process to import, load compiled code and warm up.
START_UP = 15
#: Relative errors allowed, of outputs and of all gradients.
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}


# Cases -------------------------------------------------------------------------


def chimera(**options: Any) -> ChimeraConv:
    return ChimeraConv(CHANNELS, CHANNELS, HEADS, STATE_CHANNELS, **options)


def attention(kind: str) -> GPSConv:
    return GPSConv(CHANNELS, None, heads=HEADS, attn_type=kind)


class DenseInverse(torch.nn.Module):
    """`ChimeraConv` with dense inverses in the place of `resolvent_mix`."""

    def __init__(self, mix: Callable[..., Tensor]) -> None:
        super().__init__()
        self.conv = chimera(solver="neumann")  # which hands `num_terms` on
        self.mix = mix

    def forward(
        self, x: Tensor, edge_index: Tensor, batch: Tensor, num_terms: int = -1
    ) -> Tensor:
        """As `ChimeraConv`; of finite sums if `num_terms` is not -1."""
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
    computes: str | None = "inverse"  #: or "finite sum", or None: something else
    dtype: torch.dtype = torch.float32
    cold: bool = False  #: whether its graphs are new to it in each repetition
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

CASES: dict[str, Case] = {
    "auto": Case(chimera),
    "auto, new graphs": Case(chimera, cold=True),
    "numba sparse state": solver_case("sparse", "state", "numba"),
    "numba sparse mask": solver_case("sparse", "mask", "numba"),
    "torch sparse state": solver_case("sparse", "state", "torch"),
    "torch sparse mask": solver_case("sparse", "mask", "torch"),
    "torch dense state": solver_case("dense", "state", "torch"),
    "torch dense mask": solver_case("dense", "mask", "torch"),
    "torch neumann state": solver_case("neumann", "state", "torch"),
    "torch neumann mask": solver_case("neumann", "mask", "torch"),
    "float64 inverse by graph": BY_GRAPH,
    "float64 inverse, padded": PADDED,
    "float64 inverse of all": WHOLE,
    "float64 reference": REFERENCE,
    "GPSConv multihead": Case(lambda: attention("multihead"), None),
    "GPSConv performer": Case(lambda: attention("performer"), None),
}


class Run:
    """A case on a workload. All cases start from the same parameters and inputs."""

    def __init__(self, case: Case, workload: Workload, device: str) -> None:
        torch.manual_seed(0)
        self.case = case
        self.module = case.make().to(device, case.dtype)
        torch.manual_seed(1)
        x, grad = torch.randn(2, workload.num_nodes, CHANNELS)
        self.x = x.to(device, case.dtype).requires_grad_()
        self.grad = grad.to(device, case.dtype)
        self.edge_index = workload.edge_index.to(device)
        self.options: dict[str, Any] = {"batch": workload.batch.to(device)}
        if case.computes == "finite sum":
            self.options["num_terms"] = workload.num_terms
        self.synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None

    def __call__(self) -> Timing:
        """Forward and backward once."""
        if not self.case.cold:
            return self._step()
        with new_graphs():
            return self._step()

    def _step(self) -> Timing:
        self.x.grad = None
        self.module.zero_grad()
        self.synchronize()
        start = time.perf_counter()
        out = self.module(self.x, self.edge_index, **self.options)
        self.synchronize()
        middle = time.perf_counter()
        out.backward(self.grad)
        self.synchronize()
        end = time.perf_counter()
        self.out = out.detach()
        return Timing(middle - start, end - start)

    def results(self) -> dict[str, Tensor]:
        """The output, and the gradients of the input and of all parameters."""
        self()
        results = {"output": self.out, "gradient of x": self.x.grad}
        for name, parameter in self.module.named_parameters():
            results[f"gradient of {name.removeprefix('conv.')}"] = parameter.grad
        return results


# Exactness ---------------------------------------------------------------------


def check(workload: Workload, names: list[str], device: str) -> list[dict[str, Any]]:
    """Compares outputs and all gradients, and ends the benchmark if one is wrong."""
    dense = workload.largest <= MAX_DENSE
    exact = BY_GRAPH if dense else SPARSE  # which was compared where dense ones fit
    expected: dict[str, dict[str, Tensor]] = {}
    rows = []
    for name in names:
        case = CASES[name]
        if case.computes is None:
            continue
        show(f"exactness: {name} on {workload.name}")
        if case.computes not in expected:
            run = Run(exact._replace(computes=case.computes), workload, device)
            expected[case.computes] = run.results()
        errors = {
            key: relative_error(found, expected[case.computes][key])
            for key, found in Run(case, workload, device).results().items()
        }
        for key, error in errors.items():
            if not error <= TOLERANCE[case.dtype]:
                raise SystemExit(
                    f"\n{name} is wrong on {workload.name}: its {key} is off by "
                    f"{error:.1e}, and {TOLERANCE[case.dtype]:.0e} is allowed. "
                    "Nothing is timed."
                )
        row = {"workload": workload.name, "case": name, "errors": errors}
        row["against"] = f"{'dense' if dense else 'sparse'} float64 {case.computes}"
        rows.append(row | {"worst": max(errors.values())})
    return rows


def relative_error(found: Tensor, expected: Tensor) -> float:
    error = (found.double() - expected.double()).abs().max()
    return float(error / expected.double().abs().max())


# Memory, and whether a case can be measured at all -----------------------------


class Pilot(NamedTuple):
    """A first run of a case on a workload."""

    seconds: float = 0.0
    memory: int | None = None  #: peak, above what was held before, in bytes
    problem: str | None = None  #: why there was no such run


def pilot(name: str, pickled: bytes, device: str, threads: int) -> Pilot:
    """Runs once, to be called in a fresh process on the CPU."""
    torch.set_num_threads(threads)
    tiny, names = planar(100), [name]
    if name.startswith("auto") and device == "cpu":  # other code for larger graphs
        names.append("numba sparse state")
    for warm_up in names:  # what compiled code and libraries take does not count
        Run(CASES[warm_up], tiny, device)()
    run = Run(CASES[name], pickle.loads(pickled), device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        seconds = run().total
        return Pilot(seconds, torch.cuda.max_memory_allocated() - held)
    resident = reset_peak_memory()
    seconds = run().total
    return Pilot(seconds, None if resident is None else peak_memory() - resident)


def pilots(args: Namespace, workloads: list[Workload]) -> dict[tuple, Pilot]:
    """Every case on every workload, on larger ones only if smaller ones were fine."""
    found: dict[tuple, Pilot] = {}
    last: dict[tuple, Pilot] = {}
    for workload in workloads:
        pickled = pickle.dumps(workload)
        for name, case in CASES.items():
            show(f"memory: {name} on {workload.name}")
            result = last.get((workload.part, name), Pilot())
            if args.device == "cuda" and case.cpu_only:
                result = Pilot(problem="runs on the CPU")
            elif case.computes == "finite sum" and workload.num_terms < 0:
                result = Pilot(problem="too large to compare")
            elif result.problem is None:
                try:
                    job = (name, pickled, args.device, args.threads)
                    if args.device == "cuda":
                        result = pilot(*job)
                    else:
                        longest = args.limit + START_UP
                        result = in_fresh_process(pilot, *job, limit=longest)
                    if result.seconds > args.limit:
                        result = Pilot(problem=f"takes more than {args.limit:g} s")
                except TimeoutError:
                    result = Pilot(problem=f"takes more than {args.limit:g} s")
                except UnfinishedError as error:
                    result = Pilot(problem=str(error))
                except torch.OutOfMemoryError:
                    result = Pilot(problem="does not fit in memory")
            found[workload.name, name] = last[workload.part, name] = result
    return found


# The parts of the benchmark ----------------------------------------------------


def measure_layers(args: Namespace) -> dict[str, Any]:
    """Compares, then times, all cases on the graphs of the parts asked for."""
    workloads: list[Workload] = []
    if "peptides" in args.only:
        sizes = [2] if args.smoke else [16, 64]
        workloads += peptides(args.root, sizes, args.smoke)
    if "planar" in args.only:
        workloads += map(planar, (32, 128) if args.smoke else args.nodes)
    if not workloads:
        return {"errors": [], "layers": [], "growth": [], "structure": []}

    on_device = [n for n, c in CASES.items() if args.device == "cpu" or not c.cpu_only]
    errors = check(planar(16, 30, 50), on_device, args.device)
    first = pilots(args, workloads)
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
        auto = rounds.get((workload.name, "auto"))
        for name in CASES:
            key = workload.name, name
            row = {"part": workload.part, "workload": workload.name, "case": name}
            row |= {"nodes": workload.num_nodes, "edges": workload.num_edges}
            row |= {"memory": first[key].memory, "problem": first[key].problem}
            if key in fine:
                row |= summary(rounds[key])
                row["by_auto"] = ratio(rounds[key], auto) if auto else None
            layers.append(row)
    growth = []
    graphs = {x.num_nodes: x.name for x in workloads if x.part == "planar"}
    for nodes in graphs:
        for name in CASES:
            a, b = (graphs[nodes], name), (graphs.get(4 * nodes), name)
            if a in fine and b in fine:
                row = {"case": name, "from": nodes, "to": 4 * nodes, "memory": None}
                row["time"] = ratio(rounds[b], rounds[a])
                if first[a].memory and first[b].memory:
                    row["memory"] = first[b].memory / first[a].memory
                growth.append(row)
    structure = [structure_times(x, args.repeats) for x in workloads]
    results = {"errors": errors, "layers": layers, "growth": growth}
    return results | {"structure": structure}


def parse(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--nodes",
        nargs="+",
        type=int,
        default=[512 * 2**i for i in range(6)],
        help="of the planar graphs (default: 512 to 16384)",
    )
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
    parser.add_argument(
        "--out", type=Path, help="of the JSON; the plot has the same name"
    )
    parser.add_argument("--smoke", action="store_true", help="only see that it runs")
    args = parser.parse_args(argv)
    if args.threads is None:
        args.threads = 1 if args.smoke else torch.get_num_threads()
    if args.smoke:
        args.repeats = 1
    if args.out is None:
        folder = "runs" if args.smoke else "benchmarks/results"
        args.out = REPOSITORY / folder / f"mixing-{args.device}.json"
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    for name in set(CASES) - set(args.cases):
        del CASES[name]
    results: dict[str, Any] = {"machine": machine(args.device)}
    settings = ("only", "cases", "nodes", "device", "threads", "repeats", "limit")
    results["settings"] = {name: getattr(args, name) for name in settings}
    results |= measure_layers(args)
    results |= {"dataset": None, "first_call": []}
    if "dataset" in args.only:
        results["dataset"] = dataset_time(args.root, args.smoke)
    if "first-call" in args.only:
        sizes = (CHANNELS, HEADS, STATE_CHANNELS)
        results["first_call"] = first_calls(sizes, args.device, args.smoke)
    results["targets"] = targets(results)
    show("")
    print(report(results))
    write_json(args.out, results)
    if results["layers"]:
        plot(results["layers"], args.out.with_suffix(".png"))
    print(f"\nWritten: {args.out}, and a plot beside it.")


if __name__ == "__main__":
    main()
