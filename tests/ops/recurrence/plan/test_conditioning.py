"""When float32 is not enough for a resolvent."""

import pytest
import torch
from asserts import assert_near
from torch_geometric.utils import to_undirected

from pyg_chimera.ops import resolvent_mix, unchecked
from pyg_chimera.ops.recurrence import resolvent_mix as op
from pyg_chimera.ops.recurrence.plan import conditioning
from pyg_chimera.ops.recurrence.plan.conditioning import (
    has_small_sums,
    is_ill_conditioned,
)


def graph(margin: float, heads: int = 2) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Two components; rows sum to 1 - margin at the first two nodes, else to a half."""
    edge_index = to_undirected(torch.tensor([[0, 1, 2, 2, 5, 6], [1, 2, 3, 4, 6, 7]]))
    source, target = edge_index
    weight = torch.rand(edge_index.size(1), heads, dtype=torch.double)
    # The two pass nearly everything to each other.
    weight[(source < 2) & (target < 2)] *= 1e6 / margin
    total = torch.zeros(8, heads).double().index_add(0, target, weight)
    rows = torch.full((8, 1), 0.5).double()
    rows[:2] = 1 - margin
    return edge_index, weight * (rows / total)[target], 8


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("margin", [0.1, 1e-3, 1e-6, 1e-8, 1e-10])
def test_it_bounds_row_or_column_sums(margin, transposed):
    edge_index, weight, num_nodes = graph(margin)
    edge_index = edge_index.flip(0) if transposed else edge_index
    A = torch.zeros(2, num_nodes, num_nodes, dtype=torch.double)
    A[:, edge_index[1], edge_index[0]] = weight.t()
    L = torch.linalg.inv(torch.eye(num_nodes).double() - A)
    largest = L.sum(2 - transposed).max()
    found = is_ill_conditioned(edge_index, weight, num_nodes)
    assert found == (largest > 3e4)
    # Nothing is known of it.
    assert not is_ill_conditioned(edge_index, 3 * weight, num_nodes)


def test_edges_of_no_graph():
    none = torch.zeros(2, 0).long()
    assert not is_ill_conditioned(none, torch.zeros(0, 2), 0)
    assert not is_ill_conditioned(none, torch.zeros(0, 2), 3)


@pytest.mark.parametrize("backend", ["numba", "torch"])
def test_float32_is_solved_in_float64_where_it_matters(backend):
    """If weights are not rounded; gradients too."""
    edge_index, weight, num_nodes = graph(1e-6, heads=1)
    query, key, value = torch.randn(3, num_nodes, 1, 4)
    inputs = [x.requires_grad_() for x in (query, key, value, weight)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out = resolvent_mix(*inputs[:3], edge_index, inputs[3], backend=backend)
    exact = resolvent_mix(*wide[:3], edge_index, wide[3], backend="reference")
    assert out.dtype == torch.float32
    assert_near(out.double(), exact, 1e-6)
    cotangent = torch.randn(num_nodes, 1, 4)
    out.backward(cotangent)
    exact.backward(cotangent.double())
    for x, y in zip(inputs, wide, strict=True):
        assert x.grad.dtype == x.dtype
        assert_near(x.grad.double(), y.grad, 1e-6)
    with unchecked(), torch.no_grad():
        rounded = resolvent_mix(*inputs[:3], edge_index, inputs[3], backend=backend)
    assert (rounded - out).abs().max() > 1e-4 * out.abs().max()


def test_finite_sums_need_not_know(monkeypatch):
    edge_index, weight, num_nodes = graph(1e-6)
    monkeypatch.setattr(op, "is_ill_conditioned", None)
    x = torch.randn(num_nodes, 2, 4)
    options = {"solver": "neumann", "num_terms": 3}
    out = resolvent_mix(x, x, x, edge_index, weight, **options)
    y = x.double()
    exact = resolvent_mix(y, y, y, edge_index, weight, **options, backend="reference")
    assert_near(out.double(), exact, 1e-5)


@pytest.mark.parametrize("lost", [0.0, 1e-8, 1e-6, 1e-3, 0.3])
def test_both_devices_agree(lost):
    """Where sums are exactly one at first, too."""
    edges = torch.tensor([[0, 2, 1, 1], [1, 1, 0, 2]])
    weight = torch.tensor([0.5, 0.5, 1 - lost, 1 - lost], dtype=torch.double)
    found = is_ill_conditioned(edges, torch.stack([weight, 0.1 * weight], 1), 3)
    both = torch.stack([weight, 0.1 * weight], 1)
    assert found == conditioning._is_ill_conditioned_on_gpus(edges, both, 3)
    A = torch.zeros(3, 3).double().index_put((edges[1], edges[0]), weight)
    if lost > 0:
        inverse = torch.linalg.inv(torch.eye(3) - A)
        assert found == bool(inverse.sum(1).max() > 3e4)


def test_small_sums_of_rows_or_of_columns():
    edge_index = torch.tensor([[0, 1, 2, 2], [1, 2, 1, 0]])
    weight = torch.tensor([[0.6], [-0.9], [0.3], [0.2]])
    assert has_small_sums(edge_index, weight, 3)  # of rows: 0.2, 0.9, 0.9
    assert has_small_sums(edge_index.flip(0), weight, 3)  # of columns
    assert not has_small_sums(edge_index, weight * 1.2, 3)
    assert not has_small_sums(edge_index, weight * torch.nan, 3)


@pytest.mark.parametrize("lost", [5000, 105_000, -1, -105_000])
def test_edges_of_large_graphs_are_checked_before_they_are_read(lost):
    edge_index = torch.tensor([[0, 1], [1, lost]])
    x, weight = torch.ones(5000, 1, 1), torch.ones(2, 1) / 4
    with pytest.raises(ValueError, match="'edge_index'"):
        resolvent_mix(x, x, x, edge_index, weight)
