"""By how much the states of a node's parents are scaled before they are added up."""

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.array_views import as_array
from pyg_chimera.ops.common.checks import check_edge_index
from pyg_chimera.ops.common.compilation import compiled
from pyg_chimera.ops.common.portability import is_portable
from pyg_chimera.ops.structure.csr import to_numpy
from pyg_chimera.ops.structure.grid import grid_dag, grid_edges, grid_sizes
from pyg_chimera.ops.structure.registered import structural_op
from pyg_chimera.ops.structure.topological import traversal


def parent_scale(edge_index: Tensor, num_nodes: int, log_growth: int = 56) -> Tensor:
    r"""One over the square root of the number of parents, or less where states would
    overflow.

    The sum of :math:`|p(i)|` independent states, divided by :math:`\sqrt{|p(i)|}`, is
    as large as each of them. Where paths part and meet again, states are not
    independent, and grow by up to :math:`\sqrt{|p(i)|}` with each step: to 1e38 along
    the diagonal of a grid of 128 x 128 nodes, which is more than float32 can hold. So
    the sum over all paths that lead to a node is kept from growing beyond
    :math:`g_{\max}`, by default :math:`2^{56}`, for whose square float32 has room:

    .. math::
        c_i = \min \left( \frac{1}{\sqrt{|p(i)|}}, \frac{g_{\max}}{\sum_{j \in p(i)}
        g_j} \right), \qquad
        g_i = \min \Big( 1 + c_i \sum_{j \in p(i)} g_j, \; g_{\max} \Big)

    It depends on the ancestors of a node only. Nodes with two parents each change it
    after 108 steps: those of grids of 55 x 55 nodes never do.

    Args:
        edge_index (torch.Tensor): The edges of a DAG, :math:`[2, |\mathcal{E}|]`,
            integer, from :obj:`edge_index[0]` to :obj:`edge_index[1]`. Duplicates
            count. (Nodes on cycles, and those after one, have
            :math:`1 / \sqrt{|p(i)|}`.)
        num_nodes (int): The number of nodes.
        log_growth (int, optional): :math:`\log_2 g_{\max}`. (default: :obj:`56`)

    Returns:
        torch.Tensor: :math:`c`, float64 :math:`[|\mathcal{V}|]`, on the device of
        :obj:`edge_index`; zero for nodes without parents.

    Raises:
        ValueError: If :obj:`edge_index` has the wrong shape or is out of range.
        TypeError: If :obj:`edge_index` is not integer.
    """
    return _parent_scale(edge_index, num_nodes, log_growth)


def continued_scale(
    edge_index: Tensor, num_nodes: int, log_growth: int, growth: Tensor
) -> tuple[Tensor, Tensor]:
    """The :func:`parent_scale` of the rest of a DAG, and :math:`g`, [V] of float64.

    The first nodes, whose parents are in the part before, have the growth [K] that
    they had there.
    """
    check_edge_index(edge_index, num_nodes)
    first = as_array(growth.double().cpu())
    found = _scale(*to_numpy(edge_index), num_nodes, 2.0**log_growth, first)
    scale, growth = (torch.from_numpy(x).to(edge_index.device) for x in found)
    return scale, growth


@structural_op(lambda edges, size, _: edges.new_empty(size, dtype=torch.double))
def _parent_scale(edge_index: Tensor, num_nodes: int, log_growth: int) -> Tensor:
    check_edge_index(edge_index, num_nodes)
    scale, _ = _scale(*to_numpy(edge_index), num_nodes, 2.0**log_growth, np.zeros(0))
    return torch.from_numpy(scale).to(edge_index.device)


def grid_parent_scale(
    height: int | Tensor, width: int | Tensor, num_dags: int, num_nodes: int
) -> Tensor | None:
    r"""The :func:`parent_scale` of the DAGs of grids.

    Args:
        height (int or torch.Tensor): As of :func:`grid_parents`, like the others.
        width (int or torch.Tensor): The number of columns of each grid.
        num_dags (int): The number of DAGs, up to 4.
        num_nodes (int): The number of nodes of all grids.

    Returns:
        torch.Tensor, optional: :math:`c`, float64 :math:`[|\mathcal{V}|, D]`, on the
        CPU, or :obj:`None` if it is :math:`1 / \sqrt{|p(i)|}` everywhere.
    """
    sizes = grid_sizes(height, width, num_nodes)
    if not is_portable() and all(h + w <= 110 or min(h, w) == 1 for h, w in sizes):
        return None
    tensor = torch.as_tensor(sizes, dtype=torch.long, device="cpu")
    return _grid_scale(*tensor.unbind(1), num_dags, num_nodes)


@structural_op(lambda x, _, dags, nodes: x.new_empty((nodes, dags), dtype=torch.double))
def _grid_scale(height: Tensor, width: Tensor, num_dags: int, num_nodes: int) -> Tensor:
    sizes = list(zip(height.tolist(), width.tolist(), strict=True))
    found: dict[tuple[int, int], Tensor] = {}
    for h, w in sizes:
        if (h, w) not in found:
            edge_index, _ = grid_edges(h, w)
            edge_index = edge_index[:, grid_dag(edge_index, h, w, 0)[0]]
            scale = parent_scale(edge_index, h * w).view(h, w)
            turned = [scale, scale.flip(0, 1), scale.flip(0), scale.flip(1)]
            found[h, w] = torch.stack(turned[:num_dags], 2).flatten(0, 1)
    return torch.cat([found[size] for size in sizes])


@compiled()
def _scale(source, target, n, largest, first):
    _, _, order, ptr, child = traversal(source, target, n)
    growth = np.ones(n)
    growth[: first.shape[0]] = first
    parents = np.zeros(n, np.int64)
    for e in range(target.shape[0]):
        parents[target[e]] += 1
    scale = np.zeros(n)
    for i in range(n):
        if parents[i] > 0:
            scale[i] = 1 / np.sqrt(parents[i])
    total = np.zeros(n)  # over parents
    for j in order:
        if scale[j] * total[j] > largest:
            scale[j] = largest / total[j]
        if j >= first.shape[0]:
            growth[j] = min(1 + scale[j] * total[j], largest)
        for x in range(ptr[j], ptr[j + 1]):
            total[child[x]] += growth[j]
    return scale, growth
