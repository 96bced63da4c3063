"""What the forms and solvers cost, in rough nanoseconds, and which to take."""

import numpy as np

from pyg_chimera.ops.common.chunk_form import chunk_cost
from pyg_chimera.ops.resolvent.path_factors import path_scans
from pyg_chimera.ops.structure.symbolic_factor import SymbolicFactor

__all__ = ["cheaper_form", "prefers_dense"]

#: Bytes of resolvents that the mask form may hold when it is free to choose.
_MAX_MASK_BYTES = 1 << 30
#: Nodes of a block up to which a GPU rather inverts dense matrices.
_MAX_DENSE = 1024


def cheaper_form(
    symbolic: SymbolicFactor,
    sizes: tuple[int, int, int, int],
    solver: str,
    backend: str,
    itemsize: int,
) -> tuple[str, str]:
    """The form that takes less time, and why.

    Args:
        symbolic: The blocks.
        sizes: The numbers of groups, heads, state channels and value channels.
        solver: ``"sparse"``, ``"dense"`` or ``"neumann"``.
        backend: The backend.
        itemsize: Bytes of a number.
    """
    groups, heads, states, channels = sizes
    nodes = symbolic.sizes.astype(float)
    largest = float(nodes.max(initial=0))
    # numba's threads hold a block each, dense solvers a block or a padded group of
    # like size, torch's sparse solver all blocks padded to the largest.
    padded = backend == "torch" and solver == "sparse"
    wide = np.full_like(nodes, largest) if padded else nodes
    squares = float((wide**2).sum())
    held = squares if padded else largest**2
    fits = held * heads * itemsize <= _MAX_MASK_BYTES
    if solver != "sparse" and fits:
        return "mask", "dense matrices are at hand"
    sweep = 2.0 * symbolic.entries + 3.0 * nodes
    # Forward and backward: matrix products, passes over resolvents, and three solves.
    mask = squares * (0.1 * groups * states + 0.08 * heads * channels + 1.5 * heads)
    mask += 0.3 * heads * float((sweep * wide).sum()) + 1e3 * len(nodes)
    if backend == "numba":  # about so many numbers are in panels of supernodes
        sweep = 0.25 * (3.0 * symbolic.entries + 8.0 * nodes)
        channels = -(-channels // 16) * 16  # in whole vectors
    state = 0.6 * float(sweep.sum()) * heads * states * channels
    scans = path_scans(symbolic) if (backend, solver) == ("numba", "sparse") else None
    if scans is not None:
        lengths = np.diff(scans.states.ptr).astype(float)
        chunk = heads * float(chunk_cost(lengths, states, channels).sum())
        if chunk <= state and (chunk <= mask or not fits):
            return "chunk", "paths: matrix products in chunks are faster"
    if not fits:
        return "state", "resolvents would not fit in memory"
    if mask <= state:
        return "mask", "blocks are small: matrix products are faster"
    return "state", "blocks are large: states along edges are faster"


def prefers_dense(symbolic: SymbolicFactor, device: str) -> bool:
    """Whether the torch backend does better with dense matrices."""
    largest = int(symbolic.sizes.max(initial=0))
    squares = float((symbolic.sizes.astype(float) ** 2).sum())
    full = symbolic.num_entries > 0.2 * squares
    return full or (device != "cpu" and largest <= _MAX_DENSE)
