import networkx as nx
import pytest
import torch
from hypothesis import given
from strategies import Graph, dags

from pyg_chimera.ops.structure import parent_scale
from pyg_chimera.ops.structure.grid import grid_dag, grid_edges
from pyg_chimera.ops.structure.parent_scale import grid_parent_scale

LARGEST_GROWTH = 2.0**56


def expected(
    edge_index: torch.Tensor, num_nodes: int, largest: float = LARGEST_GROWTH
) -> torch.Tensor:
    """By the definition, node by node."""
    graph = nx.MultiDiGraph()
    graph.add_nodes_from(range(num_nodes))
    graph.add_edges_from(edge_index.t().tolist())
    scale, growth = [0.0] * num_nodes, [1.0] * num_nodes
    for i in nx.topological_sort(graph):
        parents = [j for j, _ in graph.in_edges(i)]
        if parents:
            total = sum(growth[j] for j in parents)
            scale[i] = min(len(parents) ** -0.5, largest / total)
            growth[i] = min(1 + scale[i] * total, largest)
    return torch.tensor(scale, dtype=torch.double)


def doubled_path(length: int) -> torch.Tensor:
    """Two edges from each node to the next."""
    node = torch.arange(length - 1)
    return torch.stack([node, node + 1]).repeat(1, 2)


@given(dags())
def test_roots_of_the_number_of_parents(graph: Graph):
    scale = parent_scale(*graph)
    assert scale.dtype == torch.float64
    torch.testing.assert_close(scale, expected(*graph))
    parents = torch.bincount(graph.edge_index[1], minlength=graph.num_nodes)
    wanted = torch.where(parents > 0, parents.clamp(min=1).double().rsqrt(), 0)
    torch.testing.assert_close(scale, wanted)


@pytest.mark.parametrize("length", [100, 200, 3000])
def test_growth_is_bounded(length: int):
    edge_index = doubled_path(length)
    scale = parent_scale(edge_index, length)
    torch.testing.assert_close(scale, expected(edge_index, length))
    state = torch.ones(length, dtype=torch.float64)
    for i in range(1, length):
        state[i] += 2 * scale[i] * state[i - 1]
    assert state.max() < 1.01 * LARGEST_GROWTH
    assert (scale[-1] < 0.6) == (length > 120)
    assert scale[-1] > 0.49


def test_a_smaller_bound():
    edge_index = doubled_path(100)
    scale = parent_scale(edge_index, 100, 3)
    torch.testing.assert_close(scale, expected(edge_index, 100, 8.0))
    assert scale[-1] == 0.5


def test_other_graphs_and_descendants_change_nothing():
    long, short = doubled_path(300), doubled_path(150)
    both = parent_scale(torch.cat([short, long + 150], 1), 450)
    assert both[:150].equal(parent_scale(long, 300)[:150])
    assert both[150:].equal(parent_scale(long, 300))


def test_cycles_have_the_number_of_parents():
    scale = parent_scale(torch.tensor([[0, 1, 2, 2, 0], [1, 2, 1, 3, 3]]), 4)
    wanted = torch.tensor([0, 0.5**0.5, 1, 0.5**0.5], dtype=torch.double)
    torch.testing.assert_close(scale, wanted)


@pytest.mark.parametrize("num_dags", [1, 2, 4])
def test_grids(num_dags: int):
    assert grid_parent_scale(50, 60, num_dags, 3000) is None  # 108 steps
    torch.testing.assert_close(*_with_and_without_limit(50, 60))
    sizes = [(4, 5), (3, 130), (90, 30)]
    height, width = torch.tensor(sizes).unbind(1)
    num_nodes = sum(h * w for h, w in sizes)
    scale = grid_parent_scale(height, width, num_dags, num_nodes)
    assert scale is not None
    for (h, w), own in zip(sizes, scale.split([h * w for h, w in sizes]), strict=True):
        edge_index, _ = grid_edges(h, w)
        for d in range(num_dags):
            kept, _ = grid_dag(edge_index, h, w, d)
            torch.testing.assert_close(own[:, d], expected(edge_index[:, kept], h * w))


def _with_and_without_limit(
    height: int, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    edge_index, _ = grid_edges(height, width)
    edge_index = edge_index[:, grid_dag(edge_index, height, width, 0)[0]]
    parents = torch.bincount(edge_index[1], minlength=height * width)
    plain = torch.where(parents > 0, parents.clamp(min=1).double().rsqrt(), 0)
    return expected(edge_index, height * width), plain
