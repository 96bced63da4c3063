"""What the forms of a scan cost, in rough nanoseconds, and which to take."""

import numpy as np
from torch import Tensor

from pyg_chimera.ops.common.chunk_form import chunk_cost
from pyg_chimera.ops.dag_scan.states import StateGraph

__all__ = ["cheaper_form"]


def cheaper_form(
    graph: StateGraph, query: Tensor, value: Tensor, backend: str
) -> tuple[str, str]:
    """The form that takes less time, forward and backward, and why."""
    groups, num_keys = query.shape[1:]
    heads, channels = value.shape[1:]
    sizes, nodes = graph.sizes.astype(float), np.diff(graph.nodes.ptr).astype(float)
    # A state takes the longer the less of the channels of all of them fit in a cache.
    lanes = num_keys * (-(-channels // 16) * 16)  # in whole vectors
    shares = np.ceil(sizes * lanes / (1 << 18))
    state = (0.45 * sizes + 0.2 * graph.entries) * lanes + 100.0 * shares * sizes
    sweeps = (0.75 * sizes + 0.45 * graph.entries) * nodes
    products = nodes**2 * (0.1 * (groups * num_keys / heads + channels) + 1.5)
    mask = sweeps + products + 70.0 * sizes
    if backend == "numba" and graph.are_paths:
        lengths = np.diff(graph.component_ptr).astype(float)
        chunk = chunk_cost(lengths, num_keys, channels).sum()
        if chunk <= min(mask.sum(), state.sum()):
            return "chunk", "paths: matrix products in chunks are faster"
    if mask.sum() <= state.sum():
        return "mask", "blocks are small: matrix products are faster"
    return "state", "blocks are large: states along edges are faster"
