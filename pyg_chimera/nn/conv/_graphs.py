"""What users may hand a layer as a graph, or as several, made alike."""

from typing import Any

import torch
from torch import Tensor
from torch_geometric.typing import Adj
from torch_geometric.utils import is_sparse, to_edge_index

from pyg_chimera.ops.structure.checks import check_edge_index

__all__ = ["as_edges", "at_least_float32", "check_edge_attr", "for_each_dag"]


def for_each_dag(num_dags: int, advice: str, **arguments: Any) -> list[tuple]:
    """The arguments of each DAG, which are lists if there are several of them.

    Raises:
        ValueError: If an argument is not; a list where there should be none comes with
            advice.
    """
    lists = []
    for name, x in arguments.items():
        entries = list(x) if isinstance(x, (list, tuple)) else [x] * num_dags
        several = isinstance(x, (list, tuple)) or x is None
        if len(entries) != num_dags or (num_dags > 1 and not several):
            got = len(entries) if several else f"one {type(x).__name__}"
            raise ValueError(
                f"'{name}' must be a list with an entry for each of {num_dags} DAGs, "
                f"got {got}"
                if num_dags > 1
                else f"'{name}' must be one tensor, got a list of {got}; {advice}"
            )
        lists.append(entries)
    return list(zip(*lists, strict=True))


def as_edges(
    edge_index: Adj, edge_attr: Tensor | None, num_nodes: int, flow: str
) -> tuple[Tensor, Tensor | None]:
    r"""The edges :math:`j \to i` as a plain tensor, and their features.

    The values of a sparse adjacency stand in for features that are not given.

    Raises:
        TypeError: If edges are not integer.
        ValueError: If edges have a wrong shape or are out of range.
    """
    if is_sparse(edge_index):
        (row, col), values = to_edge_index(edge_index)
        edge_index = torch.stack([col, row])
        edge_attr = values if edge_attr is None else edge_attr
    elif hasattr(edge_index, "as_tensor"):  # an EdgeIndex
        edge_index = edge_index.as_tensor()
    if flow == "target_to_source":
        edge_index = edge_index.flip(0)
    if not torch.compiler.is_compiling():  # the operators check it in any case
        check_edge_index(edge_index, num_nodes)
    return edge_index, edge_attr


def check_edge_attr(
    edge_attr: Tensor | None, edge_dim: int | None, num_edges: int
) -> Tensor:
    r"""Features with a row for each edge, :math:`[|\mathcal{E}|, D]`.

    Raises:
        ValueError: If there are none, or of other edges.
    """
    if edge_attr is None:
        raise ValueError(f"'edge_attr' must be given, as 'edge_dim' is {edge_dim}")
    if edge_attr.dim() == 1:
        edge_attr = edge_attr.view(-1, 1)
    if edge_attr.size(0) != num_edges:
        raise ValueError(
            f"'edge_attr' must have a row for each of {num_edges} edges, got "
            f"{list(edge_attr.shape)}"
        )
    return edge_attr


def at_least_float32(x: Tensor) -> Tensor:
    """Gates lose too much in half precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
