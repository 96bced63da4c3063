"""Elimination orders: how much they fill in, and how long it takes to find them.

Beside the multiple minimum degree of SuperLU (in scipy; its time is that of a rough
factorisation), and METIS where pymetis is installed, on molecules, planar graphs,
grids, meshes, random graphs and real ones::

    python benchmarks/orders.py
    python benchmarks/orders.py --only planar-4096 mesh-16 --repeats 9
"""

import argparse
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import networkx as nx
import numpy as np
import torch
from json_files import write_json
from options import add_output, output
from scipy.sparse import coo_matrix, eye
from scipy.sparse.linalg import spilu
from scipy.spatial import Delaunay
from timing import machine, show, table
from workloads import PEPTIDES, SHARED, all_peptides

from pyg_chimera.ops.structure.csr import adjacency
from pyg_chimera.ops.structure.elimination import elimination_order, fill_pattern

#: Sources and targets of the edges, and the number of nodes.
Graph = tuple[np.ndarray, np.ndarray, int]


def from_networkx(graph: nx.Graph) -> Graph:
    """A graph with shuffled nodes, as the generator's order is often a good one."""
    count = graph.number_of_nodes()
    names = np.random.default_rng(0).permutation(count)
    index = {node: name for node, name in zip(graph, names, strict=True)}
    pairs = np.array([(index[u], index[v]) for u, v in graph.edges])
    return pairs[:, 0].copy(), pairs[:, 1].copy(), count


def triangulated(num_nodes: int, dim: int = 2) -> Graph:
    """Delaunay triangulation of random points."""
    points = np.random.default_rng(num_nodes).random((num_nodes, dim))
    corners = Delaunay(points).simplices.astype(np.int64)
    rows, cols = np.triu_indices(dim + 1, 1)
    return corners[:, rows].ravel(), corners[:, cols].ravel(), num_nodes


def real(name: str) -> list[Graph]:
    """One of the heterophilous graphs, if it is there."""
    path = SHARED / "data" / "heterophilous" / f"{name}.npz"
    if not path.is_file():
        return []
    content = np.load(path)
    row, col = content["edges"].T.astype(np.int64).copy()
    return [(row, col, len(content["node_labels"]))]


def molecules(smoke: bool = False) -> list[Graph]:
    """All peptides."""
    return [
        (*graph.edge_index.numpy(), graph.num_nodes)
        for graph in all_peptides(PEPTIDES, smoke)[1]
    ]


def power_law(num_nodes: int, degree: int) -> list[Graph]:
    """A Barabasi-Albert graph."""
    return [from_networkx(nx.barabasi_albert_graph(num_nodes, degree, seed=0))]


def random_graphs() -> list[Graph]:
    return [from_networkx(nx.gnm_random_graph(1000, 2000, seed=x)) for x in range(4)]


def mesh(*sides: int) -> list[Graph]:
    return [from_networkx(nx.grid_graph(sides))]


FAMILIES: dict[str, Callable[[], list[Graph]]] = {
    "molecules": molecules,
    **{
        f"planar-{n}": lambda n=n: [triangulated(n)]
        for n in (30, 100, 480, 1024, 4096, 16384)
    },
    "minesweeper": lambda: real("minesweeper"),
    "actor": lambda: real("actor"),
    "grid-64": lambda: mesh(64, 64),
    "mesh-16": lambda: mesh(16, 16, 16),
    "mesh-32": lambda: mesh(32, 32, 32),
    "tetrahedra-16000": lambda: [triangulated(16000, 3)],
    "random-1000": random_graphs,
    "power-law-2000": lambda: power_law(2000, 2),
    "power-law-100000": lambda: power_law(100_000, 2),
}
SMOKE: dict[str, Callable[[], list[Graph]]] = {
    "molecules": lambda: molecules(smoke=True),
    "planar-480": FAMILIES["planar-480"],
    "mesh-8": lambda: mesh(8, 8, 8),
}
#: The most nodes of a graph whose fill is counted: larger ones do not fit into memory.
MAX_COUNTED = 50_000


def multiple_minimum_degree(row: np.ndarray, col: np.ndarray, n: int) -> np.ndarray:
    """SuperLU's order, from an incomplete factorisation with almost no entries."""
    apart = row != col
    values = np.full(apart.sum(), -1e-9)
    matrix = coo_matrix((values, (row[apart], col[apart])), (n, n))
    factors = spilu(
        (matrix + matrix.T + eye(n)).tocsc(),
        drop_tol=1e-3,
        permc_spec="MMD_AT_PLUS_A",
        diag_pivot_thresh=0,
        options={"SymmetricMode": True},
    )
    return factors.perm_c.astype(np.int64)


METHODS: dict[str, Callable[..., np.ndarray]] = {
    "minimum_fill": elimination_order,
    "mmd": multiple_minimum_degree,
}
if find_spec("pymetis") is not None:
    METHODS["metis"] = lambda *graph: elimination_order(*graph, "metis")


def entries(graph: Graph, rank: np.ndarray) -> tuple[int, float]:
    """The nonzeros of L below the diagonal, and the multiply-adds to compute them."""
    row, col, n = graph
    assert sorted(rank) == list(range(n))
    heights = np.diff(fill_pattern(*adjacency(rank[row], rank[col], n))[0])
    return int(heights.sum()), float((heights.astype(float) ** 2).sum())


def measure(name: str, graphs: list[Graph], repeats: int) -> dict[str, Any]:
    """The fill and the least time of all methods, summed over a family of graphs."""
    show(name)
    counted = max(n for *_, n in graphs) <= MAX_COUNTED
    row: dict[str, Any] = {"name": name, "graphs": len(graphs)}
    row |= {"nodes": sum(n for *_, n in graphs), "methods": {}}
    methods = [x for x in METHODS if x != "mmd" or counted]
    for method in methods:
        METHODS[method](*graphs[0])  # compiles the code, or loads it
        row["methods"][method] = {"seconds": float("inf")}
    for _ in range(repeats):
        for method in methods:  # interleaved, so that disturbances affect all
            found = row["methods"][method]
            start = time.perf_counter()
            ranks = [METHODS[method](*graph) for graph in graphs]
            found["seconds"] = min(found["seconds"], time.perf_counter() - start)
            if counted and "fill" not in found:
                pairs = [entries(*pair) for pair in zip(graphs, ranks, strict=True)]
                found["fill"] = sum(fill for fill, _ in pairs)
                found["updates"] = sum(updates for _, updates in pairs)
    return row


def report(rows: list[dict[str, Any]]) -> str:
    """A table: fill and updates relative to multiple minimum degree, and times."""
    head = ["", "graphs", "nodes", "nonzeros by MMD"]
    head += [f"{method}: {x}" for method in METHODS for x in ("fill", "updates", "ms")]
    lines = [head]
    for row in rows:
        base = row["methods"].get("mmd", {})
        line = [row["name"], f"{row['graphs']:,}", f"{row['nodes']:,}"]
        line.append(f"{base['fill']:,}" if base else "-")
        for method in METHODS:
            found = row["methods"].get(method)
            for key in ("fill", "updates"):
                line.append(f"{found[key] / base[key]:.3f}" if base else "-")
            line.append(f"{1e3 * found['seconds']:,.1f}" if found else "-")
        lines.append(line)
    return table(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--repeats", type=int, default=5)
    add_output(parser)
    args = parser.parse_args()
    out = output(args, "orders-cpu")
    families = SMOKE if args.smoke else {x: FAMILIES[x] for x in args.only}
    torch.set_num_threads(1)
    rows = []
    for name, make in families.items():
        if graphs := make():
            rows.append(measure(name, graphs, 1 if args.smoke else args.repeats))
    show("")
    print(report(rows))
    write_json(out, {"machine": machine("cpu"), "orders": rows})
    print(f"\nWritten: {out}")


if __name__ == "__main__":
    main()
