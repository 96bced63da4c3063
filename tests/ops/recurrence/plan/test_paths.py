"""Scans along paths: which graphs have them, and that their tables make I - A again."""

import itertools

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from operators import GRAPHS, UNDIRECTED_PATHS
from strategies import Batch, batches, graphs, paths

from pyg_chimera.ops.recurrence.plan.paths import path_scans
from pyg_chimera.ops.recurrence.plan.states import GridStates
from pyg_chimera.ops.structure.symbolic_factor import symbolic_factor


def check(edge_index: torch.Tensor, batch, num_nodes: int) -> bool:
    symbolic = symbolic_factor(edge_index, batch, None, num_nodes)
    scans, V = path_scans(symbolic), num_nodes
    graph = nx.Graph(edge_index.t().tolist())
    graph.add_nodes_from(range(V))
    graph.remove_edges_from(list(nx.selfloop_edges(graph)))
    parts = [graph.subgraph(part) for part in nx.connected_components(graph)]
    ends = [sorted(degree for _, degree in part.degree)[-1] for part in parts]
    are_paths = all(
        most <= 2 and nx.is_tree(part) for most, part in zip(ends, parts, strict=True)
    )
    assert (scans is not None) == are_paths
    if scans is None:
        return False
    assert path_scans(symbolic) is scans

    # Places are path by path, from one neighbour to the next.
    node = scans.states.reader[:V]
    assert sorted(node) == list(range(V))
    assert np.diff(scans.ptr).tolist() == [len(p) for p in along(scans.ptr, node)]
    for part in along(scans.ptr, node):
        assert set(part) in [set(x) for x in parts]
        assert all(graph.has_edge(i, j) for i, j in itertools.pairwise(part))

    # Each path is gone along there, and back but for its last place.
    states = scans.states
    assert (states.writer[:V] == node).all()
    assert (states.writer[V : 2 * V - 1] == node[1:]).all()
    assert (states.reader[V:] == node).all()
    expected = []
    for a, b in zip(scans.ptr, scans.ptr[1:], strict=False):
        expected += [list(range(a, b)), list(range(V + b - 2, V + a - 1, -1))]
    expected = [x for x in expected if x]
    assert along(states.ptr, states.state) == expected
    assert scans.entry.tolist() == [s for x in expected for s in x[1:]]
    assert states.block[0] == 0
    assert states.block[-1] == len(expected)

    # The entries of I - A, from d, w and u by place.
    weight = np.random.default_rng(0).uniform(0.1, 1, edge_index.size(1))
    parts = np.zeros(3 * V)
    np.add.at(parts, scans.slot, weight)
    d, w, u = parts.reshape(3, V)
    A, B = np.zeros((2, V, V))
    np.add.at(A, tuple(edge_index.flip(0).numpy()), weight)
    B[node, node] = d
    B[node[1:], node[:-1]] += w[1:]
    B[node[:-1], node[1:]] += u[1:]
    np.testing.assert_allclose(A, B, atol=1e-12)
    assert (w[scans.ptr[:-1]] == 0).all()
    return True


def along(ptr: np.ndarray, values: np.ndarray) -> list[list[int]]:
    return [values[a:b].tolist() for a, b in itertools.pairwise(ptr)]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(batch=batches(graphs(max_nodes=5, max_edges=4)))
def test_random_batches(batch: Batch):
    check(batch.edge_index, batch.batch, batch.num_nodes)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(batch=batches(paths(max_nodes=6, undirected=True)))
def test_batches_of_paths(batch: Batch):
    for hint in (batch.batch, None):
        assert check(batch.edge_index, hint, batch.num_nodes)


@pytest.mark.parametrize("name", GRAPHS)
def test_literal_graphs(name):
    batch, edge_index = GRAPHS[name][:2]
    check(edge_index, batch, len(batch))


@pytest.mark.parametrize("name", UNDIRECTED_PATHS)
def test_literal_paths(name):
    batch, edge_index = UNDIRECTED_PATHS[name][:2]
    assert check(edge_index, batch, len(batch))


@pytest.mark.parametrize("on_nodes", [False, True])
def test_numbers_beyond_32_bits(on_nodes):
    """Of grids whose states nobody lists."""
    side, orientations = 50_000, (0, 1, 2, 3)
    found = GridStates((side, side, 1, side), orientations, on_nodes)
    edges = [2 * side * (side - 1), side - 1]
    states = [side * side, side] if on_nodes else edges
    lines = [2 * side * (side - 2) + 2 * (side - 1) ** 2, side - 2]
    assert found.sizes.tolist() == [4 * x for x in states]
    assert found.entries.tolist() == [4 * x for x in (edges if on_nodes else lines)]
    assert found.grids.first.tolist() == [0, side * side]
    assert found.sizes[0] > 2**32
