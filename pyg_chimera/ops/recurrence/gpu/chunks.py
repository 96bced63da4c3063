r"""The chunk form of a scan along paths on a GPU, from `"Transformers are SSMs"
<https://arxiv.org/abs/2405.21060>`_ (Section 6).

The states are :math:`C_i = a_i C_{i-1} + k_i v_i^{\top}`, and the outputs :math:`y_i =
C_i^{\top} q_i`. A path is cut into chunks of one tile each. With the decays
:math:`D_{ij} = a_i \cdots a_{j+1}` within a chunk, :math:`r_i = a_i \cdots a_{first}`
and :math:`l_j = a_{last} \cdots a_{j+1}`, the state :math:`C` before it and the adjoint
:math:`Z` after it, everything has one form:

.. math::
    y  &= (D \odot Q K^T) V + r \odot Q C, &\quad
    dv &= (D^T \odot K Q^T) dY + l \odot K Z, \\
    dq &= (D \odot dY V^T) K + r \odot dY C^T, &\quad
    dk &= (D^T \odot V dY^T) Q + l \odot V Z^T.

Decays are products, never quotients, so weights may have any sign, and be zero. Chunks
are processed in parallel: first what each adds to the state or adjoint,
:math:`K^T (l \odot V)` or :math:`Q^T (r \odot dY)`, then the states between chunks
(`carry`), the only states that are stored, and then the rest.

The gradient of a weight sums up what nodes from its own on read of what nodes before it
wrote: with :math:`d_{ij} = (q_i^{\top} k_j) (dy_i^{\top} v_j)`, and one more column for
the state before and one more row for the state after,
:math:`da_t = \sum_j (D^T d)_{tj} D_{t-1,j}`.
"""

from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_chimera.ops.common.triton_runtime import input_precision, on_device_of
from pyg_chimera.ops.recurrence.gpu.carry import carry
from pyg_chimera.ops.recurrence.gpu.mask import (
    channels_at_once,
    tile_nodes,
    tile_places,
)
from pyg_chimera.ops.recurrence.plan.states import StateGraph

#: Positions per chunk. Tiles of 64 do not fit in the registers.
CHUNK = 32
#: Channels at a time: of the inputs of scores, and of what scores are multiplied with.
_STEP, _WIDTH = 32, 32
#: Value channels at a time in `_weight_gradient`, which needs the most registers.
_FEWER = 16
_OPTIONS = {"num_warps": 4, "num_stages": 1}


class Chunks(NamedTuple):
    """Paths in chunks, on a device: S positions, L edges, K chunks."""

    start: Tensor  #: [K + 1] first position of each chunk, int32
    ongoing: Tensor  #: [K + 1] whether it continues the path of the last one, int32
    node: Tensor  #: [S] the row of the inputs at each position, int32
    place: Tensor  #: [L] the position that each edge leads to, int64

    @classmethod
    def of(
        cls, ptr: np.ndarray, node: np.ndarray, place: np.ndarray, device: torch.device
    ) -> "Chunks":
        """Cuts paths, which begin at the positions `ptr`, into chunks."""
        count = -(-np.diff(ptr) // CHUNK)
        step = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
        start = np.append(np.repeat(ptr[:-1], count) + CHUNK * step, ptr[-1])
        ongoing = np.append(step > 0, False)
        tables = (start, ongoing, node)
        moved = (torch.from_numpy(x.astype(np.int32)).to(device) for x in tables)
        places = torch.from_numpy(place.astype(np.int64)).to(device)
        return cls(*moved, places)  # type: ignore[call-arg]

    @classmethod
    def of_paths(cls, graph: StateGraph, device: torch.device) -> "Chunks":
        """The chunks of a graph of paths."""
        _, parent, edge = graph.parents
        place = np.empty_like(edge)  # at most one edge leads to each position
        place[edge] = parent + 1
        return cls.of(graph.component_ptr, graph.state, place, device)

    def programs(self, heads: int) -> int:
        """One program per chunk and head."""
        return (self.start.numel() - 1) * heads


# -------------------------------------------------------------------------- the calls


def scan(
    chunks: Chunks, query: Tensor, key: Tensor, value: Tensor, edge_weight: Tensor
) -> tuple[Tensor, Tensor]:
    """The output [S, heads, P] and the states after each chunk, [K, heads, N, P]."""
    if query.numel() == 0 or value.numel() == 0:
        return torch.zeros_like(value), value.new_empty(0)
    query, key, value = (x.contiguous() for x in (query, key, value))
    weight = by_position(chunks, edge_weight)
    state = _carried(chunks, weight, key, value)
    return product(chunks, weight, query, key, value, state), state


def scan_gradients(
    chunks: Chunks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_weight: Tensor,
    state: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `scan`: of query, key, value and the edges' weights."""
    if query.numel() == 0 or value.numel() == 0:
        return query * 0, key * 0, value * 0, edge_weight * 0
    query, key, value, grad = (x.contiguous() for x in (query, key, value, grad))
    weight = by_position(chunks, edge_weight)
    adjoint = _carried(chunks, weight, query, grad, reverse=True)
    dq = product(chunks, weight, grad, value, key, state, turned=True)
    dk = product(chunks, weight, value, grad, query, adjoint, turned=True, up=True)
    dv = product(chunks, weight, key, query, grad, adjoint, up=True)
    dq, dk = (x.unflatten(1, (query.size(1), -1)).sum(2) for x in (dq, dk))
    dw = weight_gradient(chunks, weight, query, key, value, grad, state, adjoint)
    return dq, dk, dv, dw[:, chunks.place].t()


def by_position(chunks: Chunks, edge_weight: Tensor) -> Tensor:
    """The weight of the edge to each position, [heads, S]; zero at a path's start."""
    weight = edge_weight.new_zeros(edge_weight.size(1), chunks.node.numel())
    return weight.index_copy_(1, chunks.place, edge_weight.t())


def _carried(
    chunks: Chunks, weight: Tensor, X: Tensor, Z: Tensor, reverse: bool = False
) -> Tensor:
    """The states after each chunk from keys X and values Z; if reversed, the adjoints
    before each chunk from queries X and gradients Z.
    """
    return carry(*ends(chunks, weight, X, Z, reverse), reverse)


def ends(
    chunks: Chunks, weight: Tensor, X: Tensor, Z: Tensor, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Each chunk's decay, [K, heads], and its contribution to the state after it."""
    heads, (groups, N), P = len(weight), X.shape[1:], Z.size(2)
    end = Z.new_empty(len(chunks.start) - 1, heads, N, P)
    decay = Z.new_empty(len(chunks.start) - 1, heads)
    step, width = channels_at_once(N, _STEP), channels_at_once(P, _WIDTH)
    grid = (chunks.programs(heads), triton.cdiv(N, step), triton.cdiv(P, width))
    with on_device_of(Z):
        _chunk_ends[grid](
            X, Z, weight, decay, end, *chunks[:3], weight.size(1), heads, groups, N, P,
            step, width, CHUNK, reverse, input_precision(Z), **_OPTIONS,
        )  # fmt: skip
    return decay, end


def product(
    chunks: Chunks,
    weight: Tensor,
    X: Tensor,
    Y: Tensor,
    Z: Tensor,
    state: Tensor,
    turned: bool = False,
    up: bool = False,
) -> Tensor:
    """(D * X Y^T) Z + r * X C, with C^T if `turned`; with D^T, l, adjoints if `up`."""
    heads, channels = len(weight), Z.size(2)
    out = Z.new_empty(Z.size(0), heads, channels)
    step, width = (channels_at_once(x.size(2), _STEP) for x in (X, Z))
    strides = (1, X.size(2)) if turned else (channels, 1)
    grid = (chunks.programs(heads), triton.cdiv(channels, width))
    with on_device_of(Z):
        _chunk_product[grid](
            X, Y, Z, weight, state, out, *chunks[:3], weight.size(1), heads, X.size(1),
            Z.size(1), X.size(2), channels, *strides, step, width, CHUNK, up,
            input_precision(Z), **_OPTIONS,
        )  # fmt: skip
    return out


def weight_gradient(
    chunks: Chunks,
    weight: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    state: Tensor,
    adjoint: Tensor,
) -> Tensor:
    """The gradients of the weights by position, [heads, S]."""
    (groups, N), (heads, P) = query.shape[1:], value.shape[1:]
    dw = torch.empty_like(weight)
    with on_device_of(value):
        _weight_gradient[(chunks.programs(heads),)](
            query, key, value, grad, weight, state, adjoint, dw, *chunks[:3],
            weight.size(1), heads, groups, N, P, channels_at_once(N, _STEP),
            _FEWER, CHUNK, input_precision(value), **_OPTIONS,
        )  # fmt: skip
    return dw


# --------------------------------------------------------------- the parts of kernels


@triton.jit
def chunk_of(START, heads):
    """A program's chunk, the chunk's first position and size, and the head."""
    k, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    first = tl.load(START + k)
    return k, first, tl.load(START + k + 1) - first, h


@triton.jit
def weights_of(W, first, size, h, num_states, shift, CHUNK: tl.constexpr):
    """The weights of a chunk's positions, shifted; 1 beyond its ends."""
    o = tl.arange(0, CHUNK) + shift
    at = W + h.to(tl.int64) * num_states + first + o
    return tl.load(at, mask=(o >= 0) & (o < size), other=1.0)


@triton.jit
def later_of(W, first, size, h, num_states, CHUNK: tl.constexpr):
    """l: the product of the weights after each position of a chunk."""
    later = weights_of(W, first, size, h, num_states, 1, CHUNK)
    return tl.cumprod(later, 0, reverse=True)


@triton.jit
def decays_of(weight, behind, CHUNK: tl.constexpr):
    """D_ij, the product of weights j + 1 .. i, for rows i shifted by `behind`."""
    i, j = tl.arange(0, CHUNK)[:, None] - behind, tl.arange(0, CHUNK)[None, :]
    one = tl.full([CHUNK, CHUNK], 1.0, weight.dtype)
    decays = tl.cumprod(tl.where(i > j, weight[:, None], one), 0)
    return tl.where(i >= j, decays, 0.0)


@triton.jit
def state_slice(
    STATE, k, h, there, x, z, HEADS: tl.constexpr, X_SIZE: tl.constexpr,
    Z_SIZE: tl.constexpr, X_STRIDE: tl.constexpr, Z_STRIDE: tl.constexpr,
):  # fmt: skip
    """Entries [x, z] of the state of chunk k; zero unless `there`."""
    state = STATE + (k.to(tl.int64) * HEADS + h) * (X_SIZE * Z_SIZE)
    inside = (x < X_SIZE * there)[:, None] & (z < Z_SIZE)[None, :]
    at = state + x[:, None] * X_STRIDE + z[None, :] * Z_STRIDE
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def rows_of(
    X, node, there, h, channel, HEADS: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """WIDTH channels of the given rows of X [rows, HEADS, SIZE]."""
    at, inside = tile_places(node, there, h, channel, HEADS, SIZE, WIDTH)
    return tl.load(X + at, mask=inside, other=0.0)


# ------------------------------------------------------------------------- the kernels


@triton.jit(do_not_specialize=["num_states"])
def _chunk_ends(
    X, Z, W, DECAY, END, START, ONGOING, NODE, num_states, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, N: tl.constexpr, P: tl.constexpr, STEP: tl.constexpr,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """X^T (l * Z), or with r if reversed: a slice of a chunk's own contribution."""
    k, first, size, h = chunk_of(START, HEADS)
    node, there = tile_nodes(NODE, first, size, 0, CHUNK)
    n, p = tl.program_id(1) * STEP, tl.program_id(2) * WIDTH
    x = rows_of(X, node, there, h // (HEADS // GROUPS), n, GROUPS, N, STEP)
    z = rows_of(Z, node, there, h, p, HEADS, P, WIDTH)
    reach = tl.cumprod(weights_of(W, first, size, h, num_states, 0, CHUNK), 0)
    factor = reach if REVERSE else later_of(W, first, size, h, num_states, CHUNK)
    end = tl.dot(tl.trans(x), factor[:, None] * z, input_precision=PRECISION)
    if REVERSE:  # NaN must not reach the path before
        end = tl.where(tl.load(ONGOING + k) > 0, end, 0.0)
    n, p = n + tl.arange(0, STEP), p + tl.arange(0, WIDTH)
    at = END + (k.to(tl.int64) * HEADS + h) * (N * P) + n[:, None] * P + p[None, :]
    tl.store(at, end, mask=(n < N)[:, None] & (p < P)[None, :])
    if (tl.program_id(1) == 0) & (tl.program_id(2) == 0):
        whole = tl.sum(tl.where(tl.arange(0, CHUNK) == CHUNK - 1, reach, 0.0), 0)
        tl.store(DECAY + k * HEADS + h, whole)


@triton.jit(do_not_specialize=["num_states"])
def _chunk_product(
    X, Y, Z, W, STATE, OUT, START, ONGOING, NODE, num_states, HEADS: tl.constexpr,
    X_HEADS: tl.constexpr, Z_HEADS: tl.constexpr, X_SIZE: tl.constexpr,
    Z_SIZE: tl.constexpr, X_STRIDE: tl.constexpr, Z_STRIDE: tl.constexpr,
    STEP: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr, UP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One chunk of (D * X Y^T) Z + r * X C, or its `UP` form: WIDTH of Z's channels."""
    k, first, size, h = chunk_of(START, HEADS)
    node, there = tile_nodes(NODE, first, size, 0, CHUNK)
    z = tl.program_id(1) * WIDTH
    x_head, z_head = h // (HEADS // X_HEADS), h // (HEADS // Z_HEADS)
    goes_on = tl.load(ONGOING + k + UP)  # this chunk, or with UP the next one
    beside = k + 1 if UP else k - 1
    weight = weights_of(W, first, size, h, num_states, 0, CHUNK)
    if UP:
        factor = later_of(W, first, size, h, num_states, CHUNK)
    else:
        factor = tl.cumprod(weight, 0)
    scores = tl.zeros([CHUNK, CHUNK], X.dtype.element_ty)
    out = tl.zeros([CHUNK, WIDTH], X.dtype.element_ty)
    for channel in range(0, X_SIZE, STEP):  # if unrolled, it would exceed the registers
        x = rows_of(X, node, there, x_head, channel, X_HEADS, X_SIZE, STEP)
        y = rows_of(Y, node, there, x_head, channel, X_HEADS, X_SIZE, STEP)
        scores += tl.dot(x, tl.trans(y), input_precision=PRECISION)
        state = state_slice(
            STATE, beside, h, goes_on, channel + tl.arange(0, STEP),
            z + tl.arange(0, WIDTH), HEADS, X_SIZE, Z_SIZE, X_STRIDE, Z_STRIDE,
        )  # fmt: skip
        out += tl.dot(x, state, input_precision=PRECISION)
    decays = decays_of(weight, 0, CHUNK)
    if UP:
        decays = tl.trans(decays)
    rows = rows_of(Z, node, there, z_head, z, Z_HEADS, Z_SIZE, WIDTH)
    out = factor[:, None] * out
    out += tl.dot(decays * scores, rows, input_precision=PRECISION)
    at, inside = tile_places(node, there, h, z, HEADS, Z_SIZE, WIDTH)
    tl.store(OUT + at, out, mask=inside)


@triton.jit(do_not_specialize=["num_states"])
def _weight_gradient(
    Q, K, V, DY, W, STATE, ADJOINT, DW, START, ONGOING, NODE, num_states,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    STEP_N: tl.constexpr, STEP_P: tl.constexpr, CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of a chunk's weights."""
    k, first, size, h = chunk_of(START, HEADS)
    node, there = tile_nodes(NODE, first, size, 0, CHUNK)
    group = h // (HEADS // GROUPS)
    before, after = tl.load(ONGOING + k), tl.load(ONGOING + k + 1)
    read = tl.zeros([CHUNK], Q.dtype.element_ty)  # from the state before, by each row
    left = tl.zeros([CHUNK], Q.dtype.element_ty)  # in the state after, by each row
    passed = tl.zeros([STEP_N], Q.dtype.element_ty)  # from one to the other, by channel
    for n in range(0, N, STEP_N):
        q = rows_of(Q, node, there, group, n, GROUPS, N, STEP_N)
        x = rows_of(K, node, there, group, n, GROUPS, N, STEP_N)
        for p in range(0, P, STEP_P):
            rows, columns = p + tl.arange(0, STEP_P), n + tl.arange(0, STEP_N)
            C = state_slice(STATE, k - 1, h, before, rows, columns, HEADS, P, N, 1, P)
            Z = state_slice(ADJOINT, k + 1, h, after, rows, columns, HEADS, P, N, 1, P)
            dy = rows_of(DY, node, there, h, p, HEADS, P, STEP_P)
            v = rows_of(V, node, there, h, p, HEADS, P, STEP_P)
            read += tl.sum(q * tl.dot(dy, C, input_precision=PRECISION), 1)
            left += tl.sum(x * tl.dot(v, Z, input_precision=PRECISION), 1)
            passed += tl.sum(C * Z, 0)
    scores = tl.zeros([CHUNK, CHUNK], Q.dtype.element_ty)
    products = tl.zeros([CHUNK, CHUNK], Q.dtype.element_ty)
    for n in range(0, N, STEP_N):
        q = rows_of(Q, node, there, group, n, GROUPS, N, STEP_N)
        x = rows_of(K, node, there, group, n, GROUPS, N, STEP_N)
        scores += tl.dot(q, tl.trans(x), input_precision=PRECISION)
    for p in range(0, P, STEP_P):
        dy = rows_of(DY, node, there, h, p, HEADS, P, STEP_P)
        v = rows_of(V, node, there, h, p, HEADS, P, STEP_P)
        products += tl.dot(dy, tl.trans(v), input_precision=PRECISION)
    i, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    d = tl.where(i >= j, scores * products, 0.0)
    d += tl.where(i == size - 1, left[None, :], 0.0)
    o = tl.arange(0, CHUNK)
    read += tl.where(o == size - 1, tl.sum(passed, 0), 0.0)
    decays = decays_of(weights_of(W, first, size, h, num_states, 0, CHUNK), 0, CHUNK)
    sums = tl.dot(tl.trans(decays), d, input_precision=PRECISION)
    of_before = tl.sum(decays * read[:, None], 0)
    behind = weights_of(W, first, size, h, num_states, -1, CHUNK)
    dw = tl.sum(sums * decays_of(behind, 1, CHUNK), 1)
    dw += of_before * tl.cumprod(behind, 0)
    at = h.to(tl.int64) * num_states + first + o
    tl.store(DW + at, dw, mask=there)
