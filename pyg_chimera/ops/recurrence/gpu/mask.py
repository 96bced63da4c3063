r"""The mask form on a GPU: one matrix per block of nodes, cut into tiles.

.. math::
    y = (L \odot Q K^T) V, \qquad L = (I - A)^{-1}

for each block of nodes and each head. Everything but the inverse has the form
:math:`(L \odot X Y^T) Z`, or the same with :math:`L^T`:

==========================================  ====================================
:math:`y  = (L \odot Q K^T) V`
:math:`dq = (L \odot dY V^T) K`             :math:`dk = (L^T \odot V dY^T) Q`
:math:`dv = (L^T \odot K Q^T) dY`           :math:`dL = (Q K^T) \odot (dY V^T)`
:math:`M = L^T dL`                          :math:`dA_{ij} = \langle M_i, L_j \rangle`
==========================================  ====================================

since :math:`dA = L^T dL L^T`, of which only entries of edges are needed. No program
writes what another one reads or writes.

Matrices are stored one after the other, [heads, total]: that of a block of n nodes
begins at its offset and has n rows of length `width`, both rounded up to whole tiles.
Tables map positions to the rows of inputs and outputs.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_chimera.ops.common.triton_runtime import input_precision, on_device_of
from pyg_chimera.ops.structure.symbolic_factor import Blocks

#: Rows and columns of a tile. Tiles of 64 do not fit in the registers.
TILE = 32
#: The most columns of a matrix that is inverted by rows.
LANES = 512
#: Channels at a time: of the inputs of scores, and of what scores are multiplied with.
_STEP, _WIDTH = 32, 64
#: Kernel options: no prefetching of loads, as the products need the registers.
_OPTIONS = {"num_warps": 4, "num_stages": 1}


class _Sizes(NamedTuple):
    """What products of L, X, Y and Z are compiled for."""

    heads: int
    x_heads: int  #: those of X and Y
    z_heads: int
    x_size: int  #: channels
    z_size: int
    x_step: int  #: channels at a time
    z_step: int
    tile: int

    @classmethod
    def of(cls, L: Tensor, X: Tensor, Z: Tensor) -> "_Sizes":
        sizes = (len(L), X.size(1), Z.size(1), X.size(2), Z.size(2))
        steps = channels_at_once(X.size(2)), channels_at_once(Z.size(2), _WIDTH)
        return cls(*sizes, *steps, TILE)

    @property
    def slices(self) -> int:
        """Programs for all channels of Z."""
        return triton.cdiv(self.z_size, self.z_step)


class Masks(NamedTuple):
    """The layout of a batch's matrices, on a device: T blocks, E edges."""

    ptr: Tensor  #: [T + 1] first position of each block, int32
    node: Tensor  #: the row of the inputs at each position, int32
    offset: Tensor  #: [T] first entry of each matrix, int64
    row: Tensor  #: [E] first entry of the row of an edge's target, int64
    col: Tensor  #: [E] first entry of the row of its source, int64
    place: Tensor  #: [E] the entry of an edge, int64
    stop: Tensor  #: [E] how many leading columns of both rows may be nonzero, int32
    total: int  #: entries per head
    tiles: int  #: rows of tiles of the largest matrix

    @classmethod
    def of(cls, blocks: Blocks, device: torch.device) -> "Masks":
        """The layout of the matrices of a batch of graphs."""
        width = -(-blocks.sizes // TILE) * TILE
        end = np.cumsum(width**2)
        offset = end - width**2
        block = np.repeat(np.arange(len(width)), np.diff(blocks.edge_ptr))
        i, j = (x - blocks.ptr[block] for x in (blocks.edge_row, blocks.edge_col))
        row, col = (offset[block] + x * width[block] for x in (i, j))
        by_edge = np.empty((4, blocks.num_edges), np.int64)
        by_edge[:, blocks.edge] = row, col, row + j, width[block]

        def moved(x: np.ndarray, dtype: type) -> Tensor:
            return torch.from_numpy(x.astype(dtype)).to(device)

        return cls(
            ptr=moved(blocks.ptr, np.int32),
            node=moved(blocks.node, np.int32),
            offset=moved(offset, np.int64),
            row=moved(by_edge[0], np.int64),
            col=moved(by_edge[1], np.int64),
            place=moved(by_edge[2], np.int64),
            stop=moved(by_edge[3], np.int32),
            total=int(end[-1]) if len(end) else 0,
            tiles=int(width.max(initial=0)) // TILE,
        )

    @property
    def layout(self) -> "Masks":
        """The tables alone: what kernels read, and are not compiled for."""
        return self._replace(total=0, tiles=0)

    def with_room(self, room: float) -> "Masks":
        """The same for larger matrices; those of few rows remain such."""
        tiles, few = math.ceil(room * self.tiles), LANES // TILE
        if self.tiles <= few:
            tiles = min(tiles, few)
        total = math.ceil(room * self.total / TILE**2) * TILE**2  # aligned
        return self._replace(total=total, tiles=tiles)

    @property
    def limits(self) -> tuple[int, int]:
        """What launches depend on beside the sizes of tables."""
        return self.total, self.tiles

    def programs(self, heads: int) -> tuple[int, int]:
        """One program per block and head, and per row of tiles of the largest block."""
        return (self.offset.numel() * heads, self.tiles)


# -------------------------------------------------------------------------- the calls


def negated(masks: Masks, edge_weight: Tensor) -> Tensor:
    """The matrices -A, [heads, total], for edge weights [E, heads]."""
    M = edge_weight.new_zeros(edge_weight.size(1), masks.total)
    return M.index_add_(1, masks.place, edge_weight.t(), alpha=-1)  # sums parallel ones


def resolvents(masks: Masks, edge_weight: Tensor) -> Tensor:
    """The resolvents L, [heads, total], for edge weights [E, heads]."""
    M, heads = negated(masks, edge_weight), edge_weight.size(1)
    grid = masks.programs(heads)[:1]
    tables = (masks.layout, masks.total, heads, TILE)
    with on_device_of(M):
        _inverse[grid](M, *tables, input_precision(M), **_OPTIONS)
    return M


def mix(masks: Masks, L: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(L * Q K^T) V; each row of the inputs belongs to exactly one position."""
    if query.numel() == 0 or value.numel() == 0:
        return torch.zeros_like(value)
    query, key, value = (x.contiguous() for x in (query, key, value))
    out, sizes = torch.empty_like(value), _Sizes.of(L, query, value)
    grid, precision = (*masks.programs(len(L)), sizes.slices), input_precision(L)
    with on_device_of(L):
        _masked_product[grid](
            L, (query, key, value), out, masks.layout, masks.total, sizes, precision,
            **_options(precision),
        )  # fmt: skip
    return out


def mix_gradients(
    masks: Masks, L: Tensor, query: Tensor, key: Tensor, value: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `mix`: of query, key, value and the edges' weights."""
    if query.numel() == 0 or value.numel() == 0:
        dw = L.new_zeros(masks.place.numel(), L.size(0))
        return query * 0, key * 0, value * 0, dw
    inputs = tuple(x.contiguous() for x in (query, key, value, grad))
    (rows, groups, channels), heads = query.shape, L.size(0)
    dq, dk = (L.new_empty(rows, heads, channels) for _ in range(2))
    dv, dL, M = (torch.empty_like(x) for x in (inputs[2], L, L))
    keys, values = _Sizes.of(L, grad, query), _Sizes.of(L, query, grad)
    tables, precision = (masks.layout, masks.total), input_precision(L)
    grid = (*masks.programs(heads), masks.tiles)
    slices = 2 * keys.slices + values.slices + masks.tiles
    with on_device_of(L):
        _gradients[(*grid[:2], slices)](
            L, inputs, (dq, dk, dv, dL), *tables, keys, values, precision,
            **_options(precision),
        )  # fmt: skip
        _adjoint[grid](L, dL, M, *tables, heads, TILE, precision, **_OPTIONS)
    dw = edge_products(M, L, masks.row, masks.col, masks.stop)
    if groups < heads:
        dq, dk = (x.unflatten(1, (groups, -1)).sum(2) for x in (dq, dk))
    return dq, dk, dv, dw


def _options(precision: str) -> dict[str, int]:
    # If loads are prefetched, the compiler needs fewer registers for TF32 x 3 products.
    return _OPTIONS | {"num_stages": 2 if precision == "tf32x3" else 1}


def edge_products(
    M: Tensor, L: Tensor, row: Tensor, col: Tensor, stop: Tensor
) -> Tensor:
    """The products <M_i, L_j> of edges, [E, heads], for matrices [heads, total].

    `row`, `col` and `stop` are as in `Masks`: an edge's rows, and the columns to sum.
    """
    heads, total = L.shape
    dw = L.new_empty(row.numel(), heads)
    with on_device_of(L):
        _edge_gradient[(triton.cdiv(dw.size(0), TILE), heads)](
            M, L, dw, (row, col, stop), total, dw.size(0), heads, TILE, **_OPTIONS
        )
    return dw


def channels_at_once(channels: int, most: int = _STEP) -> int:
    """The channels per step: a power of two, at least 16 and at most `most`."""
    return min(max(triton.next_power_of_2(channels), 16), most)


# --------------------------------------------------------------- the parts of kernels


@triton.jit
def block(layout, total, heads, TILE: tl.constexpr):
    """A program's head, and its block's first position, size, tiles and matrix."""
    t, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    first = tl.load(layout.ptr + t)
    size = tl.load(layout.ptr + t + 1) - first
    start = h.to(tl.int64) * total + tl.load(layout.offset + t)
    return h, first, size, tl.cdiv(size, TILE), start


@triton.jit
def matrix_tile(matrix, i, j, tiles, TILE: tl.constexpr):
    """Pointers to tile i, j of a matrix."""
    o = tl.arange(0, TILE)
    width = tiles * TILE
    return matrix + (i * width + j) * TILE + o[:, None] * width + o[None, :]


@triton.jit
def tile_nodes(NODE, first, size, i, TILE: tl.constexpr):
    """The input rows of tile i's positions, and a mask of those that exist."""
    o = i * TILE + tl.arange(0, TILE)
    return tl.load(NODE + first + o, mask=o < size, other=0).to(tl.int64), o < size


@triton.jit
def tile_places(
    node, there, h, channel, HEADS: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Offsets into an input [nodes, HEADS, SIZE] from a channel on, and their mask."""
    c = channel + tl.arange(0, WIDTH)
    at = (node[:, None] * HEADS + h) * SIZE + c[None, :]
    return at, there[:, None] & (c < SIZE)[None, :]


@triton.jit
def _scores(
    X, Y, rows, cols, h, HEADS: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of X Y^T, for rows and columns as from `tile_nodes`."""
    TILE: tl.constexpr = rows[0].shape[0]
    scores = tl.zeros([TILE, TILE], X.dtype.element_ty)
    for channel in range(0, SIZE, STEP):  # if unrolled, it would exceed the registers
        at, there = tile_places(rows[0], rows[1], h, channel, HEADS, SIZE, STEP)
        x = tl.load(X + at, mask=there, other=0.0)
        at, there = tile_places(cols[0], cols[1], h, channel, HEADS, SIZE, STEP)
        y = tl.load(Y + at, mask=there, other=0.0)
        scores += tl.dot(x, tl.trans(y), input_precision=PRECISION)
    return scores


# ------------------------------------------------------------------------ the inverse


@triton.jit
def eliminated(X, pivots, TILE: tl.constexpr):
    """[[G, G B], [-C G, D - C G B]] of a tile [[A, B], [C, D]], where G = A^-1.

    A has as many rows and columns as there are pivots; the whole tile may be A.
    """
    o = tl.arange(0, TILE)
    for k in range(0, pivots):
        in_row, in_col = o[:, None] == k, o[None, :] == k
        row = tl.sum(tl.where(in_row, X, 0.0), 0)
        col = tl.sum(tl.where(in_col, X, 0.0), 1)
        pivot = 1.0 / tl.sum(tl.where(o == k, row, 0.0), 0)
        row *= pivot
        new = X - col[:, None] * row[None, :]
        new = tl.where(in_row, row[None, :], new)
        new = tl.where(in_col, (-pivot * col)[:, None], new)
        X = tl.where(in_row & in_col, pivot, new)
    return X


@triton.jit
def _inverse(M, layout, total, heads, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """M <- (I + M)^-1 by Gauss-Jordan elimination without pivoting: a whole matrix.

    For each tile p in turn, with X = M_pp^-1: M_pj <- X M_pj; M_ij <- M_ij - M_ip M_pj;
    M_ip <- -M_ip X; M_pp <- X, for all other tiles i and j. The identity is added to
    each diagonal tile when its turn comes.
    """
    _, _, _, tiles, start = block(layout, total, heads, TILE)
    o = tl.arange(0, TILE)
    eye = (o[:, None] == o[None, :]).to(M.dtype.element_ty)
    for p in range(0, tiles):
        X = eye + tl.load(matrix_tile(M + start, p, p, tiles, TILE))
        X = eliminated(X, TILE, TILE)
        tl.debug_barrier()  # all must have read the old values before they are replaced
        tl.store(matrix_tile(M + start, p, p, tiles, TILE), X)
        for j in range(0, tiles):
            if j != p:
                place = matrix_tile(M + start, p, j, tiles, TILE)
                new = tl.dot(X, tl.load(place), input_precision=PRECISION)
                tl.debug_barrier()
                tl.store(place, new)
        tl.debug_barrier()  # the rows below read what was stored
        for i in range(0, tiles):
            if i != p:
                left = tl.load(matrix_tile(M + start, i, p, tiles, TILE))
                for j in range(0, tiles):
                    if j != p:
                        place = matrix_tile(M + start, i, j, tiles, TILE)
                        right = tl.load(matrix_tile(M + start, p, j, tiles, TILE))
                        old = tl.load(place)
                        new = old - tl.dot(left, right, input_precision=PRECISION)
                        tl.debug_barrier()
                        tl.store(place, new)
                new = -tl.dot(left, X, input_precision=PRECISION)
                tl.debug_barrier()
                tl.store(matrix_tile(M + start, i, p, tiles, TILE), new)
        tl.debug_barrier()


# ----------------------------------------------------------------------- the products


@triton.jit
def _product(
    L, operands, OUT, layout, total, z, sizes: tl.constexpr,
    TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """(L * X Y^T) Z, or with L^T: one row of tiles, slice z of Z's channels.

    X and Y have the same number of heads, Z may have another one.
    """
    X, Y, Z = operands
    TILE: tl.constexpr = sizes.tile
    WIDTH: tl.constexpr = sizes.z_step
    h, first, size, tiles, start = block(layout, total, sizes.heads, TILE)
    x_head = h // (sizes.heads // sizes.x_heads)
    z_head = h // (sizes.heads // sizes.z_heads)
    i, channel = tl.program_id(1), z * WIDTH
    if i < tiles:
        rows = tile_nodes(layout.node, first, size, i, TILE)
        out = tl.zeros([TILE, WIDTH], L.dtype.element_ty)
        for j in range(0, tiles):
            cols = tile_nodes(layout.node, first, size, j, TILE)
            scores = _scores(
                X, Y, rows, cols, x_head, sizes.x_heads, sizes.x_size, sizes.x_step,
                PRECISION,
            )  # fmt: skip
            if TRANSPOSED:
                mask = tl.trans(tl.load(matrix_tile(L + start, j, i, tiles, TILE)))
            else:
                mask = tl.load(matrix_tile(L + start, i, j, tiles, TILE))
            at, there = tile_places(
                cols[0], cols[1], z_head, channel, sizes.z_heads, sizes.z_size, WIDTH
            )
            z_tile = tl.load(Z + at, mask=there, other=0.0)
            out += tl.dot(mask * scores, z_tile, input_precision=PRECISION)
        at, there = tile_places(
            rows[0], rows[1], h, channel, sizes.heads, sizes.z_size, WIDTH
        )
        tl.store(OUT + at, out, mask=there)


@triton.jit
def _masked_product(
    L, inputs, OUT, layout, total, sizes: tl.constexpr, PRECISION: tl.constexpr
):
    """(L * Q K^T) V: one row of tiles, some channels."""
    Q, K, V = inputs
    z = tl.program_id(2)
    _product(L, (Q, K, V), OUT, layout, total, z, sizes, False, PRECISION)


@triton.jit
def _gradients(
    L, inputs, outputs, layout, total, keys: tl.constexpr, values: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One row of tiles of the gradients of Q, K or V, some channels; or a tile of dL.

    `keys` are the sizes of products with Q or K, and `values` those with dY.
    """
    Q, K, V, DY = inputs
    DQ, DK, DV, DL = outputs
    N: tl.constexpr = (keys.z_size + keys.z_step - 1) // keys.z_step
    P: tl.constexpr = (values.z_size + values.z_step - 1) // values.z_step
    z = tl.program_id(2)
    if z < N:
        _product(L, (DY, V, K), DQ, layout, total, z, keys, False, PRECISION)
    elif z < 2 * N:
        _product(L, (V, DY, Q), DK, layout, total, z - N, keys, True, PRECISION)
    elif z < 2 * N + P:
        _product(L, (K, Q, DY), DV, layout, total, z - 2 * N, values, True, PRECISION)
    else:
        TILE: tl.constexpr = keys.tile
        h, first, size, tiles, start = block(layout, total, keys.heads, TILE)
        i, j = tl.program_id(1), z - (2 * N + P)
        if (i < tiles) & (j < tiles):
            rows = tile_nodes(layout.node, first, size, i, TILE)
            cols = tile_nodes(layout.node, first, size, j, TILE)
            scores = _scores(
                Q, K, rows, cols, h // (keys.heads // keys.z_heads), keys.z_heads,
                values.x_size, values.x_step, PRECISION,
            )  # fmt: skip
            read = _scores(
                DY, V, rows, cols, h, keys.heads, keys.x_size, keys.x_step, PRECISION
            )
            tl.store(matrix_tile(DL + start, i, j, tiles, TILE), scores * read)


@triton.jit
def _adjoint(
    L, DL, M, layout, total, heads, TILE: tl.constexpr, PRECISION: tl.constexpr
):
    """M = L^T dL: one tile."""
    _, _, _, tiles, start = block(layout, total, heads, TILE)
    i, j = tl.program_id(1), tl.program_id(2)
    if (i < tiles) & (j < tiles):
        m = tl.zeros([TILE, TILE], L.dtype.element_ty)
        for k in range(0, tiles):
            a = tl.load(matrix_tile(L + start, k, i, tiles, TILE))
            b = tl.load(matrix_tile(DL + start, k, j, tiles, TILE))
            m += tl.dot(tl.trans(a), b, input_precision=PRECISION)
        tl.store(matrix_tile(M + start, i, j, tiles, TILE), m)


@triton.jit(do_not_specialize=["total", "num_edges"])
def _edge_gradient(M, L, DW, edges, total, num_edges, heads, TILE: tl.constexpr):
    """The gradients dw_e = <M_i, L_j> of TILE edges j -> i."""
    e, h = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.program_id(1)
    there = e < num_edges
    head = h.to(tl.int64) * total
    row = tl.load(edges[0] + e, mask=there, other=0) + head
    col = tl.load(edges[1] + e, mask=there, other=0) + head
    stop = tl.load(edges[2] + e, mask=there, other=0)
    sums = tl.zeros([TILE, TILE], L.dtype.element_ty)
    for c in range(0, tl.max(stop, 0), TILE):
        o = c + tl.arange(0, TILE)
        inside = o[None, :] < stop[:, None]
        m = tl.load(M + row[:, None] + o[None, :], mask=inside, other=0.0)
        sums += m * tl.load(L + col[:, None] + o[None, :], mask=inside, other=0.0)
    at = e.to(tl.int64) * heads + h
    tl.store(DW + at, tl.sum(sums, 1), mask=there)
