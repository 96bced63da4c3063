"""The delta rule in plain PyTorch, in three forms, on any device.

All of this runs inside one registered operator, below autograd: gradients are written
out. Solutions of a linear system have those of the transposed system.
"""

from types import ModuleType

from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.delta_scan import level_states, matrices, path_chunks
from pyg_chimera.ops.delta_scan.cost_model import cost_of

DEVICES = None

#: Bytes of matrices, from which on there is no use in an attempt.
_MAX_BYTES = 1 << 37

_FORMS: dict[str, ModuleType] = {
    "state": level_states,
    "mask": matrices,
    "chunk": path_chunks,
}


def why_not(call: Call) -> str | None:
    """It computes everything, but states on DAGs and chunks on paths only."""
    graph, form = call.structure, call.choice.form
    if form == "mask":
        query, value = call.inputs.query, call.inputs.value
        needed = cost_of(call.choice, graph, query, value).memory
        if needed <= _MAX_BYTES:
            return None
        return (
            f"form='mask' takes {needed / 2**30:.0f} GiB for matrices of up to "
            f"{graph.sizes.max()} nodes; use clusters of the graph, or DAGs (see "
            "'pyg_chimera.transforms.DAGDecomposition'), which have other forms"
        )
    if form == "state" and graph.on_cycle.any():
        node = int(graph.on_cycle.argmax())
        return (
            "form='state' is for graphs without cycles, but node "
            f"{node} is on one; use form='mask' or 'auto'"
        )
    if form == "chunk" and not graph.are_paths:
        return (
            "form='chunk' is for directed paths, on which a node has one edge into it "
            "and one out of it at most; use form='auto'"
        )
    return None


def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The output [V, heads, P], and what `backward` needs again."""
    return _FORMS[call.choice.form].forward(call)


def backward(call: Call, saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, ...]:
    """Gradients of query, key, value, beta and edge weight."""
    return _FORMS[call.choice.form].backward(call, saved, grad)
