import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Graph, graphs
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import AddLaplacianEigenvectorPE, AddRandomWalkPE
from torch_geometric.utils import get_laplacian, to_dense_adj, to_undirected

from pyg_chimera.transforms import encodings
from pyg_chimera.transforms.encodings import LaplacianEncoding

NORMALIZATIONS = ("sym", None)


def data_of(graph: Graph | nx.Graph) -> Data:
    if isinstance(graph, nx.Graph):
        graph = nx.convert_node_labels_to_integers(graph)
        edges = torch.tensor(list(graph.edges), dtype=torch.long).view(-1, 2).t()
        return Data(edge_index=to_undirected(edges), num_nodes=len(graph))
    return Data(edge_index=graph.edge_index, num_nodes=graph.num_nodes)


def laplacian_of(graph: Graph, normalization: str | None) -> np.ndarray:
    """Of the undirected simple graph, as PyG computes it."""
    edge_index, num_nodes = graph
    if edge_index.numel() == 0:
        return np.eye(num_nodes) * (normalization == "sym")
    edge_index = to_undirected(edge_index, num_nodes=num_nodes)
    edge_index, weight = get_laplacian(
        edge_index, None, normalization, torch.double, num_nodes
    )
    return to_dense_adj(edge_index, None, weight, num_nodes)[0].numpy()


@pytest.fixture(autouse=True)
def _double():
    torch.set_default_dtype(torch.double)
    yield
    torch.set_default_dtype(torch.float)


def test_path_of_three():
    data = Data(edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), num_nodes=3)
    out = LaplacianEncoding(4)(data)
    assert "laplacian_pe" not in data
    pe = out.laplacian_pe
    assert pe.shape == (3, 4, 2)
    root = 0.5**0.5
    vectors = torch.tensor([[0.5, root, 0.5], [root, 0, root], [0.5, root, 0.5]])
    assert torch.allclose(pe[:, :3, 0].abs(), vectors.t(), atol=1e-12)
    assert torch.allclose(pe[:, :3, 1], torch.tensor([0.0, 1, 2]).expand(3, 3))
    assert bool((pe[:, 0, 1] == 0).all())  # exactly
    assert bool((pe[:, 3] == 0).all())


@given(graphs(), st.integers(1, 12), st.sampled_from(NORMALIZATIONS))
def test_smallest_eigenpairs(graph: Graph, k: int, normalization: str | None):
    """Also of graphs that are disconnected, tiny, and directed."""
    transform = LaplacianEncoding(k, is_undirected=False, normalization=normalization)
    pe = transform(data_of(graph)).laplacian_pe
    n = graph.num_nodes
    assert pe.shape == (n, k, 2)
    found = min(n, k)
    assert bool((pe[:, found:] == 0).all())
    if n == 0:
        return
    laplacian = laplacian_of(graph, normalization)
    vectors, values = pe[:, :found, 0].numpy(), pe[:, :found, 1].numpy()
    assert (values == values[0]).all()
    np.testing.assert_allclose(
        values[0], np.linalg.eigvalsh(laplacian)[:found], atol=1e-10
    )
    assert (values[0] >= 0).all()
    np.testing.assert_allclose(laplacian @ vectors, values * vectors, atol=1e-10)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(found), atol=1e-10)


@given(graphs(undirected=True))
def test_directions_loops_and_duplicates_make_no_difference(graph: Graph):
    edge_index, num_nodes = graph
    loops = torch.arange(num_nodes).expand(2, -1)
    more = torch.cat([edge_index, loops, edge_index.flip(0)], dim=1)
    data = Data(edge_index=more, num_nodes=num_nodes, edge_weight=torch.rand(9))
    pe = LaplacianEncoding(3)(data).laplacian_pe
    assert pe.equal(LaplacianEncoding(3)(data_of(graph)).laplacian_pe)
    one_way = edge_index[:, edge_index[0] <= edge_index[1]]
    data = Data(edge_index=one_way, num_nodes=num_nodes)
    assert pe.equal(LaplacianEncoding(3, is_undirected=False)(data).laplacian_pe)


@pytest.mark.parametrize(
    "graph", [nx.random_labeled_tree(60, seed=2), nx.lollipop_graph(10, 30)]
)
def test_nontrivial_ones_are_those_of_pyg(graph):
    data = data_of(graph)
    expected = AddLaplacianEigenvectorPE(3, is_undirected=True)(data)
    pe = LaplacianEncoding(4)(data).laplacian_pe[:, 1:, 0]
    expected = expected.laplacian_eigenvector_pe
    assert torch.allclose(pe.abs(), expected.abs().double(), atol=1e-4)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_large_components_are_like_small_ones(monkeypatch, normalization):
    """Sparse and dense solvers, with several components of the same kind."""
    tree = nx.random_labeled_tree(120, seed=5)
    graph = nx.disjoint_union_all([tree, nx.path_graph(90), tree, nx.empty_graph(3)])
    transform = LaplacianEncoding(10, normalization=normalization)
    dense = transform(data_of(graph)).laplacian_pe
    monkeypatch.setattr(encodings, "_DENSE_NODES", 50)
    sparse = transform(data_of(graph)).laplacian_pe
    assert torch.allclose(sparse[..., 1], dense[..., 1], atol=1e-10)
    gram = sparse[..., 0].t() @ sparse[..., 0]
    assert torch.allclose(gram, torch.eye(10), atol=1e-9)
    again = transform(data_of(graph)).laplacian_pe
    assert again.equal(sparse)


def test_five_thousand_nodes():
    n = 5000
    pe = LaplacianEncoding(4, normalization=None)(data_of(nx.path_graph(n)))
    pe = pe.laplacian_pe
    expected = 2 - 2 * torch.cos(torch.pi * torch.arange(4) / n)
    assert torch.allclose(pe[0, :, 1], expected, rtol=1e-6, atol=1e-13)
    wave = torch.cos(torch.pi * (torch.arange(n) + 0.5) / n)
    assert torch.allclose(pe[:, 1, 0].abs(), (wave / wave.norm()).abs(), atol=1e-8)


@pytest.mark.parametrize("num_nodes", [0, 1, 4])
@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_without_edges(num_nodes, normalization):
    data = data_of(nx.empty_graph(num_nodes))
    pe = LaplacianEncoding(2, normalization=normalization)(data).laplacian_pe
    assert pe.shape == (num_nodes, 2, 2)
    value = 1.0 if normalization == "sym" else 0.0
    found = min(num_nodes, 2)
    assert pe[:, :found, 0].equal(torch.eye(num_nodes)[:, :found])
    assert bool((pe[:, :found, 1] == value).all())
    assert bool((pe[:, found:] == 0).all())


def test_dtype():
    torch.set_default_dtype(torch.float)
    pe = LaplacianEncoding(2)(data_of(nx.path_graph(3))).laplacian_pe
    assert pe.dtype == torch.float


def test_bad_arguments():
    with pytest.raises(ValueError, match="'k' must be an integer >= 1"):
        LaplacianEncoding(0)
    with pytest.raises(TypeError, match=r"'k' must be an integer, got 2\.0"):
        LaplacianEncoding(2.0)
    with pytest.raises(ValueError, match=r"'normalization'.*got 'rw'"):
        LaplacianEncoding(2, normalization="rw")


def test_bad_data():
    transform = LaplacianEncoding(2)
    one_way = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2)
    with pytest.raises(ValueError, match=r"reverse.*ToUndirected.*'is_undirected=Fals"):
        transform(one_way)
    with pytest.raises(ValueError, match="before they are batched"):
        transform(Batch.from_data_list([data_of(nx.path_graph(2))] * 2))


@given(graphs())
def test_random_walks_of_pyg_are_safe(graph: Graph):
    """PyG's own transform serves as it is, with any graph."""
    out = AddRandomWalkPE(3, attr_name="pe")(data_of(graph))
    assert out.pe.shape == (graph.num_nodes, 3)
    assert bool(out.pe.isfinite().all())
