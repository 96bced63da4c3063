from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Graph, dags
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import Compose

from pyg_chimera.ops import CycleError, line_graph, multitree
from pyg_chimera.transforms import (
    DAGDecomposition,
    DirectedLineGraph,
    LineGraphData,
    MultitreePruning,
)

TRANSFORMS = [DirectedLineGraph, MultitreePruning]
# 0 -> 1 -> 3 -> 4 and 0 -> 2 -> 3: the ways from 0 meet in 3, so one is pruned only
# behind an edge into 0, which the last entry is.
EDGES = torch.tensor([[0, 0, 1, 2, 3, 5], [1, 2, 3, 3, 4, 0]])
LINES = [[0, 1, 2, 3, 5, 5], [2, 3, 4, 4, 0, 1]]
KEPT = [[0, 1, 2, 5, 5], [2, 3, 4, 0, 1]]


def data_of(graph: Graph) -> Data:
    return Data(edge_index=graph.edge_index, num_nodes=graph.num_nodes)


def example() -> Data:
    return Data(x=torch.rand(6, 2), edge_index=EDGES, edge_attr=torch.rand(6, 3), y=1)


def molecules(count: int) -> list[Data]:
    """Undirected graphs with different numbers of nodes and edges, and one of none."""
    out = []
    for i in range(count):
        n = 3 * (i % 4)
        edges = torch.triu(torch.rand(n, n) < 0.5, diagonal=1).nonzero().t()
        edges = torch.cat([edges, edges.flip(0)], dim=1)
        out.append(Data(x=torch.rand(n, 2), edge_index=edges, y=torch.tensor([i])))
    return out


def assert_same(a: Any, b: Any) -> None:
    assert set(a.keys()) == set(b.keys())
    for key in a.keys():  # noqa: SIM118
        one, two = a[key], b[key]
        if not isinstance(one, list):
            one, two = [one], [two]
        for x, y in zip(one, two, strict=True):
            assert torch.equal(torch.as_tensor(x), torch.as_tensor(y)), key


def test_line_graph_of_example():
    data = example()
    out = DirectedLineGraph()(data)
    assert type(data) is Data
    assert "line_edge_index" not in data
    assert isinstance(out, LineGraphData)
    assert out.line_edge_index.tolist() == LINES
    assert set(out.keys()) - {*data.keys()} == {"line_edge_index", "line_edge_checksum"}
    for key in data.keys():  # noqa: SIM118
        assert out[key] is data[key]
    assert (out.num_nodes, out.num_edges) == (6, 6)


def test_pruning_of_example():
    data = example()
    out = MultitreePruning()(data)
    assert "line_edge_index" not in data
    assert isinstance(out, LineGraphData)
    assert out.line_edge_index_pruned.tolist() == KEPT
    whole = DirectedLineGraph()(data)
    assert MultitreePruning()(whole).line_edge_index_pruned.tolist() == KEPT
    assert whole.line_edge_index.tolist() == LINES


@pytest.mark.parametrize("first", [[], [DirectedLineGraph()]])
def test_both_graphs(first):
    transform = Compose([*first, MultitreePruning()])
    out = transform(example())
    assert out.line_edge_index.tolist() == LINES
    assert out.line_edge_index_pruned.tolist() == KEPT
    batch = Batch.from_data_list([out, out])
    pruned = out.line_edge_index_pruned
    assert batch.line_edge_index_pruned.equal(torch.cat([pruned, pruned + 6], dim=1))


@given(dags())
def test_any_dag_gets_what_the_functions_say(graph: Graph):
    lines = line_graph(*graph).edge_index
    kept = multitree(lines, graph.edge_index.size(1))
    out = DirectedLineGraph()(data_of(graph))
    assert out.num_nodes == graph.num_nodes
    assert out.line_edge_index.equal(lines)
    for data in (out, data_of(graph)):
        pruned = MultitreePruning()(data)
        assert pruned.line_edge_index.equal(lines)
        assert pruned.line_edge_index_pruned.equal(lines[:, kept])


@given(st.lists(dags(), min_size=1, max_size=4), st.sampled_from(TRANSFORMS))
def test_batching_is_transforming_the_batch(items: list[Graph], transform: type):
    each = [transform()(data_of(graph)) for graph in items]
    batch = Batch.from_data_list(each)
    assert isinstance(batch, LineGraphData)
    lines = line_graph(batch.edge_index, batch.num_nodes).edge_index
    assert batch.line_edge_index.equal(lines)
    if transform is MultitreePruning:
        kept = multitree(lines, batch.num_edges)
        assert batch.line_edge_index_pruned.equal(lines[:, kept])
    for one, again in zip(each, batch.to_data_list(), strict=True):
        assert type(again) is LineGraphData
        assert_same(one, again)


@given(st.lists(dags(), min_size=1, max_size=3))
def test_batches_of_batches(items: list[Graph]):
    each = [DirectedLineGraph()(data_of(graph)) for graph in items]
    expected = Batch.from_data_list(each + each)
    inner = [Batch.from_data_list(each).to_data_list() for _ in range(2)]
    assert_same(Batch.from_data_list(inner[0] + inner[1]), expected)


def test_decomposition_into_dags():
    """A list of DAGs with different numbers of edges has a list of line graphs."""
    transform = Compose(
        [
            DAGDecomposition(4, "bfs_dense", seed=0),
            DirectedLineGraph("dag"),
            MultitreePruning("dag"),
        ]
    )
    each = [transform(data) for data in molecules(12)]
    # So it matters which entry's edges count:
    assert any(len({dag.size(1) for dag in d.dag_edge_index}) > 1 for d in each)
    for data in each:
        assert isinstance(data.dag_line_edge_index, list)
        for dag, lines, kept in zip(
            data.dag_edge_index,
            data.dag_line_edge_index,
            data.dag_line_edge_index_pruned,
            strict=True,
        ):
            assert lines.equal(line_graph(dag, data.num_nodes).edge_index)
            assert kept.equal(lines[:, multitree(lines, dag.size(1))])
    batch = Batch.from_data_list(each)
    for d, dag in enumerate(batch.dag_edge_index):
        lines = line_graph(dag, batch.num_nodes).edge_index
        assert batch.dag_line_edge_index[d].equal(lines)
        kept = multitree(lines, dag.size(1))
        assert batch.dag_line_edge_index_pruned[d].equal(lines[:, kept])
    for one, again in zip(each, batch.to_data_list(), strict=True):
        assert_same(one, again)


def test_one_dag_of_another_name():
    data = Data(x=torch.zeros(6, 1), edge_index=EDGES.flip(0), tree_edge_index=EDGES)
    out = DirectedLineGraph(prefix="tree")(data)
    assert out.tree_line_edge_index.tolist() == LINES
    out = MultitreePruning("tree")(out)
    assert out.tree_line_edge_index_pruned.tolist() == KEPT
    assert "line_edge_index" not in out
    batch = Batch.from_data_list([out, out])
    kept = torch.tensor(KEPT)
    assert batch.tree_line_edge_index_pruned.equal(torch.cat([kept, kept + 6], dim=1))


def test_earlier_line_graph_is_replaced():
    data = MultitreePruning()(example())
    data.edge_index = data.edge_index[:, 1:]
    for transform in (DirectedLineGraph(), MultitreePruning()):
        out = transform(data)
        assert out.line_edge_index.tolist() == [[0, 1, 2, 4], [2, 3, 3, 0]]
        assert data.line_edge_index.tolist() == LINES
    kept = multitree(out.line_edge_index, 5)
    assert out.line_edge_index_pruned.equal(out.line_edge_index[:, kept])


def test_line_edge_index_without_edges_is_as_in_data():
    """A name that happens to hold 'line_edge_index' is none of ours."""
    one = Data(x=torch.zeros(3, 1), my_line_edge_index=torch.tensor([[0], [2]]))
    two = LineGraphData(**one.to_dict())
    expected = Batch.from_data_list([one, one]).my_line_edge_index
    assert Batch.from_data_list([two, two]).my_line_edge_index.equal(expected)
    assert expected.tolist() == [[0, 3], [2, 5]]


class MyGraph(LineGraphData):
    pass


class Foreign(Data):
    pass


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_subclasses(transform):
    data = MyGraph(edge_index=EDGES, num_nodes=6)
    assert type(transform()(data)) is MyGraph
    with pytest.raises(TypeError, match=r"'Foreign'.*LineGraphData"):
        transform()(Foreign(edge_index=EDGES, num_nodes=6))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_bad_data(transform):
    with pytest.raises(TypeError, match=r"one by one.*'DataBatch'"):
        transform()(Batch.from_data_list([example()]))
    with pytest.raises(CycleError, match="0 -> 1 -> 0"):
        transform()(Data(edge_index=torch.tensor([[0, 1], [1, 0]]), num_nodes=2))
    with pytest.raises(ValueError, match=r"'data.dag_edge_index'.*'edge_index'"):
        transform("dag")(Data(edge_index=EDGES, num_nodes=6))


def test_an_earlier_pruned_line_graph_is_dropped():
    data = MultitreePruning()(example())
    data.edge_index = data.edge_index[:, 1:]
    assert "line_edge_index_pruned" not in DirectedLineGraph()(data)
    assert "line_edge_index_pruned" in data
