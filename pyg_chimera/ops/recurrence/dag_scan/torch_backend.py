"""The scan of a graph of states in plain PyTorch, level by level, on any device."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.recurrence.dag_scan.own import own, plus_own_gradients
from pyg_chimera.ops.recurrence.levels import Levels, levels_of
from pyg_chimera.ops.recurrence.mask_form import (
    Padding,
    masked_mix,
    masked_mix_backward,
)
from pyg_chimera.ops.recurrence.states import StateGraph
from pyg_chimera.ops.structure.cache import table

DEVICES = None

#: The number of entries that one slice of states may have, on a CPU and elsewhere.
_MAX_NUMEL, _MAX_NUMEL_ELSEWHERE = 1 << 26, 1 << 28

# ------------------------------------------------------------------------ the backend


def why_not(call: Call) -> str | None:
    """It supports all calls in state and mask form, but has no chunk form."""
    if call.choice.form == "chunk":
        return (
            "form='chunk' has no torch backend, but numba and triton; use form='auto'"
        )
    return None


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P]; states are recomputed for gradients."""
    source, mark, transition = call.structure.graph.gates_of(call.inputs)
    compute = _state_forward if call.choice.form == "state" else _mask_forward
    out = compute(call, source, mark, transition)
    query, key, value, *_, direct = call.inputs[:7]
    return out if direct is None else out + own(query, key, value, direct), ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, source, mark, transition and direct; those of
    inputs that are None are left out.
    """
    compute = _state_backward if call.choice.form == "state" else _mask_backward
    source, mark, transition = call.structure.graph.gates_of(call.inputs)
    grads = compute(call, source, mark, transition, grad)
    grads = call.structure.graph.gradients(call.inputs, *grads)
    query, key, value, *_, direct = call.inputs[:7]
    if direct is None:
        return grads
    return plus_own_gradients(grads, query, key, value, direct, grad)


# -------------------------------------------------------------------------- the sweeps


def _scan(tables: Levels, transition: Tensor, X: Tensor) -> Tensor:
    """Solves C = A C + X for C [S, heads, W], in place of X."""
    for edge, tail, head in tables.down:
        X.index_add_(0, head, transition[edge].unsqueeze(-1) * X[tail])
    return X


def _scan_back(tables: Levels, transition: Tensor, X: Tensor) -> Tensor:
    """Solves Z = A^T Z + X, in place of X."""
    for edge, tail, head in tables.up:
        X.index_add_(0, tail, transition[edge].unsqueeze(-1) * X[head])
    return X


# ------------------------------------------------------------------------- state form


def _operands(call: Call) -> tuple[Levels, Tensor, Tensor, Tensor]:
    """The tables, and query, key and value with the same number of heads."""
    query, key, value = call.inputs[:3]
    repeats = value.size(1) // query.size(1)
    query, key = (x.repeat_interleave(repeats, 1) for x in (query, key))
    return levels_of(call.structure.graph, value.device), query, key, value


def lanes_at_once(call: Call, copies: int) -> int:
    """The number of key channels of which states fit in memory."""
    value = call.inputs.value
    most = _MAX_NUMEL if value.device.type == "cpu" else _MAX_NUMEL_ELSEWHERE
    states = len(call.structure.graph.state) * value.size(1) * value.size(2) * copies
    return max(1, most // max(1, states))


def _slices(call: Call, copies: int) -> Iterator[slice]:
    """Slices of the key channels such that the states of a slice fit in memory."""
    lanes = lanes_at_once(call, copies)
    for a in range(0, call.inputs.query.size(2), lanes):
        yield slice(a, a + lanes)


def _state_forward(
    call: Call, source: Tensor, mark: Tensor, transition: Tensor
) -> Tensor:
    """The output from states C = A C + S k v^T, y = sum M q^T C."""
    tables, query, key, value = _operands(call)
    source, mark = source.unsqueeze(-1), mark.unsqueeze(-1)
    out = torch.zeros_like(value)
    for part in _slices(call, 2):
        k, q = (
            source * key[tables.writer, :, part],
            mark * query[tables.reader, :, part],
        )
        X = k.unsqueeze(-1) * value[tables.writer].unsqueeze(-2)
        C = _scan(tables, transition, X.flatten(2)).view_as(X)
        out.index_add_(0, tables.reader, (q.unsqueeze(-1) * C).sum(-2))
    return out


def _state_backward(
    call: Call, source: Tensor, mark: Tensor, transition: Tensor, grad: Tensor
) -> list[Tensor]:
    """Gradients from states and their adjoints."""
    tables, query, key, value = _operands(call)
    dq, dk, dv = (torch.zeros_like(x) for x in (query, key, value))
    ds, dm, dw = (torch.zeros_like(x) for x in (source, mark, transition))
    v, dy = value[tables.writer].unsqueeze(-2), grad[tables.reader].unsqueeze(-2)
    S, M = source.unsqueeze(-1), mark.unsqueeze(-1)
    for part in _slices(call, 4):
        k, q = key[tables.writer, :, part], query[tables.reader, :, part]
        X, Y = (S * k).unsqueeze(-1) * v, (M * q).unsqueeze(-1) * dy
        C = _scan(tables, transition, X.flatten(2)).view_as(X)
        Z = _scan_back(tables, transition, Y.flatten(2)).view_as(Y)
        read, written = (C * dy).sum(-1), (Z * v).sum(-1)
        dq[:, :, part].index_add_(0, tables.reader, M * read)
        dk[:, :, part].index_add_(0, tables.writer, S * written)
        dv.index_add_(0, tables.writer, ((S * k).unsqueeze(-1) * Z).sum(-2))
        dm += (q * read).sum(-1)
        ds += (k * written).sum(-1)
        dw += (Z[tables.head] * C[tables.tail]).sum((-1, -2))
    groups = call.inputs.query.size(1)
    dq, dk = (x.unflatten(1, (groups, -1)).sum(2) for x in (dq, dk))
    return [dq, dk, dv, ds, dm, dw]


# -------------------------------------------------------------------------- mask form


def _gating(
    call: Call, source: Tensor, mark: Tensor, transition: Tensor
) -> tuple[Levels, Padding, Tensor, Tensor, Tensor]:
    """L = (I - A)^-1 S by state and G = M L by node; columns are nodes of the block.

    Also returns the tables, the padding, and each state's writer as a column index.
    """
    graph, value = call.structure.graph, call.inputs.value
    tables = levels_of(graph, value.device)
    pad, column = table(_columns, graph, value.device)
    place = column.view(-1, 1, 1).expand(-1, value.size(1), 1)
    X = source.new_zeros(*source.shape, pad.shape[1])
    L = _scan(tables, transition, X.scatter_(2, place, source.unsqueeze(-1)))
    G = L.new_zeros(value.size(0), *L.shape[1:])
    G.index_add_(0, tables.reader, mark.unsqueeze(-1) * L)
    return tables, pad, place, L, G


def _columns(graph: StateGraph, device: torch.device) -> tuple[Padding, Tensor]:
    """The padding of nodes to blocks, and each state's writer as a column index."""
    nodes = graph.nodes
    column = np.empty_like(graph.writer)
    column[graph.state] = nodes.writer
    padding = Padding(nodes.node, np.diff(nodes.ptr), device)
    return padding, torch.from_numpy(column).to(device)


def _mask_forward(
    call: Call, source: Tensor, mark: Tensor, transition: Tensor
) -> Tensor:
    """The output from gating matrices, padded to the largest block."""
    _, pad, _, _, G = _gating(call, source, mark, transition)
    q, k, v = (pad.pad(x) for x in call.inputs[:3])
    return pad.unpad(masked_mix(pad.pad(G), q, k, v), G.size(0))


def _mask_backward(
    call: Call, source: Tensor, mark: Tensor, transition: Tensor, grad: Tensor
) -> list[Tensor]:
    """Gradients from gating matrices."""
    tables, pad, place, L, G = _gating(call, source, mark, transition)
    q, k, v, dy = (pad.pad(x) for x in (*call.inputs[:3], grad))
    grads = masked_mix_backward(pad.pad(G), q, k, v, dy)
    dG, *of_nodes = (pad.unpad(x, G.size(0)) for x in grads)
    dG = dG[tables.reader]
    Z = _scan_back(tables, transition, mark.unsqueeze(-1) * dG)
    dm, dw = (dG * L).sum(-1), (Z[tables.head] * L[tables.tail]).sum(-1)
    return [*of_nodes, Z.gather(2, place).squeeze(-1), dm, dw]
