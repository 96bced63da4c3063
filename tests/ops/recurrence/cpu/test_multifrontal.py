import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Batch, batches, graphs

from pyg_chimera.ops.recurrence.cpu import small_fronts
from pyg_chimera.ops.recurrence.cpu.multifrontal import factorize
from pyg_chimera.ops.structure.supernodes import supernodes
from pyg_chimera.ops.structure.symbolic_factor import symbolic_factor


def grid_edges(side: int) -> torch.Tensor:
    node = torch.arange(side * side).view(side, side)
    pairs = torch.cat([
        torch.stack([node[:, :-1].flatten(), node[:, 1:].flatten()]),
        torch.stack([node[:-1].flatten(), node[1:].flatten()]),
    ], dim=1)  # fmt: skip
    return torch.cat([pairs, pairs.flip(0)], dim=1)


def assert_factors(edge_index, num_nodes, batch, scale, dtype=np.float64, heads=2):
    """Panels are those of the dense factors, and so is the growth."""
    symbolic = symbolic_factor(edge_index, batch, None, num_nodes)
    random = np.random.default_rng(edge_index.size(1))
    size = edge_index.size(1), heads
    weight = (scale * random.standard_normal(size)).astype(dtype)
    panel, growth = factorize(symbolic, weight)
    nodes, largest = supernodes(symbolic), 1.0
    position = np.empty(num_nodes, np.int64)
    position[symbolic.node] = np.arange(num_nodes)
    source, target = position[edge_index.numpy()]
    root = symbolic.roots()
    for h in range(heads):
        A = np.eye(num_nodes)
        np.subtract.at(A, (target, source), weight[:, h].astype(float))
        L, U = np.eye(num_nodes), A.copy()
        for k in range(num_nodes):
            L[k + 1 :, k] = U[k + 1 :, k] / U[k, k]
            U[k + 1 :] -= np.outer(L[k + 1 :, k], U[k])
        for x in range(len(nodes.leaf)):
            s = np.arange(nodes.ptr[x], nodes.ptr[x + 1])
            r = nodes.row[nodes.row_ptr[x] : nodes.row_ptr[x + 1]]
            found = panel[h, nodes.panel_ptr[x] : nodes.panel_ptr[x + 1]]
            E, W = np.split(found, [len(s) * len(r)])
            L_ss, U_ss = L[np.ix_(s, s)], U[np.ix_(s, s)]
            U_inverse = np.linalg.inv(U_ss)
            expected = [
                L[np.ix_(r, s)] @ np.linalg.inv(L_ss),
                U_inverse @ np.linalg.inv(L_ss),
                U_inverse @ U[np.ix_(s, r)],
            ]
            tolerance = 1e-9 if dtype == np.float64 else 1e-5
            np.testing.assert_allclose(
                E.reshape(len(r), len(s)), expected[0], atol=tolerance * growth
            )
            np.testing.assert_allclose(
                W.reshape(len(s), -1), np.hstack(expected[1:]), atol=tolerance * growth
            )
        rows, full = np.abs(L) @ np.abs(np.triu(U)), np.abs(A)
        beside = full - np.diag(np.diag(full))
        for component in np.unique(root):
            at = root == component
            bound = np.diag(full)[at] * (1 + 1e-12)
            by_row, by_column = beside[at].sum(1), beside[:, at].sum(0)
            if (by_row > bound).any() and (by_column > bound).any():
                norm = full[at].sum(1).max()
                largest = max(largest, rows[at].sum(1).max() / norm)
    np.testing.assert_allclose(growth, largest, rtol=1e-6)
    return symbolic


@settings(max_examples=60, derandomize=True, deadline=None)
@given(batch=batches(graphs(max_nodes=8)), scale=st.sampled_from([0.1, 0.6]))
def test_random_batches(batch: Batch, scale: float):
    for hint in (batch.batch, None):
        assert_factors(batch.edge_index, batch.num_nodes, hint, scale)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [0.05, 0.3])
def test_grids(scale, dtype):
    """With supernodes above each other."""
    assert_factors(grid_edges(14), 196, None, scale, dtype)


@pytest.mark.parametrize("heads", [1, 3, 9])
def test_heads(heads):
    """Small fronts hold several: more than one vector of them here, or a part."""
    assert_factors(grid_edges(9), 81, None, 0.05, heads=heads)


@pytest.mark.parametrize("most", [0, 8, 12])
def test_which_fronts_are_small(most, monkeypatch):
    """None of them, or some below others that are not."""
    monkeypatch.setattr(small_fronts, "_MOST", most)
    symbolic = assert_factors(grid_edges(14), 196, None, 0.05)
    trees, *_ = symbolic.tables[factorize]
    assert trees.side <= most
    assert len(trees.root) > 1 or most == 0


def test_heads_that_are_not_dominant():
    """Beside others that are, in the same vectors."""
    edges, random = grid_edges(9), np.random.default_rng(0)
    symbolic = symbolic_factor(edges, None, None, 81)
    weight = random.standard_normal((edges.size(1), 4)) * [0.05, 0.3, 0.05, np.nan]
    panels, growth = factorize(symbolic, weight)
    assert growth == np.inf  # of the last head
    for h in range(3):
        alone, _ = factorize(symbolic, weight[:, h : h + 1].copy())
        np.testing.assert_allclose(panels[h], alone[0], rtol=1e-12)


def test_a_wide_front():
    """Of more columns than are eliminated together."""
    edges = torch.combinations(torch.arange(90)).t()
    assert_factors(torch.cat([edges, edges.flip(0)], 1), 95, None, 0.02)


def test_pivots_that_are_no_use():
    """I - A is singular: the growth is infinite."""
    symbolic = symbolic_factor(torch.tensor([[0, 1], [1, 0]]), None, None, 2)
    assert factorize(symbolic, np.ones((2, 1)))[1] == np.inf
