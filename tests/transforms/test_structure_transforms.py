import pytest
import torch
from hypothesis import given
from strategies import Graph, dags, graphs
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import Compose

from pyg_chimera.ops.structure import (
    CycleError,
    diameter,
    elimination_rank,
    topological_rank,
)
from pyg_chimera.transforms import (
    AddDiameter,
    AddEliminationOrder,
    AddTopologicalOrder,
)


def data_of(graph: Graph) -> Data:
    return Data(edge_index=graph.edge_index, num_nodes=graph.num_nodes)


def test_elimination_order_of_star():
    edge_index = torch.tensor([[0, 1, 0, 2, 0, 3], [1, 0, 2, 0, 3, 0]])
    data = Data(edge_index=edge_index, num_nodes=4)
    out = AddEliminationOrder()(data)
    assert out.elimination_rank.sort().values.tolist() == [0, 1, 2, 3]
    assert out.elimination_rank[0] >= 2  # The centre is not eliminated early.


@given(graphs())
def test_elimination_order_by_metis(graph: Graph):
    pytest.importorskip("pymetis", reason="needs pymetis: pip install pymetis")
    out = AddEliminationOrder(method="metis")(data_of(graph))
    assert out.elimination_rank.equal(elimination_rank(*graph, "metis"))


def test_unknown_method():
    with pytest.raises(ValueError, match=r"'method' must be one of .*'amd'"):
        AddEliminationOrder(method="amd")


def test_topological_order_of_diamond():
    data = Data(edge_index=torch.tensor([[2, 2, 0, 1], [0, 1, 3, 3]]), num_nodes=5)
    out = AddTopologicalOrder()(data)
    assert out.topological_rank.tolist() == [1, 1, 0, 2, 0]


def test_diameter_of_path():
    data = Data(edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), num_nodes=4)
    out = AddDiameter()(data)
    assert out.diameter.dtype == torch.long
    assert out.diameter.tolist() == [2]


@given(graphs())
def test_general_graph_gets_what_the_functions_say(graph: Graph):
    out = Compose([AddEliminationOrder(), AddDiameter()])(data_of(graph))
    assert out.elimination_rank.equal(elimination_rank(*graph))
    assert out.diameter.tolist() == [diameter(*graph)]


@given(dags())
def test_dag_gets_what_the_function_says(graph: Graph):
    out = AddTopologicalOrder()(data_of(graph))
    assert out.topological_rank.equal(topological_rank(*graph))


def test_cycle():
    data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    with pytest.raises(CycleError, match="0 -> 1 -> 0"):
        AddTopologicalOrder()(data)


def test_diameters_of_a_batch_with_empty_graphs():
    path = Data(edge_index=torch.tensor([[0, 1], [1, 2]]), num_nodes=3)
    empty = Data(edge_index=torch.empty(2, 0, dtype=torch.long), num_nodes=0)
    batch = Batch.from_data_list([empty, path, empty, empty])
    assert AddDiameter()(batch).diameter.tolist() == [0, 2, 0, 0]
