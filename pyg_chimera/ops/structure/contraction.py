"""Contraction of a DAG to some of its nodes, which keep reaching each other."""

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.compilation import compiled
from pyg_chimera.ops.structure.csr import compress, enlarged, to_numpy
from pyg_chimera.ops.structure.registered import structural_op, unsized
from pyg_chimera.ops.structure.topological import topological_rank


def contracted_dag(edge_index: Tensor, kept: Tensor) -> Tensor:
    r"""The edges that remain of a DAG if only some of its nodes are kept: there is one
    from :math:`j` to :math:`i` if a directed path leads from :math:`j` to :math:`i`
    through only nodes that are not kept.

    The parents of a kept node are thus its nearest kept ancestors along every path,

    .. math::
        p'(i) = \bigcup_{j \in p(i)} \begin{cases} \{ j \} & \text{if } j
        \text{ is kept} \\ p'(j) & \text{otherwise} \end{cases}

    and kept nodes reach each other as before. A directed path remains one, and the
    graphs of a batch remain separate. Takes :math:`O(|\mathcal{V}| + |\mathcal{E}| +
    \sum_{(j, i) \in \mathcal{E}} |p'(j)|)` time on the CPU, where the sum is over nodes
    :math:`j` that are not kept. This is linear if nodes have one parent, as on paths
    and trees; with many parents, it is bounded by :math:`|\mathcal{E}|` times the size
    of the largest set.

    Args:
        edge_index (torch.Tensor): The edges, :math:`[2, |\mathcal{E}|]`, integer, from
            :obj:`edge_index[0]` to :obj:`edge_index[1]`. Duplicates are fine.
        kept (torch.Tensor): Which nodes are kept, bool :math:`[|\mathcal{V}|]`.

    Returns:
        torch.Tensor: The edges between kept nodes, int64 :math:`[2, |\mathcal{E}'|]`,
        without duplicates, sorted by target, with the original node numbers, on the
        device of :obj:`edge_index`.

    Raises:
        CycleError: If there is a cycle (self-loops included), which the error names.
        ValueError: If an argument has the wrong shape, or :obj:`edge_index` is out of
            range.
        TypeError: If :obj:`edge_index` is not integer, or :obj:`kept` not bool.

    Example:
        >>> path = torch.tensor([[0, 1, 2], [1, 2, 3]])
        >>> contracted_dag(path, torch.tensor([True, False, True, True])).tolist()
        [[0, 2], [2, 3]]
    """
    if not isinstance(kept, Tensor) or kept.dtype != torch.bool:
        got = kept.dtype if isinstance(kept, Tensor) else type(kept).__name__
        raise TypeError(f"'kept' must be a tensor of bool (got '{got}')")
    if kept.dim() != 1:
        raise ValueError(
            f"'kept' must be of shape [num_nodes] (got shape {list(kept.shape)})"
        )
    return _contracted_dag(edge_index, kept)


@structural_op(unsized((2, "edges")), sized=False)
def _contracted_dag(edge_index: Tensor, kept: Tensor) -> Tensor:
    rank = topological_rank(edge_index, kept.numel())  # Checks the edges too.
    source, target = to_numpy(edge_index)
    order = np.argsort(rank.cpu().numpy(), kind="stable")
    edges = _contract(source, target, order, kept.detach().cpu().numpy())
    return torch.from_numpy(edges).to(edge_index.device)


@compiled()
def _contract(source, target, order, kept):
    """The edges between kept nodes; finds the nearest kept ancestors of every node."""
    n = kept.shape[0]
    ptr, parent = compress(target, source, n)
    found = np.empty(source.shape[0], np.int64)  # the ancestor sets, concatenated
    begin, end = np.zeros(n, np.int64), np.zeros(n, np.int64)
    last = np.full(n, -1, np.int64)  # the last node whose set each node was added to
    free = 0
    for i in order:
        if ptr[i + 1] - ptr[i] == 1 and not kept[parent[ptr[i]]]:
            j = parent[ptr[i]]  # i has the same set
            begin[i], end[i] = begin[j], end[j]
            continue
        most = 0
        for x in range(ptr[i], ptr[i + 1]):
            j = parent[x]
            most += 1 if kept[j] else end[j] - begin[j]
        if free + most > found.shape[0]:
            found = enlarged(found, free, 2 * (free + most))
        begin[i] = free
        for x in range(ptr[i], ptr[i + 1]):
            j = parent[x]
            if kept[j]:
                if last[j] != i:
                    last[j] = i
                    found[free] = j
                    free += 1
                continue
            for y in range(begin[j], end[j]):
                k = found[y]
                if last[k] != i:
                    last[k] = i
                    found[free] = k
                    free += 1
        end[i] = free

    count = 0
    for i in range(n):
        if kept[i]:
            count += end[i] - begin[i]
    edges = np.empty((2, count), np.int64)
    free = 0
    for i in range(n):
        if kept[i]:
            for y in range(begin[i], end[i]):
                edges[0, free] = found[y]
                edges[1, free] = i
                free += 1
    return edges
