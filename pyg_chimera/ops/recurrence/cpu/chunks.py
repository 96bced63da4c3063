"""The chunk form of a scan along paths, from `"Transformers are SSMs"
<https://arxiv.org/abs/2405.21060>`_ (Section 6), on the CPU.

The states are C_i = a_i C_{i-1} + S_i k_i v_i^T, and the output is y = sum M_i q_i^T
C_i. A path is cut into chunks. Within a chunk, let D_ij = a_i a_{i-1} ... a_{j+1} be
the decays and r_i = a_i ... a_first those from the state C before the chunk. They are
products, so weights may be negative or zero. The outputs of a chunk are

    Y = M ((D * Q K^T) S V + r * Q C),

and the state after it is r_last C + K^T (D_last * S V). All of this is matrix products,
and states are stored between chunks only. In the backward pass, with the adjoint Z of
the state after a chunk, the gradients of decays are d_ij = M_i (q_i^T k_j) (dy_i^T v_j)
S_j, and that of a weight a_t is the sum of E_tj D_{t-1,j} over j, where E_t = d_t +
a_{t+1} E_{t+1} accumulates what nodes from t on read. Nothing is divided by a weight.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from pyg_chimera.ops.common.numba_runtime import inlined, jit, run, stopped, summed
from pyg_chimera.ops.common.simd import (
    ADD,
    SET,
    first,
    fma,
    gemm,
    lanes,
    load,
    load_part,
    pointer,
    prefetch,
    row_totals,
    splat,
    store,
    store_part,
    total,
    vector_lanes,
    zeros,
)
from pyg_chimera.ops.common.vector_kit import (
    clear,
    copy,
    inner_product,
    inner_product_of_rows,
    transpose,
)
from pyg_chimera.ops.recurrence.plan.paths import PathStates

#: Nodes per chunk: a multiple of `ROWS`, and of the lanes of any vector.
CHUNK = 64
#: Rows of a triangular matrix per call of `gemm`.
ROWS = 16


class Operands(NamedTuple):
    """Factors of states and rows of nodes; or the gradients of all."""

    weight: np.ndarray  #: [heads, L], those of the entries
    source: np.ndarray  #: [S, heads], the factor S of what is written to each state
    mark: np.ndarray  #: [S, heads], the factor M of what is read from each state
    query: np.ndarray  #: [V, groups, N]
    key: np.ndarray  #: [V, groups, N]
    value: np.ndarray  #: [V, heads, P]


class _Rows(NamedTuple):
    """Rows of the nodes that read, or write, states."""

    begin: Any  #: a pointer to the row of node 0
    stride: int  #: numbers from a node to the next
    size: int  #: numbers in a row
    node: np.ndarray  #: the reader or writer of each state


class _Mask(NamedTuple):
    """Pointers to matrices and vectors of a chunk, see `_mask_backward`."""

    D: Any
    scores: Any
    products: Any
    d_scores: Any
    sums: Any
    by_row: Any
    by_weight: Any


class Cut(NamedTuple):
    """How work is divided into [blocks, heads x pieces / share] tasks."""

    pieces: int  #: slices of the value channels, which act as additional heads
    share: int  #: heads of a group per task

    @classmethod
    def of(cls, paths: PathStates, x: Operands) -> "Cut":
        """The cut of the chunk form."""
        threads, blocks = torch.get_num_threads(), len(paths.block) - 1
        groups, (_, heads, channels) = x.query.shape[1], x.value.shape
        # Pieces cost time and shares memory: no more than the threads can use.
        cuts = [n for n in range(1, channels // 8 + 1) if channels % n == 0]
        pieces = next((n for n in cuts if blocks * heads * n >= threads), 1)
        heads *= pieces
        for share in range(heads // groups, 1, -1):
            fits = heads // groups % share == 0
            if fits and blocks * heads // share >= threads:
                return cls(pieces, share)
        return cls(pieces, 1)


#: `scan(x, y, d, share)` adds to the output `y`, or if `y` is its gradient, to the
#: gradients `d`.
Scan = Callable[[Operands, np.ndarray, Operands | None, int], None]


def output(scan: Scan, cut: Cut, operands: Operands) -> np.ndarray:
    """The output [V, heads, P]."""
    out = np.zeros_like(operands.value)
    scan(_in_pieces(operands, cut.pieces), _split(out, cut.pieces), None, cut.share)
    return out


def gradients(
    scan: Scan, cut: Cut, operands: Operands, grad: np.ndarray
) -> tuple[np.ndarray, ...]:
    """The gradients of query, key, value, source, mark and weight."""
    x, pieces = _in_pieces(operands, cut.pieces), cut.pieces
    (nodes, groups, num_keys), heads = operands.query.shape, operands.value.shape[1]
    parts = heads * pieces // groups // cut.share  # each has its own sum
    dw, ds, dm, dv = map(np.zeros_like, (x.weight, x.source, x.mark, x.value))
    dq, dk = (np.zeros((nodes, groups * parts, num_keys), dv.dtype) for _ in "qk")
    d = Operands(dw, ds, dm, dq, dk, dv)
    scan(x, _split(grad, pieces), d, cut.share)
    of_keys, of_states = (nodes, groups, parts, num_keys), (len(ds), heads, pieces)
    return (
        *(summed(y.reshape(of_keys), (2,)) for y in (dq, dk)),
        dv.reshape(operands.value.shape),
        *(summed(y.reshape(of_states), (2,)) for y in (ds, dm)),
        summed(dw.reshape(heads, pieces, dw.shape[1]), (1,)),
    )


def _split(x: np.ndarray, pieces: int) -> np.ndarray:
    """Slices of value channels as heads, [V, heads * pieces, P / pieces]."""
    nodes, heads, channels = x.shape
    return x.reshape(nodes, heads * pieces, channels // pieces)


def _in_pieces(x: Operands, pieces: int) -> Operands:
    """The operands with slices of value channels as heads."""
    if pieces == 1:
        return x
    return x._replace(
        weight=np.repeat(x.weight, pieces, 0),
        source=np.repeat(x.source, pieces, 1),
        mark=np.repeat(x.mark, pieces, 1),
        value=_split(x.value, pieces),
    )


def _costs(paths: PathStates, x: Operands, share: int) -> np.ndarray:
    """The cost of each task of the forward pass, in nanoseconds (approximately)."""
    (_, _, N), (_, _, P) = x.query.shape, x.value.shape
    each = 24.0 + N + 0.7 * P + 0.05 * N * P
    costs = each * np.diff(paths.ptr[paths.block])
    return np.repeat(share * costs, x.value.shape[1] // share)


def _scratch(paths: PathStates, x: Operands, share: int) -> int:
    """Numbers of scratch memory per task of the backward pass; forward needs fewer."""
    vector, _ = vector_lanes(x.value.dtype)
    n, p = (-(-y.shape[2] // vector) * vector for y in (x.query, x.value))
    longest = int(np.diff(paths.ptr).max(initial=0))
    states = (-(-longest // CHUNK) + 2) * share * n * p
    return states + CHUNK * (6 * n + (2 * share + 5) * p + 4 * CHUNK + 2 * vector + 8)


def scan_of(paths: PathStates, x: Operands) -> tuple[Scan, Cut]:
    """The scan of paths, and how it is divided into tasks."""
    return partial(_scan, paths), Cut.of(paths, x)


def _scan(
    paths: PathStates, x: Operands, y: np.ndarray, d: Operands | None, share: int
) -> None:
    """Adds to the output `y`, or if `y` is its gradient, to the gradients `d`."""
    if x.query.shape[2] == 0 or x.value.shape[2] == 0:
        return
    costs, scratch = _costs(paths, x, share), _scratch(paths, x, share)
    if d is None:
        run(_forward_tasks, costs, scratch, y.dtype, paths, x, y, share)
    else:
        run(_backward_tasks, 2.5 * costs, scratch, y.dtype, paths, x, y, d, share)


# ---------------------------------------------------------------------- rows and blocks


@inlined
def _whole(width, p):
    """A width rounded up to whole vectors."""
    return (width + lanes(p) - 1) // lanes(p) * lanes(p)


@inlined
def _rows(x, h, node):
    """The rows of a head of x, [V, heads, channels]."""
    _, heads, channels = x.shape
    return _Rows(pointer(x) + h * channels, heads * channels, channels, node)


@jit
def _take_rows(target, ld, rows, state):
    """Copies the rows of states, zero-padded to whole vectors."""
    for i in range(state.shape[0]):
        row = rows.begin + rows.node[state[i]] * rows.stride
        for at in range(0, rows.size, lanes(target)):
            store(target + (i * ld + at), load_part(row + at, rows.size - at))


@jit
def _fetch_rows(rows, state, count):
    """Prefetches the rows of states, of `count` heads, during other products."""
    for i in range(state.shape[0]):
        row = rows.begin + rows.node[state[i]] * rows.stride
        for at in range(0, count * rows.size, lanes(row)):
            prefetch(row + at)


@jit
def _add_rows(rows, state, source, ld, factor):
    """Adds scaled rows of a source to the rows of states."""
    for i in range(state.shape[0]):
        row, f = rows.begin + rows.node[state[i]] * rows.stride, splat(factor[i])
        for at in range(0, rows.size, lanes(row)):
            x, left = load(source + (i * ld + at)), rows.size - at
            store_part(row + at, fma(f, x, load_part(row + at, left)), left)


@jit
def _scale_rows(target, source, ld, factor, step, m, size):
    """Scales rows by factors; with step 0, all by the same one."""
    for i in range(m):
        f = splat(factor[i * step])
        for at in range(i * ld, i * ld + size, lanes(target)):
            store(target + at, f * load(source + at))


@jit
def _weigh_rows(dots, target, rows, other, factor, m, size):
    """Inner products of rows with others; also adds the scaled rows to a target."""
    for i in range(m):
        f, dot = splat(factor[i]), zeros(target)
        for at in range(i * size, (i + 1) * size, lanes(target)):
            x = load(rows + at)
            dot = fma(x, load(other + at), dot)
            store(target + at, fma(f, x, load(target + at)))
        dots[i] = total(dot)


@jit
def _to_lower(C, A, lda, B, m, k):
    """The lower triangle of C = A B, [m, m]."""
    for i in range(0, m, ROWS):
        c, a, rows = C + i * CHUNK, A + i * lda, min(ROWS, m - i)
        gemm((c, CHUNK), (a, lda, 1), (B, CHUNK), (rows, i + rows, k), SET)


@jit
def _times_lower(C, ldc, A, B, ldb, m, n, mode):
    """C = A B, or C + A B, for a lower triangular A."""
    for i in range(0, m, ROWS):
        c, a, rows = C + i * ldc, A + i * CHUNK, min(ROWS, m - i)
        gemm((c, ldc), (a, CHUNK, 1), (B, ldb), (rows, n, i + rows), mode)


@jit
def _times_upper(C, ldc, A, B, ldb, m, n, mode):
    """C = A^T B, or C + A^T B, for a lower triangular A."""
    for i in range(0, m, ROWS):
        c, a, b = C + i * ldc, A + i * (CHUNK + 1), B + i * ldb
        size = min(ROWS, m - i), n, m - i
        gemm((c, ldc), (a, 1, CHUNK), (b, ldb), size, mode)


# -------------------------------------------------------------------------- decays


@inlined
def _after(i):
    """The number of columns of row i of a lower matrix that the products read."""
    return (i // ROWS + 1) * ROWS


@jit
def _decays(D, weight, m, one):
    """Sets D_ij to the product of the weights from node j to node i."""
    step = lanes(D)
    for i in range(m):
        row, before, k = D + i * CHUNK, D + (i - 1) * CHUNK, i % step
        own = first(splat(one), k + 1) - first(splat(one), k)
        if i > 0:
            x = splat(weight[i])
            for j in range(0, i - k, step):
                store(row + j, x * load(before + j))
            if k > 0:
                own = fma(x, load(before + (i - k)), own)
        store(row + (i - k), own)
        for j in range(i - k + step, _after(i), step):
            store(row + j, zeros(D))


@jit
def _reach(reach, weight, m, one):
    """Sets r_i to the product of all weights up to node i."""
    for i in range(m):
        one *= weight[i]
        reach[i] = one


@jit
def _mask(D, scores, m):
    """D <- D * scores, whose entries above the diagonal are arbitrary."""
    step = lanes(D)
    for i in range(m):
        row, score, k = D + i * CHUNK, scores + i * CHUNK, i % step
        for j in range(0, i - k, step):
            store(row + j, load(row + j) * load(score + j))
        last = load(row + (i - k)) * load(score + (i - k))
        store(row + (i - k), first(last, k + 1))


@jit
def _mask_backward(mask, weight, mark, m, mode, one):
    """Given products dy_i^T v_j, turns D into M (D * scores), sets or adds to the
    gradient of the scores, and computes `by_row`, the gradients of marks, and
    `by_weight`, those of weights (within the chunk). `sums` holds E; initially, it is
    the gradient of the last row of decays.
    """
    D, scores, products, d_scores, sums, by_row, by_weight = mask
    step = lanes(D)
    for i in range(m - 1, -1, -1):
        M = splat(mark[i])
        x = splat(weight[i + 1]) if i + 1 < m else splat(one)
        read, moved = zeros(D), zeros(D)
        for j in range(0, i + 1, step):
            at, count = i * CHUNK + j, i + 1 - j
            product, score, decay = load(products + at), load(scores + at), load(D + at)
            if count < step:  # entries above the diagonal are arbitrary
                product, score = first(product, count), first(score, count)
            d = product * score
            read = fma(d, decay, read)
            d = fma(x, load(sums + j), M * d)
            if count < step:
                d = first(d, count)
            store(sums + j, d)
            if count > 1:
                moved = fma(d, load(D + (at - CHUNK)), moved)
            decay = M * decay
            store(D + at, decay * score)
            product = decay * product
            if mode == ADD:
                product = product + load(d_scores + at)
            store(d_scores + at, product)
        for j in range(i - i % step + step, _after(i), step):
            store(d_scores + (i * CHUNK + j), zeros(D))
        store(by_row + i * step, read)
        store(by_weight + i * step, moved)
    for i in range(0, m, step):
        store(by_row + i, row_totals(by_row + i * step))
        store(by_weight + i, row_totals(by_weight + i * step))


# ------------------------------------------------------------------------------ forward


@jit
def _forward_tasks(begin, end, stop, scratch, paths, x, out, share):
    _, heads, channels = x.value.shape
    _, groups, num_keys = x.query.shape
    one, Q = x.value.dtype.type(1), pointer(scratch)
    n, p = _whole(num_keys, Q), _whole(channels, Q)
    w, tasks = share * p, heads // share  # the values of a task's heads are adjacent
    K = Q + CHUNK * n
    Kt = K + CHUNK * n
    scores = Kt + CHUNK * n
    D = scores + CHUNK * CHUNK
    V = D + CHUNK * CHUNK
    Y = V + CHUNK * w
    reach = Y + CHUNK * w
    last, gate, C = reach + CHUNK, reach + 2 * CHUNK, reach + 3 * CHUNK
    for task in range(begin, end):
        t, head = task // tasks, task % tasks * share
        g = head // (heads // groups)
        q, k = _rows(x.query, g, paths.reader), _rows(x.key, g, paths.writer)
        v, y = _rows(x.value, head, paths.writer), _rows(out, head, paths.reader)
        for path in range(paths.block[t], paths.block[t + 1]):
            start, after = paths.ptr[path], paths.ptr[path + 1]
            for a in range(start, after, CHUNK):
                if stopped(stop):
                    return
                state = paths.state[a : min(a + CHUNK, after)]
                m, mode = state.shape[0], ADD if a > start else SET
                _take_rows(Q, n, q, state)
                _take_rows(K, n, k, state)
                transpose(Kt, CHUNK, K, n, m, n)
                later = paths.state[a + m : min(a + m + CHUNK, after)]
                _fetch_rows(q, later, 1)
                _fetch_rows(k, later, 1)
                _fetch_rows(v, later, share)
                _fetch_rows(y, later, share)
                _to_lower(scores, Q, n, Kt, m, num_keys)
                if mode == ADD:
                    gemm((Y, w), (Q, n, 1), (C, w), (m, w, num_keys), SET)
                for j in range(share):
                    h, Vh, Yh, Ch = head + j, V + j * p, Y + j * p, C + j * p
                    # The first position of a path has no weight entry.
                    weight = pointer(x.weight) + (h * x.weight.shape[1] + a - path - 1)
                    _take_rows(Vh, w, _rows(x.value, h, paths.writer), state)
                    for i in range(m):
                        gate[i] = x.source[state[i], h]
                    _scale_rows(Vh, Vh, w, gate, 1, m, p)
                    _decays(D, weight, m, one)
                    copy(last, D + (m - 1) * CHUNK, m)
                    if mode == ADD:
                        _reach(reach, weight, m, one)
                        _scale_rows(Yh, Yh, w, reach, 1, m, p)
                        _scale_rows(Ch, Ch, w, reach + (m - 1), 0, num_keys, p)
                    _mask(D, scores, m)
                    _times_lower(Yh, w, D, Vh, w, m, p, mode)
                    for i in range(m):
                        gate[i] = x.mark[state[i], h]
                    _add_rows(_rows(out, h, paths.reader), state, Yh, w, gate)
                    _scale_rows(Vh, Vh, w, last, 1, m, p)
                if a + m < after:
                    gemm((C, w), (Kt, CHUNK, 1), (V, w), (num_keys, w, m), mode)


# ----------------------------------------------------------------------------- backward


@jit
def _backward_tasks(begin, end, stop, scratch, paths, x, grad, d, share):
    """States and adjoints are transposed, [channels, keys]."""
    _, heads, channels = x.value.shape
    _, groups, num_keys = x.query.shape
    one, Q = x.value.dtype.type(1), pointer(scratch)
    n, p, tasks = _whole(num_keys, Q), _whole(channels, Q), heads // share
    square, size = CHUNK * CHUNK, n * p
    K = Q + CHUNK * n
    Kt, dQ, dK = K + CHUNK * n, K + 2 * CHUNK * n, K + 3 * CHUNK * n
    T = K + 4 * CHUNK * n
    V = T + CHUNK * n
    Vt, dV, dY = V + CHUNK * p, V + 2 * CHUNK * p, V + 3 * CHUNK * p
    X = V + 4 * CHUNK * p
    scores = X + CHUNK * p
    D, products, d_scores = scores + square, scores + 2 * square, scores + 3 * square
    by_row = scores + 4 * square
    by_weight = by_row + CHUNK * lanes(Q)
    M = by_weight + CHUNK * lanes(Q)
    S, last, reach, marked = M + CHUNK, M + 2 * CHUNK, M + 3 * CHUNK, M + 4 * CHUNK
    sums, d_reach = M + 5 * CHUNK, M + 6 * CHUNK
    mask = _Mask(D, scores, products, d_scores, sums, by_row, by_weight)
    Z = M + 7 * CHUNK  # per head: the adjoint and its transpose
    states = Z + 2 * share * size  # per head: the states before each chunk
    for task in range(begin, end):
        t, part = task // tasks, task % tasks
        head = part * share
        g = head // (heads // groups)
        q, k = _rows(x.query, g, paths.reader), _rows(x.key, g, paths.writer)
        dq, dk = _rows(d.query, part, paths.reader), _rows(d.key, part, paths.writer)
        vs, dys = _rows(x.value, head, paths.writer), _rows(grad, head, paths.reader)
        dvs = _rows(d.value, head, paths.writer)
        for path in range(paths.block[t], paths.block[t + 1]):
            start, after = paths.ptr[path], paths.ptr[path + 1]
            chunks = (after - start + CHUNK - 1) // CHUNK
            for c in range(chunks - 1):
                if stopped(stop):
                    return
                a, mode = start + c * CHUNK, ADD if c > 0 else SET
                state = paths.state[a : a + CHUNK]
                _take_rows(K, n, k, state)
                if c + 2 < chunks:
                    later = paths.state[a + CHUNK : a + 2 * CHUNK]
                    _fetch_rows(k, later, 1)
                    _fetch_rows(vs, later, share)
                for j in range(share):
                    h, C = head + j, states + (j * chunks + c) * size
                    weight = pointer(x.weight) + (h * x.weight.shape[1] + a - path - 1)
                    _take_rows(V, p, _rows(x.value, h, paths.writer), state)
                    through = one
                    for i in range(CHUNK - 1, -1, -1):
                        last[i] = through * x.source[state[i], h]
                        through = through * weight[i] if a + i > start else through
                    _scale_rows(V, V, p, last, 1, CHUNK, p)
                    if c > 0:
                        reach[0] = through
                        _scale_rows(C + size, C, n, reach, 0, channels, n)
                    gemm((C + size, n), (V, 1, p), (K, n), (channels, n, CHUNK), mode)
            for c in range(chunks - 1, -1, -1):
                if stopped(stop):
                    return
                a = start + c * CHUNK
                state = paths.state[a : min(a + CHUNK, after)]
                m, mode = state.shape[0], ADD if c < chunks - 1 else SET
                _take_rows(Q, n, q, state)
                _take_rows(K, n, k, state)
                transpose(Kt, CHUNK, K, n, m, n)
                _to_lower(scores, Q, n, Kt, m, num_keys)
                if c > 0:
                    later = paths.state[a - CHUNK : a]
                    _fetch_rows(q, later, 1)
                    _fetch_rows(k, later, 1)
                    _fetch_rows(vs, later, share)
                    _fetch_rows(dys, later, share)
                    _fetch_rows(dvs, later, share)
                    _fetch_rows(dq, later, 1)
                    _fetch_rows(dk, later, 1)
                clear(dQ, m * n)
                clear(dK, m * n)
                for j in range(share):
                    h, C = head + j, states + (j * chunks + c) * size
                    Zh = Z + 2 * j * size
                    entry = h * x.weight.shape[1] + a - path - 1
                    weight = pointer(x.weight) + entry
                    d_weight = pointer(d.weight) + entry
                    v = _rows(x.value, h, paths.writer)
                    _take_rows(V, p, v, state)
                    _take_rows(dY, p, _rows(grad, h, paths.reader), state)
                    for i in range(m):
                        M[i], S[i] = x.mark[state[i], h], x.source[state[i], h]
                    _scale_rows(V, V, p, S, 1, m, p)
                    transpose(Vt, CHUNK, V, p, m, p)
                    _to_lower(products, dY, p, Vt, m, channels)
                    _decays(D, weight, m, one)
                    copy(last, D + (m - 1) * CHUNK, m)
                    clear(sums, CHUNK)
                    clear(d_reach, CHUNK)
                    rest = one - one
                    if c > 0:
                        _reach(reach, weight, m, one)
                        for i in range(m):
                            marked[i] = M[i] * reach[i]
                        gemm((T, n), (dY, p, 1), (C, n), (m, n, channels), SET)
                        _weigh_rows(d_reach, dQ, T, Q, marked, m, n)
                    if mode == ADD:
                        gemm((T, n), (V, p, 1), (Zh, n), (m, n, channels), SET)
                        _weigh_rows(sums, dK, T, K, last, m, n)
                        gemm((dV, p), (K, n, 1), (Zh + size, p), (m, p, num_keys), SET)
                        _scale_rows(dV, dV, p, last, 1, m, p)
                        if c > 0:
                            rest = inner_product(Zh, C, channels * n)
                    if c > 0:
                        if mode == ADD:
                            _scale_rows(Zh, Zh, n, reach + (m - 1), 0, channels, n)
                        _scale_rows(X, dY, p, marked, 1, m, p)
                        gemm((Zh, n), (X, 1, p), (Q, n), (channels, n, m), mode)
                        transpose(Zh + size, p, Zh, n, channels, n)
                    _mask_backward(mask, weight, M, m, ADD if j > 0 else SET, one)
                    _times_upper(dV, p, D, dY, p, m, p, mode)
                    _add_rows(_rows(d.value, h, paths.writer), state, dV, p, S)
                    for i in range(m - 1, -1, -1):
                        u = state[i]
                        d.source[u, h] = inner_product_of_rows(
                            dV + i * p, v.begin + paths.writer[u] * v.stride, channels
                        )
                        d.mark[u, h] = by_row[i]
                        if c > 0:
                            d.mark[u, h] += reach[i] * d_reach[i]
                            rest += M[i] * d_reach[i]
                            if i > 0:
                                by_weight[i] += rest * reach[i - 1]
                                rest *= weight[i]
                            else:
                                by_weight[i] = rest
                        if a + i > start:
                            d_weight[i] = by_weight[i]
                _times_lower(dQ, n, d_scores, K, n, m, n, ADD)
                _times_upper(dK, n, d_scores, Q, n, m, n, ADD)
                for i in range(m):
                    reach[i] = one
                _add_rows(dq, state, dQ, n, reach)
                _add_rows(dk, state, dK, n, reach)
