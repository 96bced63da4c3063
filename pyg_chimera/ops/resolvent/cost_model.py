"""What an algorithm takes on a CPU: multiply-adds, seconds and bytes, and the cheapest.

The constants are nanoseconds of one core (AMD Zen 4), forward and backward. They are
right to a factor of about two; what matters is their order.
"""

import math

import numpy as np
import torch

from pyg_chimera.ops.common.chunk_form import chunk_cost
from pyg_chimera.ops.common.dispatch import Choice, Cost
from pyg_chimera.ops.common.simd import vector_lanes
from pyg_chimera.ops.resolvent.path_factors import path_scans
from pyg_chimera.ops.structure.symbolic_factor import Blocks, SymbolicFactor

__all__ = ["cost_of", "prefers_dense"]

#: Nodes of a block up to which a GPU rather inverts dense matrices.
_MAX_DENSE = 1024


def cost_of(
    choice: Choice,
    blocks: Blocks,
    sizes: tuple[int, int, int, int],
    dtype: np.dtype,
    sweeps: int,
) -> Cost:
    """What a choice takes on this CPU, forward and backward.

    Args:
        choice: The algorithm.
        blocks: The blocks, with their factors for the sparse solver.
        sizes: The numbers of groups, heads, state channels and value channels.
        dtype: Of the computation.
        sweeps: Of an iteration, or the terms of a finite sum.
    """
    groups, heads, states, channels = sizes
    nodes, edges = blocks.sizes.astype(float), np.diff(blocks.edge_ptr).astype(float)
    squares = nodes**2
    vector, _ = vector_lanes(dtype)
    lanes = heads * states * (-(-channels // vector) * vector)
    largest = float(nodes.max(initial=0))
    threads = max(1, min(torch.get_num_threads(), heads * len(nodes)))
    products = 3.0 * squares * (groups * states + heads * channels)
    if choice.form == "mask":
        # Products of matrices, passes over resolvents, and how these are made.
        time = squares * (0.1 * groups * states + 0.08 * heads * channels + 1.5 * heads)
        if isinstance(blocks, SymbolicFactor) and choice.solver == "sparse":
            solves = heads * nodes * (2.0 * blocks.entries + 3.0 * nodes)
            operations, time = products + 3.0 * solves, time + 0.3 * solves + 1e3
        else:
            power = 1 + 2 * math.ceil(math.log2(sweeps + 1)) if sweeps else 1
            cubes = 3.0 * heads * nodes**3 * power
            operations, time = products + cubes, time + 0.05 * cubes + 1e5 * heads
        if choice.backend == "torch" and choice.solver == "sparse":
            held, time = heads * largest**2 * len(nodes), 10 * time + 1e5
        else:
            held = threads * 3 * largest**2
    elif choice.form == "chunk":
        scans = path_scans(blocks)
        lengths = np.zeros(0) if scans is None else np.diff(scans.states.ptr) * 1.0
        time = heads * chunk_cost(lengths, states, channels)
        operations, held = 20.0 * time, threads * largest * states * channels / 64
    elif isinstance(blocks, SymbolicFactor) and choice.solver == "sparse":
        # About so many numbers are in panels of supernodes.
        panel = 2.1 * blocks.entries + 5.0 * nodes
        operations = 3.0 * panel * lanes + heads * blocks.updates
        time = (0.3 * blocks.entries + 1.8 * nodes) * lanes
        time = time + 0.2 * heads * blocks.updates
        held = heads * float(panel.sum())
        if choice.backend == "torch":
            time = 10 * time + 1e5
    elif choice.solver == "dense":
        operations = heads * nodes**3 + 3.0 * squares * lanes
        time, held = 0.05 * operations, heads * largest**2 + 3 * largest * lanes
    else:
        swept = (3.0 * sweeps + 1) * edges + (6.0 * sweeps + 20) * nodes
        operations = swept * lanes
        # States of a few lanes are gathered from a cache, or are not.
        far = 1.0 if largest * vector * dtype.itemsize < 1 << 20 else 2.5
        time = (0.14 * far if choice.backend == "numba" else 3.0) * operations
        kept = sweeps if choice.solver == "neumann" else 0
        held = threads * (4 + kept) * largest * vector
    seconds = 1e-9 * float(np.sum(time)) / threads
    memory = dtype.itemsize * (held + 2 * heads * float(edges.sum()))
    return Cost(float(np.sum(operations)), seconds, memory)


def prefers_dense(symbolic: Blocks, device: str) -> bool:
    """Whether the torch backend does better with dense matrices."""
    if not isinstance(symbolic, SymbolicFactor):
        return False
    largest = int(symbolic.sizes.max(initial=0))
    squares = float((symbolic.sizes.astype(float) ** 2).sum())
    full = symbolic.num_entries > 0.2 * squares
    return full or (device != "cpu" and largest <= _MAX_DENSE)
