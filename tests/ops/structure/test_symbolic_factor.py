import numpy as np
import pytest
import torch
from hypothesis import given, settings
from operators import GRAPHS
from strategies import Batch, batches, graphs

from pyg_chimera.ops.structure.symbolic_factor import SymbolicFactor, symbolic_factor


def check(made: SymbolicFactor, edge_index, num_nodes: int, batch) -> None:
    """Everything that is promised, from the definitions."""
    V, E, F = num_nodes, edge_index.size(1), made.num_entries
    assert made.num_nodes == V
    for name, x in vars(made).items():
        assert name == "tables" or x.dtype == np.int64, name

    # Blocks: positions in a row, nodes of a graph together, no edge between two.
    assert made.ptr[0] == 0
    assert made.ptr[-1] == V
    assert (made.sizes > 0).all()
    assert sorted(made.node) == list(range(V))
    position = np.empty(V, np.int64)
    position[made.node] = np.arange(V)
    block = np.searchsorted(made.ptr, position, side="right") - 1
    source, target = edge_index.numpy()
    assert (block[source] == block[target]).all()
    if batch is not None:
        labels = {(int(g), int(b)) for g, b in zip(batch, block, strict=True)}
        graphs = {g for g, _ in labels}
        assert len(labels) == len(graphs) == len(made.sizes)

    # The pattern of L by rows and by columns.
    rows = np.repeat(np.arange(V), np.diff(made.lower_ptr))
    assert (made.lower_col < rows).all()
    lower = list(zip(rows, made.lower_col, strict=True))
    assert lower == sorted(lower)
    columns = np.repeat(np.arange(V), np.diff(made.upper_ptr))
    upper = list(zip(columns, made.upper_row, strict=True))
    assert upper == sorted(upper)
    for (j, i), x in zip(upper, made.upper_entry, strict=True):
        assert lower[x] == (i, j)
    assert len(made.upper_entry) == F

    # Subtrees of the elimination tree are contiguous.
    parent = np.full(V, V)
    np.minimum.at(parent, columns, made.upper_row)
    first = np.arange(V)
    for i in range(V):
        if parent[i] < V:
            first[parent[i]] = min(first[parent[i]], first[i])
    for i in range(V):
        for j in range(first[i], i):
            assert parent[j] <= i

    # Edges, and where each stands in I - A.
    assert sorted(made.edge) == list(range(E))
    assert (made.edge_row == position[target[made.edge]]).all()
    assert (made.edge_col == position[source[made.edge]]).all()
    for t in range(len(made.sizes)):
        edges = made.edge[made.edge_ptr[t] : made.edge_ptr[t + 1]]
        assert (block[source[edges]] == t).all()
    assert made.edge_ptr[-1] == E
    for e in range(E):
        i, j, slot = position[target[e]], position[source[e]], made.slot[e]
        if slot < V:
            assert i == j == slot
        elif slot < V + F:
            assert lower[slot - V] == (i, j)
        else:
            assert lower[slot - V - F] == (j, i)
    assert made.entries.sum() == F
    assert made.updates.sum() == (np.diff(made.upper_ptr) ** 2).sum()
    if F:
        # No more entries than the filled graph has: elimination in order of position.
        assert len(set(lower)) == F
        neighbours = {i: set() for i in range(V)}
        for j, i in zip(position[source], position[target], strict=True):
            if i != j:
                neighbours[min(i, j)].add(max(i, j))
        for k in range(V):
            for i in neighbours[k]:
                neighbours[i] |= {x for x in neighbours[k] if x > i}
        assert set(lower) == {(i, k) for k in range(V) for i in neighbours[k]}


@settings(max_examples=60, derandomize=True, deadline=None)
@given(batch=batches(graphs(max_nodes=8)))
def test_random_batches(batch: Batch):
    edge_index, num_nodes = batch.edge_index, batch.num_nodes
    for hint in (batch.batch, None):
        made = symbolic_factor(edge_index, hint, None, num_nodes)
        check(made, edge_index, num_nodes, hint)
    rank = torch.randint(5, (num_nodes,))
    made = symbolic_factor(edge_index, batch.batch, rank, num_nodes)
    check(made, edge_index, num_nodes, batch.batch)
    # Eliminated in this order, or in one with the same factors.
    ranks = rank.numpy()[made.node]
    later = np.repeat(np.arange(num_nodes), np.diff(made.lower_ptr))
    assert (ranks[made.lower_col] <= ranks[later]).all()


@pytest.mark.parametrize("graph", GRAPHS)
def test_literal_graphs(graph):
    batch, edge_index = GRAPHS[graph][:2]
    for hint in (batch, None):
        made = symbolic_factor(edge_index, hint, None, len(batch))
        check(made, edge_index, len(batch), hint)
        assert made.num_entries <= 2 * edge_index.size(1)


def test_errors():
    edges = torch.tensor([[0, 1, 2], [1, 2, 3]])
    with pytest.raises(ValueError, match=r"be \[nodes\] = \[4\], got \[3\]"):
        symbolic_factor(edges, None, torch.arange(3), 4)
    with pytest.raises(ValueError, match="from node 2 of graph 0 to node 3"):
        symbolic_factor(edges, torch.tensor([0, 0, 0, 1]), None, 4)
    with pytest.raises(ValueError, match="got 9"):
        symbolic_factor(torch.tensor([[0], [9]]), None, None, 4)
