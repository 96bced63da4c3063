import networkx as nx
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Graph, batches, graphs, to_networkx

from pyg_chimera.ops import node_order
from pyg_chimera.ops.structure import topological_rank

ORDERS = ("order", "degree", "bfs")


def test_small_graph():
    # 4 - 0 - 3 - 1, a triangle 3 - 1 - 5, and node 2 alone; 4 - 0 is there thrice.
    edge_index = torch.tensor([[4, 0, 4, 0, 3, 3, 5, 5], [0, 4, 0, 3, 1, 5, 1, 5]])
    assert node_order(edge_index, 6, "order").tolist() == [0, 1, 2, 3, 4, 5]
    # Neighbours: 2, 2, 0, 3, 1, 2
    assert node_order(edge_index, 6, "degree").tolist() == [2, 3, 0, 5, 1, 4]
    # Found: 0, 3, 4, 1, 5, then 2
    assert node_order(edge_index, 6, "bfs").tolist() == [0, 3, 5, 1, 2, 4]


@given(graphs(), st.sampled_from(ORDERS))
def test_places_are_a_permutation_that_makes_a_dag(graph: Graph, order: str):
    place = node_order(*graph, order)
    assert place.sort().values.equal(torch.arange(graph.num_nodes))
    source, target = graph.edge_index
    dag = graph.edge_index[:, place[source] < place[target]]
    assert topological_rank(dag, graph.num_nodes).numel() == graph.num_nodes


@given(graphs())
def test_degree_is_networkx_degree(graph: Graph):
    degree = dict(to_networkx(graph).degree)
    node = node_order(*graph, "degree").argsort().tolist()
    assert node == sorted(range(graph.num_nodes), key=lambda i: (degree[i], i))


@given(graphs())
def test_bfs_is_networkx_search(graph: Graph):
    nx_graph = to_networkx(graph)
    expected: list[int] = []
    for root in range(graph.num_nodes):
        if root not in expected:
            edges = nx.bfs_edges(nx_graph, root, sort_neighbors=sorted)
            expected += [root, *(v for _, v in edges)]
    assert node_order(*graph, "bfs").argsort().tolist() == expected


@given(batches(), st.sampled_from(ORDERS))
def test_order_within_each_graph_of_a_batch(batch, order):
    """The same as that of the graph alone, if its nodes are in the same order."""
    place = node_order(batch.edge_index, batch.num_nodes, order)
    for i in range(batch.num_graphs):
        nodes = (batch.batch == i).nonzero().flatten()  # ascending
        number = torch.full((batch.num_nodes,), -1)
        number[nodes] = torch.arange(len(nodes))
        edges = batch.edge_index[:, batch.batch[batch.edge_index[0]] == i]
        alone = node_order(number[edges], len(nodes), order)
        assert place[nodes].argsort().equal(alone.argsort())


def test_long_path():
    n = 50_000
    names = torch.randperm(n)
    edge_index = torch.stack([names[:-1], names[1:]])
    place = node_order(edge_index, n, "bfs")
    assert place.sort().values.equal(torch.arange(n))
    root = int((names == 0).nonzero())
    one_way = place[names[root:]]  # away from the first node
    assert bool((one_way[1:] > one_way[:-1]).all())
