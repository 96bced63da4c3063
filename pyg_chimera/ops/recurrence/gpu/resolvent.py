"""The resolvent on a GPU, in Triton: inverses of blocks in tiles, fronts of the
supernodes of sparse graphs, or for paths two scans in chunks.

Nothing is pivoted: for paths, the pivot growth is checked; otherwise the rows, or the
columns, of |A| must sum to less than one.
"""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common import triton_runtime
from pyg_chimera.ops.common.cache import table
from pyg_chimera.ops.common.checks import trusted
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.triton_runtime import DEVICES, DEVICES_IF_ASKED
from pyg_chimera.ops.recurrence.gpu.path_pivots import Places, eliminate
from pyg_chimera.ops.recurrence.plan.conditioning import sums
from pyg_chimera.ops.recurrence.plan.fronts import Fronts, supernodes_of
from pyg_chimera.ops.recurrence.plan.paths import (
    NOT_PATHS,
    Pivots,
    path_scans,
)
from pyg_chimera.ops.recurrence.plan.pivot_growth import check_pivot_growth
from pyg_chimera.ops.recurrence.plan.row_groups import RowGroups
from pyg_chimera.ops.structure.symbolic_factor import SymbolicFactor

if TYPE_CHECKING:
    from pyg_chimera.ops.recurrence.gpu.mask import Masks

__all__ = [
    "DEVICES",
    "DEVICES_IF_ASKED",
    "backward",
    "forward",
    "is_dominant",
    "why_not",
]

#: The supported pairs of a solver and a form.
_TAKES = (("dense", "mask"), ("sparse", "state"), ("sparse", "chunk"))
#: Nodes per block, as one program inverts a matrix, and offsets in it have 32 bits.
_MOST_NODES = 8192
#: Rows per front, as its tiles are eliminated one after the other, and offsets in it
#: have 32 bits.
_MOST_ROWS = 16384
#: Children of a front times its rows, as each row of tiles adds the children up one by
#: one, and each child has a table entry for each row.
_MOST_ADDED = 1 << 21


def why_not(call: Call) -> str | None:
    """It needs Triton, a GPU, matrices that are not too large, and paths or
    diagonal dominance.
    """
    _, solver, form, *_ = call.choice
    if (solver, form) not in _TAKES:
        return (
            f"solver={solver!r}, form={form!r} has no triton backend; use "
            "solver='dense' and form='mask', solver='sparse' and form='state', or "
            "backend='auto'"
        )
    rows, largest, added = 0, 0, 0
    if form == "state":
        device = call.inputs.value.device
        rows, largest, added = table(_extents, call.structure, device)
    reason = triton_runtime.why_not(call.inputs.value, rows)
    if reason is not None:
        return reason
    if form == "chunk":
        if path_scans(call.structure) is None:
            return NOT_PATHS
        if not trusted():
            check_pivot_growth(float(_pivots(call)[1]))
        return None
    if form == "state":
        if largest > _MOST_ROWS:
            return (
                f"backend='triton' takes at most {_MOST_ROWS} rows in a front, and the "
                f"largest has {largest}: factors fill up; use tensors on the CPU, for "
                "which solver='auto' iterates"
            )
        if added > _MOST_ADDED:
            return (
                "backend='triton' does not take graphs with such hubs: a front has too "
                "many rows, and children that are added up one by one; use "
                "solver='dense', or tensors on the CPU"
            )
    elif (largest := int(call.structure.sizes.max(initial=0))) > _MOST_NODES:
        return (
            f"backend='triton' takes at most {_MOST_NODES} nodes in a graph, and the "
            f"largest has {largest}; use backend='torch' or 'auto'"
        )
    if not is_dominant(call):
        return (
            "'edge_weight' makes I - A not diagonally dominant, and backend='triton' "
            "eliminates without pivoting; scale the weights (rows of |A| that sum to "
            "less than 1 are always safe), or use solver='dense' with backend='torch' "
            "or 'auto'"
        )
    return None


def _extents(symbolic: SymbolicFactor, _: torch.device) -> tuple[int, int, int]:
    """Rows of all fronts, those of the largest, and most children of one times rows."""
    nodes = supernodes_of(symbolic)
    sizes = nodes.widths + nodes.heights
    children = np.bincount(nodes.parent[nodes.parent >= 0], minlength=len(sizes))
    added = (children * sizes).max(initial=0)
    return int(sizes.sum()), int(sizes.max(initial=0)), int(added)


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P]; saves resolvents, fronts, or states after chunks."""
    if call.choice.form == "chunk":
        from pyg_chimera.ops.recurrence.gpu import paths as triton_paths

        out, states = triton_paths.forward(call, _pivots(call)[0])
        return out, (states,)
    if call.choice.form == "state":
        from pyg_chimera.ops.recurrence.gpu import fronts as triton_fronts

        fronts = _fronts(call)
        F = triton_fronts.eliminate(fronts, call.inputs.edge_weight)
        return triton_fronts.mix(fronts, F, *call.inputs[:3]), (F,)
    from pyg_chimera.ops.recurrence.gpu.mask import mix

    L = _resolvents(call)
    return mix(_masks(call), L, *call.inputs[:3]), (L,)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and edge weight."""
    if call.choice.form == "chunk":  # the pivots are recomputed, which is fast
        from pyg_chimera.ops.recurrence.gpu import paths as triton_paths

        return triton_paths.backward(call, _pivots(call)[0], saved[0], grad)
    query, key, value = call.inputs[:3]
    if call.choice.form == "state":
        from pyg_chimera.ops.recurrence.gpu import fronts as triton_fronts

        return triton_fronts.mix_gradients(
            _fronts(call), saved[0], query, key, value, grad
        )
    from pyg_chimera.ops.recurrence.gpu.mask import mix_gradients

    return mix_gradients(_masks(call), saved[0], query, key, value, grad)


def _masks(call: Call) -> "Masks":
    from pyg_chimera.ops.recurrence.gpu.mask import Masks

    return table(Masks.of, call.structure, call.inputs.value.device)


def _resolvents(call: Call) -> Tensor:
    """The resolvents of blocks: by rows if factors are at hand and sparse."""
    from pyg_chimera.ops.recurrence.gpu import mask, sparse_inverse

    masks, structure, weight = _masks(call), call.structure, call.inputs.edge_weight
    if isinstance(structure, SymbolicFactor) and mask.TILE * masks.tiles <= mask.LANES:
        options = (weight.device, sparse_inverse.ROWS)
        groups = table(RowGroups.of, structure, *options)
        if sparse_inverse.pays(masks, groups):
            return sparse_inverse.resolvents(masks, groups, weight)
    return mask.resolvents(masks, weight)


def _fronts(call: Call) -> Fronts:
    from pyg_chimera.ops.recurrence.gpu.fronts import TILE

    return table(Fronts.of, call.structure, call.inputs.value.device, TILE)


def _pivots(call: Call) -> tuple[Pivots, Tensor]:
    """The pivots of paths, and their growth."""
    places = table(Places.of, call.structure, call.inputs.value.device)
    return call.cached("pivots", lambda: eliminate(places, call.inputs.edge_weight))


def is_dominant(call: Call) -> bool:
    """Whether all rows, or all columns, of |A| sum to less than one, in each head."""
    return trusted() or call.cached("dominance", lambda: _is_dominant(call))


def _is_dominant(call: Call) -> bool:
    inputs = call.inputs
    found = sums(inputs.edge_index, inputs.edge_weight, len(inputs.value))
    return bool(torch.stack([(x < 1).all(0) for x in found]).any(0).all())
