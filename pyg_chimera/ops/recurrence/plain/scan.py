"""The scan of a graph of states in plain PyTorch, level by level, on any device.

It is a sum over state channels, so few of them need be held at a time.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from pyg_chimera.ops.common.autograd import by_autograd
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.recurrence.plain.levels import levels_of, solve_by_levels
from pyg_chimera.ops.recurrence.plan.direct_term import direct_term

DEVICES = None

#: The numbers that may be held at a time, on a CPU and elsewhere.
_MAX_NUMEL, _MAX_NUMEL_ELSEWHERE = 1 << 26, 1 << 28
#: As many numbers are held for each one of a state, in the backward pass.
_COPIES = 6


def why_not(call: Call) -> str | None:
    """It has the state form only."""
    form = call.choice.form
    if form == "state":
        return None
    return f"form={form!r} has no torch backend; use form='state' or 'auto'"


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P]; states are recomputed for gradients."""
    first, *others = (_output(part)[0] for part in _parts(call))
    for out in others:
        first += out
    return first, ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, source, mark, transition and direct; those of
    inputs that are None are left out.
    """
    found = (_gradients(part, saved, grad) for part in _parts(call))
    dq, dk, *others = zip(*found, strict=True)
    return torch.cat(dq, -1), torch.cat(dk, -1), *(sum(x[1:], x[0]) for x in others)


def lanes_at_once(call: Call) -> int:
    """The number of state channels that fit in memory."""
    value = call.inputs.value
    most = _MAX_NUMEL if value.device.type == "cpu" else _MAX_NUMEL_ELSEWHERE
    states = len(call.structure.graph.state) * value.size(1) * value.size(2)
    return max(1, most // max(1, states * _COPIES))


def _parts(call: Call) -> Iterator[Call]:
    """The same call for some state channels after the other."""
    inputs, lanes = call.inputs, lanes_at_once(call)
    for a in range(0, max(1, inputs.query.size(2)), lanes):
        q, k = (x[..., a : a + lanes] for x in inputs[:2])
        yield call.with_inputs(inputs._replace(query=q, key=k))


def _output(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output from states C = A C + S k v^T, y = sum M q^T C."""
    query, key, value, *_, direct = call.inputs[:7]
    graph = call.structure.graph
    source, mark, transition = (x[..., None, None] for x in graph.gates_of(call.inputs))
    levels = levels_of(graph, value.device)
    repeats = value.size(1) // query.size(1)
    q, k = (x.repeat_interleave(repeats, 1).unsqueeze(-1) for x in (query, key))
    written = source * k[levels.writer] * value[levels.writer].unsqueeze(-2)
    C = solve_by_levels(levels, transition, written)
    read = (mark * q[levels.reader] * C).sum(-2)
    out = torch.zeros_like(value).index_add(0, levels.reader, read)
    return out if direct is None else out + direct_term(query, key, value, direct), ()


_gradients = by_autograd(_output)
