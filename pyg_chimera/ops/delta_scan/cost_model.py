"""What the forms of the delta rule take on a CPU: multiply-adds, seconds and bytes.

The constants are nanoseconds of one core (AMD Zen 4), forward and backward.
"""

from torch import Tensor

from pyg_chimera.ops.common.dispatch import Choice, Cost
from pyg_chimera.ops.delta_scan.graph import DeltaGraph
from pyg_chimera.ops.delta_scan.level_states import MAX_NUMEL

__all__ = ["cost_of"]

#: Nanoseconds of a multiply-add of matrix products.
_PRODUCT = 0.03


def cost_of(choice: Choice, graph: DeltaGraph, query: Tensor, value: Tensor) -> Cost:
    """What an algorithm takes on this CPU, forward and backward.

    Args:
        choice: Its form and backend.
        graph: The graphs.
        query: [V, groups, state channels].
        value: [V, heads, value channels].
    """
    N, (V, heads, P) = query.size(2), value.shape
    if choice.form == "mask":
        sizes = graph.sizes.astype(float)
        acyclic, cyclic = sizes[~graph.is_cyclic], sizes[graph.is_cyclic]
        operations = float((acyclic**2 * (4 * acyclic + 9 * (N + P))).sum())
        operations += float((cyclic**2 * (10 * cyclic + 19 * (N + P))).sum())
        others = float((33 * acyclic**2 + 2e4).sum() + (90 * cyclic**2 + 15e4).sum())
        held = 8 * float((acyclic**2).sum() + 2 * (cyclic**2).sum())
    elif choice.form == "chunk":
        operations = V * (32.0 * (10 * N + 8 * P + 32) + 9 * N * P)
        others = 2000.0 * V + 100e3 * graph.depth / 32 / heads
        held = V * (4 * 32.0 + 2 * N * P / 32)
    elif choice.backend == "numba":
        lanes = N * (-(-P // 16) * 16)  # in whole vectors
        operations = (11.0 * V + 3.0 * len(graph.row)) * lanes
        others = (0.65 * V + 0.25 * len(graph.row)) * lanes + 300.0 * V
        held = float(graph.sizes.max(initial=0)) * lanes
    else:
        numbers = float((V + len(graph.row)) * N * P)
        operations = 7 * numbers
        others = 9 * numbers + 100e3 * graph.depth / heads
        held = min(5.0 * V * N * P, MAX_NUMEL / heads)
    seconds = 1e-9 * heads * (_PRODUCT * operations + others)
    memory = value.element_size() * heads * held
    return Cost(heads * operations, seconds, memory)
