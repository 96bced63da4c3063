"""The resolvent on the CPU, jitted: dispatch to the kernels, and the mask form.

Elimination in state form is in `supernodal_sweeps`, and in chunk form, for paths, in
`path_factors`; iterations and finite sums are in `sparse_products`. A task of the mask
form is a (block, heads that share keys), and computes the resolvents of its heads one
by one with `row_sweeps`.
"""

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.numba_runtime import arrays, heads_a_task, jit, run, stopped
from pyg_chimera.ops.common.vector_kit import (
    LANES,
    matmul,
    multiply,
    put,
    put_transposed,
    set_identity,
    take,
    take_transposed,
)
from pyg_chimera.ops.resolvent import (
    multifrontal,
    path_factors,
    sparse_products,
    supernodal_sweeps,
)
from pyg_chimera.ops.resolvent.path_factors import NOT_PATHS, path_scans
from pyg_chimera.ops.resolvent.pivot_growth import check_pivot_growth
from pyg_chimera.ops.resolvent.row_sweeps import (
    Factors,
    edge_products,
    factorize,
    solve,
)
from pyg_chimera.ops.resolvent.sweep_polynomial import (
    Iteration,
    check_residual,
    polynomial_of,
)
from pyg_chimera.ops.structure.symbolic_factor import SymbolicFactor

DEVICES = ("cpu",)

# ------------------------------------------------------------------------ the backend


def why_not(call: Call) -> str | None:
    """It eliminates without pivoting. It has no dense solver, finite sums in state form
    only, and chunks for paths only.
    """
    _, solver, form, *_ = call.choice
    if solver == "dense" or (solver == "neumann" and form != "state"):
        return (
            f"solver={solver!r}, form={form!r} has no numba backend; use "
            "backend='torch' or 'auto'"
        )
    if form == "chunk" and path_scans(call.structure) is None:
        return NOT_PATHS
    if solver == "sparse":
        check_pivot_growth(_factors(call)[1])
    if solver == "iterative":
        polynomial_of(call)
    return None


def _factors(call: Call) -> tuple:
    """The factors in the layout of the form, and the pivot growth."""
    (weight,) = arrays(call.inputs.edge_weight)
    if call.choice.form == "mask":
        return call.once("factors", lambda: factorize(call.structure, weight))
    if call.choice.form == "chunk":
        return call.once(
            "paths", lambda: path_factors.factorize(call.structure, weight)
        )
    return call.once("panels", lambda: multifrontal.factorize(call.structure, weight))


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P]; saves the factors (except those of paths), or an
    iteration's steps.
    """
    operands = arrays(*call.inputs[:3])
    if call.choice.solver == "neumann":
        out, _ = sparse_products.forward(call.structure, _finite_sum(call), *operands)
        return torch.from_numpy(out), ()
    if call.choice.solver == "iterative":
        saved = Iteration.saved(call)
        wide, system = _iteration(call, saved)
        out, left = sparse_products.forward(
            call.structure, system, *arrays(*wide.inputs[:3])
        )
        check_residual(left, system.tolerance)
        return torch.from_numpy(out).to(call.inputs.value.dtype), saved
    factors, _ = _factors(call)
    if call.choice.form == "chunk":
        out = path_factors.forward(call.structure, factors, *arrays(*call.inputs[:3]))
        return torch.from_numpy(out), ()
    if call.choice.form == "state":
        out = supernodal_sweeps.forward(call.structure, factors, *operands)
        return torch.from_numpy(out), (torch.from_numpy(factors),)
    return _mask_forward(call, factors), tuple(map(torch.from_numpy, factors))


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and edge weight."""
    if call.choice.form == "mask":
        return _mask_backward(call, Factors(*arrays(*saved)), *arrays(grad))
    operands = arrays(*call.inputs[:3], grad)
    grads: tuple[np.ndarray, ...]
    if call.choice.form == "chunk":  # the factors are recomputed, which is fast
        grads = path_factors.backward(call.structure, _factors(call)[0], *operands)
    elif call.choice.solver == "sparse":
        grads = supernodal_sweeps.backward(call.structure, *arrays(*saved), *operands)
    elif call.choice.solver == "neumann":
        system = _finite_sum(call)
        grads, _ = sparse_products.backward(call.structure, system, *operands)
    else:
        wide, system = _iteration(call, saved)
        operands = arrays(*wide.inputs[:3], grad.to(wide.inputs.value.dtype))
        grads, left = sparse_products.backward(call.structure, system, *operands)
        check_residual(left, system.tolerance)
    return tuple(torch.from_numpy(x).to(grad.dtype) for x in grads)


def _finite_sum(call: Call) -> sparse_products.System:
    (weight,) = arrays(call.inputs.edge_weight)
    none = np.zeros((weight.shape[1], 0, 2), weight.dtype)
    return sparse_products.System(weight, none, call.inputs.num_terms, 0.0)


def _iteration(
    call: Call, saved: tuple[Tensor, ...]
) -> tuple[Call, sparse_products.System]:
    """The call in the iteration's dtype, and how to solve."""
    wide, steps, tolerance = Iteration.of(call, *saved)
    weight, table = arrays(wide.inputs.edge_weight, steps)
    return wide, sparse_products.System(weight, table, -1, tolerance)


def _pattern(symbolic: SymbolicFactor) -> tuple[np.ndarray, ...]:
    return (
        symbolic.ptr,
        symbolic.node,
        symbolic.upper_ptr,
        symbolic.upper_row,
        symbolic.upper_entry,
    )


def _edges(symbolic: SymbolicFactor) -> tuple[np.ndarray, ...]:
    return symbolic.edge_ptr, symbolic.edge, symbolic.edge_row, symbolic.edge_col


# ------------------------------------------------------------------------- mask form


def _mask_forward(call: Call, factors: Factors) -> Tensor:
    """The output (L * Q K^T) V, block by block."""
    symbolic = call.structure
    q, k, v = arrays(*call.inputs[:3])
    share = heads_a_task(len(symbolic.sizes), q.shape[1], v.shape[1])
    out = np.empty_like(v)
    run(
        _mask_forward_blocks,
        _mask_costs(symbolic, q, v, share),
        _mask_scratch(symbolic, q, v, 2, 2),
        v.dtype,
        *_pattern(symbolic),
        *factors,
        q,
        k,
        v,
        out,
        share,
    )
    return torch.from_numpy(out)


def _mask_backward(call: Call, factors: Factors, dy: np.ndarray) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and edge weight.

    dA = L^T dL L^T on edges only: with M = (I - A)^-T dL, dA_ij = <M_i, L_j>.
    """
    symbolic = call.structure
    q, k, v = arrays(*call.inputs[:3])
    share = heads_a_task(len(symbolic.sizes), q.shape[1], v.shape[1])
    parts = v.shape[1] // q.shape[1] // share
    dq = np.empty((parts, *q.shape), q.dtype)
    dk, dv = np.empty_like(dq), np.empty_like(v)
    dw = np.zeros((symbolic.edge.shape[0], v.shape[1]), v.dtype)
    run(
        _mask_backward_blocks,
        3 * _mask_costs(symbolic, q, v, share),
        _mask_scratch(symbolic, q, v, 5, 5),
        v.dtype,
        *_pattern(symbolic),
        *factors,
        *_edges(symbolic),
        q,
        k,
        v,
        dy,
        dq,
        dk,
        dv,
        dw,
        share,
    )
    grad_query, grad_key = (
        torch.from_numpy(x[0] if parts == 1 else x.sum(0)) for x in (dq, dk)
    )
    return grad_query, grad_key, torch.from_numpy(dv), torch.from_numpy(dw)


def _mask_costs(
    symbolic: SymbolicFactor, query: np.ndarray, value: np.ndarray, share: int
) -> np.ndarray:
    sizes = symbolic.sizes.astype(float)
    sweep = (2.0 * symbolic.entries + 3.0 * sizes) * sizes
    products = 0.2 * sizes**2 * (query.shape[2] + share * value.shape[2])
    return np.repeat(products + share * sweep, value.shape[1] // share)


def _mask_scratch(
    symbolic: SymbolicFactor,
    query: np.ndarray,
    value: np.ndarray,
    squares: int,
    thin: int,
) -> int:
    """The size of some matrices [n, n], and of `thin` ones [n, N] and [n, P] each."""
    n = int(symbolic.sizes.max(initial=0)) + LANES
    return n * (squares * n + thin * (query.shape[2] + value.shape[2]))


# All matrices of a block are in elimination order, and their rows are padded with zeros
# to whole vectors, as a remainder would be processed number by number. The inner loops
# of products run over the nodes of the block, as there may be few channels:
# y^T = v^T (L * S)^T, with L^T from the transposed system.


@jit
def _mask_forward_blocks(
    first, last, stop, scratch, ptr, node, column_ptr, column_row, column_entry,
    diagonal, lower, upper, query, key, value, out, share,
):  # fmt: skip
    heads, channels, states = value.shape[1], value.shape[2], query.shape[2]
    tasks = heads // share
    for task in range(first, last):
        if stopped(stop):
            return
        block, head = task // tasks, (task % tasks) * share
        g = head * query.shape[1] // heads
        s, n = ptr[block], ptr[block + 1] - ptr[block]
        m = (n + LANES - 1) // LANES * LANES
        nodes = node[s : s + n]
        squares = scratch[: 2 * n * m].reshape(2, n, m)
        mask, scores = squares[0], squares[1]
        at = 2 * n * m
        narrow = scratch[at : at + 2 * m * states].reshape(2, m * states)
        k = narrow[0, : n * states].reshape(n, states)
        qt = narrow[1].reshape(states, m)
        at += 2 * m * states
        slim = scratch[at : at + 2 * m * channels].reshape(2, channels, m)
        vt, yt = slim[0], slim[1]
        take(k, key, nodes, g)
        take_transposed(qt, query, nodes, g)
        matmul(scores, k, qt)
        for h in range(head, head + share):
            set_identity(mask)
            solve(
                mask, s, n, m, True, stop, column_ptr, column_row, column_entry,
                diagonal[h], lower[h], upper[h],
            )  # fmt: skip
            multiply(mask, mask, scores)
            take_transposed(vt, value, nodes, h)
            matmul(yt, vt, mask)
            put_transposed(out, yt, nodes, h)


@jit
def _mask_backward_blocks(
    first, last, stop, scratch, ptr, node, column_ptr, column_row, column_entry,
    diagonal, lower, upper, edge_ptr, edge, edge_row, edge_col, query, key, value,
    grad, grad_query, grad_key, grad_value, grad_weight, share,
):  # fmt: skip
    heads, channels, states = value.shape[1], value.shape[2], query.shape[2]
    groups = query.shape[1]
    tasks = heads // share
    for task in range(first, last):
        if stopped(stop):
            return
        block, head = task // tasks, (task % tasks) * share
        g = head * groups // heads
        part = (head - g * (heads // groups)) // share
        s, n = ptr[block], ptr[block + 1] - ptr[block]
        m = (n + LANES - 1) // LANES * LANES
        nodes = node[s : s + n]
        squares = scratch[: 5 * n * m].reshape(5, n, m)
        L, adjoint, scores = squares[0], squares[1], squares[2]
        d_scores, mask = squares[3], squares[4]
        at = 5 * n * m
        narrow = scratch[at : at + 5 * m * states].reshape(5, m * states)
        q = narrow[0, : n * states].reshape(n, states)
        k = narrow[1, : n * states].reshape(n, states)
        dq = narrow[2, : n * states].reshape(n, states)
        qt, kt = narrow[3].reshape(states, m), narrow[4].reshape(states, m)
        dkt = narrow[2].reshape(states, m)
        at += 5 * m * states
        slim = scratch[at : at + 4 * m * channels].reshape(4, m * channels)
        dy = slim[0, : n * channels].reshape(n, channels)
        dyt, vt = slim[1].reshape(channels, m), slim[2].reshape(channels, m)
        dvt = slim[3].reshape(channels, m)
        take(q, query, nodes, g)
        take_transposed(kt, key, nodes, g)
        matmul(scores, q, kt)
        d_scores[:] = 0
        for h in range(head, head + share):
            set_identity(L)
            solve(
                L, s, n, m, False, stop, column_ptr, column_row, column_entry,
                diagonal[h], lower[h], upper[h],
            )  # fmt: skip
            multiply(mask, L, scores)
            take(dy, grad, nodes, h)
            take_transposed(dyt, grad, nodes, h)
            matmul(dvt, dyt, mask)
            put_transposed(grad_value, dvt, nodes, h)
            take_transposed(vt, value, nodes, h)
            matmul(mask, dy, vt)  # from here on, this is the gradient of the mask
            for i in range(n):
                target, total = adjoint[i], d_scores[i]
                d_mask, left, right = mask[i], L[i], scores[i]
                for j in range(m):
                    target[j] = d_mask[j] * right[j]
                    total[j] += d_mask[j] * left[j]
            solve(
                adjoint, s, n, m, True, stop, column_ptr, column_row,
                column_entry, diagonal[h], lower[h], upper[h],
            )  # fmt: skip
            edge_products(
                adjoint, L, s, m, edge_ptr[block], edge_ptr[block + 1], edge, edge_row,
                edge_col, grad_weight[:, h],
            )  # fmt: skip
        take(k, key, nodes, g)
        matmul(dq, d_scores, k)
        put(grad_query[part], dq, nodes, g)
        take_transposed(qt, query, nodes, g)
        matmul(dkt, qt, d_scores)
        put_transposed(grad_key[part], dkt, nodes, g)
