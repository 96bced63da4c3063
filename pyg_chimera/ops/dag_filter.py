"""A filter over the ancestors of each node in a DAG, fused.

If the DAG is a path, this is a causal convolution.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.array_views import as_array, in_range
from pyg_chimera.ops.common.fused import Fused
from pyg_chimera.ops.common.numba_runtime import jit, run, stopped
from pyg_chimera.ops.common.simd import (
    fma,
    lanes,
    load_part,
    pointer,
    splat,
    store_part,
    vector_lanes,
    zeros,
)


def dag_filter(
    x: Tensor,
    weight: Tensor,
    edge_index: Tensor,
    num_dags: int = 1,
    passed: Callable[[Tensor, int], Tensor] | None = None,
) -> Tensor:
    r"""The weighted sum of a node, the mean of its parents, that of their means, and so
    on, in each of :math:`D` DAGs:

    .. math::
        \mathbf{y} = \mathbf{w}_0 \odot \mathbf{x} + \sum_{d=1}^D \sum_{k=1}^K
        \mathbf{w}_{dk} \odot \mathbf{P}_d^k \mathbf{x}, \qquad
        (\mathbf{P}_d)_{ij} = \frac{1}{|p_d(i)|}

    Args:
        x: Nodes, [V, F].
        weight: [F, 1 + D K], those of a DAG in succession.
        edge_index: The edges of all DAGs, [2, E]; node i of DAG d is d V + i.
        num_dags: Their number.
        passed: What becomes of values that pass along edges, [E, F], given the number
            of nodes of all DAGs, too.
    """
    if passed is None:
        return _FILTER((x, weight, edge_index), num_dags)
    return _composed(x, weight, edge_index, num_dags, passed)


def _composed(
    x: Tensor,
    weight: Tensor,
    edge_index: Tensor,
    num_dags: int,
    passed: Callable[[Tensor, int], Tensor] = lambda y, _: y,
) -> Tensor:
    own, sides = weight[:, 0], weight[:, 1:].t().unflatten(0, (num_dags, -1))
    source, target = edge_index
    out, far = x * own, x if num_dags == 1 else x.repeat(num_dags, 1)
    ones = x.new_ones(source.size(0), 1)
    degree = x.new_zeros(far.size(0), 1).index_add(0, target, ones).clamp(min=1)
    for side in sides.unbind(1):
        values = passed(far[source], far.size(0))
        far = torch.zeros_like(far).index_add(0, target, values) / degree
        for d, part in enumerate(far.view(num_dags, *x.shape)):
            out = torch.addcmul(out, part, side[d].to(x.dtype))
    return out


def _fits(x: Tensor, weight: Tensor, edge_index: Tensor, _: int) -> bool:
    return x.dtype == weight.dtype and x.numel() > 0 and edge_index.dtype == torch.long


def _forward(
    x: Tensor, weight: Tensor, edge_index: Tensor, num_dags: int
) -> tuple[Tensor, Sequence[Tensor], None]:
    """Saves the means, [K, D V, F], and one over numbers of parents, [D V]."""
    steps, (rows, channels) = (weight.size(1) - 1) // num_dags, x.shape
    edges = in_range(edge_index, num_dags * rows)
    share = x.new_empty(num_dags * rows)
    parents = np.bincount(edges[1], minlength=num_dags * rows)
    as_array(share)[:] = 1 / np.maximum(parents, 1)
    means, out = x.new_empty(steps, num_dags * rows, channels), x.new_empty(x.shape)
    inputs = as_array(x), as_array(weight.t()), as_array(means)
    graph = edges, as_array(share), steps
    _run(_forward_tasks, graph, inputs, as_array(out))
    return out, (means, share), None


def _backward(
    given: Any, num_dags: int, saved: Sequence[Tensor], grads: Sequence[Tensor], _: None
) -> list[Tensor | None]:
    (x, weight, edge_index), (means, share) = given, map(as_array, saved)
    dx, dweight = x.new_empty(x.shape), x.new_empty(weight.size(1), weight.size(0))
    work = np.empty((2, *means.shape[1:]), means.dtype)
    inputs, graph = (as_array(x), as_array(weight.t()), means), as_array(edge_index)
    grad, outputs = as_array(grads[0]), (as_array(dx), as_array(dweight), work)
    _run(_backward_tasks, (graph, share, len(means)), inputs, grad, outputs)
    return [dx, dweight.t(), None]


_FILTER = Fused("pyg_chimera.dag_filter", _composed, _fits, _forward, _backward)


def _run(kernel: Any, graph: Any, inputs: Any, *others: Any) -> None:
    """Runs a kernel, a task for each vector of channels."""
    (edges, share, steps), (x, *_) = graph, inputs
    tasks = -(-x.shape[1] // vector_lanes(x.dtype)[0])
    costs = np.full(tasks, 4.0 * (1 + steps) * (edges.shape[1] + len(share)))
    run(kernel, costs, 1, x.dtype, graph, inputs, *others)


@jit
def _forward_tasks(first, last, stop, _, graph, inputs, out):
    edges, share, steps = graph
    x, weight, means = inputs
    (rows, channels), all_rows = x.shape, len(share)
    W, N, step = pointer(weight), all_rows * channels, lanes(pointer(x))
    for c in range(first * step, last * step, step):
        if stopped(stop):
            return
        n, X, M, Y = channels - c, pointer(x) + c, pointer(means) + c, pointer(out) + c
        w = load_part(W + c, n)
        for i in range(0, rows * channels, channels):
            store_part(Y + i, w * load_part(X + i, n), n)
        for k in range(steps):
            to, before = M + k * N, M + (k - 1) * N
            for i in range(0, N, channels):
                store_part(to + i, zeros(to), n)
            for e in range(edges.shape[1]):
                j, i = edges[0, e], edges[1, e] * channels
                at = before + j * channels if k > 0 else X + j % rows * channels
                store_part(to + i, load_part(to + i, n) + load_part(at, n), n)
            for i in range(all_rows):
                w = load_part(W + ((1 + i // rows * steps + k) * channels + c), n)
                at, y = to + i * channels, Y + i % rows * channels
                mean = load_part(at, n) * splat(share[i])
                store_part(at, mean, n)
                store_part(y, fma(w, mean, load_part(y, n)), n)


@jit
def _backward_tasks(first, last, stop, _, graph, inputs, grad, outputs):
    edges, share, steps = graph
    x, weight, means = inputs
    dx, dweight, work = outputs
    (rows, channels), all_rows = x.shape, len(share)
    W, DW = pointer(weight), pointer(dweight)
    N, step = all_rows * channels, lanes(pointer(x))
    for c in range(first * step, last * step, step):
        if stopped(stop):
            return
        n, X, M, G = channels - c, pointer(x) + c, pointer(means) + c, pointer(grad) + c
        DX, A = pointer(dx) + c, pointer(work) + c
        B, sums, w = A + N, zeros(X), load_part(W + c, n)
        for i in range(0, rows * channels, channels):
            g = load_part(G + i, n)
            sums = fma(g, load_part(X + i, n), sums)
            store_part(DX + i, w * g, n)
        store_part(DW + c, sums, n)
        for i in range(0, N, channels):
            store_part(A + i, zeros(A), n)
        for k in range(steps - 1, -1, -1):
            # A has the gradient of these means from later ones, and then that of
            # earlier ones; B that of the sums over parents.
            for d in range(all_rows // rows):
                at, sums = (1 + d * steps + k) * channels + c, zeros(X)
                w = load_part(W + at, n)
                for v in range(rows):
                    i = (d * rows + v) * channels
                    g = load_part(G + v * channels, n)
                    sums = fma(g, load_part(M + (k * N + i), n), sums)
                    u = fma(w, g, load_part(A + i, n)) * splat(share[d * rows + v])
                    store_part(B + i, u, n)
                    store_part(A + i, zeros(A), n)
                store_part(DW + at, sums, n)
            for e in range(edges.shape[1]):
                j, i = edges[0, e] * channels, edges[1, e] * channels
                store_part(A + j, load_part(A + j, n) + load_part(B + i, n), n)
        for i in range(all_rows):
            at = DX + i % rows * channels
            store_part(at, load_part(at, n) + load_part(A + i * channels, n), n)
