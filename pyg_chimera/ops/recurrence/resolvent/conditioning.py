"""Sums of rows and columns of |A|: whether I - A is dominant, or ill-conditioned.

Where some nodes pass nearly all that they receive to each other, I - A is nearly
singular, and rounding the weights already changes the resolvent.
"""

import torch
from torch import Tensor

__all__ = ["is_ill_conditioned", "sums"]

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

    Args:
        edge_index: The edges, [2, E].
        weight: Their weights, [E, heads].
        num_nodes: The number of nodes V.
    """
    if num_nodes == 0:
        return False
    weight = weight.detach().abs().double()
    zeros = weight.new_zeros(num_nodes, weight.size(1))
    least = zeros.new_full(zeros.shape[1:], torch.inf)
    for ends in (edge_index.flip(0), edge_index):
        end, other = ends.long()
        steps, step = torch.full_like(least, torch.inf), weight
        bounded = torch.ones_like(least, dtype=torch.bool)
        for k in range(1, _SWEEPS + 1):
            kept = zeros.index_add(0, end, step)
            most = kept.amax(0)
            bounded &= most <= 1
            found = torch.where(bounded & (most < 1), k / (1 - most), torch.inf)
            steps = torch.minimum(steps, found)
            if ((steps <= _MOST_STEPS) | ~bounded).all():
                break
            step = weight * kept[other]
        if (steps <= _MOST_STEPS).all():
            return False
        least = torch.minimum(least, steps)
    return bool(((least > _MOST_STEPS) & (least < torch.inf)).any())
