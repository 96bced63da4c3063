"""The reference: dense gating matrices and plain autograd, for any floating dtype."""

import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.operator import without_autocast
from pyg_chimera.ops.recurrence.plan.direct_term import direct_term
from pyg_chimera.ops.recurrence.plan.states import StateGraph

DEVICES = None


def forward(call: Call) -> Tensor:
    r"""Computes :math:`y = (G \odot Q K^T) V`, :math:`G = M (I - A)^{-1} S`.

    :math:`S` and :math:`M` map nodes to the states that they write, and states to the
    nodes that read them. Cubic in the states of a block, quadratic in its nodes.
    Autograd differentiates it.
    """
    graph: StateGraph = call.structure.graph
    query, key, value = call.inputs[:3]
    with without_autocast(value):
        source, mark, transition = graph.gates_of(call.inputs)
        repeats = value.size(1) // query.size(1)
        query, key = (x.repeat_interleave(repeats, 1) for x in (query, key))
        out = torch.zeros_like(value)
        for block in range(len(graph.sizes)):
            nodes = graph.nodes.node[
                graph.nodes.ptr[block] : graph.nodes.ptr[block + 1]
            ]
            node = torch.from_numpy(nodes).to(value.device)
            heads = [
                _gating(graph, block, source[:, h], mark[:, h], transition[:, h])
                * (query[node, h] @ key[node, h].t())
                @ value[node, h]
                for h in range(value.size(1))
            ]
            out = out.index_put((node,), torch.stack(heads, 1))
        if call.inputs.direct is not None:
            out = out + direct_term(query, key, value, call.inputs.direct)
    return out


def _gating(
    graph: StateGraph, block: int, source: Tensor, mark: Tensor, transition: Tensor
) -> Tensor:
    """G between the nodes of a block, for one head."""
    first, last = graph.ptr[block : block + 2]
    states = slice(first, last)
    ptr, parent, edge = graph.parents
    entries = slice(ptr[first], ptr[last])
    nodes, num_states = graph.nodes, int(last - first)
    num_nodes = int(nodes.ptr[block + 1] - nodes.ptr[block])

    def index(x: object) -> Tensor:
        return torch.as_tensor(x, device=source.device)

    row = torch.arange(num_states, device=source.device)
    state = index(graph.state[states])
    head = row.repeat_interleave(index(ptr[first : last + 1]).diff())
    tail = index(parent[entries] - first)
    A = source.new_zeros(num_states, num_states)
    weight = transition[index(edge[entries])]
    A = A.index_put((head, tail), weight, accumulate=True)
    S = source.new_zeros(num_states, num_nodes)
    S = S.index_put((row, index(nodes.writer[states])), source[state])
    M = source.new_zeros(num_nodes, num_states)
    M = M.index_put((index(nodes.reader[states]), row), mark[state])
    eye = torch.eye(num_states, dtype=source.dtype, device=source.device)
    # In topological order, A is strictly lower triangular.
    return M @ torch.linalg.solve_triangular(
        eye - A, S, upper=False, unitriangular=True
    )
