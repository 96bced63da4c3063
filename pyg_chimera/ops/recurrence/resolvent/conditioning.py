"""Sums of rows and columns of |A|: whether I - A is dominant, or ill-conditioned.

Where some nodes pass nearly all that they receive to each other, I - A is nearly
singular, and rounding the weights already changes the resolvent.
"""

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.array_views import as_array
from pyg_chimera.ops.common.numba_runtime import jit, run, stopped
from pyg_chimera.ops.recurrence.resolvent.sparse_products import products
from pyg_chimera.ops.structure.symbolic_factor import Blocks

#: The largest row sum of a resolvent that float32 is trusted with. Errors of features
#: are then about 1e-5.
_MOST_STEPS = 3e4
#: The number of products with |A| that bound it.
_SWEEPS = 16


def sums(edge_index: Tensor, weight: Tensor, num_nodes: int) -> list[Tensor]:
    """The sums of the rows of |A|, and of its columns, [V, heads]."""
    weight = weight.detach().abs()
    zeros = weight.new_zeros(num_nodes, weight.size(1))
    return [zeros.index_add(0, end.long(), weight) for end in edge_index.flip(0)]


def is_ill_conditioned(blocks: Blocks, edge_index: Tensor, weight: Tensor) -> bool:
    r"""Whether row sums (or column sums) of :math:`(I - |A|)^{-1}` may be large.

    They are at most :math:`k / (1 - \max |A|^k 1)`, for any k. False for matrices
    neither rows nor columns of which sum to one at most, as this says nothing of them.

    Args:
        blocks: The graphs.
        edge_index: Their edges, [2, E].
        weight: The weights of the edges, [E, heads].
    """
    heads = weight.shape[1]
    # In float64: margins may be as small as its rounding.
    wide = weight.detach().abs().double()
    if weight.device.type != "cpu":
        return _is_ill_conditioned_on_device(blocks.num_nodes, edge_index, wide)
    absolute = as_array(wide)
    steps = np.full((2, heads), np.inf)
    for found, table, other in zip(
        steps, products(blocks), _positions(blocks), strict=True
    ):
        run(
            _bound_steps,
            np.full(heads, 2.0 * _SWEEPS * len(absolute)),
            2 * blocks.num_nodes,
            absolute.dtype,
            table.ptr,
            other,
            absolute[table.edge].T.copy(),  # in the order in which they are read
            found,
        )
        if (found <= _MOST_STEPS).all():
            return False
    least = steps.min(0)
    return bool(((least > _MOST_STEPS) & (least < np.inf)).any())


def _is_ill_conditioned_on_device(
    num_nodes: int, edge_index: Tensor, absolute: Tensor
) -> bool:
    """The same for |A| [E, heads] on a device. The host waits after every fourth sweep,
    as few are needed.
    """
    if num_nodes == 0:
        return False
    heads = absolute.size(1)
    steps = torch.arange(1, _SWEEPS + 1, device=absolute.device).unsqueeze(1)
    least = absolute.new_full((heads,), torch.inf)
    for target, source in (edge_index.flip(0), edge_index):
        kept, most = [absolute.new_ones(num_nodes, heads)], absolute.new_empty(0, heads)
        while len(most) < _SWEEPS:
            kept = kept[-1:]
            for _ in range(4):
                passed = absolute * kept[-1][source]
                kept.append(torch.zeros_like(kept[0]).index_add_(0, target, passed))
            most = torch.cat([most, torch.stack(kept[1:]).amax(1)])
            valid = (most <= 1).cumprod(0).bool() & (most < 1)
            bounds = steps[: len(most)] / (1 - most)
            found = torch.where(valid, bounds, torch.inf).amin(0)
            if bool((found <= _MOST_STEPS).all()):
                return False
        least = least.minimum(found)
    return bool(((least > _MOST_STEPS) & (least < torch.inf)).any())


def _positions(blocks: Blocks) -> list[np.ndarray]:
    """The positions of the other ends of `products`, cached with the blocks."""
    if "positions" not in blocks.tables:
        start = np.repeat(blocks.ptr[:-1], blocks.sizes)
        blocks.tables["positions"] = [
            table.other + np.repeat(start, np.diff(table.ptr))
            for table in products(blocks)
        ]
    return blocks.tables["positions"]


@jit
def _bound_steps(first, last, stop, scratch, ptr, other, weight, out):
    """For each head, a bound on the row sums, infinite if some of |A| exceed one."""
    n = len(ptr) - 1
    for h in range(first, last):
        if stopped(stop):
            return
        kept, left = scratch[:n], scratch[n : 2 * n]
        kept[:] = 1
        for k in range(1, _SWEEPS + 1):
            most = 0.0
            for i in range(n):
                total = 0.0
                for x in range(ptr[i], ptr[i + 1]):
                    total += weight[h, x] * kept[other[x]]
                left[i] = total
                most = max(most, total)
            if most > 1:
                break
            if most < 1:
                out[h] = k / (1 - most)
            if out[h] <= _MOST_STEPS:
                break
            kept, left = left, kept
