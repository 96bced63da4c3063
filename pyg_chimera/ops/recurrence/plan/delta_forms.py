"""The forms of the delta rule: what they cost on a CPU, and where they are refused."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call, Cost
from pyg_chimera.ops.common.memory import left_if_short, too_large
from pyg_chimera.ops.recurrence.plan.delta_graph import DeltaGraph

#: Matrices that the torch backend holds at a time for each block and head.
_MATRICES = 13


def cost_of(form: str, graph: DeltaGraph, query: Tensor, value: Tensor) -> Cost:
    """The cost of a form on this CPU, forward and backward, with the numba backend.

    The constants are in nanoseconds on one core (AMD Zen 4).

    Args:
        form: ``"state"`` or ``"mask"``.
        graph: The graphs.
        query: [V, groups, state channels].
        value: [V, heads, value channels].
    """
    (V, groups, N), (_, heads, P) = query.shape, value.shape
    n, bytes_ = graph.sizes.astype(float), value.element_size()
    largest = float(n.max(initial=0))
    threads = max(1, min(torch.get_num_threads(), heads * len(n)))
    if form == "mask":
        eliminated = 0.67 * n * graph.is_cyclic
        work = n**2 * (eliminated + 8 * N * groups / heads + 6 * P)
        operations = float(work.sum())
        others = float((4 * n**2 + 1200 * n + 8e3).sum())
        memory = 8 * (threads * largest * (6 * largest + 5 * N + 4 * P) + heads * V * P)
    else:
        numbers = float((V + len(graph.row)) * N * P)
        operations = 7 * numbers
        # States that do not fit in the cache are read from memory again.
        streamed = bytes_ * largest * N * P > 1 << 23
        others = (0.06 + 0.08 * streamed) * bytes_ * numbers + 200.0 * V
        memory = bytes_ * threads * largest * (N + 3) * P
    seconds = 1e-9 * heads * (0.05 * operations + others) / threads
    return Cost(heads * operations, seconds, memory)


def by_form(
    modules: Mapping[str, ModuleType],
) -> tuple[Callable[..., str | None], Callable[..., Any], Callable[..., Any]]:
    """The functions of a backend that has a module for each form."""

    def why_not(call: Call) -> str | None:
        return why_not_form(call, tuple(modules))

    def forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
        return modules[call.choice.form].forward(call)

    def backward(
        call: Call, saved: tuple[Tensor, ...], grad: Tensor
    ) -> tuple[Tensor, ...]:
        return modules[call.choice.form].backward(call, saved, grad)

    return why_not, forward, backward


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
    graph, query, value = call.structure, call.inputs.query, call.inputs.value
    if call.choice.backend == "numba":
        needed = cost_of("mask", graph, query, value).memory
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
