"""What solutions of the system of states leave, in twice the precision.

Where cycles of few nodes lose 1 / c of a state, rounding errors outside of their keys'
span return c times, as do the gradients there. Errors of dA = <E Z, S> are then c^2
epsilons, unless states are exact but for their own rounding. So sums are carried in two
numbers, as in `"Accurate Sum and Dot Product" <https://doi.org/10.1137/030601818>`_.
"""

from pyg_chimera.ops.common.compilation import compiled
from pyg_chimera.ops.common.simd import (
    fma,
    lanes,
    load_part,
    pointer,
    splat,
    store_part,
    zeros,
)

# Compiled without fast arithmetic, as sums must not be reordered.


@compiled()
def _add(high, low, f, x, size):
    """Adds f times a row to the sum of two rows, without rounding."""
    factor, minus = splat(f), splat(-f)
    for at in range(0, size, lanes(high)):
        left = size - at
        a, y = load_part(high + at, left), load_part(x + at, left)
        product = fma(factor, y, zeros(high))
        total = a + product
        b = total - a
        lost = (a - (total - b)) + (product - b) - fma(minus, y, product)
        store_part(high + at, total, left)
        store_part(low + at, load_part(low + at, left) + lost, left)


@compiled()
def _add_sum(high, low, f, x, rest, size):
    """Adds f times the sum of two rows, of which the second is small."""
    _add(high, low, f, x, size)
    factor = splat(f)
    for at in range(0, size, lanes(low)):
        left = size - at
        more = fma(factor, load_part(rest + at, left), load_part(low + at, left))
        store_part(low + at, more, left)


@compiled()
def residual(R, X, given, transposed, plan, task, operands):
    """Sets R[0] to b k v^T - X + E A X or, transposed, to q dy^T - X + (E A)^T X, where
    the values or gradients are given.
    """
    query, key, beta, weight = (
        operands.query,
        operands.key,
        operands.beta,
        operands.weight,
    )
    N, h, (_, count, size) = key.shape[2], task.h, R.shape
    P, few = size // N, pointer(task.vectors)
    y0, y1, e0, e1 = few, few + size, few + 2 * size, few + (2 * size + P)
    u0, u1 = few + (2 * size + 2 * P), few + (2 * size + 3 * P)
    R[:] = 0
    for i in range(count):
        node = plan.nodes.node[task.start + i]
        b, k, own = beta[node, h], pointer(key[node, task.g]), pointer(X[i])
        first, last = plan.edge_ptr[task.start + i], plan.edge_ptr[task.start + i + 1]
        task.vectors[:] = 0
        if transposed:
            _add(y0, y1, 1.0, own, size)
        else:
            _add(e0, e1, 1.0, pointer(given[node, h]), P)
            for at in range(first, last):
                source = pointer(X[plan.source[at] - task.start])
                _add(y0, y1, weight[plan.edge[at], h], source, size)
        for a in range(N):
            _add_sum(e0, e1, -k[a], y0 + a * P, y1 + a * P, P)
        _add_sum(u0, u1, b, e0, e1, P)
        for a in range(N):
            _add_sum(y0 + a * P, y1 + a * P, k[a], u0, u1, P)
        R0, R1 = pointer(R[0, i]), pointer(R[1, i])
        if transposed:
            for at in range(first, last):
                j = plan.source[at] - task.start
                f, to = weight[plan.edge[at], h], pointer(R[1, j])
                _add_sum(pointer(R[0, j]), to, f, y0, y1, size)
            for a in range(N):
                f, dy = query[node, task.g, a], pointer(given[node, h])
                _add(R0 + a * P, R1 + a * P, f, dy, P)
        else:
            _add_sum(R0, R1, 1.0, y0, y1, size)
        _add(R0, R1, -1.0, own, size)
    for i in range(count):
        for c in range(size):
            R[0, i, c] += R[1, i, c]
