import networkx as nx
import pytest
import torch
from hypothesis import given
from strategies import Graph, dags, graphs, to_networkx

from pyg_chimera.ops.structure import CycleError, find_cycle, topological_rank


def test_rank_of_diamond():
    edge_index = torch.tensor([[3, 3, 0, 1, 3, 3], [0, 1, 2, 2, 2, 0]])
    rank = topological_rank(edge_index, 5)
    assert rank.dtype == torch.long
    assert rank.tolist() == [1, 1, 2, 0, 0]


@given(dags())
def test_rank_is_networkx_generation(graph: Graph):
    expected = torch.zeros(graph.num_nodes, dtype=torch.long)
    generations = nx.topological_generations(to_networkx(graph, directed=True))
    for i, nodes in enumerate(generations):
        expected[nodes] = i
    assert topological_rank(*graph).equal(expected)
    assert find_cycle(*graph) is None


@given(graphs())
def test_cycle_is_one(graph: Graph):
    cycle = find_cycle(*graph)
    if cycle is None:
        assert nx.is_directed_acyclic_graph(to_networkx(graph, directed=True))
        assert topological_rank(*graph).numel() == graph.num_nodes
        return
    edges = set(map(tuple, graph.edge_index.t().tolist()))
    assert len(set(cycle)) == len(cycle) > 0
    assert cycle[0] == min(cycle)
    assert set(zip(cycle, [*cycle[1:], cycle[0]], strict=True)) <= edges
    with pytest.raises(CycleError) as info:
        topological_rank(*graph)
    assert info.value.cycle == cycle


def test_cycle_with_tails():
    # 0 -> 1 <-> ... a cycle 2 -> 4 -> 3 -> 2, reached from 0 and leaving to 5, 6.
    edge_index = torch.tensor([[0, 2, 4, 3, 3, 5], [2, 4, 3, 2, 5, 6]])
    assert find_cycle(edge_index, 7) == [2, 4, 3]
    with pytest.raises(CycleError, match="2 -> 4 -> 3 -> 2"):
        topological_rank(edge_index, 7)


def test_self_loop_is_a_cycle():
    edge_index = torch.tensor([[0, 1], [1, 1]])
    assert find_cycle(edge_index, 2) == [1]
    with pytest.raises(CycleError, match="self-loop at node 1"):
        topological_rank(edge_index, 2)


def test_long_path_and_long_cycle():
    n = 100_000
    names = torch.randperm(n)
    path = torch.stack([names[:-1], names[1:]])
    rank = topological_rank(path, n)
    assert rank[names].equal(torch.arange(n))

    closed = torch.cat([path, path[:, -1:].flip(0)], dim=1)
    assert sorted(find_cycle(closed, n)) == sorted(names[-2:].tolist())
