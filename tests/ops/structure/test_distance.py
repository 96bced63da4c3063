import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Batch, Graph, batches, graphs, to_networkx

from pyg_chimera.ops.structure import connected_components, diameter

any_graphs = graphs() | graphs(undirected=True, max_nodes=14, max_edges=40)


def undirected(graph: nx.Graph) -> tuple[torch.Tensor, int]:
    edges = torch.tensor(list(graph.edges)).view(-1, 2).t()
    return torch.cat([edges, edges.flip(0)], dim=1), graph.number_of_nodes()


def longest_distance(graph: Graph) -> int:
    lengths = dict(nx.all_pairs_shortest_path_length(to_networkx(graph, directed=True)))
    return max((max(row.values()) for row in lengths.values()), default=0)


@given(any_graphs)
def test_diameter_is_largest_finite_distance(graph: Graph):
    out = diameter(*graph)
    assert isinstance(out, int)
    assert out == longest_distance(graph)


@given(batches(any_graphs))
def test_diameter_of_batch(batch: Batch):
    out = diameter(batch.edge_index, batch.num_nodes, batch.batch)
    assert out.dtype == torch.long
    expected = [longest_distance(graph) for graph in batch.graphs]
    while expected and batch.graphs[len(expected) - 1].num_nodes == 0:
        expected.pop()
    assert out.tolist() == expected


@pytest.mark.parametrize(
    ("graph", "expected"),
    [
        (nx.path_graph(50), 49),
        (nx.cycle_graph(51), 25),
        (nx.complete_graph(7), 1),
        (nx.grid_2d_graph(6, 9), 13),
        (nx.petersen_graph(), 2),
        (nx.lollipop_graph(8, 5), 6),
        (nx.disjoint_union(nx.path_graph(4), nx.cycle_graph(12)), 6),
    ],
    ids=["path", "cycle", "complete", "grid", "petersen", "lollipop", "two"],
)
def test_diameter_of_known_graph(graph, expected):
    graph = nx.convert_node_labels_to_integers(graph)
    assert diameter(*undirected(graph)) == expected


@given(st.integers(0, 2**32 - 1))
def test_diameter_of_larger_undirected_graph(seed):
    graph = nx.gnm_random_graph(60, 75, seed=seed)
    edge_index, num_nodes = undirected(graph)
    assert diameter(edge_index, num_nodes) == max(
        nx.diameter(graph.subgraph(nodes)) for nodes in nx.connected_components(graph)
    )


def test_diameter_follows_directions():
    path = torch.tensor([[0, 1, 2], [1, 2, 3]])
    assert diameter(path, 4) == 3
    assert diameter(torch.tensor([[0, 2, 2], [1, 1, 3]]), 4) == 1
    closed = torch.cat([path, torch.tensor([[3], [0]])], dim=1)
    assert diameter(closed, 4) == 3


@pytest.mark.parametrize("num_nodes", [0, 1, 3])
def test_no_edges(num_nodes):
    edge_index = torch.empty(2, 0, dtype=torch.long)
    batch = torch.arange(num_nodes)
    assert diameter(edge_index, num_nodes) == 0
    assert diameter(edge_index, num_nodes, batch).tolist() == [0] * num_nodes
    assert connected_components(edge_index, num_nodes).equal(batch)


def test_self_loops_and_duplicates_have_no_length():
    edge_index = torch.tensor([[0, 0, 0, 1], [0, 1, 1, 0]])
    assert diameter(edge_index, 2) == 1
    assert diameter(torch.tensor([[0], [0]]), 1) == 0


@given(any_graphs)
def test_components_are_networkx_components(graph: Graph):
    out = connected_components(*graph)
    assert out.dtype == torch.long
    nodes = sorted(
        nx.weakly_connected_components(to_networkx(graph, directed=True)), key=min
    )
    expected = torch.empty(graph.num_nodes, dtype=torch.long)
    for i, members in enumerate(nodes):
        expected[list(members)] = i
    assert out.equal(expected)


def test_components_of_long_shuffled_path():
    names = torch.randperm(100_001)
    edge_index = torch.stack([names[:-2], names[1:-1]])[:, torch.randperm(99_999)]
    out = connected_components(edge_index, 100_001)
    assert out.unique().numel() == 2
    assert (out == out[names[-1]]).sum() == 1


def test_real_graphs(shared_data):
    raw = shared_data / "TUDataset" / "MUTAG" / "raw"
    edge_index = (
        torch.from_numpy(np.loadtxt(raw / "MUTAG_A.txt", np.int64, delimiter=",")).t()
        - 1
    )
    batch = (
        torch.from_numpy(np.loadtxt(raw / "MUTAG_graph_indicator.txt", np.int64)) - 1
    )
    out = diameter(edge_index, batch.numel(), batch)
    assert out.numel() == 188
    assert connected_components(edge_index, batch.numel()).equal(batch)
    graph = nx.Graph(edge_index.t().tolist())
    for i, nodes in enumerate(nx.connected_components(graph)):
        assert int(out[i]) == nx.diameter(graph.subgraph(nodes))
