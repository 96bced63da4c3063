from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from strategies import Batch, Graph, batches, dags, graphs

from pyg_chimera.ops import CycleError, line_graph
from pyg_chimera.ops.recurrence.plan.states import (
    GridStates,
    StateGraph,
    edge_states,
    node_states,
)


def check(made: StateGraph, edges: torch.Tensor, block: torch.Tensor) -> None:
    """Everything that is promised of edges between states, from the definitions."""
    num_states = made.state.shape[0]
    assert sorted(made.state) == list(range(num_states))
    position = np.empty(num_states, np.int64)
    position[made.state] = np.arange(num_states)
    tail, head = position[edges.numpy()]
    assert (tail < head).all()

    # Blocks, and their components, lie one after the other.
    owner = np.searchsorted(made.ptr, np.arange(num_states), side="right") - 1
    assert (np.asarray(block)[made.state] == owner).all()
    assert made.ptr[-1] == made.component_ptr[-1] == num_states
    assert (made.component_ptr[made.block_component] == made.ptr).all()
    component = np.searchsorted(made.component_ptr, np.arange(num_states), "right") - 1
    assert (component[tail] == component[head]).all()
    for c, bandwidth in enumerate(made.bandwidth):
        lengths = (head - tail)[component[tail] == c]
        assert bandwidth == lengths.max(initial=0)

    # Parents and children, ascending.
    ptr, parent, edge = made.parents
    into = np.repeat(np.arange(num_states), np.diff(ptr))
    assert sorted(edge) == list(range(edges.size(1)))
    assert (head[edge] == into).all()
    assert (tail[edge] == parent).all()
    pairs = list(zip(into, parent, strict=True))
    assert pairs == sorted(pairs)
    ptr, child, entry = made.children
    out = np.repeat(np.arange(num_states), np.diff(ptr))
    assert (parent[entry] == out).all()
    assert (into[entry] == child).all()

    # Nodes of the blocks.
    for b in range(len(made.sizes)):
        states = slice(made.ptr[b], made.ptr[b + 1])
        nodes = made.nodes.node[made.nodes.ptr[b] : made.nodes.ptr[b + 1]]
        assert (
            nodes[made.nodes.writer[states]] == made.writer[made.state[states]]
        ).all()
        assert (
            nodes[made.nodes.reader[states]] == made.reader[made.state[states]]
        ).all()


def blocks(batch: torch.Tensor) -> torch.Tensor:
    return batch.unique(return_inverse=True)[1]


@settings(max_examples=60, derandomize=True, deadline=None)
@given(batch=batches(dags(max_nodes=8)))
def test_states_of_nodes_and_edges(batch: Batch):
    edge_index, num_nodes = batch.edge_index, batch.num_nodes
    made = node_states(edge_index, batch.batch, None, num_nodes)
    check(made, edge_index, blocks(batch.batch))
    lines = line_graph(edge_index, num_nodes).edge_index
    made = edge_states(edge_index, lines, batch.batch, num_nodes, 1)
    check(made, lines, blocks(batch.batch)[edge_index[0]])
    assert (made.writer == edge_index[0].numpy()).all()
    assert (made.reader == edge_index[1].numpy()).all()
    made = edge_states(edge_index, lines, None, num_nodes, 2)
    assert made.state.shape[0] == 2 * edge_index.size(1)
    assert made.parents.entry.shape[0] == 4 * lines.size(1)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(graph=graphs(max_nodes=6))
def test_cycles_are_named(graph: Graph):
    try:
        made = node_states(graph.edge_index, None, None, graph.num_nodes)
    except CycleError as error:
        ends = [*error.cycle, error.cycle[0]]
        edges = set(map(tuple, graph.edge_index.t().tolist()))
        assert set(pairwise(ends)) <= edges
    else:
        assert made.num_nodes == graph.num_nodes


@pytest.mark.parametrize("orientations", [1, 2, 4])
def test_states_of_grids(orientations):
    chosen = tuple(range(orientations))
    structure = GridStates((3, 4, 1, 1, 2, 1), chosen, on_nodes=False)
    made = structure.graph
    assert made.num_nodes == 15
    # Edges along rows and columns, in each orientation.
    assert made.sizes.tolist() == [17 * orientations, 0, orientations]
    assert made.sizes.tolist() == structure.sizes.tolist()
    assert made.entries.tolist() == structure.entries.tolist()
    assert not structure.are_paths
    assert GridStates((1, 5, 3, 1), chosen, on_nodes=False).are_paths
    source, mark, transition = made.gates
    assert (source // (2 * orientations) == made.writer).all()
    assert (mark // (2 * orientations) == made.reader).all()
    assert len(set(source)) == len(source)
    assert len(set(transition)) == len(transition) == len(made.parents.entry)
    assert (abs(made.writer - made.reader)[: 17 * orientations] <= 4).all()


@pytest.mark.parametrize("orientations", [(0,), (3, 1), (0, 1, 2, 3)])
def test_states_of_nodes_of_grids(orientations):
    structure = GridStates((3, 4, 1, 1, 2, 1), orientations, on_nodes=True)
    made, times = structure.graph, len(orientations)
    assert made.num_nodes == 15
    assert made.sizes.tolist() == [12 * times, times, 2 * times]
    assert made.sizes.tolist() == structure.sizes.tolist()
    assert made.entries.tolist() == structure.entries.tolist()
    assert not structure.are_paths
    assert GridStates((1, 5, 3, 1), orientations, on_nodes=True).are_paths
    assert (made.writer == made.reader).all()
    source, mark, transition = made.gates
    assert mark is None
    assert sorted(source) == list(range(15 * times))
    assert (source // times == made.writer).all()
    # The gates of an edge are those of the node that it leads to.
    edge, into = made.parents.entry, made.state[made.parents.row]
    assert (transition[edge] // (2 * times) == made.writer[into]).all()
    assert (transition[edge] // 2 == source[into]).all()
    assert len(set(transition)) == len(transition) == len(edge)


def test_errors():
    edges = torch.tensor([[0, 1, 2], [1, 2, 3]])
    with pytest.raises(ValueError, match=r"from node 0 \(rank 5\) to node 1"):
        node_states(edges, None, torch.tensor([5, 1, 2, 3]), 4)
    with pytest.raises(ValueError, match=r"be \[nodes\] = \[4\], got \[3\]"):
        node_states(edges, None, torch.arange(3), 4)
    with pytest.raises(CycleError, match="0 -> 1 -> 0"):
        node_states(torch.tensor([[0, 1], [1, 0]]), None, torch.arange(2), 2)
