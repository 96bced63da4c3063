r"""The state form of a scan on a GPU: states carried along the graph.

.. math::
    H_i = \sum_{j \to i} a_{ij} H_j + k_i v_i^{\top}, \quad y_i = H_i^{\top} q_i,
    \qquad
    Z_i = \sum_{i \to m} a_{mi} Z_m + q_i dy_i^{\top},

    dq_i = H_i dy_i, \quad dk_i = Z_i v_i, \quad dv_i = Z_i^{\top} k_i, \quad
    da_{ij} = \langle Z_i, H_j \rangle.

A program takes a component, a head, and a slice of the states, and visits the positions
one by one. The last state is in registers; earlier ones that are still needed are in a
ring buffer in global memory, as long as the bandwidth, which stays in a cache. The
backward pass computes all states once more and stores them, then visits the positions
in reverse with the adjoints, in a ring buffer.

Each slice writes its own part of a sum over slices; the parts are added afterwards. No
program writes what another one reads or writes.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_chimera.ops.common.triton_runtime import on_device_of
from pyg_chimera.ops.recurrence.gpu.chains import Chains, bounds, ring_of, row_of

#: The most key channels and value channels of a slice.
_ROWS, _COLUMNS = 64, 32
#: Numbers of states that the backward pass may store at a time, if one slice has fewer.
_MAX_NUMEL = 1 << 28
#: Kernel options: no prefetching, as loads must not precede the stores they depend on.
_OPTIONS = {"num_warps": 4, "num_stages": 1}


class _Sizes(NamedTuple):
    """Sizes that kernels are compiled for."""

    heads: int
    groups: int
    N: int
    P: int
    rows: int
    columns: int

    @classmethod
    def of(cls, query: Tensor, value: Tensor) -> "_Sizes":
        (heads, P), (groups, N) = value.shape[1:], query.shape[1:]
        rows, columns = (triton.next_power_of_2(x) for x in (N, P))
        return cls(heads, groups, N, P, min(rows, _ROWS), min(columns, _COLUMNS))

    @property
    def across(self) -> int:
        return triton.cdiv(self.P, self.columns)

    @property
    def down(self) -> int:
        return triton.cdiv(self.N, self.rows)


# -------------------------------------------------------------------------- the calls


def scan(
    chains: Chains, query: Tensor, key: Tensor, value: Tensor, weight: Tensor
) -> Tensor:
    """The output [S, heads, P], for rows of states and weights [L, heads]."""
    if query.numel() == 0 or value.numel() == 0:
        return torch.zeros_like(value)
    by_row = weight[chains.edge]
    operands = tuple(x.contiguous() for x in (query, key, value, by_row))
    sizes = _Sizes.of(query, value)
    slices = sizes.down * sizes.across
    programs = (chains.ptr.numel() - 1) * sizes.heads
    y = value.new_empty(sizes.down, *value.shape)
    numel = sizes.rows * sizes.columns
    ring = value.new_empty(slices, sizes.heads, chains.rings, numel)
    with on_device_of(value):
        tables = (chains.layout, value.size(0), chains.rings)
        _walk_down[programs, slices](operands, y, ring, *tables, sizes, **_OPTIONS)
    return y.sum(0)


def scan_gradients(
    chains: Chains,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `scan`: of query, key, value and weight."""
    if query.numel() == 0 or value.numel() == 0:
        return query * 0, key * 0, value * 0, weight * 0
    by_row = weight[chains.edge]
    operands = tuple(x.contiguous() for x in (query, key, value, by_row, grad))
    sizes = _Sizes.of(query, value)
    slices, (states, heads, _) = sizes.down * sizes.across, value.shape
    programs = (chains.ptr.numel() - 1) * heads
    dq, dk = (value.new_empty(sizes.across, states, heads, sizes.N) for _ in range(2))
    dv = value.new_empty(sizes.down, *value.shape)
    dw = value.new_empty(slices, *weight.shape)

    numel = sizes.rows * sizes.columns
    at_once = min(slices, max(1, _MAX_NUMEL // (states * heads * numel)))
    kept = value.new_empty(at_once, heads, states, numel)
    ring = value.new_empty(at_once, heads, chains.rings, numel)
    tables = (chains.layout, states, weight.size(0), chains.rings)
    with on_device_of(value):
        for first in range(0, slices, at_once):
            _walk_down_and_up[programs, min(at_once, slices - first)](
                operands, (dq, dk, dv, dw), (kept, ring), *tables, first, sizes,
                **_OPTIONS,
            )  # fmt: skip
    dq, dk = (x.sum(0).unflatten(1, (sizes.groups, -1)).sum(2) for x in (dq, dk))
    by_edge = torch.empty_like(weight).index_copy_(0, chains.edge, dw.sum(0))
    return dq, dk, dv.sum(0), by_edge


# ------------------------------------------------------------------------- the kernels


@triton.jit
def _slice(z, sizes: tl.constexpr):
    """Slice z: its channels, their masks, and the parts of sums that it writes."""
    across: tl.constexpr = (sizes.P + sizes.columns - 1) // sizes.columns
    n = z // across * sizes.rows + tl.arange(0, sizes.rows)
    p = z % across * sizes.columns + tl.arange(0, sizes.columns)
    parts = (z // across).to(tl.int64), (z % across).to(tl.int64)
    return n, p, n < sizes.N, p < sizes.P, parts[0], parts[1]


@triton.jit
def _entries(sizes: tl.constexpr):
    """The places of a slice's entries in memory."""
    n, p = tl.arange(0, sizes.rows), tl.arange(0, sizes.columns)
    return n[:, None] * sizes.columns + p[None, :]


#: Sizes that differ from batch to batch, and must not cause recompilation.
_ANY = ["num_states", "num_edges", "rings", "first_slice"]


@triton.jit(do_not_specialize=_ANY[::2])
def _walk_down(operands, Y, RING, chains, num_states, rings, sizes: tl.constexpr):
    """The output of a component, a head and a slice."""
    Q, K, V, W = operands
    HEADS: tl.constexpr = sizes.heads
    SIZE: tl.constexpr = sizes.rows * sizes.columns
    c, h, z = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS, tl.program_id(1)
    g = h // (HEADS // sizes.groups)
    n, p, n_there, p_there, part, _ = _slice(z, sizes)
    base, ring = ring_of(chains.ring_ptr, c)
    first_slot = (z.to(tl.int64) * HEADS + h) * rings + base
    held = RING + first_slot * SIZE + _entries(sizes)
    # The last position's state.
    ROWS: tl.constexpr = sizes.rows
    COLUMNS: tl.constexpr = sizes.columns
    H = tl.zeros([ROWS, COLUMNS], Q.dtype.element_ty)
    begin, end = bounds(chains.ptr, c)
    for i in range(begin, end):
        node = tl.load(chains.node + i).to(tl.int64)
        q = row_of(Q, node, g, n, n_there, sizes.groups, sizes.N)
        k = row_of(K, node, g, n, n_there, sizes.groups, sizes.N)
        v = row_of(V, node, h, p, p_there, HEADS, sizes.P)
        new = k[:, None] * v[None, :]
        first, last = bounds(chains.parent_ptr, i)
        for x in range(first, last):
            w = tl.load(W + x * HEADS + h)
            j = tl.load(chains.parent + x)
            if j == i - 1:
                new += w * H
            else:
                new += w * tl.load(held + j % ring * SIZE)
        H = new
        at = (part * num_states + node) * HEADS + h
        tl.store(Y + at * sizes.P + p, tl.sum(q[:, None] * H, 0), mask=p_there)
        if tl.load(chains.far_child + i) > 0:
            tl.debug_barrier()  # all must have read the old values before the store
            tl.store(held + i % ring * SIZE, H)
            tl.debug_barrier()  # later positions read it


@triton.jit(do_not_specialize=_ANY)
def _walk_down_and_up(
    operands, grads, memory, chains, num_states, num_edges, rings, first_slice,
    sizes: tl.constexpr,
):  # fmt: skip
    """The gradients of a component, a head and a slice."""
    Q, K, V, W, DY = operands
    DQ, DK, DV, DW = grads
    HEADS: tl.constexpr = sizes.heads
    SIZE: tl.constexpr = sizes.rows * sizes.columns
    c, h, z = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS, tl.program_id(1)
    g = h // (HEADS // sizes.groups)
    n, p, n_there, p_there, part_n, part_p = _slice(first_slice + z, sizes)
    states = (z.to(tl.int64) * HEADS + h) * num_states
    kept = memory[0] + states * SIZE + _entries(sizes)
    base, ring = ring_of(chains.ring_ptr, c)
    first_slot = (z.to(tl.int64) * HEADS + h) * rings + base
    held = memory[1] + first_slot * SIZE + _entries(sizes)
    begin, end = bounds(chains.ptr, c)

    ROWS: tl.constexpr = sizes.rows
    COLUMNS: tl.constexpr = sizes.columns
    zeros = tl.zeros([ROWS, COLUMNS], Q.dtype.element_ty)
    H = zeros  # the last position's state
    for i in range(begin, end):
        node = tl.load(chains.node + i).to(tl.int64)
        k = row_of(K, node, g, n, n_there, sizes.groups, sizes.N)
        v = row_of(V, node, h, p, p_there, HEADS, sizes.P)
        dy = row_of(DY, node, h, p, p_there, HEADS, sizes.P)
        new = k[:, None] * v[None, :]
        first, last = bounds(chains.parent_ptr, i)
        for x in range(first, last):
            w = tl.load(W + x * HEADS + h)
            j = tl.load(chains.parent + x)
            if j == i - 1:
                new += w * H
            else:
                new += w * tl.load(kept + j.to(tl.int64) * SIZE)
        H = new
        tl.store(kept + i * SIZE, H)
        tl.debug_barrier()  # later positions read it
        at = (part_p * num_states + node) * HEADS + h
        tl.store(DQ + at * sizes.N + n, tl.sum(H * dy[None, :], 1), mask=n_there)

    Z = zeros  # the next position's adjoint
    for back in range(0, end - begin):
        i = end - 1 - back
        node = tl.load(chains.node + i).to(tl.int64)
        q = row_of(Q, node, g, n, n_there, sizes.groups, sizes.N)
        k = row_of(K, node, g, n, n_there, sizes.groups, sizes.N)
        v = row_of(V, node, h, p, p_there, HEADS, sizes.P)
        dy = row_of(DY, node, h, p, p_there, HEADS, sizes.P)
        H = tl.load(kept + i * SIZE)
        new = q[:, None] * dy[None, :]
        first, last = bounds(chains.child_ptr, i)
        for x in range(first, last):
            entry = tl.load(chains.child_entry + x).to(tl.int64)
            w = tl.load(W + entry * HEADS + h)
            j = tl.load(chains.child + x)
            there = Z
            if j != i + 1:
                there = tl.load(held + j % ring * SIZE)
            new += w * there
            at = ((first_slice + z).to(tl.int64) * num_edges + entry) * HEADS + h
            tl.store(DW + at, tl.sum(tl.sum(there * H, 1), 0))
        Z = new
        at = (part_p * num_states + node) * HEADS + h
        tl.store(DK + at * sizes.N + n, tl.sum(Z * v[None, :], 1), mask=n_there)
        at = (part_n * num_states + node) * HEADS + h
        tl.store(DV + at * sizes.P + p, tl.sum(Z * k[:, None], 0), mask=p_there)
        if tl.load(chains.far_parent + i) > 0:
            tl.debug_barrier()  # all must have read the old values before the store
            tl.store(held + i % ring * SIZE, Z)
            tl.debug_barrier()  # earlier positions read it
