"""The sparse solver on the CPU: jitted tiles, one task per (block, head, slice).

A task's states fit in a core's cache, tasks don't talk to each other, and the states
[V, heads, N, P] are never written out. Kernels are compiled without numba's parallel
regions: they release the GIL and run on plain Python threads (as many as
`torch.get_num_threads()`), which is safe after a fork and from several threads.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from pyg_chimera.ops.structure.system import System

# Sums may be reordered (to use vector units), but NaN and infinity must survive.
_jit = njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz", "arcp"})

#: Bytes of states that a task may hold at a time: half of a usual L2 cache.
_TILE_BYTES = 1 << 19
#: Bytes of resolvents that are made at a time.
_MASK_BYTES = 1 << 23


class Factors(NamedTuple):
    """I - A = L U in the precision of the computation, [heads, V or F]."""

    diagonal: np.ndarray  #: reciprocal of the diagonal of U
    lower: np.ndarray  #: L below its unit diagonal
    upper: np.ndarray  #: U above its diagonal, transposed: entry x is U[j, i]


# --------------------------------------------------------------------------- threads


class _Pool:
    """Threads that outlive a call, made anew in a forked child."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.key: tuple[int, int] | None = None
        self.executor: ThreadPoolExecutor | None = None

    def get(self, num_threads: int) -> ThreadPoolExecutor:
        key = (os.getpid(), num_threads)
        with self.lock:
            if self.executor is None or self.key != key:
                self.executor = ThreadPoolExecutor(num_threads, "pyg_chimera")
                self.key = key
            return self.executor


_POOL = _Pool()


def _run(kernel: Callable, costs: np.ndarray, *args: object) -> None:
    """Run `kernel(first, last, *args)` over all tasks, about `costs` each."""
    num_tasks = costs.shape[0]
    num_threads = min(torch.get_num_threads(), num_tasks)
    total = float(costs.sum())
    if num_threads <= 1 or total < 1e5:  # not worth waking anybody
        kernel(0, num_tasks, *args)
        return
    # Several ranges a thread, taken as threads come free, even out what is left.
    shares = np.linspace(0, total, 4 * num_threads + 1)[1:-1]
    cuts = np.searchsorted(np.cumsum(costs), shares)
    bounds = np.unique(np.concatenate([[0], cuts, [num_tasks]]))
    ranges = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    lock = Lock()

    def work(ranges: Iterator[tuple[int, int]] = ranges) -> None:
        while True:
            with lock:
                bound = next(ranges, None)
            if bound is None:
                return
            kernel(*bound, *args)

    futures = [_POOL.get(num_threads).submit(work) for _ in range(num_threads)]
    for future in futures:
        future.result()


# --------------------------------------------------------------------- factorisation


def factorize(system: System, edge_weight: Tensor) -> tuple[Factors, float]:
    """Factor I - A without pivoting, in float64.

    Returns the factors in the precision of the weights, and the growth: the largest
    row sum of |L| |U| over that of |I - A|. Rounding errors are at most about this
    much larger than those of a solver that pivots.
    """
    num_heads = edge_weight.size(1)
    num_nodes, num_entries = system.num_nodes, system.num_entries
    values = np.zeros((num_heads, num_nodes + 2 * num_entries))
    values[:, :num_nodes] = 1.0
    _scatter(values, system.slot, edge_weight.contiguous().numpy())
    diagonal = values[:, :num_nodes]
    lower = values[:, num_nodes : num_nodes + num_entries]
    upper = values[:, num_nodes + num_entries :]
    growth = 1.0
    if not system.triangular:
        growths = np.ones((system.sizes.shape[0], num_heads))
        costs = np.repeat(np.diff(system.lower_ptr[system.ptr]) * 50.0, num_heads)
        _run(
            _factor,
            costs,
            system.ptr,
            system.lower_ptr,
            system.lower_col,
            system.upper_ptr,
            system.upper_row,
            system.upper_entry,
            diagonal,
            lower,
            upper,
            growths,
        )
        growth = float(growths.max(initial=1.0))
    dtype = np.float32 if edge_weight.dtype == torch.float32 else np.float64
    with np.errstate(divide="ignore"):
        factors = Factors(
            (1.0 / diagonal).astype(dtype), lower.astype(dtype), upper.astype(dtype)
        )
    return factors, growth


@_jit
def _scatter(values, slot, weight):  # type: ignore[no-untyped-def]
    for e in range(slot.shape[0]):
        for h in range(weight.shape[1]):
            values[h, slot[e]] -= weight[e, h]


@_jit
def _factor(  # type: ignore[no-untyped-def]
    first, last, ptr, lower_ptr, lower_col, upper_ptr, upper_row, upper_entry,
    diagonal, lower, upper, growths,
):  # fmt: skip
    num_heads = diagonal.shape[0]
    for task in range(first, last):
        block, h = task // num_heads, task % num_heads
        s, n = ptr[block], ptr[block + 1] - ptr[block]
        work = np.zeros(n)
        u_sum = np.zeros(n)
        norm, grown = 1.0, 1.0
        for i in range(s, s + n):
            row_sum = abs(diagonal[h, i])
            work[i - s] = diagonal[h, i]
            for x in range(lower_ptr[i], lower_ptr[i + 1]):
                work[lower_col[x] - s] = lower[h, x]
                row_sum += abs(lower[h, x])
            for x in range(upper_ptr[i], upper_ptr[i + 1]):
                work[upper_row[x] - s] = upper[h, upper_entry[x]]
                row_sum += abs(upper[h, upper_entry[x]])
            norm = max(norm, row_sum)
            # Fill-in holds every place that an earlier row can reach from here.
            total = 0.0
            for x in range(lower_ptr[i], lower_ptr[i + 1]):
                k = lower_col[x]
                pivot = diagonal[h, k]
                if pivot == 0.0:
                    continue
                factor = work[k - s] / pivot
                lower[h, x] = factor
                total += abs(factor) * u_sum[k - s]
                for y in range(upper_ptr[k], upper_ptr[k + 1]):
                    work[upper_row[y] - s] -= factor * upper[h, upper_entry[y]]
            diagonal[h, i] = work[i - s]
            u_sum[i - s] = abs(work[i - s])
            for x in range(upper_ptr[i], upper_ptr[i + 1]):
                upper[h, upper_entry[x]] = work[upper_row[x] - s]
                u_sum[i - s] += abs(work[upper_row[x] - s])
            grown = max(grown, total + u_sum[i - s])
            if work[i - s] == 0.0 or not np.isfinite(work[i - s]):
                grown = np.inf
        growths[block, h] = grown / norm


# ------------------------------------------------------------------------ state form


class _Slices(NamedTuple):
    """How a task's states [N, P] are cut: `width` value channels a task, ..."""

    width: int
    pieces: int
    rows: int  #: ... `rows` state channels at a time


def _slices(system: System, query: np.ndarray, value: np.ndarray) -> _Slices:
    num_states, (_, num_heads, num_channels) = query.shape[2], value.shape
    tasks = system.sizes.shape[0] * num_heads
    width = min(16, num_channels)
    # Slices of one (block, head) are summed at the end, so cut only to feed threads.
    pieces = -(-num_channels // width)
    count = pieces if tasks < 4 * torch.get_num_threads() else 1
    lanes = _TILE_BYTES // (
        max(1, int(system.sizes.max(initial=1))) * width * value.itemsize
    )
    return _Slices(width, max(1, count), min(max(1, lanes), max(1, num_states)))


def _costs(system: System, num_heads: int, count: int, states: int) -> np.ndarray:
    entries = np.diff(system.lower_ptr[system.ptr])
    work = (2.0 * entries + 3.0 * system.sizes) * states / count
    return np.repeat(work, num_heads * count)


def state_forward(
    system: System, factors: Factors, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """The output [V, heads, P] from states H = (I - A)^-1 (k v^T), y = H^T q."""
    q, k, v = (x.contiguous().numpy() for x in (query, key, value))
    cut = _slices(system, q, v)
    out = np.empty_like(v)
    _run(
        _state_forward,
        _costs(system, v.shape[1], cut.pieces, q.shape[2] * v.shape[2]),
        *_pattern(system),
        *factors,
        q,
        k,
        v,
        out,
        *cut,
    )
    return torch.from_numpy(out)


def state_backward(
    system: System,
    factors: Factors,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key [V, groups, N], value and edge weight [E, heads].

    With G = (I - A)^-T (q dy^T): dq_i = H_i dy_i, dk_i = G_i v_i, dv_i = G_i^T k_i and
    dA_ij = <G_i, H_j>. H is computed anew beside G, tile by tile.
    """
    q, k, v, dy = (x.contiguous().numpy() for x in (query, key, value, grad))
    cut = _slices(system, q, v)
    num_nodes, num_heads, num_channels = v.shape
    groups, num_states = q.shape[1:]
    # Slices and the heads of a group write to parts of their own, summed below.
    dq = np.empty((cut.pieces, num_nodes, num_heads, num_states), v.dtype)
    dk = np.empty_like(dq)
    dv = np.empty_like(v)
    dw = np.zeros((cut.pieces, system.edge.shape[0], num_heads), v.dtype)
    _run(
        _state_backward,
        _costs(system, num_heads, cut.pieces, 3 * num_states * num_channels),
        *_pattern(system),
        system.edge_ptr,
        system.edge,
        system.edge_row,
        system.edge_col,
        *factors,
        q,
        k,
        v,
        dy,
        dq,
        dk,
        dv,
        dw,
        *cut,
    )
    shape = (cut.pieces, num_nodes, groups, num_heads // groups, num_states)
    query_grad, key_grad = (
        torch.from_numpy(x).view(shape).sum((0, 3)) for x in (dq, dk)
    )
    return query_grad, key_grad, torch.from_numpy(dv), torch.from_numpy(dw).sum(0)


def _pattern(system: System) -> tuple:
    return (
        system.triangular,
        system.ptr,
        system.node,
        system.lower_ptr,
        system.lower_col,
        np.arange(system.num_entries),
        system.upper_ptr,
        system.upper_row,
        system.upper_entry,
    )


@_jit
def _outer(row, left, right, a0, a1, p0, p1):  # type: ignore[no-untyped-def]
    w = p1 - p0
    for a in range(a0, a1):
        x = left[a]
        for p in range(w):
            row[(a - a0) * w + p] = x * right[p0 + p]


@_jit
def _gather(states, i, begin, stop, index, entry, values, s, lanes):  # type: ignore[no-untyped-def]
    """states[i] -= sum over entries of their value times the state they point to."""
    row = states[i]
    x = begin
    while x + 3 < stop:  # four at a time: a quarter of the loads and stores of `row`
        r0, r1 = states[index[x] - s], states[index[x + 1] - s]
        r2, r3 = states[index[x + 2] - s], states[index[x + 3] - s]
        c0, c1 = values[entry[x]], values[entry[x + 1]]
        c2, c3 = values[entry[x + 2]], values[entry[x + 3]]
        for w in range(lanes):
            row[w] -= c0 * r0[w] + c1 * r1[w] + c2 * r2[w] + c3 * r3[w]
        x += 4
    while x < stop:
        r0 = states[index[x] - s]
        c0 = values[entry[x]]
        for w in range(lanes):
            row[w] -= c0 * r0[w]
        x += 1


@_jit
def _state_forward(  # type: ignore[no-untyped-def]
    first, last, triangular, ptr, node, lower_ptr, lower_col, lower_entry,
    upper_ptr, upper_row, upper_entry, diagonal, lower, upper, query, key, value,
    out, width, count, rows,
):  # fmt: skip
    num_heads, num_channels = value.shape[1], value.shape[2]
    num_states = query.shape[2]
    per_group = num_heads // query.shape[1]
    longest = 0
    for task in range(first, last):
        block = task // (num_heads * count)
        longest = max(longest, ptr[block + 1] - ptr[block])
    scratch = np.empty((longest, rows * width), value.dtype)
    for task in range(first, last):
        block, h, piece = (
            task // (num_heads * count), (task // count) % num_heads, task % count,
        )  # fmt: skip
        g = h // per_group
        s, n = ptr[block], ptr[block + 1] - ptr[block]
        for i in range(s, s + n):
            for p in range(piece * width, num_channels, count * width):
                for c in range(p, min(p + width, num_channels)):
                    out[node[i], h, c] = 0
        for p0 in range(piece * width, num_channels, count * width):
            p1 = min(p0 + width, num_channels)
            for a0 in range(0, num_states, rows):
                a1 = min(a0 + rows, num_states)
                lanes = (a1 - a0) * (p1 - p0)
                for i in range(n):
                    v = node[s + i]
                    _outer(scratch[i], key[v, g], value[v, h], a0, a1, p0, p1)
                    _gather(
                        scratch, i, lower_ptr[s + i], lower_ptr[s + i + 1], lower_col,
                        lower_entry, lower[h], s, lanes,
                    )  # fmt: skip
                for i in range(n - 1, -1, -1):
                    v = node[s + i]
                    state = scratch[i]
                    if not triangular:
                        _gather(
                            scratch, i, upper_ptr[s + i], upper_ptr[s + i + 1],
                            upper_row, upper_entry, upper[h], s, lanes,
                        )  # fmt: skip
                        r = diagonal[h, s + i]
                        for w in range(lanes):
                            state[w] *= r
                    w = p1 - p0
                    for a in range(a0, a1):
                        q = query[v, g, a]
                        for p in range(w):
                            out[v, h, p0 + p] += q * state[(a - a0) * w + p]


@_jit
def _state_backward(  # type: ignore[no-untyped-def]
    first, last, triangular, ptr, node, lower_ptr, lower_col, lower_entry,
    upper_ptr, upper_row, upper_entry, edge_ptr, edge, edge_row, edge_col, diagonal,
    lower, upper, query, key, value, grad, grad_query, grad_key, grad_value,
    grad_weight, width, count, rows,
):  # fmt: skip
    num_heads, num_channels = value.shape[1], value.shape[2]
    num_states = query.shape[2]
    per_group = num_heads // query.shape[1]
    longest = 0
    for task in range(first, last):
        block = task // (num_heads * count)
        longest = max(longest, ptr[block + 1] - ptr[block])
    states = np.empty((longest, rows * width), value.dtype)
    adjoints = np.empty((longest, rows * width), value.dtype)
    for task in range(first, last):
        block, h, piece = (
            task // (num_heads * count), (task // count) % num_heads, task % count,
        )  # fmt: skip
        g = h // per_group
        s, n = ptr[block], ptr[block + 1] - ptr[block]
        for i in range(s, s + n):
            v = node[i]
            for a in range(num_states):
                grad_query[piece, v, h, a] = 0
                grad_key[piece, v, h, a] = 0
            for p in range(piece * width, num_channels, count * width):
                for c in range(p, min(p + width, num_channels)):
                    grad_value[v, h, c] = 0
        for p0 in range(piece * width, num_channels, count * width):
            p1 = min(p0 + width, num_channels)
            for a0 in range(0, num_states, rows):
                a1 = min(a0 + rows, num_states)
                lanes = (a1 - a0) * (p1 - p0)
                # L z = k v^T, and U^T z = q dy^T, which has U's entries by row.
                for i in range(n):
                    v = node[s + i]
                    _outer(states[i], key[v, g], value[v, h], a0, a1, p0, p1)
                    _outer(adjoints[i], query[v, g], grad[v, h], a0, a1, p0, p1)
                    _gather(
                        states, i, lower_ptr[s + i], lower_ptr[s + i + 1], lower_col,
                        lower_entry, lower[h], s, lanes,
                    )  # fmt: skip
                    if not triangular:
                        _gather(
                            adjoints, i, lower_ptr[s + i], lower_ptr[s + i + 1],
                            lower_col, lower_entry, upper[h], s, lanes,
                        )  # fmt: skip
                        adjoint = adjoints[i]
                        r = diagonal[h, s + i]
                        for w in range(lanes):
                            adjoint[w] *= r
                # U H = z, and L^T G = z.
                for i in range(n - 1, -1, -1):
                    v = node[s + i]
                    state, adjoint = states[i], adjoints[i]
                    if not triangular:
                        _gather(
                            states, i, upper_ptr[s + i], upper_ptr[s + i + 1],
                            upper_row, upper_entry, upper[h], s, lanes,
                        )  # fmt: skip
                        r = diagonal[h, s + i]
                        for w in range(lanes):
                            state[w] *= r
                    _gather(
                        adjoints, i, upper_ptr[s + i], upper_ptr[s + i + 1], upper_row,
                        upper_entry, lower[h], s, lanes,
                    )  # fmt: skip
                    w = p1 - p0
                    for a in range(a0, a1):
                        k = key[v, g, a]
                        dq = grad_query[piece, v, h, a]
                        dk = grad_key[piece, v, h, a]
                        for p in range(w):
                            x = adjoint[(a - a0) * w + p]
                            dq += state[(a - a0) * w + p] * grad[v, h, p0 + p]
                            dk += x * value[v, h, p0 + p]
                            grad_value[v, h, p0 + p] += k * x
                        grad_query[piece, v, h, a] = dq
                        grad_key[piece, v, h, a] = dk
                for x in range(edge_ptr[block], edge_ptr[block + 1]):
                    adjoint = adjoints[edge_row[x] - s]
                    state = states[edge_col[x] - s]
                    total = grad_weight[piece, edge[x], h]
                    for w in range(lanes):
                        total += adjoint[w] * state[w]
                    grad_weight[piece, edge[x], h] = total


# ------------------------------------------------------------------------- mask form


def mask_forward(
    system: System, factors: Factors, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """The output (L * Q K^T) V, block by block."""
    out = torch.empty_like(value)
    q, k, v = (_by_block(system, x) for x in (query, key, value))
    y = _split(system, out)
    per_group = len(v) // len(q)
    for batch in _mask_batches(system, factors):
        batch.solve()
        for b, L in batch.blocks(batch.masks):
            for h in range(len(v)):
                g = h // per_group
                if h % per_group == 0:
                    scores = q[g][b] @ k[g][b].t()
                torch.mm(L[h].mul_(scores), v[h][b], out=y[h][b])
    return _by_node(system, out)


def mask_backward(
    system: System,
    factors: Factors,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value and edge weight.

    dA = L^T dL L^T on edges only: with M = (I - A)^-T dL, dA_ij = <M_i, L_j>.
    """
    grads = [torch.empty_like(x) for x in (query, key, value)]
    q, k, v, dy = (_by_block(system, x) for x in (query, key, value, grad))
    dq, dk, dv = (_split(system, x) for x in grads)
    dw = value.new_zeros(system.edge.shape[0], value.size(1))
    per_group = len(v) // len(q)
    scratch = value.new_empty(3, int(system.sizes.max(initial=0)) ** 2)
    for batch in _mask_batches(system, factors):
        batch.solve()
        pairs = zip(batch.blocks(batch.masks), batch.blocks(batch.grads), strict=True)
        for (b, L), (_, dL) in pairs:
            n = L[0].size(0)
            scores, d_scores, d_mask = scratch[:, : n * n].view(3, n, n)
            for h in range(len(v)):
                g = h // per_group
                if h % per_group == 0:
                    torch.mm(q[g][b], k[g][b].t(), out=scores)
                mask = torch.mul(L[h], scores, out=d_mask)
                torch.mm(mask.t(), dy[h][b], out=dv[h][b])
                torch.mm(dy[h][b], v[h][b].t(), out=d_mask)
                torch.mul(d_mask, scores, out=dL[h])
                if h % per_group == 0:
                    torch.mul(d_mask, L[h], out=d_scores)
                else:
                    d_scores.addcmul_(d_mask, L[h])
                if h % per_group == per_group - 1:
                    torch.mm(d_scores, k[g][b], out=dq[g][b])
                    torch.mm(d_scores.t(), q[g][b], out=dk[g][b])
        batch.solve_adjoint(dw.numpy())
    query_grad, key_grad, value_grad = (_by_node(system, x) for x in grads)
    return query_grad, key_grad, value_grad, dw


class _MaskBatch:
    """The resolvents [heads, n, n] of some consecutive blocks, and their gradients."""

    def __init__(
        self,
        system: System,
        factors: Factors,
        first: int,
        last: int,
        masks: np.ndarray,
        grads: np.ndarray,
    ) -> None:
        self.system, self.factors = system, factors
        self.first, self.last = first, last
        self.masks, self.grads = masks, grads
        self.num_heads = factors.lower.shape[0]
        self.sizes = system.sizes[first:last]
        self.start = np.cumsum(self.num_heads * self.sizes**2)
        self.start = np.concatenate([[0], self.start])
        entries = np.diff(system.lower_ptr[system.ptr[first : last + 1]])
        self.costs = (2.0 * entries + 3.0 * self.sizes) * self.sizes

    def blocks(self, flat: np.ndarray) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """The number of each block, and its matrix for each head."""
        pieces = torch.from_numpy(flat[: self.start[-1]]).split(
            np.diff(self.start).tolist()
        )
        for b, (x, n) in enumerate(zip(pieces, self.sizes.tolist(), strict=True)):
            yield self.first + b, x.view(self.num_heads, n, n).unbind(0)

    def solve(self) -> None:
        """Write the resolvents, columns in the order of their block."""
        self._run(_resolvent, self.masks)

    def solve_adjoint(self, grad_weight: np.ndarray) -> None:
        """Write the gradient [E, heads] of the blocks' edges."""
        system = self.system
        edges = (system.edge_ptr, system.edge, system.edge_row, system.edge_col)
        self._run(_resolvent_backward, *edges, self.masks, self.grads, grad_weight)

    def _run(self, kernel: Callable, *args: object) -> None:
        _run(
            kernel,
            np.repeat(self.costs, self.num_heads),
            self.first,
            *_pattern(self.system),
            self.system.local,
            *self.factors,
            self.start,
            *args,
        )


def _mask_batches(system: System, factors: Factors) -> Iterator[_MaskBatch]:
    """Blocks in batches, whose matrices share two buffers that stay in cache."""
    sizes = factors.lower.shape[0] * system.sizes**2
    limit = max(int(sizes.max(initial=0)), _MASK_BYTES // factors.lower.dtype.itemsize)
    masks, grads = (np.empty(limit, factors.lower.dtype) for _ in range(2))
    first = 0
    while first < len(sizes):
        room = np.searchsorted(np.cumsum(sizes[first:]), limit, side="right")
        last = first + max(1, int(room))
        yield _MaskBatch(system, factors, first, last, masks, grads)
        first = last


def _by_block(system: System, x: Tensor) -> list[tuple[Tensor, ...]]:
    """[V, heads, C] as [n, C] for each head and block: views, if nodes are sorted."""
    if not _is_sorted(system):
        x = x[torch.from_numpy(system.order)]
    return _split(system, x)


def _split(system: System, x: Tensor) -> list[tuple[Tensor, ...]]:
    sizes = system.sizes.tolist()
    return [y.split(sizes) for y in x.unbind(1)]


def _by_node(system: System, x: Tensor) -> Tensor:
    """Back from blocks to nodes."""
    if _is_sorted(system):
        return x
    return torch.empty_like(x).index_copy_(0, torch.from_numpy(system.order), x)


def _is_sorted(system: System) -> bool:
    return bool((system.order[1:] > system.order[:-1]).all())


@_jit
def _resolvent(  # type: ignore[no-untyped-def]
    first, last, offset, triangular, ptr, node, lower_ptr, lower_col, lower_entry,
    upper_ptr, upper_row, upper_entry, local, diagonal, lower, upper, start, flat,
):  # fmt: skip
    num_heads = lower.shape[0]
    longest = 0
    for task in range(first, last):
        block = offset + task // num_heads
        longest = max(longest, ptr[block + 1] - ptr[block])
    scratch = np.empty((longest, longest), flat.dtype)
    for task in range(first, last):
        block, h = offset + task // num_heads, task % num_heads
        s, n = ptr[block], ptr[block + 1] - ptr[block]
        begin = start[block - offset] + h * n * n
        mask = flat[begin : begin + n * n].reshape(n, n)
        for i in range(n):
            row = scratch[i]
            row[:n] = 0
            row[local[s + i]] = 1
            _gather(
                scratch, i, lower_ptr[s + i], lower_ptr[s + i + 1], lower_col,
                lower_entry, lower[h], s, n,
            )  # fmt: skip
        for i in range(n - 1, -1, -1):
            row = scratch[i]
            if not triangular:
                _gather(
                    scratch, i, upper_ptr[s + i], upper_ptr[s + i + 1], upper_row,
                    upper_entry, upper[h], s, n,
                )  # fmt: skip
                r = diagonal[h, s + i]
                for w in range(n):
                    row[w] *= r
            target = mask[local[s + i]]
            for w in range(n):
                target[w] = row[w]


@_jit
def _resolvent_backward(  # type: ignore[no-untyped-def]
    first, last, offset, triangular, ptr, node, lower_ptr, lower_col, lower_entry,
    upper_ptr, upper_row, upper_entry, local, diagonal, lower, upper, start,
    edge_ptr, edge, edge_row, edge_col, flat, grads, grad_weight,
):  # fmt: skip
    num_heads = lower.shape[0]
    longest = 0
    for task in range(first, last):
        block = offset + task // num_heads
        longest = max(longest, ptr[block + 1] - ptr[block])
    scratch = np.empty((longest, longest), flat.dtype)
    for task in range(first, last):
        block, h = offset + task // num_heads, task % num_heads
        s, n = ptr[block], ptr[block + 1] - ptr[block]
        begin = start[block - offset] + h * n * n
        mask = flat[begin : begin + n * n].reshape(n, n)
        grad = grads[begin : begin + n * n].reshape(n, n)
        for i in range(n):
            row = scratch[i]
            source = grad[local[s + i]]
            for w in range(n):
                row[w] = source[w]
            if not triangular:
                _gather(
                    scratch, i, lower_ptr[s + i], lower_ptr[s + i + 1], lower_col,
                    lower_entry, upper[h], s, n,
                )  # fmt: skip
                r = diagonal[h, s + i]
                for w in range(n):
                    row[w] *= r
        for i in range(n - 1, -1, -1):
            _gather(
                scratch, i, upper_ptr[s + i], upper_ptr[s + i + 1], upper_row,
                upper_entry, lower[h], s, n,
            )  # fmt: skip
        for x in range(edge_ptr[block], edge_ptr[block + 1]):
            row = scratch[edge_row[x] - s]
            source = mask[local[edge_col[x]]]
            total = grad_weight[edge[x], h]
            for w in range(n):
                total += row[w] * source[w]
            grad_weight[edge[x], h] = total
