"""The scan of a graph of states on a GPU, in Triton.

If states are nodes, kernels take the inputs as they are, otherwise one row per state.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_chimera.ops.common import triton_runtime
from pyg_chimera.ops.common.autograd import by_autograd
from pyg_chimera.ops.common.cache import table
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.triton_runtime import DEVICES, DEVICES_IF_ASKED
from pyg_chimera.ops.recurrence.gpu.rows import Rows
from pyg_chimera.ops.recurrence.plan.direct_term import direct_term
from pyg_chimera.ops.recurrence.plan.states import NOT_PATHS, StateGraph

__all__ = [
    "DEVICES",
    "DEVICES_IF_ASKED",
    "backward",
    "forward",
    "why_not",
]

# ------------------------------------------------------------------------ the backend


def why_not(call: Call) -> str | None:
    """It needs Triton and a GPU, paths for chunks, and has no mask form."""
    form, structure = call.choice.form, call.structure
    if form == "mask":
        return "form='mask' has no triton backend; use form='state' or 'auto'"
    if form == "chunk" and not structure.are_paths:
        return NOT_PATHS
    reason = triton_runtime.why_not(call.inputs.value)
    most = max(structure.sizes.sum(), structure.entries.sum())
    if reason is None and most >= 1 << 31:
        reason = "backend='triton' counts states and edges in 32 bits; use 'torch'"
    return reason


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P]; saves the states after each chunk, if any."""
    rows, transition = _rows(call)
    saved: tuple[Tensor, ...] = ()
    if call.choice.form == "chunk":
        from pyg_chimera.ops.recurrence.gpu.chunks import Chunks, scan

        chunks = _table(Chunks.of_paths, call)
        out, states = scan(chunks, *rows.operands, transition)
        saved = (states,)
    else:
        from pyg_chimera.ops.recurrence.gpu import walk
        from pyg_chimera.ops.recurrence.gpu.chains import Chains

        out = walk.scan(_table(Chains.of, call), *rows.operands, transition)
    out = rows.to_nodes(out)
    if call.inputs.direct is not None:
        out = out + _direct_term(call)[0]
    return out, saved


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, source, mark, transition and direct; those of
    inputs that are None are left out.
    """
    rows, transition = _rows(call)
    operands, dy = (*rows.operands, transition), rows.of_nodes(grad)
    if call.choice.form == "chunk":
        from pyg_chimera.ops.recurrence.gpu.chunks import Chunks, scan_gradients

        chunks = _table(Chunks.of_paths, call)
        *found, dw = scan_gradients(chunks, *operands, saved[0], dy)
    else:
        from pyg_chimera.ops.recurrence.gpu import walk
        from pyg_chimera.ops.recurrence.gpu.chains import Chains

        *found, dw = walk.scan_gradients(_table(Chains.of, call), *operands, dy)
    grads = call.structure.graph.gradients(call.inputs, *rows.gradients(*found), dw)
    if call.inputs.direct is None:
        return grads
    pairs = zip((*grads, 0), _direct_gradients(call, (), grad), strict=True)
    return tuple(x + y for x, y in pairs)


def _rows(call: Call) -> tuple[Rows, Tensor]:
    """The operands, and the transitions."""
    source, mark, transition = call.structure.graph.gates_of(call.inputs)
    ends = None if call.inputs.source is None else _table(_ends, call)
    return Rows(call.inputs, ends, source, mark), transition


def _ends(graph: StateGraph, device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.from_numpy(x).to(device) for x in (graph.writer, graph.reader))


def _table(make: Callable[[StateGraph, torch.device], Any], call: Call) -> Any:
    return table(make, call.structure.graph, call.inputs.value.device)


def _direct_term(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    query, key, value, *_, direct = call.inputs[:7]
    return direct_term(query, key, value, direct), ()


_direct_gradients = by_autograd(_direct_term)
