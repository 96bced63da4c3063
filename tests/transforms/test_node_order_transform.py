import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Graph, graphs
from torch_geometric.data import Data

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


@given(graphs(), st.sampled_from(ORDERS))
def test_stores_what_the_function_says(graph: Graph, order: str):
    out = NodeOrder(order)(data_of(graph))
    assert out.node_score.shape == (graph.num_nodes,)
    assert out.node_score.equal(node_score(*graph, order))


def test_function_of_the_data():
    x = torch.tensor([[2.0], [1.0], [3.0]], requires_grad=True)
    data = Data(x=x, edge_index=torch.zeros(2, 0, dtype=torch.long))
    out = NodeOrder(feature, "importance")(data)
    assert out.importance.tolist() == [2, 1, 3]
    assert not out.importance.requires_grad
    assert set(out.keys()) - {"x", "edge_index"} == {
        "importance",
        "importance_checksum",
    }
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


def test_bad_data():
    data = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2)
    with pytest.raises(ValueError, match=r"shape \[2\], got shape \[3\]"):
        NodeOrder(lambda _: torch.zeros(3))(data)
    with pytest.raises(ValueError, match=r"shape \[2\], got shape \[2, 1\]"):
        NodeOrder(lambda _: torch.zeros(2, 1))(data)
    with pytest.raises(ValueError, match=r"NaN, got 1 of 2"):
        NodeOrder(lambda _: torch.tensor([math.nan, 1.0]))(data)
    with pytest.raises(TypeError, match="real"):
        NodeOrder(lambda _: torch.zeros(2, dtype=torch.cfloat))(data)
    with pytest.raises(TypeError, match=r"a score per node, got 'NoneType'"):
        NodeOrder(lambda _: None)(data)
    with pytest.raises(ValueError, match=r"'order'.*'eigenvector'.*got 'dfs'"):
        NodeOrder("dfs")
