"""Sums of rows and columns of |A|: whether I - A is dominant, or ill-conditioned.

Where some nodes pass nearly all that they receive to each other, I - A is nearly
singular, and rounding the weights already changes the resolvent.
"""

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.array_views import as_array
from pyg_chimera.ops.common.numba_runtime import jit

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


def has_small_sums(edge_index: Tensor, weight: Tensor, num_nodes: int) -> bool:
    """Whether the sum of each row of |A|, or of each column, is less than one.
    False if an index is out of range, as it may not have been checked yet.
    """
    weight = weight.double()
    arrays = as_array(edge_index), as_array(weight)
    return any(_has_small_sums(*arrays, end, num_nodes) for end in (1, 0))


@jit
def _has_small_sums(edge_index, weight, end, num_nodes):
    edges, heads = weight.shape
    sums = np.zeros((num_nodes, heads))
    for e in range(edges):
        i = edge_index[end, e]
        if not 0 <= i < num_nodes:
            return False
        for h in range(heads):
            sums[i, h] += abs(weight[e, h])
    for i in range(num_nodes):
        for h in range(heads):
            if not sums[i, h] < 1:
                return False
    return True


def is_ill_conditioned(edge_index: Tensor, weight: Tensor, num_nodes: int) -> bool:
    r"""Whether row sums (or column sums) of :math:`(I - |A|)^{-1}` may be large.

    They are at most :math:`k / (1 - \max |A|^k 1)`, for any k. False for matrices
    neither rows nor columns of which sum to one at most, as this says nothing of them.
    """
    if num_nodes == 0:
        return False
    if not weight.is_cpu:
        return _is_ill_conditioned_on_gpus(edge_index, weight, num_nodes)
    arrays = as_array(edge_index), as_array(weight.double())
    return _is_ill_conditioned(*arrays, num_nodes)


def _is_ill_conditioned_on_gpus(
    edge_index: Tensor, weight: Tensor, num_nodes: int
) -> bool:
    # In float64: margins may be as small as its rounding.
    absolute, heads = weight.detach().abs().double(), weight.size(1)
    at_a_time = 4  # sweeps for which the host waits
    steps = torch.arange(1, _SWEEPS + 1, device=absolute.device).unsqueeze(1)
    least = absolute.new_full((heads,), torch.inf)
    for target, source in (edge_index.flip(0), edge_index):
        kept, most = absolute.new_ones(num_nodes, heads), absolute.new_empty(0, heads)
        while len(most) < _SWEEPS and not bool((most > 1).any(0).all()):
            for _ in range(at_a_time):
                passed = absolute * kept[source]
                kept = torch.zeros_like(kept).index_add_(0, target, passed)
                most = torch.cat([most, kept.amax(0, keepdim=True)])
            valid = (most <= 1).cumprod(0).bool() & (most < 1)
            bounds = steps[: len(most)] / (1 - most)
            found = torch.where(valid, bounds, torch.inf).amin(0)
            if bool((found <= _MOST_STEPS).all()):
                return False
        least = least.minimum(found)
    return bool(((least > _MOST_STEPS) & (least < torch.inf)).any())


@jit
def _is_ill_conditioned(edge_index, weight, num_nodes):
    """The same on the CPU."""
    edges, heads = weight.shape
    least = np.full(heads, np.inf)
    kept, passed = np.empty((2, num_nodes, heads))
    for end in range(2):
        going, large = np.ones(heads, np.bool_), heads
        kept[:] = 1
        for k in range(1, _SWEEPS + 1):
            passed[:] = 0
            for e in range(edges):
                i, j = edge_index[1 - end, e], edge_index[end, e]
                for h in range(heads):
                    passed[i, h] += abs(weight[e, h]) * kept[j, h]
            kept, passed, large = passed, kept, 0
            for h in range(heads):
                most = kept[0, h]
                for i in range(num_nodes):
                    most = max(most, kept[i, h])
                going[h] = going[h] and most <= 1
                if going[h] and most < 1:
                    least[h] = min(least[h], k / (1 - most))
                large += not least[h] <= _MOST_STEPS
            if large == 0:
                return False
            if not going.any():
                break
    for h in range(heads):  # noqa: SIM110
        if _MOST_STEPS < least[h] < np.inf:
            return True
    return False
