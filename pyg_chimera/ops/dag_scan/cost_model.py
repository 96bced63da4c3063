"""What the forms of a scan cost, in rough nanoseconds, and which to take."""

import numpy as np
from torch import Tensor

from pyg_chimera.ops.dag_scan.states import StateGraph

__all__ = ["cheaper_form"]


def cheaper_form(graph: StateGraph, query: Tensor, value: Tensor) -> tuple[str, str]:
    """The form that takes less time, forward and backward, and why."""
    groups, num_keys = query.shape[1:]
    heads, channels = value.shape[1:]
    sizes, nodes = graph.sizes.astype(float), np.diff(graph.nodes.ptr).astype(float)
    state = 1.0 * float(sizes.sum()) + 0.2 * float(graph.entries.sum())
    state *= heads * num_keys * channels
    state += 200.0 * heads * float(sizes.sum())
    sweeps = heads * (1.5 * sizes + 0.2 * graph.entries) * nodes
    products = nodes**2 * (0.15 * (groups * num_keys + heads * channels) + 3.0 * heads)
    mask = float((sweeps + products).sum()) + 300.0 * heads * float(sizes.sum())
    if mask <= state:
        return "mask", "blocks are small: matrix products are faster"
    return "state", "blocks are large: states along edges are faster"
