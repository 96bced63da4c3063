from numbers import Integral

import numpy as np
import torch
from torch import Tensor

__all__ = ["check_batch", "check_edge_index", "check_within_graphs"]


def _is_integer(tensor: Tensor) -> bool:
    return not (
        tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    )


def check_edge_index(edge_index: Tensor, num_nodes: int) -> None:
    r"""Checks that :obj:`edge_index` connects nodes of a graph that has them.

    Args:
        edge_index (torch.Tensor): The edge indices.
        num_nodes (int): The number of nodes :math:`|\mathcal{V}|`.

    Raises:
        TypeError: If :obj:`edge_index` isn't a tensor of integers, or
            :obj:`num_nodes` isn't an integer.
        ValueError: If :obj:`edge_index` isn't of shape :math:`(2, |\mathcal{E}|)`,
            names a node outside of :math:`[0, |\mathcal{V}|)`, or :obj:`num_nodes`
            is negative.
    """
    if not isinstance(edge_index, Tensor):
        raise TypeError(
            "'edge_index' must be a tensor of integers of shape [2, num_edges] "
            f"(got '{type(edge_index).__name__}')"
        )
    if not isinstance(num_nodes, Integral):
        raise TypeError(
            f"'num_nodes' must be an integer (got '{type(num_nodes).__name__}')"
        )
    if num_nodes < 0:
        raise ValueError(f"'num_nodes' must not be negative (got {num_nodes})")
    if edge_index.dim() != 2 or edge_index.size(0) != 2:
        raise ValueError(
            "'edge_index' must be of shape [2, num_edges] "
            f"(got shape {list(edge_index.shape)})"
        )
    if not _is_integer(edge_index):
        raise TypeError(
            f"'edge_index' must hold integers (got dtype {edge_index.dtype}); "
            "convert it with 'edge_index.long()'"
        )
    if edge_index.numel() == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(edge_index))
    if low < 0 or high >= num_nodes:
        raise ValueError(
            f"'edge_index' must hold node indices in [0, num_nodes) = [0, {num_nodes}) "
            f"(got {low if low < 0 else high} in an 'edge_index' of shape "
            f"{list(edge_index.shape)}); pass the number of nodes it belongs to"
        )


def check_batch(batch: Tensor, num_nodes: int) -> None:
    r"""Checks that :obj:`batch` assigns each node to a graph, in any order.

    Args:
        batch (torch.Tensor): The graph of each node.
        num_nodes (int): The number of nodes :math:`|\mathcal{V}|`.

    Raises:
        TypeError: If :obj:`batch` isn't a tensor of integers.
        ValueError: If :obj:`batch` isn't of shape :math:`(|\mathcal{V}|)`, or holds a
            negative entry.
    """
    if not isinstance(batch, Tensor):
        raise TypeError(
            "'batch' must be a tensor of integers of shape [num_nodes] "
            f"(got '{type(batch).__name__}')"
        )
    if batch.dim() != 1 or batch.size(0) != num_nodes:
        raise ValueError(
            f"'batch' must be of shape [num_nodes] = [{num_nodes}] "
            f"(got shape {list(batch.shape)})"
        )
    if not _is_integer(batch):
        raise TypeError(
            f"'batch' must hold integers (got dtype {batch.dtype}); "
            "convert it with 'batch.long()'"
        )
    if batch.numel() > 0 and int(batch.min()) < 0:
        raise ValueError(
            f"'batch' must hold no negative entries (got {int(batch.min())})"
        )


def check_within_graphs(col: np.ndarray, row: np.ndarray, batch: np.ndarray) -> None:
    """Checks that each edge joins nodes of one graph.

    Args:
        col (np.ndarray): The source of each edge.
        row (np.ndarray): The target of each edge.
        batch (np.ndarray): The graph of each node.

    Raises:
        ValueError: If an edge does not, which it names.
    """
    crossing = np.flatnonzero(batch[row] != batch[col])
    if crossing.size:
        e = int(crossing[0])
        raise ValueError(
            f"'edge_index' joins different graphs of 'batch': edge {e} goes from "
            f"node {col[e]} of graph {batch[col[e]]} to node {row[e]} of graph "
            f"{batch[row[e]]}"
        )
