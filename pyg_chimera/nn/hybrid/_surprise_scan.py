"""The delta rule with surprise along DAGs, level by level, in plain PyTorch.

As in `ops/recurrence/plain/delta_levels.py`, autograd sees the rule once, for all
nodes, given what they inherit; the adjoint of the recurrence runs level by level.
"""

from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pyg_chimera.ops.common.autograd import by_autograd
from pyg_chimera.ops.common.cache import Recipe, table
from pyg_chimera.ops.common.checks import check_finite
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.errors import CycleError
from pyg_chimera.ops.common.operator import Operator
from pyg_chimera.ops.recurrence.plain.delta_levels import levels_of
from pyg_chimera.ops.recurrence.plan.delta_graph import DeltaGraph, delta_graph
from pyg_chimera.ops.structure import find_cycle


class Inputs(NamedTuple):
    """Those of :func:`~pyg_chimera.ops.delta_scan`, in one dtype, and temperatures
    [heads], which the mean square of what a node did not expect is divided by.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    edge_weight: Tensor
    temperature: Tensor
    edge_index: Tensor
    batch: Tensor | None
    backend: str


def _forward(call: Call) -> tuple[Tensor, tuple[Tensor, ...]]:
    levels = table(levels_of, call.structure, call.inputs.value.device)
    node = levels.node
    repeats = call.inputs.value.size(1) // call.inputs.key.size(1)
    query, key = (  # [V, heads, N, 1]
        y[node].repeat_interleave(repeats, 1).unsqueeze(-1) for y in call.inputs[:2]
    )
    value = call.inputs.value[node].unsqueeze(-2)  # [V, heads, 1, P]
    beta = call.inputs.beta[node, :, None, None]
    weight = call.inputs.edge_weight[levels.edge, :, None, None]
    temperature = call.inputs.temperature[:, None, None]

    def inherited(S: Tensor, level: Any) -> Tensor:
        before = S.new_zeros(len(key[level.nodes]), *S.shape[1:])
        return before.index_add(0, level.head, weight[level.edges] * S[level.tail])

    def surprise(wrong: Tensor) -> Tensor:
        return (wrong.square().mean(-1, keepdim=True) / temperature).sigmoid()

    def written(before: Tensor, at: slice) -> Tensor:
        share = surprise(value[at] - query[at].mT @ before)
        error = value[at] - key[at].mT @ before
        return before + key[at] * (beta[at] * share * error)

    with torch.no_grad():
        S = value.new_empty(*key.shape[:3], value.size(-1))
        for level in levels.levels:
            S[level.nodes] = written(inherited(S, level), level.nodes)
    if torch.is_grad_enabled():
        before = inherited(S, levels.whole)
        with torch.no_grad():
            error, wrong = (value - y.mT @ before for y in (key, query))
            strength = beta * (share := surprise(wrong))
            # How fast it grows with each entry of the query's error.
            slope = 2 * strength * (1 - share) / temperature * wrong / wrong.size(-1)

        def adjoint(grad: Tensor) -> Tensor:
            Z = grad.clone()
            for level in reversed(levels.levels):
                at = level.nodes
                read = key[at].mT @ Z[at]
                more = (read * error[at]).sum(-1, keepdim=True)
                here = Z[at] - key[at] * (strength[at] * read)
                here -= query[at] * (more * slope[at])
                Z.index_add_(0, level.tail, weight[level.edges] * here[level.head])
            return Z

        S = written(before, levels.whole.nodes)
        S.register_hook(adjoint)
    read = (query.mT @ S).squeeze(-2)
    return torch.empty_like(read).index_copy(0, node, read), ()


class _SurpriseScan(Operator[Inputs, DeltaGraph]):
    """The delta rule with surprise."""

    name = "surprise_scan"
    inputs = Inputs
    backends: ClassVar = {
        "torch": SimpleNamespace(
            DEVICES=None, forward=_forward, backward=by_autograd(_forward)
        )
    }

    def recipe(self, inputs: Inputs) -> Recipe:
        graph = (inputs.edge_index, inputs.batch)
        return Recipe(delta_graph, graph, (inputs.value.size(0),))

    def check(self, inputs: Inputs, structure: DeltaGraph) -> None:
        if structure.on_cycle.any():
            cycle = find_cycle(inputs.edge_index.cpu(), structure.num_nodes)
            raise CycleError(cycle or [])
        check_finite("edge_weight", inputs.edge_weight, lambda e: f"edge {e}")


surprise_scan = _SurpriseScan()
