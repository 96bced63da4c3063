r"""Measures the operators on a GPU, beside what others have::

    python benchmarks/gpu.py                          # all of it, within ten minutes
    python benchmarks/gpu.py --only molecules paths
    TRITON_INTERPRET=1 python benchmarks/gpu.py --smoke   # tiny graphs, on the CPU

Outputs and all gradients are compared with float64 first: nothing of ours is timed that
differs. Times are of CUDA events, forward and backward, medians of repetitions that
take turns. The other operators are attention
(``scaled_dot_product_attention``), ``torch.linalg.solve`` in batches, and kernels of
mamba-ssm and flash-linear-attention, where these packages are installed.

What the graph alone determines is computed before: a step on a graph that is new to it
takes longer (``Structure`` in docs/gpu.md).
"""

import math
import re
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from json_files import write_json
from options import add_output, output
from steps import Step, compare
from timing import machine, show, table
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch_geometric.utils import grid, to_dense_adj, to_dense_batch, to_undirected
from workloads import PEPTIDES, Workload, peptides

from pyg_chimera import ops
from pyg_chimera.ops.common import triton_runtime

PARTS = ("molecules", "dags", "grids", "paths", "sequences")
WARM_UP, REPEATS = 3, 20


class Heads(NamedTuple):
    """The number of heads of a layer, and the channels of its keys and its values."""

    heads: int
    keys: int
    values: int


BATCH, LENGTH = 128, 65_536
#: As this library was specified, and as in the layers that the paper trained.
LAYERS = {
    "4 heads of 16 x 16": Heads(4, 16, 16),
    "2 heads of 96 x 32": Heads(2, 96, 32),
}


# What is measured --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call to measure: our `function`, and alternatives by name."""

    part: str
    name: str
    function: Callable[..., Tensor]
    exact: Callable[..., Tensor]  #: the same function, for float64
    floats: dict[str, Tensor]  #: float64, on the CPU
    integers: dict[str, Tensor]
    others: dict[str, Callable[..., Tensor]] = field(default_factory=dict)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.double)


def dense(query, key, value, edge_weight, edge_index, batch) -> Tensor:  # type: ignore[no-untyped-def]
    """The resolvent of all graphs, padded to the largest, by `torch.linalg.solve`."""
    A = to_dense_adj(edge_index, batch, edge_weight).permute(0, 3, 2, 1)
    (q, real), (k, _), (v, _) = (
        to_dense_batch(x.flatten(1), batch) for x in (query, key, value)
    )
    q, k, v = (x.unflatten(2, (A.size(1), -1)).transpose(1, 2) for x in (q, k, v))
    eye = torch.eye(A.size(-1), dtype=A.dtype, device=A.device)
    L = torch.linalg.solve(eye - A, eye.expand_as(A))
    return ((L * (q @ k.mT)) @ v).transpose(1, 2)[real]


def attention(query, key, value, edge_weight, edge_index, batch) -> Tensor:  # type: ignore[no-untyped-def]
    """Softmax attention within graphs, padded to the largest, ignoring edges."""
    padded = [to_dense_batch(x.flatten(1), batch) for x in (query, key, value)]
    real = padded[0][1]
    heads = edge_weight.size(1)
    q, k, v = (x.unflatten(2, (heads, -1)).transpose(1, 2) for x, _ in padded)
    out = F.scaled_dot_product_attention(q, k, v, real[:, None, None])
    return out.transpose(1, 2)[real] + 0 * edge_weight.sum()


def causal_attention(query, key, value, edge_weight, **_) -> Tensor:  # type: ignore[no-untyped-def]
    """Softmax attention along a path."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out[0].transpose(0, 1) + 0 * edge_weight.sum()


def simple_gla(query, key, value, edge_weight, **_) -> Tensor:  # type: ignore[no-untyped-def]
    """The same recurrence along a path, from flash-linear-attention."""
    from fla.ops.simple_gla import chunk_simple_gla

    decay = F.pad(edge_weight.log(), (0, 0, 1, 0))
    q, k, v, g = (x.unsqueeze(0) for x in (query, key, value, decay))
    return chunk_simple_gla(q=q, k=k, v=v, g=g, scale=1.0)[0][0]


def gated_delta(query, key, value, beta, edge_weight, **_) -> Tensor:  # type: ignore[no-untyped-def]
    """The gated delta rule along a path, from flash-linear-attention."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    decay = F.pad(edge_weight.log(), (0, 0, 1, 0))
    q, k, v, g, b = (x.unsqueeze(0) for x in (query, key, value, decay, beta))
    return chunk_gated_delta_rule(q=q, k=k, v=v, g=g, beta=b, scale=1.0)[0][0]


def mamba(u, delta, A, B, C, ptr) -> Tensor:  # type: ignore[no-untyped-def]
    """mamba-ssm's kernel, on padded sequences."""
    from mamba_ssm.ops.selective_scan_interface import selective_scan_fn

    sizes = ptr.diff().tolist()
    u, delta, B, C = (
        pad_sequence(x.split(sizes), batch_first=True).transpose(1, 2)
        for x in (u, delta, B, C)
    )
    out = selective_scan_fn(u, delta, A, B, C).transpose(1, 2)
    return torch.cat([y[:size] for y, size in zip(out, sizes, strict=True)])


def of_graph(
    edge_index: Tensor, batch: Tensor, heads: Heads, weight: Tensor, **rest: Any
) -> Call:
    """A call with inputs for nodes and edges."""
    nodes, (H, N, P) = batch.numel(), heads
    floats = {
        "query": randn(nodes, H, N),
        "key": randn(nodes, H, N),
        "value": randn(nodes, H, P),
        "edge_weight": weight,
    }
    integers = {"edge_index": edge_index, "batch": batch}
    return Call(floats=floats, integers=integers, **rest)


def calls(args: Namespace) -> Iterator[Call]:
    """All calls that are measured."""
    (workload,) = molecules(args)
    col, row = edge_index = workload.edge_index
    degree = row.bincount(minlength=workload.num_nodes)
    dag = edge_index[:, col < row]
    for name, heads in LAYERS.items():
        spread = torch.rand(edge_index.size(1), heads.heads, dtype=torch.double)
        if "molecules" in args.only:
            yield of_graph(
                edge_index,
                workload.batch,
                heads,
                0.9 * spread / degree[row, None],
                part="molecules",
                name=f"{workload.name}, {name}",
                function=ops.resolvent_mix,
                exact=dense,
                others={"torch.linalg.solve": dense, "attention": attention},
            )
        if "dags" in args.only:
            yield of_graph(
                dag,
                workload.batch,
                heads,
                spread[: dag.size(1)],
                part="dags",
                name=f"DAGs of {workload.name}, {name}",
                function=ops.dag_scan,
                exact=dense,
                others={"attention": attention},
            )
    heads = LAYERS["4 heads of 16 x 16"]
    if "grids" in args.only:
        side = 6 if args.smoke else 100
        edge_index, _ = grid(side, side)
        degree = edge_index[1].bincount()[edge_index[1], None]
        yield of_graph(
            edge_index,
            torch.zeros(side * side).long(),
            heads,
            0.9 * torch.rand(edge_index.size(1), heads.heads).double() / degree,
            part="grids",
            name=f"grid of {side} x {side} nodes, with diagonals",
            function=ops.resolvent_mix,
            exact=ops.resolvent_mix,
            others={"attention": attention},
        )
    length = 70 if args.smoke else LENGTH
    path = torch.stack([torch.arange(length - 1), torch.arange(1, length)])
    if "paths" in args.only:
        yield of_graph(
            path,
            torch.zeros(length).long(),
            heads,
            1 - 0.1 * torch.rand(length - 1, heads.heads, dtype=torch.double),
            part="paths",
            name=f"path of {length:,} nodes",
            function=ops.dag_scan,
            exact=ops.dag_scan,
            others={"attention": causal_attention, "fla simple_gla": simple_gla},
        )
        call = of_graph(
            path,
            torch.zeros(length).long(),
            Heads(4, 64, 64),
            1 - 0.1 * torch.rand(length - 1, 4, dtype=torch.double),
            part="paths",
            name=f"delta rule, path of {length:,} nodes",
            function=ops.delta_scan,
            exact=ops.delta_scan,
            others={"attention": causal_attention, "fla gated_delta": gated_delta},
        )
        key = F.normalize(call.floats["key"], dim=-1)
        beta = torch.rand(length, 4, dtype=torch.double)
        yield replace(call, floats={**call.floats, "key": key, "beta": beta})
    if "sequences" in args.only:
        width, states = (4, 3) if args.smoke else (128, 16)
        floats = {
            "u": randn(length, width),
            "delta": F.softplus(randn(length, width) - 4),
            "A": -torch.rand(width, states, dtype=torch.double) - 0.5,
            "B": randn(length, states),
            "C": randn(length, states),
        }
        yield Call(
            part="sequences",
            name=f"sequences of {length:,} rows",
            function=ops.selective_scan,
            exact=ops.selective_scan,
            floats=floats,
            integers={"ptr": torch.tensor([0, length // 3, length])},
            others={"mamba-ssm": mamba},
        )


def molecules(args: Namespace) -> Iterable[Workload]:
    """Peptides, or for a smoke test a ring with a tail and a pair of nodes."""
    if not args.smoke:
        return peptides(args.root, [BATCH], smoke=False)
    edges = [[0, 1, 2, 3, 4, 0, 6, 37], [1, 2, 3, 4, 5, 5, 5, 38]]
    edge_index = to_undirected(torch.tensor(edges), num_nodes=39)
    batch = torch.tensor([0] * 37 + [1] * 2)
    return [Workload("two small graphs", edge_index, batch)]


# How ---------------------------------------------------------------------------------


class Measured(Step):
    """A step in float32 on a device."""

    def __init__(
        self, call: Call, function: Callable[..., Tensor], device: str, trust: bool
    ) -> None:
        leaves = {
            name: x.to(device, torch.float32).requires_grad_()
            for name, x in call.floats.items()
        }
        self.integers = {name: x.to(device) for name, x in call.integers.items()}
        self.trust = trust
        super().__init__(
            lambda: function(**leaves, **self.integers),
            leaves,
            grad_of(call).to(device),
        )

    @property
    def context(self) -> AbstractContextManager:
        """The context in which it runs."""
        return ops.unchecked() if self.trust else nullcontext()

    def events(self) -> tuple[float, float]:
        """GPU seconds of one forward pass, and of forward and backward."""
        begin, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        for leaf in self.leaves.values():
            leaf.grad = None
        with self.context:
            begin.record()
            out = self.function()
            middle.record()
        out.backward(self.grad)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(middle) / 1e3, begin.elapsed_time(end) / 1e3


def grad_of(call: Call) -> Tensor:
    """A gradient of the output, the same for all functions."""
    like = call.floats.get("value", call.floats.get("u"))
    assert like is not None
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(1))


def check(call: Call, step: Measured, device: str) -> dict[str, Any]:
    """The errors against float64; ends the benchmark if one is too large."""
    # Float64 scans of long paths run on the CPU, dense matrices on the device.
    where = device if call.exact is dense else "cpu"
    leaves = {x: y.to(where).requires_grad_() for x, y in call.floats.items()}
    integers = {x: y.to(where) for x, y in call.integers.items()}
    grad = grad_of(call).to(where, torch.double)
    exact = Step(lambda: call.exact(**leaves, **integers), leaves, grad).results()
    want = {name: x.double().cpu() for name, x in exact.items()}
    found = {name: x.cpu() for name, x in step.results().items()}
    return compare("ours", call.name, found, want, "float64")


def time_all(steps: dict[str, Measured]) -> dict[str, dict[str, float] | str]:
    """Medians of interleaved repetitions, or why there are none."""
    found: dict[str, dict[str, float] | str] = {}
    for name, step in steps.items():
        try:
            for _ in range(WARM_UP):
                step.events()
        except Exception as error:  # of packages that may be missing
            found[name] = f"{type(error).__name__}: {error}"[:200]
    steps = {name: x for name, x in steps.items() if name not in found}
    rounds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(REPEATS):
        for name, step in steps.items():
            rounds[name].append(step.events())
    for name, times in rounds.items():
        forward, total = (median(column) for column in zip(*times, strict=True))
        found[name] = {"forward": forward, "total": total}
    return found


def measure(call: Call, device: str) -> dict[str, Any]:
    """A row of results: errors, then times."""
    show(f"{call.name}: exactness")
    function = call.function
    if device == "cpu" and triton_runtime.INTERPRETED:
        function = in_triton(call)
    ours = Measured(call, function, device, trust=False)
    row: dict[str, Any] = {"part": call.part, "call": call.name}
    row["errors"] = check(call, ours, device)
    if device == "cuda":
        choice = ops.explain(call.function.__name__, **ours.leaves, **ours.integers)
        row["choice"] = [choice.solver, choice.form, choice.backend, choice.reason]
    if device == "cpu":
        return row
    show(f"{call.name}: times")
    steps = {
        "ours, unchecked": Measured(call, function, device, trust=True),
        "ours": ours,
    }
    for name, other in call.others.items():
        steps[name] = Measured(call, other, device, trust=False)
    row["times"] = time_all(steps)
    return row


def in_triton(call: Call) -> Callable[..., Tensor]:
    """Our function in Triton's interpreter if there is a kernel; otherwise as it is."""

    def function(**inputs: Any) -> Tensor:
        try:
            return call.function(**inputs, backend="triton")
        except ValueError:
            return call.function(**inputs)

    return function


def report(results: dict[str, Any]) -> str:
    """A table of all times, relative to ours."""
    lines = [("forward and backward", "ms", "of ours")]
    for row in results["calls"]:
        lines.append((row["call"], "", ""))
        times = row.get("times", {})
        ours = times.get("ours, unchecked")
        for name, x in times.items():
            if not isinstance(x, dict):
                lines.append((f"  {name}: {x}", "", ""))
                continue
            against = x["total"] / ours["total"] if isinstance(ours, dict) else math.nan
            lines.append((f"  {name}", f"{1e3 * x['total']:.3f}", f"{against:.2f}"))
    return table(lines)


def parse(argv: list[str] | None = None) -> Namespace:
    parser = ArgumentParser(
        description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--root", type=Path, default=PEPTIDES, help="of Peptides-func")
    add_output(parser)
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    device = "cpu" if args.smoke else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no GPU; --smoke needs none")
    torch.manual_seed(0)
    torch.set_num_threads(1)  # batched LU on a CPU is wrong with more (pytorch#142815)
    name = "smoke" if args.smoke else torch.cuda.get_device_name().lower()
    out = output(args, "gpu-" + re.sub(r"\W+", "-", name))
    results: dict[str, Any] = {
        "machine": machine(device),
        "interpreted": triton_runtime.INTERPRETED,
        "calls": [],
    }
    for call in calls(args):
        results["calls"].append(measure(call, device))
        write_json(out, results)
    show("")
    print(report(results))
    print(f"\nWritten: {out}")


if __name__ == "__main__":
    main()
