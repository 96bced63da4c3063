"""Vectorized loops that kernels share: products, copies, exponentials.

Matrix rows are zero-padded to a multiple of `LANES` numbers, as a remainder would be
processed number by number.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import overload

from pyg_chimera.ops.common.compilation import compiles_to
from pyg_chimera.ops.common.numba_runtime import jit
from pyg_chimera.ops.common.simd import (
    SET,
    VectorType,
    floor,
    fma,
    gemm,
    lanes,
    larger,
    load,
    load_part,
    pointer,
    power_of_two,
    smaller,
    splat,
    store,
    store_part,
    total,
    transpose_square,
    zeros,
)

#: Matrix rows are padded to a multiple of this.
LANES = 16


@jit
def matmul(C, A, B, mode=SET):
    """C = A B, C + A B or C - A B; rows of B and C are contiguous."""
    size, (m, n) = C.itemsize, C.shape
    left = pointer(A), A.strides[0] // size, A.strides[1] // size
    right = pointer(B), B.strides[0] // size
    gemm((pointer(C), C.strides[0] // size), left, right, (m, n, B.shape[0]), mode)


@jit
def workspace(scratch, at, rows, columns):
    """A matrix in scratch memory from a place on, and the place after it."""
    end = at + rows * columns
    return scratch[at:end].reshape(rows, columns), end


@jit
def multiply(out, left, right):
    """The entrywise product of two matrices."""
    for i in range(out.shape[0]):
        target, x, y = out[i], left[i], right[i]
        for j in range(out.shape[1]):
            target[j] = x[j] * y[j]


@jit
def assign(target, source):
    """Copy a matrix with contiguous rows; numba takes seconds to compile `target[:] =
    source`.
    """
    size = target.shape[1]
    for i in range(target.shape[0]):
        to, row = pointer(target[i]), pointer(source[i])
        for at in range(0, size, lanes(to)):
            store_part(to + at, load_part(row + at, size - at), size - at)


@jit
def take(target, source, nodes, h):
    """Copy source[nodes, h], [n, C], to a contiguous target."""
    for i in range(nodes.shape[0]):
        for c in range(target.shape[1]):
            target[i, c] = source[nodes[i], h, c]


@jit
def take_transposed(target, source, nodes, h):
    """Copy source[nodes, h] to a contiguous [C, n], zero-padded."""
    target[:, nodes.shape[0] :] = 0
    for i in range(nodes.shape[0]):
        row = source[nodes[i], h]
        for c in range(row.shape[0]):
            target[c, i] = row[c]


@jit
def put(target, source, nodes, h):
    """Copy [n, C] to target[nodes, h]."""
    for i in range(nodes.shape[0]):
        for c in range(source.shape[1]):
            target[nodes[i], h, c] = source[i, c]


@jit
def put_transposed(target, source, nodes, h):
    """Copy [C, n] to target[nodes, h], transposed."""
    for i in range(nodes.shape[0]):
        row = target[nodes[i], h]
        for c in range(row.shape[0]):
            row[c] = source[c, i]


@jit
def set_identity(rows):
    """Set a matrix to the identity."""
    rows[:] = 0
    for i in range(rows.shape[0]):
        rows[i, i] = 1


@jit
def transpose(target, ldt, source, lds, m, n):
    """Transpose [m, n]; both sizes are rounded up to whole vectors."""
    step = lanes(target)
    for i in range(0, m, step):
        for j in range(0, n, step):
            transpose_square(target + (j * ldt + i), ldt, source + (i * lds + j), lds)


@jit
def clear(target, size):
    """Set `size` numbers, rounded up to whole vectors, to zero."""
    for at in range(0, size, lanes(target)):
        store(target + at, zeros(target))


@jit
def copy(target, source, size):
    """Copy `size` numbers, rounded up to whole vectors."""
    for at in range(0, size, lanes(target)):
        store(target + at, load(source + at))


@jit
def add_multiple(target, f, source, size):
    """Adds f times the source row to the target row, of any length."""
    factor = splat(f)
    for at in range(0, size, lanes(target)):
        left = size - at
        sums = fma(factor, load_part(source + at, left), load_part(target + at, left))
        store_part(target + at, sums, left)


@jit
def even_share(number, most):
    """The size of even shares, in the fewest shares of at most `most` each."""
    shares = max(1, (number + most - 1) // most)
    return max(1, (number + shares - 1) // shares)


@jit
def inner_product(p, q, size):
    """The inner product of two states, in four sums to hide the latency of adding."""
    step = lanes(p)
    s0, s1, s2, s3 = zeros(p), zeros(p), zeros(p), zeros(p)
    at = 0
    while at + 4 * step <= size:
        s0 = fma(load(p + at), load(q + at), s0)
        s1 = fma(load(p + (at + step)), load(q + (at + step)), s1)
        s2 = fma(load(p + (at + 2 * step)), load(q + (at + 2 * step)), s2)
        s3 = fma(load(p + (at + 3 * step)), load(q + (at + 3 * step)), s3)
        at += 4 * step
    while at < size:
        s0 = fma(load(p + at), load(q + at), s0)
        at += step
    return total((s0 + s1) + (s2 + s3))


@jit
def inner_product_of_rows(x, y, size):
    """The inner product of two rows of any length."""
    sums = zeros(x)
    for at in range(0, size, lanes(x)):
        sums = fma(load_part(x + at, size - at), load_part(y + at, size - at), sums)
    return total(sums)


# ---------------------------------------------------------------------- exponentials

LOG_2 = math.log(2)
_TAYLOR = [LOG_2**k / math.factorial(k) for k in range(13)]
_TAYLOR_64 = tuple(_TAYLOR[::-1])
_TAYLOR_32 = tuple(np.float32(c) for c in _TAYLOR[6::-1])


def exp2(x: float) -> float:
    """2^x of a vector, or of a number in a loop, which the compiler then vectorizes
    (the C library's function it cannot); accurate to the last bits.

    x = n + r with an integer n, which becomes the exponent, and |r| <= 1/2, for which
    a polynomial is evaluated. Results below the smallest normal number are set to it.
    """
    return np.exp2(x)


# Sums must not be reordered here: x - n is exact only if evaluated as written.
@overload(exp2, jit_options={"fastmath": {"contract"}})
def _overload_exp2(x):
    if (x.dtype if isinstance(x, VectorType) else x) == types.float32:
        real, integer, bias, shift = np.float32, np.int32, 127, 23
        coefficients = _TAYLOR_32
    else:
        real, integer, bias, shift = np.float64, np.int64, 1023, 52
        coefficients = _TAYLOR_64
    degree = len(coefficients)
    least, most, half = real(1 - bias), real(bias + 1), real(0.5)
    bias, shift = integer(bias), integer(shift)

    def exp2_of_vector(x):
        x = smaller(larger(x, splat(least)), splat(most))
        n = floor(x + splat(half))
        r = x - n
        p = splat(coefficients[0])
        for k in range(1, degree):
            p = fma(p, r, splat(coefficients[k]))
        return p * power_of_two(n)

    def exp2(x):
        # Comparisons with NaN are false, so NaN propagates.
        x = least if x < least else x
        x = most if x > most else x
        n = np.floor(x + half)
        r = x - n
        p = coefficients[0]
        for k in range(1, degree):
            p = p * r + coefficients[k]
        return p * integer((integer(n) + bias) << shift).view(real)

    return exp2_of_vector if isinstance(x, VectorType) else exp2


# --------------------------------------------------------------- what numba cannot say


def _mark(context: Any, builder: Any, signature: Any, args: Any) -> None:
    for argument in builder.function.args:
        if isinstance(argument.type, ir.PointerType):
            argument.add_attribute("noalias")
    attributes = builder.function.attributes
    if isinstance(attributes, set):  # llvmlite's `add` rejects those with a value
        set.add(attributes, '"prefer-vector-width"="512"')


@compiles_to(lambda: types.void(), _mark)
def optimized() -> None:
    """Passes hints to the compiler of the calling kernel that numba has no options for.

    First, that its arrays do not overlap, so that one loop may write to several.
    Second, to use the full vector width: LLVM may prefer half of it to keep clock rates
    high, which takes 1.5 times as long here.
    """
