"""The mask form: dense matrix products with given resolvents."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.structure.csr import runs
from pyg_chimera.ops.structure.symbolic_factor import Blocks


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


class Group(NamedTuple):
    """Some blocks, with matrices that are padded to the size of the largest."""

    node: Tensor  #: [v], their nodes
    edge: Tensor  #: [e], their edges
    place: Tensor  #: [v], index of each node in a flattened [B, n]
    entry: Tensor  #: [e], index of each edge in a flattened [B, n, n]
    shape: tuple[int, int]  #: B, n
    double: bool  #: whether to compute in float64

    def pad(self, x: Tensor) -> Tensor:
        """[v, heads, C] -> [B, heads, n, C]."""
        padded = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[1:])
        padded.index_copy_(0, self.place, x)
        return padded.view(*self.shape, *x.shape[1:]).transpose(1, 2)

    def unpad(self, x: Tensor) -> Tensor:
        """[B, heads, n, C] -> [v, heads, C]."""
        return x.transpose(1, 2).flatten(0, 1)[self.place]

    def matrices(self, weight: Tensor) -> Tensor:
        """A, [B, heads, n, n], from the weights of the edges, [e, heads]."""
        (size, n), heads = self.shape, weight.size(1)
        A = weight.new_zeros(size * n * n, heads).index_add(0, self.entry, weight)
        return A.view(size, n, n, heads).permute(0, 3, 1, 2).contiguous()


def groups(
    blocks: Blocks,
    device: torch.device,
    most: int,
    alike: float = 0.0,
    double: np.ndarray | None = None,
) -> list[Group]:
    """Cuts a batch into groups of blocks.

    Args:
        blocks: The batch.
        device: The device of the tensors.
        most: The entries of a head that a group may have, or it is a single block.
        alike: The least ratio of the sizes of the smallest and the largest block.
        double: Which blocks to compute in float64, [T]; these are apart.
    """
    sizes, made = blocks.sizes, []
    double = np.zeros(len(sizes), bool) if double is None else double
    waiting = np.lexsort((-sizes, double))
    while len(waiting) > 0:
        first = waiting[0]
        fit = waiting[: max(1, most // sizes[first] ** 2)]
        fit = fit[(sizes[fit] >= alike * sizes[first]) & (double[fit] == double[first])]
        waiting = waiting[len(fit) :]
        made.append(_group(blocks, fit, bool(double[first]), device))
    return made


def _group(
    blocks: Blocks, some: np.ndarray, double: bool, device: torch.device
) -> Group:
    sizes, count = blocks.sizes[some], np.diff(blocks.edge_ptr)[some]
    n = int(sizes.max())
    first = np.repeat(blocks.ptr[some], count)
    number = np.repeat(np.arange(len(some)), count)
    at = runs(blocks.edge_ptr[some], count)
    row, col = blocks.edge_row[at] - first, blocks.edge_col[at] - first
    tables = (
        blocks.node[runs(blocks.ptr[some], sizes)],
        blocks.edge[at],
        runs(n * np.arange(len(some)), sizes),
        (number * n + row) * n + col,
    )
    node, edge, place, entry = (torch.from_numpy(x).to(device) for x in tables)
    return Group(node, edge, place, entry, (len(some), n), double)
