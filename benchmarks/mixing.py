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

import json
import pickle
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from timing import (
    Failure,
    Rounds,
    Timing,
    in_fresh_process,
    interleave,
    machine,
    peak_memory,
    ratio,
    reset_peak_memory,
    summary,
    table,
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
    all_peptides,
    peptides,
    planar,
)

from pyg_chimera.nn import ChimeraConv
from pyg_chimera.nn.conv import chimera_conv
from pyg_chimera.ops.structure import elimination_rank
from pyg_chimera.ops.structure import system as systems
from pyg_chimera.transforms import AddEliminationOrder

CHANNELS, HEADS, STATE_CHANNELS = 64, 2, 96
PARTS = ("peptides", "planar", "dataset", "first-call")
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
        with patch.object(chimera_conv, "resolvent_mix", self.mix):
            return self.conv(x, edge_index, batch=batch, num_terms=num_terms)


def inverse_by_graph(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor,
    batch: Tensor,
    num_terms: int,
    **kwargs: Any,
) -> Tensor:
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


def inverse_padded(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_index: Tensor,
    edge_weight: Tensor,
    batch: Tensor,
    **kwargs: Any,
) -> Tensor:
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
PADDED = Case(lambda: DenseInverse(inverse_padded), dtype=torch.float64)
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
    "float64 reference": Case(
        lambda: chimera(backend="reference"), dtype=torch.float64
    ),
    "GPSConv multihead": Case(lambda: attention("multihead"), None),
    "GPSConv performer": Case(lambda: attention("performer"), None),
}
INVERSES = ("float64 inverse by graph", "float64 inverse, padded", "float64 reference")


@contextmanager
def new_graphs() -> Iterator[None]:
    """Inside, no graph has been seen before."""
    cache = systems._CACHE.systems
    seen = dict(cache)
    cache.clear()
    try:
        yield
    finally:
        cache.clear()
        cache.update(seen)


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
    tiny = planar(32)
    for form in ("state", "mask"):  # so that loading compiled code does not count
        Run(solver_case("sparse", form, "auto"), tiny, device)()
    Run(CASES[name], tiny, device)()
    run = Run(CASES[name], pickle.loads(pickled), device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held: int | None = torch.cuda.memory_allocated()
        seconds, peak = run().total, torch.cuda.max_memory_allocated()
    else:
        held = reset_peak_memory()
        seconds, peak = run().total, peak_memory()
    return Pilot(seconds, None if held is None else peak - held)


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
                        result = in_fresh_process(pilot, *job, limit=args.limit)
                except (Failure, torch.OutOfMemoryError) as problem:
                    text = str(problem) if isinstance(problem, Failure) else None
                    result = Pilot(problem=text or "does not fit in memory")
            found[workload.name, name] = last[workload.part, name] = result
    return found


# The parts of the benchmark ----------------------------------------------------


def measure_layers(args: Namespace) -> dict[str, Any]:
    """Compares, then times, all cases on the graphs of the parts asked for."""
    workloads: list[Workload] = []
    if "peptides" in args.only:
        sizes = [2, 8] if args.smoke else [16, 64]
        workloads += peptides(args.root, sizes, args.smoke)
    if "planar" in args.only:
        steps = (64, 256) if args.smoke else (512 * 2**i for i in range(6))
        workloads += map(planar, steps)
    if not workloads:
        return {"errors": [], "layers": [], "growth": [], "structure": []}

    on_device = [n for n, c in CASES.items() if args.device == "cpu" or not c.cpu_only]
    errors = check(planar(16, 64, 100), on_device, args.device)
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
        sizes = {"nodes": workload.num_nodes, "edges": workload.num_edges}
        for name in CASES:
            key = workload.name, name
            row = {"part": workload.part, "workload": workload.name, "case": name}
            row |= sizes | {"memory": first[key].memory, "problem": first[key].problem}
            if key in fine:
                auto = rounds[workload.name, "auto"]
                row |= summary(rounds[key]) | {"by_auto": ratio(rounds[key], auto)}
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
    structure = [measure_structure(x, args.repeats) for x in workloads]
    return {
        "errors": errors, "layers": layers, "growth": growth, "structure": structure,
    }  # fmt: skip


def measure_structure(workload: Workload, repeats: int) -> dict[str, Any]:
    """What a graph costs before anything is computed on it, in seconds."""
    show(f"structure: {workload.name}")
    graph = (workload.edge_index, workload.num_nodes, workload.batch)
    rank = elimination_rank(*graph[:2])
    times: dict[str, list[float]] = {"cold": [], "with rank": [], "warm": []}
    for _ in range(repeats + 1):
        for name, samples in times.items():
            if name != "warm":
                systems._CACHE.systems.clear()
            start = time.perf_counter()
            system = systems.build_system(*graph, rank if name == "with rank" else None)
            samples.append(time.perf_counter() - start)
            if name == "with rank":
                systems.build_system(*graph)
    row = {"workload": workload.name, "fill": system.num_entries}
    return row | {name: median(samples[1:]) for name, samples in times.items()}


def measure_dataset(args: Namespace) -> dict[str, Any]:
    """The transform over a whole data set, with its graphs at hand."""
    show("structure of a whole data set")
    name, graphs = all_peptides(args.root, args.smoke)
    transform = AddEliminationOrder()
    transform(graphs[0])  # compiles, or loads
    start = time.perf_counter()
    for graph in graphs:
        transform(graph)
    seconds = time.perf_counter() - start
    return {"name": name, "graphs": len(graphs), "seconds": seconds}


FIRST_CALL = """
import json, sys, time
times = [time.perf_counter()]
import torch, torch_geometric.nn
times.append(time.perf_counter())
from pyg_chimera.nn import ChimeraConv
times.append(time.perf_counter())
form, channels, heads, states, device, threads = sys.argv[1:]
torch.set_num_threads(int(threads))
ring = torch.arange(16 * 150).view(16, 150)
edge_index = torch.stack([ring.flatten(), ring.roll(1, 1).flatten()])
edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1).to(device)
conv = ChimeraConv(int(channels), None, int(heads), int(states), form=form).to(device)
x = torch.randn(16 * 150, int(channels), device=device)
times.append(time.perf_counter())
out = conv(x, edge_index)
if device == "cuda":
    torch.cuda.synchronize()
times.append(time.perf_counter())
out.sum().backward()
if device == "cuda":
    torch.cuda.synchronize()
times.append(time.perf_counter())
a, b, c, d, e, f = times
print(json.dumps({"import torch": b - a, "import": c - b, "forward": e - d,
                  "total": f - d}))
"""


def measure_first_call(args: Namespace) -> list[dict[str, Any]]:
    """Imports and the first call, in fresh processes; the first fills the cache."""
    rows = []
    sizes = (CHANNELS, HEADS, STATE_CHANNELS, args.device, args.threads)
    for form in ("auto", "state", "mask"):
        show(f"first call, form {form}")
        command = [sys.executable, "-c", FIRST_CALL, form, *map(str, sizes)]
        samples = []
        for _ in range(2 if args.smoke else 4):
            out = subprocess.run(command, capture_output=True, text=True, check=True)
            samples.append(json.loads(out.stdout))
        medians = {key: median(x[key] for x in samples[1:]) for key in samples[0]}
        rows.append({"form": form} | medians)
    return rows


# Reports -----------------------------------------------------------------------


def targets(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures to reach: `value` is None where it was not measured."""
    by_auto = {
        row["case"]: row.get("by_auto")
        for row in results["layers"]
        if row["workload"] == "Peptides-func, batch of 64"
    }
    attention = by_auto.get("GPSConv multihead")
    rows = [("time / GPSConv multihead, batch of 64", 0.6, attention and 1 / attention)]
    for name in INVERSES:
        rows.append((f"{name} / time, batch of 64", -100, by_auto.get(name)))
    auto = {x["from"]: x for x in results["growth"] if x["case"] == "auto"}
    for nodes in (1024, 4096):
        step, row = f"planar, {nodes:,} -> {4 * nodes:,} nodes", auto.get(nodes, {})
        rows.append((f"growth of time, {step}", 6, row.get("time")))
        rows.append((f"growth of memory, {step}", 5, row.get("memory")))
    errors = [x["worst"] for x in results["errors"]]
    rows.append(("largest relative error", 1e-5, max(errors, default=None)))
    calls = [row["total"] for row in results["first_call"]]
    rows.append(("first call, forward and backward, s", 2, max(calls, default=None)))
    dataset = results["dataset"] or {}
    whole = dataset.get("seconds") if dataset.get("graphs") == 15_535 else None
    rows.append(("structure of all Peptides-func graphs, s", 30, whole))
    return [
        {
            "what": what,
            "target": f"{'<=' if bound > 0 else '>='} {abs(bound):g}",
            "value": value,
            "reached": None
            if value is None
            else value <= bound
            if bound > 0
            else value >= -bound,
        }
        for what, bound, value in rows
    ]


def report(results: dict[str, Any]) -> str:
    """Everything that was measured, for people."""
    host = results["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in host["versions"].items())
    lines = [
        f"{host['gpu'] or host['cpu']}, {host['cores']} cores, {host['threads']} threads"
        f", load {host['load_at_start']:.1f} before; Python {host['python']}, {versions}",
    ]
    for name in dict.fromkeys(row["workload"] for row in results["layers"]):
        rows = [row for row in results["layers"] if row["workload"] == name]
        nodes, edges = rows[0]["nodes"], rows[0]["edges"]
        lines.append(f"\n{name}: {nodes:,} nodes, {edges:,} edges; ms, MiB")
        head = ["", "forward", "+ backward", "fastest", "x auto", "memory", "runs"]
        lines.append(table([head, *map(_cells, rows)]))
    if results["growth"]:
        lines.append("\nGrowth from a planar graph to one of four times the nodes")
        steps = list(dict.fromkeys((x["from"], x["to"]) for x in results["growth"]))
        cells = {(x["case"], x["from"]): x for x in results["growth"]}
        head = ["time (memory)", *(f"{a:,} -> {b:,}" for a, b in steps)]
        body = [
            [name, *(_growth(cells.get((name, first))) for first, _ in steps)]
            for name in dict.fromkeys(x["case"] for x in results["growth"])
        ]
        lines.append(table([head, *body]))
    if results["structure"]:
        lines.append("\nStructure: order, pattern and layout of the factors; ms")
        head = ["", "new graphs", "with stored rank", "seen before", "entries of L"]
        body = [
            [
                row["workload"],
                *(f"{1e3 * row[key]:.2f}" for key in ("cold", "with rank", "warm")),
                f"{row['fill']:,}",
            ]
            for row in results["structure"]
        ]
        lines.append(table([head, *body]))
    if results["dataset"]:
        row = results["dataset"]
        lines.append(
            f"\nAddEliminationOrder on {row['graphs']:,} graphs of {row['name']}: "
            f"{row['seconds']:.2f} s"
        )
    if results["first_call"]:
        lines.append("\nFirst call in a fresh process, compiled code on disk; s")
        keys = ["import torch", "import", "forward", "total"]
        head = ["form", "import torch, PyG", "and pyg_chimera", "forward", "+ backward"]
        body = [
            [row["form"], *(f"{row[key]:.2f}" for key in keys)]
            for row in results["first_call"]
        ]
        lines.append(table([head, *body]))
    lines.append("\nFigures to reach")
    verdicts = {None: "not measured", True: "reached", False: "MISSED"}
    body = [
        [x["what"], x["target"], _number(x["value"]), verdicts[x["reached"]]]
        for x in results["targets"]
    ]
    return "\n".join([*lines, table(body)])


def _cells(row: dict[str, Any]) -> list[str]:
    if row["problem"] is not None:
        return [row["case"], "-", "-", "-", "-", "-", row["problem"]]
    total = row["total"]
    memory = "-" if row["memory"] is None else f"{row['memory'] / 2**20:.1f}"
    times = (row["forward"]["median"], total["median"], total["min"])
    ratio = _number(row["by_auto"])
    runs = str(len(total["all"]))
    return [row["case"], *(f"{1e3 * x:.1f}" for x in times), ratio, memory, runs]


def _growth(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    return f"{_number(row['time'])} ({_number(row['memory'])})"


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.3g}"


def plot(layers: list[dict[str, Any]], path: Path) -> None:
    """Time and memory over the number of nodes, with logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    parts = list(dict.fromkeys(row["part"] for row in layers))
    figure, axes = plt.subplots(
        len(parts), 2, figsize=(12, 4.5 * len(parts)), squeeze=False
    )
    for (time_axis, memory_axis), part in zip(axes, parts, strict=True):
        for i, name in enumerate(CASES):
            rows = [
                row
                for row in layers
                if row["part"] == part and row["case"] == name and not row["problem"]
            ]
            nodes = [row["nodes"] for row in rows]
            style = {"marker": "o^s"[i % 3], "markersize": 4, "color": f"C{i % 10}"}
            style |= {"label": name, "linewidth": 2.5 if name == "auto" else 1}
            time_axis.loglog(nodes, [row["total"]["median"] for row in rows], **style)
            memory = [(row["memory"] or float("nan")) / 2**20 for row in rows]
            memory_axis.loglog(nodes, memory, **style)
        time_axis.set(title=part, xlabel="nodes", ylabel="forward and backward, s")
        memory_axis.set(title=part, xlabel="nodes", ylabel="peak memory, MiB")
        time_axis.grid(which="both", alpha=0.2)
        memory_axis.grid(which="both", alpha=0.2)
        memory_axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.tight_layout()
    part_path = path.with_name(path.name + ".part")
    figure.savefig(part_path, format="png", dpi=150)
    part_path.replace(path)


def show(text: str) -> None:
    """What is being done right now, where somebody may look."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def parse(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9, help="rounds (default: 9)")
    parser.add_argument(
        "--limit",
        type=float,
        default=30,
        help="seconds for one run of a case on a graph, and for all its repetitions "
        "(default: 30)",
    )
    parser.add_argument(
        "--root", type=Path, default=PEPTIDES, help="where Peptides-func is"
    )
    parser.add_argument(
        "--out", type=Path, help="of the JSON; the plot has the same name"
    )
    parser.add_argument("--smoke", action="store_true", help="only see that it runs")
    args = parser.parse_args(argv)
    if args.smoke:
        args.repeats = 1
    if args.out is None:
        folder = "runs" if args.smoke else "benchmarks/results"
        args.out = REPOSITORY / folder / f"mixing-{args.device}.json"
    return args


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    results = {"command": " ".join(sys.argv), "machine": machine(args.device)}
    results |= measure_layers(args)
    results["dataset"] = measure_dataset(args) if "dataset" in args.only else None
    first_call = measure_first_call(args) if "first-call" in args.only else []
    results["first_call"] = first_call
    results["targets"] = targets(results)
    show("")
    print(report(results))
    write_json(args.out, results)
    if results["layers"]:
        plot(results["layers"], args.out.with_suffix(".png"))
    print(f"\n{args.out} and the plot beside it are written.")


if __name__ == "__main__":
    main()
