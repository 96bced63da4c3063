"""The oracle: dense gating matrices, plain autograd, any floating-point dtype."""

import torch
from torch import Tensor

from pyg_chimera.ops.scan.states import States

__all__ = ["reference_scan"]


def reference_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    source: Tensor,
    mark: Tensor,
    transition: Tensor,
    states: States,
) -> Tensor:
    r"""Computes :math:`y = (G \odot Q K^T) V`, :math:`G = M (I - A)^{-1} S`.

    :math:`S` and :math:`M` join nodes with the states that they write and read. Cubic
    in all states, quadratic in all nodes.
    """
    heads, num_nodes, num_states = value.size(1), value.size(0), source.size(0)
    query, key = (x.repeat_interleave(heads // x.size(1), 1) for x in (query, key))
    tail, head = states.edge_index
    state = torch.arange(num_states, device=value.device)
    outs = []
    for h in range(heads):
        A = value.new_zeros(num_states, num_states)
        A = A.index_put((head, tail), transition[:, h], accumulate=True)
        S = value.new_zeros(num_states, num_nodes)
        S = S.index_put((state, states.writer), source[:, h])
        M = value.new_zeros(num_nodes, num_states)
        M = M.index_put((states.reader, state), mark[:, h])
        eye = torch.eye(num_states, dtype=value.dtype, device=value.device)
        G = M @ torch.linalg.inv(eye - A) @ S
        outs.append((G * (query[:, h] @ key[:, h].t())) @ value[:, h])
    return torch.stack(outs, 1)
