"""Vectors, pointers and a matrix product for jitted kernels, built on LLVM intrinsics.

Loops over 16 or 32 numbers compile to mostly overhead. Here, a vector is a value that
stays in a register and has as many numbers as fit in one: 64 bytes with AVX-512, 32
with AVX, 16 elsewhere (LLVM supports any of these widths). ::

    p = pointer(x)                          # to the first number of an array
    v = load(p + 3)                         # a vector
    v = fma(splat(p[0]), v, load_some(p, n))    # n numbers, and zeros
    store(p, v)
    store_some(p, v, n)

Sums, differences, products and quotients use the usual operators. There are no bounds
checks and no reference counts: the array must outlive the pointer.
"""

import operator
from collections.abc import Callable, Iterable
from ctypes import c_int64
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import models, register_model
from numpy.lib.stride_tricks import as_strided

from pyg_chimera.ops.common.compilation import compiles_to
from pyg_chimera.ops.common.numba_runtime import inlined, jit


def _features() -> set[str]:
    """The CPU features of the machine that numba compiles for."""
    name, features = (getattr(config, f"CPU_{x}") for x in ("NAME", "FEATURES"))
    if features is not None:
        named = features.split(",")
        return {name[1:] for name in named if name.startswith("+")}
    if name not in (None, binding.get_host_cpu_name()):
        return set()
    return {name for name, has in binding.get_host_cpu_features().items() if has}


_FEATURES = _features()
_BYTES = 64 if "avx512f" in _FEATURES else 32 if "avx" in _FEATURES else 16
#: Vectors per row of a `gemm` tile. Its sums, one row of B and one number of A must fit
#: in the registers, of which there are 32 (AVX-512, arm64) or 16.
_SIDE = 2 if _BYTES == 32 else 4
_INT = ir.IntType(64)
_LANE = ir.IntType(32)

# ------------------------------------------------------------------------------- types


class PointerType(types.Type):
    """The numba type of pointers; integers can be read, but have no vectors."""

    def __init__(self, dtype: types.Number) -> None:
        self.dtype = dtype
        super().__init__(f"Pointer({dtype})")


class VectorType(types.Type):
    """The numba type of vectors, with as many numbers as fit in a register."""

    def __init__(self, dtype: types.Float) -> None:
        self.dtype = dtype
        super().__init__(f"Vector({dtype})")


def _vector(dtype: Any) -> ir.VectorType:
    bits = dtype.bitwidth
    real = ir.FloatType() if bits == 32 else ir.DoubleType()
    element = real if isinstance(dtype, types.Float) else ir.IntType(bits)
    return ir.VectorType(element, _BYTES * 8 // bits)


@register_model(PointerType)
class _PointerModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: PointerType) -> None:
        super().__init__(dmm, fe_type, _INT)


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: VectorType) -> None:
        super().__init__(dmm, fe_type, _vector(fe_type.dtype))


def _of_vectors(*args: types.Type) -> Any:
    are_vectors = isinstance(args[0], VectorType) and len(set(args)) == 1
    return args[0](*args) if are_vectors else None


def _to_vector(p: Any, *n: types.Type) -> Any:
    return VectorType(getattr(p, "dtype", p))(p, *[types.int64] * len(n))


def _to_nothing(p: PointerType, *args: types.Type) -> Any:
    integers = (types.int64 if isinstance(x, types.Integer) else x for x in args)
    return types.void(p, *integers)


# ------------------------------------------------------------------------ what LLVM has


class _Code:
    """Emits LLVM code; addresses are integers."""

    def __init__(self, builder: Any, dtype: Any) -> None:
        self.builder, self.vector = builder, _vector(dtype)
        self.bytes, self.count = dtype.bitwidth // 8, self.vector.count
        self.zeros = ir.Constant(self.vector, None)

    def call(self, name: str, result: ir.Type, *args: Any, **options: Any) -> Any:
        """Calls an LLVM intrinsic; * stands for the type of vectors in its name."""
        name = name.replace("*", f"v{self.count}f{8 * self.bytes}")
        kind = ir.FunctionType(result, [x.type for x in args])
        function = cgutils.get_or_insert_function(
            self.builder.module, kind, f"llvm.{name}"
        )
        return self.builder.call(function, args, **options)

    def at(self, address: Any, kind: ir.Type) -> Any:
        return self.builder.inttoptr(address, kind.as_pointer())

    def row(self, address: Any, stride: Any, i: Any) -> Any:
        """The address of a row, if the first numbers of rows are `stride` apart."""
        i, stride = (_INT(x) if isinstance(x, int) else x for x in (i, stride))
        step = self.builder.mul(stride, _INT(self.bytes))
        return self.builder.add(address, self.builder.mul(i, step))

    def number(self, address: Any, kind: ir.Type | None = None) -> Any:
        return self.builder.load(self.at(address, kind or self.vector.element))

    def prefetch(self, address: Any) -> None:
        args = self.at(address, ir.IntType(8)), _LANE(0), _LANE(2), _LANE(1)
        self.call("prefetch.p0", ir.VoidType(), *args)

    def load(self, address: Any) -> Any:
        value = self.builder.load(self.at(address, self.vector))
        value.align = self.bytes
        return value

    def load_some(self, address: Any, n: Any) -> Any:
        pointer, align = self.at(address, self.vector), _LANE(self.bytes)
        args = pointer, align, self.mask(n), self.zeros
        return self.call("masked.load.*.p0", self.vector, *args)

    def repeated(self, address: Any, n: Any) -> Any:
        """The next numbers, as many as a power of two, again and again."""
        index = ir.Constant(ir.VectorType(_INT, self.count), list(range(self.count)))
        last = self.splat(self.builder.sub(n, _INT(1)))
        size = self.splat(_INT(self.bytes))
        steps = self.builder.mul(self.builder.and_(index, last), size)
        places = self.builder.add(self.splat(address), steps)
        kind = ir.VectorType(self.vector.element.as_pointer(), self.count)
        places = self.builder.inttoptr(places, kind)
        mask = ir.Constant(ir.VectorType(ir.IntType(1), self.count), [1] * self.count)
        name = f"masked.gather.*.v{self.count}p0"
        args = places, _LANE(self.bytes), mask, self.zeros
        return self.call(name, self.vector, *args)

    def store(self, address: Any, value: Any) -> None:
        self.builder.store(value, self.at(address, self.vector)).align = self.bytes

    def store_some(self, address: Any, value: Any, n: Any) -> None:
        pointer, align = self.at(address, self.vector), _LANE(self.bytes)
        args = value, pointer, align, self.mask(n)
        self.call("masked.store.*.p0", ir.VoidType(), *args)

    def mask(self, n: Any) -> Any:
        """A mask of the lanes below n."""
        limit = self.splat(self.builder.trunc(n, _LANE))
        return self.builder.icmp_signed("<", _lanes(range(self.count)), limit)

    def splat(self, value: Any) -> Any:
        vector = ir.VectorType(value.type, self.count)
        one = ir.Constant(vector, ir.Undefined)
        one = self.builder.insert_element(one, value, _LANE(0))
        return self.builder.shuffle_vector(one, one, _lanes([0] * self.count))

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.call("fma.*", self.vector, a, b, c)

    def total(self, v: Any) -> Any:
        start = ir.Constant(v.type.element, -0.0)
        options = {"fastmath": ("reassoc",)}
        return self.call("vector.reduce.fadd.*", start.type, start, v, **options)

    def first(self, v: Any, n: Any) -> Any:
        return self.builder.select(self.mask(n), v, self.zeros)

    def choose(self, sign: str, a: Any, b: Any) -> Any:
        """In each lane b if it is larger, or smaller, than a, otherwise a."""
        return self.builder.select(self.builder.fcmp_ordered(sign, b, a), b, a)

    def power_of_two(self, v: Any) -> Any:
        bias, shift = (127, 23) if self.bytes == 4 else (1023, 52)
        integers = ir.VectorType(ir.IntType(8 * self.bytes), self.count)
        n = self.builder.fptosi(v, integers)
        n = self.builder.add(n, ir.Constant(integers, [bias] * self.count))
        n = self.builder.shl(n, ir.Constant(integers, [shift] * self.count))
        return self.builder.bitcast(n, self.vector)

    def exchanged(self, a: Any, b: Any, step: int) -> tuple[Any, Any]:
        """Two rows, whose squares of size `step` off the diagonal are exchanged."""
        lanes = range(self.count)
        low = _lanes(self.count + j - step if j & step else j for j in lanes)
        high = _lanes(self.count + j if j & step else j + step for j in lanes)
        shuffle = self.builder.shuffle_vector
        return shuffle(a, b, low), shuffle(a, b, high)

    def row_totals(self, p: Any) -> Any:
        rows = [self.load(self.row(p, self.count, i)) for i in range(self.count)]
        step = 1
        while step < self.count:
            pairs = zip(rows[::2], rows[1::2], strict=True)
            rows = [self.builder.fadd(*self.exchanged(*x, step)) for x in pairs]
            step *= 2
        return rows[0]

    def transpose_square(self, target: Any, ldt: Any, source: Any, lds: Any) -> None:
        rows = [self.load(self.row(source, lds, i)) for i in range(self.count)]
        step = 1
        while step < self.count:
            for i in range(self.count):
                if not i & step:
                    pair = self.exchanged(rows[i], rows[i + step], step)
                    rows[i], rows[i + step] = pair
            step *= 2
        for i, row in enumerate(rows):
            self.store(self.row(target, ldt, i), row)


def _lanes(numbers: Iterable[int]) -> ir.Constant:
    numbers = list(numbers)
    return ir.Constant(ir.VectorType(_LANE, len(numbers)), numbers)


def _compiles_to(typed: Callable, emit: Callable, kinds: tuple = ()) -> Callable:
    """As `compiles_to`; `emit` is given a `_Code` of the first argument's dtype."""

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        dtype = getattr(signature.args[0], "dtype", signature.args[0])
        return emit(_Code(builder, dtype), *args)

    return compiles_to(typed, lower, kinds)


# ---------------------------------------------- the same, in plain and in jitted Python


class Pointer:
    """Points to a number in memory; in jitted code an unchecked address."""

    def __init__(self, memory: np.ndarray, at: int = 0) -> None:
        self.memory, self.at = memory, int(at)

    def __add__(self, step: int) -> "Pointer":
        return Pointer(self.memory, self.at + step)

    def __getitem__(self, i: int) -> Any:
        return (self + i).next(1)[0]

    def __setitem__(self, i: int, x: Any) -> None:
        (self + i).next(1)[0] = x

    def next(self, n: int) -> np.ndarray:
        """The next n numbers; checked to be within the array."""
        if n > 0 and not 0 <= self.at <= self.at + n <= self.memory.shape[0]:
            raise IndexError(
                f"{n} from {self.at} on, of {self.memory.shape[0]} numbers"
            )
        return self.memory[self.at : self.at + n]


def _data(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.ptrtoint(data, _INT)


@compiles_to(lambda array: PointerType(array.dtype)(array), _data)
def pointer(array: np.ndarray) -> Pointer:
    """A pointer to the first number of an array with any strides."""
    last = sum(
        max(n - 1, 0) * s for n, s in zip(array.shape, array.strides, strict=True)
    )
    size = last // array.itemsize + 1 if array.size else 0
    return Pointer(as_strided(array, (size,), (array.itemsize,)))


def _is_place(p: types.Type, i: types.Type) -> bool:
    return isinstance(p, PointerType) and isinstance(i, types.Integer)


_compiles_to(
    lambda p, i: p(p, types.int64) if _is_place(p, i) else None,
    lambda code, p, i: code.row(p, 1, i),
    (PointerType, types.Integer),
)(operator.add)
_compiles_to(
    lambda p, i: p.dtype(p, types.int64) if _is_place(p, i) else None,
    lambda code, p, i: code.number(code.row(p, 1, i)),
    (PointerType, types.Integer),
)(operator.getitem)
_compiles_to(
    lambda p, i, x: (
        types.void(p, types.int64, x) if _is_place(p, i) and x == p.dtype else None
    ),
    lambda code, p, i, x: code.builder.store(x, code.at(code.row(p, 1, i), x.type)),
    (PointerType, types.Integer, types.Float),
)(operator.setitem)
for _name in ("add", "sub", "mul", "truediv"):
    _compiles_to(
        _of_vectors,
        lambda code, a, b, name=_name: getattr(code.builder, f"f{name[-3:]}")(a, b),
        (VectorType, VectorType),
    )(getattr(operator, _name))


@_compiles_to(lambda p: types.int64(p), lambda code, p: _INT(code.count))
def lanes(p: Pointer) -> int:
    """How many numbers a vector of the pointer's dtype has."""
    return _BYTES // p.memory.itemsize


@_compiles_to(_to_vector, _Code.load)
def load(p: Pointer) -> np.ndarray:
    """The vector that starts at a pointer."""
    return p.next(lanes(p)).copy()


@_compiles_to(_to_vector, _Code.load_some)
def load_some(p: Pointer, n: int) -> np.ndarray:
    """The first `n` numbers from a pointer on, then zeros; no other memory is read."""
    v = zeros(p)
    n = min(max(n, 0), lanes(p))
    v[:n] = p.next(n)
    return v


@_compiles_to(_to_vector, _Code.repeated)
def repeated(p: Pointer, n: int) -> np.ndarray:
    """The next `n` numbers, a power of two up to `lanes(p)`, as often as they fit."""
    return np.tile(p.next(n), lanes(p) // n)


@_compiles_to(_to_nothing, _Code.store)
def store(p: Pointer, v: np.ndarray) -> None:
    """Writes a vector to a pointer."""
    p.next(lanes(p))[:] = v


@_compiles_to(_to_nothing, _Code.store_some)
def store_some(p: Pointer, v: np.ndarray, n: int) -> None:
    """Writes the first `n` numbers of a vector; no other memory is written."""
    n = min(max(n, 0), lanes(p))
    p.next(n)[:] = v[:n]


@inlined
def load_part(p, n):
    """Loads a vector, or if fewer than its lanes remain of a row, `n` numbers."""
    return load(p) if n >= lanes(p) else load_some(p, n)


@inlined
def store_part(p, v, n):
    """Stores a vector, or if fewer than its lanes remain of a row, `n` numbers."""
    if n >= lanes(p):
        store(p, v)
    else:
        store_some(p, v, n)


@_compiles_to(_to_nothing, _Code.prefetch)
def prefetch(p: Pointer) -> None:
    """Prefetches the pointer's cache line."""


@_compiles_to(_to_vector, _Code.splat)
def splat(x: Any) -> np.ndarray:
    """A vector with one number in all lanes."""
    return np.full(_BYTES // x.itemsize, x)


@_compiles_to(_to_vector, lambda code, p: code.zeros)
def zeros(p: Pointer) -> np.ndarray:
    """A vector of zeros of the pointer's dtype."""
    return np.zeros(lanes(p), p.memory.dtype)


@_compiles_to(_of_vectors, _Code.fma)
def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns a * b + c, rounded once."""
    return a * b + c


@_compiles_to(lambda v: v.dtype(v), _Code.total)
def total(v: np.ndarray) -> Any:
    """The sum over the lanes of a vector."""
    return v.sum()


@_compiles_to(lambda v, n: v(v, types.int64), _Code.first)
def first(v: np.ndarray, n: int) -> np.ndarray:
    """The first `n` numbers of a vector, then zeros, even in place of NaN."""
    return np.where(np.arange(v.shape[0]) < n, v, v.dtype.type(0))


@_compiles_to(_of_vectors, lambda code, a, b: code.choose(">", a, b))
def larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The larger number in each lane; that of `a`, NaN included, unless `b` is."""
    return np.where(b > a, b, a)


@_compiles_to(_of_vectors, lambda code, a, b: code.choose("<", a, b))
def smaller(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The smaller number in each lane; that of `a`, NaN included, unless `b` is."""
    return np.where(b < a, b, a)


@_compiles_to(_of_vectors, lambda code, v: code.call("floor.*", v.type, v))
def floor(v: np.ndarray) -> np.ndarray:
    """The numbers of a vector, rounded down to integers."""
    return np.floor(v)


@_compiles_to(_of_vectors, _Code.power_of_two)
def power_of_two(v: np.ndarray) -> np.ndarray:
    """Two to the power of integral values within the exponents of normal numbers."""
    return np.exp2(v)


@_compiles_to(_to_vector, _Code.row_totals)
def row_totals(p: Pointer) -> np.ndarray:
    """The sum of each of `lanes(p)` consecutive vectors, as one vector."""
    return p.next(lanes(p) ** 2).reshape(-1, lanes(p)).sum(1)


@_compiles_to(_to_nothing, _Code.transpose_square)
def transpose_square(target: Pointer, ldt: int, source: Pointer, lds: int) -> None:
    """Transposes a square of `lanes(source)` rows and columns.

    Consecutive rows are `lds` numbers apart in the source, `ldt` in the target.
    """
    rows = [load(source + i * lds) for i in range(lanes(source))]
    for i, row in enumerate(np.stack(rows, 1)):
        store(target + i * ldt, row)


# ---------------------------------------------------------------------- matrix products

#: How C is updated: to A B, C + A B or C - A B.
SET, ADD, SUBTRACT = 0, 1, -1


def _product(
    heights: Iterable[int], side: int, *, some: bool = False, gathered: bool = False
) -> Callable:
    """Makes the product of a few rows of A, as many as one of the heights, with `side`
    adjacent vectors of B's rows, which keeps all sums in registers. Its arguments:

    * C: a pointer, how far apart rows are, and with `gathered` the address of their
      indices; A: a pointer, how far apart rows are, and columns; B: as C.
    * The first row of A, the number of rows, that of columns, and with `some`, how many
      numbers of rows of B and C are accessed.
    * How C is updated.
    """

    def typed(c: Any, a: Any, b: Any, size: Any, mode: Any) -> Any:
        i, p = types.int64, c[0]
        matrix = types.Tuple([p, i, i])
        return types.void(matrix, matrix, matrix, types.UniTuple(i, 4), i)

    def lower(context: Any, builder: Any, signature: Any, args: Any) -> None:
        code = _Code(builder, signature.args[0][0].dtype)
        unpacked = (cgutils.unpack_tuple(builder, x) for x in args[:4])
        c, (a, ra, ca), b, (start, m, k, n) = unpacked
        mode = args[4]

        def row(matrix: Any, i: Any) -> list[Any]:
            address, stride, index = matrix
            if gathered:
                place = builder.add(index, builder.mul(i, _INT(8)))
                i = code.number(place, _INT)
            address = code.row(address, stride, i)
            return [code.row(address, code.count, j) for j in range(side)]

        def read(address: Any) -> Any:
            return code.load_some(address, n) if some else code.load(address)

        def write(address: Any, value: Any) -> None:
            if some:
                code.store_some(address, value, n)
            else:
                code.store(address, value)

        is_set, is_sum = (builder.icmp_signed("==", mode, _INT(x)) for x in (SET, ADD))
        a = code.row(a, ra, start)
        end = builder.append_basic_block()
        choice = builder.switch(m, end)
        for rows in heights:
            block = builder.append_basic_block()
            choice.add_case(_INT(rows), block)
            builder.position_at_end(block)
            sums = [
                cgutils.alloca_once_value(builder, code.zeros)
                for _ in range(rows * side)
            ]
            with cgutils.for_range(builder, k) as loop:
                right = [read(x) for x in row(b, loop.index)]
                column = code.row(a, ca, loop.index)
                for r in range(rows):
                    left = code.splat(code.number(code.row(column, ra, r)))
                    for j, at in enumerate(sums[r * side : (r + 1) * side]):
                        builder.store(code.fma(left, right[j], builder.load(at)), at)
            out = [x for r in range(rows) for x in row(c, builder.add(start, _INT(r)))]
            with builder.if_else(is_set) as (then, otherwise):
                with then:
                    for x, at in zip(out, sums, strict=True):
                        write(x, builder.load(at))
                with otherwise:
                    for x, at in zip(out, sums, strict=True):
                        old, new = read(x), builder.load(at)
                        both = builder.fadd(old, new), builder.fsub(old, new)
                        write(x, builder.select(is_sum, *both))
            builder.branch(end)
        builder.position_at_end(end)

    @compiles_to(typed, lower)
    def product(c: Any, a: Any, b: Any, size: Any, mode: int) -> None:
        (p, ldc, at_c), (left, ra, ca), (q, ldb, at_b) = c, a, b
        start, m, k, n = size
        width = n if some else side * lanes(p)
        own = _indices(at_c, start + m) if gathered else range(start + m)
        other = _indices(at_b, k) if gathered else range(k)
        for r in range(start, start + m):
            row, out = left + r * ra, (p + own[r] * ldc).next(width)
            sums = np.zeros_like(out)
            for i in range(k):
                sums += row[i * ca] * (q + other[i] * ldb).next(width)
            out[:] = sums if mode == SET else out + mode * sums

    return product


def _indices(address: int, count: int) -> np.ndarray:
    """The row indices at an address, for use in plain Python."""
    return np.ctypeslib.as_array((c_int64 * count).from_address(int(address)))


_panel = _product(range(1, 7), _SIDE)
_panel_of_rows = _product(range(1, 7), _SIDE, gathered=True)
_column = _product((1, 2, 3, 6, 12), 1, some=True)


@compiles_to(
    lambda: types.void(),
    lambda context, builder, *_: builder.function.attributes.add("noinline"),
)
def _apart() -> None:
    """Keeps the calling function from being inlined into each of its callers."""


@jit
def gemm(c, a, b, size, mode):
    """Sets C [m, n] to A B, C + A B or C - A B, with A [m, k] and B [k, n].

    C and B are a pointer and how many numbers their rows, which are contiguous, are
    apart; A is a pointer and how many its rows are apart, and its columns, so it may be
    transposed. The size is (m, n, k).
    """
    _apart()
    (to, ldc), (right, ldb), (m, n, k) = c, b, size
    width, j = lanes(to), 0
    while j < n:
        C, B, i = (to + j, ldc, 0), (right + j, ldb, 0), 0
        if j + _SIDE * width <= n:
            for share in range((m + 5) // 6, 0, -1):  # even: small tiles are slow
                rows = (m - i + share - 1) // share
                _panel(C, a, B, (i, rows, k, 0), mode)
                i += rows
            j += _SIDE * width
        else:
            while i < m:
                rows = 12 if m - i >= 12 else 6 if m - i >= 6 else min(m - i, 3)
                _column(C, a, B, (i, rows, k, min(width, n - j)), mode)
                i += rows
            j += width


def vector_lanes(dtype: np.dtype) -> tuple[int, int]:
    """The numbers in a vector, and those that `gemm_rows` handles side by side."""
    count = _BYTES // dtype.itemsize
    return count, _SIDE * count


@jit
def gemm_rows(c, a, b, size, mode):
    """As `gemm`, for rows of C and B that are given by indices.

    The third entries of C and B are addresses of int64 indices, and n is a multiple of
    `vector_lanes(dtype)[1]`.
    """
    (to, ldc, at_c), (right, ldb, at_b), (m, n, k) = c, b, size
    for j in range(0, n, _SIDE * lanes(to)):
        C, B, i = (to + j, ldc, at_c), (right + j, ldb, at_b), 0
        for share in range((m + 5) // 6, 0, -1):
            rows = (m - i + share - 1) // share
            _panel_of_rows(C, a, B, (i, rows, k, 0), mode)
            i += rows
