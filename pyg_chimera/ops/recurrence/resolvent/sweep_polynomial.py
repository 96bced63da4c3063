r"""The steps of an iteration: those of GMRES for a random right-hand side.

A pass of steps multiplies the residual by :math:`p(\mathbf{I} - \mathbf{A})`, where
:math:`p(z) = \prod_k (1 - z / \theta_k)`, from `"Polynomial Preconditioned GMRES and
GMRES-DR" <https://epubs.siam.org/doi/10.1137/140968276>`_ (Liu, Morgan and Wilcox,
2015). The :math:`\theta_k` are harmonic Ritz values, the roots of GMRES's polynomial.
They are computed once per head, as all its states share one matrix; the steps take no
inner products, and also solve the transposed system. In Leja order, no partial product
of the factors is large.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from scipy.sparse import csr_array
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call, UnsuitableSolver
from pyg_chimera.ops.recurrence.resolvent.sparse_products import products
from pyg_chimera.ops.structure.symbolic_factor import Blocks

__all__ = [
    "Iteration",
    "SweepPolynomial",
    "check_residual",
    "polynomial_of",
    "precision_of",
]

FLOATS = ("query", "key", "value", "edge_weight")

#: The most steps of a pass, as rounding errors grow with them.
_MAX_STEPS = 64
#: With smaller margins, rounding errors of float32 grow beyond those of elimination.
_SMALL_MARGIN = 1e-3


class SweepPolynomial(NamedTuple):
    """The steps of a pass."""

    steps: np.ndarray  #: [heads, steps, 2], (1 / root, 0), or for a pair of complex
    #: roots (1 / product, sum); padded with zeros
    sweeps: int  #: products with A to reach the tolerance, estimated, for any head
    margin: float  #: 1 less the rows' (or columns') largest sum in |A|, of any graph


def precision_of(call: Call, margin: float) -> tuple[torch.dtype, float]:
    """The dtype of an iteration, and the relative residual at which it stops.

    The error of a state may be 1 / margin times the residual. So float32 is computed in
    float64 if the margin is small, until errors are of float32's size.
    """
    dtype = call.inputs.value.dtype
    rounding = 4 * torch.finfo(dtype).eps
    if dtype != torch.float64 and margin < _SMALL_MARGIN:
        least = 64 * torch.finfo(torch.float64).eps
        return torch.float64, max(rounding * margin, least)
    return dtype, rounding


class Iteration(NamedTuple):
    """What the kernels compute: a call in the iteration's dtype, and its steps."""

    call: Call
    steps: Tensor  #: [heads, steps, 2]
    tolerance: float

    @staticmethod
    def saved(call: Call) -> tuple[Tensor, Tensor]:
        """The steps and the margin, in the dtype and on the device of a call."""
        steps, _, margin = polynomial_of(call)
        value = call.inputs.value
        return torch.from_numpy(steps).to(value), value.new_tensor([margin])

    @classmethod
    def of(cls, call: Call, steps: Tensor, margin: Tensor) -> "Iteration":
        """The iteration for a call, from what :meth:`saved` returned."""
        dtype, tolerance = precision_of(call, float(margin))
        inputs = call.inputs
        floats = {name: getattr(inputs, name).to(dtype) for name in FLOATS}
        call = replace(call, inputs=inputs._replace(**floats))
        return cls(call, steps.to(dtype), tolerance)


def polynomial_of(call: Call) -> SweepPolynomial:
    """The steps for a call, computed once.

    Raises:
        UnsuitableSolver: If an iteration might not converge.
    """
    return call.once("polynomial", lambda: _polynomial(call))


def _polynomial(call: Call) -> SweepPolynomial:
    blocks: Blocks = call.structure
    given = call.inputs.edge_weight.detach().cpu().double().numpy().T
    margin = _margin(blocks, given[:, blocks.edge])
    (ptr, local, edge), _ = products(blocks)
    other = local + np.repeat(np.repeat(blocks.ptr[:-1], blocks.sizes), np.diff(ptr))
    _, tolerance = precision_of(call, margin)
    shape = (blocks.num_nodes, blocks.num_nodes)
    heads = [
        _steps(csr_array((w, other, ptr), shape), tolerance)
        for w in given[:, edge]
        if blocks.num_nodes > 0
    ]
    width = max((len(steps) for steps, _ in heads), default=0)
    steps = np.zeros((len(given), width, 2))
    for table, (found, _) in zip(steps, heads, strict=False):
        table[: len(found)] = found
    sweeps = max((sweeps for _, sweeps in heads), default=0)
    return SweepPolynomial(steps, sweeps, margin)


def _margin(blocks: Blocks, weight: np.ndarray) -> float:
    """By how much all rows, or all columns, of each graph's |A| sum to less than 1.

    Raises:
        UnsuitableSolver: If they do not.
    """
    if blocks.num_nodes == 0 or len(weight) == 0:
        return 1.0
    sums = []
    for end in (blocks.edge_row, blocks.edge_col):
        by_node = [np.bincount(end, np.abs(w), blocks.num_nodes) for w in weight]
        sums.append(np.maximum.reduceat(by_node, blocks.ptr[:-1], axis=1))
    margin = 1 - float(np.minimum(*sums).max())
    if not margin > 0:
        rows, columns = (x.max() for x in sums)
        raise UnsuitableSolver(
            "'edge_weight' makes I - A one that an iteration need not converge for: "
            f"the absolute weights of the edges into a node sum to {rows:.4g}, of "
            f"those out of a node to {columns:.4g}, and in each graph one of these "
            "must be below 1; scale the weights, or use solver='sparse' or 'dense'"
        )
    return margin


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


def _steps(A: csr_array, tolerance: float) -> tuple[np.ndarray, int]:
    """The steps for one head, and how many products with A it needs.

    The component of a random right-hand side along an eigenvector is about 1 / sqrt(V)
    of its length, so a pass leaves at most sqrt(V) times the residual of any component.
    """
    degree, sweeps = 0, np.inf
    for m, H in enumerate(_arnoldi(A), 1):
        right = np.zeros(m + 1)
        right[0] = 1
        y = np.linalg.lstsq(H[: m + 1, :m], right, rcond=None)[0]
        left = float(np.linalg.norm(right - H[: m + 1, :m] @ y))
        if left <= tolerance / 2:  # one pass, and one product for the residual
            degree, sweeps = m, m + 1
            break
        worst = max(left, 1e-300) * np.sqrt(A.shape[0])
        if worst < 0.5:
            passes = np.ceil(np.log(tolerance) / np.log(worst))
            if passes * (m + 1) < sweeps:
                degree, sweeps = m, passes * (m + 1)
    if degree == 0:  # H <- A H + X, whose rate of convergence is known
        # Not by abs(A), which adds up duplicates, and changes A's arrays.
        size = csr_array((np.abs(A.data), A.indices, A.indptr), A.shape)
        rate = min(size.sum(0).max(), size.sum(1).max(), 1 - 1e-9)
        count = int(np.log(tolerance) / np.log(rate)) + 1
        return np.tile((1.0, 0.0), (_MAX_STEPS, 1)), count
    return _leja(_harmonic_ritz_values(H[: degree + 1, :degree])), int(sweeps)


def _arnoldi(A: csr_array) -> Iterator[np.ndarray]:
    """I - A in a basis of its Krylov space: after step m, the first [m + 1, m] entries
    of the yielded matrix.
    """
    n = A.shape[0]
    most = min(_MAX_STEPS, n)
    V, H = np.empty((most + 1, n)), np.zeros((most + 1, most))
    V[0] = np.random.default_rng(0).standard_normal(n)
    V[0] /= np.linalg.norm(V[0])
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
    pairs = roots[roots.imag >= 0]
    left = [(z, 1 if z.imag == 0 else 2) for z in pairs]
    taken: list[complex] = []
    steps = []
    while left:
        if taken:
            distances = [
                np.log(np.abs(z - np.array(taken)) + 1e-300).sum() for z, _ in left
            ]
        else:
            distances = [abs(z) for z, _ in left]
        z, count = left.pop(int(np.argmax(distances)))
        taken += [z, z.conjugate()][:count]
        if count == 1:
            steps.append((float(1 / z.real), 0.0))
        else:
            steps.append((float(1 / abs(z) ** 2), float(2 * z.real)))
    return np.array(steps)
