import csv
import gzip
import subprocess
import sys
import time
from itertools import islice

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import coo_matrix, eye
from scipy.sparse.linalg import spilu
from scipy.spatial import Delaunay
from strategies import Batch, Graph, batches, graphs
from torch import Tensor
from torch_geometric.utils import to_undirected

from pyg_chimera.ops.structure import elimination_rank
from pyg_chimera.ops.structure.csr import adjacency
from pyg_chimera.ops.structure.elimination import (
    METHODS,
    elimination_order,
    fill_pattern,
    minimum_fill_order,
)


def fill_in(edge_index: Tensor, num_nodes: int, rank: Tensor) -> Tensor:
    """The edges of the filled graph, from what is eliminated first to the other."""
    node = rank.argsort(stable=True).numpy()
    place = np.argsort(node)
    ptr, rows = fill_pattern(*adjacency(*place[edge_index.numpy()], num_nodes))
    first = np.repeat(np.arange(num_nodes), np.diff(ptr))
    return torch.from_numpy(node[np.stack([first, rows])])


def eliminate(graph: Graph, rank: Tensor) -> tuple[set, int]:
    """Nodes leave one by one; their neighbours become a clique. Plain sets.

    Returns the filled graph, and how many edges were filled in.
    """
    neighbours = {i: set() for i in range(graph.num_nodes)}
    for i, j in graph.edge_index.t().tolist():
        if i != j:
            neighbours[i].add(j)
            neighbours[j].add(i)
    before = sum(map(len, neighbours.values())) // 2
    filled = set()
    order = sorted(range(graph.num_nodes), key=lambda i: (int(rank[i]), i))
    for i in order:
        left = neighbours.pop(i)
        filled |= {(i, j) for j in left}
        for j in left:
            neighbours[j] |= left - {j}
            neighbours[j].remove(i)
    return filled, len(filled) - before


def num_filled(edge_index: Tensor, num_nodes: int) -> tuple[int, int]:
    """How many edges there are in the filled and in the simple graph."""
    rank = elimination_rank(edge_index, num_nodes)
    assert rank.sort().values.equal(torch.arange(num_nodes))
    simple = edge_index[:, edge_index[0] != edge_index[1]].sort(dim=0).values
    filled = fill_in(edge_index, num_nodes, rank)
    return filled.size(1), simple.unique(dim=1).size(1)


def from_networkx(graph: nx.Graph) -> tuple[Tensor, int]:
    graph = nx.convert_node_labels_to_integers(graph)
    name = torch.randperm(graph.number_of_nodes())
    edges = torch.tensor(list(graph.edges), dtype=torch.long).view(-1, 2).t()
    return name[edges], graph.number_of_nodes()


each_method = pytest.mark.parametrize("method", METHODS)


def needs(method: str) -> None:
    """Skips the test where the method cannot be tried."""
    if method == "metis":
        pytest.importorskip("pymetis", reason="needs pymetis: pip install pymetis")


@each_method
@settings(max_examples=100, derandomize=True, deadline=None)
@given(graph=graphs(max_nodes=12, max_edges=30))
def test_rank_is_a_permutation(method: str, graph: Graph):
    needs(method)
    rank = elimination_rank(*graph, method)
    assert rank.dtype == torch.long
    assert sorted(rank.tolist()) == list(range(graph.num_nodes))
    # Directions, self-loops and duplicates don't matter.
    edges = to_undirected(graph.edge_index, num_nodes=graph.num_nodes)
    assert elimination_rank(edges, graph.num_nodes, method).equal(rank)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(data=st.data(), graph=graphs(max_nodes=12, max_edges=30))
def test_fill_is_that_of_plain_elimination(data, graph: Graph):
    ranks = st.lists(
        st.integers(-3, 12), min_size=graph.num_nodes, max_size=graph.num_nodes
    )
    for rank in (
        torch.tensor(data.draw(ranks), dtype=torch.long),  # with ties
        elimination_rank(*graph),
    ):
        fill = fill_in(*graph, rank)
        assert fill.dtype == torch.long
        pairs = list(map(tuple, fill.t().tolist()))
        assert len(set(pairs)) == len(pairs)
        assert set(pairs) == eliminate(graph, rank)[0]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(graph=graphs(max_nodes=12, max_edges=30))
def test_first_node_has_minimum_degree(graph: Graph):
    """And as long as nothing has been joined, so do the next ones.

    Before the postorder, that is, which may take another part of the graph first.
    """
    rank = minimum_fill_order(*adjacency(*graph.edge_index.numpy(), graph.num_nodes))
    rank = rank.tolist()
    neighbours = nx.Graph()
    neighbours.add_nodes_from(range(graph.num_nodes))
    neighbours.add_edges_from(graph.edge_index.t().tolist())
    neighbours.remove_edges_from(list(nx.selfloop_edges(neighbours)))
    for i in sorted(neighbours, key=rank.__getitem__):
        degree = dict(neighbours.degree)
        if degree[i] > 1:
            assert degree[i] == min(degree.values())
            break
        assert degree[i] == min(degree.values())
        neighbours.remove_node(i)


@given(graph=graphs(max_nodes=12, max_edges=30))
def test_postorder_fills_no_more(graph: Graph):
    plain = minimum_fill_order(*adjacency(*graph.edge_index.numpy(), graph.num_nodes))
    fill = fill_in(*graph, torch.from_numpy(plain))
    assert fill_in(*graph, elimination_rank(*graph)).size(1) == fill.size(1)


@each_method
@given(batch=batches(graphs(max_nodes=9, max_edges=20)))
def test_a_batch_has_the_orders_of_its_graphs(method: str, batch: Batch):
    needs(method)
    rank = elimination_rank(batch.edge_index, batch.num_nodes, method)
    for nodes, graph in zip(batch.node_map, batch.graphs, strict=True):
        nodes = nodes.sort().values
        local = torch.empty(batch.num_nodes, dtype=torch.long)
        local[nodes] = torch.arange(len(nodes))
        inside = batch.edge_index[:, torch.isin(batch.edge_index[0], nodes)]
        alone = elimination_rank(local[inside], graph.num_nodes, method)
        assert rank[nodes].argsort().equal(alone.argsort())


@each_method
def test_a_large_batch_has_the_orders_of_its_graphs(method):
    """Hubs among them: what is one depends on its own graph."""
    needs(method)
    parts = [planar(300), from_networkx(nx.star_graph(300))]
    parts += [from_networkx(nx.barabasi_albert_graph(400, 3, seed=0)), planar(40)]
    alone = [elimination_rank(*part, method) for part in parts]
    sizes = [num_nodes for _, num_nodes in parts]
    edges = [edges + sum(sizes[:i]) for i, (edges, _) in enumerate(parts)]
    rank = elimination_rank(torch.cat(edges, dim=1), sum(sizes), method)
    for x, y in zip(rank.split(sizes), alone, strict=True):
        assert x.argsort().equal(y.argsort())


@pytest.mark.parametrize("num_nodes", [1, 2, 3, 10, 1000])
def test_paths_and_trees_fill_nothing(num_nodes):
    path = torch.stack([torch.arange(num_nodes - 1), torch.arange(1, num_nodes)])
    assert num_filled(path, num_nodes) == (num_nodes - 1, num_nodes - 1)
    for _ in range(3):
        child = torch.arange(1, num_nodes)
        parent = (torch.rand(num_nodes - 1) * child).long()
        tree = torch.randperm(num_nodes)[torch.stack([child, parent])]
        assert num_filled(tree, num_nodes) == (num_nodes - 1, num_nodes - 1)


def test_known_graphs():
    # A ring of n fills n - 3, whatever the order; a clique is full.
    assert num_filled(*from_networkx(nx.cycle_graph(20))) == (37, 20)
    assert num_filled(*from_networkx(nx.complete_graph(9))) == (36, 36)
    assert num_filled(*from_networkx(nx.star_graph(50))) == (50, 50)
    # Leaves first, then one edge after the other: a 2 x n ladder fills one per rung.
    filled, edges = num_filled(*from_networkx(nx.ladder_graph(12)))
    assert filled <= edges + 12
    # A clique and a path that hangs on it.
    assert num_filled(*from_networkx(nx.lollipop_graph(6, 5))) == (20, 20)


def planar(num_nodes: int) -> tuple[Tensor, int]:
    points = np.random.default_rng(0).random((num_nodes, 2))
    corners = torch.from_numpy(Delaunay(points).simplices).long().t()
    return torch.cat([corners[[0, 1]], corners[[1, 2]], corners[[2, 0]]], 1), num_nodes


def test_planar_graph():
    filled, simple = num_filled(*planar(500))
    assert simple < 1500
    assert filled < 5 * simple


def multiple_minimum_degree(edge_index: Tensor, num_nodes: int) -> Tensor:
    """SuperLU's order. It factors the matrix as well, here with next to no entries."""
    row, col = edge_index[:, edge_index[0] != edge_index[1]].numpy()
    matrix = coo_matrix((np.full(len(row), -1e-9), (row, col)), (num_nodes, num_nodes))
    factors = spilu(
        (matrix + matrix.T + eye(num_nodes)).tocsc(),
        drop_tol=1e-3,
        permc_spec="MMD_AT_PLUS_A",
        diag_pivot_thresh=0,
        options={"SymmetricMode": True},
    )
    return torch.from_numpy(factors.perm_c.astype(np.int64))


def check_against_multiple_minimum_degree(graphs: list[tuple[Tensor, int]]) -> None:
    ours = theirs = 0
    for edges, num_nodes in graphs:
        ours += num_filled(edges, num_nodes)[0]
        rank = multiple_minimum_degree(edges, num_nodes)
        theirs += fill_in(edges, num_nodes, rank).size(1)
    assert ours < 1.03 * theirs


FAMILIES = {
    **{f"planar-{n}": lambda n=n: planar(n) for n in (480, 4096, 16384)},
    "grid": lambda: from_networkx(nx.grid_2d_graph(40, 40)),
    "mesh": lambda: from_networkx(nx.grid_graph((12, 12, 12))),
    "random": lambda: from_networkx(nx.gnm_random_graph(800, 1600, seed=0)),
    "power-law": lambda: from_networkx(nx.barabasi_albert_graph(1500, 2, seed=0)),
    "small-world": lambda: from_networkx(nx.watts_strogatz_graph(999, 6, 0.1, seed=0)),
}


@pytest.mark.parametrize("make", FAMILIES.values(), ids=FAMILIES)
def test_fills_no_more_than_multiple_minimum_degree(make):
    check_against_multiple_minimum_degree([make()])


def test_fills_no_more_on_molecules(shared_data):
    pytest.importorskip("rdkit")
    smiles2graph = pytest.importorskip("ogb.utils").smiles2graph
    raw = shared_data / "peptides-functional" / "raw"
    with gzip.open(raw / "peptide_multi_class_dataset.csv.gz", "rt") as file:
        molecules = [
            smiles2graph(x["smiles"]) for x in islice(csv.DictReader(file), 99)
        ]
    check_against_multiple_minimum_degree(
        [(torch.from_numpy(x["edge_index"]), x["num_nodes"]) for x in molecules]
    )


@pytest.mark.parametrize("name", ["minesweeper", "actor"])
def test_fills_no_more_on_real_graphs(name, shared_data):
    edges = np.load(shared_data / "heterophilous" / f"{name}.npz")["edges"]
    edge_index = torch.from_numpy(edges.astype(np.int64)).t()
    num_nodes = int(edge_index.max()) + 1
    check_against_multiple_minimum_degree([(edge_index, num_nodes)])


def test_metis_fills_less_on_large_meshes():
    needs("metis")
    edges, num_nodes = from_networkx(nx.grid_graph((16, 16, 16)))
    rank = elimination_rank(edges, num_nodes, "metis")
    filled = fill_in(edges, num_nodes, rank).size(1)
    assert filled < num_filled(edges, num_nodes)[0]


def test_metis_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    edge_index = torch.tensor([[0], [1]])
    with pytest.raises(ImportError, match=r"pip install 'pyg-chimera\[metis\]'"):
        elimination_rank(edge_index, 2, "metis")
    assert elimination_rank(edge_index, 2).tolist() == [0, 1]


def test_unknown_method():
    with pytest.raises(
        ValueError, match=r"'method' must be one of .*minimum_fill.*amd"
    ):
        elimination_rank(torch.tensor([[0], [1]]), 2, "amd")


def test_grid_is_far_from_its_natural_order():
    edge_index, num_nodes = from_networkx(nx.grid_2d_graph(24, 24))
    filled, _ = num_filled(edge_index, num_nodes)
    natural = fill_in(edge_index, num_nodes, torch.arange(num_nodes)).size(1)
    assert filled < natural / 3
    assert filled < 6 * edge_index.size(1)


def test_large_sparse_graph():
    n = 50_000
    child = torch.arange(1, n)
    parent = (child - 1 - (torch.rand(n - 1) * 20).long()).clamp(min=0)
    edge_index = torch.stack([child, parent])
    assert num_filled(edge_index, n) == (n - 1, n - 1)


def test_hubs_are_not_scanned_again_and_again():
    # Quadratic time would be ten times the limit or more; linear, a hundredth.
    n = 60_000
    edge_index = torch.stack([torch.zeros(n - 1, dtype=torch.long), torch.arange(1, n)])
    num_filled(edge_index[:, :3], 4)  # compiles
    start = time.process_time()
    assert num_filled(edge_index, n) == (n - 1, n - 1)
    assert time.process_time() - start < 1.5


INTERRUPTED = """
import os, signal, threading, time
import torch
from pyg_chimera.ops.structure import elimination_rank

n = 100_000
later = torch.arange(1, n).repeat_interleave(10)
edges = torch.stack([(torch.rand(len(later)) * later).long(), later])
elimination_rank(edges[:, :0], 3)
sent = []
def interrupt():
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)
threading.Timer(1.5, interrupt).start()
try:
    elimination_rank(edges, n)
except KeyboardInterrupt:
    print(time.monotonic() - sent[0])
"""


@pytest.mark.slow
def test_interruption():
    """Uninterrupted, it takes some ten seconds."""
    command = [sys.executable, "-c", INTERRUPTED]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert float(out) < 2


def test_orders_that_fill_up_are_given_up():
    generator = torch.Generator().manual_seed(0)
    edge_index = torch.randint(300, (2, 1500), generator=generator)
    row, col = edge_index.numpy()
    rank = elimination_order(row, col, 300)
    entries = len(fill_pattern(*adjacency(rank[row], rank[col], 300))[1])
    assert (elimination_order(row, col, 300, most=entries) == rank).all()
    assert elimination_order(row, col, 300, most=entries - 1) is None
