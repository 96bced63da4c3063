"""The state form on the CPU: states of whole supernodes, swept by matrix products.

With the columns s of a supernode and the rows r below them, the factors I - A = L U
give three dense matrices, its *panel* (see `multifrontal`): E = L_rs L_ss^-1, and row
by row G = (L_ss U_ss)^-1 beside R = U_ss^-1 U_sr. The upward sweep is X_r -= E X_s, the
downward sweep X_s <- G X_s - R X_r.

A task is a (block, head, piece of value channels). It holds the states of some key
channels at a time, [slots, keys x channels], but not those of leaves, which are most
nodes: these are formed when they are needed. In the forward pass, the downward sweep
computes only the part R X_r for leaves, and reads it; the rest of a leaf's output is
computed in mask form, (G * Q K^T) V.
"""

from typing import NamedTuple

import numpy as np
import torch

from pyg_chimera.ops.common.numba_runtime import jit, run, stopped
from pyg_chimera.ops.common.simd import (
    SET,
    SUBTRACT,
    fma,
    gemm,
    gemm_rows,
    lanes,
    load_part,
    pointer,
    splat,
    store_part,
    vector_lanes,
)
from pyg_chimera.ops.common.vector_kit import copy, inner_product, inner_product_of_rows
from pyg_chimera.ops.recurrence.cpu.state_tiles import (
    Gradients,
    Operands,
    StateTiles,
    form,
    outer,
    read,
    read_rows,
    task_of,
    tile_of,
)
from pyg_chimera.ops.structure.supernodes import Supernodes, supernodes
from pyg_chimera.ops.structure.symbolic_factor import SymbolicFactor

#: Bytes of states that all tasks together, or a single one, may hold at a time. They
#: need not fit in a cache: in postorder, states that are needed together are close
#: together, while panels are read once for each tile.
_ALL_BYTES, _TILE_BYTES = 1 << 27, 1 << 24


def _tiles(nodes: Supernodes, x: Operands) -> StateTiles:
    _, side = vector_lanes(x.value.dtype)  # rows of states are whole tiles of products
    room = max(_TILE_BYTES, _ALL_BYTES // torch.get_num_threads())
    return StateTiles.of(nodes.slots, x, room, side)


class _Sizes(NamedTuple):
    """Of all blocks, cached in the tables of a symbolic factor."""

    work: np.ndarray  #: numbers of panels and rows of states of each block
    slots: int  #: the most of any block
    widths: int  #: the most of any supernode

    @classmethod
    def of(cls, symbolic: SymbolicFactor) -> "_Sizes":
        if cls not in symbolic.tables:
            nodes = supernodes(symbolic)
            work = nodes.by_block(np.diff(nodes.panel_ptr) + 12.0 * nodes.widths)
            most = (int(x.max(initial=0)) for x in (nodes.slots, nodes.widths))
            symbolic.tables[cls] = cls(work, *most)
        return symbolic.tables[cls]

    def costs(self, tiles: StateTiles, x: Operands) -> np.ndarray:
        work = 0.03 * self.work * x.query.shape[2] * tiles.width
        return np.repeat(work, x.value.shape[1] * tiles.pieces)


def forward(symbolic: SymbolicFactor, panel: np.ndarray, x: Operands) -> np.ndarray:
    """The output y = H^T q, from the states H = (I - A)^-1 (k v^T)."""
    nodes, out = supernodes(symbolic), np.zeros_like(x.value)
    tiles, sizes = _tiles(nodes, x), _Sizes.of(symbolic)
    run(
        _forward_tasks,
        sizes.costs(tiles, x),
        (sizes.slots + sizes.widths) * tiles.keys * tiles.width,
        out.dtype,
        *(nodes, panel, x, out, tiles),
    )
    return out


def backward(
    symbolic: SymbolicFactor, panel: np.ndarray, x: Operands
) -> tuple[np.ndarray, ...]:
    """Gradients of query, key, value and edge weight, from states and their adjoints.

    With Z = (I - A)^-T (q dy^T): dq_i = H_i dy_i, dk_i = Z_i v_i, dv_i = Z_i^T k_i and
    dA_ij = <Z_i, H_j>. H is recomputed along with Z.
    """
    nodes = supernodes(symbolic)
    tiles, sizes = _tiles(nodes, x), _Sizes.of(symbolic)
    d = Gradients.of(x, tiles, symbolic.num_edges)
    vector, _ = vector_lanes(x.value.dtype)
    rows = 2 * sizes.slots + 4 * sizes.widths
    run(
        _backward_tasks,
        3 * sizes.costs(tiles, x),
        rows * tiles.keys * tiles.width + (tiles.keys + vector) * vector,
        x.value.dtype,
        *(nodes, panel, x, d, tiles),
    )
    return d.summed(x.query.shape[1], nodes.edge)


@jit
def _supernode(nodes, n, panels):
    """A supernode's first position, its numbers of columns and of rows below, the
    address of the slots of these rows, and its panel.
    """
    a, first = nodes.ptr[n], nodes.row_ptr[n]
    rows, panel = nodes.row_slot.ctypes.data + 8 * first, panels + nodes.panel_ptr[n]
    return a, nodes.ptr[n + 1] - a, nodes.row_ptr[n + 1] - first, rows, panel


@jit
def _forward_tasks(begin, end, stop, scratch, nodes, panel, x, out, tiles):
    num_keys, size = x.key.shape[2], tiles.keys * tiles.width
    one, X = x.value.dtype.type(1), pointer(scratch)
    node, slot, leaf = nodes.node, nodes.slot, nodes.leaf
    own = nodes.identity.ctypes.data
    for index in range(begin, end):
        task = task_of(index, x, tiles)
        first, last = nodes.block_ptr[task.block], nodes.block_ptr[task.block + 1]
        T = X + nodes.slots[task.block] * size
        q0, k0 = pointer(x.query) + task.keys, pointer(x.key) + task.keys
        v, y = pointer(x.value) + task.values, pointer(out) + task.values
        panels = pointer(panel) + task.head * panel.shape[1]
        for a0 in range(0, num_keys, tiles.keys):
            tile, q, k = tile_of(task.piece, a0, x, tiles), q0 + a0, k0 + a0
            for i in range(nodes.start[task.block], nodes.start[task.block + 1]):
                if slot[i] >= 0:
                    outer(X + slot[i] * size, (k, v), node[i], tile)
            for n in range(first, last):
                if stopped(stop):
                    return
                a, s, m, rows, E = _supernode(nodes, n, panels)
                H = X + slot[a] * size
                if leaf[n]:
                    H = T
                    if m > 0:
                        form(H, (k, v), node, a, a + s, tile)
                shape = m, size, s
                gemm_rows((X, size, rows), (E, s, 1), (H, size, own), shape, SUBTRACT)
            for n in range(last - 1, first - 1, -1):
                if stopped(stop):
                    return
                a, s, m, rows, E = _supernode(nodes, n, panels)
                G, t, H = E + m * s, s + m, X + slot[a] * size
                R, sign = (G + s, t, 1), -one if leaf[n] else one
                top, below, shape = (T, size, own), (X, size, rows), (s, size, m)
                if leaf[n]:
                    if m == 0:
                        continue
                    gemm_rows(top, R, below, shape, SET)
                else:
                    gemm((T, size), (G, t, 1), (H, size), (s, size, s), SET)
                    gemm_rows(top, R, below, shape, SUBTRACT)
                    copy(H, T, s * size)
                for i in range(s):
                    read(y, q, T + i * size, sign, node[a + i], tile)
        tile = tile_of(task.piece, 0, x, tiles)
        for n in range(first, last):
            if leaf[n]:
                a, s, m, _, E = _supernode(nodes, n, panels)
                G, leaves = E + m * s, node[a : a + s]
                _add_products(G, s + m, (q0, k0, v, y), leaves, num_keys, tile)


@jit
def _add_products(G, ldg, vectors, nodes, num_keys, tile):
    """Adds (G * Q K^T) V to the outputs of some nodes."""
    q0, k0, v0, y0 = vectors
    for i in range(nodes.shape[0]):
        q, y = q0 + nodes[i] * tile.key_step, y0 + nodes[i] * tile.value_step
        for j in range(nodes.shape[0]):
            k, v = k0 + nodes[j] * tile.key_step, v0 + nodes[j] * tile.value_step
            f = splat(inner_product_of_rows(q, k, num_keys) * G[i * ldg + j])
            for p in range(0, tile.channels, lanes(y)):
                left = tile.channels - p
                part = fma(f, load_part(v + p, left), load_part(y + p, left))
                store_part(y + p, part, left)


@jit
def _backward_tasks(begin, end, stop, scratch, nodes, panel, x, d, tiles):
    size, one, X = tiles.keys * tiles.width, x.value.dtype.type(1), pointer(scratch)
    node, slot, leaf = nodes.node, nodes.slot, nodes.leaf
    own = nodes.identity.ctypes.data
    for index in range(begin, end):
        task = task_of(index, x, tiles)
        first, last = nodes.block_ptr[task.block], nodes.block_ptr[task.block + 1]
        held = nodes.slots[task.block] * size
        Z, T = X + held, X + 2 * held
        v, dy = pointer(x.value) + task.values, pointer(x.grad) + task.values
        dv, dw = pointer(d.value) + task.values, d.weight[task.piece, task.head]
        panels = pointer(panel) + task.head * panel.shape[1]
        for a0 in range(0, x.key.shape[2], tiles.keys):
            tile = tile_of(task.piece, a0, x, tiles)
            at, to = task.keys + a0, task.grads + a0
            q, k = pointer(x.query) + at, pointer(x.key) + at
            dq, dk = pointer(d.query) + to, pointer(d.key) + to
            for i in range(nodes.start[task.block], nodes.start[task.block + 1]):
                if slot[i] >= 0:
                    outer(X + slot[i] * size, (k, v), node[i], tile)
                    outer(Z + slot[i] * size, (q, dy), node[i], tile)
            for n in range(first, last):
                if stopped(stop):
                    return
                a, s, m, rows, E = _supernode(nodes, n, panels)
                R, t = E + (m * s + s), s + m
                H, J = X + slot[a] * size, Z + slot[a] * size
                if leaf[n]:
                    H, J = T, T + s * size
                    if m > 0:
                        form(H, (k, v), node, a, a + s, tile)
                        form(J, (q, dy), node, a, a + s, tile)
                shape = m, size, s
                gemm_rows((X, size, rows), (E, s, 1), (H, size, own), shape, SUBTRACT)
                gemm_rows((Z, size, rows), (R, 1, t), (J, size, own), shape, SUBTRACT)
            for n in range(last - 1, first - 1, -1):
                if stopped(stop):
                    return
                a, s, m, rows, E = _supernode(nodes, n, panels)
                G, t = E + m * s, s + m
                R, H, J = G + s, T, T + s * size
                states, adjoints = X + slot[a] * size, Z + slot[a] * size
                if leaf[n]:
                    states, adjoints = T + 2 * s * size, T + 3 * s * size
                    form(states, (k, v), node, a, a + s, tile)
                    form(adjoints, (q, dy), node, a, a + s, tile)
                shape = s, size, m
                gemm((H, size), (G, t, 1), (states, size), (s, size, s), SET)
                gemm_rows((H, size, own), (R, t, 1), (X, size, rows), shape, SUBTRACT)
                gemm((J, size), (G, 1, t), (adjoints, size), (s, size, s), SET)
                gemm_rows((J, size, own), (E, 1, s), (Z, size, rows), shape, SUBTRACT)
                products = T + 4 * s * size
                for i in range(s):
                    u, state, adjoint = node[a + i], H + i * size, J + i * size
                    read_rows(dq, state, dy, products, u, tile)
                    read_rows(dk, adjoint, v, products, u, tile)
                    read(dv, k, adjoint, one, u, tile)
                if not leaf[n]:
                    copy(states, H, s * size)
                    copy(adjoints, J, s * size)
                for e in range(nodes.edge_ptr[n], nodes.edge_ptr[n + 1]):
                    i, j = nodes.edge_row[e], nodes.edge_col[e]
                    adjoint = J + (i - a) * size if i < a + s else Z + slot[i] * size
                    state = H + (j - a) * size if j < a + s else X + slot[j] * size
                    dw[e] += inner_product(adjoint, state, size)
