"""The attention pattern, as lists of neighbours in both directions."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from pyg_chimera.ops.common.checks import (
    check_batch,
    check_edge_index,
    check_within_graphs,
)
from pyg_chimera.ops.structure.csr import compress, to_numpy

__all__ = ["EPSILON", "Neighbours", "Pattern", "pattern"]

#: Added to the sums of rectified differences, which may be zero.
EPSILON = 1e-6


class Neighbours(NamedTuple):
    """The edges of each node, as a compressed list. All arrays are int64."""

    ptr: np.ndarray  #: [V + 1], where the edges of each node begin
    node: np.ndarray  #: [E], the node at the other end
    edge: np.ndarray  #: [E], the index of the edge
    most: int  #: the largest number of edges of a node


@dataclass(frozen=True, kw_only=True)
class Pattern:
    """For each node, the sources that it reads, and the targets that read it."""

    sources: Neighbours
    targets: Neighbours
    tables: dict[Any, Any] = field(default_factory=dict)  #: what backends derive


def pattern(edge_index: Tensor, batch: Tensor | None, num_nodes: int) -> Pattern:
    """Compresses the edges by target and by source.

    Raises:
        ValueError: If a shape is wrong, an index is out of range, or an edge joins two
            graphs of the batch.
    """
    check_edge_index(edge_index, num_nodes)
    col, row = to_numpy(edge_index)
    if batch is not None:
        check_batch(batch, num_nodes)
        check_within_graphs(col, row, to_numpy(batch))
    number = np.arange(len(row))

    def neighbours(of: np.ndarray, other: np.ndarray) -> Neighbours:
        ptr, edge = compress(of, number, num_nodes)
        return Neighbours(ptr, other[edge], edge, int(np.diff(ptr).max(initial=0)))

    return Pattern(sources=neighbours(row, col), targets=neighbours(col, row))
