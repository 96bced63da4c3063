"""Predicted costs of the forms of a scan on a CPU: multiply-adds, seconds and bytes.

The constants are in nanoseconds on one core (AMD Zen 4), forward and backward.
"""

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Cost
from pyg_chimera.ops.recurrence.chunk_form import chunk_cost
from pyg_chimera.ops.recurrence.dag_scan import grid_sweeps
from pyg_chimera.ops.recurrence.states import GridStates, StateGraph


def cost_of(
    form: str, structure: StateGraph | GridStates, query: Tensor, value: Tensor
) -> Cost:
    """The cost of a form on this CPU, forward and backward, with the numba backend.

    Args:
        form: ``"state"``, ``"mask"``, or for paths ``"chunk"``.
        structure: The graph of states, or the states of grids.
        query: [V, groups, state channels].
        value: [V, heads, value channels].
    """
    groups, num_keys = query.shape[1:]
    heads, channels = value.shape[1:]
    sizes, entries, nodes = (x.astype(float) for x in structure.extents)
    largest = float(nodes.max(initial=0))
    if form == "chunk":
        lengths = np.diff(structure.graph.component_ptr).astype(float)
        time = chunk_cost(lengths, num_keys, channels)
        operations = 3.0 * lengths * (64.0 * (num_keys + channels))
        operations += 6.0 * lengths * num_keys * channels
        held = float(lengths.max(initial=0)) * num_keys * channels / 64
    elif form == "mask" and isinstance(structure, GridStates) and structure.in_rows:
        inner, number = 4.0 * num_keys + 3.0 * channels, len(structure.orientations)
        time = nodes**2 * (0.017 * inner + 0.4 * number) + 60.0 * number * nodes
        operations = nodes**2 * (inner + 12.0 * number)
        held = 5 * largest * min(largest, 256)
    elif form == "mask":
        sweeps = (0.75 * sizes + 0.45 * entries) * nodes
        inner = groups * num_keys / heads + channels
        time = sweeps + nodes**2 * (0.1 * inner + 1.5) + 70.0 * sizes + 150.0 * entries
        operations = 3.0 * (nodes**2 * inner + (sizes + entries) * nodes)
        held = 3 * largest**2
    elif isinstance(structure, GridStates):
        lanes = num_keys * (-(-channels // 16) * 16)  # in whole vectors
        visits = len(structure.orientations) * nodes
        if structure.on_nodes:
            rows = visits / np.maximum(np.minimum(*structure.grids[:2]), 1)
            time = visits * (0.4 * lanes + 50.0) + rows * 0.5 * lanes
            operations = 3.0 * visits * 4.0 * lanes
        else:
            time = visits * (0.8 * lanes + 70.0)
            operations = 3.0 * visits * 9.0 * lanes
        held = float(grid_sweeps.most_held(structure.grids, structure.on_nodes, 16))
    else:
        lanes = num_keys * (-(-channels // 16) * 16)  # in whole vectors
        time = (0.45 * sizes + 0.2 * entries) * lanes + 300.0 * sizes + 150.0 * entries
        # The more states there are, the more often they are read from memory.
        time += 0.8 * np.log2(1 + sizes * lanes / (1 << 17)) * lanes * sizes
        operations = 3.0 * (2.0 * sizes + entries) * lanes
        held = float(min(1 << 18, sizes.max(initial=0) * lanes))
    threads = max(1, min(torch.get_num_threads(), heads * len(sizes)))
    seconds = 1e-9 * heads * float(time.sum()) / threads
    memory = value.element_size() * threads * held
    return Cost(heads * float(operations.sum()), seconds, memory)
