"""Predicted costs of the forms of the delta rule on a CPU: multiply-adds, seconds and
bytes.

The constants are in nanoseconds on one core (AMD Zen 4), forward and backward.
"""

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call, Cost
from pyg_chimera.ops.common.memory import left_if_short
from pyg_chimera.ops.common.simd import vector_lanes
from pyg_chimera.ops.recurrence.delta_scan.graph import DeltaGraph
from pyg_chimera.ops.recurrence.delta_scan.level_states import MAX_NUMEL
from pyg_chimera.ops.recurrence.delta_scan.state_fronts import Plan
from pyg_chimera.ops.structure.symbolic_factor import SymbolicFactor

#: Nanoseconds per multiply-add of a matrix product.
_PRODUCT = 0.03

#: Nodes of a graph with cycles, per key channel, from which on its factors are tried.
_LARGE = 16


def is_large(graph: DeltaGraph, key: Tensor) -> bool:
    """Whether states may be faster than matrices on a graph with cycles: if it is large
    and its factors do not fill up.
    """
    large = graph.sizes[graph.is_cyclic].max() >= _LARGE * max(1, key.size(2))
    return bool(large) and isinstance(graph.factor, SymbolicFactor)


def cost_of(
    form: str, backend: str, graph: DeltaGraph, query: Tensor, value: Tensor
) -> Cost:
    """The cost of a form on this CPU, forward and backward.

    Args:
        form: ``"state"``, ``"mask"`` or ``"chunk"``.
        backend: ``"numba"`` or ``"torch"``.
        graph: The graphs.
        query: [V, groups, state channels].
        value: [V, heads, value channels].
    """
    if backend == "numba":
        return _cost_of_kernels(form, graph, query, value)
    N, (V, heads, P) = query.size(2), value.shape
    if form == "mask":
        sizes = graph.sizes.astype(float)
        acyclic, cyclic = sizes[~graph.is_cyclic], sizes[graph.is_cyclic]
        operations = float((acyclic**2 * (4 * acyclic + 9 * (N + P))).sum())
        operations += float((cyclic**2 * (10 * cyclic + 19 * (N + P))).sum())
        others = float((33 * acyclic**2 + 2e4).sum() + (90 * cyclic**2 + 15e4).sum())
        others += 300e3 / heads  # about fifty PyTorch operators
        held = 13 * float((acyclic**2).sum() + 2 * (cyclic**2).sum())
    elif form == "chunk":
        operations = V * (32.0 * (10 * N + 8 * P + 32) + 9 * N * P)
        others = 2000.0 * V + 100e3 * graph.depth / 32 / heads
        held = V * (4 * 32.0 + 2 * N * P / 32)
    else:
        numbers = float((V + len(graph.row)) * N * P)
        operations = 7 * numbers
        others = 9 * numbers + 100e3 * graph.depth / heads
        held = min(5.0 * V * N * P, MAX_NUMEL / heads)
    seconds = 1e-9 * heads * (_PRODUCT * operations + others)
    memory = value.element_size() * heads * held
    return Cost(heads * operations, seconds, memory)


def _cost_of_kernels(
    form: str, graph: DeltaGraph, query: Tensor, value: Tensor
) -> Cost:
    """The cost of a form of the numba backend."""
    (V, groups, N), (_, heads, P) = query.shape, value.shape
    n, bytes_ = graph.sizes.astype(float), value.element_size()
    largest = float(n.max(initial=0))
    threads = max(1, min(torch.get_num_threads(), heads * len(n)))
    if form == "mask":
        eliminated = np.where(graph.is_cyclic, 0.67 * n, 0.0)
        work = n**2 * (eliminated + 8 * N * groups / heads + 6 * P)
        operations = float(work.sum())
        others = float((4 * n**2 + 1200 * n + 8e3).sum())
        memory = 8 * (threads * largest * (6 * largest + 5 * N + 4 * P) + heads * V * P)
    elif graph.on_cycle.any():
        if not isinstance(graph.factor, SymbolicFactor):
            return Cost(np.inf, np.inf, np.inf)
        plan = Plan.of(graph, N, P)
        operations, numbers = plan.work(N), float(plan.panel_ptr[-1])
        others = 0.4 * numbers * P + 8.0 * V * N * P
        held = plan.scratch.sum() + plan.nodes.stack[0] * N**2 + 4 * largest * N * P
        memory = 8 * (threads * float(held) + heads * (V * N * P + numbers))
    else:
        lanes, _ = vector_lanes(np.dtype(f"f{bytes_}"))
        width = -(-P // lanes) * lanes
        numbers = float((V + len(graph.row)) * N * width)
        operations = 7 * numbers
        # States that do not fit in the cache are read from memory again.
        streamed = bytes_ * largest * N * width > 1 << 23
        others = (0.06 + 0.08 * streamed) * bytes_ * numbers + 200.0 * V
        memory = bytes_ * threads * largest * (N + 3) * width
    seconds = 1e-9 * heads * (0.05 * operations + others) / threads
    return Cost(heads * operations, seconds, memory)


def why_not_form(call: Call, forms: tuple[str, ...]) -> str | None:
    """Why the form of a call is not among those of its backend, or does not fit its
    graph; None if it does.
    """
    graph, form, backend = call.structure, call.choice.form, call.choice.backend
    if form not in forms:
        return f"form={form!r} has no {backend} backend; use backend='torch' or 'auto'"
    sparse = form == "state" and bool(graph.on_cycle.any())
    if sparse and backend != "numba":
        node = int(graph.on_cycle.argmax())
        return (
            f"form='state' is for graphs without cycles, but node {node} is on one; "
            "use form='mask', or on a CPU backend='numba'"
        )
    if sparse and not isinstance(graph.factor, SymbolicFactor):
        return (
            "form='state' needs factors of I - A, which would fill up on graphs of up "
            f"to {graph.sizes.max()} nodes with such cycles; use form='mask' or 'auto'"
        )
    if sparse or form == "mask":
        query, value = call.inputs.query, call.inputs.value
        needed = cost_of(form, backend, graph, query, value).memory
        # Other tensors need some, too, unless the user knows better.
        share = 1 if call.inputs.form == form else 2
        left = left_if_short(share * needed, value.device)
        if left is None:
            return None
        # Other backends would say the same.
        said = f"memory of {form}"
        return call.once(said, lambda: _too_much(graph, form, needed, left))
    if form == "chunk" and not graph.are_paths:
        return (
            "form='chunk' is for directed paths, on which a node has one edge into it "
            "and one out of it at most; use form='auto'"
        )
    return None


def _too_much(graph: DeltaGraph, form: str, needed: float, left: float) -> str:
    half = "half of " if needed <= left else ""
    what = "matrices" if form == "mask" else "factors"
    said = (
        f"form={form!r} takes {needed / 2**30:.0f} GiB for {what} of up to "
        f"{graph.sizes.max()} nodes, more than {half}the {left / 2**30:.0f} GiB that "
        "are left"
    )
    if not graph.on_cycle.any():
        return f"{said}; use form='auto'"
    anyway = f"; form={form!r} computes it all the same" if half else ""
    sparse = form == "mask" and isinstance(graph.factor, SymbolicFactor)
    other = "form='state' on a CPU (backend='numba'), " if sparse else ""
    return (
        f"{said}, and there are cycles; use {other}clusters or samples of the graph, "
        "a DAG (acyclic=True in 'GatedDeltaConv'; "
        "'pyg_chimera.transforms.DAGDecomposition' makes DAGs), or 'resolvent_mix' "
        f"('ChimeraConv'), which solves sparse systems{anyway}"
    )
