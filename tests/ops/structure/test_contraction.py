import time

import networkx as nx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Graph, batches, dags, paths
from torch import Tensor

from pyg_chimera.ops import CycleError
from pyg_chimera.ops.structure import contracted_dag


def edges_of(edge_index: Tensor) -> list[tuple[int, int]]:
    return sorted(map(tuple, edge_index.t().tolist()))


def walked(edge_index: Tensor, kept: list[bool]) -> list[tuple[int, int]]:
    """By a search from each kept node that goes no further than to the next ones."""
    graph = nx.DiGraph(edges_of(edge_index))
    graph.add_nodes_from(range(len(kept)))
    found = set()
    for j in (j for j, keep in enumerate(kept) if keep):
        waiting, seen = list(graph.successors(j)), set()
        while waiting:
            i = waiting.pop()
            if kept[i]:
                found.add((j, i))
            elif i not in seen:
                waiting += graph.successors(i)
            seen.add(i)
    return sorted(found)


def masks(num_nodes: int) -> st.SearchStrategy[list[bool]]:
    return st.lists(st.booleans(), min_size=num_nodes, max_size=num_nodes)


@pytest.mark.parametrize(
    ("edges", "kept", "expected"),
    [
        ([(0, 1), (1, 2), (2, 3)], [1, 0, 0, 1], [(0, 3)]),
        ([(0, 1), (0, 2), (1, 3), (2, 3)], [1, 0, 0, 1], [(0, 3)]),  # a diamond, once
        ([(0, 1), (0, 2), (1, 3), (2, 3)], [1, 1, 0, 1], [(0, 1), (0, 3), (1, 3)]),
        ([(0, 2), (1, 2), (2, 3), (2, 4)], [1, 1, 0, 1, 1],
         [(0, 3), (0, 4), (1, 3), (1, 4)]),
        ([(0, 1), (0, 1), (1, 2)], [1, 1, 0], [(0, 1)]),
        ([(2, 1), (1, 0)], [1, 0, 1], [(2, 0)]),
        ([(0, 1), (1, 2)], [0, 1, 1], [(1, 2)]),  # nothing comes from before
        ([(0, 1)], [0, 0], []),
    ],
)  # fmt: skip
def test_small_dags(edges, kept, expected):
    edge_index = torch.tensor(edges).t()
    out = contracted_dag(edge_index, torch.tensor(kept).bool())
    assert out.dtype == torch.long
    assert edges_of(out) == expected


@given(st.data())
def test_nearest_kept_ancestors(data):
    graph: Graph = data.draw(dags(max_nodes=12))
    kept = data.draw(masks(graph.num_nodes))
    out = contracted_dag(graph.edge_index, torch.tensor(kept, dtype=torch.bool))
    assert edges_of(out) == walked(graph.edge_index, kept)
    assert (out[1].diff() >= 0).all()
    # Who reaches whom is as it was, and so it is no matter in how many steps.
    more = data.draw(masks(graph.num_nodes))
    fewer = torch.tensor(
        [x and y for x, y in zip(kept, more, strict=True)], dtype=torch.bool
    )
    assert edges_of(contracted_dag(out, fewer)) == edges_of(
        contracted_dag(graph.edge_index, fewer)
    )


@given(st.data())
def test_paths_remain_paths(data):
    num_nodes = data.draw(st.integers(1, 10))
    name = torch.tensor(data.draw(st.permutations(range(num_nodes))))
    kept = torch.tensor(data.draw(masks(num_nodes)))
    out = contracted_dag(torch.stack([name[:-1], name[1:]]), kept)
    left = name[kept[name]]
    assert edges_of(out) == edges_of(torch.stack([left[:-1], left[1:]]))


@given(st.data())
def test_graphs_remain_apart(data):
    batch = data.draw(batches(st.one_of(dags(max_nodes=6), paths(max_nodes=6))))
    kept = torch.tensor(data.draw(masks(batch.num_nodes)), dtype=torch.bool)
    out = contracted_dag(batch.edge_index, kept)
    parts = [
        place[contracted_dag(graph.edge_index, kept[place])]
        for place, graph in zip(batch.node_map, batch.graphs, strict=True)
    ]
    expected = torch.cat([out[:, :0], *parts], dim=1)
    assert edges_of(out) == edges_of(expected)


def test_all_kept_or_none():
    edge_index = torch.tensor([[3, 3, 0, 1, 3, 3, 0], [0, 1, 2, 2, 2, 0, 1]])
    everything = torch.ones(5, dtype=torch.bool)
    out = contracted_dag(edge_index.int(), everything)
    assert edges_of(out) == edges_of(edge_index.unique(dim=1))
    assert contracted_dag(edge_index, ~everything).shape == (2, 0)
    assert contracted_dag(edge_index[:, :0], everything[:0]).shape == (2, 0)


def test_sets_of_nodes_with_one_parent_are_shared():
    """And not copied, so that time is linear."""
    n = 200_000
    name = torch.randperm(n)
    kept = torch.zeros(n, dtype=torch.bool)
    kept[name[:: n // 4]] = True
    contracted_dag(torch.empty(2, 0, dtype=torch.long), kept)  # compiled
    begin = time.process_time()
    out = contracted_dag(torch.stack([name[:-1], name[1:]]), kept)
    assert time.process_time() - begin < 2
    assert out.shape == (2, 3)

    # 1,000 roots meet in one node that is left out, behind which a long path begins.
    edges = torch.cat(
        [
            torch.stack([torch.arange(1000), torch.full((1000,), 1000)]),
            torch.stack([torch.arange(1000, n - 1), torch.arange(1001, n)]),
        ],
        dim=1,
    )
    kept = torch.arange(n) < 1000
    kept[-1] = True
    begin = time.process_time()
    out = contracted_dag(edges, kept)
    assert time.process_time() - begin < 2
    assert out.shape == (2, 1000)


@pytest.mark.parametrize(
    ("edges", "kept", "error", "match"),
    [
        ([[0, 1], [1, 0]], torch.ones(2).bool(), CycleError, "0 -> 1 -> 0"),
        ([[0], [2]], torch.ones(2).bool(), ValueError, "'edge_index' must hold"),
        ([[0], [1]], torch.ones(2), TypeError, "'kept' must be a tensor of bool.*32"),
        ([[0], [1]], [True, True], TypeError, "'kept' must be a tensor.*'list'"),
        ([[0], [1]], torch.ones(2, 1).bool(), ValueError, r"'kept'.*shape \[2, 1\]"),
        ([[0.0], [1.0]], torch.ones(2).bool(), TypeError, "'edge_index' must hold"),
    ],
)
def test_errors(edges, kept, error, match):
    with pytest.raises(error, match=match):
        contracted_dag(torch.tensor(edges), kept)
