"""The scan of a DAG of states on the CPU: one jitted pass along the states.

A task is a (block, head, slice of channels). Its states [S, rows of N, width of P] fit
in a core's cache; each is written, fed from those before it, and read while it is in
registers. Backward runs the same pass again, keeping the states, then its mirror
image for the adjoints, in which all gradients fall off.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.resolvent.numba_ import _jit, _run
from pyg_chimera.ops.structure.system import System

#: Bytes of states that a task may hold at a time: half of a usual L2 cache.
_TILE_BYTES = 1 << 20
#: Numbers of a state that are moved at a time at least, whatever that takes.
_MIN_LANES = 64
#: Value channels of a slice, where slices are needed to feed threads.
_WIDTH = 16


class Gates(NamedTuple):
    """Who writes and reads the states [S], and how much, [S, heads]."""

    writer: Tensor
    reader: Tensor
    source: Tensor
    mark: Tensor

    def arrays(self) -> list[np.ndarray]:
        """In the order in which kernels take them."""
        return [x.contiguous().numpy() for x in self]


def identity_gates(system: System, like: Tensor) -> Gates:
    """The gates of a scan whose states are the nodes."""
    node = torch.arange(system.num_nodes)
    ones = torch.ones(system.num_nodes, like.size(1), dtype=like.dtype)
    return Gates(node, node, ones, ones)


class _Cut(NamedTuple):
    """How a task's states [N, P] are cut: `width` value channels a task, ..."""

    width: int
    pieces: int
    lanes: (
        int  #: ... and as many numbers of a state at a time as tiles of this size ...
    )
    scratch: int  #: ... allow; numbers that a tile may need


def _cut(system: System, query: np.ndarray, value: np.ndarray) -> _Cut:
    num_heads, num_channels = value.shape[1:]
    tasks = system.sizes.shape[0] * num_heads
    width = max(1, num_channels)
    if tasks < 4 * torch.get_num_threads():
        width = min(width, _WIDTH)
    pieces = max(1, -(-num_channels // width))
    largest = int(system.sizes.max(initial=0)) + 1
    lanes = _TILE_BYTES // value.itemsize
    needed = max(lanes, largest * max(_MIN_LANES, width))
    return _Cut(width, pieces, lanes, needed)


@_jit
def _rows(n, num_keys, width, lanes):  # type: ignore[no-untyped-def]
    """How many key channels of `n` states fit in a tile, in even shares."""
    fit = max(1, max(lanes // (n + 1), _MIN_LANES) // width)
    shares = max(1, (num_keys + fit - 1) // fit)
    return max(1, (num_keys + shares - 1) // shares)


def _costs(system: System, num_heads: int, cut: _Cut, lanes: int) -> np.ndarray:
    work = (0.5 * np.diff(system.lower_ptr[system.ptr]) + 2.0 * system.sizes) * lanes
    return np.repeat(work / cut.pieces, num_heads * cut.pieces)


def _pattern(system: System) -> tuple:
    return (system.ptr, system.node, system.lower_ptr, system.lower_col)


def _by_entry(system: System, edge_weight: Tensor) -> np.ndarray:
    """[E, heads] -> [heads, F], in the order of the system's entries."""
    weight = edge_weight.numpy()
    out = np.empty((weight.shape[1], system.num_entries), weight.dtype)
    out[:, system.slot - system.num_nodes] = weight.T
    return out


def state_forward(
    system: System,
    gates: Gates,
    edge_weight: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """The output [V, heads, P] from states C = A C + S k v^T, y = sum M q^T C."""
    q, k, v = (x.contiguous().numpy() for x in (query, key, value))
    cut = _cut(system, q, v)
    out = np.zeros_like(v)
    _run(
        _forward,
        _costs(system, v.shape[1], cut, q.shape[2] * v.shape[2]),
        cut.scratch,
        v.dtype,
        *_pattern(system),
        _by_entry(system, edge_weight),
        *gates.arrays(),
        q,
        k,
        v,
        out,
        cut.width,
        cut.pieces,
        cut.lanes,
    )
    return torch.from_numpy(out)


def state_backward(
    system: System,
    gates: Gates,
    edge_weight: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, source, mark and edge weight.

    With the adjoint Z = A^T Z + M q dy^T: dq = M C dy, dM = q^T C dy, dk = S Z v,
    dv = S Z^T k, dS = k^T Z v and dA_ij = <Z_i, C_j>. C is computed anew beside Z.
    """
    q, k, v, dy = (x.contiguous().numpy() for x in (query, key, value, grad))
    cut = _cut(system, q, v)
    num_nodes, num_heads, _ = v.shape
    groups, num_keys = q.shape[1:]
    num_states = system.num_nodes
    # Slices and the heads of a group write to parts of their own, summed below.
    dq = np.zeros((cut.pieces, num_nodes, num_heads, num_keys), v.dtype)
    dk = np.zeros_like(dq)
    dv = np.zeros_like(v)
    ds, dm = (np.zeros((cut.pieces, num_states, num_heads), v.dtype) for _ in range(2))
    dw = np.zeros((cut.pieces, num_heads, system.num_entries), v.dtype)
    _run(
        _backward,
        3.5 * _costs(system, num_heads, cut, num_keys * v.shape[2]),
        2 * cut.scratch,
        v.dtype,
        *_pattern(system),
        _by_entry(system, edge_weight),
        *gates.arrays(),
        q,
        k,
        v,
        system.upper_ptr,
        system.upper_row,
        system.upper_entry,
        dy,
        dq,
        dk,
        dv,
        ds,
        dm,
        dw,
        cut.width,
        cut.pieces,
        cut.lanes,
    )
    shape = (cut.pieces, num_nodes, groups, num_heads // groups, num_keys)
    grad_query, grad_key = (
        torch.from_numpy(x).view(shape).sum((0, 3)) for x in (dq, dk)
    )
    grad_weight = dw.sum(0)[:, system.slot - system.num_nodes].T
    return (
        grad_query,
        grad_key,
        torch.from_numpy(dv),
        torch.from_numpy(ds).sum(0),
        torch.from_numpy(dm).sum(0),
        torch.from_numpy(np.ascontiguousarray(grad_weight)),
    )


@_jit
def _before(states, row, s, x, stop, other, entry, weight):  # type: ignore[no-untyped-def]
    """Two rows and weights whose sum is what flows into a state from its neighbours.

    Those are the neighbours where there are two or less. All beyond the first one are
    summed up in the state's own row otherwise.
    """
    last = states.shape[0] - 1  # a row of zeros
    zero = weight.dtype.type(0)
    if x == stop:
        return last, zero, last, zero
    r0, c0 = other[x] - s, weight[entry[x]]
    if x + 1 == stop:
        return r0, c0, last, zero
    if x + 2 == stop:
        return r0, c0, other[x + 1] - s, weight[entry[x + 1]]
    total = states[row]
    a, c = states[other[x + 1] - s], weight[entry[x + 1]]
    b, d = states[other[x + 2] - s], weight[entry[x + 2]]
    for w in range(total.shape[0]):
        total[w] = c * a[w] + d * b[w]
    for y in range(x + 3, stop):
        a, c = states[other[y] - s], weight[entry[y]]
        for w in range(total.shape[0]):
            total[w] += c * a[w]
    return r0, c0, row, zero + 1


@_jit
def _forward(  # type: ignore[no-untyped-def]
    first, last, scratch, ptr, order, before_ptr, before, weight, writer, reader,
    source, mark, query, key, value, out, width, pieces, lanes,
):  # fmt: skip
    num_heads, num_channels = value.shape[1], value.shape[2]
    num_keys = query.shape[2]
    per_group = num_heads // query.shape[1]
    entries = np.arange(before.shape[0])
    for task in range(first, last):
        block, piece = task // (num_heads * pieces), task % pieces
        h = (task // pieces) % num_heads
        g = h // per_group
        s, n = ptr[block], ptr[block + 1] - ptr[block]
        p0 = piece * width
        w = min(width, num_channels - p0)
        rows = _rows(n, num_keys, w, lanes)
        for a0 in range(0, num_keys, rows):
            m = min(rows, num_keys - a0)
            states = scratch[: (n + 1) * m * w].reshape(n + 1, m * w)
            states[n] = 0
            for i in range(n):
                state = order[s + i]
                u, z = writer[state], reader[state]
                i0, c0, i1, c1 = _before(
                    states, i, s, before_ptr[s + i], before_ptr[s + i + 1], before,
                    entries, weight[h],
                )  # fmt: skip
                row, r0, r1 = states[i], states[i0], states[i1]
                v, y = value[u, h, p0 : p0 + w], out[z, h, p0 : p0 + w]
                k, q = key[u, g, a0 : a0 + m], query[z, g, a0 : a0 + m]
                S, M = source[state, h], mark[state, h]
                for a in range(m):
                    ka, qa, at = S * k[a], M * q[a], a * w
                    for p in range(w):
                        c = ka * v[p] + c0 * r0[at + p] + c1 * r1[at + p]
                        row[at + p] = c
                        y[p] += qa * c


@_jit
def _backward(  # type: ignore[no-untyped-def]
    first, last, scratch, ptr, order, before_ptr, before, weight, writer, reader,
    source, mark, query, key, value, after_ptr, after, after_entry, grad, grad_query,
    grad_key, grad_value, grad_source, grad_mark, grad_weight, width, pieces, lanes,
):  # fmt: skip
    num_heads, num_channels = value.shape[1], value.shape[2]
    num_keys = query.shape[2]
    per_group = num_heads // query.shape[1]
    entries = np.arange(before.shape[0])
    for task in range(first, last):
        block, piece = task // (num_heads * pieces), task % pieces
        h = (task // pieces) % num_heads
        g = h // per_group
        s, n = ptr[block], ptr[block + 1] - ptr[block]
        p0 = piece * width
        w = min(width, num_channels - p0)
        rows = _rows(n, num_keys, w, lanes)
        for a0 in range(0, num_keys, rows):
            m = min(rows, num_keys - a0)
            tiles = scratch[: 2 * (n + 1) * m * w].reshape(2, n + 1, m * w)
            states, adjoints = tiles[0], tiles[1]
            states[n] = 0
            adjoints[n] = 0
            for i in range(n):
                state = order[s + i]
                u, z = writer[state], reader[state]
                i0, c0, i1, c1 = _before(
                    states, i, s, before_ptr[s + i], before_ptr[s + i + 1], before,
                    entries, weight[h],
                )  # fmt: skip
                row, r0, r1 = states[i], states[i0], states[i1]
                v, dy = value[u, h, p0 : p0 + w], grad[z, h, p0 : p0 + w]
                k, q = key[u, g, a0 : a0 + m], query[z, g, a0 : a0 + m]
                dq = grad_query[piece, z, h, a0 : a0 + m]
                S, M = source[state, h], mark[state, h]
                total = grad_mark[piece, state, h]
                for a in range(m):
                    ka, at = S * k[a], a * w
                    read = dy.dtype.type(0)
                    for p in range(w):
                        c = ka * v[p] + c0 * r0[at + p] + c1 * r1[at + p]
                        row[at + p] = c
                        read += c * dy[p]
                    dq[a] += M * read
                    total += q[a] * read
                grad_mark[piece, state, h] = total
            for i in range(n - 1, -1, -1):
                state = order[s + i]
                u, z = writer[state], reader[state]
                i0, c0, i1, c1 = _before(
                    adjoints, i, s, after_ptr[s + i], after_ptr[s + i + 1], after,
                    after_entry, weight[h],
                )  # fmt: skip
                row, r0, r1 = adjoints[i], adjoints[i0], adjoints[i1]
                v, dy = value[u, h, p0 : p0 + w], grad[z, h, p0 : p0 + w]
                k, q = key[u, g, a0 : a0 + m], query[z, g, a0 : a0 + m]
                dk = grad_key[piece, u, h, a0 : a0 + m]
                dv = grad_value[u, h, p0 : p0 + w]
                S, M = source[state, h], mark[state, h]
                total = grad_source[piece, state, h]
                for a in range(m):
                    ka, qa, at = S * k[a], M * q[a], a * w
                    written = dy.dtype.type(0)
                    for p in range(w):
                        c = qa * dy[p] + c0 * r0[at + p] + c1 * r1[at + p]
                        row[at + p] = c
                        written += c * v[p]
                        dv[p] += ka * c
                    dk[a] += S * written
                    total += k[a] * written
                grad_source[piece, state, h] = total
                for x in range(before_ptr[s + i], before_ptr[s + i + 1]):
                    left = states[before[x] - s]
                    total = grad_weight[piece, h, x]
                    for y in range(m * w):
                        total += row[y] * left[y]
                    grad_weight[piece, h, x] = total
