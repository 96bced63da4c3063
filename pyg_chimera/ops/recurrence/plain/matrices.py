"""The mask form: dense matrix products with given resolvents."""

import numpy as np
import torch
from torch import Tensor


def masked_mix(L: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    r"""Computes :math:`(L \odot Q K^T) V`.

    Args:
        L (torch.Tensor): The resolvents, [..., heads, n, n].
        query (torch.Tensor): [..., groups, n, N], where groups divides heads.
        key (torch.Tensor): [..., groups, n, N].
        value (torch.Tensor): [..., heads, n, P].
    """
    scores = (query @ key.mT).unsqueeze(-3)  # of groups, for all heads of each
    L = L.unflatten(-3, (query.size(-3), -1))
    return (L * scores).flatten(-4, -3) @ value


class Padding:
    """Converts between nodes and blocks of nodes, padded to the size of the largest.

    Args:
        node (np.ndarray): The nodes, block by block.
        sizes (np.ndarray): The number of nodes of each block.
        device (torch.device): The device of the tensors.
    """

    def __init__(
        self, node: np.ndarray, sizes: np.ndarray, device: torch.device
    ) -> None:
        self.shape = (len(sizes), int(sizes.max(initial=0)))
        gaps = np.arange(len(sizes)) * self.shape[1] - (np.cumsum(sizes) - sizes)
        place = np.arange(len(node)) + np.repeat(gaps, sizes)
        self.node = torch.from_numpy(node).to(device)
        self.place = torch.from_numpy(place).to(device)

    def pad(self, x: Tensor) -> Tensor:
        """[V, heads, C] -> [B, heads, n, C]."""
        padded = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
        padded.index_copy_(0, self.place, x[self.node])
        return padded.view(*self.shape, *x.shape[1:]).transpose(1, 2)

    def unpad_into(self, out: Tensor, x: Tensor) -> None:
        """[B, heads, n, C] -> [V, heads, C], into `out`, whose other nodes stay."""
        rows = x.transpose(1, 2).flatten(0, 1)[self.place]
        out.index_copy_(0, self.node, rows)
