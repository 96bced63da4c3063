"""The recurrence on the CPU, jitted: one task per (graph, slice of channels).

A task visits its nodes in topological order, and the parents of each node. The backward
pass visits them in reverse, and the children of each node: with a node's adjoint

    g_i = dy_i + sum over children c of w * d_c * g_c,

dx_i = g_i, dd_i = g_i * (sum over parents j of w * h_j), and for the edge from j,
dw = d_i * g_i * h_j. Each result is written once, and nothing else is stored.
"""

from typing import Any, NamedTuple

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
from pyg_chimera.ops.recurrence.plan.states import StateGraph

DEVICES = ("cpu",)


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The states, [V, C]."""
    x, graph = _Operands.of(*call.inputs[:3]), call.structure
    out = torch.empty_like(call.inputs.value, memory_format=torch.contiguous_format)
    tasks = _Tasks.of(graph, x.value)
    run(
        _forward_tasks,
        tasks.costs(graph, 0.2),
        0,
        x.value.dtype,
        *(graph.arrays(by_edge=True), tasks, x, *arrays(out)),
    )
    return out, ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of value, and of edge weight and decay if they are given."""
    x, graph = _Operands.of(*call.inputs[:3], *saved, grad), call.structure
    grads = [None if y is None else y.new_empty(y.shape) for y in call.inputs[:3]]
    tasks = _Tasks.of(graph, x.value)
    run(
        _backward_tasks,
        tasks.costs(graph, 0.6),
        0,
        x.value.dtype,
        *(graph.arrays(by_edge=True), tasks, x, _Operands.of(*grads)),
    )
    return tuple(y for y in grads if y is not None)


class _Operands(NamedTuple):
    """The inputs, or their gradients; and what a backward pass takes besides them."""

    value: np.ndarray  #: [V, C]
    weight: np.ndarray | None  #: [E, C]
    decay: np.ndarray | None  #: [V, C]
    states: np.ndarray | None = None  #: [V, C]
    grad: np.ndarray | None = None  #: [V, C]

    @classmethod
    def of(cls, *tensors: Tensor | None) -> "_Operands":
        found: list[Any] = [None if x is None else arrays(x)[0] for x in tensors]
        return cls(*found)


class _Tasks(NamedTuple):
    """A task is a graph with a slice of the channels."""

    width: int  #: channels of a slice
    num_slices: int

    @classmethod
    def of(cls, graph: StateGraph, value: np.ndarray) -> "_Tasks":
        # Whole rows stream through memory best, but if there are few graphs, split the
        # channels to keep all threads busy.
        channels, (vector, _) = value.shape[1], vector_lanes(value.dtype)
        wanted = max(1, -(-torch.get_num_threads() // max(1, len(graph.sizes))))
        width = max(1, -(-channels // (wanted * vector))) * vector
        return cls(width, max(1, -(-channels // width)))

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
def _put(target, at, x, n):
    """Stores a vector, if there is a target; `n` numbers of the row are left."""
    if target is not None:
        store_part(target + at, x, n)


@jit
def _forward_tasks(first, last, stop, scratch, graph, tasks, x, out):
    channels, y = x.value.shape[1], pointer(out)
    w, d, step = _rows(x.weight), _rows(x.decay), lanes(y)
    state, (ptr, parent, edge) = graph.state, graph.parents
    for task in range(first, last):
        block, at = task // tasks.num_slices, task % tasks.num_slices * tasks.width
        end = min(at + tasks.width, channels)
        for p in range(
            graph.ptr[graph.block[block]], graph.ptr[graph.block[block + 1]]
        ):
            if stopped(stop):
                return
            i, begin, behind = state[p], ptr[p], ptr[p + 1]
            for c in range(at, end, step):
                n, s = end - c, zeros(y)
                for e in range(begin, behind):
                    h = load_part(y + (state[parent[e]] * channels + c), n)
                    s = s + _times(w, edge[e] * channels + c, h, n)
                s = _times(d, i * channels + c, s, n)
                s = s + load_part(pointer(x.value) + (i * channels + c), n)
                store_part(y + (i * channels + c), s, n)


@jit
def _backward_tasks(first, last, stop, scratch, graph, tasks, x, grads):
    channels, h, dx = x.value.shape[1], pointer(x.states), pointer(grads.value)
    w, d, step = _rows(x.weight), _rows(x.decay), lanes(h)
    dw, dd = _rows(grads.weight), _rows(grads.decay)
    state, (ptr, parent, edge) = graph.state, graph.parents
    child_ptr, child, child_edge = graph.children
    for task in range(first, last):
        block, at = task // tasks.num_slices, task % tasks.num_slices * tasks.width
        end, before = min(at + tasks.width, channels), graph.ptr[graph.block[block]] - 1
        for p in range(graph.ptr[graph.block[block + 1]] - 1, before, -1):
            if stopped(stop):
                return
            i, begin, behind = state[p], ptr[p], ptr[p + 1]
            for c in range(at, end, step):
                n, here = end - c, i * channels + c
                g = load_part(pointer(x.grad) + here, n)
                for e in range(child_ptr[p], child_ptr[p + 1]):
                    to = state[child[e]] * channels + c
                    back = _times(d, to, load_part(dx + to, n), n)
                    at_edge = child_edge[e] * channels + c
                    g = g + _times(w, at_edge, back, n)
                store_part(dx + here, g, n)
                back, arrived = _times(d, here, g, n), zeros(h)
                for e in range(begin, behind):
                    at_edge = edge[e] * channels + c
                    of = load_part(h + (state[parent[e]] * channels + c), n)
                    arrived = arrived + _times(w, at_edge, of, n)
                    _put(dw, at_edge, back * of, n)
                _put(dd, here, g * arrived, n)
