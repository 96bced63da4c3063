r"""The delta rule in chunks of directed paths on a GPU: the WY form of DeltaNet.

Within a chunk, states decay by :math:`D_{ij} = a_i \cdots a_{j+1}` from node j to i, by
:math:`r_i = a_i \cdots a_1` from before the chunk, and by :math:`l_j = a_{last} \cdots
a_{j+1}` to its end. With
the part F of :math:`D \odot K K^T` below the diagonal, :math:`T = (I + F \,
diag(b))^{-1}`, and the state S before a chunk, its nodes write

.. math::
    u = U_0 + W S, \qquad U_0 = b \odot T V, \qquad W = -b \odot T (r \odot K),

and the state after the chunk is :math:`(r_{last} I + E) S + K^T (l \odot U_0)`, where
:math:`E = K^T (l \odot W)`. Only this is sequential, with one product per chunk;
everything else is computed for all chunks in parallel. What queries read of u is then
the product of `chunks`. Backward, with the adjoint Z of the state after a
chunk, the gradient of values is

.. math::
    dv = X_0 + G Z, \qquad X_0 = T^T (b \odot (D^T \odot K Q^T) dY), \qquad
    G = T^T (b \odot l \odot K),

and the adjoint of the state before it is :math:`(r_{last} I + E^T) Z + Q^T (r \odot dY)
- K^T (r \odot X_0)`. Given u and dv, keys read as queries do, with the gradient
:math:`-dv` instead of dY, except that they do not read what their own node writes.

T is computed row by row: if nodes reflect (b > 1), sums of powers of a matrix would
suffer from cancellation.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_chimera.ops.common.cache import table
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.triton_runtime import input_precision, on_device_of
from pyg_chimera.ops.recurrence.gpu import chunks as chunk_kernels
from pyg_chimera.ops.recurrence.gpu.chunks import (
    Chunks,
    by_position,
    chunk_of,
    decays_of,
    ends,
    later_of,
    product,
    rows_of,
    state_slice,
    weight_gradient,
    weights_of,
)
from pyg_chimera.ops.recurrence.gpu.mask import (
    channels_at_once,
    matrix_tile,
    tile_nodes,
)
from pyg_chimera.ops.recurrence.plan.delta_graph import DeltaGraph, positive

#: Channels at a time.
_STEP = 32
#: Value channels per program in `_carry_products`.
_CARRIED = 16
_OPTIONS = {"num_warps": 4, "num_stages": 1}


class _Saved(NamedTuple):
    """What is saved for the backward pass, for K chunks."""

    state: Tensor  #: the state after each chunk, [K, heads, N, P]
    end: Tensor  #: E beside K^T (l * U_0), [K, heads, N, N + P]
    inverse: Tensor  #: T, [K, heads, C, C]
    written: Tensor  #: u, [V, heads, P]


class _Operands(NamedTuple):
    """The inputs, as kernels take them."""

    chunks: Chunks
    paths: Tensor  #: the first chunk of each path, [paths + 1], int32
    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor  #: not zero
    weight: Tensor  #: by position, [heads, S]
    constants: tuple  #: sizes, and the precision of products

    @classmethod
    def of(cls, call: Call) -> "_Operands":
        value = call.inputs.value
        chunks, paths = table(_paths, call.structure, value.device)
        query, key, value, beta = (x.contiguous() for x in call.inputs[:4])
        weight = by_position(chunks, call.inputs.edge_weight)
        (groups, N), (heads, P) = key.shape[1:], value.shape[1:]
        step, width = channels_at_once(N, _STEP), channels_at_once(P, _STEP)
        sizes = (weight.size(1), heads, groups, N, P, step, width)
        constants = (*sizes, chunk_kernels.CHUNK, input_precision(value))
        return cls(chunks, paths, query, key, value, positive(beta), weight, constants)


def _paths(graph: DeltaGraph, device: torch.device) -> tuple[Chunks, Tensor]:
    """The chunks of paths, and the first chunk of each path."""
    count = -(-np.diff(graph.states.component_ptr) // chunk_kernels.CHUNK)
    first = np.append(0, np.cumsum(count)).astype(np.int32)
    return Chunks.of_paths(graph.states, device), torch.from_numpy(first).to(device)


# -------------------------------------------------------------------------- the calls


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P], and what to save."""
    if call.inputs.value.numel() == 0:
        return torch.zeros_like(call.inputs.value), ()
    chunks, paths, query, key, value, beta, weight, constants = _Operands.of(call)
    (V, heads, P), N, size = value.shape, key.size(2), chunk_kernels.CHUNK
    factors = value.new_empty(V, heads, N + P)
    inverse = value.new_empty(len(chunks.start) - 1, heads, size, size)
    with on_device_of(value):
        _factors[(chunks.programs(heads),)](
            key, value, beta, weight, inverse, factors, chunks.start, chunks.node,
            *constants, **_OPTIONS,
        )  # fmt: skip
        decay, end = ends(chunks, weight, key, factors)
        state = _carried(paths, decay, end, end)
        u = _corrected(chunks, factors, state)
    y = product(chunks, weight, query, key, u, state)
    return y, _Saved(state, end, inverse, u)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """The gradients of query, key, value, beta and the edges' weights."""
    if grad.numel() == 0:
        return tuple(map(torch.zeros_like, call.inputs[:5]))
    chunks, paths, query, key, value, beta, weight, constants = _Operands.of(call)
    (V, heads, P), (groups, N), grad = value.shape, key.shape[1:], grad.contiguous()
    state, end, inverse, u = saved
    factors = value.new_empty(V, heads, N + P)
    with on_device_of(value):
        _adjoint_factors[(chunks.programs(heads),)](
            query, key, grad, beta, weight, inverse, factors, chunks.start,
            chunks.node, *constants, **_OPTIONS,
        )  # fmt: skip
        decay, left = ends(chunks, weight, query, grad, reverse=True)
        X_0 = factors[..., N:].contiguous()
        left -= ends(chunks, weight, key, X_0, reverse=True)[1]
        adjoint = _carried(paths, decay, end, left, reverse=True)
        dv = _corrected(chunks, factors, adjoint, up=True)
    adjoint *= 0.5  # both readers below add the terms with adjoints
    dq = product(chunks, weight, grad, u, key, state, turned=True)
    dk = product(chunks, weight, u, grad, query, adjoint, turned=True, up=True)
    dk += product(chunks, weight, u, -dv, key, adjoint, turned=True, up=True)
    dk += product(chunks, weight, -dv, u, key, state, turned=True)
    dq, dk = (x.unflatten(1, (groups, -1)).sum(2) for x in (dq, dk))
    # Keys do not read what their own node writes, which both products contain.
    own = (u * dv).sum(-1).unflatten(1, (groups, -1)).sum(2, keepdim=True)
    dk += 2 * own * key
    operands = (key, u, grad, state, adjoint)
    dw = weight_gradient(chunks, weight, query, *operands)
    dw += weight_gradient(chunks, weight, key, key, u, -dv, state, adjoint)
    share = beta.unsqueeze(-1)
    db = (u / share * (dv / share)).sum(-1)
    return dq, dk, dv, db, dw[:, chunks.place].t()


def _carried(
    paths: Tensor, decay: Tensor, end: Tensor, x: Tensor, reverse: bool = False
) -> Tensor:
    """The states after each chunk, or if reversed the adjoints before it. The first N
    columns of `end` are E, the last P columns of x are the chunks' own contributions.
    """
    (heads, N, row), width = end.shape[1:], x.size(3)
    P = row - N
    out = x.new_empty(*x.shape[:3], P)
    grid = ((paths.numel() - 1) * heads, triton.cdiv(P, _CARRIED))
    strides = (1, row) if reverse else (row, 1)
    _carry_products[grid](
        end, x, decay, out, paths, heads, N, P, *strides, width,
        channels_at_once(N, 64), _CARRIED, reverse, input_precision(out), **_OPTIONS,
    )  # fmt: skip
    return out


def _corrected(
    chunks: Chunks, factors: Tensor, state: Tensor, up: bool = False
) -> Tensor:
    """U_0 + W S, or with `up` X_0 + G Z: what nodes write, or the gradients of values,
    given the states (or adjoints) of all chunks.
    """
    heads, N, P = state.shape[1:]
    out = factors.new_empty(*factors.shape[:2], P)
    step, width = channels_at_once(N, _STEP), channels_at_once(P, _STEP)
    _corrections[(chunks.programs(heads), triton.cdiv(P, width))](
        factors, state, out, *chunks[:3], heads, N, P, step, width,
        chunk_kernels.CHUNK, up, input_precision(out), **_OPTIONS,
    )  # fmt: skip
    return out


# --------------------------------------------------------------- the parts of kernels


@triton.jit
def _square(matrix, k, h, HEADS: tl.constexpr, CHUNK: tl.constexpr):
    """Pointers to the matrix of a chunk."""
    first = (k.to(tl.int64) * HEADS + h) * (CHUNK * CHUNK)
    return matrix_tile(matrix + first, 0, 0, 1, CHUNK)


@triton.jit
def _store_rows(X, x, node, there, h, c, stop, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Stores the channels c < stop of some rows of X [rows, HEADS, SIZE]."""
    at = (node[:, None] * HEADS + h) * SIZE + c[None, :]
    tl.store(X + at, x, mask=there[:, None] & (c < stop)[None, :])


# ------------------------------------------------------------------------- the kernels


@triton.jit(do_not_specialize=["num_states"])
def _factors(
    K, V, B, W, INVERSE, OUT, START, NODE, num_states, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, STEP: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """T of a chunk, and its rows of W = -b * T (r * K) beside U_0 = b * T V."""
    k, first, size, h = chunk_of(START, HEADS)
    node, there = tile_nodes(NODE, first, size, 0, CHUNK)
    group = h // (HEADS // GROUPS)
    scores = tl.zeros([CHUNK, CHUNK], K.dtype.element_ty)
    for n in range(0, N, STEP):
        x = rows_of(K, node, there, group, n, GROUPS, N, STEP)
        scores += tl.dot(x, tl.trans(x), input_precision=PRECISION)
    o = tl.arange(0, CHUNK)
    b = tl.load(B + node * HEADS + h, mask=there, other=0.0)
    weight = weights_of(W, first, size, h, num_states, 0, CHUNK)
    T = -decays_of(weight, 0, CHUNK) * scores * b[None, :]
    T = tl.where(o[:, None] > o[None, :], T, 0.0)
    for i in range(1, CHUNK):
        is_row = o[:, None] == i
        row = tl.sum(tl.where(is_row, T, 0.0), 0)
        row += tl.sum(row[:, None] * T, 0)  # with the rows before, which are done
        T = tl.where(is_row, row[None, :], T)
    T = tl.where(o[:, None] == o[None, :], 1.0, T)
    tl.store(_square(INVERSE, k, h, HEADS, CHUNK), T)
    reach = tl.cumprod(weight, 0)
    for n in range(0, N, STEP):
        x = rows_of(K, node, there, group, n, GROUPS, N, STEP)
        x = -b[:, None] * tl.dot(T, reach[:, None] * x, input_precision=PRECISION)
        c = n + tl.arange(0, STEP)
        _store_rows(OUT, x, node, there, h, c, N, HEADS, N + P)
    for p in range(0, P, WIDTH):
        x = rows_of(V, node, there, h, p, HEADS, P, WIDTH)
        x = b[:, None] * tl.dot(T, x, input_precision=PRECISION)
        c = N + p + tl.arange(0, WIDTH)
        _store_rows(OUT, x, node, there, h, c, N + P, HEADS, N + P)


@triton.jit
def _carry_products(
    E, X, DECAY, OUT, PATHS, HEADS: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    E_ROW: tl.constexpr, E_COLUMN: tl.constexpr, X_ROW: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """S <- (decay I + E) S + x along a path, for a head and WIDTH value channels."""
    path, h = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    n, p = tl.arange(0, ROWS), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    square = (n < N)[:, None] & (n < N)[None, :]
    inside = (n < N)[:, None] & (p < P)[None, :]
    first, last = tl.load(PATHS + path), tl.load(PATHS + path + 1)
    S = tl.zeros([ROWS, WIDTH], OUT.dtype.element_ty)
    for step in range(0, last - first):
        k = last - 1 - step if REVERSE else first + step
        at = k.to(tl.int64) * HEADS + h
        places = at * (N * (N + P)) + n[:, None] * E_ROW + n[None, :] * E_COLUMN
        e = tl.load(E + places, mask=square, other=0.0)
        places = at * (N * X_ROW) + n[:, None] * X_ROW + (X_ROW - P + p)[None, :]
        x = tl.load(X + places, mask=inside, other=0.0)
        x += tl.load(DECAY + at) * S
        S = x + tl.dot(e, S, input_precision=PRECISION)
        places = at * (N * P) + n[:, None] * P + p[None, :]
        tl.store(OUT + places, S, mask=inside)


@triton.jit(do_not_specialize=["num_states"])
def _adjoint_factors(
    Q, K, DY, B, W, INVERSE, OUT, START, NODE, num_states, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, STEP: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A chunk's rows of G beside X_0."""
    k, first, size, h = chunk_of(START, HEADS)
    node, there = tile_nodes(NODE, first, size, 0, CHUNK)
    group = h // (HEADS // GROUPS)
    scores = tl.zeros([CHUNK, CHUNK], K.dtype.element_ty)
    for n in range(0, N, STEP):
        x = rows_of(K, node, there, group, n, GROUPS, N, STEP)
        q = rows_of(Q, node, there, group, n, GROUPS, N, STEP)
        scores += tl.dot(q, tl.trans(x), input_precision=PRECISION)
    weight = weights_of(W, first, size, h, num_states, 0, CHUNK)
    scores *= decays_of(weight, 0, CHUNK)
    b = tl.load(B + node * HEADS + h, mask=there, other=0.0)
    T = tl.load(_square(INVERSE, k, h, HEADS, CHUNK))
    factor = b * later_of(W, first, size, h, num_states, CHUNK)
    for n in range(0, N, STEP):
        x = rows_of(K, node, there, group, n, GROUPS, N, STEP)
        x = tl.dot(tl.trans(T), factor[:, None] * x, input_precision=PRECISION)
        c = n + tl.arange(0, STEP)
        _store_rows(OUT, x, node, there, h, c, N, HEADS, N + P)
    for p in range(0, P, WIDTH):
        x = rows_of(DY, node, there, h, p, HEADS, P, WIDTH)
        x = b[:, None] * tl.dot(tl.trans(scores), x, input_precision=PRECISION)
        x = tl.dot(tl.trans(T), x, input_precision=PRECISION)
        c = N + p + tl.arange(0, WIDTH)
        _store_rows(OUT, x, node, there, h, c, N + P, HEADS, N + P)


@triton.jit
def _corrections(
    FACTORS, STATE, OUT, START, ONGOING, NODE, HEADS: tl.constexpr, N: tl.constexpr,
    P: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    UP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """U_0 + W S of a chunk, or its `UP` form X_0 + G Z: WIDTH value channels."""
    k, first, size, h = chunk_of(START, HEADS)
    node, there = tile_nodes(NODE, first, size, 0, CHUNK)
    goes_on = tl.load(ONGOING + k + UP)  # this chunk, or with UP the next one
    beside, p = k + 1 if UP else k - 1, tl.program_id(1) * WIDTH
    x = rows_of(FACTORS, node, there, h, N + p, HEADS, N + P, WIDTH)
    p += tl.arange(0, WIDTH)
    for n in range(0, N, STEP):
        c = n + tl.arange(0, STEP)
        S = state_slice(STATE, beside, h, goes_on, c, p, HEADS, N, P, P, 1)
        g = rows_of(FACTORS, node, there, h, n, HEADS, N + P, STEP)
        g = tl.where((c < N)[None, :], g, 0.0)
        x += tl.dot(g, S, input_precision=PRECISION)
    _store_rows(OUT, x, node, there, h, p, P, HEADS, P)
