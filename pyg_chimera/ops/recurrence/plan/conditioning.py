"""Sums of rows and columns of |A|: whether I - A is dominant, or ill-conditioned.

Where some nodes pass nearly all that they receive to each other, I - A is nearly
singular, and rounding the weights already changes the resolvent.
"""

import torch
from torch import Tensor

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


def is_ill_conditioned(edge_index: Tensor, weight: Tensor, num_nodes: int) -> bool:
    r"""Whether row sums (or column sums) of :math:`(I - |A|)^{-1}` may be large.

    They are at most :math:`k / (1 - \max |A|^k 1)`, for any k. False for matrices
    neither rows nor columns of which sum to one at most, as this says nothing of them.
    """
    if num_nodes == 0:
        return False
    # In float64: margins may be as small as its rounding.
    absolute, heads = weight.detach().abs().double(), weight.size(1)
    rows = absolute.new_zeros(num_nodes, heads).index_add(0, edge_index[1], absolute)
    if float(rows.max()) <= 1 - 1 / _MOST_STEPS:  # nearly always
        return False
    at_a_time = 1 if weight.device.type == "cpu" else 4  # for which the host waits
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
