r"""The steps of an iteration: those of GMRES for a random right-hand side.

A pass of steps multiplies the residual by :math:`p(\mathbf{I} - \mathbf{A})`, where
:math:`p(z) = \prod_k (1 - z / \theta_k)`, from `"Polynomial Preconditioned GMRES and
GMRES-DR" <https://epubs.siam.org/doi/10.1137/140968276>`_ (Liu, Morgan and Wilcox,
2015). The :math:`\theta_k` are harmonic Ritz values, the roots of GMRES's polynomial.
They are computed once per head, as all its states share one matrix; the steps take no
inner products, and also solve the transposed system. In Leja order, no partial product
of the factors is large.

Where nodes pass on nearly all that they receive, :math:`\mathbf{M} = \mathbf{I} -
\mathbf{A}` is nearly singular, often in one direction only: its eigenvectors :math:`u`
and :math:`v` on the right and left. With :math:`v^{\top} \mathbf{M} u = 1`,

.. math::
    \mathbf{M}^{-1} b
    = u \, v^{\top} b + \mathbf{M}^{-1} (b - \mathbf{M} u \, v^{\top} b),

whatever :math:`u` and :math:`v` are (`"Deflation of Conjugate Gradients with
Applications to Boundary Value Problems" <https://doi.org/10.1137/0724027>`_,
Nicolaides, 1987). There is no such direction in the second system: it takes half the
steps, and float32 is enough.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from pyg_chimera.ops.common.array_views import as_array
from pyg_chimera.ops.common.dispatch import Call, UnsuitableSolver
from pyg_chimera.ops.recurrence.cpu.iterate import products
from pyg_chimera.ops.structure.symbolic_factor import Blocks

FLOATS = ("query", "key", "value", "edge_weight")

#: The most steps of a pass, as rounding errors grow with them.
_MAX_STEPS = 64
#: Steps after which a direction is looked for in which the matrix is nearly singular.
_FEW_STEPS = 16
#: The most steps of a pass for a known part of the complex plane.
_MOST_STEPS = 512
#: How often the steps are taken to find it.
_MAX_FILTERS = 8
#: The relative residual of eigenvectors. It need not be smaller, as solutions are exact
#: for any vectors.
_RESIDUAL = 1e-8
#: With smaller gaps, rounding errors of float32 grow beyond those of elimination.
_SMALL_GAP = 1e-3


class SweepPolynomial(NamedTuple):
    """The steps of a pass."""

    steps: np.ndarray  #: [heads, steps, 2], (1 / root, 0), or for a pair of complex
    #: roots (1 / product, sum); padded with zeros
    modes: np.ndarray  #: [heads, 4, V], those of `SlowModes`
    sweeps: int  #: products with A to reach the tolerance, estimated, for any head
    gap: float  #: the least size of what I - A multiplies in other directions by: at
    #: least 1 less the rows' (or columns') largest sum in |A|, or a harmonic Ritz value


def precision_of(dtype: torch.dtype, gap: float) -> tuple[torch.dtype, float]:
    """The dtype of an iteration for values of a dtype, and the relative residual at
    which it stops.

    The error of a state may be 1 / gap times the residual. So float32 is computed in
    float64 if the gap is small, until errors are of float32's size.
    """
    rounding = 4 * torch.finfo(dtype).eps
    if dtype != torch.float64 and gap < _SMALL_GAP:
        least = 64 * torch.finfo(torch.float64).eps
        return torch.float64, max(rounding * gap, least)
    return dtype, rounding


class Iteration(NamedTuple):
    """What the kernels compute: a call in the iteration's dtype, and its steps."""

    call: Call
    steps: Tensor  #: [heads, steps, 2]
    modes: Tensor  #: [heads, 4, V], float64
    tolerance: float

    @staticmethod
    def saved(call: Call) -> tuple[Tensor, ...]:
        """What :meth:`of` takes, in the dtype and on the device of a call."""
        found, value = polynomial_of(call), call.inputs.value
        modes = torch.tensor(found.modes.ravel(), device=value.device)
        steps = torch.from_numpy(found.steps).to(value)
        return modes.view(value.dtype), steps, value.new_tensor([found.gap])

    @classmethod
    def of(cls, call: Call, modes: Tensor, steps: Tensor, gap: Tensor) -> "Iteration":
        """The iteration for a call, from what :meth:`saved` returned."""
        dtype, tolerance = precision_of(call.inputs.value.dtype, float(gap))
        shape = len(steps), 4, call.inputs.value.size(0)
        modes = modes.view(torch.float64).view(shape)
        inputs = call.inputs
        floats = {name: getattr(inputs, name).to(dtype) for name in FLOATS}
        call = replace(call, inputs=inputs._replace(**floats))
        return cls(call, steps.to(dtype), modes, tolerance)


def polynomial_of(call: Call, most: float = np.inf) -> SweepPolynomial:
    """The steps for a call, computed once; not the best if there are more than `most`.

    Raises:
        UnsuitableSolver: If an iteration might not converge.
    """
    return call.cached("polynomial", lambda: _polynomial(call, most))


def _polynomial(call: Call, most: float) -> SweepPolynomial:
    blocks: Blocks = call.structure
    given = as_array(call.inputs.edge_weight.double()).T
    margins = _margins(blocks, given[:, blocks.edge])
    (ptr, local, edge), _ = products(blocks)
    other = local + np.repeat(np.repeat(blocks.ptr[:-1], blocks.sizes), np.diff(ptr))
    shape = (blocks.num_nodes, blocks.num_nodes)
    heads = [
        _steps(
            csr_array((w, other, ptr), shape),
            blocks.ptr,
            least,
            call.inputs.value.dtype,
            most,
        )
        for w, least in zip(given[:, edge], margins, strict=True)
        if blocks.num_nodes > 0
    ]
    width = max((len(steps) for steps, *_ in heads), default=0)
    steps = np.zeros((len(given), width, 2))
    modes = np.zeros((len(given), 4, blocks.num_nodes))
    for h, (found, slow, *_) in enumerate(heads):
        steps[h, : len(found)], modes[h] = found, slow
    sweeps = max((sweeps for *_, sweeps, _ in heads), default=0)
    gap = min((gap for *_, gap in heads), default=1.0)
    return SweepPolynomial(steps, modes, sweeps, gap)


def _margins(blocks: Blocks, weight: np.ndarray) -> np.ndarray:
    """By how much all rows, or all columns, of each graph's |A| sum to less than 1,
    [heads, T].

    Raises:
        UnsuitableSolver: If they do not.
    """
    if blocks.num_nodes == 0 or len(weight) == 0:
        return np.ones((len(weight), len(blocks.sizes)))
    sums = []
    for end in (blocks.edge_row, blocks.edge_col):
        by_node = [np.bincount(end, np.abs(w), blocks.num_nodes) for w in weight]
        sums.append(np.maximum.reduceat(by_node, blocks.ptr[:-1], axis=1))
    margins = 1 - np.minimum(*sums)
    if not margins.min() > 0:
        rows, columns = (x.max() for x in sums)
        raise UnsuitableSolver(
            "'edge_weight' makes I - A one that an iteration need not converge for: "
            f"the absolute weights of the edges into a node sum to {rows:.4g}, of "
            f"those out of a node to {columns:.4g}, and in each graph one of these "
            "must be below 1; scale the weights, or use solver='sparse' or 'dense'"
        )
    return margins


def check_residual(left: float, tolerance: float) -> None:
    """Checks the relative residual with which an iteration stopped.

    Raises:
        ValueError: If it is far above the tolerance.
    """
    if left > 64 * tolerance:
        raise ValueError(
            f"solver='iterative' came to a standstill at a relative residual of "
            f"{left:.1e}, not {tolerance:.1e}: rows of |A| sum to so nearly 1 "
            "that rounding errors are as large as what a step gains; use "
            "solver='sparse'"
        )


def _steps(
    A: csr_array,
    ptr: np.ndarray,
    margins: np.ndarray,
    dtype: torch.dtype,
    most: float = np.inf,
) -> tuple[np.ndarray, np.ndarray, int, float]:
    """The steps for one head, its slow modes, how many products with A it needs, and
    the gap.

    The component of a random right-hand side along an eigenvector is about 1 / sqrt(V)
    of its length, so a pass leaves at most sqrt(V) times the residual of any component.
    """
    # Random, but not around zero: the slowest modes are positive, most often, and of
    # such a vector little is left only if steps have found them.
    start = 1 + np.random.default_rng(0).standard_normal(A.shape[0])
    modes, gap = np.zeros((4, A.shape[0])), margins.min(initial=1.0)
    _, tolerance = precision_of(dtype, gap)
    H, sweeps, is_enough = _search(A, start, _FEW_STEPS, tolerance)
    if not is_enough:
        modes = _slow_modes(A, ptr, H)
        right_image, left = modes[1:3]
        start -= right_image * _by_block(left * start, ptr)
        others = margins[np.maximum.reduceat(modes[0], ptr[:-1]) == 0]
        if len(others) < len(margins):
            _, tolerance = precision_of(dtype, others.min(initial=1.0))
        H, sweeps, _ = _search(A, start, _MAX_STEPS, tolerance)
    roots = _harmonic_ritz_values(H)
    if sweeps > 2 * _MAX_STEPS:
        # Where GMRES takes long, or finds nothing: for all that the spectrum may be.
        radius, bound = _radius(A), precision_of(dtype, margins.min(initial=1.0))[1]
        plain = np.log(bound) / np.log(radius)
        if np.log(2 / bound) / np.arccosh(1 / radius) < min(sweeps, most):
            long, count = _long_pass(A, H, radius, bound)
            if count < min(sweeps, plain):
                return long, np.zeros_like(modes), int(count), gap
        if sweeps == np.inf:  # H <- A H + X, which converges
            steps = np.tile((1.0, 0.0), (_MAX_STEPS, 1))
            return steps, np.zeros_like(modes), int(plain) + 1, gap
    if modes.any():
        gap = min(others.min(initial=1.0), float(np.abs(roots).min()))
    return _leja(roots), modes, int(sweeps), gap


def _radius(A: csr_array) -> float:
    """A bound of the spectral radius: the largest (|A| x)_i / x_i for a positive x."""
    # Not by abs(A), which adds up duplicates, and changes A's arrays.
    size = csr_array((np.abs(A.data), A.indices, A.indptr), A.shape)
    radius = 1 - 1e-12
    for matrix in (size, size.T.tocsr()):
        x = np.ones(A.shape[0])
        for _ in range(_FEW_STEPS):
            y = matrix @ x
            radius = min(radius, float((y / x).max(initial=0.0)))
            x = (x + y) / 2  # stays positive
    return max(radius, 1e-300)


def _long_pass(
    A: csr_array, H: np.ndarray, radius: float, tolerance: float
) -> tuple[np.ndarray, float]:
    """Chebyshev's steps for eigenvalues of A in an ellipse: between -radius and radius,
    with the imaginary parts that Arnoldi's matrix has; and how many products with A
    they need, found by taking them.
    """
    height = 1.2 * np.abs(np.linalg.eigvals(H[: H.shape[1]]).imag).max(initial=0.0)
    focus = np.sqrt(max(radius**2 - height**2, 1e-6))
    fall = np.arccosh(1 / focus) - np.arccosh(max(radius / focus, 1))
    passes = np.ceil(np.log(2 / tolerance) / fall / _MOST_STEPS)
    count = int(np.ceil(np.log(2 / tolerance) / fall / passes))
    steps = _leja(1 - focus * np.cos(np.pi * (np.arange(count) + 0.5) / count))
    left = np.random.default_rng(0).standard_normal(A.shape[0])
    start = size = np.abs(left).max()
    found, rate = np.zeros_like(left), 0.0
    for _ in range(1 if height < 1e-6 else 3):  # the last one shows what falls least
        for c, a in steps:
            by = _correction(A, left, c, a)
            found, left = found + by, left - (by - A @ by)
        rate, size = np.abs(left).max() / size, np.abs(left).max()
    rate = max(rate, 2 * np.exp(-fall * count))
    if not rate < 0.9:
        return steps, np.inf
    # A residual is small if it is beside what was found.
    enough = min(tolerance * (1 + 2 * np.abs(found).max() / start), 0.5)
    return steps, (count + 1) * np.ceil(np.log(enough) / np.log(rate))


def _correction(A: csr_array, x: np.ndarray, c: float, a: float) -> np.ndarray:
    """What a step adds to a solution, given the residual."""
    return c * (x if a == 0 else a * x - (x - A @ x))


def _search(
    A: csr_array, start: np.ndarray, most: int, tolerance: float
) -> tuple[np.ndarray, float, bool]:
    """Arnoldi's matrix [m + 1, m] for the number of steps with the fewest products (the
    last one, if none converges); these products; and whether a pass is enough.
    """
    best, fewest, H = np.empty((1, 0)), np.inf, np.empty((1, 0))
    for m, wide in enumerate(_arnoldi(A, start, most), 1):
        H, right = wide[: m + 1, :m].copy(), np.eye(m + 1)[0]
        y = np.linalg.lstsq(H, right, rcond=None)[0]
        left = float(np.linalg.norm(right - H @ y))
        if left <= tolerance / 2:  # one pass, and one product for the residual
            return H, m + 1, True
        worst = max(left, 1e-300) * np.sqrt(A.shape[0])
        if worst < 0.5:
            passes = np.ceil(np.log(tolerance) / np.log(worst))
            if passes * (m + 1) < fewest:
                best, fewest = H, passes * (m + 1)
    return (best, fewest, False) if fewest < np.inf else (H, fewest, False)


def _slow_modes(A: csr_array, ptr: np.ndarray, H: np.ndarray) -> np.ndarray:
    """Those of `SlowModes`, [4, V]: what steps for all other directions leave."""
    roots = _harmonic_ritz_values(H)
    roots = roots[np.argsort(np.abs(roots))]
    gaps = np.abs(roots[1:]) / np.maximum(np.abs(roots[:-1]), 1e-300)
    steps = _leja(roots[np.argmax(gaps) + 1 :]) if len(gaps) else np.empty((0, 2))
    found = []
    for matrix in (A, A.T.tocsr()):
        x = np.ones(A.shape[0])
        for _ in range(_MAX_FILTERS):
            for c, a in steps:
                by = _correction(matrix, x, c, a)
                x = x - (by - matrix @ by)
            x /= _by_block(np.abs(x), ptr, np.maximum) + 1e-300
            image = x - matrix @ x
            rate = _by_block(x * image, ptr) / (_by_block(x * x, ptr) + 1e-300)
            left = _by_block(np.abs(image - rate * x), ptr, np.maximum)
            is_found = left <= _RESIDUAL
            if is_found.all():
                break
        found += [x, image, is_found]
    right, right_image, right_found, left, left_image, left_found = found
    scale, size = (_by_block(left * y, ptr) for y in (right_image, right))
    # A single node has no other direction, of which a random vector would be left.
    others = np.repeat(np.diff(ptr) > 1, np.diff(ptr))
    usable = others & right_found & left_found & (scale > 0) & (size > 1e-3)
    scale = np.where(usable, scale, 1.0)
    modes = (right, right_image, left / scale, left_image / scale)
    return np.where(usable, np.stack(modes), 0.0)


def _by_block(x: np.ndarray, ptr: np.ndarray, reduce: np.ufunc = np.add) -> np.ndarray:
    """The sums (or maxima) over each graph, for each of its nodes."""
    return np.repeat(reduce.reduceat(x, ptr[:-1]), np.diff(ptr))


def _arnoldi(A: csr_array, start: np.ndarray, most: int) -> Iterator[np.ndarray]:
    """I - A in a basis of its Krylov space: after step m, the first [m + 1, m] entries
    of the yielded matrix.
    """
    n = A.shape[0]
    most = min(most, n)
    V, H = np.empty((most + 1, n)), np.zeros((most + 1, most))
    V[0] = start / np.linalg.norm(start)
    for j in range(most):
        v = V[j + 1]
        v[:] = V[j] - A @ V[j]
        for _ in range(2):  # "twice is enough" (Kahan)
            h = V[: j + 1] @ v
            H[: j + 1, j] += h
            v -= h @ V[: j + 1]
        H[j + 1, j] = np.linalg.norm(v)
        if H[j + 1, j] < 1e-13:  # an invariant subspace: the polynomial is exact
            H[j + 1, j] = 0
            yield H
            return
        v /= H[j + 1, j]
        yield H


def _harmonic_ritz_values(H: np.ndarray) -> np.ndarray:
    m = H.shape[1]
    last = np.eye(m)[m - 1]
    f = np.linalg.solve(H[:m].T, last)
    return np.linalg.eigvals(H[:m] + H[m, m - 1] ** 2 * np.outer(f, last))


def _leja(roots: np.ndarray) -> np.ndarray:
    """The steps in Leja order: each root far from all before it, pairs together."""
    roots, steps = roots[roots.imag >= 0], []
    logs, at = np.zeros(len(roots)), int(np.argmax(np.abs(roots))) if len(roots) else 0
    for _ in roots:
        z = roots[at]
        if z.imag == 0:
            steps.append((float(1 / z.real), 0.0))
        else:
            steps.append((float(1 / abs(z) ** 2), float(2 * z.real)))
            logs += np.log(np.abs(roots - z.conjugate()))
        logs += np.log(np.abs(roots - z) + 1e-300)
        logs[at] = -np.inf
        at = int(np.argmax(logs))
    return np.array(steps)
