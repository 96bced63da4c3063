"""The resolvent on the CPU, jitted: dispatch to the kernels, and the mask form.

Elimination in state form is in `supernodal`, and in chunk form, for paths, in
`cpu.paths`; iterations and finite sums are in `iterate`. A task of the mask
form is a (block, heads that share keys), and computes the resolvents of its heads one
by one with `rows`.
"""

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.numba_runtime import (
    arrays,
    heads_a_task,
    jit,
    run,
    stopped,
    summed,
)
from pyg_chimera.ops.common.vector_kit import (
    LANES,
    matmul,
    multiply,
    put,
    put_transposed,
    set_identity,
    take,
    take_transposed,
    workspace,
)
from pyg_chimera.ops.recurrence.cpu import iterate, multifrontal, paths, supernodal
from pyg_chimera.ops.recurrence.cpu.iterate import System
from pyg_chimera.ops.recurrence.cpu.rows import (
    Factors,
    Pattern,
    edge_products,
    factorize,
    solve,
)
from pyg_chimera.ops.recurrence.cpu.state_tiles import Gradients, Operands
from pyg_chimera.ops.recurrence.cpu.sweep_polynomial import (
    Iteration,
    check_residual,
    polynomial_of,
)
from pyg_chimera.ops.recurrence.plan.paths import NOT_PATHS, path_scans
from pyg_chimera.ops.recurrence.plan.pivot_growth import check_pivot_growth
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
        return call.cached("factors", lambda: factorize(call.structure, weight))
    if call.choice.form == "chunk":
        return call.cached("paths", lambda: paths.factorize(call.structure, weight))
    return call.cached("panels", lambda: multifrontal.factorize(call.structure, weight))


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P]; saves the factors (except those of paths), or an
    iteration's steps.
    """
    _, solver, form, *_ = call.choice
    x = Operands(*arrays(*call.inputs[:3]))
    if solver != "sparse":
        saved = Iteration.saved(call) if solver == "iterative" else ()
        x, system = _system(call, saved)
        out, left = iterate.forward(call.structure, system, x)
        check_residual(left, system.tolerance)
        return torch.from_numpy(out).to(call.inputs.value.dtype), saved
    factors, _ = _factors(call)
    if form == "chunk":
        return torch.from_numpy(paths.forward(call.structure, factors, x)), ()
    if form == "state":
        out = supernodal.forward(call.structure, factors, x)
        return torch.from_numpy(out), (torch.from_numpy(factors),)
    out = _mask_forward(call.structure, factors, x)
    return torch.from_numpy(out), tuple(map(torch.from_numpy, factors))


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value and edge weight."""
    _, solver, form, *_ = call.choice
    x = Operands(*arrays(*call.inputs[:3], grad))
    grads: tuple[np.ndarray, ...]
    if solver != "sparse":
        x, system = _system(call, saved, grad)
        grads, left = iterate.backward(call.structure, system, x)
        check_residual(left, system.tolerance)
    elif form == "chunk":  # the factors are recomputed, which is fast
        grads = paths.backward(call.structure, _factors(call)[0], x)
    elif form == "state":
        grads = supernodal.backward(call.structure, arrays(*saved)[0], x)
    else:
        grads = _mask_backward(call.structure, Factors(*arrays(*saved)), x)
    *others, weight = map(torch.from_numpy, grads)
    return *others, weight


def _system(
    call: Call, saved: tuple[Tensor, ...], *grad: Tensor
) -> tuple[Operands, System]:
    """The operands in the dtype to compute in, and how to solve or sum."""
    num_terms, tolerance = call.inputs.num_terms, 0.0
    steps = call.inputs.value.new_empty(call.inputs.value.size(1), 0, 2)
    modes = steps.new_empty(steps.size(0), 4, 0, dtype=torch.double)
    if call.choice.solver == "iterative":
        call, steps, modes, tolerance = Iteration.of(call, *saved)
        num_terms = -1
    inputs = call.inputs
    x = arrays(*inputs[:3], *(y.to(inputs.value.dtype) for y in grad))
    weight, table, slow = arrays(inputs.edge_weight, steps, modes)
    return Operands(*x), System(weight, table, slow, num_terms, tolerance)


# ------------------------------------------------------------------------- mask form


def _mask_forward(
    symbolic: SymbolicFactor, factors: Factors, x: Operands
) -> np.ndarray:
    """The output (L * Q K^T) V, block by block."""
    out = np.empty_like(x.value)
    share = heads_a_task(len(symbolic.sizes), x.query.shape[1], x.value.shape[1])
    run(
        _mask_forward_blocks,
        _mask_costs(symbolic, x, share),
        _mask_scratch(symbolic, x, 2),
        out.dtype,
        *(Pattern.of(symbolic), factors, x, out, share),
    )
    return out


def _mask_backward(
    symbolic: SymbolicFactor, factors: Factors, x: Operands
) -> tuple[np.ndarray, ...]:
    """Gradients of query, key, value and edge weight.

    dA = L^T dL L^T on edges only: with M = (I - A)^-T dL, dA_ij = <M_i, L_j>.
    """
    (_, heads, _), groups = x.value.shape, x.query.shape[1]
    share = heads_a_task(len(symbolic.sizes), groups, heads)
    parts = heads // groups // share
    dq, dk = (np.empty((parts, *x.query.shape), x.query.dtype) for _ in range(2))
    dw = np.zeros((symbolic.num_edges, heads), dq.dtype)
    d = Gradients(dq, dk, np.empty_like(x.value), dw)
    run(
        _mask_backward_blocks,
        3 * _mask_costs(symbolic, x, share),
        _mask_scratch(symbolic, x, 5),
        dq.dtype,
        *(Pattern.of(symbolic), factors, x, d, share),
    )
    return summed(dq, (0,)), summed(dk, (0,)), d.value, dw


def _mask_costs(symbolic: SymbolicFactor, x: Operands, share: int) -> np.ndarray:
    sizes = symbolic.sizes.astype(float)
    sweep = (2.0 * symbolic.entries + 3.0 * sizes) * sizes
    products = 0.2 * sizes**2 * (x.query.shape[2] + share * x.value.shape[2])
    return np.repeat(products + share * sweep, x.value.shape[1] // share)


def _mask_scratch(symbolic: SymbolicFactor, x: Operands, count: int) -> int:
    """The size of some matrices [n, n], and of as many [n, N] and [n, P]."""
    n = int(symbolic.sizes.max(initial=0)) + LANES
    return n * count * (n + x.query.shape[2] + x.value.shape[2])


# All matrices of a block are in elimination order, and their rows are padded with zeros
# to whole vectors, as a remainder would be processed number by number. The inner loops
# of products run over the nodes of the block, as there may be few channels:
# y^T = v^T (L * S)^T, with L^T from the transposed system.


@jit
def _mask_forward_blocks(first, last, stop, scratch, pattern, factors, x, out, share):
    (_, heads, channels), (_, groups, states) = x.value.shape, x.query.shape
    tasks = heads // share
    for task in range(first, last):
        if stopped(stop):
            return
        block, head = task // tasks, (task % tasks) * share
        g = head * groups // heads
        s, end = pattern.ptr[block], pattern.ptr[block + 1]
        nodes, n = pattern.node[s:end], end - s
        m = (n + LANES - 1) // LANES * LANES
        mask, at = workspace(scratch, 0, n, m)
        scores, at = workspace(scratch, at, n, m)
        qt, at = workspace(scratch, at, states, m)
        vt, at = workspace(scratch, at, channels, m)
        yt, at = workspace(scratch, at, channels, m)
        k, at = workspace(scratch, at, n, states)
        take(k, x.key, nodes, g)
        take_transposed(qt, x.query, nodes, g)
        matmul(scores, k, qt)
        for h in range(head, head + share):
            set_identity(mask)
            solve(mask, s, True, stop, pattern, factors, h)
            multiply(mask, mask, scores)
            take_transposed(vt, x.value, nodes, h)
            matmul(yt, vt, mask)
            put_transposed(out, yt, nodes, h)


@jit
def _mask_backward_blocks(first, last, stop, scratch, pattern, factors, x, d, share):
    (_, heads, channels), (_, groups, states) = x.value.shape, x.query.shape
    tasks = heads // share
    for task in range(first, last):
        if stopped(stop):
            return
        block, head = task // tasks, (task % tasks) * share
        g = head * groups // heads
        part = (head - g * (heads // groups)) // share
        s, end = pattern.ptr[block], pattern.ptr[block + 1]
        nodes, n = pattern.node[s:end], end - s
        m = (n + LANES - 1) // LANES * LANES
        L, at = workspace(scratch, 0, n, m)
        adjoint, at = workspace(scratch, at, n, m)
        scores, at = workspace(scratch, at, n, m)
        d_scores, at = workspace(scratch, at, n, m)
        mask, at = workspace(scratch, at, n, m)
        qt, at = workspace(scratch, at, states, m)
        kt, at = workspace(scratch, at, states, m)
        dq, _ = workspace(
            scratch, at, n, states
        )  # put away before the next is computed
        dkt, at = workspace(scratch, at, states, m)
        dyt, at = workspace(scratch, at, channels, m)
        vt, at = workspace(scratch, at, channels, m)
        dvt, at = workspace(scratch, at, channels, m)
        q, at = workspace(scratch, at, n, states)
        k, at = workspace(scratch, at, n, states)
        dy, at = workspace(scratch, at, n, channels)
        take(q, x.query, nodes, g)
        take_transposed(kt, x.key, nodes, g)
        matmul(scores, q, kt)
        d_scores[:] = 0
        for h in range(head, head + share):
            set_identity(L)
            solve(L, s, False, stop, pattern, factors, h)
            multiply(mask, L, scores)
            take(dy, x.grad, nodes, h)
            take_transposed(dyt, x.grad, nodes, h)
            matmul(dvt, dyt, mask)
            put_transposed(d.value, dvt, nodes, h)
            take_transposed(vt, x.value, nodes, h)
            matmul(mask, dy, vt)  # from here on, this is the gradient of the mask
            for i in range(n):
                target, total = adjoint[i], d_scores[i]
                d_mask, left, right = mask[i], L[i], scores[i]
                for j in range(m):
                    target[j] = d_mask[j] * right[j]
                    total[j] += d_mask[j] * left[j]
            solve(adjoint, s, True, stop, pattern, factors, h)
            edges = pattern.edge_ptr[block], pattern.edge_ptr[block + 1]
            edge_products(adjoint, L, s, edges, pattern, d.weight[:, h])
        take(k, x.key, nodes, g)
        matmul(dq, d_scores, k)
        put(d.query[part], dq, nodes, g)
        take_transposed(qt, x.query, nodes, g)
        matmul(dkt, qt, d_scores)
        put_transposed(d.key[part], dkt, nodes, g)
