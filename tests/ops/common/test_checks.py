import numpy as np
import pytest
import torch
from hypothesis import given
from strategies import Batch, Graph, batches, graphs

from pyg_chimera.ops.common.checks import check_batch, check_edge_index


@given(graphs())
def test_any_graph_passes(graph: Graph):
    assert check_edge_index(graph.edge_index, graph.num_nodes) is None


@given(batches())
def test_any_batch_passes(batch: Batch):
    assert check_batch(batch.batch, batch.num_nodes) is None


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
def test_any_integer_dtype_passes(dtype):
    assert check_edge_index(torch.tensor([[0, 1], [1, 2]], dtype=dtype), 3) is None
    assert check_batch(torch.tensor([0, 1, 0], dtype=dtype), 3) is None


def test_numpy_num_nodes_passes():
    assert check_edge_index(torch.tensor([[0], [1]]), np.int64(2)) is None


@pytest.mark.parametrize(
    ("edge_index", "num_nodes", "error", "match"),
    [
        (torch.zeros(3, 2).long(), 2, ValueError, r"\[2, num_edges\].*shape \[3, 2\]"),
        (torch.zeros(4).long(), 2, ValueError, r"\[2, num_edges\].*shape \[4\]"),
        (torch.zeros(2, 2), 2, TypeError, "integers.*torch.float32"),
        (torch.zeros(2, 2).bool(), 2, TypeError, "integers.*torch.bool"),
        ([[0], [1]], 2, TypeError, "tensor of integers.*'list'"),
        (torch.tensor([[0, 1], [1, 2]]), 2, ValueError, r"\[0, 2\), got 2 in an"),
        (torch.tensor([[0, -3], [1, 9]]), 2, ValueError, r"\[0, 2\), got -3 in an"),
        (torch.tensor([[0], [0]]), 0, ValueError, r"\[0, 0\), got 0 in an"),
        (torch.tensor([[0], [0]]), -1, ValueError, r"must not be negative, got -1"),
        (torch.tensor([[0], [0]]), 1.0, TypeError, "'num_nodes'.*'float'"),
        (torch.tensor([[0], [0]]), None, TypeError, "'num_nodes'.*'NoneType'"),
    ],
)
def test_bad_edge_index(edge_index, num_nodes, error, match):
    with pytest.raises(error, match=match):
        check_edge_index(edge_index, num_nodes)


@pytest.mark.parametrize(
    ("batch", "error", "match"),
    [
        ([0, 0], TypeError, "tensor of integers.*'list'"),
        (torch.tensor([0, 1, 1]), ValueError, r"= \[2\], got shape \[3\]"),
        (torch.tensor([[0, 1]]), ValueError, r"= \[2\], got shape \[1, 2\]"),
        (torch.tensor([0.0, 1.0]), TypeError, "integers.*torch.float32"),
        (torch.tensor([0, -2]), ValueError, r"negative entries, got -2"),
    ],
)
def test_bad_batch(batch, error, match):
    with pytest.raises(error, match=match):
        check_batch(batch, 2)
