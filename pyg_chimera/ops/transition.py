"""From selectivities to transitions: the weights :math:`A_{ij}` of a graph's edges.

Selectivities are non-negative: the larger, the less of a state survives an edge.
"""

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.structure.checks import check_edge_index
from pyg_chimera.ops.structure.distance import connected_components
from pyg_chimera.ops.structure.elimination import to_numpy

__all__ = [
    "chimera_transition",
    "dag_transition",
    "path_transition",
    "released_transition",
]


def chimera_transition(
    edge_index: Tensor,
    num_nodes: int,
    target: Tensor,
    source: Tensor,
    slack: Tensor,
    edge: Tensor | None = None,
    gamma: float = 1.0,
) -> Tensor:
    r"""The transitions of a general graph, normalised over the edges into a node, from
    `"Chimera: State Space Models Beyond Sequences"
    <https://arxiv.org/abs/2510.12111>`_ (Equation 12 and Section 3.3):

    .. math::
        a_{ij} = \exp(-(\Delta^{(1)}_i + \Delta^{(2)}_j + \Delta'_{ij}) / 3), \qquad
        A_{ij} = \gamma \frac{a_{ij}}{\sum_{j'} a_{ij'} + \exp(-\Psi_i)}

    Without :math:`\Delta'`, the exponent is divided by 2. Rows sum to less than
    :math:`\gamma`.

    Args:
        edge_index (torch.Tensor): The edges :math:`j \to i`,
            :math:`[2, |\mathcal{E}|]`.
        num_nodes (int): The number of nodes.
        target (torch.Tensor): :math:`\Delta^{(1)}`, :math:`[|\mathcal{V}|, H]`.
        source (torch.Tensor): :math:`\Delta^{(2)}`, :math:`[|\mathcal{V}|, H]`.
        slack (torch.Tensor): :math:`\Psi`, :math:`[|\mathcal{V}|, H]`.
        edge (torch.Tensor, optional): :math:`\Delta'`, :math:`[|\mathcal{E}|, H]`.
        gamma (float, optional): :math:`0 < \gamma \leq 1`. (default: :obj:`1.0`)

    Returns:
        torch.Tensor: :math:`A`, :math:`[|\mathcal{E}|, H]`.
    """
    col, row = edge_index[0], edge_index[1]
    weight = _decay(target[row], source[col], edge)
    total = _sum(weight, row, num_nodes) + torch.exp(-slack)
    return gamma * weight / total[row]


def released_transition(
    edge_index: Tensor,
    num_nodes: int,
    target: Tensor,
    source: Tensor,
    slack: Tensor,
    edge: Tensor | None = None,
) -> Tensor:
    r"""The transitions of the released Chimera code for graphs, which differ from the
    paper's: normalised over the edges *out of* a node, and only where they are large:

    .. math::
        A_{ij} = \frac{a_{ij}}{\max(1, \sum_{i'} a_{i'j} + \exp(-\Psi_j)) + 0.05}

    Columns sum to less than one. Arguments as in :func:`chimera_transition`.

    Args:
        edge_index (torch.Tensor): :math:`[2, |\mathcal{E}|]`.
        num_nodes (int): The number of nodes.
        target (torch.Tensor): :math:`[|\mathcal{V}|, H]`.
        source (torch.Tensor): :math:`[|\mathcal{V}|, H]`.
        slack (torch.Tensor): :math:`[|\mathcal{V}|, H]`.
        edge (torch.Tensor, optional): :math:`[|\mathcal{E}|, H]`.

    Returns:
        torch.Tensor: :math:`A`, :math:`[|\mathcal{E}|, H]`.
    """
    col, row = edge_index[0], edge_index[1]
    weight = _decay(target[row], source[col], edge)
    total = _sum(weight, col, num_nodes) + torch.exp(-slack)
    return weight / (total.clamp(min=1.0) + 0.05)[col]


def dag_transition(
    edge_index: Tensor,
    num_nodes: int,
    delta: Tensor,
    root: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""The transitions of a DAG, and how much each node writes, from `"Chimera: State
    Space Models Beyond Sequences" <https://arxiv.org/abs/2510.12111>`_ (Equation 15),
    where node :math:`i` has parents :math:`p(i)`:

    .. math::
        A_{ij} = \frac{\exp(-\Delta_{ij})}{\sqrt{|p(i)|}}, \qquad
        w_i = \frac{1}{\sqrt{|p(i)|}} \sum_{j \in p(i)} \Delta_{ij}

    Args:
        edge_index (torch.Tensor): The edges :math:`j \to i`,
            :math:`[2, |\mathcal{E}|]`.
        num_nodes (int): The number of nodes.
        delta (torch.Tensor): :math:`\Delta`, :math:`[|\mathcal{E}|, H]`.
        root (torch.Tensor, optional): What a node without parents writes,
            :math:`[|\mathcal{V}|, H]`. Without it, nothing, as the formula says.

    Returns:
        tuple[torch.Tensor, torch.Tensor]: :math:`A`, :math:`[|\mathcal{E}|, H]`, and
        :math:`w`, :math:`[|\mathcal{V}|, H]`.
    """
    row = edge_index[1]
    parents = _sum(delta.new_ones(row.size(0), 1), row, num_nodes)
    scale = parents.clamp(min=1).rsqrt()
    write = _sum(delta, row, num_nodes) * scale
    if root is not None:
        write = torch.where(parents == 0, root, write)
    return torch.exp(-delta) * scale[row], write


def path_transition(
    edge_index: Tensor, num_nodes: int, weight: Tensor, slack: Tensor
) -> Tensor:
    r"""The transitions of undirected paths, from `"Chimera: State Space Models Beyond
    Sequences" <https://arxiv.org/abs/2510.12111>`_ (Appendix B.1). It keeps the product
    around each edge, rather than the sums of rows, in bounds:

    .. math::
        A_{ij} = \frac{a_{ij}}{2 \sqrt{a_{ij} a_{ji} + \psi_{ij}}}, \qquad
        A_{ij} A_{ji} < \tfrac{1}{4}, \qquad
        \psi_{ij} = \exp(-(\Psi_i + \Psi_j) / 2)

    Args:
        edge_index (torch.Tensor): The edges of disjoint paths, each in both
            directions, :math:`[2, |\mathcal{E}|]`.
        num_nodes (int): The number of nodes.
        weight (torch.Tensor): :math:`a > 0`, :math:`[|\mathcal{E}|, H]`.
        slack (torch.Tensor): :math:`\Psi`, :math:`[|\mathcal{V}|, H]`.

    Returns:
        torch.Tensor: :math:`A`, :math:`[|\mathcal{E}|, H]`.

    Raises:
        ValueError: If an edge has no reverse, or the graph is not made of paths.
    """
    reverse = _path_reverse(edge_index, num_nodes)
    psi = torch.exp(-(slack[edge_index[0]] + slack[edge_index[1]]) / 2)
    return weight / (2 * torch.sqrt(weight * weight[reverse] + psi))


def _decay(target: Tensor, source: Tensor, edge: Tensor | None) -> Tensor:
    if edge is None:
        return torch.exp(-(target + source) / 2)
    return torch.exp(-(target + source + edge) / 3)


def _sum(x: Tensor, index: Tensor, num_nodes: int) -> Tensor:
    return x.new_zeros(num_nodes, x.size(1)).index_add(0, index, x)


@torch.library.custom_op("pyg_chimera::path_reverse", mutates_args=())
def _path_reverse(edge_index: Tensor, num_nodes: int) -> Tensor:
    """The number of each edge's reverse, in a graph of undirected paths."""
    check_edge_index(edge_index, num_nodes)
    col, row = to_numpy(edge_index)
    key, mirrored = col * num_nodes + row, row * num_nodes + col
    order = np.argsort(key)
    found = np.minimum(np.searchsorted(key[order], mirrored), max(len(order) - 1, 0))
    reverse = order[found]
    alone = np.flatnonzero(key[reverse] != mirrored)
    if alone.size:
        e = int(alone[0])
        raise ValueError(
            f"topology 'path' needs both directions of each edge in 'edge_index', but "
            f"edge {e}, {col[e]} -> {row[e]}, has no reverse; use "
            "'torch_geometric.utils.to_undirected'"
        )
    degree = np.bincount(row, minlength=num_nodes)
    parts = len(connected_components(edge_index, num_nodes).unique())
    # A forest whose nodes have at most two neighbours is a set of paths.
    if degree.max(initial=0) > 2 or len(row) != 2 * (num_nodes - parts):
        raise ValueError(
            "topology 'path' needs a graph whose components are simple paths, but "
            f"'edge_index' has {len(row)} edges between {num_nodes} nodes in {parts} "
            f"components, and a node of degree {degree.max(initial=0)}; use "
            "topology='graph'"
        )
    return torch.from_numpy(reverse).to(edge_index.device)


@_path_reverse.register_fake
def _(edge_index: Tensor, num_nodes: int) -> Tensor:
    return edge_index.new_empty(edge_index.size(1), dtype=torch.int64)
