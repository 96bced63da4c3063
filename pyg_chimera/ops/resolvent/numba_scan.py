"""The scan of a DAG of states on the CPU: one jitted pass along the states.

A task is a (block, head, slice of channels). Its states [S, rows of N, width of P] fit
in a core's cache; each is written, fed from those before it, and read while it is in
registers. No more of them are held than later ones reach back to, in a ring. Backward
runs the same pass again, keeping all states, then its mirror image for the adjoints,
in a ring, in which all gradients fall off.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.resolvent.numba_ import _inlined, _jit, _run
from pyg_chimera.ops.structure.system import System

#: Bytes of states that a task may hold at a time: half of a usual L2 cache.
_TILE_BYTES = 1 << 20
#: Numbers of a state that are moved at a time at least, whatever that takes.
_MIN_LANES = 128


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


def _sliced(system: System, value: np.ndarray) -> np.ndarray:
    """[V, heads, P] -> [V, heads, slices, P / slices], to have tasks for all threads.

    Slices of one (block, head) are summed at the end: no more of them than needed.
    """
    num_nodes, num_heads, num_channels = value.shape
    enough = system.sizes.shape[0] * num_heads >= 4 * torch.get_num_threads()
    widths = [w for w in range(8, 17) if num_channels % w == 0]
    width = num_channels if enough or not widths else widths[-1]
    slices = num_channels // width if width else 1
    return value.reshape(num_nodes, num_heads, slices, width)


def _scratch(system: System, value: np.ndarray, kept: bool) -> int:
    """Numbers that a tile may need."""
    held = system.reach + 2
    if kept:
        held = held + np.diff(system.component_ptr) + 1
    least = int(held.max(initial=0)) * max(_MIN_LANES, value.shape[3])
    return max(_lanes(value), least)


def _lanes(value: np.ndarray) -> int:
    """Numbers that a tile shall hold."""
    return _TILE_BYTES // value.itemsize


@_jit
def _rows(held, num_keys, width, lanes):  # type: ignore[no-untyped-def]
    """How many key channels of so many states fit in a tile, in even shares."""
    fit = max(1, max(lanes // held, _MIN_LANES) // max(1, width))
    shares = max(1, (num_keys + fit - 1) // fit)
    return max(1, (num_keys + shares - 1) // shares)


def _costs(system: System, query: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Of the tasks, in order: block, head, slice."""
    _, heads, slices, width = value.shape
    work = 0.5 * np.diff(system.lower_ptr[system.ptr]) + 2.0 * system.sizes
    return np.repeat(work * query.shape[2] * width, heads * slices)


def _pattern(system: System) -> tuple:
    return (
        system.block_component,
        system.component_ptr,
        system.reach,
        system.node,
        system.lower_ptr,
        system.lower_col,
    )


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
    v = _sliced(system, v)
    out = np.zeros_like(v)
    _run(
        _forward,
        _costs(system, q, v),
        _scratch(system, v, kept=False),
        v.dtype,
        *_pattern(system),
        _by_entry(system, edge_weight),
        *gates.arrays(),
        q,
        k,
        v,
        out,
        _lanes(v),
    )
    return torch.from_numpy(out).flatten(2)


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
    v = _sliced(system, v)
    num_nodes, num_heads, slices, _ = v.shape
    groups, num_keys = q.shape[1:]
    num_states = system.num_nodes
    # Slices and the heads of a group write to parts of their own, summed below.
    dq = np.zeros((slices, num_nodes, num_heads, num_keys), v.dtype)
    dk = np.zeros_like(dq)
    dv = np.zeros_like(v)
    ds, dm = (np.zeros((slices, num_states, num_heads), v.dtype) for _ in range(2))
    dw = np.zeros((slices, num_heads, system.num_entries), v.dtype)
    _run(
        _backward,
        3 * _costs(system, q, v),
        _scratch(system, v, kept=True),
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
        dy.reshape(v.shape),
        dq,
        dk,
        dv,
        ds,
        dm,
        dw,
        _lanes(v),
    )
    shape = (slices, num_nodes, groups, num_heads // groups, num_keys)
    grad_query, grad_key = (_summed(x.reshape(shape), (0, 3)) for x in (dq, dk))
    grad_weight = _summed(dw, (0,))[:, system.slot - system.num_nodes].T
    arrays = (
        grad_query,
        grad_key,
        dv.reshape(value.shape),
        _summed(ds, (0,)),
        _summed(dm, (0,)),
        grad_weight,
    )
    return tuple(map(torch.from_numpy, arrays))


def _summed(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The sum over the axes, which takes no time where they have one entry."""
    if all(x.shape[axis] == 1 for axis in axes):
        return x.squeeze(axes)
    return x.sum(axes)


# Arrays are indexed whole, not cut to views first: numba counts references to views,
# which takes longer than a small state. Inner indices are bare loop variables: whatever
# numba cannot see to be positive is checked for it in every step, and not vectorised.


@_inlined
def _slot(slot, step, ring):  # type: ignore[no-untyped-def]
    """The slot of a ring `step` away, less than once around."""
    slot += step
    if slot < 0:
        slot += ring
    if slot >= ring:
        slot -= ring
    return slot


@_inlined
def _before(states, slot, i, x, stop, other, entry, weight, h):  # type: ignore[no-untyped-def]
    """Two slots and weights whose sum is what flows into a state from its neighbours.

    Those are the neighbours where there are two or less. All beyond the first one are
    summed up in the state's own slot otherwise.
    """
    ring = states.shape[0] - 1  # what follows the ring is zero
    zero, one = weight.dtype.type(0), weight.dtype.type(1)
    if x == stop:
        return ring, zero, ring, zero
    r0, c0 = _slot(slot, other[x] - i, ring), weight[h, entry[x]]
    if x + 1 == stop:
        return r0, c0, ring, zero
    r1, c1 = _slot(slot, other[x + 1] - i, ring), weight[h, entry[x + 1]]
    if x + 2 == stop:
        return r0, c0, r1, c1
    r2, c2 = _slot(slot, other[x + 2] - i, ring), weight[h, entry[x + 2]]
    for a in range(states.shape[1]):
        for p in range(states.shape[2]):
            states[slot, a, p] = c1 * states[r1, a, p] + c2 * states[r2, a, p]
    for y in range(x + 3, stop):
        r1, c1 = _slot(slot, other[y] - i, ring), weight[h, entry[y]]
        for a in range(states.shape[1]):
            for p in range(states.shape[2]):
                states[slot, a, p] += c1 * states[r1, a, p]
    return r0, c0, slot, one


@_jit
def _forward(  # type: ignore[no-untyped-def]
    first, last, scratch, block_part, ptr, reach, order, before_ptr, before, weight,
    writer, reader, source, mark, query, key, value, out, lanes,
):  # fmt: skip
    num_heads, slices, w = value.shape[1], value.shape[2], value.shape[3]
    entries = np.arange(before.shape[0])
    for task in range(first, last):
        block, slice_ = task // (num_heads * slices), task % slices
        h = (task // slices) % num_heads
        for part in range(block_part[block], block_part[block + 1]):
            s, n, held = ptr[part], ptr[part + 1] - ptr[part], reach[part] + 2
            rows = _rows(held, query.shape[2], w, lanes)
            for a0 in range(0, query.shape[2], rows):
                m = min(rows, query.shape[2] - a0)
                states = scratch[: held * m * w].reshape(held, m, w)
                _forward_tile(
                    states, s, n, a0, h, slice_, order, before_ptr, before, entries,
                    weight, writer, reader, source, mark, query, key, value, out,
                )  # fmt: skip


@_jit
def _forward_tile(  # type: ignore[no-untyped-def]
    states, s, n, a0, h, slice_, order, before_ptr, before, entries, weight, writer,
    reader, source, mark, query, key, value, out,
):  # fmt: skip
    ring, m, w = states.shape[0] - 1, states.shape[1], states.shape[2]
    g = h // (value.shape[1] // query.shape[1])
    states[ring] = 0
    slot = -1
    for i in range(s, s + n):
        slot = _slot(slot, 1, ring)
        state = order[i]
        u, z = writer[state], reader[state]
        s0, c0, s1, c1 = _before(
            states, slot, i, before_ptr[i], before_ptr[i + 1], before, entries, weight,
            h,
        )  # fmt: skip
        S, M = source[state, h], mark[state, h]
        for a in range(m):
            k, q = S * key[u, g, a0 + a], M * query[z, g, a0 + a]
            for p in range(w):
                c = (
                    k * value[u, h, slice_, p]
                    + c0 * states[s0, a, p]
                    + c1 * states[s1, a, p]
                )
                states[slot, a, p] = c
                out[z, h, slice_, p] += q * c


@_jit
def _backward(  # type: ignore[no-untyped-def]
    first, last, scratch, block_part, ptr, reach, order, before_ptr, before, weight,
    writer, reader, source, mark, query, key, value, after_ptr, after, after_entry,
    grad, grad_query, grad_key, grad_value, grad_source, grad_mark, grad_weight, lanes,
):  # fmt: skip
    num_heads, slices, w = value.shape[1], value.shape[2], value.shape[3]
    entries = np.arange(before.shape[0])
    for task in range(first, last):
        block, slice_ = task // (num_heads * slices), task % slices
        h = (task // slices) % num_heads
        for part in range(block_part[block], block_part[block + 1]):
            s, n, held = ptr[part], ptr[part + 1] - ptr[part], reach[part] + 2
            rows = _rows(n + 1 + held, query.shape[2], w, lanes)
            for a0 in range(0, query.shape[2], rows):
                m = min(rows, query.shape[2] - a0)
                tile = scratch[: (n + 1 + held) * m * w].reshape(n + 1 + held, m, w)
                _backward_tile(
                    tile[: n + 1], tile[n + 1 :], s, n, a0, h, slice_, order,
                    before_ptr, before, entries, weight, writer, reader, source, mark,
                    query, key, value, after_ptr, after, after_entry, grad, grad_query,
                    grad_key, grad_value, grad_source, grad_mark, grad_weight,
                )  # fmt: skip


@_jit
def _backward_tile(  # type: ignore[no-untyped-def]
    states, adjoints, s, n, a0, h, slice_, order, before_ptr, before, entries, weight,
    writer, reader, source, mark, query, key, value, after_ptr, after, after_entry,
    grad, grad_query, grad_key, grad_value, grad_source, grad_mark, grad_weight,
):  # fmt: skip
    ring, m, w = adjoints.shape[0] - 1, states.shape[1], states.shape[2]
    g = h // (value.shape[1] // query.shape[1])
    zero = value.dtype.type(0)
    flat_states = states.reshape(n + 1, m * w)
    flat_adjoints = adjoints.reshape(ring + 1, m * w)
    states[n] = 0
    adjoints[ring] = 0
    for i in range(n):
        state = order[s + i]
        u, z = writer[state], reader[state]
        s0, c0, s1, c1 = _before(
            states, i, s + i, before_ptr[s + i], before_ptr[s + i + 1], before, entries,
            weight, h,
        )  # fmt: skip
        S, M = source[state, h], mark[state, h]
        total = zero
        for a in range(m):
            k = S * key[u, g, a0 + a]
            read = zero
            for p in range(w):
                c = (
                    k * value[u, h, slice_, p]
                    + c0 * states[s0, a, p]
                    + c1 * states[s1, a, p]
                )
                states[i, a, p] = c
                read += c * grad[z, h, slice_, p]
            grad_query[slice_, z, h, a0 + a] += M * read
            total += query[z, g, a0 + a] * read
        grad_mark[slice_, state, h] += total
    slot = ring
    for i in range(n - 1, -1, -1):
        slot = _slot(slot, -1, ring)
        state = order[s + i]
        u, z = writer[state], reader[state]
        s0, c0, s1, c1 = _before(
            adjoints, slot, s + i, after_ptr[s + i], after_ptr[s + i + 1], after,
            after_entry, weight, h,
        )  # fmt: skip
        S, M = source[state, h], mark[state, h]
        total = zero
        for a in range(m):
            k, q = S * key[u, g, a0 + a], M * query[z, g, a0 + a]
            written = zero
            for p in range(w):
                c = (
                    q * grad[z, h, slice_, p]
                    + c0 * adjoints[s0, a, p]
                    + c1 * adjoints[s1, a, p]
                )
                adjoints[slot, a, p] = c
                written += c * value[u, h, slice_, p]
                grad_value[u, h, slice_, p] += k * c
            grad_key[slice_, u, h, a0 + a] += S * written
            total += key[u, g, a0 + a] * written
        grad_source[slice_, state, h] += total
        for x in range(before_ptr[s + i], before_ptr[s + i + 1]):
            j = before[x] - s
            total = zero
            for y in range(m * w):
                total += flat_adjoints[slot, y] * flat_states[j, y]
            grad_weight[slice_, h, x] += total
