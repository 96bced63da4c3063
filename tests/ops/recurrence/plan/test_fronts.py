"""The tables of fronts: elimination and sweeps by nothing else, in numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from operators import GRAPHS, grids_of
from strategies import Batch, batches, graphs

from pyg_chimera.ops.recurrence.plan import fronts as module
from pyg_chimera.ops.recurrence.plan.fronts import Fronts
from pyg_chimera.ops.structure.supernodes import Merging
from pyg_chimera.ops.structure.symbolic_factor import symbolic_factor

TILE = 4


def solved(fronts: Fronts, weight: np.ndarray, right: np.ndarray) -> np.ndarray:
    """(I - A)^-1 of a vector, front by front."""
    pivots, size, first, offset, child_ptr, child, source, place, node = (
        x.numpy() for x in fronts[:9]
    )
    F, width = np.zeros(fronts.total), -(-size // TILE) * TILE
    np.subtract.at(F, fronts.entry.numpy(), weight)
    matrices = [
        F[a : a + w * w].reshape(w, w) for a, w in zip(offset, width, strict=True)
    ]
    vectors = [np.zeros(w) for w in width]
    nodes = [node[a : a + n] for a, n in zip(first, size, strict=True)]
    for x, M in enumerate(matrices):
        s, own = pivots[x], np.arange(pivots[x])
        M[own, own] += 1
        vectors[x][:s] = right[nodes[x][:s]]
        for y in range(child_ptr[x], child_ptr[x + 1]):
            assert child[y] < x
            taken = place[source[y] : source[y] + width[x]]
            here, there = np.flatnonzero(taken >= 0), taken[taken >= 0]
            assert (nodes[x][here] == nodes[child[y]][there]).all()
            assert len(there) == size[child[y]] - pivots[child[y]]
            M[np.ix_(here, here)] += matrices[child[y]][np.ix_(there, there)]
            vectors[x][here] += vectors[child[y]][there]
        assert (M[size[x] :] == 0).all()
        assert (M[:, size[x] :] == 0).all()
        E = M[s:, :s] @ np.linalg.inv(M[:s, :s])
        M[s:, s:] -= E @ M[:s, s:]
        vectors[x][s:] -= E @ vectors[x][:s]
    out = np.full(len(right), np.nan)
    for x in reversed(range(len(size))):
        s, M = pivots[x], matrices[x]
        known = out[nodes[x][s:]]
        rest = vectors[x][:s] - M[:s, s : size[x]] @ known
        out[nodes[x][:s]] = np.linalg.solve(M[:s, :s], rest)
    return out


def check(edge_index, batch, num_nodes: int, merging: Merging) -> Fronts:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_MERGING", merging)
        symbolic = symbolic_factor(edge_index, batch, None, num_nodes)
        fronts = Fronts.of(symbolic, torch.device("cpu"), TILE)
    col, row = edge_index.numpy()
    generator = np.random.default_rng(0)
    weight = generator.uniform(0.1, 0.9, len(row)) / np.bincount(row)[row]
    right = generator.standard_normal(num_nodes)
    A = np.zeros((num_nodes, num_nodes))
    np.add.at(A, (row, col), weight)
    want = np.linalg.solve(np.eye(num_nodes) - A, right)
    np.testing.assert_allclose(solved(fronts, weight, right), want, atol=1e-12)
    assert (fronts.ends == edge_index).all()

    # Each row of tiles is a task of its level; those with columns come first.
    pivots, size = fronts.pivots.numpy(), fronts.size.numpy()
    front, tile = fronts.task_front.numpy(), fronts.task_row.numpy()
    found = set(zip(front.tolist(), tile.tolist(), strict=True))
    assert found == {(x, i) for x, n in enumerate(size) for i in range(-(-n // TILE))}
    assert len(found) == len(front) == sum(x.tasks for x in fronts.levels)
    level = np.full(len(size), -1)
    for number, x in enumerate(fronts.levels):
        mine = slice(x.first, x.first + x.tasks)
        level[front[mine]] = number
        has_columns = tile[mine] * TILE < pivots[front[mine]]
        assert has_columns.tolist() == sorted(has_columns, reverse=True)
        assert has_columns.sum() == x.pivot_tasks
        columns = -(-pivots[front[mine]] // TILE)
        assert x.steps == max(columns[size[front[mine]] > TILE], default=0)
    parent = np.repeat(np.arange(len(size)), np.diff(fronts.child_ptr))
    assert (level[fronts.child.numpy()] < level[parent]).all()
    return fronts


MERGINGS = [Merging(1, 0, 0), Merging(4, 1, 10), module._MERGING]


@settings(max_examples=40, derandomize=True, deadline=None)
@given(batch=batches(graphs(max_nodes=8)))
def test_random_batches(batch: Batch):
    for merging in MERGINGS:
        check(batch.edge_index, batch.batch, batch.num_nodes, merging)


@pytest.mark.parametrize("merging", MERGINGS)
@pytest.mark.parametrize("graph", GRAPHS)
def test_literal_graphs(graph, merging):
    batch, edge_index = GRAPHS[graph][:2]
    check(edge_index, batch, len(batch), merging)


def test_grids():
    """Levels are few, and no more for several than for one."""
    one, two = (grids_of(*[(20, 20)] * n) for n in (1, 2))
    for merging in MERGINGS:
        fronts = [check(*x[1::-1], len(x.graph), merging) for x in (one, two)]
        assert len(fronts[0].levels) == len(fronts[1].levels)
    assert len(fronts[0].levels) <= 4
