"""Graphs of states on a GPU, for programs that visit the positions one by one."""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_chimera.ops.recurrence.plan.states import StateGraph


class Chains(NamedTuple):
    """A graph of states on a device, int32: S states, L edges, C components."""

    ptr: Tensor  #: [C + 1] first position of each component
    node: Tensor  #: [S] the row of the inputs at each position
    parent_ptr: Tensor  #: [S + 1] first of the entries into each position, ...
    parent: Tensor  #: [L] ... and the positions they come from
    child_ptr: Tensor  #: [S + 1] first of the entries out of each position, ...
    child: Tensor  #: [L] ... the positions they lead to, ...
    child_entry: Tensor  #: [L] ... and their indices in `parent`
    far_parent: Tensor  #: [S] whether a parent is not the position just before
    far_child: Tensor  #: [S] whether a child is not the position just after
    edge: Tensor  #: [L] the edge of each entry, int64
    ring_ptr: Tensor  #: [C + 1] first slot of each component's ring, which has as ...
    rings: int  #: ... many as an entry leads back there at most; the slots of all

    @classmethod
    def of(cls, graph: StateGraph, device: torch.device) -> "Chains":
        """The tables of a graph."""
        row, (parent_ptr, parent, edge) = graph.parents.row, graph.parents
        is_far = row - parent > 1
        far_parent, far_child = np.zeros((2, len(graph.state)))
        far_parent[row[is_far]], far_child[parent[is_far]] = 1, 1
        first = (graph.component_ptr, graph.state, parent_ptr, parent)
        arrays = (*first, *graph.children, far_parent, far_child)
        ring_ptr = np.append(0, np.cumsum(np.maximum(graph.bandwidth, 1)))
        *tables, rings_of = (
            torch.from_numpy(x.astype(np.int32)).to(device) for x in (*arrays, ring_ptr)
        )
        edges = torch.from_numpy(edge).to(device)
        return cls(*tables, edges, rings_of, int(ring_ptr[-1]))  # type: ignore[call-arg, arg-type]

    @property
    def layout(self) -> "Chains":
        """The tables alone: what kernels read, and are not compiled for."""
        return self._replace(rings=0)


@triton.jit
def bounds(PTR, i):
    """The bounds of row i, int64 as offsets computed from them may be large."""
    return tl.load(PTR + i).to(tl.int64), tl.load(PTR + i + 1).to(tl.int64)


@triton.jit
def ring_of(RING_PTR, c):
    """The first slot of component c's ring, and its size."""
    begin, end = bounds(RING_PTR, c)
    return begin, end - begin


@triton.jit
def row_of(X, node, h, channel, there, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Some channels of a row of X [nodes, HEADS, SIZE]."""
    return tl.load(X + (node * HEADS + h) * SIZE + channel, mask=there, other=0.0)
