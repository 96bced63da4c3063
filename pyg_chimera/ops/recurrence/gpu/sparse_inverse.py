r"""The inverses of sparse matrices on a GPU: by rows, in the order of elimination.

With factors L (unit lower triangular) and U of a matrix, row i of it is, in turn,

.. math::
    U_i = A_i - \sum_{k < i} L_{ik} U_k, \qquad
    (L^{-1})_i = e_i - \sum_{k < i} L_{ik} (L^{-1})_k, \qquad
    (A^{-1})_i = \frac{1}{U_{ii}} \Bigl( (L^{-1})_i -
    \sum_{j > i} U_{ij} (A^{-1})_j \Bigr),

the first two for ascending i, in one pass, as their entries do not overlap, and the
last for descending i. A program takes a whole matrix, in place, and as many rows at a
time as do not depend on each other; a lane takes a column. So the number of dependent
steps is that of groups of rows and of their entries: 900 for a molecule of 394 atoms,
whose 13 x 13 tiles would take 2,197 products one after the other.
"""

import triton
import triton.language as tl
from torch import Tensor

from pyg_chimera.ops.common.triton_runtime import on_device_of
from pyg_chimera.ops.recurrence.gpu.mask import LANES, TILE, Masks, block, negated
from pyg_chimera.ops.recurrence.plan.row_groups import RowGroups

#: Rows at a time.
ROWS = 4
#: Kernel options: no prefetching, as loads must not precede the stores they depend on.
_OPTIONS = {"num_warps": 4, "num_stages": 1}


def pays(masks: Masks, groups: RowGroups) -> bool:
    """Whether it takes fewer steps than tiles do, for the largest matrix.

    A product of tiles counts as two steps, and a column of a diagonal tile as one.
    """
    return groups.longest <= 2 * masks.tiles**3 + TILE * masks.tiles


def resolvents(masks: Masks, groups: RowGroups, edge_weight: Tensor) -> Tensor:
    """The resolvents L, [heads, total], for edge weights [E, heads]."""
    M, heads = negated(masks, edge_weight), edge_weight.size(1)
    tables = (masks.layout, groups.layout, masks.total)
    with on_device_of(M):
        _inverse_by_rows[masks.programs(heads)[:1]](
            M, *tables, heads, LANES, ROWS, TILE, **_OPTIONS
        )
    return M


@triton.jit
def _rows(M, step, there, width, LANES: tl.constexpr, ROWS: tl.constexpr):
    """The rows that a step names, a mask of those that exist, and their entries."""
    row = tl.load(step + tl.arange(0, ROWS))
    exists = row >= 0
    at = M + row * width
    o = tl.arange(0, LANES)
    place, inside = at[:, None] + o[None, :], exists[:, None] & there[None, :]
    return row, exists, place, inside


@triton.jit
def _inverse_by_rows(
    M, layout, groups, total, heads, LANES: tl.constexpr, ROWS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """M <- (I + M)^-1: a whole matrix.

    On the way, a row of M has L^-1 to the left of the diagonal, 1 / U_ii on it, and U
    to the right.
    """
    _, _, size, tiles, start = block(layout, total, heads, TILE)
    M += start
    width = tiles * TILE
    o = tl.arange(0, LANES)
    there = o < size
    begin = tl.load(groups.ptr + tl.program_id(0) // heads)
    end = tl.load(groups.ptr + tl.program_id(0) // heads + 1)

    for g in range(begin, end):
        i, exists, place, inside = _rows(
            M, groups.row + g * ROWS, there, width, LANES, ROWS
        )
        on = o[None, :] == i[:, None]
        row = tl.load(place, mask=inside, other=0.0) + on.to(M.dtype.element_ty)
        for s in range(
            tl.load(groups.lower_ptr + g), tl.load(groups.lower_ptr + g + 1)
        ):
            k, known, at, read = _rows(
                M, groups.lower + s * ROWS, there, width, LANES, ROWS
            )
            above = tl.load(at, mask=read, other=0.0)
            pivot = tl.load(M + k * width + k, mask=known, other=0.0)
            here = o[None, :] == k[:, None]
            factor = pivot * tl.sum(tl.where(here, row, 0.0), 1)
            above = tl.where(here, 1.0, above)
            row = tl.where(here, 0.0, row) - factor[:, None] * above
        pivot = 1.0 / tl.where(exists, tl.sum(tl.where(on, row, 0.0), 1), 1.0)
        row = tl.where(on, pivot[:, None], row)
        tl.debug_barrier()  # all must have read the old values before the store
        tl.store(place, row, mask=inside)
        tl.debug_barrier()  # later rows read what was stored

    for back in range(0, end - begin):
        g = end - 1 - back
        i, exists, place, inside = _rows(
            M, groups.row + g * ROWS, there, width, LANES, ROWS
        )
        pivot = tl.load(M + i * width + i, mask=exists, other=0.0)
        row = tl.load(place, mask=inside, other=0.0)
        row = tl.where(o[None, :] < i[:, None], row, 0.0)
        row += (o[None, :] == i[:, None]).to(M.dtype.element_ty)
        for s in range(
            tl.load(groups.upper_ptr + g), tl.load(groups.upper_ptr + g + 1)
        ):
            j, known, at, read = _rows(
                M, groups.upper + s * ROWS, there, width, LANES, ROWS
            )
            factor = tl.load(M + i * width + j, mask=known, other=0.0)
            row -= factor[:, None] * tl.load(at, mask=read, other=0.0)
        tl.debug_barrier()
        tl.store(place, pivot[:, None] * row, mask=inside)
        tl.debug_barrier()
