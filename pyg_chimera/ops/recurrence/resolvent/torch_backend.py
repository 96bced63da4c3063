"""The resolvent in plain PyTorch, on any device, without a loop over nodes or edges.

There are four solvers. *sparse* processes the elimination tree level by level. *dense*
and *neumann* use dense matrices, block by block on the CPU and padded on other devices;
*neumann* in state form and *iterative* multiply by the sparse A. Gradients are written
out, as all of this runs inside one registered operator, below autograd.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.checks import trusted
from pyg_chimera.ops.common.compilation import compiled
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.recurrence.mask_form import (
    Padding,
    masked_mix,
    masked_mix_backward,
)
from pyg_chimera.ops.recurrence.resolvent.pivot_growth import (
    check_pivot_growth,
    named_if_singular,
)
from pyg_chimera.ops.recurrence.resolvent.sweep_polynomial import (
    Iteration,
    check_residual,
    polynomial_of,
)
from pyg_chimera.ops.structure.cache import table
from pyg_chimera.ops.structure.symbolic_factor import Blocks, SymbolicFactor

DEVICES = None

#: The number of entries that a slice of states or a padded group of matrices may have.
_MAX_NUMEL = 1 << 26

Gradients = tuple[Tensor, Tensor, Tensor, Tensor]
Solve = Callable[..., Tensor]

# ------------------------------------------------------------------------ the backend


def why_not(call: Call) -> str | None:
    """It has no chunk form, and eliminates without pivoting with the sparse solver."""
    if call.choice.form == "chunk":
        return (
            "form='chunk' has no torch backend, but numba and triton; use form='auto'"
        )
    if call.choice.solver == "sparse":
        factors = call.once("levelled factors", lambda: _factorize(call))
        check_pivot_growth(factors[1])
    if call.choice.solver == "iterative":
        polynomial_of(call)
    return None


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P]; saves the sparse factors or an iteration's steps.

    Both are small compared with the states, which are never saved.
    """
    saved: tuple[Tensor, ...] = ()
    if call.choice.solver == "sparse":
        saved = call.once("levelled factors", lambda: _factorize(call))[0][1:]
    elif call.choice.solver == "iterative":
        saved = Iteration.saved(call)
    dtype = call.inputs.value.dtype
    if call.choice.form == "mask":
        out = _mask_forward(call, saved)
    elif call.choice.solver == "neumann":
        out = _neumann_state_forward(call)
    else:
        out = _state_forward(*_solver(call, saved, check=not trusted()))
    return out.to(dtype), saved


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> Gradients:
    """Gradients of query, key, value and edge weight."""
    if call.choice.form == "mask":
        return _mask_backward(call, saved, grad)
    if call.choice.solver == "neumann":
        return _neumann_state_backward(call, grad)
    found = _state_backward(*_solver(call, saved), grad)
    return tuple(x.to(grad.dtype) for x in found)  # type: ignore[return-value]


# -------------------------------------------------------------------------- state form


def _solver(
    call: Call, saved: tuple[Tensor, ...], check: bool = False
) -> tuple[Call, Solve]:
    """Solves (I - A) H = X, or its transpose, for X [V, heads, N, P]; and the call in
    the dtype of the solver. The host waits for a `check` that I - A is not singular.
    """
    if call.choice.solver == "iterative":
        iteration = Iteration.of(call, *saved)
        return iteration.call, partial(_iterate, iteration)
    if call.choice.solver == "sparse":
        return call, partial(_eliminate, Factors(_sweeps_of(call), *saved))
    return call, partial(_solve_blocks, call.inputs.edge_weight, _chunks(call), check)


def _state_forward(call: Call, solve: Solve) -> Tensor:
    """The output from states, a slice of state channels at a time."""
    query, key, value = call.inputs[:3]
    out = torch.zeros_like(value)
    q, k = _repeat(query, value), _repeat(key, value)
    for part in _state_slices(value, query.size(2), 5):
        H = solve(k[..., part, None] * value.unsqueeze(-2))
        out += (q[..., part, None] * H).sum(-2)
    return out


def _state_backward(call: Call, solve: Solve, grad: Tensor) -> Gradients:
    """Gradients from states and their adjoints, as in the numba backend."""
    query, key, value, edge_weight, (col, row), *_ = call.inputs
    q, k = _repeat(query, value), _repeat(key, value)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    dv, dw = torch.zeros_like(value), torch.zeros_like(edge_weight)
    dy, v = grad.to(value.dtype).unsqueeze(-2), value.unsqueeze(-2)
    for part in _state_slices(value, query.size(2), 8):
        H = solve(k[..., part, None] * v)
        Z = solve(q[..., part, None] * dy, transpose=True)
        dq[..., part], dk[..., part] = (H * dy).sum(-1), (Z * v).sum(-1)
        dv += (Z * k[..., part, None]).sum(-2)
        dw += (Z[row] * H[col]).sum((-1, -2))
    return _grouped_sum(dq, query), _grouped_sum(dk, key), dv, dw


# --------------------------------------------------------------------------- mask form


class _Resolvents(NamedTuple):
    """Those of some blocks, padded to the largest."""

    padding: Padding
    L: Tensor  #: [B, heads, n, n]
    edge: Tensor  #: [e], their edges
    pullback: Callable[
        [Tensor], Tensor
    ]  #: from dL to the weights' gradients [e, heads]


def _resolvents(
    call: Call, saved: tuple[Tensor, ...], check: bool = False
) -> Iterator[_Resolvents]:
    weight = call.inputs.edge_weight
    if call.choice.solver == "sparse":
        yield _eliminated(call, Factors(_sweeps_of(call), *saved))
        return
    for chunk in _chunks(call):
        A = chunk.adjacency(weight)
        L, pullback = _dense_resolvent(A, call.inputs.num_terms, check)
        edges = partial(chunk.of_edges, pullback)
        yield _Resolvents(chunk.padding, L, chunk.edge, edges)


def _mask_forward(call: Call, saved: tuple[Tensor, ...]) -> Tensor:
    """The output from resolvents."""
    out = torch.empty_like(call.inputs.value)
    for pad, L, *_ in _resolvents(call, saved, check=not trusted()):
        pad.unpad_into(out, masked_mix(L, *map(pad.pad, call.inputs[:3])))
    return out


def _mask_backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> Gradients:
    """Gradients from resolvents."""
    dq, dk, dv, dw = (torch.empty_like(x) for x in call.inputs[:4])
    for pad, L, edge, pullback in _resolvents(call, saved):
        inputs = map(pad.pad, (*call.inputs[:3], grad))
        dL, *parts = masked_mix_backward(L, *inputs)
        for whole, part in zip((dq, dk, dv), parts, strict=True):
            pad.unpad_into(whole, part)
        dw[edge] = pullback(dL)
    return dq, dk, dv, dw


def _dense_resolvent(
    A: Tensor, num_terms: int | None, check: bool
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    r"""The resolvent, or the sum of powers up to `num_terms`, and its pullback.

    Only the forward pass checks if I - A is singular, as the host waits for the result.

    The sum :math:`S_m` of :math:`m` terms and :math:`P_m = A^m` are computed bit by bit
    of :math:`m`, by :math:`S_{2m} = S_m + P_m S_m` and :math:`S_{m+1} = I + A S_m`.
    """
    eye = _eye(A)
    if num_terms is None:
        L = _unbatched(_inverse(check), _difference(A)).to(A.dtype)
        return L, lambda dL: L.mT @ dL @ L.mT
    steps = []
    S, P = eye, A
    for bit in bin(num_terms + 1)[3:]:
        steps.append(("double", S, P))
        S, P = S + P @ S, P @ P
        if bit == "1":
            steps.append(("add", S, P))
            S, P = eye + A @ S, A @ P

    def pullback(dS: Tensor) -> Tensor:
        dA, dP = torch.zeros_like(A), torch.zeros_like(A)
        for step, S, P in reversed(steps):
            if step == "add":
                dA = dA + dS @ S.mT + dP @ P.mT
                dS, dP = A.mT @ dS, A.mT @ dP
            else:
                dP = dP @ P.mT + P.mT @ dP + dS @ S.mT
                dS = dS + P.mT @ dS
        return dA + dP

    return S, pullback


def _neumann_state_forward(call: Call) -> Tensor:
    """The finite sum in state form, H <- A H + X, by sparse products."""
    query, key, value = call.inputs[:3]
    out = torch.zeros_like(value)
    q, k = _repeat(query, value), _repeat(key, value)
    for part in _state_slices(value, query.size(2), 3):
        *_, H = _powers(call, k[..., part, None] * value.unsqueeze(-2))
        out += (q[..., part, None] * H).sum(-2)
    return out


def _neumann_state_backward(call: Call, grad: Tensor) -> Gradients:
    """Gradients of the finite sum, back through every product."""
    query, key, value, edge_weight = call.inputs[:4]
    num_terms = call.inputs.num_terms
    q, k = _repeat(query, value), _repeat(key, value)
    dq, dk = torch.empty_like(q), torch.empty_like(k)
    dv, dw = torch.zeros_like(value), torch.zeros_like(edge_weight)
    col, row = call.inputs.edge_index
    dy, v = grad.unsqueeze(-2), value.unsqueeze(-2)
    for part in _state_slices(value, query.size(2), num_terms + 4):
        *states, H = _powers(call, k[..., part, None] * v)
        dq[..., part] = (H * dy).sum(-1)
        G = q[..., part, None] * dy
        dX = G.clone()
        for H in reversed(states):
            dw += (G[row] * H[col]).sum((-1, -2))
            step = edge_weight[..., None, None] * G[row]
            G = torch.zeros_like(G).index_add_(0, col, step)
            dX += G
        dk[..., part] = (dX * v).sum(-1)
        dv += (dX * k[..., part, None]).sum(-2)
    return _grouped_sum(dq, query), _grouped_sum(dk, key), dv, dw


def _powers(call: Call, X: Tensor) -> Iterator[Tensor]:
    """The states after 0, 1, ... products."""
    H, (col, row) = X, call.inputs.edge_index
    yield H
    for _ in range(call.inputs.num_terms):
        H = X.index_add(0, row, call.inputs.edge_weight[..., None, None] * H[col])
        yield H


def _iterate(iteration: Iteration, X: Tensor, transpose: bool = False) -> Tensor:
    """By products with A, as in `sparse_products`."""
    call, steps, tolerance = iteration
    edges, weight = call.inputs.edge_index, call.inputs.edge_weight[..., None, None]
    col, row = edges.flip(0) if transpose else edges

    def residual(H: Tensor, X: Tensor) -> Tensor:
        return (X - H).index_add(0, row, weight * H[col])

    def norms(x: Tensor) -> Tensor:  # A is a contraction in one of them
        x = x.abs().nan_to_num(0.0)
        return torch.stack([x.amax(0), x.sum(0)])

    def ratio(x: Tensor, bound: Tensor) -> list[float]:
        return (x / bound).nan_to_num(0.0).flatten(1).amax(1).tolist()

    H, r, zero = torch.zeros_like(X), X, torch.zeros_like(X)
    safe, idle, best = False, 0, [float("inf")] * 2
    while X.numel() > 0:
        for step in steps.unbind(1):
            c, a = step[..., None, None].unbind(1)
            if safe:
                c, a = torch.ones_like(c), torch.zeros_like(a)
            t = -residual(r, zero)
            H = H + torch.where(a == 0, c * r, c * (a * r - t))
            single = pair = r - c * t
            if (a != 0).any():
                pair = r - c * (a * t + residual(t, zero))
            r = torch.where(a == 0, single, pair)
        r = residual(H, X)
        left = max(ratio(norms(r), 2 * norms(H) + norms(X)))
        parts = ratio(norms(r), norms(X))
        idle = 0 if any(x < y for x, y in zip(parts, best, strict=True)) else idle + 1
        best = [min(x, y) for x, y in zip(parts, best, strict=True)]
        rounding = idle > 0 and left <= 16 * tolerance
        if left <= tolerance or rounding or (safe and idle > 64):
            check_residual(left, tolerance)
            break
        if idle > 0 and not safe:  # starts over with H <- A H + X, which converges
            H, r = torch.zeros_like(X), X
            safe, idle, best = True, 0, [float("inf")] * 2
    return H


class _Chunk(NamedTuple):
    """Some blocks of similar size, padded to the largest."""

    padding: Padding
    edge: Tensor  #: [e], their edges
    place: Tensor  #: [e], index of each in a flattened [B, n, n]

    def adjacency(self, edge_weight: Tensor) -> Tensor:
        """[E, heads] -> [B, heads, n, n]."""
        size, n = self.padding.shape
        A = edge_weight.new_zeros(size * n * n, edge_weight.size(1))
        A.index_add_(0, self.place, edge_weight[self.edge])
        return A.view(size, n, n, -1).permute(0, 3, 1, 2).contiguous()

    def of_edges(self, pullback: Callable[[Tensor], Tensor], dL: Tensor) -> Tensor:
        """The gradients of weights [e, heads], given the pullback from L to A."""
        return pullback(dL).permute(0, 2, 3, 1).flatten(0, 2)[self.place]


def _chunks(call: Call) -> list[_Chunk]:
    weight = call.inputs.edge_weight
    return table(_cut, call.structure, weight.device, weight.size(1))


def _cut(symbolic: Blocks, device: torch.device, num_heads: int) -> list[_Chunk]:
    sizes, chunks = symbolic.sizes, []
    by_size = np.argsort(-sizes, kind="stable")
    row, col = np.empty((2, symbolic.num_edges), np.int64)
    row[symbolic.edge] = symbolic.local[symbolic.edge_row]
    col[symbolic.edge] = symbolic.local[symbolic.edge_col]
    first = 0
    while first < len(sizes):
        n = int(sizes[by_size[first]])
        # On the CPU, padded groups are no faster than blocks one by one.
        fits = 1 if device.type == "cpu" else max(1, _MAX_NUMEL // (n * n * num_heads))
        blocks = by_size[first : first + fits]
        first += len(blocks)
        nodes, edges, places = [], [], []
        for b, block in enumerate(blocks):
            inside = slice(symbolic.ptr[block], symbolic.ptr[block + 1])
            nodes.append(symbolic.order[inside])
            edge = symbolic.edge[
                symbolic.edge_ptr[block] : symbolic.edge_ptr[block + 1]
            ]
            edges.append(edge)
            places.append((b * n + row[edge]) * n + col[edge])
        padding = Padding(np.concatenate(nodes), sizes[blocks], device)
        tables = (np.concatenate(edges), np.concatenate(places))
        chunks.append(_Chunk(padding, *_moved(device, *tables)))
    return chunks


def _solve_blocks(
    edge_weight: Tensor,
    chunks: list[_Chunk],
    check: bool,
    X: Tensor,
    transpose: bool = False,
) -> Tensor:
    """By dense matrices."""
    X, shape = X.flatten(2), X.shape
    H = torch.empty_like(X)
    for chunk in chunks:
        M = _difference(chunk.adjacency(edge_weight))
        M = M.mT if transpose else M
        chunk.padding.unpad_into(H, _solution(M, chunk.padding.pad(X), check))
    return H.view(shape)


def _moved(device: torch.device, *arrays: np.ndarray) -> list[Tensor]:
    return [torch.from_numpy(x).to(device) for x in arrays]


def _grouped_sum(x: Tensor, like: Tensor) -> Tensor:
    """Sums over the heads of each group."""
    return x.unflatten(1, (like.size(1), -1)).sum(2)


def _state_slices(value: Tensor, num_states: int, copies: int = 1) -> Iterator[slice]:
    """Slices of the state channels such that the states of one fit in memory."""
    lanes = max(1, _MAX_NUMEL // max(1, value.numel() * copies))
    for a in range(0, max(1, num_states), lanes):
        yield slice(a, a + lanes)


def _eye(A: Tensor) -> Tensor:
    return torch.eye(A.size(-1), dtype=A.dtype, device=A.device).expand_as(A)


def _repeat(x: Tensor, value: Tensor) -> Tensor:
    return x.repeat_interleave(value.size(1) // x.size(1), 1)


def _difference(A: Tensor) -> Tensor:
    """I - A, in float64: where rows sum to nearly one, little of it is left."""
    return _eye(A).double() - A


def _inverse(check: bool) -> Callable[[Tensor], Tensor]:
    return lambda M: torch.linalg.inv_ex(M, check_errors=check)[0]


def _solution(M: Tensor, X: Tensor, check: bool) -> Tensor:
    """M^-1 X; as in `_dense_resolvent`, only the forward pass checks for errors."""
    return _unbatched(
        lambda *args: torch.linalg.solve_ex(*args, check_errors=check)[0],
        M,
        X.to(M.dtype),
    ).to(X.dtype)


def _unbatched(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Calls a LAPACK function on [B, heads, n, n], one matrix at a time on the CPU.

    Batched LU is wrong there with more than one thread (pytorch#142815, #141358).
    """
    if args[0].device.type != "cpu":
        with named_if_singular():
            return function(*args)
    flat = [x.flatten(0, 1) for x in args]
    with named_if_singular():
        results = [function(*(x[b] for x in flat)) for b in range(len(flat[0]))]
    return torch.stack(results).view(*args[0].shape[:2], *results[0].shape)


# ---------------------------------------------------------------------------- sparse


class _Level(NamedTuple):
    """One level of a sweep: state[row] -= value[entry] * state[col]."""

    node: Tensor
    row: Tensor
    col: Tensor
    entry: Tensor


class Sweeps(NamedTuple):
    """The levels of both sweeps of a symbolic factor, on a device."""

    down: list[_Level]  #: over rows of L, leaves of the elimination tree first
    up: list[_Level]  #: over rows of U, roots first
    columns: list[Tensor]  #: the entries of L by the level of their column
    updates: list[tuple[Tensor, ...]]  #: value[a] -= value[b] * value[c], by level
    row: Tensor  #: [F], row of each entry of L
    column: Tensor  #: [F], column of each entry of L
    slot: Tensor  #: [E], index of each edge in [diagonal | L | U]
    root: Tensor  #: [V], last position of each one's connected component
    node: Tensor  #: [V], node at each position
    edge: Tensor  #: [E], the edges block by block, ...
    edge_row: Tensor  #: [E], ... positions of their targets, ...
    edge_col: Tensor  #: [E], ... and of their sources


class Factors(NamedTuple):
    """I - A = L U, [V or F, heads], and its sweeps."""

    sweeps: Sweeps
    diagonal: Tensor  #: reciprocal of the diagonal of U
    lower: Tensor
    upper: Tensor


def _sweeps(symbolic: SymbolicFactor, device: torch.device) -> Sweeps:
    """Groups the rows of a symbolic factor by their level in the elimination tree."""
    F = symbolic.num_entries
    row = np.repeat(np.arange(symbolic.num_nodes), np.diff(symbolic.lower_ptr))
    col = symbolic.lower_col
    depth = _depths(symbolic.lower_ptr, col)
    height = _heights(symbolic.upper_ptr, symbolic.upper_row)
    entries = np.arange(F)
    down = _levels(depth, row, col, entries, device)
    up = _levels(height, col, row, entries, device)
    columns = list(_split(entries, depth[col], len(down), device))
    table = _updates(
        symbolic.lower_ptr,
        col,
        symbolic.upper_ptr,
        symbolic.upper_row,
        symbolic.upper_entry,
    )
    updates = list(
        zip(
            *(_split(x, depth[table[3]], len(down), device) for x in table[:3]),
            strict=True,
        )
    )
    ends = (symbolic.edge, symbolic.edge_row, symbolic.edge_col)
    arrays = (row, col, symbolic.slot, symbolic.roots(), symbolic.node, *ends)
    return Sweeps(down, up, columns, updates, *_moved(device, *arrays))


def _sweeps_of(call: Call) -> Sweeps:
    """The sweeps of a call, cached for each graph and device."""
    return table(_sweeps, call.structure, call.inputs.edge_weight.device)


def _factorize(call: Call) -> tuple[Factors, float]:
    """Factors I - A in float64; returns the pivot growth, too, as the numba backend."""
    symbolic, edge_weight = call.structure, call.inputs.edge_weight
    sweeps = _sweeps_of(call)
    V, F = symbolic.num_nodes, symbolic.num_entries
    values = edge_weight.new_zeros(V + 2 * F, edge_weight.size(1), dtype=torch.float64)
    values[:V] = 1
    values.index_add_(0, sweeps.slot, -edge_weight.double())
    look, growth = V > 0 and not trusted(), 1.0
    if look:
        norm, _, dominant = _sums(symbolic, sweeps, values)
    for entry, (target, left, right) in zip(
        sweeps.columns, sweeps.updates, strict=True
    ):
        values[V + entry] /= values[sweeps.column[entry]]
        values.index_add_(0, target, -values[left] * values[right])
    if look:
        _, grown, _ = _sums(symbolic, sweeps, values)
        ratio = (grown / norm).nan_to_num(torch.inf, torch.inf)
        ratio = torch.where(dominant & ratio.isfinite(), 1.0, ratio)
        zero_pivot = bool((values[:V] == 0).any())
        growth = float("inf") if zero_pivot else max(1.0, float(ratio.max()))
    factors = (1 / values[:V], values[V : V + F], values[V + F :])
    return Factors(sweeps, *(x.to(edge_weight.dtype) for x in factors)), growth


def _columns(symbolic: Blocks, device: torch.device) -> tuple[Padding, Tensor]:
    """The nodes of each block, and the index of each position's node among them."""
    (column,) = _moved(device, symbolic.local)
    return Padding(symbolic.order, symbolic.sizes, device), column


def _eliminate(factors: Factors, X: Tensor, transpose: bool = False) -> Tensor:
    """By sparse factors, for X [V, heads, N, P] in node order."""
    node = factors.sweeps.node
    H = _solve(factors, X[node].flatten(2), transpose).view_as(X)
    return torch.empty_like(H).index_copy_(0, node, H)


def _solve(factors: Factors, X: Tensor, transpose: bool = False) -> Tensor:
    """Solves (I - A) H = X, or its transpose, for X [V, heads, W]; overwrites X."""
    first, second = factors.lower, factors.upper
    if transpose:
        first, second = second, first
    _sweep(factors.sweeps.down, X, first, factors.diagonal if transpose else None)
    _sweep(factors.sweeps.up, X, second, None if transpose else factors.diagonal)
    return X


def _eliminated(call: Call, factors: Factors) -> _Resolvents:
    """All resolvents, from sparse factors."""
    sweeps, heads = factors.sweeps, factors.lower.size(1)
    pad, column = table(_columns, call.structure, factors.lower.device)
    X = factors.lower.new_zeros(len(column), heads, pad.shape[1])
    X.scatter_(2, column.view(-1, 1, 1).expand(-1, heads, 1), 1)
    L = torch.empty_like(X).index_copy_(0, sweeps.node, _solve(factors, X))
    source = call.inputs.edge_index[0, sweeps.edge]

    def pullback(dL: Tensor) -> Tensor:
        dL = pad.unpad(dL, len(L))[sweeps.node]
        M = _solve(factors, dL, transpose=True)
        return (M[sweeps.edge_row] * L[source]).sum(-1)

    return _Resolvents(pad, pad.pad(L), sweeps.edge, pullback)


def _sweep(
    levels: list[_Level], X: Tensor, values: Tensor, scale: Tensor | None
) -> None:
    for level in levels:
        if level.entry.numel() > 0:
            step = values[level.entry].unsqueeze(-1) * X[level.col]
            X.index_add_(0, level.row, step, alpha=-1)
        if scale is not None:
            X[level.node] *= scale[level.node].unsqueeze(-1)


def _sums(
    symbolic: SymbolicFactor, sweeps: Sweeps, values: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Three properties of each position's component, [V, heads].

    If the values are those of I - A: the largest row sum of |I - A|, and last, whether
    all its rows, or all columns, are diagonally dominant. If they are those of L and U:
    second, the largest row sum of |L| |U|.
    """
    V, F = symbolic.num_nodes, symbolic.num_entries
    row, col = sweeps.row, sweeps.column
    diagonal, below, above = values.abs().split([V, F, F])
    zero = torch.zeros_like(diagonal)
    u_sum = diagonal.index_add(0, col, above)
    product = u_sum.index_add(0, row, below * u_sum[col])
    by_row = zero.index_add(0, col, above).index_add(0, row, below)
    by_column = zero.index_add(0, row, above).index_add(0, col, below)
    index = sweeps.root[:, None].expand_as(diagonal)

    def largest(x: Tensor) -> Tensor:
        return zero.scatter_reduce(0, index, x, "amax")[sweeps.root]

    bound = diagonal * (1 + 1e-12)
    rows, columns = (largest((x > bound).to(x.dtype)) == 0 for x in (by_row, by_column))
    return largest(diagonal + by_row), largest(product), rows | columns


def _split(
    x: np.ndarray, level: np.ndarray, count: int, device: torch.device
) -> tuple[Tensor, ...]:
    order = np.argsort(level, kind="stable")
    sizes = np.bincount(level, minlength=count).tolist()
    return torch.from_numpy(x[order]).to(device).split(sizes)


def _levels(
    depth: np.ndarray,
    row: np.ndarray,
    col: np.ndarray,
    entry: np.ndarray,
    device: torch.device,
) -> list[_Level]:
    count = int(depth.max(initial=-1)) + 1
    node = _split(np.arange(len(depth)), depth, count, device)
    table = (_split(x, depth[row], count, device) for x in (row, col, entry))
    return [_Level(*level) for level in zip(node, *table, strict=True)]


@compiled()
def _depths(lower_ptr, lower_col):
    n = lower_ptr.shape[0] - 1
    depth = np.zeros(n, np.int64)
    for i in range(n):
        for x in range(lower_ptr[i], lower_ptr[i + 1]):
            depth[i] = max(depth[i], depth[lower_col[x]] + 1)
    return depth


@compiled()
def _heights(upper_ptr, upper_row):
    n = upper_ptr.shape[0] - 1
    height = np.zeros(n, np.int64)
    for i in range(n - 1, -1, -1):
        for x in range(upper_ptr[i], upper_ptr[i + 1]):
            height[i] = max(height[i], height[upper_row[x]] + 1)
    return height


@compiled()
def _updates(lower_ptr, lower_col, upper_ptr, upper_row, upper_entry):
    """All elementary updates of the elimination: target, two factors, pivot."""
    n, F = lower_ptr.shape[0] - 1, lower_col.shape[0]
    count = 0
    for k in range(n):
        count += (upper_ptr[k + 1] - upper_ptr[k]) ** 2
    table = np.empty((4, count), np.int64)
    w = 0
    for k in range(n):
        for x in range(upper_ptr[k], upper_ptr[k + 1]):
            i = upper_row[x]
            for y in range(upper_ptr[k], upper_ptr[k + 1]):
                j = upper_row[y]
                low, high = min(i, j), max(i, j)
                a, b = lower_ptr[high], lower_ptr[high + 1]
                z = a + np.searchsorted(lower_col[a:b], low)
                if i == j:
                    table[0, w] = i
                elif i > j:
                    table[0, w] = n + z
                else:
                    table[0, w] = n + F + z
                table[1, w] = n + upper_entry[x]
                table[2, w] = n + F + upper_entry[y]
                table[3, w] = k
                w += 1
    return table
