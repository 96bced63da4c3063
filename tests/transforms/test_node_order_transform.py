import math

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Graph, graphs
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.data.datapipes import DatasetAdapter
from torch_geometric.loader import DataLoader

from pyg_chimera.ops.structure.centrality import ORDERS, node_score
from pyg_chimera.transforms.node_order import NodeOrder


def data_of(graph: Graph) -> Data:
    return Data(edge_index=graph.edge_index, num_nodes=graph.num_nodes)


def feature(data: Data) -> torch.Tensor:
    return data.x[:, 0]


def test_star():
    data = Data(edge_index=torch.tensor([[0, 0, 0], [1, 2, 3]]), num_nodes=4)
    out = NodeOrder()(data)
    assert out.node_score.tolist() == [3, 1, 1, 1]
    assert "node_score" not in data
    assert out.edge_index is data.edge_index


@given(graphs(), st.sampled_from(ORDERS))
def test_stores_what_the_function_says(graph: Graph, method: str):
    out = NodeOrder(method)(data_of(graph))
    assert out.node_score.shape == (graph.num_nodes,)
    assert out.node_score.equal(node_score(*graph, method))


@given(
    st.lists(graphs(min_nodes=1, max_nodes=6), min_size=1, max_size=4),
    st.sampled_from(ORDERS),
)
def test_batch_before_and_after(items: list[Graph], method: str):
    """A batch of scored graphs is the batch, scored."""
    each = [data_of(graph) for graph in items]
    transform = NodeOrder(method)
    batch = Batch.from_data_list([transform(data) for data in each])
    assert batch.node_score.equal(transform(Batch.from_data_list(each)).node_score)
    for data, score in zip(batch.to_data_list(), each, strict=True):
        assert data.node_score.equal(transform(score).node_score)


def test_function_of_the_data():
    x = torch.tensor([[2.0], [1.0], [3.0]], requires_grad=True)
    data = Data(x=x, edge_index=torch.zeros(2, 0, dtype=torch.long))
    out = NodeOrder(feature, "importance")(data)
    assert out.importance.tolist() == [2, 1, 3]
    assert not out.importance.requires_grad
    assert set(out.keys()) == {"x", "edge_index", "importance"}
    out = NodeOrder(lambda data: [3, 1, 2])(data)
    assert out.node_score.tolist() == [3, 1, 2]


def test_stored_score_is_not_the_users_data():
    data = Data(x=torch.rand(3, 2), edge_index=torch.zeros(2, 0, dtype=torch.long))
    expected = data.x[:, 0].clone()
    out = NodeOrder(feature)(data)
    data.x.zero_()
    assert out.node_score.equal(expected)
    out.node_score += 1
    assert not data.x.any()


def test_replaces_an_earlier_score():
    data = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
    out = NodeOrder("bfs")(NodeOrder("degree")(data))
    assert out.node_score.tolist() == [0, 1, 2]


class Transformed(torch.utils.data.Dataset):
    def __init__(self, items, transform):
        self.items = items
        self.transform = transform

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.transform(self.items[index])


@pytest.mark.parametrize("method", ["eigenvector", "cluster", feature])
def test_workers(method):
    items = []
    for i in range(6):
        graph = nx.gnp_random_graph(3 + i, 0.5, seed=i)
        edges = torch.tensor(list(graph.edges), dtype=torch.long).view(-1, 2).t()
        items.append(Data(x=torch.rand(3 + i, 1), edge_index=edges))
    dataset = Transformed(items, NodeOrder(method))
    expected = list(DataLoader(dataset, batch_size=3))
    out = list(DataLoader(dataset, batch_size=3, num_workers=2))
    assert len(out) == len(expected) == 2
    for a, b in zip(out, expected, strict=True):
        assert a.node_score.equal(b.node_score)


def test_repr():
    assert repr(NodeOrder("pagerank")) == "NodeOrder(method='pagerank')"
    assert repr(NodeOrder(feature)) == "NodeOrder(method='feature')"


def test_functional_name():
    data = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2)
    (out,) = DatasetAdapter([data]).chimera_node_order("degree", attr_name="value")
    assert out.value.tolist() == [1, 1]
    assert "value" not in data


def test_bad_arguments():
    with pytest.raises(ValueError, match=r"'method'.*'eigenvector'.*got 'dfs'"):
        NodeOrder("dfs")
    for name in ("my_index", "my_batch", "face"):
        with pytest.raises(ValueError, match=f"'attr_name'.*'{name}'"):
            NodeOrder(attr_name=name)


def test_bad_data():
    data = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2)
    with pytest.raises(ValueError, match=r"shape \[2\] \(got shape \[3\]\)"):
        NodeOrder(lambda _: torch.zeros(3))(data)
    with pytest.raises(ValueError, match=r"shape \[2\] \(got shape \[2, 1\]\)"):
        NodeOrder(lambda _: torch.zeros(2, 1))(data)
    with pytest.raises(ValueError, match=r"NaN \(got 1 of 2"):
        NodeOrder(lambda _: torch.tensor([math.nan, 1.0]))(data)
    with pytest.raises(TypeError, match="real"):
        NodeOrder(lambda _: torch.zeros(2, dtype=torch.cfloat))(data)
    with pytest.raises(ValueError, match=r"'data.edge_index'.*\['x'\]"):
        NodeOrder()(Data(x=torch.zeros(3, 1)))
    with pytest.raises(TypeError, match=r"homogeneous.*'HeteroData'"):
        NodeOrder()(HeteroData())
    with pytest.raises(ValueError, match="got 5 in"):
        NodeOrder()(Data(x=torch.zeros(3, 1), edge_index=torch.tensor([[0], [5]])))
