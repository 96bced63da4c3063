"""The operands of kernels, and states: cut into tiles, formed and read.

A tile holds the states of some nodes, [nodes, keys x width], for some key channels and
a piece of the value channels. States, but not their rows, are whole vectors.
"""

from math import gcd
from typing import NamedTuple

import numpy as np
import torch

from pyg_chimera.ops.common.numba_runtime import jit, summed
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

#: Numbers of a state at a time. Beyond that, panels are read often enough.
_MOST = 1024


class Operands(NamedTuple):
    """What all forms take, contiguous."""

    query: np.ndarray  #: [V, groups, N]
    key: np.ndarray  #: [V, groups, N]
    value: np.ndarray  #: [V, heads, P]
    grad: np.ndarray | None = None  #: [V, heads, P], of the output, in backward passes


class StateTiles(NamedTuple):
    """How the states of a (block, head) are cut."""

    pieces: int  #: tasks per (block, head), each with a piece of the value channels
    channels: int  #: value channels of a piece
    width: int  #: the same, rounded up to quarters of a vector, or whole ones
    keys: int  #: key channels at a time

    @classmethod
    def of(
        cls,
        held: np.ndarray,
        x: Operands,
        num_bytes: int,
        side: int,
    ) -> "StateTiles":
        """Cuts states into multiples of `side` numbers: as large as possible if the
        `held` states of any block may take `num_bytes`, but at least one multiple.
        """
        num_keys, (_, heads, num_channels) = max(1, x.query.shape[2]), x.value.shape
        vector, _ = vector_lanes(x.value.dtype)
        # Gradients of pieces have to be summed: not cut if there are enough tasks.
        enough = len(held) * heads >= 2 * torch.get_num_threads()
        pieces = 1 if enough else max(1, -(-num_channels // vector))
        channels = -(-num_channels // pieces)
        room = num_bytes // x.value.itemsize // max(1, int(held.max(initial=0)))
        # Quarters of vectors are less to pad, unless few keys are to fill whole ones.
        sizes = []
        for part in (max(1, vector // 4), vector):
            width = max(1, -(-channels // part)) * part
            unit = side // gcd(side, width)
            size = -(-num_keys // unit) * unit * width
            sizes.append((unit * width > room, size, width, unit))
        *_, width, unit = min(sizes)
        most = max(1, min(room, _MOST) // (unit * width)) * unit
        shares = -(-num_keys // most)
        return cls(pieces, channels, width, -(-num_keys // (shares * unit)) * unit)


class Gradients(NamedTuple):
    """Parts of gradients. Tasks write separate ones: pieces, and heads of a group.

    In mask form, parts of query and key are those of groups, and there are no pieces.
    """

    query: np.ndarray  #: [pieces, V, heads, N], or in mask form [parts, V, groups, N]
    key: np.ndarray  #: as those of query
    value: np.ndarray  #: [V, heads, P]
    weight: np.ndarray  #: [pieces, heads, E], or in mask form [E, heads]

    @classmethod
    def of(cls, x: Operands, tiles: StateTiles, num_edges: int) -> "Gradients":
        """Memory for them."""
        (num_nodes, heads, _), dtype = x.value.shape, x.value.dtype
        shape = (tiles.pieces, num_nodes, heads, x.query.shape[2])
        weight = np.zeros((tiles.pieces, heads, num_edges), dtype)
        query, key = np.empty(shape, dtype), np.empty(shape, dtype)
        return cls(query, key, np.zeros_like(x.value), weight)

    def summed(self, groups: int, edge: np.ndarray) -> tuple[np.ndarray, ...]:
        """The sums over the parts; `edge` are the indices of the weights' edges."""
        pieces, num_nodes, heads, num_keys = self.query.shape
        shape = (pieces, num_nodes, groups, heads // groups, num_keys)
        dq, dk = (summed(x.reshape(shape), (0, 3)) for x in self[:2])
        dw = np.empty((len(edge), heads), self.weight.dtype)
        dw[edge] = summed(self.weight, (0,)).T
        return dq, dk, self.value, dw


class Task(NamedTuple):
    """A task, and where its head's and piece's vectors of node 0 are."""

    block: int
    head: int
    piece: int
    keys: int  #: index of the query's and the key's first number, ...
    values: int  #: ... the value's, ...
    grads: int  #: ... and those of the parts of gradients


class Tile(NamedTuple):
    """The sizes of a tile, and the numbers between the vectors of successive nodes."""

    num_keys: int  #: key channels ...
    keys: int  #: ... and rows of states, the last ones zero
    channels: int  #: value channels ...
    width: int  #: ... and columns of states, the last ones zero
    key_step: int
    value_step: int
    grad_step: int


@jit
def task_of(task, x, tiles):
    """The task of an index."""
    _, heads, num_channels = x.value.shape
    num_nodes, groups, num_keys = x.key.shape
    block, h = task // (heads * tiles.pieces), task // tiles.pieces % heads
    piece = task % tiles.pieces
    return Task(
        block,
        h,
        piece,
        h // (heads // groups) * num_keys,
        h * num_channels + piece * tiles.channels,
        (piece * num_nodes * heads + h) * num_keys,
    )


@jit
def tile_of(piece, first, x, tiles):
    """The tile of a piece, from a key channel on."""
    (_, heads, num_channels), (_, groups, num_keys) = x.value.shape, x.key.shape
    return Tile(
        min(tiles.keys, num_keys - first),
        tiles.keys,
        min(tiles.channels, num_channels - piece * tiles.channels),
        tiles.width,
        groups * num_keys,
        heads * num_channels,
        heads * num_keys,
    )


@jit
def outer(target, pair, u, tile):
    """Sets a state to k v^T for the pair (k, v) of node u, padded with zeros."""
    step, width = lanes(target), tile.width
    k, v = pair[0] + u * tile.key_step, pair[1] + u * tile.value_step
    for p in range(0, width, step):
        row = load_part(v + p, tile.channels - p)
        for a in range(tile.num_keys):
            store_part(target + (a * width + p), splat(k[a]) * row, width - p)
        for a in range(tile.num_keys, tile.keys):
            store_part(target + (a * width + p), zeros(target), width - p)


@jit
def form(target, pair, nodes, first, last, tile):
    """Sets the states at positions from `first` up to `last`, see `outer`."""
    size = tile.keys * tile.width
    for i in range(first, last):
        outer(target + (i - first) * size, pair, nodes[i], tile)


@jit
def read(target, q, state, sign, u, tile):
    """Adds sign * q^T C to node u's target, for its state C."""
    step, width, channels = lanes(target), tile.width, tile.channels
    target, q, count = (
        target + u * tile.value_step,
        q + u * tile.key_step,
        tile.num_keys,
    )
    for p in range(0, channels, step):
        even, odd, row = zeros(target), zeros(target), state + p
        for a in range(0, count - 1, 2):
            even = fma(splat(q[a]), load_part(row, width - p), even)
            odd = fma(splat(q[a + 1]), load_part(row + width, width - p), odd)
            row = row + 2 * width
        if count % 2 == 1:
            even = fma(splat(q[count - 1]), load_part(row, width - p), even)
        result = fma(splat(sign), even + odd, load_part(target + p, channels - p))
        store_part(target + p, result, channels - p)


@jit
def read_rows(target, state, v, rows, u, tile):
    """Sets node u's target to C v, for its state C; `rows` is scratch memory."""
    step, width, count = lanes(target), tile.width, tile.num_keys
    target, v = target + u * tile.grad_step, v + u * tile.value_step
    for p in range(0, width, step):
        factor = load_part(v + p, tile.channels - p)
        for a in range(count):
            row, x = rows + a * step, load_part(state + (a * width + p), width - p)
            store(row, x * factor if p == 0 else fma(x, factor, load(row)))
    for a in range(0, count, step):
        store_part(target + a, row_totals(rows + a * step), count - a)
