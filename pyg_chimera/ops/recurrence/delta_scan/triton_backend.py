"""The delta rule on a GPU, in Triton."""

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common import triton_runtime
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.triton_runtime import DEVICES, DEVICES_IF_ASKED
from pyg_chimera.ops.recurrence.delta_scan.cost_model import why_not_form
from pyg_chimera.ops.recurrence.delta_scan.graph import DeltaGraph
from pyg_chimera.ops.recurrence.states import StateGraph, node_states
from pyg_chimera.ops.structure.cache import table

if TYPE_CHECKING:
    from pyg_chimera.ops.recurrence.triton_chains import Chains
    from pyg_chimera.ops.recurrence.triton_chunk_form import Chunks

__all__ = [
    "DEVICES",
    "DEVICES_IF_ASKED",
    "FORMS",
    "backward",
    "forward",
    "is_serial",
    "preferred_form",
    "why_not",
]

FORMS = ("state", "chunk")

#: The most key channels in each form, as a slice of a state has all of them.
_MOST_KEYS = {"state": 128, "chunk": 64}
#: The most entries of a state with surprise, for which there is one slice; channels are
#: rounded up to powers of two.
_MOST_NUMEL = 8192
#: Nodes of a component up to which the state form is preferred, whatever the depth, and
#: nodes per level from which on levels are. Estimates: nobody has measured it on a GPU.
_FEW_NODES, _WIDE = 1024, 16


def why_not(call: Call) -> str | None:
    """It needs Triton, a GPU, float32, and states that fit in the registers."""
    if call.choice.form not in FORMS:
        return (
            f"form={call.choice.form!r} has no triton backend; use backend='torch' or "
            "'auto'"
        )
    inputs, graph = call.inputs, call.structure
    reason = why_not_form(call)
    if reason is None:
        rows = max(graph.num_nodes, len(graph.row))
        reason = triton_runtime.why_not(inputs.value, rows)
    keys, values = inputs.key.size(2), inputs.value.size(2)
    most = _MOST_KEYS[call.choice.form]
    if reason is None and keys > most:
        reason = (
            f"form={call.choice.form!r} with backend='triton' takes at most {most} key "
            f"channels, got {keys}; use backend='torch'"
        )
    numel = _power_of_two(keys) * _power_of_two(values)
    if reason is None and inputs.surprise is not None and numel > _MOST_NUMEL:
        reason = (
            "backend='triton' with 'surprise' takes states of at most "
            f"{_MOST_NUMEL} numbers (channels rounded up to powers of two), got "
            f"{keys} x {values}; use backend='torch'"
        )
    return reason


def is_serial(graph: DeltaGraph) -> bool:
    """Whether a component is large and far from a path, so that the levels of the torch
    backend take fewer steps than its nodes one by one.
    """
    largest = int(graph.sizes.max(initial=0))
    return largest > max(_FEW_NODES, _WIDE * graph.depth)


def preferred_form(call: Call) -> str:
    """The chunk form for long paths, as it has fewer sequential steps; else states."""
    graph = call.structure
    is_long = graph.are_paths and graph.depth > triton_runtime.SHORT_PATH
    return "chunk" if is_long else "state"


def _power_of_two(size: int) -> int:
    """The next power of two."""
    return 1 << max(size - 1, 0).bit_length()


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P], and tensors to save; the state form recomputes all."""
    if call.choice.form == "chunk":
        from pyg_chimera.ops.recurrence.delta_scan import triton_chunks

        return triton_chunks.scan(*_paths_of(call), *call.inputs[:5])
    from pyg_chimera.ops.recurrence.delta_scan.triton_states import scan

    return scan(_chains_of(call), *call.inputs[:6]), ()


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta, edge weight, and if given of surprise."""
    if call.choice.form == "chunk":
        from pyg_chimera.ops.recurrence.delta_scan import triton_chunks

        operands = (*call.inputs[:5], saved, grad)
        return triton_chunks.scan_gradients(*_paths_of(call), *operands)
    from pyg_chimera.ops.recurrence.delta_scan.triton_states import scan_gradients

    return scan_gradients(_chains_of(call), grad, *call.inputs[:6])


# --------------------------------------------------------------------------- its tables


def _chains_of(call: Call) -> "Chains":
    return table(_chains, call.structure, call.inputs.value.device)


def _paths_of(call: Call) -> "tuple[Chunks, Tensor]":
    return table(_paths, call.structure, call.inputs.value.device)


def _chains(graph: DeltaGraph, device: torch.device) -> "Chains":
    from pyg_chimera.ops.recurrence.triton_chains import Chains

    return Chains.of(_positions(graph), device)


def _paths(graph: DeltaGraph, device: torch.device) -> "tuple[Chunks, Tensor]":
    """The chunks of paths, and the first chunk of each path, [paths + 1], int32."""
    from pyg_chimera.ops.recurrence.triton_chunk_form import CHUNK, Chunks

    positions = _positions(graph)
    count = -(-np.diff(positions.component_ptr) // CHUNK)
    first = np.append(0, np.cumsum(count)).astype(np.int32)
    return Chunks.of_paths(positions, device), torch.from_numpy(first).to(device)


def _positions(graph: DeltaGraph) -> StateGraph:
    """The nodes component by component, in topological order."""
    edge_index = torch.from_numpy(np.stack([graph.col, graph.row]))
    block, rank = (torch.from_numpy(x) for x in (graph.block, graph.rank))
    return node_states(edge_index, block, rank, graph.num_nodes)
