r"""The delta rule in chunks of directed paths on a GPU, as in `path_chunks`.

D and r are the decays within a chunk, and :math:`l_j = a_{last} \cdots a_{j+1}`. With
the part F of :math:`D \odot K K^T` below the diagonal, :math:`T = (I + F \,
diag(b))^{-1}`, and the state S before a chunk, its nodes write

.. math::
    u = U_0 - W S, \qquad U_0 = b \odot T V, \qquad W = b \odot T (r \odot K),

and the state after the chunk is :math:`(r_{last} I - E) S + K^T (l \odot U_0)`, where
:math:`E = K^T (l \odot W)`. Only this is sequential, with one product per chunk;
everything else is computed for all chunks in parallel. Backward, with the adjoint Z of
the state after a chunk, the gradient of values is

.. math::
    dv = X_0 + G Z, \qquad X_0 = T^T (b \odot (D^T \odot K Q^T) dY), \qquad
    G = T^T (b \odot l \odot K),

and the adjoint of the state before it is :math:`(r_{last} I - E^T) Z + Q^T (r \odot dY)
- K^T (r \odot X_0)`. Given u and dv, keys read as queries do, with the gradient
:math:`-dv` instead of dY, except that they do not read what their own node writes.

T is computed row by row: if nodes reflect (b > 1), sums of powers of a matrix would
suffer from cancellation.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_chimera.ops.common.triton_runtime import input_precision, on_device_of
from pyg_chimera.ops.recurrence import triton_chunk_form
from pyg_chimera.ops.recurrence.delta_scan.tensors import positive
from pyg_chimera.ops.recurrence.triton_chunk_form import (
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
from pyg_chimera.ops.recurrence.triton_mask_form import (
    channels_at_once,
    matrix_tile,
    tile_nodes,
)

__all__ = ["scan", "scan_gradients"]

#: Channels at a time.
_STEP = 32
#: Value channels at a time in `_key_gradients`, which needs the most registers.
_FEWER = 16
#: Value channels per program in `_carry_products`.
_CARRIED = 16
_OPTIONS = {"num_warps": 4, "num_stages": 1}


class _Saved(NamedTuple):
    """What is saved for the backward pass, for K chunks."""

    state: Tensor  #: the state after each chunk, [K, heads, N, P]
    end: Tensor  #: E beside K^T (l * U_0), [K, heads, N, N + P]
    inverse: Tensor  #: T, [K, heads, C, C]
    written: Tensor  #: u, [V, heads, P]
    decay: Tensor  #: r_last, [K, heads]; last, as it would misalign what follows it


# -------------------------------------------------------------------------- the calls


def scan(
    chunks: Chunks,
    paths: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    edge_weight: Tensor,
) -> tuple[Tensor, _Saved | tuple[()]]:
    """The output [V, heads, P], and what to save; `paths` are their first chunks."""
    if value.numel() == 0:
        return torch.zeros_like(value), ()
    query, key, value = (x.contiguous() for x in (query, key, value))
    beta = positive(beta).contiguous()
    weight = by_position(chunks, edge_weight)
    (groups, N), (V, heads, P) = key.shape[1:], value.shape
    y, u = value.new_empty(2, *value.shape)
    factors, size = value.new_empty(V, heads, N + P), triton_chunk_form.CHUNK
    inverse = value.new_empty(len(chunks.start) - 1, heads, size, size)
    programs, precision = chunks.programs(heads), input_precision(value)
    step, width = channels_at_once(N, _STEP), channels_at_once(P, _STEP)
    sizes = (weight.size(1), heads, groups, N, P, step, width, size)
    with on_device_of(value):
        _factors[(programs,)](
            key, value, beta, weight, inverse, factors, chunks.start, chunks.node,
            *sizes, precision, **_OPTIONS,
        )  # fmt: skip
        decay, end = ends(chunks, weight, key, factors)
        state = _carried(paths, decay, end, end)
        _outputs[(programs, triton.cdiv(P, width))](
            query, key, factors, weight, state, y, u, *chunks[:3], *sizes, precision,
            **_OPTIONS,
        )  # fmt: skip
    return y, _Saved(state, end, inverse, u, decay)


def scan_gradients(
    chunks: Chunks,
    paths: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    edge_weight: Tensor,
    saved: tuple[Tensor, ...],
    grad: Tensor,
) -> tuple[Tensor, ...]:
    """The gradients of `scan`: of query, key, value, beta and the edges' weights."""
    if value.numel() == 0:
        inputs = (query, key, value, beta, edge_weight)
        return tuple(map(torch.zeros_like, inputs))
    query, key, grad = (x.contiguous() for x in (query, key, grad))
    beta = positive(beta).contiguous()
    weight = by_position(chunks, edge_weight)
    (groups, N), (V, heads, P) = key.shape[1:], value.shape
    state, end, inverse, u, decay = saved
    size = triton_chunk_form.CHUNK
    factors = value.new_empty(V, heads, N + P)
    dv, dk = value.new_empty(value.shape), value.new_empty(V, heads, N)
    programs, precision = chunks.programs(heads), input_precision(value)
    step, width = channels_at_once(N, _STEP), channels_at_once(P, _STEP)
    down, across = triton.cdiv(N, step), triton.cdiv(P, width)
    sizes = (weight.size(1), heads, groups, N, P, step, width, size)
    left = torch.empty_like(state)
    with on_device_of(value):
        _adjoint_factors[(programs,)](
            query, key, grad, beta, weight, inverse, factors, chunks.start,
            chunks.node, *sizes, precision, **_OPTIONS,
        )  # fmt: skip
        _adjoint_ends[(programs, down, across)](
            query, key, grad, factors, weight, left, *chunks[:3], *sizes, precision,
            **_OPTIONS,
        )  # fmt: skip
        adjoint = _carried(paths, decay, end, left, reverse=True)
        _corrections[(programs, across)](
            factors, adjoint, dv, *chunks[:3], *sizes, precision, **_OPTIONS
        )
        _key_gradients[(programs, down)](
            query, key, u, grad, dv, weight, state, adjoint, dk, *chunks[:3],
            *sizes[:-2], _FEWER, size, precision, **_OPTIONS,
        )  # fmt: skip
    dq = product(chunks, weight, grad, u, key, state, turned=True)
    dq, dk = (x.unflatten(1, (groups, -1)).sum(2) for x in (dq, dk))
    adjoint *= 0.5  # both calls below add the terms with adjoints
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
    N, row, width = (*end.shape[2:], x.size(3))
    P = row - N
    out = x.new_empty(*x.shape[:3], P)
    grid = ((paths.numel() - 1) * x.size(1), triton.cdiv(P, _CARRIED))
    strides = (1, row) if reverse else (row, 1)
    _carry_products[grid](
        end, x, decay, out, paths, x.size(1), N, P, *strides, width,
        channels_at_once(N, 64), _CARRIED, reverse, input_precision(out), **_OPTIONS,
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
    """T of a chunk, and its rows of W = b * T (r * K) beside U_0 = b * T V."""
    k, first, size, h = chunk_of(START, HEADS)
    node, there = tile_nodes(NODE, first, size, 0, CHUNK)
    group = h // (HEADS // GROUPS)
    scores = tl.zeros([CHUNK, CHUNK], K.dtype.element_ty)
    for n in range(0, N, STEP):
        x = rows_of(K, node, there, group, n, GROUPS, N, STEP)
        scores = tl.dot(x, tl.trans(x), scores, input_precision=PRECISION)
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
        x = b[:, None] * tl.dot(T, reach[:, None] * x, input_precision=PRECISION)
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
    """S <- (decay I - E) S + x along a path, for a head and WIDTH value channels."""
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
        moved = tl.dot(e, S, input_precision=PRECISION)
        S = tl.load(DECAY + at) * S + x - moved
        places = at * (N * P) + n[:, None] * P + p[None, :]
        tl.store(OUT + places, S, mask=inside)


@triton.jit(do_not_specialize=["num_states"])
def _outputs(
    Q, K, FACTORS, W, STATE, Y, U, START, ONGOING, NODE, num_states,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    STEP: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What a chunk writes, and its output: WIDTH value channels."""
    k, first, size, h = chunk_of(START, HEADS)
    node, there = tile_nodes(NODE, first, size, 0, CHUNK)
    group, goes_on = h // (HEADS // GROUPS), tl.load(ONGOING + k)
    column = tl.program_id(1) * WIDTH
    p = column + tl.arange(0, WIDTH)
    scores = tl.zeros([CHUNK, CHUNK], Q.dtype.element_ty)
    moved = tl.zeros([CHUNK, WIDTH], Q.dtype.element_ty)
    read = tl.zeros([CHUNK, WIDTH], Q.dtype.element_ty)
    for n in range(0, N, STEP):
        c = n + tl.arange(0, STEP)
        S = state_slice(STATE, k - 1, h, goes_on, c, p, HEADS, N, P, P, 1)
        x = rows_of(FACTORS, node, there, h, n, HEADS, N + P, STEP)
        x = tl.where((c < N)[None, :], x, 0.0)
        moved = tl.dot(x, S, moved, input_precision=PRECISION)
        q = rows_of(Q, node, there, group, n, GROUPS, N, STEP)
        read = tl.dot(q, S, read, input_precision=PRECISION)
        x = rows_of(K, node, there, group, n, GROUPS, N, STEP)
        scores = tl.dot(q, tl.trans(x), scores, input_precision=PRECISION)
    u = rows_of(FACTORS, node, there, h, N + column, HEADS, N + P, WIDTH) - moved
    _store_rows(U, u, node, there, h, p, P, HEADS, P)
    weight = weights_of(W, first, size, h, num_states, 0, CHUNK)
    scores *= decays_of(weight, 0, CHUNK)
    y = tl.cumprod(weight, 0)[:, None] * read
    y = tl.dot(scores, u, y, input_precision=PRECISION)
    _store_rows(Y, y, node, there, h, p, P, HEADS, P)


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
        scores = tl.dot(q, tl.trans(x), scores, input_precision=PRECISION)
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


@triton.jit(do_not_specialize=["num_states"])
def _adjoint_ends(
    Q, K, DY, FACTORS, W, END, START, ONGOING, NODE, num_states, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, STEP: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Q^T (r * dY) - K^T (r * X_0): a slice of a chunk's contribution to adjoints."""
    k, first, size, h = chunk_of(START, HEADS)
    node, there = tile_nodes(NODE, first, size, 0, CHUNK)
    group = h // (HEADS // GROUPS)
    n, p = tl.program_id(1) * STEP, tl.program_id(2) * WIDTH
    reach = tl.cumprod(weights_of(W, first, size, h, num_states, 0, CHUNK), 0)
    q = rows_of(Q, node, there, group, n, GROUPS, N, STEP)
    dy = reach[:, None] * rows_of(DY, node, there, h, p, HEADS, P, WIDTH)
    end = tl.dot(tl.trans(q), dy, input_precision=PRECISION)
    x = rows_of(K, node, there, group, n, GROUPS, N, STEP)
    dv = -reach[:, None] * rows_of(FACTORS, node, there, h, N + p, HEADS, N + P, WIDTH)
    end = tl.dot(tl.trans(x), dv, end, input_precision=PRECISION)
    # NaN must not reach the path before.
    end = tl.where(tl.load(ONGOING + k) > 0, end, 0.0)
    n, p = n + tl.arange(0, STEP), p + tl.arange(0, WIDTH)
    at = END + (k.to(tl.int64) * HEADS + h) * (N * P) + n[:, None] * P + p[None, :]
    tl.store(at, end, mask=(n < N)[:, None] & (p < P)[None, :])


@triton.jit(do_not_specialize=["num_states"])
def _corrections(
    FACTORS, ADJOINT, DV, START, ONGOING, NODE, num_states, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, STEP: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """X_0 + G Z, the gradient of a chunk's values: WIDTH channels."""
    k, first, size, h = chunk_of(START, HEADS)
    node, there = tile_nodes(NODE, first, size, 0, CHUNK)
    goes_on, p = tl.load(ONGOING + k + 1), tl.program_id(1) * WIDTH
    x = rows_of(FACTORS, node, there, h, N + p, HEADS, N + P, WIDTH)
    p += tl.arange(0, WIDTH)
    for n in range(0, N, STEP):
        c = n + tl.arange(0, STEP)
        Z = state_slice(ADJOINT, k + 1, h, goes_on, c, p, HEADS, N, P, P, 1)
        g = rows_of(FACTORS, node, there, h, n, HEADS, N + P, STEP)
        g = tl.where((c < N)[None, :], g, 0.0)
        x = tl.dot(g, Z, x, input_precision=PRECISION)
    _store_rows(DV, x, node, there, h, p, P, HEADS, P)


@triton.jit(do_not_specialize=["num_states"])
def _key_gradients(
    Q, K, U, DY, DV, W, STATE, ADJOINT, DK, START, ONGOING, NODE, num_states,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    STEP: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk's keys, STEP channels: from writing, and from reading
    with the gradient -dv. In products of keys with keys, both occur: M + M^T.
    """
    k, first, size, h = chunk_of(START, HEADS)
    node, there = tile_nodes(NODE, first, size, 0, CHUNK)
    group, n = h // (HEADS // GROUPS), tl.program_id(1) * STEP
    before, after = tl.load(ONGOING + k), tl.load(ONGOING + k + 1)
    c = n + tl.arange(0, STEP)
    of_keys = tl.zeros([CHUNK, CHUNK], Q.dtype.element_ty)
    of_queries = tl.zeros([CHUNK, CHUNK], Q.dtype.element_ty)
    read = tl.zeros([CHUNK, STEP], Q.dtype.element_ty)
    left = tl.zeros([CHUNK, STEP], Q.dtype.element_ty)
    for p in range(0, P, WIDTH):
        rows = p + tl.arange(0, WIDTH)
        u = rows_of(U, node, there, h, p, HEADS, P, WIDTH)
        Z = state_slice(ADJOINT, k + 1, h, after, rows, c, HEADS, P, N, 1, P)
        left = tl.dot(u, Z, left, input_precision=PRECISION)
        dy = rows_of(DY, node, there, h, p, HEADS, P, WIDTH)
        of_queries = tl.dot(u, tl.trans(dy), of_queries, input_precision=PRECISION)
        dv = rows_of(DV, node, there, h, p, HEADS, P, WIDTH)
        of_keys = tl.dot(dv, tl.trans(u), of_keys, input_precision=PRECISION)
        S = state_slice(STATE, k - 1, h, before, rows, c, HEADS, P, N, 1, P)
        read = tl.dot(dv, S, read, input_precision=PRECISION)
    weight = weights_of(W, first, size, h, num_states, 0, CHUNK)
    decays, o = decays_of(weight, 0, CHUNK), tl.arange(0, CHUNK)
    dk = later_of(W, first, size, h, num_states, CHUNK)[:, None] * left
    dk -= tl.cumprod(weight, 0)[:, None] * read
    of_keys = tl.where(o[:, None] > o[None, :], -decays * of_keys, 0.0)
    x = rows_of(K, node, there, group, n, GROUPS, N, STEP)
    dk = tl.dot(of_keys + tl.trans(of_keys), x, dk, input_precision=PRECISION)
    x = rows_of(Q, node, there, group, n, GROUPS, N, STEP)
    dk = tl.dot(tl.trans(decays) * of_queries, x, dk, input_precision=PRECISION)
    _store_rows(DK, dk, node, there, h, c, N, HEADS, N)
