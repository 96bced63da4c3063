r"""The state form on graphs with cycles, on the CPU: a sparse linear system of states.

With E_i = I - b_i k_i k_i^T, the states solve S_i - sum_j A_ij E_i S_j = b_i k_i v_i^T.
This matrix M has a block [N, N] for each edge. It is eliminated as I - A is by
`resolvent_mix`, supernode by supernode, where each node has N rows and columns. It
needs no pivoting: no E_i makes a state larger, and A is a contraction, so no principal
minor is zero (see `block_elimination`).

With the columns s of a supernode and the rows r below them, its *panel* holds M_ss =
B W with the rows W_sr beside it and the rows B_rs below it. Diagonal blocks are stored
as their inverses. A leaf of the tree, which are most nodes, is eliminated in mask form,
see `_Leaf`.

All is in float64: a state may hardly fade where keys do not read it, and what a node
writes is a small difference of large numbers.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.numba_runtime import arrays, jit, run, stopped
from pyg_chimera.ops.common.simd import (
    ADD,
    SET,
    SUBTRACT,
    gemm,
    pointer,
)
from pyg_chimera.ops.common.vector_kit import (
    LANES,
    add_multiple,
    inner_product_of_rows,
    matmul,
    set_identity,
)
from pyg_chimera.ops.recurrence.delta_scan.block_elimination import (
    SIDE,
    check_accuracy,
    invert,
)
from pyg_chimera.ops.recurrence.delta_scan.graph import DeltaGraph
from pyg_chimera.ops.structure.cache import table
from pyg_chimera.ops.structure.csr import sorted_rows
from pyg_chimera.ops.structure.supernodes import Merging, Supernodes, supernodes

__all__ = ["Plan", "backward", "forward"]

#: Smaller supernodes than those of numbers, as each pair of nodes has a block.
_MERGING = Merging(max_leaf=16, per_row=0, per_supernode=0)
#: Rounding errors of a leaf whose nodes reflect (beta > 1) may be magnified by so much.
_MAX_GROWTH = 1e10


class Plan(NamedTuple):
    """How a graph is eliminated; all arrays are int64."""

    nodes: Supernodes
    panel_ptr: np.ndarray  #: [S + 1], first number of the panel of each supernode
    edge_ptr: np.ndarray  #: [V + 1], first of the edges to each position in ...
    source: np.ndarray  #: [E], ... the positions of their sources ...
    edge: np.ndarray  #: [E], ... and their indices
    scratch: np.ndarray  #: [3], sizes of a task's states below, of what else it needs
    #: in sweeps, and of an update

    @classmethod
    def of(cls, graph: DeltaGraph, keys: int, channels: int) -> "Plan":
        """The plan for states [keys, channels], cached in the tables of the graph."""
        return table(cls._of, graph, torch.device("cpu"), keys, channels)

    @classmethod
    def _of(cls, graph: DeltaGraph, device: torch.device, N: int, P: int) -> "Plan":
        factor: Any = graph.factor
        nodes = supernodes(factor, _MERGING)
        s, m, leaf = nodes.widths, nodes.heights, nodes.leaf == 1
        size = np.where(leaf, 2 * s * (s + m), N**2 * s * (s + 2 * m))
        rows = sorted_rows(factor.edge_row, factor.edge_col, graph.num_nodes)
        n, few = (int(x[leaf].max(initial=0)) for x in (s, m))
        rows_below, t = int(m.max(initial=0)), int((s + m).max(initial=0))
        of_leaf = n * max(n + LANES + 3 * few * N, 2 * (N + 1) * P)
        spare = max(of_leaf, SIDE * (SIDE + t * N + P))
        return cls(
            nodes,
            np.append(0, np.cumsum(size)),
            rows.ptr,
            rows.col,
            factor.edge[rows.entry],
            np.array([rows_below * N * P, spare + P, (rows_below * N) ** 2]),
        )

    def work(self, keys: int) -> float:
        """The multiply-adds of an elimination."""
        s, m = (x.astype(float) for x in (self.nodes.widths, self.nodes.heights))
        fronts = keys**3 * (s * m * (s + m) + s**3 / 3)
        leaves = s * (2 * s**2 + keys * m * (s + keys * m))
        return float(np.where(self.nodes.leaf, leaves, fronts).sum())


class _Leaf(NamedTuple):
    """The panel of a leaf with the nodes s, and r below it: S_s = H S_r + G (k u).

    What its nodes write is u = B (v - k^T H S_r), as in `dense_masks`.
    """

    G: np.ndarray  #: [n, n], (I - A_ss)^-1
    B: np.ndarray  #: [n, n], (I + diag(b) ((G - I) * K K^T))^-1 diag(b)
    H: np.ndarray  #: [n, m], G A_sr
    L: np.ndarray  #: [m, n], A_rs G


class _Operands(NamedTuple):
    """The inputs, or their gradients; those of query and key have one row a head."""

    query: np.ndarray  #: [V, groups, N]
    key: np.ndarray  #: [V, groups, N]
    value: np.ndarray  #: [V, heads, P], or in the transposed system the grad of output
    beta: np.ndarray  #: [V, heads]
    weight: np.ndarray  #: [E, heads]


class _Solved(NamedTuple):
    """What the backward pass takes from the forward pass."""

    panels: np.ndarray  #: [heads, numbers]
    states: np.ndarray  #: [heads, V, N, P], by position

    @classmethod
    def of(cls, saved: np.ndarray, x: _Operands) -> "_Solved":
        """Views of what is saved."""
        (V, heads, P), N = x.value.shape, x.query.shape[2]
        states = saved[: heads * V * N * P].reshape(heads, V, N, P)
        return cls(saved[states.size :].reshape(heads, -1), states)


class _Task(NamedTuple):
    """A block and head, and its memory."""

    h: int
    g: int  #: the group of the head
    start: int  #: first position of the block
    place: np.ndarray  #: [nodes], rows of these in a front, int64
    X: np.ndarray  #: [nodes, N P], the states
    below: np.ndarray  #: the states below a supernode
    spare: np.ndarray
    growth: np.ndarray  #: [1], the largest entry of G times that of B of a leaf whose
    #: nodes reflect


def _costs(plan: Plan, x: _Operands) -> np.ndarray:
    nodes, (_, heads, P), N = plan.nodes, x.value.shape, x.query.shape[2]
    s, t = nodes.widths, nodes.widths + nodes.heights
    work = np.where(nodes.leaf, s * t * N * P, s * t * N**2 * (N * t + 2 * P))
    return np.repeat(nodes.by_block(0.04 * work + 300.0 * s), heads)


def _operands(call: Call) -> _Operands:
    return _Operands(*arrays(*(x.double() for x in call.inputs[:5])))


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P]; saves states and panels."""
    x = _operands(call)
    (V, heads, P), N = x.value.shape, x.query.shape[2]
    plan = Plan.of(call.structure, N, P)
    saved = np.empty(heads * (V * N * P + int(plan.panel_ptr[-1])))
    out, wrong = np.empty_like(x.value), np.zeros(heads * len(plan.nodes.slots), bool)
    if out.size:
        run(
            _forward_tasks,
            _costs(plan, x),
            int(plan.scratch.sum()) + int(plan.nodes.stack[0]) * N**2,
            out.dtype,
            *(plan, x, _Solved.of(saved, x), out, wrong),
        )
    check_accuracy(wrong.reshape(-1, heads)[call.structure.is_cyclic])
    dtype = call.inputs.value.dtype  # saved tensors are viewed as this dtype
    return torch.from_numpy(out).to(dtype), (torch.from_numpy(saved).view(dtype),)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta and edge weight.

    With the adjoints Z of states, X = A S, e = v - X^T k and g = Z^T k: dq = S dy,
    dk = b (Z e - X g), dv = b g, db = <g, e> and dA_ij = <E_i Z_i, S_j>.
    """
    x, (dy,) = _operands(call), arrays(grad.double())
    (V, heads, P), (_, groups, N) = x.value.shape, x.query.shape
    plan = Plan.of(call.structure, N, P)
    dq, dk = np.zeros((2, V, heads, N))
    d = _Operands(dq, dk, *(np.zeros_like(y) for y in x[2:]))
    n = int(np.diff(plan.nodes.start).max(initial=0))
    if x.value.size:
        run(
            _backward_tasks,
            _costs(plan, x),
            int(plan.scratch[:2].sum()) + (n * N + N + 2) * P + N,
            dq.dtype,
            *(plan, x, _Solved.of(saved[0].numpy().view(np.float64), x), dy, d),
        )
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
    """The panel of a supernode: its rows s, and the columns s of the rows below."""
    _, s, rows = _sizes(plan.nodes, x)
    s, m, at = s * N, rows.shape[0] * N, plan.panel_ptr[x]
    middle, end = at + s * (s + m), plan.panel_ptr[x + 1]
    return panel[at:middle].reshape(s, s + m), panel[middle:end].reshape(m, s)


@jit
def _leaf(plan, panel, x):
    """The panel of a leaf."""
    _, n, rows = _sizes(plan.nodes, x)
    m, at = rows.shape[0], plan.panel_ptr[x]
    squares = panel[at : at + 2 * n * n].reshape(2, n, n)
    at += 2 * n * n
    H, L = panel[at : at + n * m], panel[at + n * m : at + 2 * n * m]
    return _Leaf(squares[0], squares[1], H.reshape(n, m), L.reshape(m, n))


@jit
def _entry(top, low, update, i, j):
    """The address of an entry of a front, and the numbers in its row."""
    s = top.shape[0]
    if i < s:
        return pointer(top) + (i * top.shape[1] + j), top.shape[1]
    if j < s:
        return pointer(low) + ((i - s) * s + j), s
    m = update.shape[1]
    return pointer(update) + ((i - s) * m + (j - s)), m


@jit
def _subtract_block(at, step, w, b, k, N):
    """Subtracts w (I - b k k^T)."""
    for a in range(N):
        add_multiple(at + a * step, w * b * k[a], k, N)
        at[a * step + a] -= w


@jit
def _assemble(top, low, update, x, task, nodes, operands):
    """Adds the supernode's own edges to its front."""
    _, key, _, beta, weight = operands
    N, h, start, place = key.shape[2], task.h, task.start, task.place
    for i in range(top.shape[0]):
        top[i, i] = 1
    for y in range(nodes.edge_ptr[x], nodes.edge_ptr[x + 1]):
        u, w = nodes.node[nodes.edge_row[y]], weight[nodes.edge[y], h]
        i, j = place[nodes.edge_row[y] - start], place[nodes.edge_col[y] - start]
        at, step = _entry(top, low, update, i * N, j * N)
        k = pointer(key) + (u * key.shape[1] + task.g) * N
        _subtract_block(at, step, w, beta[u, h], k, N)


@jit
def _add_update(top, low, update, child, rows, task, N):
    """Adds a child's update to a front."""
    c, s, place = rows.shape[0], top.shape[0] // N, task.place[rows - task.start]
    for i in range(c):
        j = 0
        while j < c:
            first, end = place[j], j + 1
            while end < c and place[end] == first + end - j != s:
                end += 1
            at, step = _entry(top, low, update, place[i] * N, first * N)
            for p in range(N):
                add_multiple(
                    at + p * step, 1.0, child + ((i * N + p) * c + j) * N, (end - j) * N
                )
            j = end


@jit
def _eliminate(top, low, update, spare):
    """Factors a front, of which the rest becomes the update."""
    s = top.shape[0]
    D = spare[: SIDE * SIDE].reshape(SIDE, SIDE)
    for a in range(0, s, SIDE):
        b = min(a + SIDE, s)
        n, right = b - a, top[a:b, b:]
        D[:n, :n] = top[a:b, a:b]
        D[:n, n:] = 0
        invert(D, n)
        top[a:b, a:b] = D[:n, :n]
        moved = spare[SIDE * SIDE : SIDE * SIDE + right.size].reshape(right.shape)
        moved[:] = right
        matmul(right, D[:n, :n], moved)
        matmul(top[b:, b:], top[b:, a:b], right, SUBTRACT)
        matmul(low[:, b:], low[:, a:b], top[a:b, b:s], SUBTRACT)
    matmul(update, low, top[:, s:], SUBTRACT)


@jit
def _eliminate_leaf(leaf, update, x, task, nodes, operands):
    """Computes the panel of a leaf, and its update -E_r (A_rs H - L k B k^T H)."""
    _, key, _, beta, weight = operands
    h, g, start, place, N = task.h, task.g, task.start, task.place, key.shape[2]
    first, n, rows = _sizes(nodes, x)
    own, m, (G, B, H, L) = nodes.node[first : first + n], rows.shape[0], leaf
    step, at_key = (n + LANES - 1) // LANES * LANES, pointer(key) + g * N
    D = task.spare[: n * step].reshape(n, step)
    edges = range(nodes.edge_ptr[x], nodes.edge_ptr[x + 1])
    set_identity(D)
    for y in edges:
        i, j = place[nodes.edge_row[y] - start], place[nodes.edge_col[y] - start]
        if i < n and j < n:
            D[i, j] -= weight[nodes.edge[y], h]
    invert(D, n)
    G[:] = D[:, :n]
    for i in range(n):
        k = at_key + own[i] * key.shape[1] * N
        for j in range(n):
            overlap = inner_product_of_rows(k, at_key + own[j] * key.shape[1] * N, N)
            D[i, j] = (i == j) + beta[own[i], h] * (G[i, j] - (i == j)) * overlap
    invert(D, n)
    for j in range(n):
        for i in range(n):
            B[i, j] = D[i, j] * beta[own[j], h]
    reflects = False
    for i in range(n):
        reflects |= beta[own[i], h] > 1
    if reflects:
        task.growth[0] = max(task.growth[0], np.abs(G).max() * np.abs(B).max())
    if m == 0:
        return
    H[:], L[:] = 0, 0
    for y in edges:
        i, j = place[nodes.edge_row[y] - start], place[nodes.edge_col[y] - start]
        w = weight[nodes.edge[y], h]
        if j >= n:
            for c in range(n):
                H[c, j - n] += w * G[c, i]
        elif i >= n:
            add_multiple(pointer(L) + (i - n) * n, w, pointer(G) + j * n, n)
    parts = task.spare[n * step : n * (step + 3 * m * N)].reshape(3, n * m * N)
    read, written, left = (
        parts[0].reshape(n, m * N),
        parts[1].reshape(n, m * N),
        parts[2],
    )
    left = left.reshape(m * N, n)
    for j in range(n):
        k = key[own[j], g]
        for r in range(m):
            u = nodes.node[rows[r]]
            other, b = key[u, g], beta[u, h]
            erased = b * inner_product_of_rows(pointer(k), pointer(other), N)
            for a in range(N):
                read[j, r * N + a] = H[j, r] * k[a]
                left[r * N + a, j] = L[r, j] * (k[a] - erased * other[a])
    matmul(written, B, read)
    matmul(update, left, written)
    for y in edges:
        i, j = place[nodes.edge_row[y] - start], place[nodes.edge_col[y] - start]
        if i >= n:
            u, w = nodes.node[nodes.edge_row[y]], weight[nodes.edge[y], h]
            k, to = at_key + u * key.shape[1] * N, pointer(update) + (i - n) * N * m * N
            for r in range(m):
                _subtract_block(to + r * N, m * N, w * H[j, r], beta[u, h], k, N)


@jit
def _factor(plan, panel, x, update, stack, top_of_stack, task, operands):
    """Computes the panel of a supernode; returns the new top of the stack."""
    nodes, N = plan.nodes, operands.key.shape[2]
    a, s, rows = _sizes(nodes, x)
    for i in range(s):
        task.place[a - task.start + i] = i
    for i in range(rows.shape[0]):
        task.place[rows[i] - task.start] = s + i
    update[:] = 0
    if nodes.leaf[x]:
        leaf = _leaf(plan, panel, x)
        _eliminate_leaf(leaf, update, x, task, nodes, operands)
    else:
        top, low = _panel(plan, panel, x, N)
        top[:], low[:] = 0, 0
        _assemble(top, low, update, x, task, nodes, operands)
        y = x - 1
        while y > x - nodes.subtree[x]:  # its children; the last one is on top
            _, _, shared = _sizes(nodes, y)
            top_of_stack -= (shared.shape[0] * N) ** 2
            child = pointer(stack) + top_of_stack
            _add_update(top, low, update, child, shared, task, N)
            y -= nodes.subtree[y]
        _eliminate(top, low, update, task.spare)
    stack[top_of_stack : top_of_stack + update.size] = update.ravel()
    return top_of_stack + update.size


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
    _, key, _, beta, _ = operands
    P = states.shape[1] // key.shape[2]
    row = task.spare[task.spare.shape[0] - P :].reshape(1, P)
    for i in range(nodes.shape[0]):
        node, state = nodes[i : i + 1], states[i : i + 1]
        _read(row, key, node, task.g, state, SET)
        for p in range(P):
            row[0, p] *= beta[node[0], task.h]
        _outer(state, key, node, task.g, row, SUBTRACT)


@jit
def _move_leaf(leaf, x, transposed, downward, task, nodes, operands, given):
    """A leaf's part of a sweep, for the values or the gradients of the output."""
    query, key = operands.query, operands.key
    N, P, g, (G, B, H, L) = key.shape[2], given.shape[2], task.g, leaf
    first, n, rows = _sizes(nodes, x)
    own, below = nodes.node[first : first + n], task.below[: rows.shape[0]]
    at = first - task.start
    X = task.X[at : at + n]
    wide = task.spare[: 2 * n * N * P].reshape(2, n, N * P)
    thin = task.spare[2 * n * N * P : 2 * n * (N + 1) * P].reshape(2, n, P)
    F, R, v, u = wide[0], wide[1], thin[0], thin[1]
    for i in range(n):
        v[i] = given[own[i], task.h]
    if transposed:
        _outer(F, query, own, g, v, SET)
        matmul(R, G.T, F)
        if downward:
            _erase(below, nodes.node[rows], task, operands)
            matmul(R, L.T, below, ADD)
        _read(v, key, own, g, R, SET)
        matmul(u, B.T, v)
        if downward:
            X[:] = R
            _outer(F, key, own, g, u, SET)
            matmul(X, G.T, F, SUBTRACT)
            _outer(X, key, own, g, u, ADD)
        else:
            _outer(F, key, own, g, u, SUBTRACT)
            matmul(below, H.T, F)
        return
    if downward:
        matmul(X, H, below)
        _read(v, key, own, g, X, SUBTRACT)
    matmul(u, B, v)
    _outer(F, key, own, g, u, SET)
    if downward:
        matmul(X, G, F, ADD)
    else:
        matmul(below, L, F)
        _erase(below, nodes.node[rows], task, operands)


@jit
def _move_panel(top, low, transposed, downward, X, below, spare):
    """A supernode's part of a sweep: that of B^-1 or, downward, of W^-1; in the
    transposed system that of W^-T or, downward, of B^-T.
    """
    s, P = X.shape
    inner = top.T[:s] if transposed else top[:, :s]
    if downward:
        matmul(X, low.T if transposed else top[:, s:], below, SUBTRACT)
    count = (s + SIDE - 1) // SIDE
    for step in range(count):
        a = (count - 1 - step if downward else step) * SIDE
        b = min(a + SIDE, s)
        if downward:
            matmul(X[a:b], inner[a:b, b:], X[b:], SUBTRACT)
        if downward == transposed:
            moved = spare[: (b - a) * P].reshape(b - a, P)
            moved[:] = X[a:b]
            matmul(X[a:b], inner[a:b, a:b], moved)
        if not downward:
            matmul(X[b:], inner[b:, a:b], X[a:b], SUBTRACT)
    if not downward:
        matmul(below, top[:, s:].T if transposed else low, X)


@jit
def _move(plan, panel, x, transposed, downward, task, operands, given):
    """A supernode's part of a sweep."""
    nodes, N, P, X = plan.nodes, operands.key.shape[2], given.shape[2], task.X
    a, s, rows = _sizes(nodes, x)
    a, m, start = a - task.start, rows.shape[0], task.start
    if downward:
        for i in range(m):
            task.below[i] = X[rows[i] - start]
    if nodes.leaf[x]:
        leaf = _leaf(plan, panel, x)
        _move_leaf(leaf, x, transposed, downward, task, nodes, operands, given)
    else:
        top, low = _panel(plan, panel, x, N)
        own, below = X[a : a + s].reshape(-1, P), task.below[:m].reshape(-1, P)
        _move_panel(top, low, transposed, downward, own, below, task.spare)
    if not downward:
        sign = 1.0 if nodes.leaf[x] else -1.0
        for i in range(m):
            target, size = pointer(X[rows[i] - start]), X.shape[1]
            add_multiple(target, sign, pointer(task.below[i]), size)


# --------------------------------------------------------------------------- tasks


@jit
def _task(index, plan, states, memory, operands):
    """The task of an index, with its states and the memory of sweeps."""
    nodes, heads, groups = plan.nodes, operands.beta.shape[1], operands.key.shape[1]
    block, h = index // heads, index % heads
    start, size, held = nodes.start[block], states.shape[1], plan.scratch[0]
    return _Task(
        h,
        h * groups // heads,
        start,
        np.empty(nodes.start[block + 1] - start, np.int64),
        states[: nodes.start[block + 1] - start],
        memory[:held].reshape(-1, size),
        memory[held : held + plan.scratch[1]],
        np.zeros(1),
    )


@jit
def _forward_tasks(begin, end, stop, scratch, plan, operands, solved, out, wrong):
    query, key, value, beta, _ = operands
    nodes, (heads, _, N, P) = plan.nodes, solved.states.shape
    memory, rest = scratch[: plan.scratch[:2].sum()], scratch[plan.scratch[:2].sum() :]
    update, stack = rest[: plan.scratch[2]], rest[plan.scratch[2] :]
    for index in range(begin, end):
        block, h = index // heads, index % heads
        states = solved.states[h, nodes.start[block] :].reshape(-1, N * P)
        task = _task(index, plan, states, memory, operands)
        panel, own = solved.panels[h], nodes.node[task.start : task.start + len(task.X)]
        first, last = nodes.block_ptr[block], nodes.block_ptr[block + 1]
        row = task.spare[:P].reshape(1, P)
        for i in range(own.shape[0]):
            for p in range(P):
                row[0, p] = beta[own[i], h] * value[own[i], h, p]
            _outer(task.X[i : i + 1], key, own[i : i + 1], task.g, row, SET)
        top = 0
        for x in range(first, last):
            if stopped(stop):
                return
            m = (nodes.row_ptr[x + 1] - nodes.row_ptr[x]) * N
            front = update[: m * m].reshape(m, m)
            top = _factor(plan, panel, x, front, stack, top, task, operands)
            _move(plan, panel, x, False, False, task, operands, value)
        wrong[index] = task.growth[0] > _MAX_GROWTH
        for x in range(last - 1, first - 1, -1):
            if stopped(stop):
                return
            _move(plan, panel, x, False, True, task, operands, value)
        for i in range(own.shape[0]):
            row = out[own[i], h : h + 1]
            _read(row, query, own[i : i + 1], task.g, task.X[i : i + 1], SET)


@jit
def _backward_tasks(begin, end, stop, scratch, plan, operands, solved, dy, d):
    query, key, value, beta, weight = operands
    nodes, (heads, _, N, P) = plan.nodes, solved.states.shape
    size, held = N * P, plan.scratch[:2].sum()
    memory, few, rest = (
        scratch[:held],
        scratch[held:],
        scratch[held + (N + 2) * P + N :],
    )
    X, e, g, bk = few[:size], few[size : size + P], few[size + P :], few[size + 2 * P :]
    Z = rest[: rest.shape[0] // size * size].reshape(-1, size)
    for index in range(begin, end):
        block, h = index // heads, index % heads
        task = _task(index, plan, Z, memory, operands)
        start, panel, count = task.start, solved.panels[h], task.X.shape[0]
        first, last = nodes.block_ptr[block], nodes.block_ptr[block + 1]
        for i in range(count):
            u = nodes.node[start + i : start + i + 1]
            _outer(task.X[i : i + 1], query, u, task.g, dy[u[0], h : h + 1], SET)
        for x in range(first, last):
            if stopped(stop):
                return
            _move(plan, panel, x, True, False, task, operands, dy)
        for x in range(last - 1, first - 1, -1):
            if stopped(stop):
                return
            _move(plan, panel, x, True, True, task, operands, dy)
        states = pointer(solved.states) + h * solved.states[0].size
        for i in range(count):
            u = nodes.node[start + i]
            b, k = beta[u, h], pointer(key) + (u * key.shape[1] + task.g) * N
            Zi, S, Xi = pointer(Z) + i * size, states + (start + i) * size, pointer(X)
            edges = range(plan.edge_ptr[start + i], plan.edge_ptr[start + i + 1])
            X[:] = 0
            for y in edges:
                add_multiple(
                    Xi, weight[plan.edge[y], h], states + plan.source[y] * size, size
                )
            for p in range(P):
                e[p] = value[u, h, p]
            gemm(pointer(e), P, k, N, 1, Xi, P, 1, P, N, SUBTRACT)
            gemm(pointer(g), P, k, N, 1, Zi, P, 1, P, N, SET)
            for p in range(P):
                d.value[u, h, p] = b * g[p]
            d.beta[u, h] = inner_product_of_rows(pointer(g), pointer(e), P)
            for a in range(N):
                bk[a] = b * k[a]
                out = pointer(dy) + (u * heads + h) * P
                d.query[u, h, a] = inner_product_of_rows(S + a * P, out, P)
                wrote = inner_product_of_rows(Zi + a * P, pointer(e), P)
                read = inner_product_of_rows(Xi + a * P, pointer(g), P)
                d.key[u, h, a] = b * (wrote - read)
            gemm(Zi, P, pointer(bk), 1, 1, pointer(g), P, N, P, 1, SUBTRACT)
            for y in edges:
                state = states + plan.source[y] * size
                d.weight[plan.edge[y], h] = inner_product_of_rows(Zi, state, size)
