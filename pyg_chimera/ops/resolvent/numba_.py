"""The sparse solver on the CPU: jitted tiles, one task per (block, head, slice).

A task's states fit in a core's cache, tasks don't talk to each other, and the states
[V, heads, N, P] are never written out. Kernels are compiled without numba's parallel
regions: they release the GIL and run on `torch.get_num_threads()` threads that share
out the tasks, which is safe after a fork and from several threads.
"""

import ctypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Lock, get_ident
from typing import NamedTuple

import numpy as np
import torch
from numba import njit
from torch import Tensor

from pyg_chimera.ops.structure.system import System

# Sums may be reordered (to use vector units), but NaN and infinity must survive.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
_jit = njit(cache=True, nogil=True, fastmath=_FAST)
# Part of its caller: to hand over arrays takes longer than a short loop.
_inlined = njit(cache=True, nogil=True, fastmath=_FAST, inline="always")

#: Bytes of states that a task may hold at a time: half of a usual L2 cache.
_TILE_BYTES = 1 << 19
#: Rows of matrices are filled up to a multiple of this.
_LANES = 16
#: Bytes that a thread keeps between calls.
_KEPT_BYTES = 1 << 26
#: Numbers of a state that are moved at a time at least, whatever that takes.
_MIN_LANES = 128


class Factors(NamedTuple):
    """I - A = L U in the precision of the computation, [heads, V or F]."""

    diagonal: np.ndarray  #: reciprocal of the diagonal of U
    lower: np.ndarray  #: L below its unit diagonal
    upper: np.ndarray  #: U above its diagonal, transposed: entry x is U[j, i]


# --------------------------------------------------------------------------- threads


class _Team:
    """Runs a function in as many threads at once as torch uses.

    On Linux these are torch's own OpenMP threads: others would fight for the cores
    with them, as they spin for a while after each of torch's operators. Elsewhere, and
    in a forked child, where OpenMP must not be used, they are plain Python threads.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self.pid = os.getpid()
        self.openmp = _find_openmp()
        self.key: tuple[int, int] | None = None
        self.pool: ThreadPoolExecutor | None = None

    def run(self, work: Callable[[], None], num_threads: int) -> None:
        errors: list[BaseException] = []

        def guarded(_: object = None) -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        if self.openmp is not None and os.getpid() == self.pid:
            self.openmp(_CALLBACK(guarded), None, num_threads, 0)
        else:
            pool = self._start(num_threads)
            futures = [pool.submit(guarded) for _ in range(num_threads - 1)]
            guarded()
            for future in futures:
                future.result()
        if errors:
            raise errors[0]

    def _start(self, num_threads: int) -> ThreadPoolExecutor:
        key = (os.getpid(), num_threads)
        with self.lock:
            if self.pool is None or self.key != key:
                self.pool = ThreadPoolExecutor(num_threads, "pyg_chimera")
                self.key = key
            return self.pool


_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _find_openmp() -> Callable | None:
    """GNU OpenMP's `GOMP_parallel`, in the very library that torch has loaded."""
    folder = Path(torch.__file__).parent
    for path in [
        *folder.glob("lib/libgomp*.so*"),
        *folder.parent.glob("torch.libs/libgomp*"),
    ]:
        try:
            # RTLD_NOLOAD: a second copy would have threads of its own.
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            parallel = library.GOMP_parallel
        except (AttributeError, OSError):
            continue
        parallel.argtypes = [_CALLBACK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return parallel
    return None


_TEAM = _Team()


class _Scratch:
    """Memory of a thread that outlives a call: new pages cost more than their use."""

    def __init__(self) -> None:
        # By identity, as Python forgets what is local to OpenMP's threads.
        self.buffers: dict[int, np.ndarray] = {}

    def get(self, size: int, dtype: np.dtype) -> np.ndarray:
        needed = size * dtype.itemsize
        if needed > _KEPT_BYTES:
            return np.empty(size, dtype)
        thread = get_ident()
        buffer = self.buffers.get(thread)
        if buffer is None or buffer.shape[0] < needed:
            if len(self.buffers) > 256:  # most of their threads are gone
                self.buffers.clear()
            buffer = self.buffers[thread] = np.empty(needed, np.uint8)
        return buffer[:needed].view(dtype)


_SCRATCH = _Scratch()


_SMALLEST = 5e-324


@contextmanager
def _flushing() -> Iterator[None]:
    """This thread takes denormal numbers for zero, as all signals decay into them.

    Arithmetic with them is 100 x slower, and they are far below anything's size.
    """
    before = _SMALLEST * 1.0 == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def _run(
    kernel: Callable, costs: np.ndarray, scratch: int, dtype: np.dtype, *args: object
) -> None:
    """Run `kernel(first, last, scratch, *args)` over all tasks, about `costs` each."""
    num_tasks, num_threads = costs.shape[0], torch.get_num_threads()
    total = float(costs.sum())
    if min(num_threads, num_tasks) <= 1 or total < 1e5:  # not worth waking anybody
        with _flushing():
            kernel(0, num_tasks, _SCRATCH.get(scratch, dtype), *args)
        return
    # Many ranges a thread, taken as threads come free: others may be using the cores.
    shares = np.linspace(0, total, 16 * num_threads + 1)[1:-1]
    cuts = np.searchsorted(np.cumsum(costs), shares)
    bounds = np.unique(np.concatenate([[0], cuts, [num_tasks]])).tolist()
    ranges, lock = pairwise(bounds), Lock()

    def work() -> None:
        with _flushing():
            while True:
                with lock:
                    bound = next(ranges, None)
                if bound is None:
                    return
                kernel(*bound, _SCRATCH.get(scratch, dtype), *args)

    _TEAM.run(work, num_threads)


# --------------------------------------------------------------------- factorisation


def factorize(system: System, edge_weight: Tensor) -> tuple[Factors, float]:
    """Factor I - A without pivoting, in float64.

    Returns the factors in the precision of the weights, and the growth: the largest
    row sum of |L| |U| over that of |I - A|, each in a connected component. Rounding
    errors are at most about this much larger than those of a solver that pivots. It is
    one where all rows, or all columns, are diagonally dominant: that needs no pivots.
    """
    num_heads = edge_weight.size(1)
    num_nodes, num_entries = system.num_nodes, system.num_entries
    values = np.zeros((num_heads, num_nodes + 2 * num_entries))
    values[:, :num_nodes] = 1.0
    _scatter(values, system.slot, edge_weight.contiguous().numpy())
    bounds = (num_nodes, num_nodes + num_entries)
    diagonal, lower, upper = map(np.ascontiguousarray, np.split(values, bounds, axis=1))
    growth = 1.0
    if not system.triangular:
        growths = np.ones((system.sizes.shape[0], num_heads))
        costs = np.repeat(np.diff(system.lower_ptr[system.ptr]) * 4.0, num_heads)
        _run(
            _factor,
            costs,
            7 * int(system.sizes.max(initial=0)),
            values.dtype,
            system.roots(),
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
    first, last, scratch, root, ptr, lower_ptr, lower_col, upper_ptr, upper_row,
    upper_entry, diagonal, lower, upper, growths,
):  # fmt: skip
    num_heads = diagonal.shape[0]
    for task in range(first, last):
        block, h = task // num_heads, task % num_heads
        s, n = ptr[block], ptr[block + 1] - ptr[block]
        vectors = scratch[: 7 * n].reshape(7, n)
        vectors[:] = 0
        work, u_sum, norm, grown = vectors[0], vectors[1], vectors[2], vectors[3]
        start, by_row, by_column = vectors[4], vectors[5], vectors[6]
        for i in range(s, s + n):
            start[i - s] = abs(diagonal[h, i])
            work[i - s] = diagonal[h, i]
            for x in range(lower_ptr[i], lower_ptr[i + 1]):
                work[lower_col[x] - s] = lower[h, x]
                by_row[i - s] += abs(lower[h, x])
                by_column[lower_col[x] - s] += abs(lower[h, x])
            for x in range(upper_ptr[i], upper_ptr[i + 1]):
                y = upper_entry[x]
                work[upper_row[x] - s] = upper[h, y]
                by_row[i - s] += abs(upper[h, y])
                by_column[upper_row[x] - s] += abs(upper[h, y])
            r = root[i] - s
            norm[r] = max(norm[r], start[i - s] + by_row[i - s])
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
            grown[r] = max(grown[r], total + u_sum[i - s])
            if work[i - s] == 0.0 or not np.isfinite(work[i - s]):
                grown[r] = np.inf
        rows, columns = np.ones(n, np.bool_), np.ones(n, np.bool_)
        for i in range(n):
            r, bound = root[s + i] - s, start[i] * (1 + 1e-12)
            rows[r] &= by_row[i] <= bound
            columns[r] &= by_column[i] <= bound
        for r in range(n):
            safe = grown[r] < np.inf and (rows[r] or columns[r])
            if not safe and grown[r] > growths[block, h] * norm[r]:
                growths[block, h] = grown[r] / norm[r] if norm[r] > 0 else np.inf


# ---------------------------------------------------------------------------- sweeps


def _pattern(system: System) -> tuple:
    return (
        system.triangular,
        system.ptr,
        system.node,
        system.upper_ptr,
        system.upper_row,
        system.upper_entry,
    )


@_jit
def _solve(  # type: ignore[no-untyped-def]
    states, s, n, lanes, transpose, triangular, column_ptr, column_row, column_entry,
    diagonal, lower, upper,
):  # fmt: skip
    """Solve L U H = X, or its transpose, in place, for rows of `lanes` numbers.

    Down the order a finished row is taken from those it reaches, up the order those
    are taken from it: both ways only a node's few ancestors are touched at a time.
    """
    if not (triangular and transpose):
        values = upper if transpose else lower
        for i in range(n):
            row = states[i]
            if transpose:
                r = diagonal[s + i]
                for w in range(lanes):
                    row[w] *= r
            for x in range(column_ptr[s + i], column_ptr[s + i + 1]):
                target = states[column_row[x] - s]
                c = values[column_entry[x]]
                for w in range(lanes):
                    target[w] -= c * row[w]
    if not (triangular and not transpose):
        values = lower if transpose else upper
        for i in range(n - 1, -1, -1):
            row = states[i]
            x, stop = column_ptr[s + i], column_ptr[s + i + 1]
            while x + 3 < stop:  # a quarter of the loads and stores of `row`
                r0, r1 = states[column_row[x] - s], states[column_row[x + 1] - s]
                r2, r3 = states[column_row[x + 2] - s], states[column_row[x + 3] - s]
                c0, c1 = values[column_entry[x]], values[column_entry[x + 1]]
                c2, c3 = values[column_entry[x + 2]], values[column_entry[x + 3]]
                for w in range(lanes):
                    row[w] -= c0 * r0[w] + c1 * r1[w] + c2 * r2[w] + c3 * r3[w]
                x += 4
            while x < stop:
                r0, c0 = states[column_row[x] - s], values[column_entry[x]]
                for w in range(lanes):
                    row[w] -= c0 * r0[w]
                x += 1
            if not transpose:
                r = diagonal[s + i]
                for w in range(lanes):
                    row[w] *= r


@_jit
def _edge_products(  # type: ignore[no-untyped-def]
    adjoints, states, s, lanes, begin, stop, edge, edge_row, edge_col, grad_weight,
):  # fmt: skip
    """Add <G_i, H_j> to the gradient of each edge j -> i."""
    for x in range(begin, stop):
        adjoint, state = adjoints[edge_row[x] - s], states[edge_col[x] - s]
        total = grad_weight[edge[x]]
        for w in range(lanes):
            total += adjoint[w] * state[w]
        grad_weight[edge[x]] = total


# ------------------------------------------------------------------------ state form


class _Slices(NamedTuple):
    """How a task's states [N, P] are cut: `width` value channels a task, ..."""

    width: int
    pieces: int
    rows: int  #: ... `rows` state channels at a time


def _slices(system: System, query: np.ndarray, value: np.ndarray) -> _Slices:
    num_states, (_, num_heads, num_channels) = query.shape[2], value.shape
    tasks = system.sizes.shape[0] * num_heads
    width = max(1, min(16, num_channels))
    # Slices of one (block, head) are summed at the end, so cut only to feed threads.
    pieces = -(-num_channels // width)
    count = pieces if tasks < 4 * torch.get_num_threads() else 1
    largest = int(system.sizes.max(initial=1))
    rows = max(_TILE_BYTES // (largest * value.itemsize), _MIN_LANES) // width
    return _Slices(width, max(1, count), min(max(1, rows), max(1, num_states)))


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
        int(system.sizes.max(initial=0)) * cut.rows * cut.width,
        v.dtype,
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
        2 * int(system.sizes.max(initial=0)) * cut.rows * cut.width,
        v.dtype,
        *_pattern(system),
        *factors,
        system.edge_ptr,
        system.edge,
        system.edge_row,
        system.edge_col,
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


@_jit
def _outer(rows, left, right, a0, a1, p0, p1):  # type: ignore[no-untyped-def]
    w = p1 - p0
    for a in range(a0, a1):
        x = left[a]
        for p in range(w):
            rows[(a - a0) * w + p] = x * right[p0 + p]


@_jit
def _state_forward(  # type: ignore[no-untyped-def]
    first, last, scratch, triangular, ptr, node, column_ptr, column_row, column_entry,
    diagonal, lower, upper, query, key, value, out, width, pieces, rows,
):  # fmt: skip
    num_heads, num_channels = value.shape[1], value.shape[2]
    num_states = query.shape[2]
    per_group = num_heads // query.shape[1]
    for task in range(first, last):
        block, piece = task // (num_heads * pieces), task % pieces
        h = (task // pieces) % num_heads
        g = h // per_group
        s, n = ptr[block], ptr[block + 1] - ptr[block]
        states = scratch[: n * rows * width].reshape(n, rows * width)
        for p0 in range(piece * width, num_channels, pieces * width):
            p1 = min(p0 + width, num_channels)
            for i in range(n):
                out[node[s + i], h, p0:p1] = 0
            for a0 in range(0, num_states, rows):
                a1 = min(a0 + rows, num_states)
                lanes = (a1 - a0) * (p1 - p0)
                for i in range(n):
                    v = node[s + i]
                    _outer(states[i], key[v, g], value[v, h], a0, a1, p0, p1)
                _solve(
                    states, s, n, lanes, False, triangular, column_ptr, column_row,
                    column_entry, diagonal[h], lower[h], upper[h],
                )  # fmt: skip
                w = p1 - p0
                for i in range(n):
                    v = node[s + i]
                    state = states[i]
                    for a in range(a0, a1):
                        q = query[v, g, a]
                        for p in range(w):
                            out[v, h, p0 + p] += q * state[(a - a0) * w + p]


@_jit
def _state_backward(  # type: ignore[no-untyped-def]
    first, last, scratch, triangular, ptr, node, column_ptr, column_row, column_entry,
    diagonal, lower, upper, edge_ptr, edge, edge_row, edge_col, query, key, value,
    grad, grad_query, grad_key, grad_value, grad_weight, width, pieces, rows,
):  # fmt: skip
    num_heads, num_channels = value.shape[1], value.shape[2]
    num_states = query.shape[2]
    per_group = num_heads // query.shape[1]
    for task in range(first, last):
        block, piece = task // (num_heads * pieces), task % pieces
        h = (task // pieces) % num_heads
        g = h // per_group
        s, n = ptr[block], ptr[block + 1] - ptr[block]
        tiles = scratch[: 2 * n * rows * width].reshape(2, n, rows * width)
        states, adjoints = tiles[0], tiles[1]
        for i in range(n):
            grad_query[piece, node[s + i], h, :] = 0
            grad_key[piece, node[s + i], h, :] = 0
        for p0 in range(piece * width, num_channels, pieces * width):
            p1 = min(p0 + width, num_channels)
            for i in range(n):
                grad_value[node[s + i], h, p0:p1] = 0
            for a0 in range(0, num_states, rows):
                a1 = min(a0 + rows, num_states)
                lanes = (a1 - a0) * (p1 - p0)
                for i in range(n):
                    v = node[s + i]
                    _outer(states[i], key[v, g], value[v, h], a0, a1, p0, p1)
                    _outer(adjoints[i], query[v, g], grad[v, h], a0, a1, p0, p1)
                _solve(
                    states, s, n, lanes, False, triangular, column_ptr, column_row,
                    column_entry, diagonal[h], lower[h], upper[h],
                )  # fmt: skip
                _solve(
                    adjoints, s, n, lanes, True, triangular, column_ptr, column_row,
                    column_entry, diagonal[h], lower[h], upper[h],
                )  # fmt: skip
                w = p1 - p0
                for i in range(n):
                    v = node[s + i]
                    state, adjoint = states[i], adjoints[i]
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
                _edge_products(
                    adjoints, states, s, lanes, edge_ptr[block], edge_ptr[block + 1],
                    edge, edge_row, edge_col, grad_weight[piece, :, h],
                )  # fmt: skip


# ------------------------------------------------------------------------- mask form


def mask_forward(
    system: System, factors: Factors, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """The output (L * Q K^T) V, block by block."""
    q, k, v = (x.contiguous().numpy() for x in (query, key, value))
    share = _share(system, q, v)
    out = np.empty_like(v)
    _run(
        _mask_forward,
        _mask_costs(system, q, v, share),
        _mask_scratch(system, q, v, 2, 2),
        v.dtype,
        *_pattern(system),
        *factors,
        q,
        k,
        v,
        out,
        share,
    )
    return torch.from_numpy(out)


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
    q, k, v, dy = (x.contiguous().numpy() for x in (query, key, value, grad))
    share = _share(system, q, v)
    parts = v.shape[1] // q.shape[1] // share
    dq = np.empty((parts, *q.shape), q.dtype)
    dk, dv = np.empty_like(dq), np.empty_like(v)
    dw = np.zeros((system.edge.shape[0], v.shape[1]), v.dtype)
    _run(
        _mask_backward,
        3 * _mask_costs(system, q, v, share),
        _mask_scratch(system, q, v, 5, 5),
        v.dtype,
        *_pattern(system),
        *factors,
        system.edge_ptr,
        system.edge,
        system.edge_row,
        system.edge_col,
        q,
        k,
        v,
        dy,
        dq,
        dk,
        dv,
        dw,
        share,
    )
    query_grad, key_grad = (
        torch.from_numpy(x[0] if parts == 1 else x.sum(0)) for x in (dq, dk)
    )
    return query_grad, key_grad, torch.from_numpy(dv), torch.from_numpy(dw)


def _share(system: System, query: np.ndarray, value: np.ndarray) -> int:
    """How many heads of a group a task takes: all, if there are tasks for everybody."""
    groups, heads = query.shape[1], value.shape[1]
    enough = system.sizes.shape[0] * groups >= 4 * torch.get_num_threads()
    return heads // groups if enough else 1


def _mask_costs(
    system: System, query: np.ndarray, value: np.ndarray, share: int
) -> np.ndarray:
    sizes = system.sizes.astype(float)
    entries = np.diff(system.lower_ptr[system.ptr])
    sweep = (2.0 * entries + 3.0 * sizes) * sizes
    products = 0.2 * sizes**2 * (query.shape[2] + share * value.shape[2])
    return np.repeat(products + share * sweep, value.shape[1] // share)


def _mask_scratch(
    system: System, query: np.ndarray, value: np.ndarray, squares: int, thin: int
) -> int:
    """Numbers in that many matrices [n, n], and in as many [n, N] and [n, P]."""
    n = int(system.sizes.max(initial=0)) + _LANES
    return n * (squares * n + thin * (query.shape[2] + value.shape[2]))


@_jit
def _matmul(C, A, B):  # type: ignore[no-untyped-def]
    """C = A B, for rows of B and C that are contiguous, in tiles of 4 x 4 of A.

    BLAS is up to twice as fast, but cannot be called here without threads of its own.
    """
    m, n, depth = C.shape[0], C.shape[1], B.shape[0]
    C[:] = 0
    for i in range(0, m - 3, 4):
        c0, c1, c2, c3 = C[i], C[i + 1], C[i + 2], C[i + 3]
        for k in range(0, depth - 3, 4):
            b0, b1, b2, b3 = B[k], B[k + 1], B[k + 2], B[k + 3]
            a00, a01, a02, a03 = A[i, k], A[i, k + 1], A[i, k + 2], A[i, k + 3]
            a10, a11 = A[i + 1, k], A[i + 1, k + 1]
            a12, a13 = A[i + 1, k + 2], A[i + 1, k + 3]
            a20, a21 = A[i + 2, k], A[i + 2, k + 1]
            a22, a23 = A[i + 2, k + 2], A[i + 2, k + 3]
            a30, a31 = A[i + 3, k], A[i + 3, k + 1]
            a32, a33 = A[i + 3, k + 2], A[i + 3, k + 3]
            for j in range(n):
                x0, x1, x2, x3 = b0[j], b1[j], b2[j], b3[j]
                c0[j] += a00 * x0 + a01 * x1 + a02 * x2 + a03 * x3
                c1[j] += a10 * x0 + a11 * x1 + a12 * x2 + a13 * x3
                c2[j] += a20 * x0 + a21 * x1 + a22 * x2 + a23 * x3
                c3[j] += a30 * x0 + a31 * x1 + a32 * x2 + a33 * x3
        for k in range(depth - depth % 4, depth):
            b0 = B[k]
            a00, a10, a20, a30 = A[i, k], A[i + 1, k], A[i + 2, k], A[i + 3, k]
            for j in range(n):
                c0[j] += a00 * b0[j]
                c1[j] += a10 * b0[j]
                c2[j] += a20 * b0[j]
                c3[j] += a30 * b0[j]
    for i in range(m - m % 4, m):
        c0 = C[i]
        for k in range(depth):
            b0, a00 = B[k], A[i, k]
            for j in range(n):
                c0[j] += a00 * b0[j]


@_jit
def _take(target, source, nodes, h):  # type: ignore[no-untyped-def]
    """Copy [nodes, h, C] to a contiguous [n, C]."""
    for i in range(nodes.shape[0]):
        target[i] = source[nodes[i], h]


@_jit
def _take_transposed(target, source, nodes, h):  # type: ignore[no-untyped-def]
    target[:, nodes.shape[0] :] = 0
    for i in range(nodes.shape[0]):
        row = source[nodes[i], h]
        for c in range(row.shape[0]):
            target[c, i] = row[c]


@_jit
def _put(target, source, nodes, h):  # type: ignore[no-untyped-def]
    for i in range(nodes.shape[0]):
        target[nodes[i], h] = source[i]


@_jit
def _put_transposed(target, source, nodes, h):  # type: ignore[no-untyped-def]
    for i in range(nodes.shape[0]):
        row = target[nodes[i], h]
        for c in range(row.shape[0]):
            row[c] = source[c, i]


@_jit
def _set_identity(rows):  # type: ignore[no-untyped-def]
    rows[:] = 0
    for i in range(rows.shape[0]):
        rows[i, i] = 1


@_jit
def _multiply(out, left, right):  # type: ignore[no-untyped-def]
    for i in range(out.shape[0]):
        target, x, y = out[i], left[i], right[i]
        for j in range(out.shape[1]):
            target[j] = x[j] * y[j]


# All matrices of a block are in elimination order, and their rows are filled up with
# zeros to whole vectors: what is left over would be done number by number. Products
# are arranged such that the inner loop runs over the nodes of the block, as there may
# be few channels: y^T = v^T (L * S)^T, with L^T from the transposed system.


@_jit
def _mask_forward(  # type: ignore[no-untyped-def]
    first, last, scratch, triangular, ptr, node, column_ptr, column_row, column_entry,
    diagonal, lower, upper, query, key, value, out, share,
):  # fmt: skip
    heads, channels, states = value.shape[1], value.shape[2], query.shape[2]
    tasks = heads // share
    for task in range(first, last):
        block, head = task // tasks, (task % tasks) * share
        g = head * query.shape[1] // heads
        s, n = ptr[block], ptr[block + 1] - ptr[block]
        m = (n + _LANES - 1) // _LANES * _LANES
        nodes = node[s : s + n]
        squares = scratch[: 2 * n * m].reshape(2, n, m)
        mask, scores = squares[0], squares[1]
        at = 2 * n * m
        narrow = scratch[at : at + 2 * m * states].reshape(2, m * states)
        k = narrow[0, : n * states].reshape(n, states)
        qt = narrow[1].reshape(states, m)
        at += 2 * m * states
        slim = scratch[at : at + 2 * m * channels].reshape(2, channels, m)
        vt, yt = slim[0], slim[1]
        _take(k, key, nodes, g)
        _take_transposed(qt, query, nodes, g)
        _matmul(scores, k, qt)
        for h in range(head, head + share):
            _set_identity(mask)
            _solve(
                mask, s, n, m, True, triangular, column_ptr, column_row, column_entry,
                diagonal[h], lower[h], upper[h],
            )  # fmt: skip
            _multiply(mask, mask, scores)
            _take_transposed(vt, value, nodes, h)
            _matmul(yt, vt, mask)
            _put_transposed(out, yt, nodes, h)


@_jit
def _mask_backward(  # type: ignore[no-untyped-def]
    first, last, scratch, triangular, ptr, node, column_ptr, column_row, column_entry,
    diagonal, lower, upper, edge_ptr, edge, edge_row, edge_col, query, key, value,
    grad, grad_query, grad_key, grad_value, grad_weight, share,
):  # fmt: skip
    heads, channels, states = value.shape[1], value.shape[2], query.shape[2]
    groups = query.shape[1]
    tasks = heads // share
    for task in range(first, last):
        block, head = task // tasks, (task % tasks) * share
        g = head * groups // heads
        part = (head - g * (heads // groups)) // share
        s, n = ptr[block], ptr[block + 1] - ptr[block]
        m = (n + _LANES - 1) // _LANES * _LANES
        nodes = node[s : s + n]
        squares = scratch[: 5 * n * m].reshape(5, n, m)
        L, adjoint, scores = squares[0], squares[1], squares[2]
        d_scores, mask = squares[3], squares[4]
        at = 5 * n * m
        narrow = scratch[at : at + 5 * m * states].reshape(5, m * states)
        q = narrow[0, : n * states].reshape(n, states)
        k = narrow[1, : n * states].reshape(n, states)
        dq = narrow[2, : n * states].reshape(n, states)
        qt, kt = narrow[3].reshape(states, m), narrow[4].reshape(states, m)
        dkt = narrow[2].reshape(states, m)
        at += 5 * m * states
        slim = scratch[at : at + 4 * m * channels].reshape(4, m * channels)
        dy = slim[0, : n * channels].reshape(n, channels)
        dyt, vt = slim[1].reshape(channels, m), slim[2].reshape(channels, m)
        dvt = slim[3].reshape(channels, m)
        _take(q, query, nodes, g)
        _take_transposed(kt, key, nodes, g)
        _matmul(scores, q, kt)
        d_scores[:] = 0
        for h in range(head, head + share):
            _set_identity(L)
            _solve(
                L, s, n, m, False, triangular, column_ptr, column_row, column_entry,
                diagonal[h], lower[h], upper[h],
            )  # fmt: skip
            _multiply(mask, L, scores)
            _take(dy, grad, nodes, h)
            _take_transposed(dyt, grad, nodes, h)
            _matmul(dvt, dyt, mask)
            _put_transposed(grad_value, dvt, nodes, h)
            _take_transposed(vt, value, nodes, h)
            _matmul(mask, dy, vt)  # from here on the gradient of the mask
            for i in range(n):
                target, total = adjoint[i], d_scores[i]
                d_mask, left, right = mask[i], L[i], scores[i]
                for j in range(m):
                    target[j] = d_mask[j] * right[j]
                    total[j] += d_mask[j] * left[j]
            _solve(
                adjoint, s, n, m, True, triangular, column_ptr, column_row,
                column_entry, diagonal[h], lower[h], upper[h],
            )  # fmt: skip
            _edge_products(
                adjoint, L, s, m, edge_ptr[block], edge_ptr[block + 1], edge, edge_row,
                edge_col, grad_weight[:, h],
            )  # fmt: skip
        _take(k, key, nodes, g)
        _matmul(dq, d_scores, k)
        _put(grad_query[part], dq, nodes, g)
        _take_transposed(qt, query, nodes, g)
        _matmul(dkt, qt, d_scores)
        _put_transposed(grad_key[part], dkt, nodes, g)
