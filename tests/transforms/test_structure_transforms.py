import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Graph, dags, graphs
from torch_geometric.data import Data, HeteroData
from torch_geometric.data.datapipes import DatasetAdapter
from torch_geometric.loader import DataLoader
from torch_geometric.transforms import Compose

from pyg_chimera.ops.structure import (
    CycleError,
    diameter,
    elimination_rank,
    fill_in,
    topological_rank,
)
from pyg_chimera.transforms import (
    AddDiameter,
    AddEliminationOrder,
    AddTopologicalOrder,
)

TRANSFORMS = [AddEliminationOrder, AddTopologicalOrder, AddDiameter]


def data_of(graph: Graph) -> Data:
    return Data(edge_index=graph.edge_index, num_nodes=graph.num_nodes)


def test_elimination_order_of_star():
    edge_index = torch.tensor([[0, 1, 0, 2, 0, 3], [1, 0, 2, 0, 3, 0]])
    data = Data(edge_index=edge_index, num_nodes=4)
    out = AddEliminationOrder()(data)
    assert "elimination_rank" not in data
    assert "fill_index" not in data
    assert out.elimination_rank.sort().values.tolist() == [0, 1, 2, 3]
    assert out.elimination_rank[0] >= 2  # The centre is not eliminated early.
    assert out.fill_index.size() == (2, 3)


def test_topological_order_of_diamond():
    data = Data(edge_index=torch.tensor([[2, 2, 0, 1], [0, 1, 3, 3]]), num_nodes=5)
    out = AddTopologicalOrder()(data)
    assert "topological_rank" not in data
    assert out.topological_rank.tolist() == [1, 1, 0, 2, 0]


def test_diameter_of_path():
    data = Data(edge_index=torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), num_nodes=4)
    out = AddDiameter()(data)
    assert "diameter" not in data
    assert out.diameter.dtype == torch.long
    assert out.diameter.tolist() == [2]


@given(graphs())
def test_general_graph_gets_what_the_functions_say(graph: Graph):
    out = Compose([AddEliminationOrder(), AddDiameter()])(data_of(graph))
    rank = elimination_rank(*graph)
    assert out.elimination_rank.equal(rank)
    assert out.fill_index.equal(fill_in(*graph, rank))
    assert out.diameter.tolist() == [diameter(*graph)]


@given(dags())
def test_dag_gets_what_the_function_says(graph: Graph):
    out = AddTopologicalOrder()(data_of(graph))
    assert out.topological_rank.equal(topological_rank(*graph))


@given(st.lists(dags(), min_size=1, max_size=4))
def test_batching_is_side_by_side(items: list[Graph]):
    transform = Compose([T() for T in TRANSFORMS])
    each = [transform(data_of(graph)) for graph in items]
    (batch,) = DataLoader(each, batch_size=len(each))
    shifts = batch.ptr[:-1].tolist()
    assert batch.diameter.tolist() == [int(data.diameter) for data in each]
    for key in ("elimination_rank", "topological_rank"):
        assert batch[key].equal(torch.cat([data[key] for data in each]))
    assert batch.fill_index.equal(
        torch.cat([d.fill_index + s for d, s in zip(each, shifts, strict=True)], dim=1)
    )


class Transformed(torch.utils.data.Dataset):
    def __init__(self, items, transform):
        self.items = items
        self.transform = transform

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.transform(self.items[index])


def test_workers():
    items = []
    for i in range(8):
        graph = nx.gnp_random_graph(3 + i, 0.4, seed=i, directed=True)
        edges = torch.tensor([e for e in graph.edges if e[0] < e[1]]).view(-1, 2).t()
        items.append(Data(edge_index=edges, num_nodes=3 + i))
    dataset = Transformed(items, Compose([T() for T in TRANSFORMS]))
    expected = list(DataLoader(dataset, batch_size=3))
    out = list(DataLoader(dataset, batch_size=3, num_workers=2))
    assert len(out) == len(expected) == 3
    for a, b in zip(out, expected, strict=True):
        assert a.keys() == b.keys()
        for key in a.keys():  # noqa: SIM118
            assert torch.equal(torch.as_tensor(a[key]), torch.as_tensor(b[key])), key


def test_cycle():
    data = Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    with pytest.raises(CycleError, match="0 -> 1 -> 0"):
        AddTopologicalOrder()(data)


def test_attribute_names():
    data = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2)
    out = AddEliminationOrder("order", "filled_index")(data)
    assert set(out.keys()) == {"edge_index", "num_nodes", "order", "filled_index"}
    assert AddTopologicalOrder("level")(data).level.tolist() == [0, 1]
    assert AddDiameter("width")(data).width.tolist() == [1]
    for transform in TRANSFORMS:
        for name in ("my_index", "my_batch", "face"):
            with pytest.raises(ValueError, match=f"'attr_name'.*'{name}'"):
                transform(name)
    with pytest.raises(ValueError, match=r"'index_name' must contain 'index'.*'fill'"):
        AddEliminationOrder(index_name="fill")


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_bad_data(transform):
    with pytest.raises(ValueError, match=r"'data.edge_index'.*\['x'\]"):
        transform()(Data(x=torch.zeros(3, 1)))
    with pytest.raises(TypeError, match=r"homogeneous.*'HeteroData'"):
        transform()(HeteroData())
    with pytest.raises(ValueError, match="got 5 in"):
        transform()(Data(x=torch.zeros(3, 1), edge_index=torch.tensor([[0], [5]])))
    with pytest.raises(TypeError, match="integers"):
        transform()(Data(edge_index=torch.zeros(2, 1), num_nodes=3))


@pytest.mark.parametrize("name", ["elimination_order", "topological_order", "diameter"])
def test_functional_names(name):
    data = Data(edge_index=torch.tensor([[0], [1]]), num_nodes=2)
    pipe = getattr(DatasetAdapter([data]), f"chimera_add_{name}")(attr_name="value")
    (out,) = pipe
    assert "value" in out
    assert "value" not in data
