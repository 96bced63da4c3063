"""Vectors, pointers and a matrix product for jitted kernels, built on LLVM intrinsics.

Loops over 16 or 32 numbers compile to mostly overhead. Here, a vector is a value that
stays in a register and has as many numbers as fit in one: 64 bytes with AVX-512, 32
with AVX, 16 elsewhere (LLVM supports any of these widths). ::

    p = pointer(x)                          # to the first number of an array
    v = load(p + 3)                         # a vector
    v = fma(splat(p[0]), v, load_some(p, n))    # n numbers, and zeros
    store(p, v)
    store_some(p, v, n)

Sums, differences and products use the usual operators. There are no bounds checks and
no reference counts: the array must outlive the pointer.
"""

import operator
from collections.abc import Callable
from ctypes import c_int64
from functools import partial
from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import (
    intrinsic,
    lower_builtin,
    models,
    overload,
    register_model,
    type_callable,
)
from numpy.lib.stride_tricks import as_strided

from pyg_chimera.ops.common.numba_runtime import inlined, jit

__all__ = [
    "ADD",
    "SET",
    "SUBTRACT",
    "first",
    "floor",
    "fma",
    "gemm",
    "gemm_rows",
    "lanes",
    "larger",
    "largest",
    "load",
    "load_part",
    "load_some",
    "pointer",
    "power_of_two",
    "prefetch",
    "row_totals",
    "smaller",
    "splat",
    "store",
    "store_part",
    "store_some",
    "total",
    "transpose_square",
    "vector_lanes",
    "zeros",
]


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

# ---------------------------------------------------------------------- in plain Python


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


def pointer(array: np.ndarray) -> Pointer:
    """A pointer to the first number of an array with any strides."""
    last = sum(
        max(n - 1, 0) * s for n, s in zip(array.shape, array.strides, strict=True)
    )
    size = last // array.itemsize + 1 if array.size else 0
    return Pointer(as_strided(array, (size,), (array.itemsize,)))


def lanes(p: Pointer) -> int:
    """How many numbers a vector of the pointer's dtype has."""
    return _BYTES // p.memory.itemsize


def load(p: Pointer) -> np.ndarray:
    """The vector that starts at a pointer."""
    return p.next(lanes(p)).copy()


def load_some(p: Pointer, n: int) -> np.ndarray:
    """The first `n` numbers from a pointer on, then zeros; no other memory is read."""
    v = zeros(p)
    n = min(max(n, 0), lanes(p))
    v[:n] = p.next(n)
    return v


def store(p: Pointer, v: np.ndarray) -> None:
    """Writes a vector to a pointer."""
    p.next(lanes(p))[:] = v


def store_some(p: Pointer, v: np.ndarray, n: int) -> None:
    """Writes the first `n` numbers of a vector; no other memory is written."""
    n = min(max(n, 0), lanes(p))
    p.next(n)[:] = v[:n]


def prefetch(p: Pointer) -> None:
    """Prefetches the pointer's cache line."""


def splat(x: Any) -> np.ndarray:
    """A vector with one number in all lanes."""
    return np.full(_BYTES // x.itemsize, x)


def zeros(p: Pointer) -> np.ndarray:
    """A vector of zeros of the pointer's dtype."""
    return np.zeros(lanes(p), p.memory.dtype)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Returns a * b + c, rounded once."""
    return a * b + c


def total(v: np.ndarray) -> Any:
    """The sum over the lanes of a vector."""
    return v.sum()


def first(v: np.ndarray, n: int) -> np.ndarray:
    """The first `n` numbers of a vector, then zeros, even in place of NaN."""
    return np.where(np.arange(v.shape[0]) < n, v, v.dtype.type(0))


def larger(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The larger number in each lane; that of `a`, NaN included, unless `b` is."""
    return np.where(b > a, b, a)


def smaller(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The smaller number in each lane; that of `a`, NaN included, unless `b` is."""
    return np.where(b < a, b, a)


def largest(v: np.ndarray) -> Any:
    """The largest number of a vector; arbitrary if one of them is NaN."""
    return v.max()


def floor(v: np.ndarray) -> np.ndarray:
    """The numbers of a vector, rounded down to integers."""
    return np.floor(v)


def power_of_two(v: np.ndarray) -> np.ndarray:
    """Two to the power of integral values within the exponents of normal numbers."""
    return np.exp2(v)


def row_totals(p: Pointer) -> np.ndarray:
    """The sum of each of `lanes(p)` consecutive vectors, as one vector."""
    return p.next(lanes(p) ** 2).reshape(-1, lanes(p)).sum(1)


def transpose_square(target: Pointer, ldt: int, source: Pointer, lds: int) -> None:
    """Transposes a square of `lanes(source)` rows and columns.

    Consecutive rows are `lds` numbers apart in the source, `ldt` in the target.
    """
    rows = [load(source + i * lds) for i in range(lanes(source))]
    for i, row in enumerate(np.stack(rows, 1)):
        store(target + i * ldt, row)


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


def _count(dtype: types.Float) -> int:
    return _BYTES * 8 // dtype.bitwidth


def _vector(dtype: types.Float) -> ir.VectorType:
    element = ir.FloatType() if dtype.bitwidth == 32 else ir.DoubleType()
    return ir.VectorType(element, _count(dtype))


@register_model(PointerType)
class _PointerModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: PointerType) -> None:
        super().__init__(dmm, fe_type, _INT)


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: VectorType) -> None:
        super().__init__(dmm, fe_type, _vector(fe_type.dtype))


# ------------------------------------------------------------------------ what LLVM has


def _at(builder: Any, address: Any, element: ir.Type) -> Any:
    return builder.inttoptr(address, element.as_pointer())


def _load(builder: Any, address: Any, vector: ir.VectorType) -> Any:
    value = builder.load(_at(builder, address, vector))
    value.align = _size(vector)
    return value


def _store(builder: Any, value: Any, address: Any) -> None:
    stored = builder.store(value, _at(builder, address, value.type))
    stored.align = _size(value.type)


def _size(vector: ir.VectorType) -> int:
    """Bytes per number."""
    return _BYTES // vector.count


def _name(vector: ir.VectorType) -> str:
    return f"v{vector.count}f{8 * _size(vector)}"


def _splat(builder: Any, value: Any, count: int) -> Any:
    vector = ir.VectorType(value.type, count)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, _LANE(0))
    lanes = ir.Constant(ir.VectorType(_LANE, count), [0] * count)
    return builder.shuffle_vector(first, first, lanes)


def _mask(builder: Any, n: Any, count: int) -> Any:
    """A mask of the lanes below n."""
    numbers = ir.Constant(ir.VectorType(_LANE, count), list(range(count)))
    limit = _splat(builder, builder.trunc(n, _LANE), count)
    return builder.icmp_signed("<", numbers, limit)


def _masked_load(builder: Any, address: Any, n: Any, vector: ir.VectorType) -> Any:
    pointer = _at(builder, address, vector)
    mask = _mask(builder, n, vector.count)
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(vector, [pointer.type, _LANE, mask.type, vector]),
        f"llvm.masked.load.{_name(vector)}.p0",
    )
    align = _LANE(_size(vector))
    return builder.call(function, [pointer, align, mask, ir.Constant(vector, None)])


def _masked_store(builder: Any, value: Any, address: Any, n: Any) -> None:
    pointer = _at(builder, address, value.type)
    mask = _mask(builder, n, value.type.count)
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [value.type, pointer.type, _LANE, mask.type]),
        f"llvm.masked.store.{_name(value.type)}.p0",
    )
    align = _LANE(_size(value.type))
    builder.call(function, [value, pointer, align, mask])


def _call_llvm(builder: Any, name: str, *args: Any) -> Any:
    """Calls an LLVM intrinsic whose arguments and result are vectors of one type."""
    vector = args[0].type
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(vector, [vector] * len(args)),
        f"llvm.{name}.{_name(vector)}",
    )
    return builder.call(function, args)


def _fold(builder: Any, value: Any, combine: Callable) -> Any:
    """All lanes combined, broadcast to each lane."""
    count = value.type.count
    step = count // 2
    while step:
        turned = [(lane + step) % count for lane in range(count)]
        turned = ir.Constant(ir.VectorType(_LANE, count), turned)
        value = combine(value, builder.shuffle_vector(value, value, turned))
        step //= 2
    return value


# ----------------------------------------------------------------------- in jitted code


@intrinsic
def _pointer_intrinsic(typing_context, array):
    def generate(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.ptrtoint(data, _INT)

    return PointerType(array.dtype)(array), generate


@overload(pointer)
def _overload_pointer(array):
    return lambda array: _pointer_intrinsic(array)


@type_callable(operator.add)
def _type_add(context):
    def typer(a, b):
        if isinstance(a, PointerType) and isinstance(b, types.Integer):
            return a
        if isinstance(a, VectorType) and a == b:
            return a
        return None

    return typer


for _operation in (operator.sub, operator.mul):

    @type_callable(_operation)
    def _type_operation(context):
        def typer(a, b):
            return a if isinstance(a, VectorType) and a == b else None

        return typer


@lower_builtin(operator.add, PointerType, types.Integer)
def _lower_offset(context, builder, signature, args):
    at, step = signature.args[:2]
    step = context.cast(builder, args[1], step, types.int64)
    return builder.add(args[0], builder.mul(step, _INT(at.dtype.bitwidth // 8)))


@lower_builtin(operator.add, VectorType, VectorType)
def _lower_add(context, builder, signature, args):
    return builder.fadd(*args)


@lower_builtin(operator.sub, VectorType, VectorType)
def _lower_sub(context, builder, signature, args):
    return builder.fsub(*args)


@lower_builtin(operator.mul, VectorType, VectorType)
def _lower_mul(context, builder, signature, args):
    return builder.fmul(*args)


@type_callable(operator.getitem)
def _type_getitem(context):
    def typer(p, i):
        is_place = isinstance(p, PointerType) and isinstance(i, types.Integer)
        return p.dtype if is_place else None

    return typer


@type_callable(operator.setitem)
def _type_setitem(context):
    def typer(p, i, x):
        is_place = isinstance(p, PointerType) and isinstance(i, types.Integer)
        return types.void if is_place and x == p.dtype else None

    return typer


@lower_builtin(operator.getitem, PointerType, types.Integer)
def _lower_getitem(context, builder, signature, args):
    address = _lower_offset(context, builder, signature, args)
    element = context.get_data_type(signature.return_type)
    return builder.load(_at(builder, address, element))


@lower_builtin(operator.setitem, PointerType, types.Integer, types.Float)
def _lower_setitem(context, builder, signature, args):
    address = _lower_offset(context, builder, signature, args)
    builder.store(args[2], _at(builder, address, args[2].type))
    return context.get_dummy_value()


#: numba reads how many arguments a function has from its code.
_WITH_ARITY: dict[int, Callable] = {
    1: lambda f: lambda a: f(a),
    2: lambda f: lambda a, b: f(a, b),
    3: lambda f: lambda a, b, c: f(a, b, c),
    4: lambda f: lambda a, b, c, d: f(a, b, c, d),
    5: lambda f: lambda a, b, c, d, e: f(a, b, c, d, e),
}


def _compiles_to(function: Callable, typed: Callable) -> Callable:
    """Decorates what a function compiles to: LLVM code, given a builder, the type of
    vectors and the arguments. `typed` gives the numba signature for their types.
    """
    arity = function.__code__.co_argcount

    def register(emit: Callable) -> None:
        def define(typing_context, *args):
            vector = _vector(getattr(args[0], "dtype", args[0]))

            def generate(context, builder, signature, values):
                out = emit(builder, vector, *values)
                return context.get_dummy_value() if out is None else out

            return typed(*args), generate

        llvm = intrinsic(_WITH_ARITY[arity + 1](define))
        call = _WITH_ARITY[arity](llvm)
        overload(function)(_WITH_ARITY[arity](lambda *args: call))

    return register


def _of_vectors(*args: types.Type) -> Any:
    return args[0](*args)


def _to_number(v: VectorType) -> Any:
    return v.dtype(v)


def _to_vector(p: Any, *n: types.Type) -> Any:
    return VectorType(getattr(p, "dtype", p))(p, *[types.int64] * len(n))


def _to_nothing(p: PointerType, *args: types.Type) -> Any:
    return types.void(p, *args)


@_compiles_to(lanes, lambda p: types.int64(p))
def _(builder, vector, p):
    return _INT(vector.count)


@_compiles_to(load, _to_vector)
def _(builder, vector, p):
    return _load(builder, p, vector)


@_compiles_to(load_some, _to_vector)
def _(builder, vector, p, n):
    return _masked_load(builder, p, n, vector)


@_compiles_to(prefetch, _to_nothing)
def _(builder, vector, p):
    pointer = builder.inttoptr(p, ir.IntType(8).as_pointer())
    function = cgutils.get_or_insert_function(
        builder.module,
        ir.FunctionType(ir.VoidType(), [pointer.type] + 3 * [_LANE]),
        "llvm.prefetch.p0",
    )
    builder.call(function, [pointer, _LANE(0), _LANE(2), _LANE(1)])


@_compiles_to(store, _to_nothing)
def _(builder, vector, p, v):
    _store(builder, v, p)


@_compiles_to(store_some, lambda p, v, n: types.void(p, v, types.int64))
def _(builder, vector, p, v, n):
    _masked_store(builder, v, p, n)


@_compiles_to(splat, _to_vector)
def _(builder, vector, x):
    return _splat(builder, x, vector.count)


@_compiles_to(zeros, _to_vector)
def _(builder, vector, p):
    return ir.Constant(vector, None)


@_compiles_to(fma, _of_vectors)
def _(builder, vector, a, b, c):
    return _call_llvm(builder, "fma", a, b, c)


@_compiles_to(total, _to_number)
def _(builder, vector, v):
    return builder.extract_element(_fold(builder, v, builder.fadd), _LANE(0))


def _select(builder: Any, sign: str, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(sign, b, a), b, a)


@_compiles_to(larger, _of_vectors)
def _(builder, vector, a, b):
    return _select(builder, ">", a, b)


@_compiles_to(smaller, _of_vectors)
def _(builder, vector, a, b):
    return _select(builder, "<", a, b)


@_compiles_to(largest, _to_number)
def _(builder, vector, v):
    folded = _fold(builder, v, partial(_select, builder, ">"))
    return builder.extract_element(folded, _LANE(0))


@_compiles_to(floor, _of_vectors)
def _(builder, vector, v):
    return _call_llvm(builder, "floor", v)


@_compiles_to(power_of_two, _of_vectors)
def _(builder, vector, v):
    bits = 8 * _size(vector)
    bias, shift = (127, 23) if bits == 32 else (1023, 52)
    integers = ir.VectorType(ir.IntType(bits), vector.count)
    n = builder.fptosi(v, integers)
    n = builder.add(n, ir.Constant(integers, [bias] * vector.count))
    n = builder.shl(n, ir.Constant(integers, [shift] * vector.count))
    return builder.bitcast(n, vector)


@_compiles_to(first, lambda v, n: v(v, types.int64))
def _(builder, vector, v, n):
    return builder.select(_mask(builder, n, vector.count), v, ir.Constant(vector, None))


@_compiles_to(row_totals, _to_vector)
def _(builder, vector, p):
    count, lane = vector.count, max(1, 16 // _size(vector))  # per 128 bits
    # Add halves of two vectors side by side, then quarters, and so on, in an order
    # that takes one cheap instruction each. `held[r][j]`: the source of lane j.
    rows, held = [], []
    for i in range(count):
        rows.append(_load(builder, builder.add(p, _INT(_BYTES * i)), vector))
        held.append([i] * count)
    step = count // 2
    while step:
        group = lane if step < lane else count
        low = [j for j in range(count) if not j & step]
        pairs = []  # per group: the kept lanes of the first, then of the second
        for g in range(0, count, group):
            own = [j for j in low if g <= j < g + group]
            pairs += own + [count + j for j in own]
        masks = [
            ir.Constant(ir.VectorType(_LANE, count), [j + more for j in pairs])
            for more in (0, step)
        ]
        for i in range(len(rows) // 2):
            a, b = rows[2 * i], rows[2 * i + 1]
            parts = (builder.shuffle_vector(a, b, mask) for mask in masks)
            both = held[2 * i] + held[2 * i + 1]
            rows[i], held[i] = builder.fadd(*parts), [both[j] for j in pairs]
        rows, held = rows[: len(rows) // 2], held[: len(held) // 2]
        step //= 2
    order = [held[0].index(i) for i in range(count)]
    order = ir.Constant(ir.VectorType(_LANE, count), order)
    return builder.shuffle_vector(rows[0], rows[0], order)


@_compiles_to(
    transpose_square,
    lambda target, ldt, source, lds: types.void(
        target, types.int64, source, types.int64
    ),
)
def _(builder, vector, target, ldt, source, lds):
    ldt, lds = (builder.mul(x, _INT(_size(vector))) for x in (ldt, lds))
    count, rows = vector.count, []
    for i in range(count):
        address = builder.add(source, builder.mul(lds, _INT(i)))
        rows.append(_load(builder, address, vector))
    step = 1
    while step < count:  # swap the off-diagonal squares of size `step`
        low = [j if not j & step else count + j - step for j in range(count)]
        high = [j + step if not j & step else count + j for j in range(count)]
        masks = [ir.Constant(ir.VectorType(_LANE, count), x) for x in (low, high)]
        for i in range(count):
            if not i & step:
                pair = rows[i], rows[i + step]
                rows[i], rows[i + step] = (
                    builder.shuffle_vector(*pair, mask) for mask in masks
                )
        step *= 2
    for i in range(count):
        address = builder.add(target, builder.mul(ldt, _INT(i)))
        _store(builder, rows[i], address)


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


# ---------------------------------------------------------------------- matrix products


def _apart() -> None:
    """Keeps the calling function from being inlined into each of its callers."""


@overload(_apart, inline="always")
def _overload_apart():
    return lambda: _apart_intrinsic()


@intrinsic
def _apart_intrinsic(typing_context):
    def generate(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


#: How C is updated: to A B, C + A B or C - A B.
SET, ADD, SUBTRACT = 0, 1, 2


def _tile(rows: int, side: int, *, some: bool = False, gathered: bool = False) -> Any:
    """Makes the product of `rows` rows of A with `side` adjacent vectors of B's rows.

    All sums stay in registers. With `some`, only the first `n` numbers of rows of B and
    C are accessed; with `gathered`, index arrays tell the rows of B and C.
    """

    def generate(context, builder, signature, args):
        c, ldc, at_c, a, ra, ca, b, ldb, at_b, k, mode, n = args
        vector = _vector(signature.args[0].dtype)
        ldc, ra, ca, ldb = (
            builder.mul(x, _INT(_size(vector))) for x in (ldc, ra, ca, ldb)
        )

        def row(base, stride, index, i):
            if gathered:
                place = builder.add(index, builder.mul(i, _INT(8)))
                i = builder.load(_at(builder, place, _INT))
            return builder.add(base, builder.mul(i, stride))

        def read(address, j):
            address = builder.add(address, _INT(_BYTES * j))
            if some:
                return _masked_load(builder, address, n, vector)
            return _load(builder, address, vector)

        def write(value, address, j):
            address = builder.add(address, _INT(_BYTES * j))
            if some:
                _masked_store(builder, value, address, n)
            else:
                _store(builder, value, address)

        before = builder.block
        names = ("loop", "step", "done", "set", "change", "add", "subtract", "end")
        loop, step, done, set_, change, add, subtract, end = map(
            builder.append_basic_block, names
        )
        builder.branch(loop)
        builder.position_at_end(loop)
        i, at = builder.phi(_INT), builder.phi(_INT)
        sums = [builder.phi(vector) for _ in range(rows * side)]
        for phi, start in ((i, _INT(0)), (at, a)):
            phi.add_incoming(start, before)
        for phi in sums:
            phi.add_incoming(ir.Constant(vector, None), before)
        builder.cbranch(builder.icmp_signed("<", i, k), step, done)

        builder.position_at_end(step)
        address = row(b, ldb, at_b, i)
        right = [read(address, j) for j in range(side)]
        for r in range(rows):
            left = builder.add(at, builder.mul(ra, _INT(r)))
            left = builder.load(_at(builder, left, vector.element))
            left = _splat(builder, left, vector.count)
            for j in range(side):
                phi = sums[r * side + j]
                added = _call_llvm(builder, "fma", left, right[j], phi)
                phi.add_incoming(added, step)
        i.add_incoming(builder.add(i, _INT(1)), step)
        at.add_incoming(builder.add(at, ca), step)
        builder.branch(loop)

        builder.position_at_end(done)
        builder.cbranch(builder.icmp_signed("==", mode, _INT(SET)), set_, change)
        builder.position_at_end(change)
        builder.cbranch(builder.icmp_signed("==", mode, _INT(ADD)), add, subtract)
        for block, operation in (
            (set_, None), (add, builder.fadd), (subtract, builder.fsub)
        ):  # fmt: skip
            builder.position_at_end(block)
            for r in range(rows):
                address = row(c, ldc, at_c, _INT(r))
                for j in range(side):
                    value = sums[r * side + j]
                    if operation is not None:
                        value = operation(read(address, j), value)
                    write(value, address, j)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    @intrinsic
    def llvm_tile(context, c, ldc, at_c, a, ra, ca, b, ldb, at_b, k, mode, n):
        i = types.int64
        return types.void(c, i, i, c, i, i, c, i, i, i, i, i), generate

    def tile(c, ldc, at_c, a, ra, ca, b, ldb, at_b, k, mode, n):
        width = n if some else side * lanes(c)
        own = _indices(at_c, rows) if gathered else range(rows)
        other = _indices(at_b, k) if gathered else range(k)
        for r in range(rows):
            row, out = a + r * ra, (c + own[r] * ldc).next(width)
            sums = np.zeros_like(out)
            for i in range(k):
                sums += row[i * ca] * (b + other[i] * ldb).next(width)
            out[:] = sums if mode == SET else out + sums if mode == ADD else out - sums

    @overload(tile)
    def overload_tile(c, ldc, at_c, a, ra, ca, b, ldb, at_b, k, mode, n):
        def call(c, ldc, at_c, a, ra, ca, b, ldb, at_b, k, mode, n):
            llvm_tile(c, ldc, at_c, a, ra, ca, b, ldb, at_b, k, mode, n)

        return call

    return tile


def _indices(address: int, count: int) -> np.ndarray:
    """The row indices at an address, for use in plain Python."""
    return np.ctypeslib.as_array((c_int64 * count).from_address(int(address)))


def _panel(*, gathered: bool = False) -> Callable:
    """Makes the product of any number of rows of A with `_SIDE` vectors of B's rows."""
    t1, t2, t3, t4, t5, t6 = (
        _tile(rows, _SIDE, gathered=gathered) for rows in range(1, 7)
    )

    @inlined
    def panel(c, ldc, at_c, a, ra, ca, b, ldb, at_b, m, k, mode):
        i, shares = 0, (m + 5) // 6
        for share in range(shares, 0, -1):  # of even size, as small tiles are slow
            rows = (m - i + share - 1) // share
            p = a + i * ra
            q = c if gathered else c + i * ldc
            x = at_c + 8 * i
            if rows == 6:
                t6(q, ldc, x, p, ra, ca, b, ldb, at_b, k, mode, 0)
            elif rows == 5:
                t5(q, ldc, x, p, ra, ca, b, ldb, at_b, k, mode, 0)
            elif rows == 4:
                t4(q, ldc, x, p, ra, ca, b, ldb, at_b, k, mode, 0)
            elif rows == 3:
                t3(q, ldc, x, p, ra, ca, b, ldb, at_b, k, mode, 0)
            elif rows == 2:
                t2(q, ldc, x, p, ra, ca, b, ldb, at_b, k, mode, 0)
            else:
                t1(q, ldc, x, p, ra, ca, b, ldb, at_b, k, mode, 0)
            i += rows

    return panel


def _column() -> Callable:
    """Makes the product of any number of rows of A with one vector, or less, of B."""
    t1, t2, t3, t6, t12 = (_tile(rows, 1, some=True) for rows in (1, 2, 3, 6, 12))

    @inlined
    def column(c, ldc, a, ra, ca, b, ldb, m, k, mode, n):
        i = 0
        while i < m:
            p, q = a + i * ra, c + i * ldc
            if m - i >= 12:
                t12(q, ldc, 0, p, ra, ca, b, ldb, 0, k, mode, n)
                i += 12
            elif m - i >= 6:
                t6(q, ldc, 0, p, ra, ca, b, ldb, 0, k, mode, n)
                i += 6
            elif m - i >= 3:
                t3(q, ldc, 0, p, ra, ca, b, ldb, 0, k, mode, n)
                i += 3
            elif m - i == 2:
                t2(q, ldc, 0, p, ra, ca, b, ldb, 0, k, mode, n)
                i += 2
            else:
                t1(q, ldc, 0, p, ra, ca, b, ldb, 0, k, mode, n)
                i += 1

    return column


_panel_of_rows, _panel_of_gathered, _column_of_rows = (
    _panel(), _panel(gathered=True), _column()
)  # fmt: skip


@jit
def gemm(c, ldc, a, ra, ca, b, ldb, m, n, k, mode):
    """Sets C [m, n] to A B, C + A B or C - A B, with A [m, k] and B [k, n].

    Rows of B and C are contiguous, and `ldb` and `ldc` numbers apart; A's rows are `ra`
    numbers apart and its columns `ca`, so A may be transposed.
    """
    _apart()
    width, j = lanes(c), 0
    while j + _SIDE * width <= n:
        _panel_of_rows(c + j, ldc, 0, a, ra, ca, b + j, ldb, 0, m, k, mode)
        j += _SIDE * width
    while j < n:
        count = min(width, n - j)
        _column_of_rows(c + j, ldc, a, ra, ca, b + j, ldb, m, k, mode, count)
        j += width


def vector_lanes(dtype: np.dtype) -> tuple[int, int]:
    """The numbers in a vector, and those that `gemm_rows` handles side by side."""
    count = _BYTES // dtype.itemsize
    return count, _SIDE * count


@jit
def gemm_rows(c, ldc, at_c, a, ra, ca, b, ldb, at_b, m, n, k, mode):
    """As `gemm`, for rows of C and B that are given by indices.

    `at_c` and `at_b` are addresses of int64 indices, and n is a multiple of
    `vector_lanes(dtype)[1]`.
    """
    for j in range(0, n, _SIDE * lanes(c)):
        _panel_of_gathered(c + j, ldc, at_c, a, ra, ca, b + j, ldb, at_b, m, k, mode)
