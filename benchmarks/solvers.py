"""How long `ops.solve` takes, beside the sparse solvers of SciPy and a dense one.

    python benchmarks/solvers.py
    python benchmarks/solvers.py --only "planar, 2,000 nodes" --repeats 21
    python benchmarks/solvers.py --smoke

Eight right-hand sides in float64, on one thread. With gradients: SciPy's factors solve
the transposed system too, `spsolve` factors again, and products of both solutions at
the edges are added. All solutions and gradients are compared before they are timed.
"""

import time
from argparse import ArgumentParser
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import torch
from options import add_output, measure_rows
from scipy.sparse import csc_array, csr_array
from scipy.sparse.linalg import splu, spsolve, spsolve_triangular
from timing import Timing, interleave, ratio, show, summary, table
from torch import Tensor
from workloads import planar

from pyg_chimera.ops import solve

#: The most nodes for which dense matrices are tried.
MAX_DENSE = 2048
COLUMNS, BUDGET = 8, 20  #: right-hand sides; seconds of a solver's repetitions
#: Solutions, and gradients of weights and right-hand sides.
Results = tuple[Tensor, ...]
Solver = Callable[["System"], tuple[Results, Timing]]


class System:
    """A graph with random weights, of signs that vary; rows of |A| sum to 0.99."""

    def __init__(self, edge_index: Tensor, num_nodes: int, acyclic: bool) -> None:
        if acyclic:  # numbered in topological order, as SciPy requires
            edge_index = edge_index[:, edge_index[0] < edge_index[1]]
        self.edge_index, self.num_nodes = edge_index, num_nodes
        self.acyclic = acyclic
        weight = torch.randn(edge_index.size(1), dtype=torch.double)
        sums = torch.zeros(num_nodes, dtype=torch.double)
        sums.index_add_(0, edge_index[1], weight.abs())
        self.weight = 0.99 * weight / sums[edge_index[1]]
        self.b, self.grad = torch.randn(2, num_nodes, COLUMNS, dtype=torch.double)

    def relabelled(self) -> "System":
        """Another system, of a graph that no solver has seen yet."""
        edge_index = torch.randperm(self.num_nodes)[self.edge_index]
        other = System(edge_index, self.num_nodes, False)
        other.acyclic = self.acyclic
        return other

    def matrix(self, kind: type) -> Any:
        """I - A, in a format of SciPy."""
        nodes = torch.arange(self.num_nodes)
        source, target = torch.cat([self.edge_index, nodes.expand(2, -1)], 1).numpy()
        entries = torch.cat([-self.weight, torch.ones(self.num_nodes).double()])
        return kind((entries.numpy(), (target, source)), shape=(self.num_nodes,) * 2)


def by_autograd(function: Callable[[System, Tensor, Tensor], Tensor]) -> Solver:
    def run(system: System) -> tuple[Results, Timing]:
        weight, b = (x.clone().requires_grad_() for x in (system.weight, system.b))
        start = time.perf_counter()
        x = function(system, weight, b)
        middle = time.perf_counter()
        grads = torch.autograd.grad(x, [weight, b], system.grad)
        end = time.perf_counter()
        return (x.detach(), *grads), Timing(middle - start, end - start)

    return run


def by_scipy(kind: type, solvers: Callable[[Any], tuple[Callable, Callable]]) -> Solver:
    """From a function that makes solvers of a matrix, and of its transpose."""

    def run(system: System) -> tuple[Results, Timing]:
        matrix = system.matrix(kind)
        start = time.perf_counter()
        forward, backward = solvers(matrix)
        x = torch.from_numpy(forward(system.b.numpy()))
        middle = time.perf_counter()
        d_b = torch.from_numpy(backward(system.grad.numpy()))
        source, target = system.edge_index
        d_weight = (d_b[target] * x[source]).sum(1)
        end = time.perf_counter()
        return (x, d_weight, d_b), Timing(middle - start, end - start)

    return run


def factored(matrix: Any) -> tuple[Callable, Callable]:
    factors = splu(matrix)
    return factors.solve, lambda b: factors.solve(b, "T")


def solved(matrix: Any) -> tuple[Callable, Callable]:
    transposed = matrix.T.tocsc()
    return lambda b: spsolve(matrix, b), lambda b: spsolve(transposed, b)


def substituted(matrix: Any) -> tuple[Callable, Callable]:
    transposed = matrix.T.tocsr()
    return (
        lambda b: spsolve_triangular(matrix, b, lower=True),
        lambda b: spsolve_triangular(transposed, b, lower=False),
    )


def dense(system: System, weight: Tensor, b: Tensor) -> Tensor:
    eye = torch.eye(system.num_nodes, dtype=torch.double)
    source, target = system.edge_index
    return torch.linalg.solve(eye.index_put((target, source), -weight, True), b)


def ours(system: System, weight: Tensor, b: Tensor) -> Tensor:
    return solve(system.edge_index, weight, b, acyclic=system.acyclic)


def systems(smoke: bool) -> dict[str, tuple[Tensor, int, bool]]:
    """By name: edges, the number of nodes, and whether they have no cycles."""
    most = 200 if smoke else 16_384
    child = torch.arange(1, most)
    parent = (torch.rand(most - 1) * child).long()
    found = {f"a tree, {most:,} nodes": (torch.stack([parent, child]), most, True)}
    for size in [40] if smoke else [300, 2000, most]:
        graph = planar(size)
        found[f"planar, {size:,} nodes"] = graph.edge_index, size, False
    several = planar(*[40 if smoke else 300] * 16)
    name, edges = "16 planar graphs", (several.edge_index, several.num_nodes)
    found[f"{name}, {edges[1]:,} nodes"] = *edges, False
    found["the same, edges in one direction"] = *edges, True
    return found


def measure(name: str, parts: tuple, repeats: int) -> dict[str, Any]:
    """A row: seconds of each solver, with gradients, and ratios within rounds."""
    show(name)
    known = System(*parts)
    solvers: dict[str, Solver] = {"solve": by_autograd(ours)}
    if known.acyclic:
        solvers["spsolve_triangular"] = by_scipy(csr_array, substituted)
    else:
        solvers["splu"] = by_scipy(csc_array, factored)
        solvers["spsolve"] = by_scipy(csc_array, solved)
    if known.num_nodes <= MAX_DENSE:
        solvers["torch.linalg.solve"] = by_autograd(dense)
    want, _ = solvers["solve"](known)
    error = 0.0
    for solver in solvers.values():
        for x, y in zip(solver(known)[0], want, strict=True):
            error = max(error, ((x - y).abs().max() / y.abs().max()).item())
    assert error < 1e-9, f"{name}: solutions differ by {error:.1e}"
    steps: dict[Hashable, Callable[[], Timing]] = {
        key: lambda solver=solver: solver(known)[1]  # type: ignore[misc]
        for key, solver in solvers.items()
    }
    steps["solve, new graph"] = lambda: solvers["solve"](known.relabelled())[1]
    rounds = interleave(steps, repeats, BUDGET)
    row: dict[str, Any] = {"name": name, "error": error}
    for key, timings in rounds.items():
        totals = {part: x["median"] for part, x in summary(timings).items()}
        row[str(key)] = totals | {"ratio": ratio(timings, rounds["solve"])}
    return row


def report(results: list[dict[str, Any]]) -> str:
    keys = dict.fromkeys(key for row in results for key in row)
    names = [key for key in keys if key not in ("name", "error")]
    lines = [["ms", *names]]
    for row in results:
        cells = [f"{1e3 * row[x]['total']:.3g}" if x in row else "" for x in names]
        lines.append([row["name"], *cells])
    return table(lines)


def main() -> None:
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", help="names of rows")
    parser.add_argument("--repeats", type=int, default=9)
    add_output(parser)
    args = parser.parse_args()
    repeats = 1 if args.smoke else args.repeats
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = systems(args.smoke).items()
    measure_rows("solvers", rows, partial(measure, repeats=repeats), report, args)


if __name__ == "__main__":
    main()
