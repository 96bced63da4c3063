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

from pyg_chimera.ops.resolvent.mask import masked_mix, masked_mix_backward
from pyg_chimera.ops.structure.system import System

# Sums may be reordered (to use vector units), but NaN and infinity must survive.
_jit = njit(cache=True, nogil=True, fastmath={"reassoc", "contract", "nsz", "arcp"})

#: Bytes of states that a task may hold at a time: half of a usual L2 cache.
_TILE_BYTES = 1 << 19


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
    """The output from the resolvents, block by block."""
    out = torch.empty_like(value)
    masks = _views(system, factors, _resolvents(system, factors))
    blocks = _Blocks(system, query, key, value)
    for L, node, q, k, v in zip(masks, blocks.nodes, *blocks.tensors, strict=True):
        out[node] = masked_mix(L, q, k, v).transpose(0, 1)
    return out


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
    flat = _resolvents(system, factors)
    flat_grad = np.empty_like(flat)
    masks = _views(system, factors, flat)
    mask_grads = _views(system, factors, flat_grad)
    blocks = _Blocks(system, query, key, value, grad)
    for L, dL, node, *inputs in zip(
        masks, mask_grads, blocks.nodes, *blocks.tensors, strict=True
    ):
        d, *parts = masked_mix_backward(L, *inputs)
        dL.copy_(d)
        for whole, part in zip(grads, parts, strict=True):
            whole[node] = part.transpose(0, 1)
    num_heads = value.size(1)
    grad_weight = np.zeros((system.edge.shape[0], num_heads), flat.dtype)
    _run(
        _resolvent_backward,
        _mask_costs(system, num_heads),
        *_pattern(system),
        system.local,
        system.edge_ptr,
        system.edge,
        system.edge_row,
        system.edge_col,
        *factors,
        _starts(system, num_heads),
        flat,
        flat_grad,
        grad_weight,
    )
    dq, dk, dv = grads
    return dq, dk, dv, torch.from_numpy(grad_weight)


class _Blocks:
    """Tensors [V, heads, C] as one view, or copy, [heads, n, C] for each block."""

    def __init__(self, system: System, *tensors: Tensor) -> None:
        sizes = system.sizes.tolist()
        if np.array_equal(system.order, np.arange(system.num_nodes)):
            bounds = zip(system.ptr[:-1].tolist(), system.ptr[1:].tolist(), strict=True)
            self.nodes: list[slice] | tuple[Tensor, ...] = [slice(*b) for b in bounds]
        else:
            order = torch.from_numpy(system.order)
            self.nodes = order.split(sizes)
            tensors = tuple(x[order] for x in tensors)
        self.tensors = [[y.transpose(0, 1) for y in x.split(sizes)] for x in tensors]


def _resolvents(system: System, factors: Factors) -> np.ndarray:
    """The resolvents [heads, n, n] of all blocks, flat, in the order of the block."""
    num_heads = factors.lower.shape[0]
    start = _starts(system, num_heads)
    flat = np.empty(start[-1], factors.lower.dtype)
    _run(
        _resolvent,
        _mask_costs(system, num_heads),
        *_pattern(system),
        system.local,
        *factors,
        start,
        flat,
    )
    return flat


def _starts(system: System, num_heads: int) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(num_heads * system.sizes**2)])


def _views(system: System, factors: Factors, flat: np.ndarray) -> list[Tensor]:
    num_heads = factors.lower.shape[0]
    sizes = system.sizes.tolist()
    pieces = torch.from_numpy(flat).split([num_heads * n * n for n in sizes])
    return [x.view(num_heads, n, n) for x, n in zip(pieces, sizes, strict=True)]


def _mask_costs(system: System, num_heads: int) -> np.ndarray:
    entries = np.diff(system.lower_ptr[system.ptr])
    return np.repeat((2.0 * entries + 3.0 * system.sizes) * system.sizes, num_heads)


@_jit
def _resolvent(  # type: ignore[no-untyped-def]
    first, last, triangular, ptr, node, lower_ptr, lower_col, lower_entry,
    upper_ptr, upper_row, upper_entry, local, diagonal, lower, upper, start, flat,
):  # fmt: skip
    num_heads = lower.shape[0]
    longest = 0
    for task in range(first, last):
        block = task // num_heads
        longest = max(longest, ptr[block + 1] - ptr[block])
    scratch = np.empty((longest, longest), flat.dtype)
    for task in range(first, last):
        block, h = task // num_heads, task % num_heads
        s, n = ptr[block], ptr[block + 1] - ptr[block]
        begin = start[block] + h * n * n
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
    first, last, triangular, ptr, node, lower_ptr, lower_col, lower_entry,
    upper_ptr, upper_row, upper_entry, local, edge_ptr, edge, edge_row, edge_col,
    diagonal, lower, upper, start, flat, grads, grad_weight,
):  # fmt: skip
    num_heads = lower.shape[0]
    longest = 0
    for task in range(first, last):
        block = task // num_heads
        longest = max(longest, ptr[block + 1] - ptr[block])
    scratch = np.empty((longest, longest), flat.dtype)
    for task in range(first, last):
        block, h = task // num_heads, task % num_heads
        s, n = ptr[block], ptr[block + 1] - ptr[block]
        begin = start[block] + h * n * n
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
