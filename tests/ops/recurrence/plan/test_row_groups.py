"""The tables of groups of rows: inverses by nothing else, in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from operators import GRAPHS, grids_of
from strategies import Batch, batches, graphs

from pyg_chimera.ops.recurrence.plan.row_groups import RowGroups
from pyg_chimera.ops.structure.symbolic_factor import symbolic_factor


def inverted(M: np.ndarray, groups: RowGroups, block: int) -> np.ndarray:
    """The inverse of a block's matrix, group by group."""
    ptr, row, lower_ptr, lower, upper_ptr, upper = (x.numpy() for x in groups[:6])
    M, own = M.copy(), range(ptr[block], ptr[block + 1])
    for g in own:
        new = M[row[g]]
        for step in lower[lower_ptr[g] : lower_ptr[g + 1]]:
            for r, k in enumerate(step):
                if k >= 0:
                    factor = new[r, k] * M[k, k]
                    new[r] -= factor * M[k]
                    new[r, k] = -factor
        for r, i in enumerate(row[g]):
            if i >= 0:
                new[r, i] = 1 / new[r, i]
                M[i] = new[r]
    for g in reversed(own):
        new = M[row[g]]
        for r, i in enumerate(row[g]):
            if i >= 0:
                new[r] = np.where(np.arange(len(M)) < i, M[i], np.arange(len(M)) == i)
                for j in upper[upper_ptr[g] : upper_ptr[g + 1], r]:
                    new[r] -= M[i, j] * M[j] if j >= 0 else 0
        for r, i in enumerate(row[g]):
            M[i] = new[r] * M[i, i] if i >= 0 else M[i]
    return M


def check(edge_index, batch, num_nodes: int, at_once: int) -> RowGroups:
    symbolic = symbolic_factor(edge_index, batch, None, num_nodes)
    groups = RowGroups.of(symbolic, torch.device("cpu"), at_once)
    A = np.zeros((num_nodes, num_nodes))
    weight = 0.2 / max(1, edge_index.size(1)) * np.arange(edge_index.size(1))
    np.add.at(A, (symbolic.edge_row, symbolic.edge_col), weight[symbolic.edge])
    steps = [0]
    for t, (a, b) in enumerate(zip(symbolic.ptr, symbolic.ptr[1:], strict=False)):
        M = np.eye(b - a) - A[a:b, a:b]
        np.testing.assert_allclose(inverted(M, groups, t), np.linalg.inv(M), atol=1e-12)
        own = slice(groups.ptr[t], groups.ptr[t + 1])
        rows = groups.row[own]
        assert sorted(rows[rows >= 0].tolist()) == list(range(b - a))
        ends = groups.lower_ptr, groups.upper_ptr
        taken = [int(x[own.stop] - x[own.start]) for x in ends]
        steps.append(sum(taken) + 2 * len(rows))
    assert groups.longest == max(steps)
    return groups


@pytest.mark.parametrize("name", GRAPHS)
def test_small_graphs(name):
    graph = GRAPHS[name]
    check(graph.edge_index, graph.graph, len(graph.graph), 4)


@settings(max_examples=25)
@given(batches(graphs(max_nodes=12)))
def test_random_batches(batch: Batch):
    check(batch.edge_index, batch.batch, batch.num_nodes, 3)


def test_fewer_steps_than_rows():
    """Rows of one height are processed together."""
    grid = grids_of((2, 40))
    one, four = (check(grid.edge_index, None, 80, rows) for rows in (1, 4))
    assert len(one.row) == 80
    assert len(four.row) < 50
    assert four.longest < one.longest
