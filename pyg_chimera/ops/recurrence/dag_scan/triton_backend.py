"""The scan of a graph of states on a GPU, in Triton.

If states are nodes, kernels take the inputs as they are. Otherwise, inputs are gathered
to one row per state: the query of the node that reads it times the mark, and the key
and value of the node that writes it, the key times the source.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common import triton_runtime
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.triton_runtime import DEVICES, DEVICES_IF_ASKED
from pyg_chimera.ops.recurrence.dag_scan import torch_backend
from pyg_chimera.ops.recurrence.dag_scan.own import own, plus_own_gradients
from pyg_chimera.ops.recurrence.levels import depth_of
from pyg_chimera.ops.recurrence.states import NOT_PATHS, StateGraph
from pyg_chimera.ops.structure.cache import table

if TYPE_CHECKING:
    from pyg_chimera.ops.recurrence.triton_chains import Chains
    from pyg_chimera.ops.recurrence.triton_chunk_form import Chunks
    from pyg_chimera.ops.recurrence.triton_mask_form import Masks

__all__ = [
    "DEVICES",
    "DEVICES_IF_ASKED",
    "backward",
    "forward",
    "predicted_seconds",
    "prefers_levels",
    "why_not",
]

#: States per block, as offsets within a matrix have 32 bits.
_MOST_STATES = 46_000
#: Bytes of matrices that the mask form may take if the form is not prescribed.
_MAX_MASK_BYTES = 1 << 30
#: Seconds on an H200, forward and backward, of which costs are made: of a product of
#: tiles that waits for another, and of one of many that run at once; of a position of a
#: walk; of a level in plain PyTorch, and of an entry of its states; of short paths in
#: chunks.
_PRODUCT, _OF_MANY, _POSITION = 6e-7, 2.4e-9, 5e-6
_LEVEL, _ENTRY, _CHUNKS = 8e-5, 5e-11, 1e-4
#: Programs that run at a time: four on each of its multiprocessors.
_AT_ONCE = 132 * 4

# ------------------------------------------------------------------------ the backend


def why_not(call: Call) -> str | None:
    """It needs Triton, a GPU, addressable matrices, and paths for chunks."""
    form = call.choice.form
    if form == "chunk" and not call.structure.are_paths:
        return NOT_PATHS
    reason = triton_runtime.why_not(call.inputs.value)
    extents = call.structure.extents
    largest = int(extents.states.max(initial=0))
    if reason is None and max(x.sum() for x in extents) >= 1 << 31:
        reason = "backend='triton' counts states and edges in 32 bits; use 'torch'"
    if reason is None and form == "mask" and largest > _MOST_STATES:
        reason = (
            f"form='mask' with backend='triton' takes at most {_MOST_STATES} states in "
            f"a graph, and the largest has {largest}; use form='state'"
        )
    return reason


def predicted_seconds(call: Call) -> dict[str, float]:
    """Of each form, forward and backward; computed once."""
    return call.once("seconds", lambda: _predicted_seconds(call))


def _predicted_seconds(call: Call) -> dict[str, float]:
    """Of each form.

    What counts is the longest sequence of steps, and how many programs run at once.
    The mask form takes three matrices for each head and block, which have to fit.
    """
    value, heads = call.inputs.value, call.inputs.value.size(1)
    tiles = np.ceil(call.structure.extents.states / 32)
    lengths = np.diff(call.structure.graph.component_ptr)
    longest = int(lengths.max(initial=0))
    slices = -(-call.inputs.query.size(2) // 64) * -(-value.size(2) // 32)
    steps = max(longest, slices * heads * float(lengths.sum()) / _AT_ONCE)
    mask = max(
        _PRODUCT * float(tiles.max(initial=0)) ** 2,
        _OF_MANY * heads * float((tiles**3).sum()),
    )
    numel = 3 * heads * 32**2 * float((tiles**2).sum())
    chunk = 0.0 if longest > triton_runtime.SHORT_PATH else _CHUNKS
    return {
        "mask": mask if value.element_size() * numel <= _MAX_MASK_BYTES else np.inf,
        "state": steps * _POSITION,
        "chunk": chunk if call.structure.are_paths else np.inf,
    }


def prefers_levels(call: Call) -> bool:
    """Whether the state form is faster than all others in plain PyTorch, which computes
    level by level.
    """
    found, form = predicted_seconds(call), call.inputs.form
    least = min(found.values()) if form == "auto" else found[form]
    if form not in ("auto", "state") or least < 5 * _LEVEL:
        return False
    graph, value, keys = (
        call.structure.graph,
        call.inputs.value,
        call.inputs.query.size(2),
    )
    slices = -(-keys // torch_backend.lanes_at_once(call, 4))
    entries = len(graph.state) * value.size(1) * value.size(2) * keys
    return depth_of(graph) * slices * _LEVEL + entries * _ENTRY < least


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P]; saves the resolvents or the states after each chunk."""
    rows = _Rows(call)
    saved: tuple[Tensor, ...] = ()
    if call.choice.form == "mask":
        from pyg_chimera.ops.recurrence.triton_mask_form import mix, resolvents

        L = resolvents(rows.masks, rows.transition)
        out, saved = mix(rows.masks, L, *rows.operands), (L,)
    elif call.choice.form == "chunk":
        from pyg_chimera.ops.recurrence import triton_chunk_form

        operands = (*rows.operands, rows.transition)
        out, states = triton_chunk_form.scan(rows.chunks, *operands)
        saved = (states,)
    else:
        from pyg_chimera.ops.recurrence.dag_scan.triton_state_form import scan

        out = scan(rows.chains, *rows.operands, rows.transition)
    out = rows.to_nodes(out)
    query, key, value, *_, direct = call.inputs[:7]
    return out if direct is None else out + own(query, key, value, direct), saved


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, source, mark, transition and direct; those of
    inputs that are None are left out.
    """
    rows = _Rows(call)
    dy = rows.of_nodes(grad)
    if call.choice.form == "mask":
        from pyg_chimera.ops.recurrence.triton_mask_form import mix_gradients

        found = mix_gradients(rows.masks, saved[0], *rows.operands, dy)
    elif call.choice.form == "chunk":
        from pyg_chimera.ops.recurrence import triton_chunk_form

        operands = (*rows.operands, rows.transition)
        found = triton_chunk_form.scan_gradients(rows.chunks, *operands, saved[0], dy)
    else:
        from pyg_chimera.ops.recurrence.dag_scan.triton_state_form import scan_gradients

        found = scan_gradients(rows.chains, *rows.operands, rows.transition, dy)
    grads = call.structure.graph.gradients(call.inputs, *rows.gradients(*found))
    query, key, value, *_, direct = call.inputs[:7]
    if direct is None:
        return grads
    return plus_own_gradients(grads, query, key, value, direct, grad)


# ---------------------------------------------------------------------------- its rows


def _masks(graph: StateGraph, device: torch.device) -> "Masks":
    from pyg_chimera.ops.recurrence.triton_mask_form import Masks

    edges = (graph.row, graph.parent, graph.edge)
    return Masks.of(graph.ptr, graph.state, *edges, True, device)


def _chunks(graph: StateGraph, device: torch.device) -> "Chunks":
    from pyg_chimera.ops.recurrence.triton_chunk_form import Chunks

    return Chunks.of_paths(graph, device)


def _chains(graph: StateGraph, device: torch.device) -> "Chains":
    from pyg_chimera.ops.recurrence.triton_chains import Chains

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
    def masks(self) -> "Masks":
        return self._table(_masks)

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
