r"""The mask form of a scan with gates on the CPU: y = (G * Q K^T) V.

:math:`G = M (I - A)^{-1} S` joins nodes, however many states lie between them: a grid
has eight for each node in its four orientations, whose G are one sum. A task is a
(block, head). G is made some columns at a time, that is for some of the nodes that
write: a sweep along all states, fed where a node writes and added up where one reads.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.resolvent.numba_ import (
    _LANES,
    _inlined,
    _jit,
    _matmul,
    _multiply,
    _run,
    _take,
)
from pyg_chimera.ops.resolvent.numba_scan import _before, _by_entry, _slot
from pyg_chimera.ops.structure.system import System

#: Columns of G at a time, at most.
_WIDTH = 256


class Nodes(NamedTuple):
    """The nodes that the states of each block join, ``T`` blocks, ``S`` states."""

    ptr: np.ndarray  #: [T + 1], first of a block's nodes in ...
    node: np.ndarray  #: ... all of them, block by block
    writer: np.ndarray  #: [S], by position: who writes, counted within the block
    reader: np.ndarray  #: [S], the same for who reads
    reach: np.ndarray  #: [T], how many positions entries lead back at most


def block_nodes(
    system: System, writer: Tensor, reader: Tensor, num_nodes: int
) -> Nodes:
    """The nodes of each block of a system of states."""
    num_blocks = system.sizes.shape[0]
    block = np.repeat(np.arange(num_blocks), system.sizes) * max(num_nodes, 1)
    ends = [block + x.cpu().numpy()[system.node] for x in (writer, reader)]
    keys, places = np.unique(np.concatenate(ends), return_inverse=True)
    owner = keys // max(num_nodes, 1)
    ptr = np.searchsorted(owner, np.arange(num_blocks + 1))
    first = np.repeat(ptr[:-1], system.sizes)
    places = places.reshape(2, -1) - first
    reach = np.zeros(num_blocks, np.int64)
    owner_of = np.repeat(np.arange(num_blocks), np.diff(system.block_component))
    np.maximum.at(reach, owner_of, system.reach)
    return Nodes(ptr, keys % max(num_nodes, 1), places[0], places[1], reach)


def _costs(system: System, nodes: Nodes, query: np.ndarray, value: np.ndarray):  # type: ignore[no-untyped-def]
    n = np.diff(nodes.ptr).astype(float)
    work = n * (2.0 * system.sizes + 0.2 * n * (query.shape[2] + value.shape[2]))
    return np.repeat(work, value.shape[1])


def _scratch(system: System, nodes: Nodes, query: np.ndarray, value: np.ndarray) -> int:
    """Numbers that a task may need backward, which is more than forward."""
    n = int(np.diff(nodes.ptr).max(initial=0))
    states = int(system.sizes.max(initial=0)) + int(nodes.reach.max(initial=0)) + 3
    channels = query.shape[2] + value.shape[2]
    n += _LANES
    return _WIDTH * (states + 5 * n + 2 * channels) + 2 * n * channels


def mask_forward(
    system: System,
    nodes: Nodes,
    source: Tensor,
    mark: Tensor,
    edge_weight: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
) -> Tensor:
    """The output [V, heads, P]; gates are [S, heads], weights [E, heads]."""
    q, k, v = (x.contiguous().numpy() for x in (query, key, value))
    out = np.zeros_like(v)
    _run(
        _forward,
        _costs(system, nodes, q, v),
        _scratch(system, nodes, q, v),
        v.dtype,
        system.ptr,
        system.node,
        system.lower_ptr,
        system.lower_col,
        *nodes,
        _by_entry(system, edge_weight),
        *(x.contiguous().numpy() for x in (source, mark)),
        q,
        k,
        v,
        out,
    )
    return torch.from_numpy(out)


def mask_backward(
    system: System,
    nodes: Nodes,
    source: Tensor,
    mark: Tensor,
    edge_weight: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, source, mark and edge weight.

    With L = (I - A)^-1 S and Z = (I - A)^-T M^T dG: dM = <dG, L> by rows, dS is Z where
    a state meets who writes it, and dA_ij = <Z_i, L_j>.
    """
    q, k, v, dy = (x.contiguous().numpy() for x in (query, key, value, grad))
    num_nodes, num_heads, _ = v.shape
    groups, num_keys = q.shape[1:]
    dq = np.zeros((num_nodes, num_heads, num_keys), v.dtype)
    dk, dv = np.zeros_like(dq), np.zeros_like(v)
    ds, dm = (np.zeros((system.num_nodes, num_heads), v.dtype) for _ in range(2))
    dw = np.zeros((num_heads, system.num_entries), v.dtype)
    _run(
        _backward,
        3 * _costs(system, nodes, q, v),
        _scratch(system, nodes, q, v),
        v.dtype,
        system.ptr,
        system.node,
        system.lower_ptr,
        system.lower_col,
        *nodes,
        _by_entry(system, edge_weight),
        *(x.contiguous().numpy() for x in (source, mark)),
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
    )
    shape = (num_nodes, groups, num_heads // groups, num_keys)
    grad_query, grad_key = (
        torch.from_numpy(x if groups == num_heads else x.reshape(shape).sum(2))
        for x in (dq, dk)
    )
    grad_weight = dw[:, system.slot - system.num_nodes].T
    arrays = (dv, ds, dm, grad_weight)
    return grad_query, grad_key, *map(torch.from_numpy, arrays)


@_jit
def _width(n):  # type: ignore[no-untyped-def]
    """Columns at a time, in even shares, filled up to whole vectors."""
    shares = max(1, (n + _WIDTH - 1) // _WIDTH)
    return ((n + shares - 1) // shares + _LANES - 1) // _LANES * _LANES


@_inlined
def _feed(  # type: ignore[no-untyped-def]
    states, slot, i, first, before_ptr, before, entries, weight, h, writer, source
):
    """Sets a state's row of L: what flows into it, and what its own node writes."""
    s0, c0, s1, c1 = _before(
        states, slot, i, before_ptr[i], before_ptr[i + 1], before, entries, weight, h
    )
    for c in range(states.shape[2]):
        states[slot, 0, c] = c0 * states[s0, 0, c] + c1 * states[s1, 0, c]
    column = writer[i] - first
    if column >= 0 and column < states.shape[2]:
        states[slot, 0, column] += source


@_jit
def _gather_transposed(target, source, nodes, h, first, count):  # type: ignore[no-untyped-def]
    """[channels, nodes] of some nodes, filled up with zeros."""
    for c in range(target.shape[0]):
        for i in range(target.shape[1]):
            target[c, i] = source[nodes[first + i], h, c] if i < count else 0


@_jit
def _transpose(target, source):  # type: ignore[no-untyped-def]
    """In squares that fit in a few lines of cache; zeros where there is no source."""
    for i0 in range(0, target.shape[1], 16):
        for c in range(target.shape[0]):
            for i in range(i0, min(i0 + 16, target.shape[1])):
                target[c, i] = source[i, c] if i < source.shape[0] else 0


@_jit
def _forward(  # type: ignore[no-untyped-def]
    first, last, scratch, ptr, order, before_ptr, before, node_ptr, node, writer,
    reader, reach, weight, source, mark, query, key, value, out,
):  # fmt: skip
    heads, channels, num_keys = value.shape[1], value.shape[2], query.shape[2]
    entries = np.arange(before.shape[0])
    for task in range(first, last):
        block, h = task // heads, task % heads
        g = h * query.shape[1] // heads
        nodes = node[node_ptr[block] : node_ptr[block + 1]]
        n, ring = nodes.shape[0], reach[block] + 1
        width = _width(n)
        at = n * num_keys
        m = (n + _LANES - 1) // _LANES * _LANES
        q = scratch[:at].reshape(n, num_keys)
        yt = scratch[at : at + m * channels].reshape(channels, m)
        at += m * channels
        kt = scratch[at : at + num_keys * width].reshape(num_keys, width)
        at += num_keys * width
        vt = scratch[at : at + width * channels].reshape(channels, width)
        at += width * channels
        Gt = scratch[at : at + m * width].reshape(width, m)
        at += m * width
        tall = scratch[at : at + 2 * n * width].reshape(2, n, width)
        G, scores = tall[0], tall[1]
        at += 2 * n * width
        states = scratch[at : at + (ring + 1) * width].reshape(ring + 1, 1, width)
        _take(q, query, nodes, g)
        for c0 in range(0, n, width):
            count = min(width, n - c0)
            G[:] = 0
            states[ring] = 0
            slot = -1
            for i in range(ptr[block], ptr[block + 1]):
                slot = _slot(slot, 1, ring)
                _feed(
                    states, slot, i, c0, before_ptr, before, entries, weight, h, writer,
                    source[order[i], h],
                )  # fmt: skip
                M, z = mark[order[i], h], reader[i]
                for c in range(width):
                    G[z, c] += M * states[slot, 0, c]
            _gather_transposed(kt, key, nodes, g, c0, count)
            _matmul(scores, q, kt)
            _multiply(G, G, scores)
            _gather_transposed(vt, value, nodes, h, c0, count)
            _transpose(Gt, G)
            _matmul(yt, vt, Gt)
            for i in range(n):
                for c in range(channels):
                    out[nodes[i], h, c] += yt[c, i]


@_jit
def _backward(  # type: ignore[no-untyped-def]
    first, last, scratch, ptr, order, before_ptr, before, node_ptr, node, writer,
    reader, reach, weight, source, mark, query, key, value, after_ptr, after,
    after_entry, grad, grad_query, grad_key, grad_value, grad_source, grad_mark,
    grad_weight,
):  # fmt: skip
    heads, channels, num_keys = value.shape[1], value.shape[2], query.shape[2]
    entries = np.arange(before.shape[0])
    zero = value.dtype.type(0)
    for task in range(first, last):
        block, h = task // heads, task % heads
        g = h * query.shape[1] // heads
        s, num_states = ptr[block], ptr[block + 1] - ptr[block]
        nodes = node[node_ptr[block] : node_ptr[block + 1]]
        n, ring = nodes.shape[0], reach[block] + 1
        width = _width(n)
        m = (n + _LANES - 1) // _LANES * _LANES
        at = n * num_keys
        q = scratch[:at].reshape(n, num_keys)
        dqt = scratch[at : at + m * num_keys].reshape(num_keys, m)
        at += m * num_keys
        dy = scratch[at : at + n * channels].reshape(n, channels)
        at += n * channels
        narrow = scratch[at : at + 2 * num_keys * width].reshape(2, num_keys, width)
        kt, dkt = narrow[0], narrow[1]
        at += 2 * num_keys * width
        slim = scratch[at : at + 2 * channels * width].reshape(2, channels, width)
        vt, dvt = slim[0], slim[1]
        at += 2 * channels * width
        turned = scratch[at : at + m * width].reshape(width, m)
        at += m * width
        tall = scratch[at : at + 4 * n * width].reshape(4, n, width)
        G, scores, dG, dS = tall[0], tall[1], tall[2], tall[3]
        at += 4 * n * width
        rows = num_states + 1
        states = scratch[at : at + rows * width].reshape(rows, 1, width)
        at += rows * width
        adjoints = scratch[at : at + (ring + 1) * width].reshape(ring + 1, 1, width)
        _take(q, query, nodes, g)
        _take(dy, grad, nodes, h)
        for c0 in range(0, n, width):
            count = min(width, n - c0)
            G[:] = 0
            states[num_states] = 0
            for i in range(s, s + num_states):
                _feed(
                    states, i - s, i, c0, before_ptr, before, entries, weight, h,
                    writer, source[order[i], h],
                )  # fmt: skip
                M, z = mark[order[i], h], reader[i]
                for c in range(width):
                    G[z, c] += M * states[i - s, 0, c]
            _gather_transposed(kt, key, nodes, g, c0, count)
            _gather_transposed(vt, value, nodes, h, c0, count)
            _matmul(scores, q, kt)
            _matmul(dG, dy, vt)  # at first the gradient of G * scores
            _multiply(dS, dG, G)
            _multiply(dG, dG, scores)
            _multiply(G, G, scores)
            _matmul(dvt, dy.T, G)
            _matmul(dkt, q.T, dS)
            _transpose(turned, dS)
            _matmul(dqt, kt, turned)
            for i in range(n):
                for c in range(num_keys):
                    grad_query[nodes[i], h, c] += dqt[c, i]
            for i in range(count):
                for c in range(num_keys):
                    grad_key[nodes[c0 + i], h, c] = dkt[c, i]
                for c in range(channels):
                    grad_value[nodes[c0 + i], h, c] = dvt[c, i]

            adjoints[ring] = 0
            slot = ring
            for i in range(s + num_states - 1, s - 1, -1):
                slot = _slot(slot, -1, ring)
                state, z, row = order[i], reader[i], i - s
                s0, w0, s1, w1 = _before(
                    adjoints, slot, i, after_ptr[i], after_ptr[i + 1], after,
                    after_entry, weight, h,
                )  # fmt: skip
                M = mark[state, h]
                # One store a loop: it is not vectorised where two might overlap.
                for c in range(width):
                    adjoints[slot, 0, c] = (
                        M * dG[z, c] + w0 * adjoints[s0, 0, c] + w1 * adjoints[s1, 0, c]
                    )
                total = zero
                for c in range(width):
                    total += dG[z, c] * states[row, 0, c]
                grad_mark[state, h] += total
                column = writer[i] - c0
                if column >= 0 and column < width:
                    grad_source[state, h] += adjoints[slot, 0, column]
                for x in range(before_ptr[i], before_ptr[i + 1]):
                    j = before[x] - s
                    total = zero
                    for c in range(width):
                        total += adjoints[slot, 0, c] * states[j, 0, c]
                    grad_weight[h, x] += total
