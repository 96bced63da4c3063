"""The forms of the delta rule, and where they are refused."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.memory import left_if_short, too_large
from pyg_chimera.ops.recurrence.plan.delta_graph import DeltaGraph

#: Matrices that the torch backend holds at a time for each block and head.
_MATRICES = 13


def bytes_of_matrices(graph: DeltaGraph, inputs: Any, threads: int) -> float:
    """What the numba backend holds at a time in form ``"mask"``."""
    (V, heads, P), N = inputs.value.shape, inputs.query.size(2)
    n = float(graph.sizes.max(initial=0))
    return 8 * (threads * n * (6 * n + 5 * N + 4 * P) + heads * V * P)


@dataclass
class ByForm:
    """A backend that has a module for each form."""

    DEVICES: tuple[str, ...] | None
    modules: dict[str, Any]

    def why_not(self, call: Call) -> str | None:
        """Why the form is none of these, or does not fit the graph; None if it does."""
        return why_not_form(call, tuple(self.modules))

    def forward(self, call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
        """That of the form."""
        return self.modules[call.choice.form].forward(call)

    def backward(self, call: Call, *saved_and_grad: Any) -> tuple[Tensor, ...]:
        """That of the form."""
        return self.modules[call.choice.form].backward(call, *saved_and_grad)


def why_not_form(call: Call, forms: tuple[str, ...]) -> str | None:
    """Why the form of a call is not among those of its backend, or does not fit its
    graph; None if it does.
    """
    graph, choice = call.structure, call.choice
    if choice.form not in forms:
        names = " or ".join(f"form={x!r}" for x in (*forms, "auto"))
        return f"form={choice.form!r} has no {choice.backend} backend; use {names}"
    if choice.form == "mask":
        return _why_not_matrices(call)
    if graph.on_cycle.any():
        node = int(graph.on_cycle.argmax())
        return (
            f"form={choice.form!r} is for graphs without cycles, but node {node} is on "
            "one; use form='mask' with backend='numba' or 'torch'"
        )
    if choice.form == "chunk" and not graph.are_paths:
        return (
            "form='chunk' is for directed paths, on which a node has one edge into it "
            "and one out of it at most; use form='state'"
        )
    return None


def _why_not_matrices(call: Call) -> str | None:
    """Why matrices do not fit into memory; None if they do."""
    graph, value = call.structure, call.inputs.value
    if call.choice.backend == "numba":
        tasks = value.size(1) * len(graph.sizes)
        threads = max(1, min(torch.get_num_threads(), tasks))
        needed = bytes_of_matrices(graph, call.inputs, threads)
    else:
        bytes_ = np.where(graph.is_cyclic, 8, value.element_size())
        squares = bytes_ * graph.sizes.astype(float) ** 2
        needed = _MATRICES * value.size(1) * float(squares.sum())
    left = left_if_short(needed, value.device)
    if left is None:
        return None
    advice = "use form='state'"
    if graph.on_cycle.any():
        advice = (
            "on graphs with cycles, take clusters or samples, 'ChimeraConv' "
            "('resolvent_mix'), which solves sparse systems, or make DAGs "
            "('pyg_chimera.transforms.DAGDecomposition') and take "
            "'GatedDeltaConv(acyclic=True)'"
        )
    what = f"form='mask' with matrices of up to {graph.sizes.max()} nodes"
    return str(too_large(what, needed, left, advice))
