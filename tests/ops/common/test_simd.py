"""Vectors and products, for the registers of several machines."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyg_chimera.ops.common import simd
from pyg_chimera.ops.common.numba_runtime import jit
from pyg_chimera.ops.common.simd import (
    ADD,
    SET,
    SUBTRACT,
    floor,
    fma,
    gemm,
    gemm_rows,
    lanes,
    larger,
    load,
    load_some,
    pointer,
    power_of_two,
    repeated,
    smaller,
    splat,
    store,
    store_some,
    total,
    transpose_square,
    vector_lanes,
    zeros,
)
from pyg_chimera.ops.common.vector_kit import exp2

dtypes = pytest.mark.parametrize("dtype", [np.float32, np.float64])


@jit
def multiply(C, A, B, mode):
    size = C.itemsize
    left = pointer(A), A.strides[0] // size, A.strides[1] // size
    to, right = (pointer(C), C.strides[0] // size), (pointer(B), B.strides[0] // size)
    gemm(to, left, right, (A.shape[0], B.shape[1], A.shape[1]), mode)


@jit
def multiply_rows(C, at_c, A, B, at_b, mode):
    (m, k), n = A.shape, B.shape[1]
    to, left = (pointer(C), n, at_c.ctypes.data), (pointer(A), k, 1)
    gemm_rows(to, left, (pointer(B), n, at_b.ctypes.data), (m, n, k), mode)


@jit
def combine(out, x, y, a, n):
    """out = sum of a x + (x - y) y, by vectors, the last one of which is in part."""
    p, q, r = pointer(x), pointer(y), pointer(out)
    width = lanes(p)
    sums = zeros(p)
    for i in range(0, n, width):
        if i + width <= n:
            u, v = load(p + i), load(q + i)
            w = fma(splat(a), u, (u - v) * v)
            store(r + i, w)
        else:
            u, v = load_some(p + i, n - i), load_some(q + i, n - i)
            w = fma(splat(a), u, (u - v) * v)
            store_some(r + i, w, n - i)
        sums = sums + w
    r[n] = total(sums)
    return r[0]


@jit
def repeat(out, x, n):
    store(pointer(out), repeated(pointer(x), n))


@dtypes
def test_numbers_are_repeated(dtype):
    """Those after them are not read."""
    count, n = vector_lanes(np.dtype(dtype))[0], 1
    while n <= count:
        x, out = np.arange(n, dtype=dtype), np.empty(count, dtype)
        repeat(out, x, n)
        assert np.array_equal(out, np.tile(x, count // n))
        n *= 2


sizes = st.integers(0, 40) | st.sampled_from([16, 32, 64, 65, 96, 128, 130])


@dtypes
@settings(deadline=None)  # compiles
@given(m=sizes, n=sizes, k=sizes, mode=st.sampled_from([SET, ADD, SUBTRACT]),
       turned=st.booleans())  # fmt: skip
def test_products(dtype, m, n, k, mode, turned):
    """Nothing beside C is touched, and nothing beside A and B has a part in it."""
    random = np.random.default_rng(m + n + k)
    C, A, B = (
        np.full((a + 2, b + 3), np.nan, dtype) for a, b in ((m, n), (m, k), (k, n))
    )
    for X, a, b in ((C, m, n), (A, m, k), (B, k, n)):
        X[:a, :b] = random.standard_normal((a, b))
    before = C.copy()
    C_, A_, B_ = C[:m, :n], A[:m, :k], B[:k, :n]
    if turned:
        A_ = np.asfortranarray(A_)
    multiply(C_, A_, B_, mode)
    product = A_.astype(float) @ B_.astype(float)
    old = before[:m, :n]
    expected = {SET: product, ADD: old + product, SUBTRACT: old - product}[mode]
    tolerance = 1e-5 if dtype == np.float32 else 1e-13
    np.testing.assert_allclose(C_, expected, rtol=0, atol=tolerance * (1 + k))
    C[:m, :n] = before[:m, :n]
    assert np.array_equal(C, before, equal_nan=True)


@dtypes
@pytest.mark.parametrize("m", [1, 2, 5, 6, 7, 11, 12, 13, 30])
@pytest.mark.parametrize("mode", [SET, ADD, SUBTRACT])
def test_products_of_rows(dtype, m, mode):
    random = np.random.default_rng(m)
    n, k = 128, 9
    C, B = (random.standard_normal((40, n)).astype(dtype) for _ in range(2))
    A = random.standard_normal((m, k)).astype(dtype)
    at_c, at_b = random.permutation(40)[:m], random.permutation(40)[:k]
    expected, product = C.astype(float), A.astype(float) @ B[at_b].astype(float)
    sign = {SET: 1, ADD: 1, SUBTRACT: -1}[mode]
    expected[at_c] = (0 if mode == SET else expected[at_c]) + sign * product
    multiply_rows(C, at_c, A, B, at_b, mode)
    tolerance = 1e-5 if dtype == np.float32 else 1e-13
    np.testing.assert_allclose(C, expected, rtol=0, atol=10 * tolerance)


@dtypes
@pytest.mark.parametrize("n", [0, 1, 3, 4, 7, 8, 15, 16, 17, 33, 64])
def test_vectors(dtype, n):
    random = np.random.default_rng(n)
    out = np.full(n + 3, np.nan, dtype)
    x, y = np.full((2, n + 1), np.nan, dtype)
    x[:n], y[:n] = random.standard_normal((2, n))
    expected = (1.5 * x + (x - y) * y)[:n]
    first = combine(out, x, y, dtype(1.5), n)
    np.testing.assert_allclose(out[:n], expected, atol=1e-6)
    np.testing.assert_allclose(out[n], expected.sum(), atol=1e-5)
    assert np.isnan(out[n + 1 :]).all()
    assert n == 0 or first == out[0]


@jit
def compare(up, down, powers, rounded, x, y):
    p, q = pointer(x), pointer(y)
    for i in range(0, x.shape[0], lanes(p)):
        a, b = load(p + i), load(q + i)
        store(pointer(up) + i, larger(a, b))
        store(pointer(down) + i, smaller(a, b))
        store(pointer(powers) + i, exp2(a))
        store(pointer(rounded) + i, power_of_two(floor(b)))


@dtypes
@pytest.mark.parametrize("function", [compare, compare.py_func])
def test_comparisons_and_exponentials(dtype, function):
    x, y = np.random.default_rng(0).uniform(-40, 40, (2, 64)).astype(dtype)
    x[1], x[2] = np.nan, -np.inf
    out = np.empty((4, 64), dtype)
    function(*out, x, y)
    np.testing.assert_array_equal(out[0], np.where(y > x, y, x))
    np.testing.assert_array_equal(out[1], np.where(y < x, y, x))
    near = 3e-7 if dtype == np.float32 else 1e-15
    tiny = np.finfo(dtype).tiny  # what is smaller becomes that
    np.testing.assert_allclose(out[2], np.exp2(x), rtol=near, atol=tiny)
    np.testing.assert_array_equal(out[3], np.exp2(np.floor(y)))


@jit
def last_of(x):
    return (pointer(x) + 2)[x.shape[0] - 3]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.float64])
@pytest.mark.parametrize("function", [last_of, last_of.py_func])
def test_numbers_behind_pointers(dtype, function):
    assert function(np.arange(-9, -2).astype(dtype)) == -3


@jit
def transpose(target, source):
    p, q = pointer(target), pointer(source)
    transpose_square(p, target.shape[1], q, source.shape[1])
    return lanes(p)


@dtypes
def test_transposed_squares(dtype):
    source, target = np.arange(1600, dtype=dtype).reshape(2, 20, 40)
    before = target.copy()
    n = transpose(target, source)
    assert np.array_equal(target[:n, :n], source[:n, :n].T)
    target[:n, :n] = before[:n, :n]
    assert np.array_equal(target, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("features", "width"), [("+avx,+avx2,+fma", 32), ("", 16)], ids=["avx2", "plain"]
)
def test_other_machines(features, width, tmp_path):
    """The tests of this file, with smaller registers."""
    if not {"avx2", "fma"} <= simd._FEATURES:
        pytest.skip("needs a machine with AVX2")
    if width == simd._BYTES:
        pytest.skip("this machine's own registers, with which all tests run")
    names = "test_vectors or transposed or test_products and float32"
    code = (
        "import sys, pytest; from pyg_chimera.ops.common import simd\n"
        f"assert simd._BYTES == {width}, simd._BYTES\n"
        f"sys.exit(pytest.main([{__file__!r}, '-q', '-k', {names!r}]))"
    )
    environment = {
        "NUMBA_CPU_NAME": "x86-64" if not features else "haswell",
        "NUMBA_CPU_FEATURES": features or "+sse2",
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


_MAKE = {"copy", "empty", "zeros", "ones", "full", "empty_like", "zeros_like"}


def own_arrays(function: ast.FunctionDef) -> set[str]:
    """Names of arrays that a function makes."""
    names = set()
    for line in ast.walk(function):
        if not isinstance(line, ast.Assign):
            continue
        target, value = line.targets[0], line.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=True))
        for to, made in pairs:
            if isinstance(made, ast.Call) and getattr(made.func, "attr", "") in _MAKE:
                names |= {x.id for x in ast.walk(to) if isinstance(x, ast.Name)}
    return names


def pointed_to(function: ast.FunctionDef) -> set[str]:
    """Names of arrays that a function takes pointers to."""
    calls = (x for x in ast.walk(function) if isinstance(x, ast.Call) and x.args)
    arguments = (x.args[0] for x in calls if getattr(x.func, "id", "") == "pointer")
    return {x.id for y in arguments for x in ast.walk(y) if isinstance(x, ast.Name)}


def functions_of(text: str) -> list[ast.FunctionDef]:
    return [x for x in ast.walk(ast.parse(text)) if isinstance(x, ast.FunctionDef)]


def test_no_kernel_points_to_an_array_of_its_own():
    """Pointers do not keep it alive: it is freed where its name is read last."""
    bad = "def f(x):\n    y, n = x.copy(), 3\n    return pointer(y)[0]"
    (function,) = functions_of(bad)
    assert own_arrays(function) & pointed_to(function) == {"y"}
    folder, seen = Path(simd.__file__).parents[1], 0
    for path in folder.rglob("*.py"):
        for function in functions_of(path.read_text()):
            names = pointed_to(function)
            seen += len(names)
            assert not names & own_arrays(function), (path.name, function.name)
    assert seen > 100
