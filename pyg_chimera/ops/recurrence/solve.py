"""Sparse linear systems, by the recurrences."""

import torch
from torch import Tensor

from pyg_chimera.ops.common.checks import (
    check_dim,
    check_edge_index,
    check_edges,
    check_flag,
    check_floats,
    check_shape,
    readable,
)
from pyg_chimera.ops.common.torch_private import is_followed
from pyg_chimera.ops.recurrence.dag_scan import dag_scan
from pyg_chimera.ops.recurrence.resolvent_mix import resolvent_mix

#: The largest condition number that is accepted: float64 then keeps three digits.
_MOST = 1e13


def solve(
    edge_index: Tensor,
    edge_weight: Tensor,
    b: Tensor,
    batch: Tensor | None = None,
    *,
    acyclic: bool = False,
    rank: Tensor | None = None,
) -> Tensor:
    r"""Solves the sparse linear system

    .. math::
        (\mathbf{I} - \mathbf{A}) \, \mathbf{x} = \mathbf{b},

    where :math:`A_{ij}` is the sum of the weights of the edges :math:`j \to i`, and is
    differentiable once in weights and right-hand sides:

    .. math::
        \frac{\partial L}{\partial \mathbf{b}} = (\mathbf{I} - \mathbf{A})^{-\top}
        \frac{\partial L}{\partial \mathbf{x}}, \qquad
        \frac{\partial L}{\partial A_{ij}} = \Bigl\langle
        \frac{\partial L}{\partial \mathbf{b}_i}, \mathbf{x}_j \Bigr\rangle.

    This is :func:`resolvent_mix`, from `"Chimera: State Space Models Beyond Sequences"
    <https://arxiv.org/abs/2510.12111>`_, with queries and keys of one, and
    :func:`dag_scan` if the graph is acyclic. Another matrix :math:`\mathbf{M}` has to
    be divided by its diagonal: :math:`A_{ij} = -M_{ij} / M_{ii}`, and
    :math:`b_i / M_{ii}`. Edges against their direction solve the transposed system.

    Weights may have any sign and size. Whatever the dtypes, the system is solved in
    float64, up to rounding, which the condition number magnifies as in any solver. It
    is estimated, from two more right-hand sides, and if fewer than three digits would
    be right, an error is raised. With :obj:`acyclic`, nothing is estimated:
    substitution cannot fail, but results may overflow to infinity.

    Args:
        edge_index (torch.Tensor): The edges, integer :math:`[2, |\mathcal{E}|]`.
            Self-loops and duplicates count.
        edge_weight (torch.Tensor): Their weights, :math:`[|\mathcal{E}|]`.
        b (torch.Tensor): The right-hand sides, :math:`[|\mathcal{V}|]` or
            :math:`[|\mathcal{V}|, C]`.
        batch (torch.Tensor, optional): The graph of each node, integer
            :math:`[|\mathcal{V}|]`, in any order. Used for speed only.
            (default: :obj:`None`)
        acyclic (bool, optional): Whether the graph has no cycles, so that
            :math:`\mathbf{I} - \mathbf{A}` is triangular, in some order of the nodes:
            a single pass replaces elimination. (default: :obj:`False`)
        rank (torch.Tensor, optional): An elimination order, integer
            :math:`[|\mathcal{V}|]`, as stored by
            :class:`~pyg_chimera.transforms.AddEliminationOrder`; with :obj:`acyclic`, a
            topological one, as stored by
            :class:`~pyg_chimera.transforms.AddTopologicalOrder`. Computed if absent.
            (default: :obj:`None`)

    Returns:
        torch.Tensor: The solutions :math:`\mathbf{x}`, of the shape and dtype of
        :obj:`b`.

    Raises:
        CycleError: If there is a cycle or a self-loop in spite of :obj:`acyclic`. A
            :class:`ValueError`.
        ValueError: If shapes disagree, an index is out of range, an edge joins two
            graphs, a weight is not finite, or :math:`\mathbf{I} - \mathbf{A}` is
            singular or nearly so, which is not found out in compiled functions, in
            transforms such as :func:`torch.func.vmap`, and within :func:`unchecked`.
        TypeError: If a tensor has the wrong dtype.
    """
    value, weight = (x.double() for x in check_floats(b=b, edge_weight=edge_weight))
    edge_index = check_edges("edge_index", edge_index, b)
    check_dim("edge_weight", edge_weight, "[edges]", 1)
    if b.dim() not in (1, 2):
        raise ValueError(f"'b' must be [nodes] or [nodes, columns], got {[*b.shape]}")
    check_flag("acyclic", acyclic)
    num_nodes = b.size(0)
    value = value[:, None] if b.dim() == 2 else value[:, None, None]
    is_checked = readable() and not (acyclic or is_followed())
    if is_checked:
        check_edge_index(edge_index, num_nodes)
        check_shape("edge_weight", edge_weight, "[edges]", [edge_index.size(1)])
        probes = _probes(edge_index, weight.detach(), num_nodes)
        value = torch.cat([value, probes[:, None]], 2)
    one = value.new_ones(num_nodes, 1, 1)
    operator = dag_scan if acyclic else resolvent_mix
    x = operator(one, one, value, edge_index, weight[:, None], batch, rank=rank)
    if is_checked:
        condition = x.detach()[..., -2:].abs()
        if not bool((condition <= _MOST).all()):
            raise ValueError(
                "'edge_weight' makes I - A singular, or nearly so (its condition "
                f"number is about {condition.max().item():.0e}): hardly a digit of the "
                "solution would be right. Scale the weights: if rows of |A| sum to "
                "less than 1, there is a solution"
            )
        x = x[..., :-2]
    return x.reshape(b.shape).to(b.dtype)


def _probes(edge_index: Tensor, weight: Tensor, num_nodes: int) -> Tensor:
    r"""Right-hand sides [V, 2] with solutions as large as the condition number of
    Skeel, the largest entry of :math:`|(I - A)^{-1}| |I - A| 1`, or nearly so.

    The row sums of :math:`|I - A|` have it exactly if weights are not negative. Times
    irregular factors, they are orthogonal to no row of an inverse that one meets.
    """
    sizes = weight.new_ones(num_nodes).index_add(0, edge_index[1], weight.abs())
    number = torch.arange(num_nodes, dtype=sizes.dtype, device=sizes.device)
    return torch.stack([sizes, sizes * torch.cos(number.square() + number)], 1)
