"""The resolvent of paths, directed or undirected, by two scans in chunks.

On a path I - A is tridiagonal: d_i on its diagonal, -w_i from node i - 1 to i below it,
-u_i from i to i - 1 above it. Eliminated from either end, its pivots are

    p_i = d_i - w_i u_i / p_{i-1}    and    p'_i = d_i - w_{i+1} u_{i+1} / p'_{i+1},

and the entries of the resolvent are products along the path: with a_i = w_i / p'_i,
b_i = u_{i+1} / p_i, and g_j = 1 / (p_j + p'_j - d_j),

    L_ij = a_i a_{i-1} ... a_{j+1} g_j for i >= j,    b_i b_{i+1} ... b_{j-1} g_j  else.

So one scan *there*, from the first node to the last, has the states C_i = a_i C_{i-1} +
g_i k_i v_i^T, and one *back* has C'_i = b_i C'_{i+1} + b_i g_{i+1} k_{i+1} v_{i+1}^T.
"""

from typing import NamedTuple, cast

import numpy as np

from pyg_chimera.ops.common.numba_runtime import jit, run
from pyg_chimera.ops.recurrence.cpu import chunks
from pyg_chimera.ops.recurrence.cpu.rows import subtract_edges
from pyg_chimera.ops.recurrence.cpu.state_tiles import Operands
from pyg_chimera.ops.recurrence.plan.paths import PathScans, Pivots, required_path_scans
from pyg_chimera.ops.structure.symbolic_factor import Blocks

# ------------------------------------------------------------------------------ factors


def factorize(symbolic: Blocks, weight: np.ndarray) -> tuple[Pivots, float]:
    """Eliminates I - A in float64 from both ends of each path, without pivoting.

    Returns the factors and the pivot growth: the largest row sum of |L| |U| over that
    of |I - A| on a path.
    """
    scans = required_path_scans(symbolic)
    num_nodes, heads = symbolic.num_nodes, weight.shape[1]
    values = np.zeros((heads, 3 * num_nodes))
    values[:, :num_nodes] = 1
    sign = np.where(scans.slot < num_nodes, 1.0, -1.0)
    subtract_edges(values, scans.slot, sign[:, None] * weight)
    d, w, u = np.split(values, 3, axis=1)
    factors = Pivots(d, w, u, np.empty_like(d), np.empty_like(d))
    growth = np.ones(heads)
    costs = np.full(heads, 30.0 * num_nodes)
    run(_eliminate, costs, 0, d.dtype, scans.ptr, factors, growth)
    return factors, float(growth.max(initial=1.0))


@jit
def _eliminate(first, last, stop, scratch, ptr, factors, growth):
    d, w, u, there, back = factors
    for h in range(first, last):
        for path in range(ptr.shape[0] - 1):
            s, e = ptr[path], ptr[path + 1]
            norm, grown, usable = 0.0, 0.0, True
            for i in range(s, e):
                w_, u_ = (w[h, i], u[h, i]) if i > s else (0.0, 0.0)
                up = u[h, i + 1] if i + 1 < e else 0.0
                f = 0.0
                if i > s and there[h, i - 1] != 0:
                    f = w_ / there[h, i - 1]
                there[h, i] = d[h, i] - f * u_
                norm = max(norm, abs(d[h, i]) + abs(w_) + abs(up))
                row = abs(w_) + abs(f * u_) + abs(there[h, i]) + abs(up)
                usable &= there[h, i] != 0 and row < np.inf
                grown = max(grown, row)
            for i in range(e - 1, s - 1, -1):
                w_, u_ = (w[h, i + 1], u[h, i + 1]) if i + 1 < e else (0.0, 0.0)
                f = 0.0
                if i + 1 < e and back[h, i + 1] != 0:
                    f = u_ / back[h, i + 1]
                back[h, i] = d[h, i] - f * w_
                low = abs(w[h, i]) if i > s else 0.0
                row = abs(u_) + abs(f * w_) + abs(back[h, i]) + low
                usable &= back[h, i] != 0 and row < np.inf
                usable &= there[h, i] + back[h, i] - d[h, i] != 0
                grown = max(grown, row)
            if not usable:
                growth[h] = np.inf
            elif grown > growth[h] * norm:
                growth[h] = grown / norm


class _Gates(NamedTuple):
    """The gates of the states, or their gradients, [heads, 2 V]."""

    weight: np.ndarray  #: [a | b]; b is zero at last nodes
    source: np.ndarray  #: [g | b_i g_{i+1}]


def _gates(factors: Pivots) -> _Gates:
    d, w, u, there, back = factors
    g = 1 / (there + back - d)
    b = np.roll(u, -1, axis=1) / there
    weight = np.concatenate([w / back, b], axis=1)
    return _Gates(weight, np.concatenate([g, b * np.roll(g, -1, axis=1)], axis=1))


# -------------------------------------------------------------------------- both passes


def _operands(scans: PathScans, gates: _Gates, x: Operands) -> chunks.Operands:
    """What the chunk form takes: the states' weight, source and mark, and operands."""
    dtype = x.value.dtype
    source = np.ascontiguousarray(gates.source.T, dtype)
    weight = np.ascontiguousarray(gates.weight[:, scans.entry], dtype)
    ones = np.ones_like(source)
    return chunks.Operands(weight, source, ones, x.query, x.key, x.value)


def forward(symbolic: Blocks, factors: Pivots, x: Operands) -> np.ndarray:
    """The output [V, heads, P]."""
    scans = required_path_scans(symbolic)
    operands = _operands(scans, _gates(factors), x)
    return chunks.output(*chunks.scan_of(scans.states, operands), operands)


def backward(symbolic: Blocks, factors: Pivots, x: Operands) -> tuple[np.ndarray, ...]:
    """Gradients of query, key, value and edge weight."""
    scans, gates = required_path_scans(symbolic), _gates(factors)
    operands = _operands(scans, gates, x)
    scan = chunks.scan_of(scans.states, operands)
    grad = cast(np.ndarray, x.grad)
    dq, dk, dv, ds, _, dw = chunks.gradients(*scan, operands, grad)
    d_gates = _Gates(np.zeros_like(gates.weight), ds.T.astype(gates.source.dtype))
    d_gates.weight[:, scans.entry] = dw
    heads, num_nodes = factors.d.shape
    values = np.zeros((heads, 3 * num_nodes))
    run(
        _differentiate,
        np.full(heads, 60.0 * num_nodes),
        2 * num_nodes,
        values.dtype,
        *(scans.ptr, factors, gates, d_gates, values),
    )
    return dq, dk, dv, np.ascontiguousarray(values[:, scans.slot].T, x.value.dtype)


@jit
def _differentiate(first, last, stop, scratch, ptr, factors, gates, d_gates, values):
    """From gradients of the scans' weights and sources to those of A's diagonals.

    First through `_gates` to both pivots, then through the recurrences of these.
    """
    (d, w, u, there, back), (weight, source) = factors, gates
    d_weight, d_source = d_gates
    n = d.shape[1]
    d_there, d_back = scratch[:n], scratch[n : 2 * n]
    for h in range(first, last):
        on, below, above = values[h, :n], values[h, n : 2 * n], values[h, 2 * n :]
        for path in range(ptr.shape[0] - 1):
            s, e = ptr[path], ptr[path + 1]
            for i in range(s, e):
                dg = d_source[h, i]
                if i > s:
                    dg += weight[h, n + i - 1] * d_source[h, n + i - 1]
                pivot = -dg * source[h, i] * source[h, i]
                d_there[i], d_back[i], on[i] = pivot, pivot, pivot
                if i > s:
                    da = d_weight[h, i] / back[h, i]
                    below[i] = da
                    d_back[i] -= da * weight[h, i]
                if i + 1 < e:
                    db = d_weight[h, n + i] + d_source[h, n + i] * source[h, i + 1]
                    db /= there[h, i]
                    above[i + 1] = db
                    d_there[i] -= db * weight[h, n + i]
            for i in range(e - 1, s - 1, -1):
                on[i] -= d_there[i]
                if i > s:
                    x = d_there[i] / there[h, i - 1]
                    below[i] -= x * u[h, i]
                    above[i] -= x * w[h, i]
                    d_there[i - 1] += x * u[h, i] * w[h, i] / there[h, i - 1]
            for i in range(s, e):
                on[i] -= d_back[i]
                if i + 1 < e:
                    x = d_back[i] / back[h, i + 1]
                    below[i + 1] -= x * u[h, i + 1]
                    above[i + 1] -= x * w[h, i + 1]
                    d_back[i + 1] += x * u[h, i + 1] * w[h, i + 1] / back[h, i + 1]
