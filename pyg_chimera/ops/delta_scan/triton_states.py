r"""The delta rule on a GPU by states that are carried along a DAG.

.. math::
    S'_i = \sum_{j \to i} a_{ij} S_j, \qquad
    e_i = v_i - \bar{S}_i^{\top} k_i, \qquad
    S_i = S'_i + k_i (b_i e_i)^{\top}, \qquad
    y_i = S_i^{\top} q_i,

where nodes predict from :math:`\bar{S}_i`, their state :math:`S'_i` or the mean of their
parents' states, and :math:`b_i` is the share of the error that they mend, with a surprise
:math:`f_i = v_i - \bar{S}_i^{\top} q_i` or without one. Backward, with the adjoint
:math:`Z_i` of :math:`S_i`,

.. math::
    de_i = b_i Z_i^{\top} k_i, \qquad
    Z_i = q_i dy_i^{\top} + \sum_{i \to m} a_{mi} S'^*_m, \qquad
    S'^*_m = Z_m - k_m de_m^{\top} - q_m df_m^{\top},

and what is predicted from the mean goes to the parents in equal shares instead.

A program takes a component, a head, and a slice of the value channels, which never meet
but in the surprise of a node, and walks the positions one by one. The state of the
position before is in registers; others are in a ring in global memory, as long as edges
lead back. On the way back it walks down once more, keeping all states and errors, and
then up with the adjoints, in a ring. States are held transposed, so that sums over keys
stay within a few threads.

Sums over slices go to parts of their own and are added afterwards. No program writes
what another one reads or writes.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pyg_chimera.ops.common.triton_runtime import on_device_of
from pyg_chimera.ops.dag_scan.triton_state_form import Chains, bounds, row_of

__all__ = ["scan", "scan_gradients"]

#: Numbers of a slice of a state, unless all value channels have to be in one.
_NUMEL = 2048
#: Numbers of states that the way back may keep at a time, if a slice is no more.
_MAX_NUMEL = 1 << 28


class _Sizes(NamedTuple):
    """What kernels are compiled for."""

    heads: int
    groups: int
    N: int
    P: int
    rows: int
    columns: int
    by_channel: bool  #: whether weights are those of key channels
    surprised: bool
    undecayed: bool  #: whether predictions are from the mean of parents' states

    @classmethod
    def of(
        cls,
        query: Tensor,
        value: Tensor,
        weight: Tensor,
        surprise: Tensor | None,
        undecayed: bool,
    ) -> "_Sizes":
        (heads, P), (groups, N) = value.shape[1:], query.shape[1:]
        rows, columns = (triton.next_power_of_2(x) for x in (N, P))
        if surprise is None:
            columns = min(columns, max(1, _NUMEL // rows))
        kind = (weight.dim() == 3, surprise is not None, undecayed)
        return cls(heads, groups, N, P, rows, columns, *kind)

    @property
    def slices(self) -> int:
        return triton.cdiv(self.P, self.columns)

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def options(self) -> dict[str, int]:
        """Of kernels: no load may run ahead of the store of what it reads."""
        return {"num_warps": 4 if self.numel <= _NUMEL else 8, "num_stages": 1}


# -------------------------------------------------------------------------- the calls


def scan(
    chains: Chains,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    weight: Tensor,
    surprise: Tensor | None,
    undecayed: bool,
) -> Tensor:
    """The output [V, heads, P], of weights [E, heads] or [E, heads, N]."""
    y = torch.empty_like(value)
    if value.numel() == 0:
        return y
    sizes = _Sizes.of(query, value, weight, surprise, undecayed)
    operands = _operands(chains, query, key, value, beta, weight, surprise)
    programs = (chains.ptr.numel() - 1) * sizes.heads
    ring = value.new_empty(programs, sizes.slices, chains.ring, sizes.numel)
    with on_device_of(value):
        _correct_down[programs, sizes.slices](
            *operands, y, ring, chains.ptr, chains.node, chains.parent_ptr,
            chains.parent, chains.far_child, chains.ring, *sizes, **sizes.options,
        )  # fmt: skip
    return y


def scan_gradients(
    chains: Chains,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    beta: Tensor,
    weight: Tensor,
    surprise: Tensor | None,
    undecayed: bool,
    grad: Tensor,
) -> tuple[Tensor, ...]:
    """The gradients of `scan`, of query, key, value, beta, weight, and of the surprise
    if there is one.
    """
    tensors = [query, key, value, beta, weight]
    tensors += [] if surprise is None else [surprise]
    if value.numel() == 0:
        return tuple(map(torch.zeros_like, tensors))
    sizes = _Sizes.of(query, value, weight, surprise, undecayed)
    operands = _operands(chains, query, key, value, beta, weight, surprise)
    (nodes, heads, _), slices = value.shape, sizes.slices
    programs = (chains.ptr.numel() - 1) * heads
    dq, dk = (value.new_empty(slices, nodes, heads, sizes.N) for _ in range(2))
    db, dt = value.new_empty(slices, nodes, heads), torch.empty_like(beta)
    dv, dw = torch.empty_like(value), value.new_empty(slices, *weight.shape)
    errors = value.new_empty(1 + sizes.surprised, *value.shape)

    at_once = min(slices, max(1, _MAX_NUMEL // (nodes * heads * sizes.numel)))
    kept = value.new_empty(at_once, heads, nodes, sizes.numel)
    ring = value.new_empty(programs, at_once, chains.ring, sizes.numel)
    with on_device_of(value):
        for first in range(0, slices, at_once):
            _correct_down_and_up[programs, min(at_once, slices - first)](
                *operands, grad.contiguous(), dq, dk, dv, db, dw, dt, errors[0],
                errors[-1], kept, ring, *chains[:8], nodes, weight.size(0), chains.ring,
                first, *sizes, **sizes.options,
            )  # fmt: skip
    dq, dk = (x.sum(0).unflatten(1, (sizes.groups, -1)).sum(2) for x in (dq, dk))
    by_edge = torch.empty_like(weight).index_copy_(0, chains.edge, dw.sum(0))
    grads = (dq, dk, dv, db.sum(0), by_edge)
    return grads if surprise is None else (*grads, dt.sum(0))


def _operands(chains: Chains, *inputs: Tensor | None) -> list[Tensor]:
    """The inputs as kernels take them: weights in the order of entries."""
    *of_nodes, weight, surprise = inputs
    unused = of_nodes[0] if surprise is None else surprise
    operands = [*of_nodes, weight[chains.edge], unused]  # type: ignore[index]
    return [x.contiguous() for x in operands]  # type: ignore[union-attr]


# --------------------------------------------------------------- the parts of kernels


@triton.jit
def _weight(  # type: ignore[no-untyped-def]
    W, entry, h, n, n_there, HEADS: tl.constexpr, N: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """That of an entry, or those of its key channels."""
    if BY_CHANNEL:
        return row_of(W, entry, h, n, n_there, HEADS, N)[None, :]
    else:
        return tl.load(W + entry * HEADS + h)


@triton.jit
def _arriving(  # type: ignore[no-untyped-def]
    S, owner, held, ring, W, PARENT_PTR, PARENT, i, h, n, n_there, HEADS: tl.constexpr,
    N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BY_CHANNEL: tl.constexpr, UNDECAYED: tl.constexpr,
):  # fmt: skip
    """What arrives at a position, S' and what it predicts from; S is that of `owner`."""
    state = tl.zeros([COLUMNS, ROWS], S.dtype)
    known = tl.zeros([COLUMNS, ROWS], S.dtype)
    first, last = bounds(PARENT_PTR, i)
    for x in range(first, last):
        w = _weight(W, x, h, n, n_there, HEADS, N, BY_CHANNEL)
        j = tl.load(PARENT + x)
        there = S
        if j != owner:
            there = tl.load(held + (j % ring).to(tl.int64) * (ROWS * COLUMNS))
        state += w * there
        if UNDECAYED:
            known += there
    if UNDECAYED:
        known *= 1.0 / tl.maximum(last - first, 1).to(S.dtype)
    else:
        known = state
    return state, known


@triton.jit
def _error(v, known, x):  # type: ignore[no-untyped-def]
    """That of what a key, or a query, reads."""
    return v - tl.sum(known * x[None, :], 1)


@triton.jit
def _excess(error, TAU, h, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """The surprise at an error, of which the sigmoid is the share of beta written."""
    return tl.sum(error * error, 0) / (P * tl.load(TAU + h))


# ------------------------------------------------------------------------- the kernels

#: Sizes that differ from batch to batch, which kernels are not compiled anew for.
_ANY = ["num_nodes", "num_edges", "ring", "first_slice"]


@triton.jit(do_not_specialize=_ANY[2:3])
def _correct_down(  # type: ignore[no-untyped-def]
    Q, K, V, B, W, TAU, Y, RING, PTR, NODE, PARENT_PTR, PARENT, FAR_CHILD, ring,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BY_CHANNEL: tl.constexpr,
    SURPRISED: tl.constexpr, UNDECAYED: tl.constexpr,
):  # fmt: skip
    """The output, of a component, a head and a slice."""
    h, z = tl.program_id(0) % HEADS, tl.program_id(1)
    n, p = tl.arange(0, ROWS), z * COLUMNS + tl.arange(0, COLUMNS)
    inside = tl.arange(0, COLUMNS)[:, None] * ROWS + n[None, :]
    program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + z
    held = RING + program * ring * (ROWS * COLUMNS) + inside
    S = tl.zeros([COLUMNS, ROWS], V.dtype.element_ty)  # of the position before
    begin, end = bounds(PTR, tl.program_id(0) // HEADS)
    for i in range(begin, end):
        node = tl.load(NODE + i).to(tl.int64)
        q = row_of(Q, node, h // (HEADS // GROUPS), n, n < N, GROUPS, N)
        k = row_of(K, node, h // (HEADS // GROUPS), n, n < N, GROUPS, N)
        v = row_of(V, node, h, p, p < P, HEADS, P)
        strength = tl.load(B + node * HEADS + h)
        state, known = _arriving(
            S, i - 1, held, ring, W, PARENT_PTR, PARENT, i, h, n, n < N, HEADS, N,
            ROWS, COLUMNS, BY_CHANNEL, UNDECAYED,
        )  # fmt: skip
        if SURPRISED:
            strength *= tl.sigmoid(_excess(_error(v, known, q), TAU, h, P))
        written = strength * _error(v, known, k)
        S = state + written[:, None] * k[None, :]
        y = tl.sum(S * q[None, :], 1)
        tl.store(Y + (node * HEADS + h) * P + p, y, mask=p < P)
        if tl.load(FAR_CHILD + i) > 0:
            tl.debug_barrier()  # all have read what is in its place
            tl.store(held + i % ring * (ROWS * COLUMNS), S)
            tl.debug_barrier()  # and may read it


@triton.jit(do_not_specialize=_ANY)
def _correct_down_and_up(  # type: ignore[no-untyped-def]
    Q, K, V, B, W, TAU, DY, DQ, DK, DV, DB, DW, DT, KEY_ERROR, QUERY_ERROR, KEPT, RING,
    PTR, NODE, PARENT_PTR, PARENT, CHILD_PTR, CHILD, CHILD_ENTRY, FAR_PARENT, num_nodes,
    num_edges, ring, first_slice, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    N: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BY_CHANNEL: tl.constexpr, SURPRISED: tl.constexpr, UNDECAYED: tl.constexpr,
):  # fmt: skip
    """The gradients, of a component, a head and a slice."""
    h, z = tl.program_id(0) % HEADS, tl.program_id(1)
    part = (first_slice + z).to(tl.int64)
    n, p = tl.arange(0, ROWS), part * COLUMNS + tl.arange(0, COLUMNS)
    inside = tl.arange(0, COLUMNS)[:, None] * ROWS + n[None, :]
    states = (z.to(tl.int64) * HEADS + h) * num_nodes
    kept = KEPT + states * (ROWS * COLUMNS) + inside
    program = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + z
    held = RING + program * ring * (ROWS * COLUMNS) + inside
    begin, end = bounds(PTR, tl.program_id(0) // HEADS)

    S = tl.zeros([COLUMNS, ROWS], V.dtype.element_ty)  # of the position before
    for i in range(begin, end):
        node = tl.load(NODE + i).to(tl.int64)
        k = row_of(K, node, h // (HEADS // GROUPS), n, n < N, GROUPS, N)
        v = row_of(V, node, h, p, p < P, HEADS, P)
        strength = tl.load(B + node * HEADS + h)
        state, known = _arriving(
            S, i - 1, kept, num_nodes, W, PARENT_PTR, PARENT, i, h, n, n < N, HEADS, N,
            ROWS, COLUMNS, BY_CHANNEL, UNDECAYED,
        )  # fmt: skip
        at = (node * HEADS + h) * P + p
        if SURPRISED:
            q = row_of(Q, node, h // (HEADS // GROUPS), n, n < N, GROUPS, N)
            f = _error(v, known, q)
            strength *= tl.sigmoid(_excess(f, TAU, h, P))
            tl.store(QUERY_ERROR + at, f, mask=p < P)
        e = _error(v, known, k)
        tl.store(KEY_ERROR + at, e, mask=p < P)
        S = state + (strength * e)[:, None] * k[None, :]
        tl.store(kept + i * (ROWS * COLUMNS), S)
        tl.debug_barrier()  # later positions read it

    D = tl.zeros([COLUMNS, ROWS], V.dtype.element_ty)  # S'* of the position after
    for back in range(0, end - begin):
        i = end - 1 - back
        node = tl.load(NODE + i).to(tl.int64)
        q = row_of(Q, node, h // (HEADS // GROUPS), n, n < N, GROUPS, N)
        k = row_of(K, node, h // (HEADS // GROUPS), n, n < N, GROUPS, N)
        dy = row_of(DY, node, h, p, p < P, HEADS, P)
        e = row_of(KEY_ERROR, node, h, p, p < P, HEADS, P)
        beta = tl.load(B + node * HEADS + h)
        S = tl.load(kept + i * (ROWS * COLUMNS))
        Z = dy[:, None] * q[None, :]
        first, last = bounds(CHILD_PTR, i)
        for x in range(first, last):
            entry = tl.load(CHILD_ENTRY + x).to(tl.int64)
            w = _weight(W, entry, h, n, n < N, HEADS, N, BY_CHANNEL)
            j = tl.load(CHILD + x)
            there = D
            if j != i + 1:
                there = tl.load(held + (j % ring).to(tl.int64) * (ROWS * COLUMNS))
            Z += w * there
            at = (part * num_edges + entry) * HEADS + h
            if BY_CHANNEL:
                tl.store(DW + at * N + n, tl.sum(there * S, 0), mask=n < N)
            else:
                tl.store(DW + at, tl.sum(tl.sum(there * S, 1), 0))
            if UNDECAYED:  # what the child has left of its prediction
                child = tl.load(NODE + j).to(tl.int64)
                alpha, omega = bounds(PARENT_PTR, j)
                share = 1.0 / (omega - alpha).to(S.dtype)
                x_k = row_of(K, child, h // (HEADS // GROUPS), n, n < N, GROUPS, N)
                de = row_of(KEY_ERROR, child, h, p, p < P, HEADS, P)
                Z -= (share * de)[:, None] * x_k[None, :]
                if SURPRISED:
                    x_q = row_of(Q, child, h // (HEADS // GROUPS), n, n < N, GROUPS, N)
                    df = row_of(QUERY_ERROR, child, h, p, p < P, HEADS, P)
                    Z -= (share * df)[:, None] * x_q[None, :]

        strength = beta
        if SURPRISED:
            f = row_of(QUERY_ERROR, node, h, p, p < P, HEADS, P)
            excess = _excess(f, TAU, h, P)
            strength *= tl.sigmoid(excess)
        found = tl.sum(Z * k[None, :], 1)
        de = strength * found
        db = tl.sum(found * e, 0)
        dv = de
        if SURPRISED:
            d_excess = db * strength * tl.sigmoid(-excess)
            db *= tl.sigmoid(excess)
            tau = tl.load(TAU + h)
            df = 2.0 / (P * tau) * d_excess * f
            dv += df
            tl.store(DT + node * HEADS + h, -d_excess * excess / tau)
        tl.store(DV + (node * HEADS + h) * P + p, dv, mask=p < P)
        tl.store(DB + (part * num_nodes + node) * HEADS + h, db)

        if UNDECAYED:
            _, known = _arriving(
                S, i, kept, num_nodes, W, PARENT_PTR, PARENT, i, h, n, n < N, HEADS, N,
                ROWS, COLUMNS, BY_CHANNEL, UNDECAYED,
            )  # fmt: skip
            D = Z
        else:
            known = S - (strength * e)[:, None] * k[None, :]
            D = Z - de[:, None] * k[None, :]
            if SURPRISED:
                D -= df[:, None] * q[None, :]
        dk = Z * (strength * e)[:, None] - known * de[:, None]
        dq = S * dy[:, None]
        if SURPRISED:
            dq -= known * df[:, None]
        at = ((part * num_nodes + node) * HEADS + h) * N + n
        tl.store(DK + at, tl.sum(dk, 0), mask=n < N)
        tl.store(DQ + at, tl.sum(dq, 0), mask=n < N)
        if UNDECAYED:
            tl.debug_barrier()  # all have read the errors that are replaced
            at = (node * HEADS + h) * P + p
            tl.store(KEY_ERROR + at, de, mask=p < P)
            if SURPRISED:
                tl.store(QUERY_ERROR + at, df, mask=p < P)
            tl.debug_barrier()  # parents read their adjoints
        if tl.load(FAR_PARENT + i) > 0:
            tl.debug_barrier()  # all have read what is in its place
            tl.store(held + i % ring * (ROWS * COLUMNS), D)
            tl.debug_barrier()  # and may read it
