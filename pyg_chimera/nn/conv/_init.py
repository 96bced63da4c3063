"""Initial values of gates, and the initial ranges of heads."""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.dense.linear import Linear


class GateLinear(Linear):
    """A projection to gates, perhaps lazy. Its outputs initially have the standard
    deviation `std` for inputs of variance one.
    """

    def __init__(self, in_channels: int, out_channels: int, std: float) -> None:
        self.std = std
        super().__init__(in_channels, out_channels, bias=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> "GateLinear":
        # That of PyG 2.6 returns a plain `Linear`; and if there were none, PyTorch
        # would refuse to copy one with parametrizations.
        out = memo[id(self)] = self.__new__(type(self))
        out.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return out

    def reset_parameters(self) -> None:
        if self.in_channels > 0:
            # Uniform: with the tails of a normal distribution, fewer models learn.
            bound = self.std * math.sqrt(3 / self.in_channels)
            torch.nn.init.uniform_(self.weight, -bound, bound)


@torch.no_grad()
def softplus_(bias: Tensor, values: Tensor) -> None:
    """Fills a bias with the inverse softplus of positive values."""
    bias.copy_(values + torch.log(-torch.expm1(-values)))


@torch.no_grad()
def log_uniform_softplus_(bias: Tensor) -> None:
    """Fills a bias as Mamba does: its softplus is log-uniform in [0.001, 0.1]."""
    values = torch.empty_like(bias).uniform_(math.log(1e-3), math.log(1e-1))
    softplus_(bias, values.exp())


def check_reach(reach: tuple[float, float] | None) -> None:
    """Checks the interval of initial ranges."""
    if reach is None:
        return
    pair = isinstance(reach, Sequence) and len(reach) == 2
    if not pair or not 1 <= reach[0] <= reach[1] < math.inf:
        raise ValueError(
            "'reach' must be two numbers of steps, at least one, the first one not "
            f"larger than the second, such as (4, 64), or None, got {reach!r}"
        )


def head_reaches(reach: tuple[float, float], heads: int) -> Tensor:
    """The range of each head, in steps, [heads]: midpoints of equal parts, on a log
    scale.

    With its ends instead, one of two heads would have the shortest range, and be of use
    for near neighbours only.
    """
    near, far = reach
    # In half precision, of a model made in it, ranges would be those of rounding.
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    share = (torch.arange(heads, dtype=dtype) + 0.5) / heads
    return near * (far / near) ** share
