"""The resolvent in plain PyTorch, on any device, without a loop over nodes or edges.

*sparse* processes the elimination tree level by level; *dense*, and *neumann* in mask
form, use dense matrices, block by block on the CPU and padded on other devices;
*neumann* in state form and *iterative* multiply by the sparse A. Autograd
differentiates all of it, part by part; solutions of linear systems are differentiated
by a solution of the transposed one.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.checks import trusted
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.numba_runtime import arrays
from pyg_chimera.ops.common.torch_private import recorded
from pyg_chimera.ops.recurrence.mask_form import Padding, masked_mix
from pyg_chimera.ops.recurrence.resolvent.pivot_growth import (
    check_pivot_growth,
    named_if_singular,
)
from pyg_chimera.ops.recurrence.resolvent.sweep_polynomial import (
    Iteration,
    check_residual,
    polynomial_of,
)
from pyg_chimera.ops.recurrence.row_sweeps import factorize
from pyg_chimera.ops.structure.cache import table
from pyg_chimera.ops.structure.csr import runs
from pyg_chimera.ops.structure.symbolic_factor import (
    Blocks,
    SymbolicFactor,
    heights,
    slots,
)

DEVICES = None

#: The number of entries that a slice of states or a padded group of matrices may have.
_MAX_NUMEL = 1 << 26
_ALL = slice(None)

# ------------------------------------------------------------------------ the backend


def why_not(call: Call) -> str | None:
    """It has no chunk form, and eliminates without pivoting with the sparse solver."""
    if call.choice.form == "chunk":
        return (
            "form='chunk' has no torch backend, but numba and triton; use form='auto'"
        )
    if call.choice.solver == "sparse" and not trusted():
        (weight,) = arrays(call.inputs.edge_weight.cpu())
        factors = call.once("factors", lambda: factorize(call.structure, weight))
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
        saved = _eliminated(call)
    elif call.choice.solver == "iterative":
        saved = Iteration.saved(call)
    inputs, solve = _solver(call, saved)
    out = torch.zeros_like(inputs[2])
    for part in _parts(call, solve, check=not trusted()):
        out[part.node] += part.mix(*part.of(inputs))
    return out.to(call.inputs.value.dtype), saved


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> list[Tensor]:
    """Gradients of query, key, value and edge weight."""
    inputs, solve = _solver(call, saved)
    grads, dy = [torch.zeros_like(x) for x in inputs], grad.to(inputs[2].dtype)
    for part in _parts(call, solve):
        given = [x.detach().requires_grad_() for x in part.of(inputs)]
        with recorded():
            out = part.mix(*given)
            found = torch.autograd.grad(
                out, given, dy[part.node], materialize_grads=True
            )
        for total, index, x in zip(grads, part.where, found, strict=True):
            total[index] += x
    return [x.to(grad.dtype) for x in grads]


# --------------------------------------------------------------------------- the parts


class _Part(NamedTuple):
    """A part of the output: that of some nodes, from some state channels."""

    node: Any  #: the nodes ...
    edge: Any  #: ... and the edges between them
    keys: slice  #: the channels of query and key
    mix: Callable[..., Tensor]  #: the output, from these parts of the inputs

    @property
    def where(self) -> tuple[tuple, ...]:
        """The indices of its query, key, value and edge weight."""
        states = (self.node, _ALL, self.keys)
        return states, states, (self.node,), (self.edge,)

    def of(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        """Its query, key, value and edge weight."""
        return [x[index] for x, index in zip(inputs, self.where, strict=True)]


#: From weights and X [V, heads, W] to (I - A)^-1 X.
_Solver = Callable[[Tensor, Tensor], Tensor]


def _parts(call: Call, solve: _Solver | None, check: bool = False) -> Iterator[_Part]:
    """The parts of a call, each small enough to differentiate; a `check` waits for
    whether I - A is singular.
    """
    query, _, value, weight = call.inputs[:4]
    if len(value) == 0:
        return
    terms, in_states = call.inputs.num_terms or 0, call.choice.form == "state"
    if solve is None:
        for block in table(_cut, call.structure, weight.device, weight.size(1)):
            resolvent = partial(block.resolvent, call.inputs.num_terms, check)
            if not in_states:
                mix = partial(_mix_by_mask, block.padding, resolvent)
                yield _Part(block.node, block.edge, _ALL, mix)
                continue
            mix = partial(_mix_by_states, partial(block.solve, resolvent))
            numel = len(block.node) * value.shape[1:].numel()
            for keys in _slices(query, 8 * numel):
                yield _Part(block.node, block.edge, keys, mix)
    elif in_states:
        copies = 8 + terms * (1 + 2 * len(weight) // len(value))
        for keys in _slices(query, copies * value.numel()):
            yield _Part(_ALL, _ALL, keys, partial(_mix_by_states, solve))
    else:
        padding = table(_padding, call.structure, weight.device)
        n, V = padding.shape[1], len(value)
        eye = torch.eye(n, dtype=weight.dtype, device=weight.device)
        eye = padding.unpad(eye.expand(padding.shape[0], weight.size(1), n, n), V)
        mix = partial(_mix_by_mask, padding, lambda w: padding.pad(solve(w, eye)))
        yield _Part(_ALL, _ALL, _ALL, mix)


def _slices(query: Tensor, numel: int) -> Iterator[slice]:
    """Slices of the state channels that fit in memory, given the size of one."""
    lanes = max(1, _MAX_NUMEL // max(1, numel))
    for a in range(0, max(1, query.size(2)), lanes):
        yield slice(a, a + lanes)


def _mix_by_states(
    solve: _Solver, query: Tensor, key: Tensor, value: Tensor, weight: Tensor
) -> Tensor:
    repeats = value.size(1) // query.size(1)
    q, k = (x.repeat_interleave(repeats, 1).unsqueeze(-1) for x in (query, key))
    return (q * solve(weight, k * value.unsqueeze(-2))).sum(-2)


def _mix_by_mask(
    padding: Padding,
    resolvent: Callable[[Tensor], Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor,
) -> Tensor:
    out = masked_mix(resolvent(weight), *map(padding.pad, (query, key, value)))
    return padding.unpad(out, len(value))


def _padding(symbolic: Blocks, device: torch.device) -> Padding:
    return Padding(symbolic.order, symbolic.sizes, device)


# ------------------------------------------------------------------------------- dense


class _Group(NamedTuple):
    """Some blocks of similar size, padded to the largest."""

    node: Tensor  #: their nodes
    edge: Tensor  #: [e], their edges
    padding: Padding  #: of the nodes, in this order
    place: Tensor  #: [e], index of each edge in a flattened [B, n, n]

    def resolvent(self, terms: int | None, check: bool, weight: Tensor) -> Tensor:
        """(I - A)^-1 or its first terms, [B, heads, n, n], for weights [e, heads]."""
        size, n = self.padding.shape
        A = weight.new_zeros(size * n * n, weight.size(1))
        A = A.index_add(0, self.place, weight).view(size, n, n, -1).permute(0, 3, 1, 2)
        return _Inverse.apply(A, check) if terms is None else _sum_of_powers(A, terms)

    def solve(
        self, resolvent: Callable[[Tensor], Tensor], weight: Tensor, X: Tensor
    ) -> Tensor:
        """The product with the resolvent, for X [nodes, heads, ...]."""
        H = resolvent(weight) @ self.padding.pad(X.flatten(2))
        return self.padding.unpad(H, len(X)).view_as(X)


class _Inverse(torch.autograd.Function):
    """(I - A)^-1 by float64: where rows sum to nearly one, little of I - A is left.

    On the CPU, of one matrix at a time: batched LU is wrong there with more than one
    thread (pytorch#142815, #141358).
    """

    @staticmethod
    def forward(ctx: Any, A: Tensor, check: bool) -> Tensor:
        M = torch.eye(A.size(-1), dtype=torch.double, device=A.device) - A
        parts = [M] if A.device.type != "cpu" else M.flatten(0, 1)
        with named_if_singular():
            found = [torch.linalg.inv_ex(x, check_errors=check)[0] for x in parts]
        L = torch.stack(found).view_as(M).to(A.dtype)
        ctx.save_for_backward(L)
        return L

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (L,) = ctx.saved_tensors
        return L.mT @ grad @ L.mT, None


def _sum_of_powers(A: Tensor, terms: int) -> Tensor:
    r"""The sum of powers of A up to `terms`.

    The sum :math:`S_m` of :math:`m` terms and :math:`P_m = A^m` are computed bit by bit
    of :math:`m`, by :math:`S_{2m} = S_m + P_m S_m` and :math:`S_{m+1} = I + A S_m`.
    """
    eye = torch.eye(A.size(-1), dtype=A.dtype, device=A.device)
    S, P = eye.expand_as(A), A
    for bit in bin(terms + 1)[3:]:
        S, P = S + P @ S, P @ P
        if bit == "1":
            S, P = eye + A @ S, A @ P
    return S


def _cut(symbolic: Blocks, device: torch.device, num_heads: int) -> list[_Group]:
    sizes, groups = symbolic.sizes, []
    by_size = np.argsort(-sizes, kind="stable")
    row, col = symbolic.local[symbolic.edge_row], symbolic.local[symbolic.edge_col]
    first = 0
    while first < len(sizes):
        n = int(sizes[by_size[first]])
        # On the CPU, padded groups are no faster than blocks one by one.
        fits = 1 if device.type == "cpu" else max(1, _MAX_NUMEL // (n * n * num_heads))
        blocks = by_size[first : first + fits]
        first += len(blocks)
        node = symbolic.order[runs(symbolic.ptr[blocks], sizes[blocks])]
        count = np.diff(symbolic.edge_ptr)[blocks]
        at = runs(symbolic.edge_ptr[blocks], count)
        rows = np.repeat(np.arange(len(blocks)) * n, count) + row[at]
        tables = (node, symbolic.edge[at], rows * n + col[at])
        node, edge, place = (torch.from_numpy(x).to(device) for x in tables)
        padding = Padding(np.arange(len(node)), sizes[blocks], device)
        groups.append(_Group(node, edge, padding, place))
    return groups


# -------------------------------------------------------------------------- by systems


def _solver(
    call: Call, saved: tuple[Tensor, ...]
) -> tuple[tuple[Tensor, ...], _Solver | None]:
    """Query, key, value and edge weight in the dtype to compute in, and how to solve;
    None if by dense matrices.
    """
    _, solver, form, *_ = call.choice
    if solver == "dense" or (solver, form) == ("neumann", "mask"):
        return call.inputs[:4], None
    ends = call.inputs.edge_index
    if solver == "neumann":
        return call.inputs[:4], partial(_sum_of_products, ends, call.inputs.num_terms)
    if solver == "sparse":
        solve = partial(_substitute, _Elimination.for_call(call), saved)
    else:
        iteration = Iteration.of(call, *saved, apart=False)
        call, solve = iteration.call, partial(_iterate, iteration)
    return call.inputs[:4], lambda w, X: _Solution.apply(w, X, ends, solve)


class _Solution(torch.autograd.Function):
    """(I - A)^-1 X, by a function that solves this system and the transposed one."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, X: Tensor, ends: Tensor, solve: Callable[..., Tensor]
    ) -> Tensor:
        H = solve(X)
        ctx.save_for_backward(H, ends)
        ctx.solve = solve
        return H

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        H, (col, row) = ctx.saved_tensors
        Z = ctx.solve(grad, transpose=True)
        return (Z[row] * H[col]).flatten(2).sum(-1), Z, None, None


def _sum_of_products(ends: Tensor, terms: int, weight: Tensor, X: Tensor) -> Tensor:
    """The finite sum in state form, H <- A H + X."""
    H, (col, row) = X, ends
    for _ in range(terms):
        step = weight[..., None, None] * H.index_select(0, col)
        H = X.index_add(0, row, step)
    return H


def _iterate(iteration: Iteration, X: Tensor, transpose: bool = False) -> Tensor:
    """By products with A, as in `sparse_products`."""
    call, steps, modes, tolerance = iteration
    edges, weight = call.inputs.edge_index, call.inputs.edge_weight[..., None, None]
    col, row = edges.flip(0) if transpose else edges
    blocks: Blocks = call.structure
    node, sizes = (
        torch.from_numpy(x).to(X.device) for x in (blocks.node, blocks.sizes)
    )
    block = torch.arange(len(sizes), device=X.device).repeat_interleave(sizes)
    at_node = modes.new_zeros(modes.shape).index_copy_(2, node, modes).permute(1, 2, 0)
    block = block.new_zeros(len(node)).index_copy_(0, node, block)
    vectors = at_node[[2, 3, 0, 1] if transpose else [0, 1, 2, 3], ..., None, None]
    right, right_image, left, left_image = vectors.to(X)

    def total(x: Tensor) -> Tensor:  # over the nodes of each graph, for each of them
        sums = x.new_zeros(len(sizes), *x.shape[1:]).index_add(0, block, x)
        return sums.index_select(0, block)

    def project(x: Tensor) -> Tensor:
        return x - right_image * total(left * x)

    along, X = right * total(left * X), project(X)

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
            b, c = torch.where(a == 0, c, c * a), torch.where(a == 0, 0, c)
            t = -residual(r, zero)
            H, r = H + (b * r - c * t), r - b * t
            if (c != 0).any():
                r = r - c * residual(t, zero)
        r = project(residual(H, X))
        rest = max(ratio(norms(r), 2 * norms(H) + norms(X)))
        parts = ratio(norms(r), norms(X))
        idle = 0 if any(x < y for x, y in zip(parts, best, strict=True)) else idle + 1
        best = [min(x, y) for x, y in zip(parts, best, strict=True)]
        rounding = idle > 0 and rest <= 16 * tolerance
        if rest <= tolerance or rounding or (safe and idle > 64):
            check_residual(rest, tolerance)
            break
        if idle > 0 and not safe:  # starts over with H <- A H + X, which converges
            H, r = torch.zeros_like(X), X
            safe, idle, best = True, 0, [float("inf")] * 2
    return H - right * total(left_image * H) + along


# -------------------------------------------------------------------------- elimination


class _Level(NamedTuple):
    """The columns of L of one height in the elimination tree: they are independent."""

    node: Tensor  #: their positions
    row: Tensor  #: the rows of their entries, ...
    col: Tensor  #: ... the columns ...
    entry: Tensor  #: ... and the indices
    target: Tensor  #: value[target] -= value[left] * value[right] eliminates them
    left: Tensor
    right: Tensor


class _Elimination(NamedTuple):
    """The tables of a symbolic factor, on a device."""

    levels: list[_Level]  #: leaves of the elimination tree first
    slot: Tensor  #: [E], index of each edge in [diagonal | L | U]
    node: Tensor  #: [V], node at each position

    @classmethod
    def of(cls, symbolic: SymbolicFactor, device: torch.device) -> "_Elimination":
        """Those of a symbolic factor."""
        V, F = symbolic.num_nodes, symbolic.num_entries
        ptr, row, entry = symbolic.upper_ptr, symbolic.upper_row, symbolic.upper_entry
        count, height = np.diff(ptr), heights(symbolic.parent)
        col = np.repeat(np.arange(V), count)
        left, right = np.repeat(np.arange(F), count[col]), runs(ptr[col], count[col])
        target = slots(row[left], row[right], symbolic.lower_ptr, symbolic.lower_col)

        def split(level: np.ndarray, *arrays: np.ndarray) -> Iterator[tuple]:
            order = np.argsort(level, kind="stable")
            sizes = np.bincount(level, minlength=height.max(initial=-1) + 1).tolist()
            for x in arrays:
                yield torch.from_numpy(x[order]).to(device).split(sizes)

        updates = (target, V + entry[left], V + F + entry[right])
        levels = zip(
            *split(height, np.arange(V)),
            *split(height[col], row, col, entry),
            *split(height[col[left]], *updates),
            strict=True,
        )
        arrays = (symbolic.slot, symbolic.node)
        moved = (torch.from_numpy(x).to(device) for x in arrays)
        return cls([_Level(*level) for level in levels], *moved)

    @classmethod
    def for_call(cls, call: Call) -> "_Elimination":
        """Those of a call, cached for each graph and device."""
        return table(cls.of, call.structure, call.inputs.value.device)


def _eliminated(call: Call) -> tuple[Tensor, ...]:
    """I - A = L U, computed in float64: the reciprocal of U's diagonal, L and U."""
    levels, slot, node = _Elimination.for_call(call)
    V, F, weight = len(node), call.structure.num_entries, call.inputs.edge_weight
    values = weight.new_zeros(V + 2 * F, weight.size(1), dtype=torch.double)
    values[:V] = 1
    values.index_add_(0, slot, -weight.double())
    for _, _, col, entry, target, left, right in levels:
        values[V + entry] /= values[col]
        values.index_add_(0, target, -values[left] * values[right])
    factors = 1 / values[:V], values[V : V + F], values[V + F :]
    return tuple(x.to(weight.dtype) for x in factors)


def _substitute(
    tables: _Elimination,
    factors: tuple[Tensor, ...],
    X: Tensor,
    transpose: bool = False,
) -> Tensor:
    """Solves L U H = X, or its transpose, for X [V, heads, ...] in node order."""
    diagonal, lower, upper = (x.unsqueeze(-1) for x in factors)
    first, second = (upper, lower) if transpose else (lower, upper)
    H = X[tables.node].flatten(2)
    for node, row, col, entry, *_ in tables.levels:
        if transpose:
            H[node] *= diagonal[node]
        H.index_add_(0, row, first[entry] * H[col], alpha=-1)
    for node, row, col, entry, *_ in reversed(tables.levels):
        H.index_add_(0, col, second[entry] * H[row], alpha=-1)
        if not transpose:
            H[node] *= diagonal[node]
    return torch.empty_like(X).index_copy_(0, tables.node, H.view_as(X))
