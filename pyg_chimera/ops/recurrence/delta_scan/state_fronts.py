r"""The state form on graphs with cycles, on the CPU: a sparse linear system of states.

With E_i = I - b_i k_i k_i^T, the states solve S_i - sum_j A_ij E_i S_j = b_i k_i v_i^T.
This matrix M has a block [N, N] for each edge. It is eliminated as I - A is by
`resolvent_mix`, supernode by supernode, where each node has N rows and columns. It
needs no pivoting: no E_i makes a state larger, and A is a contraction, so no principal
minor is zero (see `block_elimination`).

With the columns s of a supernode and the rows r below them, its *panel* holds M_ss =
B W with the rows W_sr beside it and the rows B_rs below it, and the inverses of B's
diagonal blocks. A leaf of the tree, which are most nodes, is eliminated in mask form,
see `_Leaf`.

All is in float64: a state may hardly fade where keys do not read it, and what a node
writes is a small difference of large numbers. If inverses or adjoints are large,
solutions are refined, see `state_residuals`.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.array_views import as_array
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.numba_runtime import arrays, jit, run, stopped
from pyg_chimera.ops.common.simd import ADD, SET, SUBTRACT, gemm, pointer
from pyg_chimera.ops.common.vector_kit import (
    LANES,
    add_multiple,
    assign,
    carved,
    inner_product_of_rows,
    matmul,
    set_identity,
)
from pyg_chimera.ops.recurrence.delta_scan.block_elimination import (
    SIDE,
    check_accuracy,
    eliminate,
    invert,
    sweep,
)
from pyg_chimera.ops.recurrence.delta_scan.graph import DeltaGraph
from pyg_chimera.ops.recurrence.delta_scan.state_residuals import residual
from pyg_chimera.ops.recurrence.delta_scan.tensors import Operands
from pyg_chimera.ops.structure.cache import table
from pyg_chimera.ops.structure.csr import sorted_rows
from pyg_chimera.ops.structure.supernodes import Merging, Supernodes, supernodes

#: Smaller supernodes than those of numbers, as each pair of nodes has a block.
_MERGING = Merging(max_leaf=16, per_row=0, per_supernode=0)
#: Solutions are refined where entries of inverses exceed this, as errors may be their
#: squares times 1e-16, for results in float32 and float64.
_LARGE = {torch.float32: 1e4, torch.float64: 1e3}
#: How much of rounding errors may return in the transposed system, or in a leaf whose
#: nodes reflect (beta > 1).
_MAX_GROWTH = 1e10
#: The most steps of iterative refinement, and the largest relative error after them.
_MAX_CORRECTIONS, _MAX_ERROR = 8, 1e-12


class Plan(NamedTuple):
    """How a graph is eliminated; all arrays are int64."""

    nodes: Supernodes
    panel_ptr: np.ndarray  #: [S + 1], first number of the panel of each supernode
    edge_ptr: np.ndarray  #: [V + 1], first of the edges to each position in ...
    source: np.ndarray  #: [E], ... the positions of their sources ...
    edge: np.ndarray  #: [E], ... and their indices
    scratch: np.ndarray  #: [4], the sizes of a task's states below a supernode, of its
    #: vectors, of what else it needs in sweeps, and of a front

    @classmethod
    def of(cls, graph: DeltaGraph, keys: int, channels: int) -> "Plan":
        """The plan for states [keys, channels], cached in the tables of the graph."""
        return table(cls._of, graph, torch.device("cpu"), keys, channels)

    @classmethod
    def _of(cls, graph: DeltaGraph, device: torch.device, N: int, P: int) -> "Plan":
        factor: Any = graph.factor
        nodes = supernodes(factor, _MERGING)
        s, m, leaf = nodes.widths, nodes.heights, nodes.leaf == 1
        size = np.where(leaf, 2 * s * (s + m), N * s * (SIDE + N * (s + 2 * m)))
        rows = sorted_rows(factor.edge_row, factor.edge_col, graph.num_nodes)
        n, few = (int(x[leaf].max(initial=0)) for x in (s, m))
        rows_below, t = int(m.max(initial=0)), int((s + m)[~leaf].max(initial=0))
        of_leaf = n * (n + LANES + 3 * few * N) + (n + few) ** 2 + few * N
        spare = max(of_leaf, 2 * n * (N + 1) * P, SIDE * (SIDE + t * N + P)) + P
        scratch = [rows_below * N * P, 2 * N * P + 4 * P + N, spare, (t * N) ** 2]
        return cls(
            nodes,
            np.append(0, np.cumsum(size)),
            rows.ptr,
            rows.col,
            factor.edge[rows.entry],
            np.array(scratch),
        )

    def work(self, keys: int) -> float:
        """The multiply-adds of an elimination."""
        s, m = (x.astype(float) for x in (self.nodes.widths, self.nodes.heights))
        fronts = keys**3 * (s * m * (s + m) + s**3 / 3)
        leaves = s * (2 * s**2 + keys * m * (s + keys * m))
        return float(np.where(self.nodes.leaf, leaves, fronts).sum())


class _Leaf(NamedTuple):
    """The panel of a leaf with the nodes s, and r below it. With F + b k v^T on the
    right-hand side, S_s = G (F - k u) + H S_r with u = B (k^T (G F - F + H S_r) - v).

    In the transposed system Z_s = G^T (F - k u) + k u + J, with J = L^T E_r Z_r and
    u = B^T k^T (G^T F + J).
    """

    G: np.ndarray  #: [n, n], (I - A_ss)^-1
    B: np.ndarray  #: [n, n], (I + diag(b) ((G - I) * K K^T))^-1 diag(b)
    H: np.ndarray  #: [n, m], G A_sr
    L: np.ndarray  #: [m, n], A_rs G


class _Solved(NamedTuple):
    """What the backward pass takes from the forward pass."""

    growth: np.ndarray  #: [heads, T], the largest entries of inverses
    states: np.ndarray  #: [heads, V, N, P], by position
    panels: np.ndarray  #: [heads, numbers]
    wrong: np.ndarray  #: [heads, T], whether results are inaccurate, not saved
    large: float  #: where refinement begins

    @classmethod
    def of(cls, saved: np.ndarray, x: Operands, blocks: int, large: float) -> "_Solved":
        """Views of what is saved."""
        (V, heads, P), N = x.value.shape, x.query.shape[2]
        growth, rest = np.split(saved, [heads * blocks])
        states, panels = np.split(rest, [heads * V * N * P])
        return cls(
            growth.reshape(heads, -1),
            states.reshape(heads, V, N, P),
            panels.reshape(heads, -1),
            np.zeros((heads, blocks), bool),
            large,
        )


class _Task(NamedTuple):
    """A block and head, and its memory."""

    block: int
    h: int
    g: int  #: the group of the head
    start: int  #: first position of the block
    place: np.ndarray  #: [nodes], rows of these in a front, int64
    below: np.ndarray  #: the states below a supernode
    vectors: np.ndarray  #: [2 N P + 4 P + N]
    spare: np.ndarray
    growth: np.ndarray  #: [2], the largest entry of an inverse, and that of G times
    #: that of B of a leaf whose nodes reflect


def _costs(plan: Plan, x: Operands) -> np.ndarray:
    nodes, (_, heads, P), N = plan.nodes, x.value.shape, x.query.shape[2]
    s, t = nodes.widths, nodes.widths + nodes.heights
    work = np.where(nodes.leaf, s * t * N * P, s * t * N**2 * (N * t + 2 * P))
    return np.repeat(nodes.by_block(0.04 * work + 300.0 * s), heads)


def _operands(call: Call) -> Operands:
    return Operands(*arrays(*(x.double() for x in call.inputs[:5])))


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P]; saves states and panels."""
    x, dtype = _operands(call), call.inputs.value.dtype
    (V, heads, P), N = x.value.shape, x.query.shape[2]
    plan = Plan.of(call.structure, N, P)
    blocks = len(plan.nodes.slots)
    saved = np.empty(heads * (blocks + V * N * P + int(plan.panel_ptr[-1])))
    solved, out = _Solved.of(saved, x, blocks, _LARGE[dtype]), np.empty_like(x.value)
    if out.size:
        run(
            _forward_tasks,
            _costs(plan, x),
            int(plan.scratch.sum()) + int(plan.nodes.stack[0]) * N**2,
            out.dtype,
            *(plan, x, solved, out),
        )
    check_accuracy(solved.wrong[:, call.structure.is_cyclic])
    return torch.from_numpy(out).to(dtype), (torch.from_numpy(saved).view(dtype),)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta and edge weight.

    With the adjoints Z of states, X = A S, e = v - X^T k and g = Z^T k: dq = S dy,
    dk = b (Z e - X g), dv = b g, db = <g, e> and dA_ij = <E_i Z_i, S_j>.
    """
    x, (dy,) = _operands(call), arrays(grad.double())
    (V, heads, P), (_, groups, N) = x.value.shape, x.query.shape
    plan = Plan.of(call.structure, N, P)
    blocks = len(plan.nodes.slots)
    dq, dk = np.zeros((2, V, heads, N))
    d = Operands(dq, dk, *(np.zeros_like(y) for y in x[2:]))
    n = int(np.diff(plan.nodes.start).max(initial=0))
    held = as_array(saved[0]).view(np.float64)
    solved = _Solved.of(held, x, blocks, _LARGE[grad.dtype])
    if x.value.size:
        run(
            _backward_tasks,
            _costs(plan, x),
            int(plan.scratch[:3].sum()) + n * N * P,
            dq.dtype,
            *(plan, x, solved, dy, d),
        )
    check_accuracy(solved.wrong[:, call.structure.is_cyclic])
    dq, dk = (y.reshape(V, groups, -1, N).sum(2) for y in (dq, dk))
    return tuple(torch.from_numpy(y).to(grad.dtype) for y in (dq, dk, *d[2:]))


# ---------------------------------------------------------------------- supernodes


@jit
def _sizes(nodes, x):
    """The first position of a supernode, its width, and the rows below it."""
    rows = nodes.row[nodes.row_ptr[x] : nodes.row_ptr[x + 1]]
    return nodes.ptr[x], nodes.ptr[x + 1] - nodes.ptr[x], rows


@jit
def _panel(plan, panel, x, N):
    """The panel of a supernode: its rows s, the columns s of the rows below, and the
    inverses of diagonal blocks.
    """
    _, s, rows = _sizes(plan.nodes, x)
    s, m = s * N, rows.shape[0] * N
    upper, at = carved(panel, plan.panel_ptr[x], s, s + m)
    low, at = carved(panel, at, m, s)
    inverse, _ = carved(panel, at, s, SIDE)
    return upper, low, inverse


@jit
def _leaf(plan, panel, x):
    """The panel of a leaf."""
    _, n, rows = _sizes(plan.nodes, x)
    m = rows.shape[0]
    G, at = carved(panel, plan.panel_ptr[x], n, n)
    B, at = carved(panel, at, n, n)
    H, at = carved(panel, at, n, m)
    L, _ = carved(panel, at, m, n)
    return _Leaf(G, B, H, L)


@jit
def _largest(x):
    """The largest absolute value of a matrix."""
    largest = 0.0
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            largest = max(largest, abs(x[i, j]))
    return largest


@jit
def _assemble(F, s, x, task, nodes, operands):
    """Sets a front of s columns to the supernode's own edges."""
    key, N, t = operands.key, operands.key.shape[2], F.shape[1]
    F[:] = 0
    for i in range(s):
        F[i, i] = 1
    for y in range(nodes.edge_ptr[x], nodes.edge_ptr[x + 1]):
        i, j = nodes.edge_row[y], nodes.edge_col[y]
        u, w = nodes.node[i], operands.weight[nodes.edge[y], task.h]
        i, j = task.place[i - task.start] * N, task.place[j - task.start] * N
        at, k = pointer(F) + (i * t + j), pointer(key[u, task.g])
        for a in range(N):  # -w (I - b k k^T)
            add_multiple(at + a * t, w * operands.beta[u, task.h] * k[a], k, N)
            F[i + a, j + a] -= w


@jit
def _add_update(F, child, place, N):
    """Adds a child's update to a front, in which its nodes have the given places."""
    c, t = place.shape[0], F.shape[1]
    for i in range(c):
        j = 0
        while j < c:
            end = j + 1
            while end < c and place[end] == place[j] + end - j:
                end += 1
            for p in range(i * N, i * N + N):
                to = pointer(F) + ((place[i] - i) * N + p) * t + place[j] * N
                add_multiple(to, 1.0, child + (p * c + j) * N, (end - j) * N)
            j = end


@jit
def _eliminate_leaf(leaf, update, x, task, nodes, operands):
    """Computes the panel of a leaf, and its update -E_r (A_rs H - L k B k^T H)."""
    key, beta, (G, B, H, L) = operands.key, operands.beta, leaf
    h, g, place, N = task.h, task.g, task.place, key.shape[2]
    first, n, rows = _sizes(nodes, x)
    own, m, step = nodes.node[first:], rows.shape[0], (n + LANES - 1) // LANES * LANES
    D, at = carved(task.spare, 0, n, step)
    A, at = carved(task.spare, at, n + m, n + m)
    read, at = carved(task.spare, at, n, m * N)
    written, at = carved(task.spare, at, n, m * N)
    left, _ = carved(task.spare, at, m * N, n)
    A[:] = 0
    for y in range(nodes.edge_ptr[x], nodes.edge_ptr[x + 1]):
        i, j = nodes.edge_row[y] - task.start, nodes.edge_col[y] - task.start
        A[place[i], place[j]] += operands.weight[nodes.edge[y], h]
    set_identity(D)
    for i in range(n):
        for j in range(n):
            D[i, j] -= A[i, j]
    invert(D, n)
    reflects = False
    for i in range(n):
        b, k = beta[own[i], h], pointer(key[own[i], g])
        reflects |= b > 1
        for j in range(n):
            G[i, j] = D[i, j]
            overlap = inner_product_of_rows(k, pointer(key[own[j], g]), N)
            D[i, j] = (i == j) + b * (G[i, j] - (i == j)) * overlap
    invert(D, n)
    for i in range(n):
        for j in range(n):
            B[i, j] = D[i, j] * beta[own[j], h]
    growth = _largest(G)
    task.growth[0] = max(task.growth[0], growth)
    if reflects:
        task.growth[1] = max(task.growth[1], growth * _largest(B))
    matmul(H, G, A[:n, n:])
    matmul(L, A[n:, :n], G)
    matmul(A[n:, n:], A[n:, :n], H)
    for j in range(n):
        k = key[own[j], g]
        for r in range(m):
            for a in range(N):
                read[j, r * N + a] = H[j, r] * k[a]
                left[r * N + a, j] = L[r, j] * k[a]
    matmul(written, B, read)
    matmul(update, left, written)
    for i in range(m):
        for j in range(m):
            for a in range(N):
                update[i * N + a, j * N + a] -= A[n + i, n + j]
    _erase(update.reshape(m, N * m * N), nodes.node[rows], task, operands)


@jit
def _factor(plan, panel, x, memory, top, task, operands, stop):
    """Computes the panel of a supernode; returns the new top of the stack."""
    nodes, N, start = plan.nodes, operands.key.shape[2], task.start
    a, s, rows = _sizes(nodes, x)
    m, stack = rows.shape[0], memory[plan.scratch[3] :]
    for i in range(s):
        task.place[a - start + i] = i
    for i in range(m):
        task.place[rows[i] - start] = s + i
    y, s, m = x - 1, s * N, m * N
    if nodes.leaf[x]:
        leaf, update = _leaf(plan, panel, x), stack[top : top + m * m].reshape(m, m)
        _eliminate_leaf(leaf, update, x, task, nodes, operands)
        return top + m * m
    F = memory[: (s + m) ** 2].reshape(s + m, s + m)
    _assemble(F, s, x, task, nodes, operands)
    while y > x - nodes.subtree[x]:  # its children; the last one is on top
        _, _, shared = _sizes(nodes, y)
        top -= (shared.shape[0] * N) ** 2
        _add_update(F, pointer(stack) + top, task.place[shared - start], N)
        y -= nodes.subtree[y]
    upper, low, inverse = _panel(plan, panel, x, N)
    eliminate(F, inverse, task.spare, False, stop)
    task.growth[0] = max(task.growth[0], _largest(inverse))
    assign(upper, F[:s])
    assign(low, F[s:, :s])
    assign(stack[top : top + m * m].reshape(m, m), F[s:, s:])
    return top + m * m


# -------------------------------------------------------------------------- sweeps


@jit
def _outer(states, x, nodes, g, rows, mode):
    """Sets, adds to or subtracts from states the products of vectors and rows."""
    N, P = x.shape[2], rows.shape[1]
    for i in range(nodes.shape[0]):
        state, vector = pointer(states[i]), pointer(x[nodes[i], g])
        gemm(state, P, vector, 1, 1, pointer(rows[i]), P, N, P, 1, mode)


@jit
def _read(rows, x, nodes, g, states, mode):
    """Sets, adds to or subtracts from rows what vectors read from states."""
    N, P = x.shape[2], rows.shape[1]
    for i in range(nodes.shape[0]):
        row, vector = pointer(rows[i]), pointer(x[nodes[i], g])
        gemm(row, P, vector, N, 1, pointer(states[i]), P, 1, P, N, mode)


@jit
def _erase(states, nodes, task, operands):
    """Replaces states S by E S."""
    key = operands.key
    P = states.shape[1] // key.shape[2]
    row = task.spare[task.spare.shape[0] - P :].reshape(1, P)
    for i in range(nodes.shape[0]):
        node, state = nodes[i : i + 1], states[i : i + 1]
        _read(row, key, node, task.g, state, SET)
        for p in range(P):
            row[0, p] *= operands.beta[node[0], task.h]
        _outer(state, key, node, task.g, row, SUBTRACT)


@jit
def _move_leaf(leaf, first, rows, X, transposed, downward, task, nodes, operands):
    """A leaf's part of a sweep, see `_Leaf`."""
    key, g, n, m = operands.key, task.g, leaf.G.shape[0], rows.shape[0]
    P, own, below = X.shape[1] // key.shape[2], nodes.node[first:][:n], task.below[:m]
    X, writes = X[first - task.start :][:n], len(operands.value) > 0 and not transposed
    G = leaf.G.T[:n] if transposed else leaf.G[:, :n]
    B = leaf.B.T[:n] if transposed else leaf.B[:, :n]
    wide = task.spare[: 2 * X.size].reshape(2, n, X.shape[1])
    thin = task.spare[2 * X.size : 2 * X.size + 2 * n * P].reshape(2, n, P)
    S, F, v, u = wide[0], wide[1], thin[0], thin[1]
    if writes:  # then X is zero
        assign(S, X)
    else:
        matmul(S, G, X)
    if downward:
        if transposed:
            _erase(below, nodes.node[rows], task, operands)
        matmul(S, leaf.L.T[:n] if transposed else leaf.H[:, :m], below, ADD)
    _read(v, key, own, g, S, SET)
    if writes:
        for i in range(n):
            for p in range(P):
                v[i, p] -= operands.value[own[i], task.h, p]
    elif not transposed:
        _read(v, key, own, g, X, SUBTRACT)
    matmul(u, B, v)
    if downward:
        assign(X, S)
        _outer(F, key, own, g, u, SET)
        matmul(X, G, F, SUBTRACT)
        if transposed:
            _outer(X, key, own, g, u, ADD)
    else:
        assign(F, X)
        _outer(F, key, own, g, u, SUBTRACT)
        matmul(below, leaf.H.T[:m] if transposed else leaf.L[:, :n], F)
        if not transposed:
            _erase(below, nodes.node[rows], task, operands)


@jit
def _move(plan, panel, x, X, transposed, downward, task, operands):
    """A supernode's part of a sweep over the states X of a block."""
    nodes, N, start, size = plan.nodes, operands.key.shape[2], task.start, X.shape[1]
    a, s, rows = _sizes(nodes, x)
    m = rows.shape[0]
    if downward:
        for i in range(m):
            task.below[i] = X[rows[i] - start]
    if nodes.leaf[x]:
        leaf = _leaf(plan, panel, x)
        _move_leaf(leaf, a, rows, X, transposed, downward, task, nodes, operands)
    else:
        top, low, inverse = _panel(plan, panel, x, N)
        right, lower = top[:, s * N :], downward == transposed
        own = X[a - start : a - start + s].reshape(s * N, -1)
        below = task.below[:m].reshape(m * N, -1)
        if downward:
            matmul(own, low.T[: s * N] if transposed else right, below, SUBTRACT)
        sweep(top[:, : s * N], inverse, own, task.spare, lower, transposed)
        if not downward:
            matmul(below, right.T if transposed else low[:, : s * N], own)
    if not downward:
        sign = 1.0 if nodes.leaf[x] else -1.0
        for i in range(m):
            target, source = pointer(X[rows[i] - start]), pointer(task.below[i])
            add_multiple(target, sign, source, size)


@jit
def _sweep(plan, panel, X, transposed, downward, task, operands, stop):
    """Half of X <- M^-1 X (and what leaves write), or M^-T X, for a block's states."""
    first, last = plan.nodes.block_ptr[task.block], plan.nodes.block_ptr[task.block + 1]
    for x in range(first, last):
        if stopped(stop):
            return
        x = first + last - 1 - x if downward else x
        _move(plan, panel, x, X, transposed, downward, task, operands)


@jit
def _refine(plan, panel, X, given, transposed, task, operands, stop):
    """Corrects a solution by solving for residuals, as long as each correction is less
    than half of the last one; returns whether it is accurate.
    """
    query, key, value, beta, weight = operands
    nothing = Operands(query, key, value[:0], beta, weight)
    R, last = np.empty((2, *X.shape)), _largest(X)
    for _ in range(_MAX_CORRECTIONS):
        if stopped(stop):
            return True
        residual(R, X, given, transposed, plan, task, operands)
        _sweep(plan, panel, R[0], transposed, False, task, nothing, stop)
        _sweep(plan, panel, R[0], transposed, True, task, nothing, stop)
        found, correction = _largest(X), _largest(R[0])
        if not correction < last / 2:
            break
        add_multiple(pointer(X), 1.0, pointer(R), X.size)
        last = correction
        if last <= 1e-14 * found:
            break
    return not last > _MAX_ERROR * _largest(X)  # NaN passes


# --------------------------------------------------------------------------- tasks


@jit
def _task(index, plan, memory, operands):
    """The task of an index, with the memory of sweeps."""
    (_, heads, P), (_, groups, N) = operands.value.shape, operands.key.shape
    block, h = index // heads, index % heads
    start, end = plan.nodes.start[block], plan.nodes.start[block + 1]
    held, vectors, spare = plan.scratch[0], plan.scratch[1], plan.scratch[2]
    return _Task(
        block,
        h,
        h * groups // heads,
        start,
        np.empty(end - start, np.int64),
        memory[:held].reshape(-1, N * P),
        memory[held : held + vectors],
        memory[held + vectors : held + vectors + spare],
        np.zeros(2),
    )


@jit
def _forward_tasks(begin, end, stop, scratch, plan, operands, solved, out):
    query, key, value, beta, _ = operands
    nodes, (_, _, N, P) = plan.nodes, solved.states.shape
    memory = scratch[plan.scratch[:3].sum() :]
    for index in range(begin, end):
        task = _task(index, plan, scratch, operands)
        block, h, panel = task.block, task.h, solved.panels[task.h]
        own = nodes.node[task.start : nodes.start[block + 1]]
        X = solved.states[h, task.start : nodes.start[block + 1]].reshape(-1, N * P)
        row, top = task.vectors[:P].reshape(1, P), 0
        for i in range(own.shape[0]):
            for p in range(P):  # those of leaves are written with their panels
                kept = nodes.slot[task.start + i] >= 0
                row[0, p] = kept * beta[own[i], h] * value[own[i], h, p]
            _outer(X[i : i + 1], key, own[i : i + 1], task.g, row, SET)
        for x in range(nodes.block_ptr[block], nodes.block_ptr[block + 1]):
            if stopped(stop):
                return
            top = _factor(plan, panel, x, memory, top, task, operands, stop)
            _move(plan, panel, x, X, False, False, task, operands)
        _sweep(plan, panel, X, False, True, task, operands, stop)
        solved.growth[h, block] = task.growth[0]
        solved.wrong[h, block] = task.growth[1] > _MAX_GROWTH
        if task.growth[0] > solved.large:
            done = _refine(plan, panel, X, value, False, task, operands, stop)
            solved.wrong[h, block] |= not done
        for i in range(own.shape[0]):
            row = out[own[i], h : h + 1]
            _read(row, query, own[i : i + 1], task.g, X[i : i + 1], SET)


@jit
def _backward_tasks(begin, end, stop, scratch, plan, operands, solved, dy, d):
    query, key, value, beta, weight = operands
    nodes, (_, _, N, P) = plan.nodes, solved.states.shape
    size = N * P
    for index in range(begin, end):
        task = _task(index, plan, scratch, operands)
        block, h, start, panel = task.block, task.h, task.start, solved.panels[task.h]
        count, at = nodes.start[block + 1] - start, plan.scratch[:3].sum()
        Z = scratch[at : at + count * size].reshape(count, size)
        S = solved.states[h, start : start + count].reshape(count, size)
        for i in range(count):
            u = nodes.node[start + i : start + i + 1]
            _outer(Z[i : i + 1], query, u, task.g, dy[u[0], h : h + 1], SET)
        growth, given = solved.growth[h, block], _largest(Z)
        _sweep(plan, panel, Z, True, False, task, operands, stop)
        _sweep(plan, panel, Z, True, True, task, operands, stop)
        if max(growth * given, _largest(Z)) > solved.large * given:
            done = _refine(plan, panel, Z, dy, True, task, operands, stop)
            if not growth > solved.large:  # as otherwise they have been refined
                S = S.copy()
                done &= _refine(plan, panel, S, value, False, task, operands, stop)
            # Off cycles, adjoints may grow by large weights.
            lost = min(growth, _largest(Z) / given) > _MAX_GROWTH
            solved.wrong[h, block] = not done or lost
        if stopped(stop):
            return
        few = task.vectors
        X, e, g, bk = (
            few[:size],
            few[size : size + P],
            few[size + P :],
            few[size + 2 * P :],
        )
        for i in range(count):
            u = nodes.node[start + i]
            b, k = beta[u, h], pointer(key[u, task.g])
            Zi, Xi = pointer(Z[i]), pointer(X)
            edges = range(plan.edge_ptr[start + i], plan.edge_ptr[start + i + 1])
            X[:] = 0
            for y in edges:
                state = pointer(S[plan.source[y] - start])
                add_multiple(Xi, weight[plan.edge[y], h], state, size)
            for p in range(P):
                e[p] = value[u, h, p]
            gemm(pointer(e), P, k, N, 1, Xi, P, 1, P, N, SUBTRACT)
            gemm(pointer(g), P, k, N, 1, Zi, P, 1, P, N, SET)
            for p in range(P):
                d.value[u, h, p] = b * g[p]
            d.beta[u, h] = inner_product_of_rows(pointer(g), pointer(e), P)
            for a in range(N):
                bk[a] = b * k[a]
                out = pointer(dy[u, h])
                d.query[u, h, a] = inner_product_of_rows(pointer(S[i]) + a * P, out, P)
                wrote = inner_product_of_rows(Zi + a * P, pointer(e), P)
                read = inner_product_of_rows(Xi + a * P, pointer(g), P)
                d.key[u, h, a] = b * (wrote - read)
            gemm(Zi, P, pointer(bk), 1, 1, pointer(g), P, N, P, 1, SUBTRACT)
            for y in edges:
                state = pointer(S[plan.source[y] - start])
                d.weight[plan.edge[y], h] = inner_product_of_rows(Zi, state, size)
