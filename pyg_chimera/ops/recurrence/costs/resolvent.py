"""Predicted costs of algorithms on a CPU: multiply-adds, seconds and bytes.

The constants are in nanoseconds on one core (AMD Zen 4), forward and backward. They are
right to a factor of about two, without what all calls take.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from pyg_chimera.ops.common.dispatch import Choice, Cost
from pyg_chimera.ops.common.simd import vector_lanes
from pyg_chimera.ops.recurrence.cpu.chunks import chunk_cost
from pyg_chimera.ops.recurrence.plan.paths import path_scans
from pyg_chimera.ops.structure.symbolic_factor import Blocks, SymbolicFactor

#: On a GPU, blocks of at most this many nodes are inverted as dense matrices, each by
#: one program. An H200 takes 40 ms for 1,024 nodes, and as long as by fronts for 450.
_MAX_DENSE = 448


class _Totals(NamedTuple):
    """Sums over the blocks of a graph, cached in its tables."""

    largest: float  #: most nodes of a block
    nodes: float
    squares: float
    cubes: float
    entries: float  #: of the factor L
    solves: float  #: multiply-adds of solving for all columns of the inverses
    updates: float  #: multiply-adds of the factorisation
    paths: np.ndarray | None  #: lengths of the scans of the chunk form

    @classmethod
    def of(cls, blocks: Blocks) -> "_Totals":
        if cls not in blocks.tables:
            n, entries, updates = blocks.sizes.astype(float), np.zeros(1), np.zeros(1)
            if isinstance(blocks, SymbolicFactor):
                entries, updates = blocks.entries, blocks.updates
            scans, solves = path_scans(blocks), n * (2.0 * entries + 3.0 * n)
            sums = (n, n**2, n**3, entries, solves, updates)
            paths = None if scans is None else np.diff(scans.states.ptr) * 1.0
            largest = float(n.max(initial=0))
            blocks.tables[cls] = cls(largest, *map(float, map(np.sum, sums)), paths)  # type: ignore[call-arg, arg-type]
        return blocks.tables[cls]


def cost_of(
    choice: Choice,
    blocks: Blocks,
    sizes: tuple[int, int, int, int],
    dtype: np.dtype,
    sweeps: int,
) -> Cost:
    """The cost of a choice on this CPU, forward and backward.

    Args:
        choice: The algorithm.
        blocks: The blocks; a symbolic factor for the sparse solver.
        sizes: The numbers of groups, heads, state channels and value channels.
        dtype: The dtype of the computation.
        sweeps: The sweeps of an iteration, or the terms of a finite sum.
    """
    groups, heads, states, channels = sizes
    total, (_, solver, form, *_) = _Totals.of(blocks), choice
    num_blocks, num_edges = len(blocks.sizes), float(blocks.num_edges)
    vector, _ = vector_lanes(dtype)
    lanes = heads * states * (-(-4 * channels // vector) * vector / 4)
    threads = max(1, min(torch.get_num_threads(), heads * num_blocks))
    if form == "mask":
        # Matrix products, passes over resolvents, and computing these.
        operations = 3.0 * total.squares * (groups * states + heads * channels)
        time = total.squares * (
            0.1 * groups * states + 0.08 * heads * channels + 1.5 * heads
        )
        held = threads * 3 * total.largest**2
        if solver == "sparse":
            operations += 3.0 * heads * total.solves
            time += 0.3 * heads * total.solves + 1e3 * num_blocks
        else:
            powers = 1 + 2 * math.ceil(math.log2(sweeps + 1)) if sweeps else 1
            cubes = 3.0 * heads * total.cubes * powers
            operations += cubes
            time += 0.05 * cubes + 1e5 * heads * num_blocks
    elif form == "chunk":
        lengths = np.zeros(0) if total.paths is None else total.paths
        time = heads * float(chunk_cost(lengths, states, channels).sum())
        operations, held = 20.0 * time, threads * total.largest * states * channels / 64
    elif solver == "sparse":
        # The approximate size of the panels of all supernodes.
        panel = 2.1 * total.entries + 5.0 * total.nodes
        operations = 3.0 * panel * lanes + heads * total.updates
        time = (0.3 * total.entries + 1.8 * total.nodes) * lanes
        time += 0.2 * heads * total.updates
        held = heads * panel
    else:
        swept = (3.0 * sweeps + 1) * num_edges + (6.0 * sweeps + 20) * total.nodes
        operations = swept * lanes
        # It depends on whether the states of one vector fit in the cache.
        far = 1.0 if total.largest * vector * dtype.itemsize < 1 << 20 else 2.5
        time = 0.14 * far * operations
        kept = sweeps if solver == "neumann" else 0
        held = threads * (4 + kept) * total.largest * vector
    if form != "chunk":  # reading and checking the transitions, and their gradients
        time += heads * (330.0 * total.nodes + 210.0 * num_edges)
    memory = dtype.itemsize * (held + 2 * heads * num_edges)
    return Cost(operations, 1e-9 * time / threads, memory)


def prefers_dense(symbolic: SymbolicFactor) -> bool:
    """Whether dense matrices are faster on a GPU."""
    squares = float((symbolic.sizes.astype(float) ** 2).sum())
    is_full = symbolic.num_entries > 0.2 * squares
    return is_full or int(symbolic.sizes.max(initial=0)) <= _MAX_DENSE
