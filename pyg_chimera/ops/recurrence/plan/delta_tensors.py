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
    """Clamp beta to >= 1e-20 so that it can be divided by."""
    return beta.clamp(min=1e-20)
