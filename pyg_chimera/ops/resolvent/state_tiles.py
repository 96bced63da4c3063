"""The operands of kernels, and states: cut into tiles, formed and read.

A tile holds the states of some nodes, [nodes, keys x width], for some key channels and
a piece of the value channels, padded with zeros to whole vectors.
"""

from math import gcd
from typing import NamedTuple

import numpy as np
import torch

from pyg_chimera.ops.common.numba_runtime import jit
from pyg_chimera.ops.common.simd import (
    fma,
    lanes,
    load,
    load_part,
    row_totals,
    splat,
    store,
    store_part,
    vector_lanes,
    zeros,
)

__all__ = ["Gradients", "Operands", "StateTiles", "outer", "read", "read_rows"]


class Operands(NamedTuple):
    """What all forms take, contiguous."""

    query: np.ndarray  #: [V, groups, N]
    key: np.ndarray  #: [V, groups, N]
    value: np.ndarray  #: [V, heads, P]
    grad: np.ndarray | None = None  #: [V, heads, P], of the output, in backward passes


class Gradients(NamedTuple):
    """Gradients, or parts of them that are yet to be summed, [parts, ...]."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    weight: np.ndarray


class StateTiles(NamedTuple):
    """How the states of a (block, head) are cut."""

    pieces: int  #: tasks per (block, head), each with a piece of the value channels
    channels: int  #: value channels of a piece
    width: int  #: the same, rounded up to whole vectors
    keys: int  #: key channels at a time

    @classmethod
    def of(
        cls,
        held: np.ndarray,
        query: np.ndarray,
        value: np.ndarray,
        num_bytes: int,
        side: int,
    ) -> "StateTiles":
        """Cuts states into multiples of `side` numbers: as large as possible if the
        `held` states of any block may take `num_bytes`, but at least one multiple.
        """
        num_keys, (_, heads, num_channels) = query.shape[2], value.shape
        vector, _ = vector_lanes(value.dtype)
        # Gradients of pieces have to be summed: not cut if there are enough tasks.
        enough = len(held) * heads >= 2 * torch.get_num_threads()
        pieces = 1 if enough else -(-num_channels // vector)
        channels = -(-num_channels // pieces)
        width = -(-channels // vector) * vector
        unit = side // gcd(side, width)
        room = num_bytes // value.itemsize // max(1, int(held.max(initial=0)))
        most = max(1, room // (unit * width)) * unit
        shares = -(-num_keys // most)
        return cls(pieces, channels, width, -(-num_keys // (shares * unit)) * unit)


@jit
def outer(target, k, v, count, keys, channels, width):
    """Sets a state to k v^T, padded with zeros."""
    step = lanes(target)
    for p in range(0, width, step):
        row = load_part(v + p, channels - p)
        for a in range(count):
            store(target + (a * width + p), splat(k[a]) * row)
        for a in range(count, keys):
            store(target + (a * width + p), zeros(target))


@jit
def read(target, q, state, sign, count, channels, width):
    """Adds sign * q^T C to the target, for a state C."""
    step = lanes(target)
    for p in range(0, channels, step):
        even, odd = zeros(target), zeros(target)
        for a in range(0, count - 1, 2):
            even = fma(splat(q[a]), load(state + (a * width + p)), even)
            odd = fma(splat(q[a + 1]), load(state + ((a + 1) * width + p)), odd)
        if count % 2 == 1:
            even = fma(
                splat(q[count - 1]), load(state + ((count - 1) * width + p)), even
            )
        result = fma(splat(sign), even + odd, load_part(target + p, channels - p))
        store_part(target + p, result, channels - p)


@jit
def read_rows(target, state, v, rows, count, channels, width):
    """Sets the target to C v, for a state C; `rows` is scratch memory."""
    step = lanes(target)
    for p in range(0, width, step):
        factor = load_part(v + p, channels - p)
        for a in range(count):
            row, x = rows + a * step, load(state + (a * width + p))
            store(row, x * factor if p == 0 else fma(x, factor, load(row)))
    for a in range(0, count, step):
        store_part(target + a, row_totals(rows + a * step), count - a)
