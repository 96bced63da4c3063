"""Elimination row by row, and sweeps of whole rows: the resolvents of blocks.

All columns of (I - A)^-1 are needed, so rows have as many numbers as the block has
nodes: enough to fill vectors while the factor is processed entry by entry.
"""

from typing import NamedTuple

import numpy as np

from pyg_chimera.ops.common.numba_runtime import jit, run, stopped
from pyg_chimera.ops.structure.symbolic_factor import SymbolicFactor


class Pattern(NamedTuple):
    """The arrays of a `SymbolicFactor` that kernels read."""

    root: np.ndarray  #: [V], `SymbolicFactor.roots`
    ptr: np.ndarray
    node: np.ndarray
    lower_ptr: np.ndarray
    lower_col: np.ndarray
    upper_ptr: np.ndarray
    upper_row: np.ndarray
    upper_entry: np.ndarray
    edge_ptr: np.ndarray
    edge: np.ndarray
    edge_row: np.ndarray
    edge_col: np.ndarray

    @classmethod
    def of(cls, symbolic: SymbolicFactor) -> "Pattern":
        """Those of a symbolic factor, cached in its tables."""
        if cls not in symbolic.tables:
            others = (getattr(symbolic, name) for name in cls._fields[1:])
            symbolic.tables[cls] = cls(symbolic.roots(), *others)
        return symbolic.tables[cls]


class Factors(NamedTuple):
    """I - A = L U, [heads, V or F]."""

    diagonal: np.ndarray  #: reciprocal of the diagonal of U, once it is complete
    lower: np.ndarray  #: L below its unit diagonal
    upper: np.ndarray  #: U above its diagonal, transposed: entry x is U[j, i]


def factorize(symbolic: SymbolicFactor, weight: np.ndarray) -> tuple[Factors, float]:
    """Factors I - A in float64, without pivoting.

    Args:
        symbolic: The blocks.
        weight: The weights of the edges, [E, heads].

    Returns:
        The factors in the precision of the weights, and the pivot growth, as
        :func:`~pyg_chimera.ops.recurrence.cpu.multifrontal.factorize` does.
    """
    num_heads = weight.shape[1]
    num_nodes, num_entries = symbolic.num_nodes, symbolic.num_entries
    values = np.zeros((num_heads, num_nodes + 2 * num_entries))
    values[:, :num_nodes] = 1.0
    subtract_edges(values, symbolic.slot, weight)
    bounds = (num_nodes, num_nodes + num_entries)
    factors = Factors(*map(np.ascontiguousarray, np.split(values, bounds, axis=1)))
    growths = np.ones((symbolic.sizes.shape[0], num_heads))
    run(
        _factor,
        np.repeat(symbolic.updates + 4.0 * symbolic.entries, num_heads),
        6 * int(symbolic.sizes.max(initial=0)),
        values.dtype,
        *(Pattern.of(symbolic), factors, growths),
    )
    with np.errstate(divide="ignore", over="ignore"):
        parts = 1.0 / factors.diagonal, factors.lower, factors.upper
        factors = Factors(*(x.astype(weight.dtype) for x in parts))
    return factors, float(growths.max(initial=1.0))


@jit
def subtract_edges(values, slot, weight):
    """Subtracts weights of edges [E, heads] where they belong."""
    for e in range(slot.shape[0]):
        for h in range(weight.shape[1]):
            values[h, slot[e]] -= weight[e, h]


@jit
def _factor(first, last, stop, scratch, pattern, factors, growths):
    root, ptr, (diagonal, lower, upper) = pattern.root, pattern.ptr, factors
    lower_ptr, lower_col = pattern.lower_ptr, pattern.lower_col
    upper_ptr, upper_row = pattern.upper_ptr, pattern.upper_row
    upper_entry = pattern.upper_entry
    num_heads = diagonal.shape[0]
    for task in range(first, last):
        if stopped(stop):
            return
        block, h = task // num_heads, task % num_heads
        s, n = ptr[block], ptr[block + 1] - ptr[block]
        vectors = scratch[: 6 * n].reshape(6, n)
        vectors[:] = 0
        work, u_sum, grown = vectors[0], vectors[1], vectors[2]
        start, by_row, by_column = vectors[3], vectors[4], vectors[5]
        for i in range(s, s + n):
            if stopped(stop):
                return
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
            # The pattern includes fill-in, and so all columns that updates reach.
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
            usable = work[i - s] != 0.0 and np.isfinite(work[i - s])
            grown[i - s] = total + u_sum[i - s] if usable else np.inf
        roots = root[s : s + n] - s
        growths[block, h] = growth_of(roots, start, by_row, by_column, grown)


@jit
def growth_of(roots, diagonal, by_row, by_column, grown):
    """The pivot growth of a block: the largest ratio, in any connected component, of
    its largest row sum of |L| |U|, given those of all rows, to that of |I - A|, given
    its diagonal and the sums of the other entries. One if it is dominant.
    """
    n, growth = roots.shape[0], 1.0
    rows, columns = np.ones(n, np.bool_), np.ones(n, np.bool_)
    norm, largest = np.zeros(n), np.zeros(n)
    for i in range(n):
        r, bound = roots[i], diagonal[i] * (1 + 1e-12)
        rows[r] &= by_row[i] <= bound
        columns[r] &= by_column[i] <= bound
        norm[r] = max(norm[r], diagonal[i] + by_row[i])
        if not grown[i] <= largest[r]:  # NaN counts as infinity
            largest[r] = grown[i] if grown[i] < np.inf else np.inf
    for r in range(n):
        safe = largest[r] < np.inf and (rows[r] or columns[r])
        if not safe and largest[r] > growth * norm[r]:
            growth = largest[r] / norm[r] if norm[r] > 0 else np.inf
    return growth


@jit
def solve(states, s, transpose, stop, pattern, factors, h):
    """Solves L U H = X, or its transpose, in place, for a block that begins at s.

    The first sweep subtracts each finished row from the rows of its ancestors in the
    elimination tree, the second subtracts these from it: few rows at a time, both ways.
    """
    n, lanes = states.shape
    column_ptr, column_row = pattern.upper_ptr, pattern.upper_row
    column_entry, diagonal = pattern.upper_entry, factors.diagonal[h]
    lower, upper = factors.lower[h], factors.upper[h]
    values = upper if transpose else lower
    for i in range(n):
        if stopped(stop):
            return
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
    values = lower if transpose else upper
    for i in range(n - 1, -1, -1):
        if stopped(stop):
            return
        row = states[i]
        x, end = column_ptr[s + i], column_ptr[s + i + 1]
        while x + 3 < end:  # four at a time, to load and store `row` less often
            r0, r1 = states[column_row[x] - s], states[column_row[x + 1] - s]
            r2, r3 = states[column_row[x + 2] - s], states[column_row[x + 3] - s]
            c0, c1 = values[column_entry[x]], values[column_entry[x + 1]]
            c2, c3 = values[column_entry[x + 2]], values[column_entry[x + 3]]
            for w in range(lanes):
                row[w] -= c0 * r0[w] + c1 * r1[w] + c2 * r2[w] + c3 * r3[w]
            x += 4
        while x < end:
            r0, c0 = states[column_row[x] - s], values[column_entry[x]]
            for w in range(lanes):
                row[w] -= c0 * r0[w]
            x += 1
        if not transpose:
            r = diagonal[s + i]
            for w in range(lanes):
                row[w] *= r


@jit
def edge_products(adjoints, states, s, edges, pattern, grad_weight):
    """Adds <G_i, H_j> to the gradient of each edge j -> i of a block."""
    for x in range(*edges):
        adjoint = adjoints[pattern.edge_row[x] - s]
        state, edge = states[pattern.edge_col[x] - s], pattern.edge[x]
        total = grad_weight[edge]
        for w in range(adjoints.shape[1]):
            total += adjoint[w] * state[w]
        grad_weight[edge] = total
