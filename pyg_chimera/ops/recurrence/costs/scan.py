"""Predicted costs of the forms of a scan on a CPU: multiply-adds, seconds and bytes.

The constants are in nanoseconds on one core (AMD Zen 4), forward and backward.
"""

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Cost
from pyg_chimera.ops.recurrence.cpu import grid_sweep
from pyg_chimera.ops.recurrence.cpu.chunks import chunk_cost
from pyg_chimera.ops.recurrence.plan.states import GridStates, StateGraph


def cost_of(
    form: str, structure: StateGraph | GridStates, query: Tensor, value: Tensor
) -> Cost:
    """The cost of a form on this CPU, forward and backward, with the numba backend.

    Args:
        form: ``"state"``, for paths ``"chunk"``, or for edges of grids ``"mask"``.
        structure: The graph of states, or the states of grids.
        query: [V, groups, state channels].
        value: [V, heads, value channels].
    """
    num_keys, (heads, channels) = query.shape[2], value.shape[1:]
    lanes = num_keys * (-(-channels // 16) * 16)  # in whole vectors
    if form == "chunk":
        lengths = np.diff(structure.graph.component_ptr).astype(float)
        time = chunk_cost(lengths, num_keys, channels)
        operations = 3.0 * lengths * (64.0 * (num_keys + channels))
        operations += 6.0 * lengths * num_keys * channels
        held = float(lengths.max(initial=0)) * num_keys * channels / 64
    elif isinstance(structure, GridStates):
        height, width, _ = structure.grids
        nodes, number = 1.0 * height * width, len(structure.orientations)
        if form == "mask":
            inner, largest = (
                4.0 * num_keys + 3.0 * channels,
                float(nodes.max(initial=0)),
            )
            time = nodes**2 * (0.017 * inner + 0.4 * number) + 60.0 * number * nodes
            operations = nodes**2 * (inner + 12.0 * number)
            held = 5 * largest * min(largest, 256)
        else:
            visits, on_nodes = number * nodes, structure.on_nodes
            if on_nodes:
                rows = visits / np.maximum(np.minimum(height, width), 1)
                time = visits * (0.4 * lanes + 50.0) + rows * 0.5 * lanes
            else:
                time = visits * (0.8 * lanes + 70.0)
            operations = 3.0 * visits * (4.0 if on_nodes else 9.0) * lanes
            held = float(grid_sweep.most_held(structure.grids, on_nodes, 16))
    else:
        sizes, entries = 1.0 * structure.sizes, 1.0 * structure.entries
        time = (0.45 * sizes + 0.2 * entries) * lanes + 300.0 * sizes + 150.0 * entries
        # The more states there are, the more often they are read from memory.
        time += 0.8 * np.log2(1 + sizes * lanes / (1 << 17)) * lanes * sizes
        operations = 3.0 * (2.0 * sizes + entries) * lanes
        held = float(min(1 << 18, sizes.max(initial=0) * lanes))
    threads = max(1, min(torch.get_num_threads(), heads * len(structure.sizes)))
    seconds = 1e-9 * heads * float(time.sum()) / threads
    memory = value.element_size() * threads * held
    return Cost(heads * float(operations.sum()), seconds, memory)
