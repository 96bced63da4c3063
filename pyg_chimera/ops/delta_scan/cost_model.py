"""What the forms of the delta rule take on a CPU: multiply-adds, seconds and bytes.

The constants are nanoseconds of one core, forward and backward.
"""

import numpy as np
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Cost
from pyg_chimera.ops.delta_scan.graph import DeltaGraph

__all__ = ["cost_of"]

#: Nanoseconds of a multiply-add of products, and of a number that is moved.
_PRODUCT, _MOVE = 0.03, 0.4


def cost_of(form: str, graph: DeltaGraph, query: Tensor, value: Tensor) -> Cost:
    """What a form takes on this CPU, forward and backward.

    Args:
        form: ``"state"``, ``"mask"`` or ``"chunk"``.
        graph: The graphs.
        query: [V, groups, state channels].
        value: [V, heads, value channels].
    """
    N, (V, heads, P) = query.size(2), value.shape
    if form == "mask":
        sizes = graph.sizes.astype(float)
        cubic = np.where(graph.is_cyclic, 8.0, 4.0)
        operations = float((sizes**2 * (cubic * sizes + 7.0 * (N + P))).sum())
        moved = 30.0 * float((sizes**2).sum())
        calls = 20e3 * float((0.1 + graph.is_cyclic).sum())
        held = 8.0 * float((sizes**2).sum())
    elif form == "chunk":
        operations = V * 64.0 * (10.0 * N + 8.0 * P + 64.0) + 9.0 * V * N * P
        moved = 30.0 * V * 64.0
        calls = 100e3 * graph.depth / 64
        held = 4.0 * V * (64.0 + N * P / 64.0)
    else:
        entries = len(graph.row)
        operations = (9.0 * V + 4.0 * entries) * N * P
        moved = 5.0 * (V + entries) * N * P
        calls = 300e3 * graph.depth / heads
        held = 5.0 * V * N * P
    nanoseconds = heads * (_PRODUCT * operations + _MOVE * moved + calls)
    memory = value.element_size() * heads * held
    return Cost(heads * operations, 1e-9 * nanoseconds, memory)
