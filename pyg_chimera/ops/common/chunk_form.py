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

from typing import NamedTuple

import numpy as np
import torch

from pyg_chimera.ops.common.numba_runtime import (
    inlined,
    jit,
    run,
    stopped,
    summed,
)
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

__all__ = ["PathStates", "backward", "chunk_cost", "forward"]

#: Nodes per chunk: a multiple of `_ROWS`, and of the lanes of any vector.
_CHUNK = 64
#: Rows of a triangular matrix per call of `gemm`.
_ROWS = 16


class PathStates(NamedTuple):
    """The states along paths, each computed from the one before.

    Positions are numbered path by path, and in order along each path. Each position but
    a path's first has one weight entry, from its predecessor, in the same order.
    """

    block: np.ndarray  #: [T + 1], first path of each block; blocks share no nodes
    ptr: np.ndarray  #: [C + 1], first position of each path
    state: np.ndarray  #: [S], state at each position
    writer: np.ndarray  #: [S], the node that writes each state
    reader: np.ndarray  #: [S], the node that reads each state


class _Cut(NamedTuple):
    """How work is divided into [blocks, heads x pieces / share] tasks."""

    pieces: int  #: slices of the value channels, which act as additional heads
    share: int  #: heads of a group per task

    @classmethod
    def of(cls, paths: PathStates, query: np.ndarray, value: np.ndarray) -> "_Cut":
        threads, blocks = torch.get_num_threads(), len(paths.block) - 1
        groups, (_, heads, channels) = query.shape[1], value.shape
        # Pieces cost time and shares memory: no more than the threads can use.
        cuts = [x for x in range(1, channels // 8 + 1) if channels % x == 0]
        pieces = next((x for x in cuts if blocks * heads * x >= threads), 1)
        heads *= pieces
        for share in range(heads // groups, 1, -1):
            fits = heads // groups % share == 0
            if fits and blocks * heads // share >= threads:
                return cls(pieces, share)
        return cls(pieces, 1)


def chunk_cost(sizes: np.ndarray, num_keys: int, channels: int) -> np.ndarray:
    """Nanoseconds per head, forward and backward, for paths of the given sizes."""
    width = np.minimum(sizes, _CHUNK) + _ROWS
    inside = width * (2.0 * num_keys + 1.5 * channels)
    between = 8.0 * num_keys * channels * (sizes > _CHUNK)
    return sizes * (0.02 * (inside + between) + width) + 100.0


def _costs(
    paths: PathStates, query: np.ndarray, value: np.ndarray, share: int
) -> np.ndarray:
    """The cost of each task of the forward pass, in nanoseconds (approximately)."""
    costs = 0.3 * chunk_cost(np.diff(paths.ptr), query.shape[2], value.shape[2])
    costs = np.diff(np.append(0.0, np.cumsum(costs))[paths.block])
    return np.repeat(share * costs, value.shape[1] // share)


def _scratch(
    paths: PathStates, query: np.ndarray, value: np.ndarray, share: int
) -> int:
    """Numbers of scratch memory per task of the backward pass; forward needs fewer."""
    vector, _ = vector_lanes(value.dtype)
    n, p = (-(-x.shape[2] // vector) * vector for x in (query, value))
    longest = int(np.diff(paths.ptr).max(initial=0))
    states = (-(-longest // _CHUNK) + 2) * share * n * p
    return states + _CHUNK * (6 * n + (2 * share + 5) * p + 4 * _CHUNK + 2 * vector + 8)


def _split(x: np.ndarray, pieces: int) -> np.ndarray:
    """Slices of value channels as heads, [V, heads * pieces, P / pieces]."""
    nodes, heads, channels = x.shape
    return x.reshape(nodes, heads * pieces, channels // pieces)


def forward(
    paths: PathStates,
    weight: np.ndarray,
    source: np.ndarray,
    mark: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
) -> np.ndarray:
    """The output [V, heads, P].

    Args:
        paths: The states.
        weight: Weights of the entries, [heads, L].
        source: The factor S of what is written to each state, [S, heads].
        mark: The factor M of what is read from each state, [S, heads].
        query: [V, groups, N].
        key: [V, groups, N].
        value: [V, heads, P].
    """
    out = np.zeros_like(value)
    if query.shape[2] == 0 or value.shape[2] == 0:
        return out
    cut = _Cut.of(paths, query, value)
    pieces = cut.pieces
    value = _split(value, pieces)
    run(
        _forward_tasks,
        _costs(paths, query, value, cut.share),
        _scratch(paths, query, value, cut.share),
        out.dtype,
        *paths,
        np.repeat(weight, pieces, 0),
        np.repeat(source, pieces, 1),
        np.repeat(mark, pieces, 1),
        query,
        key,
        value,
        _split(out, pieces),
        cut.share,
    )
    return out


def backward(
    paths: PathStates,
    weight: np.ndarray,
    source: np.ndarray,
    mark: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    grad: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """The gradients of query, key, value, source, mark and weight."""
    grad_value, (nodes, heads, _) = np.zeros_like(value), value.shape
    if query.shape[2] == 0 or value.shape[2] == 0:
        return tuple(map(np.zeros_like, (query, key, value, source, mark, weight)))
    cut = _Cut.of(paths, query, value)
    pieces, groups = cut.pieces, query.shape[1]
    value = _split(value, pieces)
    parts = heads * pieces // groups // cut.share
    dq = np.zeros((nodes, groups * parts, query.shape[2]), value.dtype)
    dk = np.zeros_like(dq)
    gates = (
        np.repeat(weight, pieces, 0),
        *(np.repeat(x, pieces, 1) for x in (source, mark)),
    )
    dw, ds, dm = map(np.zeros_like, gates)
    run(
        _backward_tasks,
        2.5 * _costs(paths, query, value, cut.share),
        _scratch(paths, query, value, cut.share),
        value.dtype,
        *paths,
        *gates,
        query,
        key,
        value,
        _split(grad, pieces),
        dq,
        dk,
        _split(grad_value, pieces),
        ds,
        dm,
        dw,
        cut.share,
    )
    of_keys = (nodes, groups, parts, query.shape[2])
    of_states, of_entries = (
        (len(source), heads, pieces),
        (heads, pieces, weight.shape[1]),
    )
    return (
        *(summed(x.reshape(of_keys), (2,)) for x in (dq, dk)),
        grad_value,
        *(summed(x.reshape(of_states), (2,)) for x in (ds, dm)),
        summed(dw.reshape(of_entries), (1,)),
    )


# ---------------------------------------------------------------------- rows and blocks


@inlined
def _whole(width, p):
    """A width rounded up to whole vectors."""
    return (width + lanes(p) - 1) // lanes(p) * lanes(p)


@jit
def _take_rows(target, ld, source, stride, node, state, a, m, size):
    """Copies the rows of m nodes, zero-padded to whole vectors."""
    for i in range(m):
        row = source + node[state[a + i]] * stride
        for at in range(0, size, lanes(target)):
            store(target + (i * ld + at), load_part(row + at, size - at))


@jit
def _fetch_rows(source, stride, node, state, a, m, size):
    """Prefetches the rows of m nodes, while the products of the last chunk are made."""
    for i in range(m):
        row = source + node[state[a + i]] * stride
        for at in range(0, size, lanes(source)):
            prefetch(row + at)


@jit
def _add_rows(target, stride, node, state, a, source, ld, factor, m, size):
    """Adds scaled rows to the rows of m nodes."""
    for i in range(m):
        row, f = target + node[state[a + i]] * stride, splat(factor[i])
        for at in range(0, size, lanes(target)):
            x = load(source + (i * ld + at))
            store_part(row + at, fma(f, x, load_part(row + at, size - at)), size - at)


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
    for i in range(0, m, _ROWS):
        rows = min(_ROWS, m - i)
        gemm(
            C + i * _CHUNK, _CHUNK, A + i * lda, lda, 1, B, _CHUNK, rows, i + rows, k,
            SET,
        )  # fmt: skip


@jit
def _times_lower(C, ldc, A, B, ldb, m, n, mode):
    """C = A B, or C + A B, for a lower triangular A."""
    for i in range(0, m, _ROWS):
        rows = min(_ROWS, m - i)
        gemm(
            C + i * ldc, ldc, A + i * _CHUNK, _CHUNK, 1, B, ldb, rows, n, i + rows,
            mode,
        )  # fmt: skip


@jit
def _times_upper(C, ldc, A, B, ldb, m, n, mode):
    """C = A^T B, or C + A^T B, for a lower triangular A."""
    for i in range(0, m, _ROWS):
        rows = min(_ROWS, m - i)
        gemm(
            C + i * ldc, ldc, A + i * (_CHUNK + 1), 1, _CHUNK, B + i * ldb, ldb, rows,
            n, m - i, mode,
        )  # fmt: skip


# -------------------------------------------------------------------------- decays


@inlined
def _after(i):
    """The number of columns of row i of a lower matrix that the products read."""
    return (i // _ROWS + 1) * _ROWS


@jit
def _decays(D, weight, m, one):
    """Sets D_ij to the product of the weights from node j to node i."""
    step = lanes(D)
    for i in range(m):
        row, before, k = D + i * _CHUNK, D + (i - 1) * _CHUNK, i % step
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
        row, score, k = D + i * _CHUNK, scores + i * _CHUNK, i % step
        for j in range(0, i - k, step):
            store(row + j, load(row + j) * load(score + j))
        last = load(row + (i - k)) * load(score + (i - k))
        store(row + (i - k), first(last, k + 1))


@jit
def _mask_backward(
    D, scores, products, d_scores, sums, by_row, by_weight, weight, mark, m, mode, one
):  # fmt: skip
    """Given products dy_i^T v_j, turns D into M (D * scores), sets or adds to the
    gradient of the scores, and computes `by_row`, the gradients of marks, and
    `by_weight`, those of weights (within the chunk). `sums` holds E; initially, it is
    the gradient of the last row of decays.
    """
    step = lanes(D)
    for i in range(m - 1, -1, -1):
        M = splat(mark[i])
        x = splat(weight[i + 1]) if i + 1 < m else splat(one)
        read, moved = zeros(D), zeros(D)
        for j in range(0, i + 1, step):
            at, count = i * _CHUNK + j, i + 1 - j
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
                moved = fma(d, load(D + (at - _CHUNK)), moved)
            decay = M * decay
            store(D + at, decay * score)
            product = decay * product
            if mode == ADD:
                product = product + load(d_scores + at)
            store(d_scores + at, product)
        for j in range(i - i % step + step, _after(i), step):
            store(d_scores + (i * _CHUNK + j), zeros(D))
        store(by_row + i * step, read)
        store(by_weight + i * step, moved)
    for i in range(0, m, step):
        store(by_row + i, row_totals(by_row + i * step))
        store(by_weight + i, row_totals(by_weight + i * step))


# ------------------------------------------------------------------------------ forward


@jit
def _forward_tasks(
    begin, end, stop, scratch, block, ptr, state, writer, reader, weight, source, mark,
    query, key, value, out, share,
):  # fmt: skip
    _, heads, channels = value.shape
    _, groups, num_keys = query.shape
    of_keys, of_values, one = groups * num_keys, heads * channels, value.dtype.type(1)
    Q = pointer(scratch)
    n, p = _whole(num_keys, Q), _whole(channels, Q)
    w, tasks = share * p, heads // share  # the values of a task's heads are adjacent
    K = Q + _CHUNK * n
    Kt = K + _CHUNK * n
    scores = Kt + _CHUNK * n
    D = scores + _CHUNK * _CHUNK
    V = D + _CHUNK * _CHUNK
    Y = V + _CHUNK * w
    reach = Y + _CHUNK * w
    last, gate, C = reach + _CHUNK, reach + 2 * _CHUNK, reach + 3 * _CHUNK
    for task in range(begin, end):
        t, head = task // tasks, task % tasks * share
        at = head // (heads // groups) * num_keys
        q, k = pointer(query) + at, pointer(key) + at
        v, y = pointer(value) + head * channels, pointer(out) + head * channels
        for path in range(block[t], block[t + 1]):
            for a in range(ptr[path], ptr[path + 1], _CHUNK):
                if stopped(stop):
                    return
                m, mode = min(_CHUNK, ptr[path + 1] - a), ADD if a > ptr[path] else SET
                _take_rows(Q, n, q, of_keys, reader, state, a, m, num_keys)
                _take_rows(K, n, k, of_keys, writer, state, a, m, num_keys)
                transpose(Kt, _CHUNK, K, n, m, n)
                b = a + m
                f = min(_CHUNK, ptr[path + 1] - b)
                _fetch_rows(q, of_keys, reader, state, b, f, num_keys)
                _fetch_rows(k, of_keys, writer, state, b, f, num_keys)
                _fetch_rows(v, of_values, writer, state, b, f, share * channels)
                _fetch_rows(y, of_values, reader, state, b, f, share * channels)
                _to_lower(scores, Q, n, Kt, m, num_keys)
                if mode == ADD:
                    gemm(Y, w, Q, n, 1, C, w, m, w, num_keys, SET)
                for x in range(share):
                    h, Vh, Yh, Ch = head + x, V + x * p, Y + x * p, C + x * p
                    vh, yh = v + x * channels, y + x * channels
                    # The first position of a path has no weight entry.
                    entry = h * weight.shape[1] + a - path - 1
                    _take_rows(Vh, w, vh, of_values, writer, state, a, m, channels)
                    for i in range(m):
                        gate[i] = source[state[a + i], h]
                    _scale_rows(Vh, Vh, w, gate, 1, m, p)
                    _decays(D, pointer(weight) + entry, m, one)
                    copy(last, D + (m - 1) * _CHUNK, m)
                    if mode == ADD:
                        _reach(reach, pointer(weight) + entry, m, one)
                        _scale_rows(Yh, Yh, w, reach, 1, m, p)
                        _scale_rows(Ch, Ch, w, reach + (m - 1), 0, num_keys, p)
                    _mask(D, scores, m)
                    _times_lower(Yh, w, D, Vh, w, m, p, mode)
                    for i in range(m):
                        gate[i] = mark[state[a + i], h]
                    _add_rows(yh, of_values, reader, state, a, Yh, w, gate, m, channels)
                    _scale_rows(Vh, Vh, w, last, 1, m, p)
                if a + m < ptr[path + 1]:
                    gemm(C, w, Kt, _CHUNK, 1, V, w, num_keys, w, m, mode)


# ----------------------------------------------------------------------------- backward


@jit
def _backward_tasks(
    begin, end, stop, scratch, block, ptr, state, writer, reader, weight, source, mark,
    query, key, value, grad, grad_query, grad_key, grad_value, grad_source, grad_mark,
    grad_weight, share,
):  # fmt: skip
    """States and adjoints are transposed, [channels, keys]."""
    _, heads, channels = value.shape
    _, groups, num_keys = query.shape
    of_keys, of_values, one = groups * num_keys, heads * channels, value.dtype.type(1)
    Q = pointer(scratch)
    n, p, tasks = _whole(num_keys, Q), _whole(channels, Q), heads // share
    of_grads, square, size = tasks * num_keys, _CHUNK * _CHUNK, n * p
    K = Q + _CHUNK * n
    Kt, dQ, dK = K + _CHUNK * n, K + 2 * _CHUNK * n, K + 3 * _CHUNK * n
    T = K + 4 * _CHUNK * n
    V = T + _CHUNK * n
    Vt, dV, dY, X = (
        V + _CHUNK * p, V + 2 * _CHUNK * p, V + 3 * _CHUNK * p, V + 4 * _CHUNK * p
    )  # fmt: skip
    scores = V + 5 * _CHUNK * p
    D, products, d_scores = scores + square, scores + 2 * square, scores + 3 * square
    by_row = scores + 4 * square
    by_weight = by_row + _CHUNK * lanes(Q)
    M = by_weight + _CHUNK * lanes(Q)
    S, last, reach, marked = M + _CHUNK, M + 2 * _CHUNK, M + 3 * _CHUNK, M + 4 * _CHUNK
    sums, d_reach = M + 5 * _CHUNK, M + 6 * _CHUNK
    Z = M + 7 * _CHUNK  # per head: the adjoint and its transpose
    states = Z + 2 * share * size  # per head: the states before each chunk
    for task in range(begin, end):
        t, head = task // tasks, task % tasks * share
        at = head // (heads // groups) * num_keys
        q, k = pointer(query) + at, pointer(key) + at
        at = task % tasks * num_keys
        dq, dk = pointer(grad_query) + at, pointer(grad_key) + at
        at = head * channels
        vs, dys, dvs = pointer(value) + at, pointer(grad) + at, pointer(grad_value) + at
        for path in range(block[t], block[t + 1]):
            s, end_ = ptr[path], ptr[path + 1]
            chunks = (end_ - s + _CHUNK - 1) // _CHUNK
            for c in range(chunks - 1):
                if stopped(stop):
                    return
                a, mode = s + c * _CHUNK, ADD if c > 0 else SET
                _take_rows(K, n, k, of_keys, writer, state, a, _CHUNK, num_keys)
                if c + 2 < chunks:
                    f = a + _CHUNK
                    _fetch_rows(k, of_keys, writer, state, f, _CHUNK, num_keys)
                    _fetch_rows(
                        vs, of_values, writer, state, f, _CHUNK, share * channels
                    )
                for x in range(share):
                    h, C = head + x, states + (x * chunks + c) * size
                    weights = pointer(weight) + (h * weight.shape[1] + a - path - 1)
                    v = pointer(value) + h * channels
                    _take_rows(V, p, v, of_values, writer, state, a, _CHUNK, channels)
                    through = one
                    for i in range(_CHUNK - 1, -1, -1):
                        last[i] = through * source[state[a + i], h]
                        through = through * weights[i] if a + i > s else through
                    _scale_rows(V, V, p, last, 1, _CHUNK, p)
                    if c > 0:
                        reach[0] = through
                        _scale_rows(C + size, C, n, reach, 0, channels, n)
                    gemm(C + size, n, V, 1, p, K, n, channels, n, _CHUNK, mode)
            for c in range(chunks - 1, -1, -1):
                if stopped(stop):
                    return
                a = s + c * _CHUNK
                m = min(_CHUNK, end_ - a)
                _take_rows(Q, n, q, of_keys, reader, state, a, m, num_keys)
                _take_rows(K, n, k, of_keys, writer, state, a, m, num_keys)
                transpose(Kt, _CHUNK, K, n, m, n)
                _to_lower(scores, Q, n, Kt, m, num_keys)
                if c > 0:
                    f = a - _CHUNK
                    _fetch_rows(q, of_keys, reader, state, f, _CHUNK, num_keys)
                    _fetch_rows(k, of_keys, writer, state, f, _CHUNK, num_keys)
                    _fetch_rows(
                        vs, of_values, writer, state, f, _CHUNK, share * channels
                    )
                    _fetch_rows(
                        dys, of_values, reader, state, f, _CHUNK, share * channels
                    )
                    _fetch_rows(
                        dvs, of_values, writer, state, f, _CHUNK, share * channels
                    )
                    _fetch_rows(dq, of_grads, reader, state, f, _CHUNK, num_keys)
                    _fetch_rows(dk, of_grads, writer, state, f, _CHUNK, num_keys)
                clear(dQ, m * n)
                clear(dK, m * n)
                for x in range(share):
                    h, C, Zh = (
                        head + x,
                        states + (x * chunks + c) * size,
                        Z + 2 * x * size,
                    )
                    entry = h * weight.shape[1] + a - path - 1
                    weights, d_weights = (
                        pointer(weight) + entry,
                        pointer(grad_weight) + entry,
                    )
                    at = h * channels
                    v, dy, dv = (
                        pointer(value) + at,
                        pointer(grad) + at,
                        pointer(grad_value) + at,
                    )
                    _take_rows(V, p, v, of_values, writer, state, a, m, channels)
                    _take_rows(dY, p, dy, of_values, reader, state, a, m, channels)
                    for i in range(m):
                        M[i], S[i] = mark[state[a + i], h], source[state[a + i], h]
                    _scale_rows(V, V, p, S, 1, m, p)
                    transpose(Vt, _CHUNK, V, p, m, p)
                    _to_lower(products, dY, p, Vt, m, channels)
                    _decays(D, weights, m, one)
                    copy(last, D + (m - 1) * _CHUNK, m)
                    clear(sums, _CHUNK)
                    clear(d_reach, _CHUNK)
                    rest = one - one
                    if c > 0:
                        _reach(reach, weights, m, one)
                        for i in range(m):
                            marked[i] = M[i] * reach[i]
                        gemm(T, n, dY, p, 1, C, n, m, n, channels, SET)
                        _weigh_rows(d_reach, dQ, T, Q, marked, m, n)
                    if c < chunks - 1:
                        gemm(T, n, V, p, 1, Zh, n, m, n, channels, SET)
                        _weigh_rows(sums, dK, T, K, last, m, n)
                        gemm(dV, p, K, n, 1, Zh + size, p, m, p, num_keys, SET)
                        _scale_rows(dV, dV, p, last, 1, m, p)
                        if c > 0:
                            rest = inner_product(Zh, C, channels * n)
                    if c > 0:
                        if c < chunks - 1:
                            _scale_rows(Zh, Zh, n, reach + (m - 1), 0, channels, n)
                        _scale_rows(X, dY, p, marked, 1, m, p)
                        gemm(
                            Zh, n, X, 1, p, Q, n, channels, n, m,
                            ADD if c < chunks - 1 else SET,
                        )  # fmt: skip
                        transpose(Zh + size, p, Zh, n, channels, n)
                    _mask_backward(
                        D, scores, products, d_scores, sums, by_row, by_weight, weights,
                        M, m, ADD if x > 0 else SET, one,
                    )  # fmt: skip
                    _times_upper(dV, p, D, dY, p, m, p, ADD if c < chunks - 1 else SET)
                    _add_rows(dv, of_values, writer, state, a, dV, p, S, m, channels)
                    for i in range(m - 1, -1, -1):
                        u = state[a + i]
                        grad_source[u, h] = inner_product_of_rows(
                            dV + i * p, v + writer[u] * of_values, channels
                        )
                        grad_mark[u, h] = by_row[i]
                        if c > 0:
                            grad_mark[u, h] += reach[i] * d_reach[i]
                            rest += M[i] * d_reach[i]
                            if i > 0:
                                by_weight[i] += rest * reach[i - 1]
                                rest *= weights[i]
                            else:
                                by_weight[i] = rest
                        if a + i > s:
                            d_weights[i] = by_weight[i]
                _times_lower(dQ, n, d_scores, K, n, m, n, ADD)
                _times_upper(dK, n, d_scores, Q, n, m, n, ADD)
                for i in range(m):
                    reach[i] = one
                _add_rows(dq, of_grads, reader, state, a, dQ, n, reach, m, num_keys)
                _add_rows(dk, of_grads, writer, state, a, dK, n, reach, m, num_keys)
