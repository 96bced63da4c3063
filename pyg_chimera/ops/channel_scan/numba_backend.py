"""The recurrence on the CPU, jitted: one task per (graph, slice of channels).

A task visits its nodes in topological order, and the parents of each node. The backward
pass visits them in reverse, and the children of each node: with a node's adjoint

    g_i = dy_i + sum over children c of w * d_c * g_c,

dx_i = g_i, dd_i = g_i * (sum over parents j of w * h_j), and for the edge from j,
dw = d_i * g_i * h_j. Each result is written once, and nothing else is stored.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.numba_runtime import arrays, jit, run, stopped
from pyg_chimera.ops.common.simd import (
    lanes,
    load_part,
    pointer,
    store_part,
    vector_lanes,
    zeros,
)
from pyg_chimera.ops.dag_scan.states import StateGraph

DEVICES = ("cpu",)


def why_not(call: Call) -> str | None:
    """It supports all calls."""


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The states, [V, C]."""
    operands = _Operands.of(call)
    out = torch.empty_like(call.inputs.value, memory_format=torch.contiguous_format)
    tasks = _Tasks.of(call.structure, operands.value)
    run(
        _forward_tasks,
        tasks.costs(call.structure, 0.2),
        0,
        operands.value.dtype,
        *(*tasks, *operands, *arrays(out)),
    )
    return out, ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of value, and of edge weight and decay if they are given."""
    operands, graph = _Operands.of(call), call.structure
    grads = [None if x is None else x.new_empty(x.shape) for x in call.inputs[:3]]
    tasks = _Tasks.of(graph, operands.value)
    run(
        _backward_tasks,
        tasks.costs(graph, 0.6),
        0,
        operands.value.dtype,
        *(*tasks, *operands, graph.child_ptr, graph.child, graph.child_entry),
        *arrays(*saved, grad),
        *(None if x is None else x.numpy() for x in grads),
    )
    return tuple(x for x in grads if x is not None)


class _Operands(NamedTuple):
    """The kernels' operands, in their order."""

    state: np.ndarray
    parent_ptr: np.ndarray
    parent: np.ndarray
    edge: np.ndarray
    value: np.ndarray  #: [V, C]
    weight: np.ndarray | None  #: [E, C]
    decay: np.ndarray | None  #: [V, C]

    @classmethod
    def of(cls, call: Call) -> "_Operands":
        graph: StateGraph = call.structure
        weights = (None if x is None else arrays(x)[0] for x in call.inputs[1:3])
        return cls(
            graph.state, graph.parent_ptr, graph.parent, graph.edge,
            *arrays(call.inputs.value), *weights,
        )  # fmt: skip


class _Tasks(NamedTuple):
    """A task is a graph with a slice of the channels."""

    ptr: np.ndarray  #: the first position of each graph
    width: int  #: channels of a slice
    num_slices: int

    @classmethod
    def of(cls, graph: StateGraph, value: np.ndarray) -> "_Tasks":
        # Whole rows stream through memory best, but if there are few graphs, split the
        # channels to keep all threads busy.
        channels, (vector, _) = value.shape[1], vector_lanes(value.dtype)
        wanted = max(1, -(-torch.get_num_threads() // max(1, len(graph.sizes))))
        width = max(1, -(-channels // (wanted * vector))) * vector
        return cls(graph.ptr, width, max(1, -(-channels // width)))

    def costs(self, graph: StateGraph, per_number: float) -> np.ndarray:
        rows = graph.sizes + graph.entries
        return np.repeat(rows * (per_number * self.width), self.num_slices)


@jit
def _rows(weights):
    """A pointer to the weights, if there are any."""
    return None if weights is None else pointer(weights)


@jit
def _times(weights, at, x, n):
    """A vector times its weights, if there are any; `n` numbers of the row are left."""
    return x if weights is None else load_part(weights + at, n) * x


@jit
def _forward_tasks(
    first, last, stop, scratch, ptr, width, num_slices, state, parent_ptr, parent, edge,
    value, weight, decay, out,
):  # fmt: skip
    channels, y = value.shape[1], pointer(out)
    w, d, step = _rows(weight), _rows(decay), lanes(y)
    for task in range(first, last):
        block, at = task // num_slices, task % num_slices * width
        end = min(at + width, channels)
        for p in range(ptr[block], ptr[block + 1]):
            if stopped(stop):
                return
            i, begin, behind = state[p], parent_ptr[p], parent_ptr[p + 1]
            for c in range(at, end, step):
                n, s = end - c, zeros(y)
                for x in range(begin, behind):
                    h = load_part(y + (state[parent[x]] * channels + c), n)
                    s = s + _times(w, edge[x] * channels + c, h, n)
                s = _times(d, i * channels + c, s, n)
                s = s + load_part(pointer(value) + (i * channels + c), n)
                store_part(y + (i * channels + c), s, n)


@jit
def _backward_tasks(
    first, last, stop, scratch, ptr, width, num_slices, state, parent_ptr, parent, edge,
    value, weight, decay, child_ptr, child, child_entry, states, grad, dvalue, dweight,
    ddecay,
):  # fmt: skip
    channels, h, dx = value.shape[1], pointer(states), pointer(dvalue)
    w, d, step = _rows(weight), _rows(decay), lanes(h)
    for task in range(first, last):
        block, at = task // num_slices, task % num_slices * width
        end = min(at + width, channels)
        for p in range(ptr[block + 1] - 1, ptr[block] - 1, -1):
            if stopped(stop):
                return
            i, begin, behind = state[p], parent_ptr[p], parent_ptr[p + 1]
            for c in range(at, end, step):
                n, here = end - c, i * channels + c
                g = load_part(pointer(grad) + here, n)
                for x in range(child_ptr[p], child_ptr[p + 1]):
                    to = state[child[x]] * channels + c
                    back = _times(d, to, load_part(dx + to, n), n)
                    g = g + _times(w, edge[child_entry[x]] * channels + c, back, n)
                store_part(dx + here, g, n)
                back, arrived = _times(d, here, g, n), zeros(h)
                for x in range(begin, behind):
                    at_edge = edge[x] * channels + c
                    of = load_part(h + (state[parent[x]] * channels + c), n)
                    if ddecay is not None:
                        arrived = arrived + _times(w, at_edge, of, n)
                    if dweight is not None:
                        store_part(pointer(dweight) + at_edge, back * of, n)
                if ddecay is not None:
                    store_part(pointer(ddecay) + here, g * arrived, n)
