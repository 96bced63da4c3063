"""Measures nodes in sequences: `selective_scan` and `GraphMambaConv`.

Forward, backward and peak memory of the scan beside loops over its steps, on single
sequences, and beside `channel_scan` with a channel for each of its states; of the layer
beside attention, Performer and the other layers of the package, on peptides, on graphs
of 30 to 5,000 nodes and on paths; evaluation by several permutations::

    python benchmarks/sequences.py --limit 60       # all of it, eight minutes
    python benchmarks/sequences.py --smoke          # tiny graphs, some seconds
    python benchmarks/sequences.py --only graphs --nodes 100 1000 --threads 1
    python benchmarks/sequences.py --root peptides-functional --out results/mine.json

Outputs and all gradients are compared with a float64 loop over steps first, or where
that takes too long with the float64 PyTorch backend: nothing of ours is timed that
differs. Ratios are medians of the ratios within rounds of interleaved repetitions. They
hold on a busy machine too; times do not.
"""

import pickle
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from options import add_options, settle
from report import Figures, run, verdicts
from steps import (
    Pilot,
    Step,
    compare,
    compare_and_time,
    first_run,
    growth_rows,
    time_rows,
)
from timing import Timing, show
from torch import Tensor
from torch_geometric.nn import GPSConv
from torch_geometric.utils import to_dense_batch
from workloads import Workload, peptides, planar

from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraPathConv,
    GPSLayer,
    GraphMambaConv,
    PLSTMConv,
)
from pyg_chimera.ops import channel_scan, dag_scan, selective_scan
from pyg_chimera.ops.structure import node_score, node_sequences

CHANNELS, STATES, HEADS = 96, 16, 4
PERMUTATIONS = 5
#: The most rows for which the package's float64 loop is used for comparison.
MAX_LOOP = 200
#: The case of each part to which the others are compared.
BASES = {
    "scan": "selective_scan",
    "sequences": "selective_scan",
    "channels": "selective_scan",
    "layers": "GraphMambaConv",
    "graphs": "GraphMambaConv",
    "paths": "GPSConv multihead",
    "evaluation": f"{PERMUTATIONS} permutations at once",
}
#: Backends for float64 results: for few rows, and for many.
EXACT = ("reference", "torch")


class Graphs(NamedTuple):
    """A batch of graphs, or a single sequence, to measure on."""

    part: str
    name: str
    num_nodes: int
    num_edges: int
    edge_index: Tensor
    batch: Tensor
    size: int = 0  #: nodes per graph, if all have the same number


def on_peptides(part: str, workload: Workload) -> Graphs:
    """The same graphs for the scan, for layers and for evaluation."""
    name, edge_index = workload.name, workload.edge_index
    name = {"scan": name, "evaluation": f"evaluation, forward only, {name}"}.get(
        part, f"{part}, {name}"
    )
    return Graphs(
        part, name, workload.num_nodes, edge_index.size(1), edge_index, workload.batch
    )


def one_sequence(length: int) -> Graphs:
    """A sequence, without a graph."""
    nothing = torch.empty(2, 0, dtype=torch.long)
    batch = torch.zeros(length, dtype=torch.long)
    return Graphs("sequences", f"sequence of {length:,}", length, 0, nothing, batch)


def channels(length: int) -> Graphs:
    """A sequence that is also a directed path, along which each state is a channel."""
    index = torch.stack([torch.arange(length - 1), torch.arange(1, length)])
    return one_sequence(length)._replace(
        part="channels",
        name=f"channels of a sequence of {length:,}",
        num_edges=length - 1,
        edge_index=index,
        size=length,
    )


def path(length: int) -> Graphs:
    """An undirected path, like that of a text."""
    there = torch.stack([torch.arange(length - 1), torch.arange(1, length)])
    edge_index, batch = torch.cat([there, there.flip(0)], 1), torch.zeros(length).long()
    name = f"path of {length:,} nodes"
    return Graphs("paths", name, length, 2 * length - 2, edge_index, batch, length)


def of_size(size: int, total: int) -> Graphs:
    """Copies of a planar graph, about `total` nodes in all, but at least one copy.

    Except for attention, a step takes about the same time for each size.
    """
    graph, count = planar(size).edge_index, max(1, total // size)
    first = size * torch.arange(count).repeat_interleave(graph.size(1))
    edge_index = graph.repeat(1, count) + first
    batch = torch.arange(count).repeat_interleave(size)
    name = f"{count} planar graph{'s' * (count > 1)} of {size:,} nodes"
    return Graphs(
        "graphs", name, count * size, edge_index.size(1), edge_index, batch, size
    )


# Loops over steps --------------------------------------------------------------


class Rows(NamedTuple):
    """The inputs of a scan, in the order of `selective_scan`; all get gradients."""

    u: Tensor
    delta: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor
    z: Tensor
    delta_bias: Tensor


def published_loop(batch: Tensor, x: Rows) -> Tensor:
    """The scan in the form of Mamba's published reference, rewritten: decays and inputs
    of all steps at once, [sequences, F, steps, N], then a loop over steps.
    """
    delta = F.softplus(x.delta + x.delta_bias)
    padded = [to_dense_batch(y, batch) for y in (x.u, delta, x.B, x.C)]
    real = padded[0][1]
    u, delta, B, C = (y.transpose(1, 2) for y, _ in padded)
    decay = torch.exp(torch.einsum("sft,fn->sftn", delta, x.A))
    write = torch.einsum("sft,snt,sft->sftn", delta, B, u)
    h = torch.zeros_like(decay[:, :, 0])
    reads = []
    for t in range(u.size(2)):
        h = decay[:, :, t] * h + write[:, :, t]
        reads.append(torch.einsum("sfn,sn->sf", h, C[:, :, t]))
    y = torch.stack(reads, dim=1)[real]
    return (y + x.D * x.u) * F.silu(x.z)


def careful_loop(batch: Tensor, x: Rows) -> Tensor:
    """The same with little memory and a linear backward pass: steps are unbound once,
    and only what autograd needs is stored of all states.
    """
    delta = F.softplus(x.delta + x.delta_bias)
    padded = [to_dense_batch(y, batch) for y in (x.u * delta, delta, x.B, x.C)]
    real = padded[0][1]
    steps = zip(*(y.unbind(1) for y, _ in padded), strict=True)
    h = x.u.new_zeros(real.size(0), *x.A.shape)
    reads = []
    for u, delta, B, C in steps:
        decay = torch.exp(delta.unsqueeze(-1) * x.A)
        h = decay * h + u.unsqueeze(-1) * B.unsqueeze(1)
        reads.append((h @ C.unsqueeze(-1)).squeeze(-1))
    y = torch.stack(reads, dim=1)[real]
    return (y + x.D * x.u) * F.silu(x.z)


# What is measured --------------------------------------------------------------


def step(function: Callable[[], Tensor], leaves: dict[str, Tensor], like: Tensor):
    torch.manual_seed(2)
    grad = torch.randn(like.shape).to(like.device, like.dtype)
    return Step(function, leaves, grad)


def scan(
    loop: Callable[[Tensor, Rows], Tensor] | None,
    graphs: Graphs,
    dtype: torch.dtype,
    device: str,
    backend: str = "auto",
) -> Step:
    """`selective_scan`, or a loop, with the step sizes and rates of a new layer."""
    torch.manual_seed(1)
    V = graphs.num_nodes
    u, delta, z = torch.randn(3, V, CHANNELS)
    B, C = torch.randn(2, V, STATES)
    A = -torch.arange(1.0, STATES + 1).repeat(CHANNELS, 1)
    D, bias = torch.randn(CHANNELS), torch.empty(CHANNELS).uniform_(-7, -2)
    tensors = (u, delta, A, B, C, D, z, bias)
    x = Rows(*(y.to(device, dtype).clone().requires_grad_() for y in tensors))
    if loop is not None:
        run = partial(loop, graphs.batch.to(device), x)
    else:
        ptr = F.pad(graphs.batch.bincount().cumsum(0), (1, 0)).to(device)
        run = partial(selective_scan, *x, True, ptr, backend=backend)
    return step(run, x._asdict(), u.to(device, dtype))


def mamba_by_channels(graphs: Graphs, dtype: torch.dtype, device: str) -> Step:
    """The same as `scan`, with `channel_scan` for its recurrence: decays and inputs of
    all states are computed before it, and it returns all states.
    """
    made = scan(None, graphs, dtype, device)
    x = Rows(**made.leaves)
    index, batch = graphs.edge_index.to(device), graphs.batch.to(device)

    def run() -> Tensor:
        delta = F.softplus(x.delta + x.delta_bias).unsqueeze(-1)
        decay = torch.exp(delta * x.A)
        write = delta * x.u.unsqueeze(-1) * x.B.unsqueeze(1)
        h = channel_scan(write.flatten(1), index, batch=batch, decay=decay.flatten(1))
        y = (h.view_as(decay) @ x.C.unsqueeze(-1)).squeeze(-1)
        return (y + x.D * x.u) * F.silu(x.z)

    return Step(run, made.leaves, made.grad)


def recurrence(
    heads: bool, graphs: Graphs, dtype: torch.dtype, device: str, backend: str = "auto"
) -> Step:
    """The recurrence alone, with a channel for each state of the scan: `channel_scan`,
    or `dag_scan` with a head for each.
    """
    torch.manual_seed(1)
    V, C = graphs.num_nodes, CHANNELS * STATES
    leaves = {
        name: x.to(device, dtype).requires_grad_()
        for name, x in (("value", torch.randn(V, C)), ("decay", torch.rand(V, C)))
    }
    value, decay = leaves.values()
    index, batch = graphs.edge_index.to(device), graphs.batch.to(device)
    if heads:
        one = value.new_ones(V, 1, 1)

        def run() -> Tensor:
            x, weight = value.unsqueeze(-1), decay[index[1]]
            return dag_scan(one, one, x, index, weight, batch).squeeze(-1)

    else:
        run = partial(
            channel_scan, value, index, batch=batch, decay=decay, backend=backend
        )
    return step(run, leaves, value)


def module(kind: str, backend: str) -> torch.nn.Module:
    """A layer by name, which may include the form."""
    name, *way = kind.split(", ")
    form = way[0] if way else "auto"
    if name.startswith("GPSConv"):
        return GPSConv(CHANNELS, None, heads=HEADS, attn_type=name.split()[1])
    if name == "ChimeraConv":
        return ChimeraConv(CHANNELS, CHANNELS, HEADS, CHANNELS, form=form)
    if name == "ChimeraPathConv":
        return ChimeraPathConv(CHANNELS, CHANNELS, HEADS, CHANNELS, form=form)
    if name == "PLSTMConv":
        return PLSTMConv(CHANNELS, heads=HEADS, order="order", form=form)
    mixer = GraphMambaConv(CHANNELS, state_channels=STATES, backend=backend)
    return GPSLayer(CHANNELS, mixer=mixer) if name == "GPSLayer" else mixer


def layer(
    kind: str, graphs: Graphs, dtype: torch.dtype, device: str, backend: str = "auto"
) -> Step:
    """A layer in training, which draws the same permutation in each call."""
    torch.manual_seed(0)
    conv = module(kind, backend).to(device, dtype)
    torch.manual_seed(1)
    x = torch.randn(graphs.num_nodes, CHANNELS).to(device, dtype).requires_grad_()
    edge_index, batch = graphs.edge_index.to(device), graphs.batch.to(device)

    def run() -> Tensor:
        torch.manual_seed(3)
        return conv(x, edge_index, batch=batch)

    return step(run, {"x": x} | dict(conv.named_parameters()), x)


class Forward(Step):
    """A step without a backward pass."""

    def __call__(self) -> Timing:
        """Forward once."""
        self.synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            self.out = self.function()
        self.synchronize()
        seconds = time.perf_counter() - start
        return Timing(seconds, seconds)


def evaluation(
    at_once: int,
    passes: int,
    graphs: Graphs,
    dtype: torch.dtype,
    device: str,
    backend: str = "auto",
) -> Step:
    """The mean of `passes` calls, each with `at_once` permutations.

    Several calls use the same permutations as a single one, as scores without ties.
    """
    torch.manual_seed(0)
    conv = GraphMambaConv(
        CHANNELS, state_channels=STATES, order=None, num_eval_permutations=at_once,
        backend=backend,
    )  # fmt: skip
    conv = conv.to(device, dtype).eval()
    V, batch = graphs.num_nodes, graphs.batch.to(device)
    score = node_score(graphs.edge_index.to(device), V, "degree", batch)
    scores = [score]
    if passes > 1:
        orders = node_sequences(
            score, batch, num_permutations=passes, seed=conv.seed
        ).index.view(passes, V)
        scores = list(orders.argsort(dim=1))
    torch.manual_seed(1)
    x = torch.randn(V, CHANNELS).to(device, dtype)

    def run() -> Tensor:
        outs = [conv(x, batch=batch, score=score) for score in scores]
        return torch.stack(outs).mean(0) if passes > 1 else outs[0]

    return Forward(run, {}, x)


# Cases -------------------------------------------------------------------------


class Case(NamedTuple):
    """Something to measure, on a part of the workloads."""

    parts: tuple[str, ...]
    make: Callable[..., Step]
    exact: Callable[..., Step] | None  #: takes a backend too; None: not compared


SCAN, LAYERS = partial(scan, None), ("layers", "graphs")
CHANNEL = partial(recurrence, False)
MAMBA = partial(layer, "GraphMambaConv")
SEVERAL = partial(evaluation, PERMUTATIONS, 1)
ONE = partial(evaluation, 1, 1)
CASES: dict[str, Case] = {
    "selective_scan": Case(("scan", "sequences", "channels"), SCAN, SCAN),
    "channel_scan": Case(("channels",), CHANNEL, CHANNEL),
    "channel_scan and all of Mamba's scan": Case(
        ("channels",), mamba_by_channels, SCAN
    ),
    "dag_scan, a head for each": Case(
        ("channels",), partial(recurrence, True), CHANNEL
    ),
    "selective_scan, torch": Case(
        ("scan", "sequences"), partial(SCAN, backend="torch"), SCAN
    ),
    "loop over steps": Case(("scan",), partial(scan, careful_loop), SCAN),
    "loop as published": Case(("scan",), partial(scan, published_loop), SCAN),
    "GraphMambaConv": Case(LAYERS, MAMBA, MAMBA),
    "GPSLayer, GraphMambaConv": Case(LAYERS, partial(layer, "GPSLayer"), None),
    "ChimeraConv": Case(LAYERS, partial(layer, "ChimeraConv"), None),
    "ChimeraPathConv": Case(("paths",), partial(layer, "ChimeraPathConv"), None),
    "PLSTMConv": Case(LAYERS, partial(layer, "PLSTMConv"), None),
    "GPSConv multihead": Case(
        (*LAYERS, "paths"), partial(layer, "GPSConv multihead"), None
    ),
    "GPSConv performer": Case(LAYERS, partial(layer, "GPSConv performer"), None),
    BASES["evaluation"]: Case(("evaluation",), SEVERAL, SEVERAL),
    f"{PERMUTATIONS} passes of one": Case(
        ("evaluation",), partial(evaluation, 1, PERMUTATIONS), SEVERAL
    ),
    "one permutation": Case(("evaluation",), ONE, ONE),
}
#: Forms that larger graphs may use, loaded before memory is measured.
WARM_UP = {"ChimeraConv": ("state", "mask"), "PLSTMConv": ("state",)}


def names(graphs: Graphs) -> list[str]:
    """The cases of a workload."""
    return [name for name, case in CASES.items() if graphs.part in case.parts]


def check(graphs: Graphs, cases: list[str], device: str) -> list[dict[str, Any]]:
    """Compares outputs and all gradients, and ends the benchmark if one is wrong."""
    backend = EXACT[graphs.num_nodes > MAX_LOOP]
    expected: dict[Any, dict[str, Tensor]] = {}
    rows = []
    for name in cases:
        case = CASES[name]
        if case.exact is None:
            continue
        show(f"exactness: {name} on {graphs.name}")
        if case.exact not in expected:
            exact = case.exact(graphs, torch.float64, device, backend=backend)
            expected[case.exact] = exact.results()
        found = case.make(graphs, torch.float32, device).results()
        against = f"float64 {backend} backend"
        rows.append(compare(name, graphs.name, found, expected[case.exact], against))
    return rows


def tiny(part: str) -> Graphs:
    """A small workload of a part."""
    if part == "sequences":
        return one_sequence(30)
    if part == "channels":
        return channels(30)
    if part == "graphs":
        return of_size(16, 32)
    if part == "paths":
        return path(16)
    return on_peptides(part, planar(16, 30))


def pilot(name: str, pickled: bytes, device: str, threads: int) -> Pilot:
    """Runs a case once, in a fresh process on the CPU."""
    torch.set_num_threads(threads)
    graphs = pickle.loads(pickled)
    small = tiny(graphs.part)
    CASES[name].make(small, torch.float32, device)()
    for form in WARM_UP.get(name, ()):
        layer(f"{name}, {form}", small, torch.float32, device)()
    return first_run(CASES[name].make(graphs, torch.float32, device))


# The parts of the benchmark ----------------------------------------------------


def workloads(args: Namespace) -> list[Graphs]:
    """The workloads of the requested parts."""
    found = []
    real = [part for part in ("scan", "layers", "evaluation") if part in args.only]
    if real:
        (workload,) = peptides(args.root, [2 if args.smoke else 64], args.smoke)
        found += [on_peptides(part, workload) for part in real]
    if "sequences" in args.only:
        found += [one_sequence(length) for length in args.lengths]
    if "channels" in args.only:
        found.append(channels(32 if args.smoke else 4096))
    if "graphs" in args.only:
        found += [of_size(size, args.total) for size in args.nodes]
    if "paths" in args.only:  # attention takes too long on longer ones
        found += [path(length) for length in args.lengths if length <= 5000]
    return found


def measure(args: Namespace) -> dict[str, Any]:
    """Compares, then times, all cases on the requested workloads."""
    chosen = workloads(args)
    errors, first, rounds = compare_and_time(
        chosen, CASES, names, tiny, check, pilot, args
    )
    rows = []
    for graphs in chosen:
        made = time_rows(graphs, names(graphs), BASES[graphs.part], first, rounds)
        rows += [row | {"nodes_per_graph": graphs.size or None} for row in made]
    regular = [x for x in chosen if x.part == "sequences"]
    growth = growth_rows(regular, CASES, first, rounds)
    return {"errors": errors, "layers": rows, "growth": growth}


def targets(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The targets for scan and layer, with measured values."""
    found = {
        (row["part"], row["nodes_per_graph"], row["case"]): row.get("by_auto")
        for row in results["layers"]
        if row["part"] in ("graphs", "paths", "channels")
        or row["workload"].endswith("batch of 64")
    }
    at_least: Figures = {
        f"64 sequences: {name} / selective_scan": (
            100, found.get(("scan", None, name)),
        )
        for name in ("loop over steps", "loop as published")
    }  # fmt: skip
    at_most: Figures = {}
    for text, bound, part, size in (
        ("64 peptides", 0.7, "layers", None),
        ("graphs of 2,000 nodes", 0.1, "graphs", 2000),
    ):
        ratio = found.get((part, size, "GPSConv multihead"))
        name = f"{text}: GraphMambaConv / GPSConv multihead"
        at_most[name] = bound, ratio and 1 / ratio
    ratio = found.get(("paths", 4096, "ChimeraPathConv"))
    at_most["path of 4,096 nodes: ChimeraPathConv / GPSConv multihead"] = 0.25, ratio
    for name in ("channel_scan", "channel_scan and all of Mamba's scan"):
        ratio = found.get(("channels", 4096, name))
        at_most[f"sequence of 4,096: {name} / selective_scan"] = 1.0, ratio
    steps = {
        row["from"]: row for row in results["growth"] if row["case"] == "selective_scan"
    }
    for length in (1024, 4096, 16384):
        row = steps.get(length, {"time": None, "memory": None})
        text = f"selective_scan, {length:,} -> {4 * length:,} rows, growth of"
        at_most[f"{text} time"] = 4.5, row["time"]
        if length > 1024:  # below, memory is only a few pages
            at_most[f"{text} memory"] = 4.5, row["memory"]
    errors = [row["worst"] for row in results["errors"]]
    at_most["largest relative error"] = 1e-5, max(errors, default=None)
    return verdicts(at_most, at_least)


def by_size(total: int, layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of graphs of different sizes, to be plotted together."""
    part = f"{total:,} nodes in graphs of one size"
    return [
        row | {"nodes": row["nodes_per_graph"], "part": part}
        for row in layers
        if row["part"] == "graphs"
    ]


def parse(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    add_options(parser, BASES, CASES)
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=int,
        help="of single sequences (default: 1024 4096 16384 65536)",
    )
    parser.add_argument(
        "--nodes",
        nargs="+",
        type=int,
        help="of a planar graph (default: 30 100 300 1000 2000 5000)",
    )
    parser.add_argument(
        "--total",
        type=int,
        help="nodes of a batch of planar graphs (default: 10000)",
    )
    args = parser.parse_args(argv)
    if args.lengths is None:
        args.lengths = [8, 32] if args.smoke else [1024, 4096, 16384, 65536]
    if args.nodes is None:
        args.nodes = [8, 16] if args.smoke else [30, 100, 300, 1000, 2000, 5000]
    if args.total is None:
        args.total = 32 if args.smoke else 10_000
    settle(args, "sequences")
    return args


def main() -> None:
    args = parse()
    settings = ("only", "cases", "lengths", "nodes", "total", "device", "threads")
    settings += ("repeats", "limit")
    plotted = partial(by_size, args.total)
    run(args, CASES, settings, measure, targets, plotted, "nodes of a graph")


if __name__ == "__main__":
    main()
