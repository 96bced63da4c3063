"""The resolvent in plain PyTorch, on any device: dense matrices of blocks, in padded
groups, which autograd differentiates one by one.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyg_chimera.ops.common.autograd import by_autograd
from pyg_chimera.ops.common.cache import table
from pyg_chimera.ops.common.checks import trusted
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.memory import left_if_short, too_large
from pyg_chimera.ops.recurrence.plain.matrices import Group, groups, masked_mix
from pyg_chimera.ops.recurrence.plan.pivot_growth import named_if_singular

DEVICES = None

#: The number of entries that a group of matrices may have, or it is a single block: on
#: the CPU, padded groups are no faster.
_CPU_NUMEL, _GPU_NUMEL = 1, 1 << 26
_NODES = ("query", "key", "value")


def why_not(call: Call) -> str | None:
    """It has dense matrices only, which have to fit in memory."""
    _, solver, form, *_ = call.choice
    if solver not in ("dense", "neumann") or form != "mask":
        return (
            f"solver={solver!r}, form={form!r} has no torch backend; use solver="
            "'dense' or 'neumann' with form='mask', or numba, by tensors on the CPU"
        )
    value, largest = call.inputs.value, int(call.structure.sizes.max(initial=0))
    needed = 3 * 8 * value.size(1) * largest**2  # I - A, its inverse and a product
    left = left_if_short(needed, value.device)
    if left is None:
        return None
    what = f"resolvent_mix with solver={solver!r}, form='mask' and {largest:,} nodes"
    advice = (
        "use tensors on the CPU, which numba solves in state form, fewer heads, "
        "smaller graphs, clusters or samples"
    )
    return str(too_large(what, needed, left, advice))


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P]; saves nothing, as matrices are large."""
    out = torch.empty_like(call.inputs.value)
    for group, part in _parts(call):
        out[group.node], _ = _mix(group, part, check=not trusted())
    return out, ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> list[Tensor]:
    """Gradients of query, key, value and edge weight."""
    grads = [torch.empty_like(x) for x in call.inputs[:4]]
    for group, part in _parts(call):
        found = by_autograd(partial(_mix, group))(part, (), grad[group.node])
        where = (*[group.node] * len(_NODES), group.edge)
        for whole, index, x in zip(grads, where, found, strict=True):
            whole[index] = x
    return grads


def _mix(group: Group, call: Call, check: bool = False) -> tuple[Tensor, tuple[()]]:
    """The output of a group from its inputs; a `check` waits for whether I - A is
    singular.
    """
    terms, A = call.inputs.num_terms, group.matrices(call.inputs.edge_weight)
    L = _inverse(A, check) if terms is None else _sum_of_powers(A, terms)
    return group.unpad(masked_mix(L, *map(group.pad, call.inputs[:3]))), ()


def _parts(call: Call) -> Iterator[tuple[Group, Call]]:
    """The groups of blocks, each with a call for its nodes and edges alone."""
    inputs, weight = call.inputs, call.inputs.edge_weight
    most = _CPU_NUMEL if weight.device.type == "cpu" else _GPU_NUMEL
    cut = table(groups, call.structure, weight.device, most // weight.size(1))
    for group in cut:
        floats = {name: getattr(inputs, name)[group.node] for name in _NODES}
        part = inputs._replace(**floats, edge_weight=weight[group.edge])
        yield group, call.with_inputs(part)


def _inverse(A: Tensor, check: bool) -> Tensor:
    """(I - A)^-1 by float64: where rows sum to nearly one, little of I - A is left.

    On the CPU, of one matrix at a time: batched LU is wrong there with more than one
    thread (pytorch#142815, #141358).
    """
    M = torch.eye(A.size(-1), dtype=torch.double, device=A.device) - A
    parts: Any = M.flatten(0, 1) if A.device.type == "cpu" else [M]
    with named_if_singular():
        found = [torch.linalg.inv_ex(x, check_errors=check)[0] for x in parts]
    return torch.stack(found).view_as(M).to(A.dtype)


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
