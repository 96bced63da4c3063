r"""The delta rule on a GPU by states that are carried along a DAG.

.. math::
    S'_i = \sum_{j \to i} a_{ij} S_j, \qquad
    e_i = v_i - S_i'^{\top} k_i, \qquad
    S_i = S'_i + k_i (b_i e_i)^{\top}, \qquad
    y_i = S_i^{\top} q_i,

where nodes correct the share :math:`b_i` of the error. Backward, with the adjoint
:math:`Z_i` of :math:`S_i`,

.. math::
    de_i = b_i Z_i^{\top} k_i, \qquad
    Z_i = q_i dy_i^{\top} + \sum_{i \to m} a_{mi} S'^*_m, \qquad
    S'^*_m = Z_m - k_m de_m^{\top}.

A program takes a component, a head, and a slice of the value channels, and visits the
positions one by one. The last state is in registers; earlier ones that are still needed
are in a ring buffer in global memory, as long as edges lead back. The backward pass
computes all states and errors once more and stores them, then visits the positions in
reverse with the adjoints, in a ring buffer. A last kernel, with one program per
position, computes the gradients from what queries and keys read. States are stored
transposed, so that sums over key channels stay within a few threads.

Each slice writes its own part of a sum over slices; the parts are added afterwards. No
program writes what another one reads or writes.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_chimera.ops.common.cache import table
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.triton_runtime import on_device_of
from pyg_chimera.ops.recurrence.gpu.chains import Chains, bounds, ring_of, row_of
from pyg_chimera.ops.recurrence.plan.delta_graph import DeltaGraph

#: Entries of a slice of a state.
_NUMEL = 2048
#: Numbers of states that the backward pass may store at a time, if one slice has fewer.
_MAX_NUMEL = 1 << 28
#: Kernel options: no prefetching, as loads must not precede earlier stores.
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
    def of(cls, call: Call) -> "_Sizes":
        query, value = call.inputs.query, call.inputs.value
        (heads, P), (groups, N) = value.shape[1:], query.shape[1:]
        rows, columns = (triton.next_power_of_2(x) for x in (N, P))
        columns = min(columns, max(1, _NUMEL // rows))
        return cls(heads, groups, N, P, rows, columns)

    @property
    def slices(self) -> int:
        return triton.cdiv(self.P, self.columns)

    @property
    def numel(self) -> int:
        return self.rows * self.columns


# -------------------------------------------------------------------------- the calls


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P]; states are recomputed for gradients."""
    query, value = call.inputs.query, call.inputs.value
    if query.numel() == 0 or value.numel() == 0:
        return value.new_zeros(value.shape), ()
    y = value.new_empty(value.shape)
    sizes, chains = _Sizes.of(call), table(_chains, call.structure, value.device)
    operands = _operands(call, chains)
    programs, slices = (chains.ptr.numel() - 1) * sizes.heads, sizes.slices
    in_slice = sizes.heads * chains.rings * sizes.numel
    at_once = min(slices, max(1, _MAX_NUMEL // in_slice))
    ring = value.new_empty(at_once, sizes.heads, chains.rings, sizes.numel)
    tables = (chains.layout, chains.rings)
    with on_device_of(value):
        for first in range(0, slices, at_once):
            _walk[programs, min(at_once, slices - first)](
                operands, (y, y, ring), *tables, first, sizes, False, **_OPTIONS
            )
    return y, ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta and weight."""
    query, _, value, _, weight = call.inputs[:5]
    if query.numel() == 0 or value.numel() == 0:
        return tuple(map(torch.zeros_like, call.inputs[:5]))
    sizes, chains = _Sizes.of(call), table(_chains, call.structure, value.device)
    operands = _operands(call, chains)
    q, k, _, b, _ = operands
    by_child = chains.edge.index_select(0, chains.child_entry)
    w = weight[by_child].contiguous()
    (nodes, heads, _), slices, dy = value.shape, sizes.slices, grad.contiguous()
    errors, dv = (value.new_empty(value.shape) for _ in range(2))
    dq = value.new_empty(nodes, heads, slices, sizes.N)
    dk = value.new_empty(nodes, heads, slices, 2, sizes.N)  # from writing, and reading
    db = value.new_empty(nodes, heads, slices)
    dw = value.new_empty(*weight.shape, slices)

    at_once = min(slices, max(1, _MAX_NUMEL // (nodes * heads * sizes.numel)))
    kept = value.new_empty(at_once, heads, nodes, sizes.numel)
    programs, layout = (chains.ptr.numel() - 1) * heads, chains.layout
    ring = value.new_empty(at_once, heads, chains.rings, sizes.numel)
    with on_device_of(value):
        for first in range(0, slices, at_once):
            count = min(at_once, slices - first)
            _walk[programs, count](
                operands, (errors, errors, kept), layout, nodes, first, sizes, True,
                **_OPTIONS,
            )  # fmt: skip
            _walk_back[programs, count](
                (q, k, b, w, dy, errors), (dv, dk, db, dw), (kept, ring), layout,
                nodes, chains.rings, first, sizes, **_OPTIONS,
            )  # fmt: skip
            _reads[nodes * heads, count](
                (k, b, dy, errors, dv), (dq, dk), kept, layout, nodes, first, sizes,
                **_OPTIONS,
            )  # fmt: skip
    dq, dk = (
        x.sum(y).unflatten(1, (sizes.groups, -1)).sum(2)
        for x, y in ((dq, 2), (dk, (2, 3)))
    )
    by_edge = torch.empty_like(weight).index_copy_(0, by_child, dw.sum(2))
    return dq, dk, dv, db.sum(2), by_edge


def _chains(graph: DeltaGraph, device: torch.device) -> Chains:
    return Chains.of(graph.states, device)


def _operands(call: Call, chains: Chains) -> tuple[Tensor, ...]:
    """The inputs as kernels take them: weights in the order of entries."""
    *of_nodes, weight = call.inputs[:5]
    return tuple(x.contiguous() for x in (*of_nodes, weight[chains.edge]))


# --------------------------------------------------------------- the parts of kernels


@triton.jit
def _slice(z, sizes: tl.constexpr):
    """The key channels and value channels of slice z."""
    return tl.arange(0, sizes.rows), z * sizes.columns + tl.arange(0, sizes.columns)


@triton.jit
def _numbers(first, sizes: tl.constexpr):
    """Pointers to the entries of a slice of a state at `first`, transposed."""
    n, p = tl.arange(0, sizes.rows), tl.arange(0, sizes.columns)
    return first + p[:, None] * sizes.rows + n[None, :]


@triton.jit
def _part(row, h, z, sizes: tl.constexpr):
    """The index of slice z in the parts of sums, [rows, heads, slices]."""
    slices: tl.constexpr = (sizes.P + sizes.columns - 1) // sizes.columns
    return (row * sizes.heads + h) * slices + z


# ------------------------------------------------------------------------- the kernels

#: Sizes that differ from batch to batch, and must not cause recompilation.
_ANY = ["slots", "num_nodes", "rings", "first_slice"]


@triton.jit(do_not_specialize=_ANY[::3])
def _walk(
    operands, outs, chains, slots, first_slice, sizes: tl.constexpr, KEEP: tl.constexpr
):
    """The output of a component, a head and a slice; if KEEP, states and errors."""
    Q, K, V, B, W = operands
    Y, ERRORS, HELD = outs
    HEADS: tl.constexpr = sizes.heads
    N: tl.constexpr = sizes.N
    P: tl.constexpr = sizes.P
    SIZE: tl.constexpr = sizes.rows * sizes.columns
    c, h, z = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS, tl.program_id(1)
    n, p = _slice(first_slice + z, sizes)
    if KEEP:  # a slot for each position
        base, ring = 0, slots
    else:
        base, ring = ring_of(chains.ring_ptr, c)
    first_slot = (z.to(tl.int64) * HEADS + h) * slots + base
    held = _numbers(HELD + first_slot * SIZE, sizes)
    COLUMNS: tl.constexpr = sizes.columns
    ROWS: tl.constexpr = sizes.rows
    zeros = tl.zeros([COLUMNS, ROWS], V.dtype.element_ty)
    S, g = zeros, h // (HEADS // sizes.groups)  # the last position's state
    begin, end = bounds(chains.ptr, c)
    for i in range(begin, end):
        node = tl.load(chains.node + i).to(tl.int64)
        q = row_of(Q, node, g, n, n < N, sizes.groups, N)
        k = row_of(K, node, g, n, n < N, sizes.groups, N)
        v = row_of(V, node, h, p, p < P, HEADS, P)
        state = zeros
        start, stop = bounds(chains.parent_ptr, i)
        for x in range(start, stop):
            w = tl.load(W + x * HEADS + h)
            j = tl.load(chains.parent + x)
            there = S
            if j != i - 1:
                there = tl.load(held + (j % ring).to(tl.int64) * SIZE)
            state += w * there
        strength = tl.load(B + node * HEADS + h)
        row = (node * HEADS + h) * P + p
        e = v - tl.sum(state * k[None, :], 1)
        S = state + (strength * e)[:, None] * k[None, :]
        if KEEP:
            tl.store(ERRORS + row, e, mask=p < P)
            tl.store(held + i * SIZE, S)
            tl.debug_barrier()  # later positions read it
        else:
            y = tl.sum(S * q[None, :], 1)
            tl.store(Y + row, y, mask=p < P)
            if tl.load(chains.far_child + i) > 0:
                tl.debug_barrier()  # all must have read the old values before the store
                tl.store(held + i % ring * SIZE, S)
                tl.debug_barrier()  # later positions read it


@triton.jit(do_not_specialize=_ANY[1:])
def _walk_back(
    operands, grads, memory, chains, num_nodes, rings, first_slice,
    sizes: tl.constexpr,
):  # fmt: skip
    """The adjoints of a component, a head and a slice, and all gradients but those from
    what queries and keys read.
    """
    Q, K, B, W, DY, ERRORS = operands
    DV, DK, DB, DW = grads
    KEPT, RING = memory
    HEADS: tl.constexpr = sizes.heads
    N: tl.constexpr = sizes.N
    P: tl.constexpr = sizes.P
    SIZE: tl.constexpr = sizes.rows * sizes.columns
    h, z = tl.program_id(0) % HEADS, tl.program_id(1)
    n, p = _slice(first_slice + z, sizes)
    states = (z.to(tl.int64) * HEADS + h) * num_nodes
    kept = _numbers(KEPT + states * SIZE, sizes)
    base, ring = ring_of(chains.ring_ptr, tl.program_id(0) // HEADS)
    first_slot = (z.to(tl.int64) * HEADS + h) * rings + base
    held = _numbers(RING + first_slot * SIZE, sizes)
    begin, end = bounds(chains.ptr, tl.program_id(0) // HEADS)
    COLUMNS: tl.constexpr = sizes.columns
    ROWS: tl.constexpr = sizes.rows
    D = tl.zeros([COLUMNS, ROWS], Q.dtype.element_ty)  # S'* of the next one
    g = h // (HEADS // sizes.groups)
    for back in range(0, end - begin):
        i = end - 1 - back
        node = tl.load(chains.node + i).to(tl.int64)
        q = row_of(Q, node, g, n, n < N, sizes.groups, N)
        dy = row_of(DY, node, h, p, p < P, HEADS, P)
        S = tl.load(kept + i * SIZE)
        Z = dy[:, None] * q[None, :]
        first, last = bounds(chains.child_ptr, i)
        for x in range(first, last):
            w = tl.load(W + x * HEADS + h)
            j = tl.load(chains.child + x)
            there = D
            if j != i + 1:
                there = tl.load(held + (j % ring).to(tl.int64) * SIZE)
            Z += w * there
            at = _part(x, h, first_slice + z, sizes)
            tl.store(DW + at, tl.sum(tl.sum(there * S, 1), 0))
        k = row_of(K, node, g, n, n < N, sizes.groups, N)
        row = (node * HEADS + h) * P + p
        e = tl.load(ERRORS + row, mask=p < P, other=0.0)
        strength = tl.load(B + node * HEADS + h)
        found = tl.sum(Z * k[None, :], 1)
        db = tl.sum(found * e, 0)
        at = _part(node, h, first_slice + z, sizes)
        de = strength * found
        tl.store(DV + row, de, mask=p < P)
        tl.store(DB + at, db)
        dk = tl.sum(Z * (strength * e)[:, None], 0)
        tl.store(DK + 2 * at * N + n, dk, mask=n < N)
        D = Z - de[:, None] * k[None, :]
        if tl.load(chains.far_parent + i) > 0:
            tl.debug_barrier()  # all must have read the old values before the store
            tl.store(held + i % ring * SIZE, D)
            tl.debug_barrier()  # earlier positions read it


@triton.jit(do_not_specialize=_ANY[1::2])
def _reads(operands, outs, KEPT, chains, num_nodes, first_slice, sizes: tl.constexpr):
    """The gradients of a position's query and key from what they read of a slice."""
    K, B, DY, ERRORS, DV = operands
    DQ, DK = outs
    HEADS: tl.constexpr = sizes.heads
    N: tl.constexpr = sizes.N
    P: tl.constexpr = sizes.P
    SIZE: tl.constexpr = sizes.rows * sizes.columns
    i, h = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    z = tl.program_id(1)
    n, p = _slice(first_slice + z, sizes)
    states = (z.to(tl.int64) * HEADS + h) * num_nodes
    kept = _numbers(KEPT + states * SIZE, sizes)
    node = tl.load(chains.node + i).to(tl.int64)
    S = tl.load(kept + i * SIZE)
    row = (node * HEADS + h) * P + p
    k = row_of(K, node, h // (HEADS // sizes.groups), n, n < N, sizes.groups, N)
    strength = tl.load(B + node * HEADS + h)
    written = strength * tl.load(ERRORS + row, mask=p < P, other=0.0)
    known = S - written[:, None] * k[None, :]
    dq = S * row_of(DY, node, h, p, p < P, HEADS, P)[:, None]
    dk = -known * tl.load(DV + row, mask=p < P, other=0.0)[:, None]
    at = _part(node, h, first_slice + z, sizes)
    tl.store(DQ + at * N + n, tl.sum(dq, 0), mask=n < N)
    tl.store(DK + (2 * at + 1) * N + n, tl.sum(dk, 0), mask=n < N)
