"""What the forms and solvers cost, in rough nanoseconds, and which to take."""

from typing import NamedTuple

import numpy as np

from pyg_chimera.ops.structure.system import System

#: Bytes of resolvents that the mask form may hold when it is free to choose.
_MAX_MASK_BYTES = 1 << 30
#: Nodes of a block up to which a GPU rather inverts dense matrices.
_MAX_DENSE = 1024


class Shape(NamedTuple):
    """The sizes of a call beside its graph."""

    groups: int
    heads: int
    states: int
    channels: int


def cheaper_form(
    system: System, shape: Shape, solver: str, backend: str, itemsize: int
) -> tuple[str, str]:
    """The form that takes less time, and why."""
    sizes = system.sizes.astype(float)
    largest = float(sizes.max(initial=0))
    # numba's threads hold a block each, dense solvers a block or a padded group of
    # like size, torch's sparse solver all blocks padded to the largest.
    padded = backend == "torch" and solver == "sparse"
    wide = np.full_like(sizes, largest) if padded else sizes
    squares = float((wide**2).sum())
    held = squares if padded else largest**2
    if held * shape.heads * itemsize > _MAX_MASK_BYTES:
        return "state", "resolvents would not fit in memory"
    if solver != "sparse":
        return "mask", "dense matrices are at hand"
    entries = np.diff(system.lower_ptr[system.ptr])
    sweep = 2.0 * entries + 3.0 * sizes
    # Forward and backward: matrix products, passes over resolvents, and three solves.
    mask = squares * (
        0.14 * shape.groups * shape.states
        + 0.1 * shape.heads * shape.channels
        + 2.0 * shape.heads
    )
    mask += 0.7 * shape.heads * float((sweep * wide).sum()) + 1e5 * len(sizes)
    states = shape.heads * shape.states * shape.channels
    if system.triangular and backend == "numba":  # one fused pass, and one back
        state = float(0.2 * entries.sum() + 1.1 * sizes.sum()) * states
        state += 200.0 * float(sizes.sum()) * shape.heads
    else:
        state = 0.6 * float(sweep.sum()) * states
    if mask <= state:
        return "mask", "blocks are small: matrix products are faster"
    return "state", "blocks are large: states along edges are faster"


def cheaper_scan(system: System, node_ptr: np.ndarray, shape: Shape) -> tuple[str, str]:
    """The form of a scan with gates, between so many nodes a block, on the CPU."""
    sizes, nodes = system.sizes.astype(float), np.diff(node_ptr).astype(float)
    entries = np.diff(system.lower_ptr[system.ptr])
    state = 1.0 * float(sizes.sum()) + 0.2 * float(entries.sum())
    state *= shape.states * shape.channels
    state += 200.0 * float(sizes.sum())
    sweeps = (1.5 * sizes + 0.2 * entries) * nodes
    products = nodes**2 * (0.15 * (shape.states + shape.channels) + 3.0)
    mask = float((sweeps + products).sum()) + 300.0 * float(sizes.sum())
    if mask <= state:
        return "mask", "blocks are small: matrix products are faster"
    return "state", "blocks are large: states along edges are faster"


def prefers_dense(system: System, device: str) -> bool:
    """Whether the torch backend does better with dense matrices."""
    largest = int(system.sizes.max(initial=0))
    full = system.num_entries > 0.2 * float((system.sizes.astype(float) ** 2).sum())
    return full or (device != "cpu" and largest <= _MAX_DENSE)
