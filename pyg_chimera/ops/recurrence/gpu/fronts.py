r"""The resolvent of sparse graphs on a GPU: fronts, level by level.

A front has columns s and rows r below them (see `fronts`). Gauss-Jordan elimination of
its columns computes, in place, everything that the sweeps and its parent need:

.. math::
    \begin{pmatrix} F_{ss} & F_{sr} \\ F_{rs} & F_{rr} \end{pmatrix} \to
    \begin{pmatrix} G & R \\ -E & F_{rr} - E F_{sr} \end{pmatrix}, \qquad
    G = F_{ss}^{-1}, \quad R = G F_{sr}, \quad E = F_{rs} G.

States :math:`H = (I - A)^{-1} k v^{\top}` then take one sweep upwards,
:math:`X_r \gets X_r - E X_s`, and one downwards, :math:`H_s = G X_s - R H_r`. Adjoints
:math:`Z = (I - A)^{-\top} q\, dy^{\top}` are computed in the same launches, with
:math:`R^{\top}` upwards, and :math:`G^{\top}` and :math:`E^{\top}` downwards.

A program processes a row of tiles of a front. It gathers the contributions of the
front's children, on lower levels, and writes nothing that another program of the launch
reads or writes. Each level takes one launch per sweep. Its elimination takes one launch
that adds up its fronts, and one per tile of columns.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_chimera.ops.common.triton_runtime import input_precision, on_device_of
from pyg_chimera.ops.recurrence.gpu.mask import (
    edge_products,
    eliminated,
    matrix_tile,
)
from pyg_chimera.ops.recurrence.plan.fronts import Fronts

#: Rows and columns of a tile of a front, and entries of each state per program.
TILE, _LANES = 32, 64
#: Entries of states to hold at a time, if those of one key channel are no more.
_MAX_NUMEL = 1 << 28
#: Kernel options: no prefetching, as loads must not precede the stores they depend on.
_OPTIONS = {"num_warps": 4, "num_stages": 1}


class _Sizes(NamedTuple):
    """What sweeps are compiled for."""

    heads: int
    groups: int
    N: int  #: key channels
    P: int  #: value channels
    sides: int  #: two with the transposed system
    lanes: int
    tile: int


# -------------------------------------------------------------------------- the calls


def eliminate(fronts: Fronts, edge_weight: Tensor) -> Tensor:
    """The eliminated fronts of I - A, [heads, total], for weights [E, heads]."""
    heads = edge_weight.size(1)
    F = edge_weight.new_zeros(heads, fronts.total)
    F.index_add_(1, fronts.entry, edge_weight.t(), alpha=-1)  # kernels add I
    layout, constants = fronts.layout, (fronts.total, TILE, input_precision(F))
    with on_device_of(F):
        for level in fronts.levels:
            grid = (level.tasks, heads)
            _add_up[grid](F, layout, level.first, *constants, **_OPTIONS)
            for step in range(level.steps):
                _eliminate[grid](F, layout, level.first, step, *constants, **_OPTIONS)
    return F


def mix(fronts: Fronts, F: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The output y = H^T q, [V, heads, P]."""
    y = torch.zeros_like(value)
    by_group = y.unflatten(1, (query.size(1), -1))
    for part in _parts(fronts, query, value, 1):
        (H,) = _states(fronts, F, key[None, ..., part], value[None])
        by_group += _times(query[..., part], H)
    return y


def mix_gradients(
    fronts: Fronts, F: Tensor, query: Tensor, key: Tensor, value: Tensor, grad: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `mix`: of query, key, value and the edges' weights."""
    dq, dk, dv = (torch.zeros_like(x) for x in (query, key, value))
    dw = value.new_zeros(fronts.entry.numel(), value.size(1))
    v, dy, by_group = (x.unflatten(1, (query.size(1), -1)) for x in (value, grad, dv))
    right = torch.stack([value, grad])
    for part in _parts(fronts, query, value, 2):
        q, k = query[..., part], key[..., part]
        H, Z = _states(fronts, F, torch.stack([k, q]), right)
        dq[..., part], dk[..., part] = _read(H, dy), _read(Z, v)
        by_group += _times(k, Z)
        dw += _edge_gradient(fronts, H, Z)
    return dq, dk, dv, dw


def _times(left: Tensor, H: Tensor) -> Tensor:
    """Rows [V, G, N] times states [G, R, V, N, P], [V, G, R, P]; no copy of H."""
    rows = left.transpose(0, 1)[:, None, :, None]
    return (rows @ H).squeeze(3).permute(2, 0, 1, 3)


def _read(H: Tensor, right: Tensor) -> Tensor:
    """States [G, R, V, N, P] times rows [V, G, R, P], summed over R; no copy of H."""
    rows = right.permute(1, 2, 0, 3).unsqueeze(-1)
    return (H @ rows).squeeze(-1).sum(1).transpose(0, 1)


def _parts(fronts: Fronts, query: Tensor, value: Tensor, sides: int) -> Iterator[slice]:
    """Slices of the key channels such that the states of one fit in memory."""
    if query.numel() == 0 or value.numel() == 0:
        return
    heads, channels = value.shape[1:]
    one = sides * heads * (fronts.rows + value.size(0)) * channels
    keys = min(query.size(2), max(1, _MAX_NUMEL // one))
    keys = 1 << (keys.bit_length() - 1)  # of few sizes: kernels are compiled for each
    for a in range(0, query.size(2), keys):
        yield slice(a, a + keys)


def _states(fronts: Fronts, F: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Solves for outer products of left [sides, V, G, N] and right [sides, V, H, P].

    The second side, if there is one, is solved with the transposed matrix. Returns
    [sides, G, heads of a group, V, N, P].
    """
    (sides, nodes, groups, keys), (heads, channels) = left.shape, right.shape[2:]
    left, right = left.contiguous(), right.contiguous()
    lanes = keys * channels
    X = F.new_empty(sides * heads, fronts.rows, lanes)
    H = F.new_empty(sides, groups, heads // groups, nodes, keys, channels)
    slices = triton.cdiv(lanes, _LANES)
    sizes = _Sizes(heads, groups, keys, channels, sides, _LANES, TILE)
    layout, numbers = fronts.layout, (fronts.total, fronts.rows, nodes)
    constants = (*numbers, sizes, input_precision(F))
    with on_device_of(F):
        for level in fronts.levels:
            _sweep_up[level.tasks, sides * heads, slices](
                (F, left, right, X), layout, level.first, *constants, **_OPTIONS
            )
        for level in reversed(fronts.levels):
            _sweep_down[level.pivot_tasks, sides * heads, slices](
                (F, X, H), layout, level.first, *constants, **_OPTIONS
            )
    return H


def _edge_gradient(fronts: Fronts, H: Tensor, Z: Tensor) -> Tensor:
    """The gradients dA_ij = <Z_i, H_j>, [E, heads]."""
    lanes = H.size(-2) * H.size(-1)
    Z, H = (x.flatten(0, 1).flatten(1) for x in (Z, H))
    col, row = fronts.ends * lanes
    stop = torch.full_like(row, lanes, dtype=torch.int32)
    return edge_products(Z, H, row, col, stop)


# ---------------------------------------------------------------------- the elimination

#: Sizes that differ between levels or graphs, and must not cause recompilation.
_ANY = ["first_task", "rows", "nodes"]


@triton.jit
def _task(fronts, first_task):
    """A program's front and row of tiles; the front's numbers of columns and rows."""
    task = first_task + tl.program_id(0)
    x, i = tl.load(fronts.task_front + task), tl.load(fronts.task_row + task)
    return x, i, tl.load(fronts.pivots + x), tl.load(fronts.size + x)


@triton.jit
def _eliminate_own(
    matrix, p, tiles, pivots, TILE: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Eliminates the columns of tile p in row p of tiles, which has their pivots."""
    o, left = tl.arange(0, TILE), pivots - p * TILE
    eye = (o[:, None] == o[None, :]).to(matrix.dtype.element_ty)
    place = matrix_tile(matrix, p, p, tiles, TILE)
    X = tl.load(place) + tl.where(o[None, :] < left, eye, 0.0)
    X = eliminated(X, tl.minimum(left, TILE), TILE)
    tl.debug_barrier()  # all must have read the old values before the store
    tl.store(place, X)
    X = tl.where(o[None, :] < left, X, eye)
    for j in range(0, tiles):
        if j != p:
            place = matrix_tile(matrix, p, j, tiles, TILE)
            new = tl.dot(X, tl.load(place), input_precision=PRECISION)
            tl.debug_barrier()
            tl.store(place, new)


@triton.jit(do_not_specialize=["first_task"])
def _add_up(F, fronts, first_task, total, TILE: tl.constexpr, PRECISION: tl.constexpr):
    """Adds the children's updates to a row of tiles, and eliminates the columns of tile
    0 in the first row, which has their pivots.
    """
    x, i, pivots, size = _task(fronts, first_task)
    F += tl.program_id(1).to(tl.int64) * total
    matrix, tiles = F + tl.load(fronts.offset + x), tl.cdiv(size, TILE)
    o = tl.arange(0, TILE)
    begin, end = tl.load(fronts.child_ptr + x), tl.load(fronts.child_ptr + x + 1)
    if begin < end:
        for j in range(0, tiles):
            place = matrix_tile(matrix, i, j, tiles, TILE)
            new = tl.load(place)
            for y in range(begin, end):
                child = tl.load(fronts.child + y)
                rows = fronts.place + tl.load(fronts.source + y)
                row = tl.load(rows + i * TILE + o)
                col = tl.load(rows + j * TILE + o)
                there = (row >= 0)[:, None] & (col >= 0)[None, :]
                width = tl.cdiv(tl.load(fronts.size + child), TILE) * TILE
                first = tl.load(fronts.offset + child)
                at = first + (row * width)[:, None] + col[None, :]
                new += tl.load(F + at, mask=there, other=0.0)
            tl.debug_barrier()  # all must have read the old values before the store
            tl.store(place, new)
        tl.debug_barrier()  # what follows reads what was stored
    if i == 0:
        _eliminate_own(matrix, 0, tiles, pivots, TILE, PRECISION)


@triton.jit(do_not_specialize=["first_task", "p"])
def _eliminate(
    F, fronts, first_task, p, total, TILE: tl.constexpr, PRECISION: tl.constexpr
):
    """Eliminates the columns of tile p in a row of tiles i != p; if i = p + 1, also
    those of tile i, as this row has their pivots.

    With X from the tile p, p: M_ij <- M_ij - M_ip M_pj; M_ip <- -M_ip X. The last tile
    may have columns that are not eliminated: for these, M_ip <- M_ip - M_ip X.
    """
    x, i, pivots, size = _task(fronts, first_task)
    left = pivots - p * TILE
    if (i != p) & (left > 0):
        o = tl.arange(0, TILE)
        F += tl.program_id(1).to(tl.int64) * total
        matrix, tiles = F + tl.load(fronts.offset + x), tl.cdiv(size, TILE)
        mine = tl.load(matrix_tile(matrix, i, p, tiles, TILE))
        factor = tl.where(o[None, :] < left, mine, 0.0)
        for j in range(0, tiles):
            if j != p:
                place = matrix_tile(matrix, i, j, tiles, TILE)
                row = tl.load(matrix_tile(matrix, p, j, tiles, TILE))
                new = tl.load(place) - tl.dot(factor, row, input_precision=PRECISION)
                tl.debug_barrier()  # all must have read the old values before the store
                tl.store(place, new)
        row = tl.load(matrix_tile(matrix, p, p, tiles, TILE))
        new = mine - factor - tl.dot(factor, row, input_precision=PRECISION)
        tl.debug_barrier()
        tl.store(matrix_tile(matrix, i, p, tiles, TILE), new)
        if (i == p + 1) & (left > TILE):
            tl.debug_barrier()  # what follows reads what was stored
            _eliminate_own(matrix, i, tiles, pivots, TILE, PRECISION)


# --------------------------------------------------------------------------- the sweeps


@triton.jit
def _front_tile(matrix, i, j, tiles, side, SIDES: tl.constexpr, TILE: tl.constexpr):
    """Tile i, j of a front, or of the transposed one."""
    place = matrix_tile(matrix, i, j, tiles, TILE)
    if SIDES == 2:  # strides that depend on the side: a branch takes more registers
        o, width = tl.arange(0, TILE), tiles * TILE
        down = tl.where(side == 0, width, 1)
        across = tl.where(side == 0, 1, width)
        row, col = (i * TILE + o) * down, (j * TILE + o) * across
        place = matrix + row[:, None] + col[None, :]
    return tl.load(place)


@triton.jit
def _lanes(sizes: tl.constexpr):
    """A program's lanes (entries of states), and a mask of those that exist."""
    lane = tl.program_id(2) * sizes.lanes + tl.arange(0, sizes.lanes)
    return lane, lane < sizes.N * sizes.P


@triton.jit
def _pulled(left, right, held, fronts, x, i, first, pivots, sizes: tl.constexpr):
    """Rows of a front's vector: the outer products of its own nodes, plus the rows of
    its children's vectors.
    """
    N: tl.constexpr = sizes.N
    P: tl.constexpr = sizes.P
    r = i * sizes.tile + tl.arange(0, sizes.tile)
    lane, there = _lanes(sizes)
    node = tl.load(fronts.node + first + r, mask=r < pivots, other=0).to(tl.int64)
    own = (r < pivots)[:, None] & there[None, :]
    at = (node * (sizes.groups * N))[:, None] + (lane // P)[None, :]
    key = tl.load(left + at, mask=own, other=0.0)
    at = (node * (sizes.heads * P))[:, None] + (lane % P)[None, :]
    out = key * tl.load(right + at, mask=own, other=0.0)
    begin, end = tl.load(fronts.child_ptr + x), tl.load(fronts.child_ptr + x + 1)
    for y in range(begin, end):
        row = tl.load(fronts.place + tl.load(fronts.source + y) + r)
        start = tl.load(fronts.first + tl.load(fronts.child + y))
        at = (start + row).to(tl.int64)[:, None] * (N * P) + lane[None, :]
        mask = (row >= 0)[:, None] & there[None, :]
        out += tl.load(held + at, mask=mask, other=0.0)
    return out


@triton.jit(do_not_specialize=_ANY)
def _sweep_up(
    tensors, fronts, first_task, total, rows, nodes, sizes: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """X_s, and X_r - E X_s or the same with R^T: some rows and lanes.

    Each row of tiles gathers X_s again, which takes no longer than the product.
    """
    x, i, pivots, size = _task(fronts, first_task)
    F, LEFT, RIGHT, X = tensors
    HEADS: tl.constexpr = sizes.heads
    WIDTH: tl.constexpr = sizes.N * sizes.P
    TILE: tl.constexpr = sizes.tile
    side, h = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    matrix = F + h.to(tl.int64) * total + tl.load(fronts.offset + x)
    held = X + tl.program_id(1).to(tl.int64) * rows * WIDTH
    node, g = side.to(tl.int64) * nodes, h // (HEADS // sizes.groups)
    left = LEFT + (node * sizes.groups + g) * sizes.N
    right = RIGHT + (node * HEADS + h) * sizes.P
    first, tiles = tl.load(fronts.first + x), tl.cdiv(size, TILE)
    new = _pulled(left, right, held, fronts, x, i, first, pivots, sizes)
    r = i * TILE + tl.arange(0, TILE)
    if (i + 1) * TILE > pivots:
        for p in range(0, tl.cdiv(pivots, TILE)):
            above = _pulled(left, right, held, fronts, x, p, first, pivots, sizes)
            c = p * TILE + tl.arange(0, TILE)
            below = (r >= pivots)[:, None] & (c < pivots)[None, :]
            factor = _front_tile(matrix, i, p, tiles, side, sizes.sides, TILE)
            factor = tl.where(below, factor, 0.0)
            factor = tl.where(side == 0, factor, -factor)
            new += tl.dot(factor, above, input_precision=PRECISION)
    lane, there = _lanes(sizes)
    at = (first + r).to(tl.int64)[:, None] * WIDTH + lane[None, :]
    tl.store(held + at, new, mask=(r < size)[:, None] & there[None, :])


@triton.jit(do_not_specialize=_ANY)
def _sweep_down(
    tensors, fronts, first_task, total, rows, nodes, sizes: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """H_s = G X_s - R H_r, or the same with G^T and E^T: some rows and lanes."""
    x, i, pivots, size = _task(fronts, first_task)
    F, X, H = tensors
    HEADS: tl.constexpr = sizes.heads
    WIDTH: tl.constexpr = sizes.N * sizes.P
    TILE: tl.constexpr = sizes.tile
    side, h = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    matrix = F + h.to(tl.int64) * total + tl.load(fronts.offset + x)
    X += tl.program_id(1).to(tl.int64) * rows * WIDTH
    H += tl.program_id(1).to(tl.int64) * nodes * WIDTH
    first, tiles = tl.load(fronts.first + x), tl.cdiv(size, TILE)
    lane, there = _lanes(sizes)
    o = tl.arange(0, TILE)
    LANES: tl.constexpr = sizes.lanes
    new = tl.zeros([TILE, LANES], F.dtype.element_ty)
    for j in range(0, tiles):
        c = j * TILE + o
        own = (c < pivots)[:, None] & there[None, :]
        at = (first + c).to(tl.int64)[:, None] * WIDTH + lane[None, :]
        states = tl.load(X + at, mask=own, other=0.0)
        node = tl.load(fronts.node + first + c, mask=c < size, other=0).to(tl.int64)
        mask = ((c >= pivots) & (c < size))[:, None] & there[None, :]
        above = tl.load(H + node[:, None] * WIDTH + lane[None, :], mask=mask, other=0.0)
        states += tl.where(side == 0, -above, above)
        factor = _front_tile(matrix, i, j, tiles, side, sizes.sides, TILE)
        new += tl.dot(factor, states, input_precision=PRECISION)
    r = i * TILE + o
    node = tl.load(fronts.node + first + r, mask=r < pivots, other=0).to(tl.int64)
    at = node[:, None] * WIDTH + lane[None, :]
    tl.store(H + at, new, mask=(r < pivots)[:, None] & there[None, :])
