import time
from collections import Counter
from itertools import pairwise

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Graph, batches, graphs, to_networkx

from pyg_chimera.ops.structure.centrality import ORDERS, node_score
from pyg_chimera.ops.structure.csr import adjacency
from pyg_chimera.ops.structure.distance import connected_components
from pyg_chimera.ops.structure.equitable_partition import equitable_partition

#: The same for nodes that only their numbers tell apart.
SYMMETRIC = [order for order in ORDERS if order not in ("bfs", "cluster")]


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
    for order, values in expected.items():
        score = node_score(edge_index, 6, order)
        assert score.dtype == torch.long
        assert score.tolist() == values, order
    for order in ("eigenvector", "pagerank", "closeness"):
        score = node_score(edge_index, 6, order)
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


@pytest.mark.parametrize(
    ("width", "length", "rtol"),
    [(1, 500, 1e-12), (1, 100_000, 1e-9), (2, 50_000, 1e-9), (9, 3000, 1e-9)],
)
def test_long_paths_and_grids_are_sines(width, length, rtol):
    """However close the next eigenvalue is, and in seconds."""
    node = torch.arange(width * length).view(width, length)
    steps = [(node[:, :-1], node[:, 1:]), (node[:-1], node[1:])]
    edge_index = torch.cat([torch.stack(ends).flatten(1) for ends in steps], dim=1)
    node_score(edge_index[:, :1], 2, "eigenvector")  # compiles
    begin = time.process_time()
    score = node_score(edge_index, node.numel(), "eigenvector").view(width, length)
    assert time.process_time() - begin < 10  # 0.2 seconds at most when compiled
    sines = [
        torch.sin(torch.pi * torch.arange(1, n + 1).double() / (n + 1))
        for n in (width, length)
    ]
    expected = torch.outer(*sines)
    torch.testing.assert_close(score, expected / expected.norm(), rtol=rtol, atol=0)
    assert score.equal(score.flip(0, 1))
    if width == 1:
        assert ranks(score[0, : length // 2]) == list(range(length // 2))


def test_tails_of_trees_are_exact():
    """Entries that are far smaller than the rounding error of the largest one."""
    tree = nx.random_labeled_tree(3000, seed=0)
    edge_index, n = from_networkx(tree)
    score = node_score(edge_index, n, "eigenvector")
    image = torch.zeros_like(score)
    image.index_add_(0, edge_index[0], score[edge_index[1]])
    image.index_add_(0, edge_index[1], score[edge_index[0]])
    value = image[score.argmax()] / score.max()
    assert 0 < float(score.min()) < 1e-30
    torch.testing.assert_close(image, value * score, rtol=1e-8, atol=0)


@pytest.mark.parametrize("sizes", [(15, 10), (6, 22), (5, 30), (10, 18), (20, 101)])
def test_symmetry_survives_almost_equal_eigenvalues(sizes):
    """Dense solvers return any mixture of the two ends of a barbell."""
    graph = nx.barbell_graph(*sizes)
    score = node_score(*from_networkx(graph), "eigenvector")
    assert score.equal(score.flip(0))
    # The half of it that has all symmetric vectors, and no close eigenvalues.
    n = len(graph)
    matrix = nx.to_numpy_array(graph)
    half = matrix[: n // 2, : n // 2].copy()
    bridge = matrix[: n // 2, (n + 1) // 2 :][:, ::-1]
    half += bridge
    if n % 2 == 1:
        middle = matrix[: n // 2, n // 2] * 2**0.5
        half = np.block([[half, middle[:, None]], [middle[None], np.zeros((1, 1))]])
    values, vectors = np.linalg.eigh(half)
    assert values[-2] < 0.9 * values[-1]
    expected = np.abs(vectors[: n // 2, -1]) / 2**0.5
    np.testing.assert_allclose(score[: n // 2].numpy(), expected, atol=1e-14)


@pytest.mark.parametrize("order", ["eigenvector", "pagerank"])
@pytest.mark.parametrize(
    "graph",
    [
        nx.barbell_graph(15, 10),
        nx.barbell_graph(6, 22),
        nx.ladder_graph(1000),
        nx.lollipop_graph(30, 30),
        nx.path_graph(500),
        nx.random_labeled_tree(2000, seed=1),
        nx.barabasi_albert_graph(2000, 2, seed=1),
        nx.disjoint_union_all([nx.barbell_graph(5, 30)] * 3 + [nx.path_graph(40)]),
        nx.disjoint_union(nx.random_labeled_tree(60, seed=2), nx.empty_graph(3)),
    ],
    ids=lambda graph: f"{len(graph)}_nodes",
)
def test_numbers_of_nodes_make_no_difference(graph, order):
    """Not even in the last bit, whatever rounding decides."""
    edge_index, n = from_networkx(graph)
    score = node_score(edge_index, n, order)
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        name = torch.randperm(n, generator=generator)
        other = name[edge_index]
        other = other[:, torch.randperm(other.size(1), generator=generator)]
        assert node_score(other, n, order)[name].equal(score)


@pytest.mark.parametrize("order", ["eigenvector", "pagerank"])
def test_symmetric_nodes_tie(order):
    score = node_score(*from_networkx(nx.ladder_graph(1000)), order).view(2, 1000)
    assert score[0].equal(score[1])
    assert score.equal(score.flip(1))
    for graph, number in ((nx.balanced_tree(3, 5), 6), (nx.grid_graph((9, 9)), 15)):
        score = node_score(*from_networkx(graph), order)
        assert score.unique().numel() == number


def test_different_nodes_don_t_tie():
    """However small their scores and the differences are."""
    n = 30
    score = node_score(*from_networkx(nx.lollipop_graph(n, n)), "eigenvector").numpy()
    value = nx.adjacency_spectrum(nx.lollipop_graph(n, n)).real.max()
    expected = np.ones(n)  # along the tail, from its end
    expected[1] = value
    for i in range(2, n):
        expected[i] = value * expected[i - 1] - expected[i - 2]
    tail = score[: n - 1 : -1]
    np.testing.assert_allclose(tail / tail[-1], expected / expected[-1], rtol=1e-10)
    assert len(set(score)) == n + 2
    # Pages that are hardly more than others, at the end of many steps of less each.
    score = node_score(*from_networkx(nx.path_graph(60)), "pagerank")
    assert score[:30].unique().numel() == 30


def test_scores_of_components_that_refinement_can_t_tell_apart():
    graph = nx.disjoint_union_all([nx.cycle_graph(k) for k in (3, 6, 4)])
    for order, value in (("eigenvector", 13**-0.5), ("pagerank", 1)):
        score = node_score(*from_networkx(graph), order)
        assert score.unique().numel() == 1
        assert float(score[0]) == pytest.approx(value, rel=1e-12)


@given(graphs(max_edges=20))
def test_partition(graph: Graph):
    """Against refinement in rounds, with the neighbours that it counts."""
    n = graph.num_nodes
    ptr, head = adjacency(*graph.edge_index.numpy(), n)
    neighbours = [head[a:b].tolist() for a, b in pairwise(ptr.tolist())]
    expected = [0] * n
    for _ in range(n):
        kinds = [
            (expected[i], sorted(expected[j] for j in neighbours[i])) for i in range(n)
        ]
        expected = [kinds.index(kind) for kind in kinds]
    cell, size, limits, matrix = equitable_partition(ptr, head, np.array([0, n]))
    ptr, head, count = matrix.indptr, matrix.indices, matrix.data
    assert len(set(zip(expected, cell, strict=True))) == len(set(expected)) == len(size)
    assert limits.tolist() == [0, len(size)]
    assert size.tolist() == np.bincount(cell, minlength=len(size)).tolist()
    for i, c in enumerate(cell):
        row = slice(ptr[c], ptr[c + 1])
        found = dict(zip(head[row].tolist(), count[row].tolist(), strict=True))
        assert found == Counter(cell[neighbours[i]].tolist())


@pytest.mark.parametrize("graph", ["path", "tree", "barabasi", "dense"])
def test_five_thousand_nodes(graph):
    n = 5000
    graph = {
        "path": lambda: nx.path_graph(n),
        "tree": lambda: nx.random_labeled_tree(n, seed=0),
        "barabasi": lambda: nx.barabasi_albert_graph(n, 2, seed=0),
        "dense": lambda: nx.barabasi_albert_graph(n, 8, seed=0),
    }[graph]()
    edge_index, _ = from_networkx(graph)
    node_score(edge_index[:, :1], n, "eigenvector")  # compiles
    begin = time.process_time()
    score = node_score(edge_index, n, "eigenvector")
    assert time.process_time() - begin < 10  # about 0.3 seconds at most
    row, col = edge_index
    image = torch.zeros(n, dtype=torch.double)
    image = image.index_add(0, row, score[col]).index_add(0, col, score[row])
    value = score @ image
    assert float((image - value * score).norm()) < 1e-7 * float(value)
    assert bool((score >= 0).all())


@given(graphs(max_edges=12), st.sampled_from(SYMMETRIC), st.data())
def test_permuted_nodes_permute_scores(graph: Graph, order: str, data):
    name = torch.tensor(
        data.draw(st.permutations(range(graph.num_nodes))), dtype=torch.long
    )
    score = node_score(*graph, order)
    other = node_score(name[graph.edge_index], graph.num_nodes, order)
    assert other[name].equal(score)


@given(graphs(), st.sampled_from(ORDERS))
def test_of_the_undirected_simple_graph(graph: Graph, order: str):
    edge_index, num_nodes = graph
    loops = torch.arange(num_nodes).expand(2, -1)
    more = torch.cat([edge_index.flip(0), loops, edge_index], dim=1)
    assert node_score(more, num_nodes, order).equal(node_score(*graph, order))


@given(batches(), st.sampled_from(ORDERS))
def test_batch_is_its_graphs(batch, order):
    score = node_score(batch.edge_index, batch.num_nodes, order, batch.batch)
    for i in range(batch.num_graphs):
        nodes = (batch.batch == i).nonzero().flatten()  # ascending
        number = torch.full((batch.num_nodes,), -1)
        number[nodes] = torch.arange(len(nodes))
        edges = batch.edge_index[:, batch.batch[batch.edge_index[0]] == i]
        alone = node_score(number[edges], len(nodes), order)
        assert score[nodes].equal(alone)


@given(graphs())
def test_clusters(graph: Graph):
    """Numbered by their first nodes, and no cluster spans two components."""
    cluster = node_score(*graph, "cluster").tolist()
    assert list(dict.fromkeys(cluster)) == list(range(len(set(cluster))))
    component = connected_components(*graph).tolist()
    assert len(set(zip(cluster, component, strict=True))) == len(set(cluster))


def test_clusters_where_networkx_alone_would_not_end():
    pairs = [(0, 4), (0, 5), (0, 6), (0, 7), (2, 3), (3, 4), (4, 5), (4, 6), (4, 7)]
    edge_index = torch.tensor([*pairs, (5, 8)]).t()
    assert node_score(edge_index, 9, "cluster").max() < 8


def test_clusters_of_cliques_on_a_string():
    cliques = [torch.combinations(torch.arange(5)).t() + 5 * i for i in range(3)]
    edge_index = torch.cat([*cliques, torch.tensor([[4, 9], [5, 10]])], dim=1)
    expected = [0] * 5 + [1] * 5 + [2] * 5
    assert node_score(edge_index, 15, "cluster").tolist() == expected
