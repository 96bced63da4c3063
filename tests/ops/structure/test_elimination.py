import time

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import Delaunay
from strategies import Graph, graphs
from torch import Tensor
from torch_geometric.utils import to_undirected

from pyg_chimera.ops.structure import elimination_rank
from pyg_chimera.ops.structure.csr import adjacency
from pyg_chimera.ops.structure.elimination import fill_pattern


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


@settings(max_examples=100, derandomize=True, deadline=None)
@given(graph=graphs(max_nodes=12, max_edges=30))
def test_rank_is_a_permutation(graph: Graph):
    rank = elimination_rank(*graph)
    assert rank.dtype == torch.long
    assert sorted(rank.tolist()) == list(range(graph.num_nodes))
    # Directions, self-loops and duplicates don't matter.
    edges = to_undirected(graph.edge_index, num_nodes=graph.num_nodes)
    assert elimination_rank(edges, graph.num_nodes).equal(rank)


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
    """And as long as nothing has been joined, so do the next ones."""
    rank = elimination_rank(*graph).tolist()
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


def test_planar_graph():
    points = np.random.default_rng(0).random((500, 2))
    triangles = torch.from_numpy(Delaunay(points).simplices).long()
    edges = torch.cat(
        [triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [2, 0]]]
    )
    filled, simple = num_filled(edges.t(), 500)
    assert simple < 1500
    assert filled < 5 * simple


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
    start = time.perf_counter()
    assert num_filled(edge_index, n) == (n - 1, n - 1)
    assert time.perf_counter() - start < 1.5
