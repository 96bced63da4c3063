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

import numpy as np

from pyg_chimera.ops.common.numba_runtime import jit, run, stopped, summed
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
from pyg_chimera.ops.common.vector_kit import (
    copy,
    inner_product,
    inner_product_of_rows,
)
from pyg_chimera.ops.resolvent.state_tiles import (
    StateTiles,
    outer,
    read,
    read_rows,
)
from pyg_chimera.ops.structure.supernodes import Supernodes, supernodes
from pyg_chimera.ops.structure.symbolic_factor import SymbolicFactor

__all__ = ["backward", "forward"]

#: Bytes of states that a task may hold at a time. They need not fit in a cache: in
#: postorder, states that are needed together are close together.
_TILE_BYTES = 1 << 24


# --------------------------------------------------------------------------- sweeps


def _tiles(nodes: Supernodes, query: np.ndarray, value: np.ndarray) -> StateTiles:
    _, side = vector_lanes(value.dtype)  # rows of states are whole tiles of products
    return StateTiles.of(nodes.slots, query, value, _TILE_BYTES, side)


def _costs(
    nodes: Supernodes, heads: int, tiles: StateTiles, num_keys: int
) -> np.ndarray:
    work = np.diff(nodes.panel_ptr) + 12.0 * nodes.widths
    work = 0.03 * nodes.by_block(work) * num_keys * tiles.width
    return np.repeat(work, heads * tiles.pieces)


def _shape(nodes: Supernodes) -> tuple[np.ndarray, ...]:
    widest = int(max(nodes.widths.max(initial=0), nodes.heights.max(initial=0)))
    return (
        nodes.block_ptr,
        nodes.ptr,
        nodes.row_ptr,
        nodes.row_slot,
        nodes.leaf,
        nodes.slot,
        nodes.panel_ptr,
        np.arange(widest),
    )


def forward(
    symbolic: SymbolicFactor,
    panel: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
) -> np.ndarray:
    """The output y = H^T q, from the states H = (I - A)^-1 (k v^T)."""
    nodes = supernodes(symbolic)
    out = np.zeros_like(value)
    if out.size == 0 or query.shape[2] == 0:
        return out
    tiles = _tiles(nodes, query, value)
    rows = int(nodes.slots.max(initial=0) + nodes.widths.max(initial=0))
    run(
        _forward_tasks,
        _costs(nodes, value.shape[1], tiles, query.shape[2]),
        rows * tiles.keys * tiles.width,
        out.dtype,
        symbolic.ptr,
        symbolic.node,
        *_shape(nodes),
        panel,
        query,
        key,
        value,
        out,
        *tiles,
    )
    return out


def backward(
    symbolic: SymbolicFactor,
    panel: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    grad: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of query, key, value and edge weight, from states and their adjoints.

    With Z = (I - A)^-T (q dy^T): dq_i = H_i dy_i, dk_i = Z_i v_i, dv_i = Z_i^T k_i and
    dA_ij = <Z_i, H_j>. H is recomputed along with Z.
    """
    nodes = supernodes(symbolic)
    num_nodes, heads, _ = value.shape
    groups, num_keys = query.shape[1:]
    dv = np.zeros_like(value)
    if value.size == 0 or num_keys == 0:
        dw = np.zeros((symbolic.edge.shape[0], heads), value.dtype)
        return np.zeros_like(query), np.zeros_like(key), dv, dw
    tiles = _tiles(nodes, query, value)
    # Pieces, and the heads of a group, write separate parts, which are summed below.
    dq = np.empty((tiles.pieces, num_nodes, heads, num_keys), value.dtype)
    dk = np.empty_like(dq)
    dw = np.zeros((tiles.pieces, symbolic.edge.shape[0], heads), value.dtype)
    vector, _ = vector_lanes(value.dtype)
    rows = int(2 * nodes.slots.max(initial=0) + 4 * nodes.widths.max(initial=0))
    run(
        _backward_tasks,
        3 * _costs(nodes, heads, tiles, num_keys),
        rows * tiles.keys * tiles.width + (tiles.keys + vector) * vector,
        value.dtype,
        symbolic.ptr,
        symbolic.node,
        *_shape(nodes),
        panel,
        query,
        key,
        value,
        nodes.edge_ptr,
        nodes.edge,
        nodes.edge_row,
        nodes.edge_col,
        grad,
        dq,
        dk,
        dv,
        dw,
        *tiles,
    )
    shape = (tiles.pieces, num_nodes, groups, heads // groups, num_keys)
    grad_query, grad_key = (summed(x.reshape(shape), (0, 3)) for x in (dq, dk))
    return grad_query, grad_key, dv, summed(dw, (0,))


@jit
def _forward_tasks(
    begin, end, stop, scratch, block_start, node, block_ptr, ptr, row_ptr, row_slot,
    leaf, slot, panel_ptr, identity, panel, query, key, value, out, pieces, channels_,
    width, keys,
):  # fmt: skip
    _, heads, num_channels = value.shape
    _, groups, num_keys = query.shape
    own, size = identity.ctypes.data, keys * width
    one = value.dtype.type(1)
    X = pointer(scratch)
    of_keys, of_values = groups * num_keys, heads * num_channels
    for task in range(begin, end):
        block, h, piece = (
            task // (heads * pieces),
            (task // pieces) % heads,
            task % pieces,
        )
        x0, x1 = block_ptr[block], block_ptr[block + 1]
        T = X + _held(slot, block_start, block) * size
        at = (h // (heads // groups)) * num_keys
        q0, k0 = pointer(query) + at, pointer(key) + at
        at = h * num_channels + piece * channels_
        channels = min(channels_, num_channels - piece * channels_)
        v0, y0 = pointer(value) + at, pointer(out) + at
        P = pointer(panel) + h * panel.shape[1]
        for a0 in range(0, num_keys, keys):
            count = min(keys, num_keys - a0)
            for i in range(block_start[block], block_start[block + 1]):
                if slot[i] >= 0:
                    k, v = k0 + (node[i] * of_keys + a0), v0 + node[i] * of_values
                    outer(X + slot[i] * size, k, v, count, keys, channels, width)
            for x in range(x0, x1):
                if stopped(stop):
                    return
                a, s, m = ptr[x], ptr[x + 1] - ptr[x], row_ptr[x + 1] - row_ptr[x]
                states = X + slot[a] * size
                if leaf[x]:
                    states = T
                    for i in range(s if m > 0 else 0):
                        u = node[a + i]
                        k, v = k0 + (u * of_keys + a0), v0 + u * of_values
                        outer(T + i * size, k, v, count, keys, channels, width)
                rows = row_slot.ctypes.data + 8 * row_ptr[x]
                gemm_rows(
                    X, size, rows, P + panel_ptr[x], s, 1, states, size, own, m, size,
                    s, SUBTRACT,
                )  # fmt: skip
            for x in range(x1 - 1, x0 - 1, -1):
                if stopped(stop):
                    return
                a, s, m = ptr[x], ptr[x + 1] - ptr[x], row_ptr[x + 1] - row_ptr[x]
                G = P + (panel_ptr[x] + m * s)
                rows = row_slot.ctypes.data + 8 * row_ptr[x]
                states = X + slot[a] * size
                if leaf[x]:
                    if m == 0:
                        continue
                    gemm_rows(
                        T, size, own, G + s, s + m, 1, X, size, rows, s, size, m, SET
                    )
                else:
                    gemm(T, size, G, s + m, 1, states, size, s, size, s, SET)
                    gemm_rows(
                        T, size, own, G + s, s + m, 1, X, size, rows, s, size, m,
                        SUBTRACT,
                    )  # fmt: skip
                    copy(states, T, s * size)
                for i in range(s):
                    u = node[a + i]
                    read(
                        y0 + u * of_values, q0 + (u * of_keys + a0), T + i * size,
                        -one if leaf[x] else one, count, channels, width,
                    )  # fmt: skip
        for x in range(x0, x1):
            if leaf[x]:
                a, s, m = ptr[x], ptr[x + 1] - ptr[x], row_ptr[x + 1] - row_ptr[x]
                G = P + (panel_ptr[x] + m * s)
                for i in range(s):
                    q, y = q0 + node[a + i] * of_keys, y0 + node[a + i] * of_values
                    for j in range(s):
                        k, v = k0 + node[a + j] * of_keys, v0 + node[a + j] * of_values
                        f = splat(
                            inner_product_of_rows(q, k, num_keys) * G[i * (s + m) + j]
                        )
                        for p in range(0, channels, lanes(X)):
                            part = fma(f, load_part(v + p, channels - p),
                                       load_part(y + p, channels - p))  # fmt: skip
                            store_part(y + p, part, channels - p)


@jit
def _held(slot, block_start, block):
    """The number of slots of a block."""
    for i in range(block_start[block + 1] - 1, block_start[block] - 1, -1):
        if slot[i] >= 0:
            return slot[i] + 1
    return 0


@jit
def _backward_tasks(
    begin, end, stop, scratch, block_start, node, block_ptr, ptr, row_ptr, row_slot,
    leaf, slot, panel_ptr, identity, panel, query, key, value, edge_ptr, edge, edge_row,
    edge_col, grad, grad_query, grad_key, grad_value, grad_weight, pieces, channels_,
    width, keys,
):  # fmt: skip
    num_nodes, heads, num_channels = value.shape
    _, groups, num_keys = query.shape
    own, size = identity.ctypes.data, keys * width
    one = value.dtype.type(1)
    X = pointer(scratch)
    of_keys, of_values, of_grads = (
        groups * num_keys,
        heads * num_channels,
        heads * num_keys,
    )
    for task in range(begin, end):
        block, h, piece = (
            task // (heads * pieces),
            (task // pieces) % heads,
            task % pieces,
        )
        x0, x1 = block_ptr[block], block_ptr[block + 1]
        held = _held(slot, block_start, block) * size
        Z, T = X + held, X + 2 * held
        at = (h // (heads // groups)) * num_keys
        q0, k0 = pointer(query) + at, pointer(key) + at
        at = (piece * num_nodes * heads + h) * num_keys
        dq0, dk0 = pointer(grad_query) + at, pointer(grad_key) + at
        at = h * num_channels + piece * channels_
        channels = min(channels_, num_channels - piece * channels_)
        v0, dy0, dv0 = pointer(value) + at, pointer(grad) + at, pointer(grad_value) + at
        P = pointer(panel) + h * panel.shape[1]
        for a0 in range(0, num_keys, keys):
            count = min(keys, num_keys - a0)
            for i in range(block_start[block], block_start[block + 1]):
                if slot[i] >= 0:
                    u = node[i]
                    k, v = k0 + (u * of_keys + a0), v0 + u * of_values
                    outer(X + slot[i] * size, k, v, count, keys, channels, width)
                    q, dy = q0 + (u * of_keys + a0), dy0 + u * of_values
                    outer(Z + slot[i] * size, q, dy, count, keys, channels, width)
            for x in range(x0, x1):
                if stopped(stop):
                    return
                a, s, m = ptr[x], ptr[x + 1] - ptr[x], row_ptr[x + 1] - row_ptr[x]
                states, adjoints = X + slot[a] * size, Z + slot[a] * size
                if leaf[x]:
                    states, adjoints = T, T + s * size
                    for i in range(s if m > 0 else 0):
                        u = node[a + i]
                        k, v = k0 + (u * of_keys + a0), v0 + u * of_values
                        outer(states + i * size, k, v, count, keys, channels, width)
                        q, dy = q0 + (u * of_keys + a0), dy0 + u * of_values
                        outer(adjoints + i * size, q, dy, count, keys, channels, width)
                rows = row_slot.ctypes.data + 8 * row_ptr[x]
                E = P + panel_ptr[x]
                R = E + (m * s + s)
                gemm_rows(
                    X, size, rows, E, s, 1, states, size, own, m, size, s, SUBTRACT
                )
                gemm_rows(
                    Z, size, rows, R, 1, s + m, adjoints, size, own, m, size, s,
                    SUBTRACT,
                )  # fmt: skip
            for x in range(x1 - 1, x0 - 1, -1):
                if stopped(stop):
                    return
                a, s, m = ptr[x], ptr[x + 1] - ptr[x], row_ptr[x + 1] - row_ptr[x]
                E = P + panel_ptr[x]
                G = E + m * s
                R = G + s
                rows = row_slot.ctypes.data + 8 * row_ptr[x]
                H, J = T, T + s * size
                states, adjoints = X + slot[a] * size, Z + slot[a] * size
                if leaf[x]:
                    states, adjoints = T + 2 * s * size, T + 3 * s * size
                    for i in range(s):
                        u = node[a + i]
                        k, v = k0 + (u * of_keys + a0), v0 + u * of_values
                        outer(states + i * size, k, v, count, keys, channels, width)
                        q, dy = q0 + (u * of_keys + a0), dy0 + u * of_values
                        outer(adjoints + i * size, q, dy, count, keys, channels, width)
                gemm(H, size, G, s + m, 1, states, size, s, size, s, SET)
                gemm_rows(
                    H, size, own, R, s + m, 1, X, size, rows, s, size, m, SUBTRACT
                )
                gemm(J, size, G, 1, s + m, adjoints, size, s, size, s, SET)
                gemm_rows(J, size, own, E, 1, s, Z, size, rows, s, size, m, SUBTRACT)
                products = T + 4 * s * size
                for i in range(s):
                    u = node[a + i]
                    at = u * of_grads + a0
                    state, adjoint = H + i * size, J + i * size
                    v, dy = v0 + u * of_values, dy0 + u * of_values
                    read_rows(dq0 + at, state, dy, products, count, channels, width)
                    read_rows(dk0 + at, adjoint, v, products, count, channels, width)
                    read(
                        dv0 + u * of_values, k0 + (u * of_keys + a0), adjoint, one,
                        count, channels, width,
                    )  # fmt: skip
                if not leaf[x]:
                    copy(states, H, s * size)
                    copy(adjoints, J, s * size)
                for e in range(edge_ptr[x], edge_ptr[x + 1]):
                    i, j = edge_row[e], edge_col[e]
                    adjoint = J + (i - a) * size if i < a + s else Z + slot[i] * size
                    state = H + (j - a) * size if j < a + s else X + slot[j] * size
                    grad_weight[piece, edge[e], h] += inner_product(
                        adjoint, state, size
                    )
