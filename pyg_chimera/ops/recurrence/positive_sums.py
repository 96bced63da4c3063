"""Sums over all paths of a graph, each to its own precision."""

from typing import Any

import torch
from torch import Tensor

from pyg_chimera.ops.common.checks import readable
from pyg_chimera.ops.common.operator import is_explained
from pyg_chimera.ops.common.torch_private import is_followed
from pyg_chimera.ops.recurrence.resolvent_mix import resolvent_mix

#: How far a sum may be, relative to its size, from what reaches it over edges.
_MOST_OFF = 1e-10
#: Sums that are smaller, relative to the largest, are at the mercy of rounding.
_SMALL = 1e-4


def positive_sums(
    source: Tensor,
    edge_index: Tensor,
    weight: Tensor,
    batch: Tensor | None = None,
    *,
    solver: str = "auto",
    rank: Tensor | None = None,
    **options: Any,
) -> Tensor:
    r"""The sums :math:`\mathbf{S} = \mathbf{A} \mathbf{S} + \mathbf{m}` of positive
    sources, over edges with positive weights. Small ones are as exact as large ones.

    As no terms cancel, those of elimination are. Iterations, and dense matrices with
    pivoting, round off what is small beside the largest sum. So they are only a start:
    the sums that are off are computed again, as a system of their own, from the exact
    ones that they border, and with them all that are small beside the largest one of
    the batch; these in any case if a solver was asked for. Where contents cannot be
    read, as within compilers, sums that are off are NaN instead.

    Sources m are float64 [V, heads, K], and weights float64 [E, heads]. The rest is as
    in `resolvent_mix`.

    Raises:
        ValueError: As in `resolvent_mix`, or if rounding errors are as large as sums.
    """
    ones = source.new_ones(source.size(0), 1, 1)
    sums = resolvent_mix(
        ones, ones, source, edge_index, weight, batch, solver=solver, rank=rank,
        **options,
    )  # fmt: skip
    if solver in ("sparse", "neumann") or is_explained():
        return sums
    col, row = edge_index.long()
    with torch.no_grad():
        passed = sums[col] * weight.unsqueeze(2)
        left = (sums - source).index_add(0, row, passed, alpha=-1).abs()
        off = left > _MOST_OFF * sums
        # Where an iteration ended before it reached a part of the graph, all but the
        # border of this part agrees with itself.
        small = sums < (_SMALL * sums.amax(0) if sums.size(0) else 0)
        off |= small & off.any(0)
    if not readable() or is_followed():
        return sums.masked_fill(off, torch.nan)
    if solver != "auto":  # which most often eliminates
        off |= small  # adjoints are as large as these are small, and are rounded off
    for h, k in off.any(0).nonzero().tolist():
        part = off[:, h, k]
        if bool(part.all()):
            raise ValueError(
                f"solver={solver!r} came to a standstill: rows of A sum to so nearly 1 "
                "that rounding errors are as large as sums; use solver='sparse'"
            )
        within, border = part[row] & part[col], part[row] & ~part[col]
        passed = sums[col[border], h, k] * weight[border, h]
        given = source[:, h, k].index_add(0, row[border], passed)[part]
        found = positive_sums(
            given.view(-1, 1, 1), (part.cumsum(0) - 1)[edge_index[:, within].long()],
            weight[within, h : h + 1], solver=solver, **options,
        )  # fmt: skip
        sums = sums.clone()
        sums[part, h, k] = found.flatten()
    return sums
