import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Graph, graphs

from pyg_chimera.ops import k_hop_index
from pyg_chimera.ops.structure.k_hop import pairs_of_edges

any_graphs = graphs() | graphs(undirected=True, max_nodes=14, max_edges=40)


def as_dict(pairs) -> dict:
    """(source, target) -> distance."""
    keys = map(tuple, pairs.edge_index.t().tolist())
    return dict(zip(keys, pairs.distance.tolist(), strict=True))


@given(any_graphs, st.integers(1, 5))
def test_pairs_are_those_of_networkx(graph: Graph, k: int):
    pairs = k_hop_index(*graph, k)
    whole = nx.DiGraph(graph.edge_index.t().tolist())
    whole.add_nodes_from(range(graph.num_nodes))
    expected = {
        (j, i): d
        for j, found in nx.all_pairs_shortest_path_length(whole, cutoff=k)
        for i, d in found.items()
    }
    assert as_dict(pairs) == expected
    assert pairs.edge_index.size(1) == len(expected)  # each of them once
    row = pairs.edge_index[1] * (k + 1) + pairs.distance
    assert (row.diff() >= 0).all()  # sorted by target, then by distance


def test_a_path_is_a_causal_window():
    edge_index = torch.tensor([[2, 0, 1], [3, 1, 2]])
    pairs = k_hop_index(edge_index, 4, 2)
    assert pairs.edge_index.tolist() == [
        [0, 1, 0, 2, 1, 0, 3, 2, 1],
        [0, 1, 1, 2, 2, 2, 3, 3, 3],
    ]
    assert pairs.distance.tolist() == [0, 0, 1, 0, 1, 2, 0, 1, 2]


def test_memory_is_that_of_the_pairs():
    """A hundred thousand nodes, whose squared number would not fit."""
    node = torch.arange(100_000)
    pairs = k_hop_index(torch.stack([node[:-1], node[1:]]), 100_000, 3)
    assert pairs.edge_index.size(1) == 4 * 100_000 - 6


@pytest.mark.parametrize(
    ("k", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError)]
)
def test_bad_k(k, error):
    with pytest.raises(error, match="'k' must be an integer"):
        k_hop_index(torch.tensor([[0], [1]]), 2, k)


@given(any_graphs, st.integers(1, 3))
def test_pairs_of_edges(graph: Graph, k: int):
    pairs = k_hop_index(*graph, k).edge_index
    pairs = pairs[:, torch.randperm(pairs.size(1))]
    place = pairs_of_edges(graph.edge_index, pairs, graph.num_nodes)
    assert pairs[:, place].equal(graph.edge_index)


def test_edges_that_are_no_pairs():
    edge_index = torch.tensor([[0, 0, 1], [1, 2, 2]])
    for pairs in (edge_index[:, :2], edge_index[:, :0]):
        with pytest.raises(ValueError, match=r"none for edge \d, from node \d to node"):
            pairs_of_edges(edge_index, pairs, 3)
