"""What several forms of the delta rule use."""

from typing import NamedTuple

import numpy as np
from torch import Tensor


class Operands(NamedTuple):
    """The inputs of a kernel, or their gradients.

    Gradients of query and key are parts, [parts, V, groups, N] or [V, heads, N].
    """

    query: np.ndarray  #: [V, groups, N]
    key: np.ndarray  #: [V, groups, N]
    value: np.ndarray  #: [V, heads, P]; in transposed systems the gradient of output
    beta: np.ndarray  #: [V, heads]
    weight: np.ndarray  #: [E, heads]


def positive(beta: Tensor) -> Tensor:
    """Beta, but not zero, to divide by it; what is then written is lost in rounding."""
    return beta.clamp(min=1e-20)


def repeated(x: Tensor, num_heads: int) -> Tensor:
    """[..., groups, n, N] -> [..., heads, n, N], the same for all heads of a group."""
    repeats = num_heads // x.size(-3)
    return x if repeats == 1 else x.repeat_interleave(repeats, -3)


def summed(x: Tensor, num_groups: int) -> Tensor:
    """[..., heads, n, N] -> [..., groups, n, N], the sums over the heads of a group."""
    return x.unflatten(-3, (num_groups, -1)).sum(-3)
