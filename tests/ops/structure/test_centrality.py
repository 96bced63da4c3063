import builtins
import sys
import time

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Graph, batches, graphs

from pyg_chimera.ops.structure.centrality import ORDERS, node_score
from pyg_chimera.ops.structure.distance import connected_components

#: The same for nodes that only their numbers tell apart.
SYMMETRIC = [method for method in ORDERS if method not in ("bfs", "cluster")]


def to_networkx(graph: Graph) -> nx.Graph:
    out = nx.Graph()
    out.add_nodes_from(range(graph.num_nodes))
    out.add_edges_from((u, v) for u, v in graph.edge_index.t().tolist() if u != v)
    return out


def from_networkx(graph: nx.Graph) -> Graph:
    graph = nx.convert_node_labels_to_integers(graph)
    edges = torch.tensor(list(graph.edges), dtype=torch.long).view(-1, 2).t()
    return Graph(edges, graph.number_of_nodes())


def per_node(values: dict) -> torch.Tensor:
    return torch.tensor([values[i] for i in range(len(values))], dtype=torch.double)


def ranks(score: torch.Tensor) -> list[int]:
    return score.unique(return_inverse=True)[1].tolist()


def test_small_graph():
    # 4 - 0 - 3 - 1, a triangle 3 - 1 - 5, and node 2 alone; 4 - 0 is there thrice.
    edge_index = torch.tensor([[4, 0, 4, 0, 3, 3, 5, 5], [0, 4, 0, 3, 1, 5, 1, 5]])
    expected = {
        "order": [0, 0, 0, 0, 0, 0],
        "random": [0, 0, 0, 0, 0, 0],
        "degree": [2, 2, 0, 3, 1, 2],
        "bfs": [0, 3, 5, 1, 2, 4],
        "cluster": [0, 1, 2, 1, 0, 1],
    }
    for method, values in expected.items():
        score = node_score(edge_index, 6, method)
        assert score.dtype == torch.long
        assert score.tolist() == values, method
    for method in ("eigenvector", "pagerank", "closeness"):
        score = node_score(edge_index, 6, method)
        assert score.dtype == torch.double
        assert int(score.argmax()) == 3
        assert int(score.argmin()) == 2
        assert score[1] == score[5]


def test_path_of_three():
    edge_index = torch.tensor([[0, 1], [1, 2]])
    half, root = 0.5, 0.5**0.5
    score = node_score(edge_index, 3, "eigenvector")
    assert torch.allclose(score, torch.tensor([half, root, half]).double())
    score = node_score(edge_index, 3, "closeness")
    assert torch.allclose(score, torch.tensor([2 / 3, 1, 2 / 3]).double())
    # 3 p = 0.15 + 0.85 q / 2 and q = 0.15 + 2 * 0.85 p, sum 3
    q = (0.15 + 2 * 0.85 * 0.15) / (1 - 0.85**2)
    score = node_score(edge_index, 3, "pagerank")
    assert torch.allclose(score, torch.tensor([(3 - q) / 2, q, (3 - q) / 2]).double())


@pytest.mark.parametrize("method", ORDERS)
@pytest.mark.parametrize("num_nodes", [0, 1, 3])
def test_without_edges(method, num_nodes):
    edge_index = torch.empty(2, 0, dtype=torch.long)
    score = node_score(edge_index, num_nodes, method)
    assert score.shape == (num_nodes,)
    if method in SYMMETRIC:
        assert score.unique().numel() <= 1
    else:
        assert score.tolist() == list(range(num_nodes))
    batch = torch.tensor([2] * num_nodes, dtype=torch.long)
    assert node_score(edge_index, num_nodes, method, batch).equal(score)


@given(graphs())
def test_matches_networkx(graph: Graph):
    g = to_networkx(graph)
    degree = node_score(*graph, "degree")
    assert degree.tolist() == [g.degree[i] for i in range(graph.num_nodes)]
    closeness = per_node(nx.closeness_centrality(g))
    assert torch.allclose(node_score(*graph, "closeness"), closeness)
    if graph.num_nodes > 0:
        pagerank = per_node(nx.pagerank(g, tol=1e-13, max_iter=1000))
        score = node_score(*graph, "pagerank") / graph.num_nodes
        assert torch.allclose(score, pagerank, atol=1e-8)


@given(graphs(max_edges=12))
def test_eigenvector_of_each_component(graph: Graph):
    """Against a dense solver, at the scale that the docs state."""
    g = to_networkx(graph)
    expected = np.zeros(graph.num_nodes)
    largest = 0.0
    for nodes in map(sorted, nx.connected_components(g)):
        values, vectors = np.linalg.eigh(nx.to_numpy_array(g.subgraph(nodes), nodes))
        share = len(nodes) / graph.num_nodes
        expected[nodes] = np.abs(vectors[:, -1]) * values[-1] * share**0.5
        largest = max(largest, values[-1])
    if largest > 0:
        expected /= largest
    score = node_score(*graph, "eigenvector").numpy()
    np.testing.assert_allclose(score, expected, atol=1e-8)


@pytest.mark.parametrize(
    "graph",
    [
        nx.path_graph(500),
        nx.cycle_graph(301),
        nx.star_graph(3),
        nx.star_graph(400),
        nx.complete_bipartite_graph(3, 7),
        nx.grid_2d_graph(17, 23),
        nx.balanced_tree(3, 5),
        nx.barabasi_albert_graph(600, 2, seed=0),
        nx.random_labeled_tree(700, seed=0),
    ],
    ids=lambda graph: f"{len(graph)}_nodes",
)
def test_eigenvector_of_larger_graphs(graph):
    score = node_score(*from_networkx(graph), "eigenvector").numpy()
    expected = np.abs(np.linalg.eigh(nx.to_numpy_array(graph))[1][:, -1])
    np.testing.assert_allclose(score, expected, atol=1e-7)


def test_eigenvector_of_path_is_a_sine_and_symmetric():
    n = 500
    score = node_score(*from_networkx(nx.path_graph(n)), "eigenvector")
    sine = torch.sin(torch.pi * torch.arange(1, n + 1).double() / (n + 1))
    assert torch.allclose(score, sine / sine.norm(), atol=1e-9)
    assert score.equal(score.flip(0))
    assert ranks(score[: n // 2]) == list(range(n // 2))


def test_symmetry_survives_almost_equal_eigenvalues():
    """Dense solvers return any mixture of the two ends of a barbell."""
    score = node_score(*from_networkx(nx.barbell_graph(20, 101)), "eigenvector")
    assert score.equal(score.flip(0))


@pytest.mark.parametrize("graph", ["path", "tree", "barabasi"])
def test_five_thousand_nodes(graph):
    n = 5000
    graph = {
        "path": lambda: nx.path_graph(n),
        "tree": lambda: nx.random_labeled_tree(n, seed=0),
        "barabasi": lambda: nx.barabasi_albert_graph(n, 2, seed=0),
    }[graph]()
    edge_index, _ = from_networkx(graph)
    node_score(edge_index[:, :1], n, "eigenvector")  # compiles
    begin = time.perf_counter()
    score = node_score(edge_index, n, "eigenvector")
    assert time.perf_counter() - begin < 10  # about half a second at most
    row, col = edge_index
    image = torch.zeros(n, dtype=torch.double)
    image = image.index_add(0, row, score[col]).index_add(0, col, score[row])
    value = score @ image
    assert float((image - value * score).norm()) < 1e-7 * float(value)
    assert bool((score >= 0).all())


@given(graphs(max_edges=12), st.sampled_from(SYMMETRIC), st.data())
def test_permuted_nodes_permute_scores_and_ties(graph: Graph, method: str, data):
    name = torch.tensor(
        data.draw(st.permutations(range(graph.num_nodes))), dtype=torch.long
    )
    score = node_score(*graph, method)
    other = node_score(name[graph.edge_index], graph.num_nodes, method)
    assert torch.allclose(other[name], score, atol=1e-9)
    assert ranks(other[name]) == ranks(score)


@given(graphs(), st.sampled_from(ORDERS))
def test_of_the_undirected_simple_graph(graph: Graph, method: str):
    edge_index, num_nodes = graph
    loops = torch.arange(num_nodes).expand(2, -1)
    more = torch.cat([edge_index.flip(0), loops, edge_index], dim=1)
    assert node_score(more, num_nodes, method).equal(node_score(*graph, method))


@given(batches(), st.sampled_from(ORDERS))
def test_batch_is_its_graphs(batch, method):
    score = node_score(batch.edge_index, batch.num_nodes, method, batch.batch)
    for i in range(batch.num_graphs):
        nodes = (batch.batch == i).nonzero().flatten()  # ascending
        number = torch.full((batch.num_nodes,), -1)
        number[nodes] = torch.arange(len(nodes))
        edges = batch.edge_index[:, batch.batch[batch.edge_index[0]] == i]
        alone = node_score(number[edges], len(nodes), method)
        assert score[nodes].equal(alone)


@given(graphs())
def test_clusters(graph: Graph):
    """Numbered by their first nodes, and no cluster spans two components."""
    cluster = node_score(*graph, "cluster").tolist()
    assert list(dict.fromkeys(cluster)) == list(range(len(set(cluster))))
    component = connected_components(*graph).tolist()
    assert len(set(zip(cluster, component, strict=True))) == len(set(cluster))


def test_clusters_of_cliques_on_a_string():
    cliques = [torch.combinations(torch.arange(5)).t() + 5 * i for i in range(3)]
    edge_index = torch.cat([*cliques, torch.tensor([[4, 9], [5, 10]])], dim=1)
    expected = [0] * 5 + [1] * 5 + [2] * 5
    assert node_score(edge_index, 15, "cluster").tolist() == expected


def test_clusters_without_networkx(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "networkx":
            raise ModuleNotFoundError("No module named 'networkx'", name="networkx")
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "networkx")
    monkeypatch.setattr(builtins, "__import__", without)
    edge_index = torch.tensor([[0], [1]])
    with pytest.raises(ImportError, match="pip install networkx"):
        node_score(edge_index, 2, "cluster")
    assert node_score(edge_index, 2, "degree").tolist() == [1, 1]


@pytest.mark.parametrize("method", ["dfs", None, 1])
def test_unknown_method(method):
    with pytest.raises(ValueError, match=rf"'method'.*'eigenvector'.*'bfs'.*{method}"):
        node_score(torch.zeros(2, 0).long(), 3, method)


@pytest.mark.parametrize("method", ORDERS)
def test_bad_input(method):
    edge_index = torch.tensor([[0], [2]])
    with pytest.raises(ValueError, match=r"shape \[2, num_edges\]"):
        node_score(torch.zeros(3, 2).long(), 3, method)
    with pytest.raises(ValueError, match="got 2 in"):
        node_score(edge_index, 2, method)
    with pytest.raises(TypeError, match="integers"):
        node_score(torch.zeros(2, 2), 3, method)
    with pytest.raises(ValueError, match=r"'batch'.*\[3\].*\[2\]"):
        node_score(edge_index, 3, method, torch.zeros(2).long())
    with pytest.raises(ValueError, match=r"joins different graphs.*node 0.*node 2"):
        node_score(edge_index, 3, method, torch.tensor([0, 0, 1]))


@pytest.mark.cuda
def test_result_is_on_the_device_of_edge_index():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    edge_index = torch.tensor([[2, 0], [0, 1]], device="cuda")
    batch = torch.zeros(3, dtype=torch.long, device="cuda")
    for method in ORDERS:
        assert node_score(edge_index, 3, method, batch).is_cuda
