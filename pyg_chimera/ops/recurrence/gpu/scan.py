"""The scan of a graph of states on a GPU, in Triton.

If states are nodes, kernels take the inputs as they are. Otherwise, inputs are gathered
to one row per state: the query of the node that reads it times the mark, and the key
and value of the node that writes it, the key times the source.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyg_chimera.ops.common import triton_runtime
from pyg_chimera.ops.common.autograd import by_autograd
from pyg_chimera.ops.common.cache import table
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.triton_runtime import DEVICES, DEVICES_IF_ASKED
from pyg_chimera.ops.recurrence.plan.direct_term import direct_term
from pyg_chimera.ops.recurrence.plan.states import NOT_PATHS, StateGraph

if TYPE_CHECKING:
    from pyg_chimera.ops.recurrence.gpu.chains import Chains
    from pyg_chimera.ops.recurrence.gpu.chunks import Chunks

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
    rows = _Rows(call)
    saved: tuple[Tensor, ...] = ()
    if call.choice.form == "chunk":
        from pyg_chimera.ops.recurrence.gpu import chunks as chunk_kernels

        operands = (*rows.operands, rows.transition)
        out, states = chunk_kernels.scan(rows.chunks, *operands)
        saved = (states,)
    else:
        from pyg_chimera.ops.recurrence.gpu.walk import scan

        out = scan(rows.chains, *rows.operands, rows.transition)
    out = rows.to_nodes(out)
    return out if call.inputs.direct is None else out + _direct_term(call)[0], saved


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, source, mark, transition and direct; those of
    inputs that are None are left out.
    """
    rows = _Rows(call)
    dy = rows.of_nodes(grad)
    if call.choice.form == "chunk":
        from pyg_chimera.ops.recurrence.gpu import chunks as chunk_kernels

        operands = (*rows.operands, rows.transition)
        found = chunk_kernels.scan_gradients(rows.chunks, *operands, saved[0], dy)
    else:
        from pyg_chimera.ops.recurrence.gpu.walk import scan_gradients

        found = scan_gradients(rows.chains, *rows.operands, rows.transition, dy)
    grads = call.structure.graph.gradients(call.inputs, *rows.gradients(*found))
    if call.inputs.direct is None:
        return grads
    pairs = zip((*grads, 0), _direct_gradients(call, (), grad), strict=True)
    return tuple(x + y for x, y in pairs)


def _direct_term(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    query, key, value, *_, direct = call.inputs[:7]
    return direct_term(query, key, value, direct), ()


_direct_gradients = by_autograd(_direct_term)

# ---------------------------------------------------------------------------- its rows


def _chunks(graph: StateGraph, device: torch.device) -> "Chunks":
    from pyg_chimera.ops.recurrence.gpu.chunks import Chunks

    return Chunks.of_paths(graph, device)


def _chains(graph: StateGraph, device: torch.device) -> "Chains":
    from pyg_chimera.ops.recurrence.gpu.chains import Chains

    return Chains.of(graph, device)


def _ends(graph: StateGraph, device: torch.device) -> list[Tensor]:
    return [torch.from_numpy(x).to(device) for x in (graph.writer, graph.reader)]


class _Rows:
    """Converts between nodes and the rows of the kernels, one per state."""

    def __init__(self, call: Call) -> None:
        self.inputs, self.graph = call.inputs, call.structure.graph
        query, key, value = call.inputs[:3]
        self.source, self.mark, self.transition = self.graph.gates_of(self.inputs)
        self.operands = (query, key, value)
        if not self.are_nodes:
            query, key = (x.repeat_interleave(self.repeats, 1) for x in (query, key))
            self.writer, self.reader = self._table(_ends)
            self.query, self.key = query[self.reader], key[self.writer]
            self.operands = (
                self.mark.unsqueeze(-1) * self.query,
                self.source.unsqueeze(-1) * self.key,
                value[self.writer],
            )

    def _table(self, make: Callable[[StateGraph, torch.device], Any]) -> Any:
        return table(make, self.graph, self.inputs.value.device)

    @property
    def chunks(self) -> "Chunks":
        return self._table(_chunks)

    @property
    def chains(self) -> "Chains":
        return self._table(_chains)

    @property
    def are_nodes(self) -> bool:
        return self.inputs.source is None

    @property
    def repeats(self) -> int:
        return self.inputs.value.size(1) // self.inputs.query.size(1)

    def of_nodes(self, grad: Tensor) -> Tensor:
        """The gradient of the output [V, heads, P], at each state's reader."""
        return grad if self.are_nodes else grad[self.reader]

    def to_nodes(self, out: Tensor) -> Tensor:
        """The output [V, heads, P]: the sum over the states that each node reads."""
        return out if self.are_nodes else self._summed(out, self.reader)

    def gradients(
        self, dq: Tensor, dk: Tensor, dv: Tensor, dw: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of query, key, value, source, mark, transition, from those of the
        rows.
        """
        if self.are_nodes:
            unused = dw.new_empty(0)
            return dq, dk, dv, unused, unused, dw
        ds, dm = (dk * self.key).sum(-1), (dq * self.query).sum(-1)
        dq = self._summed(self.mark.unsqueeze(-1) * dq, self.reader)
        dk = self._summed(self.source.unsqueeze(-1) * dk, self.writer)
        dq, dk = (x.unflatten(1, (-1, self.repeats)).sum(2) for x in (dq, dk))
        return dq, dk, self._summed(dv, self.writer), ds, dm, dw

    def _summed(self, x: Tensor, node: Tensor) -> Tensor:
        out = x.new_zeros(self.inputs.value.size(0), *x.shape[1:])
        return out.index_add_(0, node, x)
