"""The gates of pLSTM on grids, fused: source, transition, mark and direct gates of all
orientations, from what nodes are projected to.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.array_views import as_array
from pyg_chimera.ops.common.fused import Fused
from pyg_chimera.ops.common.numba_runtime import jit, run, stopped
from pyg_chimera.ops.common.simd import (
    lanes,
    load_part,
    pointer,
    splat,
    store_part,
)
from pyg_chimera.ops.common.vector_kit import LOG_2, exp2

#: Nodes of a task, which has its own sums of the gradients of biases.
_NODES = 128


class Layout(NamedTuple):
    """The columns of an orientation: gates of all heads, kind after kind, which are
    direct, source and mark (in each direction), turns and, with `shared`, angles.
    """

    heads: int
    shared: bool  #: turns are divided between right and down by an angle (mode P)
    by_column: bool = True  #: whether those to all directions, or from all, share it

    @property
    def kinds(self) -> list[int]:
        """The number of columns of each kind."""
        kinds = (1, 2, 2, 4, 1) if self.shared else (1, 2, 2, 3, 0)
        return [self.heads * x for x in kinds]


def grid_gates(
    rows: Tensor, bias: Tensor, layout: Layout
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    r"""The gates of nodes, from `rows` [V, D * columns] and `bias` [D, columns].

    The sigmoids of rows with biases are source and mark gates, [V, D, 2, heads], and
    the direct gate, [V, heads], summed over the D orientations. A turn is :math:`\gamma
    = \tanh(5 z)`, and transitions, [V, D, to, from, heads], are

    .. math::
        T_{\text{to}, \text{from}} = \gamma_{\text{to}, \text{from}} \cdot
        \begin{cases} \alpha & \text{right} \\ 1 - \alpha & \text{down} \end{cases}

    where the direction is that of `to`, or without `by_column` of `from`, and
    :math:`\alpha` the sigmoid of the angle. Unless `shared`, there are three turns, of
    which none is from down to right (`"pLSTM: parallelizable Linear Source Transition
    Mark networks" <https://arxiv.org/abs/2506.11997>`_, Section 4.3).
    """
    return _GATES((rows, bias), layout)


def _composed(
    rows: Tensor, bias: Tensor, layout: Layout
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (dags, _), (heads, shared, by_column) = bias.shape, layout
    gates = rows.unflatten(1, (dags, -1)) + bias.to(rows.dtype)
    direct, source, mark, turn, angle = gates.split(layout.kinds, dim=2)
    turn = torch.tanh(5 * turn).unflatten(2, (-1, heads))
    if shared:
        angle = angle.sigmoid().view(-1, dags, 1, 1, heads)
        shares = torch.cat([angle, 1 - angle], 2 if by_column else 3)
        transition = turn.unflatten(2, (2, 2)) * shares
    else:
        right, down = turn[:, :, :1], turn[:, :, 1:]
        transition = torch.cat([right, torch.zeros_like(right), down], dim=2)
        transition = transition.unflatten(2, (2, 2))
    source, mark = (x.sigmoid().unflatten(2, (2, heads)) for x in (source, mark))
    return source, transition, mark, direct.sigmoid().sum(1)


def _fits(rows: Tensor, bias: Tensor, _: Layout) -> bool:
    return rows.dtype == bias.dtype and rows.numel() > 0


class _Gates(NamedTuple):
    """All gates, or their gradients, of one dimension."""

    source: np.ndarray
    turned: np.ndarray
    mark: np.ndarray
    direct: np.ndarray


class _Columns(NamedTuple):
    """What belongs to a column of `rows`."""

    bias: np.ndarray  #: or its gradient, of each task
    scale: np.ndarray  #: before the sigmoid: tanh(5 z) = 2 sigmoid(10 z) - 1


class _Size(NamedTuple):
    nodes: int
    dags: int
    heads: int
    shared: bool
    by_column: bool


def _forward(
    rows: Tensor, bias: Tensor, layout: Layout
) -> tuple[tuple[Tensor, ...], Sequence[Tensor], None]:
    """Saves the sigmoids, those of turns twice as far."""
    (nodes, _), (dags, _), heads = rows.shape, bias.shape, layout.heads
    shapes = (dags, 2, heads), (dags, 2, 2, heads), (dags, 2, heads), (heads,)
    outs = tuple(rows.new_empty(nodes, *shape) for shape in shapes)
    sigmoids = torch.empty_like(rows, memory_format=torch.contiguous_format)
    columns = _columns(bias, layout, as_array(bias).reshape(-1))
    arrays = as_array(rows), columns, as_array(sigmoids)
    _run(_forward_tasks, rows, bias, layout, *arrays, outs)
    return outs, (sigmoids,), None


def _backward(
    given: Any, layout: Layout, saved: Sequence[Tensor], grads: Any, _: None
) -> list[Tensor | None]:
    (rows, bias), (sigmoids,) = given, saved
    d_rows = torch.empty_like(sigmoids)
    d_bias = rows.new_zeros(-(-len(rows) // _NODES), bias.numel())
    columns = _columns(bias, layout, as_array(d_bias))
    arrays = as_array(sigmoids), columns, as_array(d_rows)
    _run(_backward_tasks, rows, bias, layout, *arrays, grads)
    return [d_rows, d_bias.sum(0).view_as(bias)]


def _columns(bias: Tensor, layout: Layout, of_bias: np.ndarray) -> _Columns:
    scale = np.repeat([1, 1, 1, 10, 1], layout.kinds).astype(of_bias.dtype)
    return _Columns(of_bias, np.tile(scale, len(bias)))


def _run(kernel: Any, rows: Tensor, bias: Tensor, layout: Layout, *others: Any) -> None:
    *arrays, gates = others
    size = _Size(len(rows), len(bias), *layout)
    costs = np.full(-(-len(rows) // _NODES), 2.0 * _NODES * rows.size(1))
    flat = _Gates(*(as_array(x).reshape(-1) for x in gates))
    run(kernel, costs, 0, arrays[0].dtype, size, *arrays, flat)


@jit
def _forward_tasks(first, last, stop, _, size, rows, columns, sigmoids, gates):
    width, real = rows.shape[1], rows.dtype.type
    R, P = pointer(rows), pointer(sigmoids)
    B, F = pointer(columns.bias), pointer(columns.scale)
    one, step = splat(real(1)), lanes(R)
    for task in range(first, last):
        if stopped(stop):
            return
        for v in range(task * _NODES, min((task + 1) * _NODES, size.nodes)):
            at = v * width
            for k in range(0, width, step):
                n = width - k
                z = load_part(R + (at + k), n) + load_part(B + k, n)
                z = z * load_part(F + k, n) * splat(real(-1 / LOG_2))
                s = one / (one + exp2(z))
                store_part(P + (at + k), s, n)
            _put(v, size, P + at, width // size.dags, gates)


# Heads are in the lanes of vectors: there are a few of each kind of gate.


@jit
def _put(v, size, sigmoids, columns, gates):
    """The gates of a node, from its sigmoids."""
    H, D = size.heads, size.dags
    S, T, M = pointer(gates.source), pointer(gates.turned), pointer(gates.mark)
    direct, one = pointer(gates.direct) + v * H, splat(gates.source.dtype.type(1))
    for d in range(D):
        own, edges = sigmoids + d * columns, (v * D + d) * 2 * H
        for h in range(0, H, lanes(S)):
            n = H - h
            x = load_part(own + h, n)
            store_part(direct + h, load_part(direct + h, n) + x if d > 0 else x, n)
            for k in range(2):
                at = k * H + h
                store_part(S + (edges + at), load_part(own + (H + at), n), n)
                store_part(M + (edges + at), load_part(own + (3 * H + at), n), n)
            right, down = _shares(own, h, size, one)
            for k in range(4):
                x, turn = one - one, _turn(k, size)
                if turn >= 0:
                    x = load_part(own + ((5 + turn) * H + h), n)
                    x = (x + x - one) * (right if _is_right(k, size) else down)
                store_part(T + (2 * edges + k * H + h), x, n)


@jit
def _shares(own, h, size, one):
    """What transitions to (or from) right and down are multiplied by."""
    if not size.shared:
        return one, one
    right = load_part(own + (9 * size.heads + h), size.heads - h)
    return right, one - right


@jit
def _turn(k, size):
    """Which turn entry k = (to, from) of a transition is, or -1."""
    if size.shared:
        return k
    return k - (k > 1) if k != 1 else -1


@jit
def _is_right(k, size):
    return (k // 2 if size.by_column else k % 2) == 0


@jit
def _backward_tasks(first, last, stop, _, size, sigmoids, columns, d_rows, grads):
    width, real = sigmoids.shape[1], sigmoids.dtype.type
    R, P = pointer(d_rows), pointer(sigmoids)
    B, F = pointer(columns.bias), pointer(columns.scale)
    one, step = splat(real(1)), lanes(P)
    for task in range(first, last):
        if stopped(stop):
            return
        sums = B + task * width
        for v in range(task * _NODES, min((task + 1) * _NODES, size.nodes)):
            at = v * width
            _take(v, size, P + at, R + at, width // size.dags, grads)
            for k in range(0, width, step):
                n = width - k
                s = load_part(P + (at + k), n)
                d = load_part(R + (at + k), n) * s * (one - s) * load_part(F + k, n)
                store_part(R + (at + k), d, n)
                store_part(sums + k, load_part(sums + k, n) + d, n)


@jit
def _take(v, size, sigmoids, grads_of_them, columns, grads):
    """The gradients of a node's sigmoids, from those of its gates."""
    H, D = size.heads, size.dags
    S, T, M = pointer(grads.source), pointer(grads.turned), pointer(grads.mark)
    direct, one = pointer(grads.direct) + v * H, splat(grads.source.dtype.type(1))
    for d in range(D):
        own, edges = sigmoids + d * columns, (v * D + d) * 2 * H
        to = grads_of_them + d * columns
        for h in range(0, H, lanes(S)):
            n = H - h
            store_part(to + h, load_part(direct + h, n), n)
            for k in range(2):
                at = k * H + h
                store_part(to + (H + at), load_part(S + (edges + at), n), n)
                store_part(to + (3 * H + at), load_part(M + (edges + at), n), n)
            right, down = _shares(own, h, size, one)
            of_angle = one - one
            for k in range(4):
                turn = _turn(k, size)
                if turn >= 0:
                    at = (5 + turn) * H + h
                    passed = load_part(T + (2 * edges + k * H + h), n)
                    x = load_part(own + at, n)
                    x = passed * (x + x - one)
                    if _is_right(k, size):
                        of_angle, x = of_angle + x, passed * right
                    else:
                        of_angle, x = of_angle - x, passed * down
                    store_part(to + at, x + x, n)
            if size.shared:
                store_part(to + (9 * H + h), of_angle, n)


_GATES = Fused("pyg_chimera.grid_gates", _composed, _fits, _forward, _backward)
