import math

import torch
from torch import Tensor
from torch.nn import Parameter

from pyg_chimera.nn._inputs import at_least_float32
from pyg_chimera.nn._norm import RMSNorm
from pyg_chimera.ops.common.checks import check_integer


class Contrast(torch.nn.Module):
    r"""The difference of pairs, :math:`\mathbf{y}_1 - \lambda \mathbf{y}_2`, with a
    :math:`\lambda` for each head, and the norm of heads, if they have a size.
    """

    def __init__(
        self, heads: int, channels: int, depth: int, normalized: int | None = None
    ) -> None:
        super().__init__()
        depth = check_integer("depth", depth, 1)
        self.initial = 0.8 - 0.6 * math.exp(-0.3 * (depth - 1))
        self.weight = Parameter(torch.empty(2, 2, heads, channels))
        self.norm = None if normalized is None else RMSNorm(normalized, eps=1e-5)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.normal_(self.weight, std=0.1)
        if self.norm is not None:
            self.norm.reset_parameters()

    def forward(self, pairs: Tensor) -> Tensor:
        """Takes [..., heads, 2, P], and returns [..., heads, P]."""
        query, key = at_least_float32(self.weight).unbind(1)
        grown, shrunk = (query * key).sum(-1).exp().unbind()
        factor = (grown - shrunk + self.initial).unsqueeze(-1)
        # In half precision, a factor near one would cancel all of what is alike.
        first, second = at_least_float32(pairs).unbind(-2)
        y = first - factor * second
        if self.norm is None:
            return y
        return (self.norm(y) * (1 - self.initial)).to(pairs.dtype)


class ResetsAll:
    """Resets the parts of a layer that a subclass adds, once they are there."""

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        super().reset_parameters()  # type: ignore[misc]
        for module in self.children():  # type: ignore[attr-defined]
            if isinstance(module, (Contrast, RMSNorm)):
                module.reset_parameters()
