"""The structure of a batch of graphs, and the operands, for the delta rule."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.checks import check_edge_index
from pyg_chimera.ops.recurrence.plan.states import StateGraph, node_states
from pyg_chimera.ops.structure.csr import to_numpy
from pyg_chimera.ops.structure.symbolic_factor import (
    Blocks,
    SymbolicFactor,
    ranked_blocks,
    symbolic_factor,
)
from pyg_chimera.ops.structure.topological import ranks_and_cycles


@dataclass(frozen=True, kw_only=True)
class DeltaGraph(Blocks):
    """The graphs of a batch, each in topological order where there is one."""

    col: np.ndarray  #: [E], the source of each edge
    row: np.ndarray  #: [E], the target of each edge
    rank: np.ndarray  #: [V], the topological rank of each node, if no cycle leads to it
    on_cycle: np.ndarray  #: [V], whether it lies on a cycle, or between cycles

    @property
    def nbytes(self) -> int:
        """Bytes of memory, approximately, with cached properties and tables."""
        arrays = (x for x in vars(self).values() if isinstance(x, np.ndarray))
        return 3 * sum(x.nbytes for x in arrays)

    @cached_property
    def block(self) -> np.ndarray:
        """[V], the block of each node."""
        block = np.empty_like(self.node)
        block[self.node] = np.repeat(np.arange(len(self.sizes)), self.sizes)
        return block

    @cached_property
    def is_cyclic(self) -> np.ndarray:
        """[T], whether each block has a cycle."""
        return np.bincount(self.block, self.on_cycle, len(self.sizes)) > 0

    @cached_property
    def depth(self) -> int:
        """The number of topological levels of a DAG."""
        return int(self.rank.max(initial=-1)) + 1

    @cached_property
    def states(self) -> StateGraph:
        """Those of the nodes of a DAG."""
        edge_index = torch.from_numpy(np.stack([self.col, self.row]))
        block, rank = (torch.from_numpy(x) for x in (self.block, self.rank))
        return node_states(edge_index, block, rank, self.num_nodes)

    @cached_property
    def factor(self) -> SymbolicFactor:
        """The pattern of the factors of I - A."""
        edge_index = torch.from_numpy(np.stack([self.col, self.row]))
        found: Any = symbolic_factor(
            edge_index, torch.from_numpy(self.block), None, self.num_nodes
        )
        return found

    @cached_property
    def cyclic_edges(self) -> np.ndarray:
        """The indices of the edges between nodes on cycles."""
        return np.flatnonzero(self.on_cycle[self.col] & self.on_cycle[self.row])

    @cached_property
    def are_paths(self) -> bool:
        """Whether all components are directed paths."""
        degrees = (np.bincount(x, minlength=1).max() for x in (self.col, self.row))
        return not self.on_cycle.any() and max(degrees) <= 1


def delta_graph(edge_index: Tensor, batch: Tensor | None, num_nodes: int) -> DeltaGraph:
    """Finds blocks, cycles and ranks.

    Raises:
        ValueError: If a shape is wrong, an index is out of range, or an edge joins two
            graphs of the batch.
    """
    check_edge_index(edge_index, num_nodes)
    col, row = to_numpy(edge_index)
    rank, on_cycle = ranks_and_cycles(edge_index, num_nodes)
    blocks = ranked_blocks(edge_index, batch, rank, num_nodes)
    return DeltaGraph(**vars(blocks), col=col, row=row, rank=rank, on_cycle=on_cycle)


class Operands(NamedTuple):
    """The inputs of a kernel, or their gradients.

    Gradients of query and key are parts, [parts, V, groups, N] or [V, heads, N].
    """

    query: np.ndarray  #: [V, groups, N]
    key: np.ndarray  #: [V, groups, N]
    value: np.ndarray  #: [V, heads, P]; in transposed systems the gradient of output
    beta: np.ndarray  #: [V, heads]
    weight: np.ndarray  #: [E, heads]


def positive(beta: Tensor) -> Tensor:
    """Clamp beta to >= 1e-20 so that it can be divided by."""
    return beta.clamp(min=1e-20)
