"""From selectivities to transitions: the weights :math:`A_{ij}` of a graph's edges.

Selectivities are non-negative. The larger they are, the less of a state survives an
edge.
"""

from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import reverse_cuthill_mckee
from torch import Tensor
from torch.nn.functional import logsigmoid

from pyg_chimera.ops.common.array_views import as_array
from pyg_chimera.ops.common.checks import (
    check_dim,
    check_edge_index,
    check_edges,
    check_float,
    check_number,
    check_shape,
    readable,
)
from pyg_chimera.ops.common.compilation import compiled
from pyg_chimera.ops.common.operator import one_by_one
from pyg_chimera.ops.common.portability import is_portable, portable_form
from pyg_chimera.ops.common.torch_private import NOT_IN_CUDA_GRAPHS
from pyg_chimera.ops.edge_softmax import edge_softmax
from pyg_chimera.ops.structure.csr import places, to_numpy
from pyg_chimera.ops.structure.distance import connected_components
from pyg_chimera.ops.structure.registered import structural_op

#: The least margin of `chimera_transition`, in machine epsilons times the sum.
LEAST_MARGIN = 16


def chimera_transition(
    edge_index: Tensor,
    num_nodes: int,
    target: Tensor,
    source: Tensor,
    psi: Tensor,
    edge: Tensor | None = None,
    gamma: float = 1.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    r"""The transitions of a general graph, normalized over the edges into a node, from
    `"Chimera: State Space Models Beyond Sequences" <https://arxiv.org/abs/2510.12111>`_
    (Equation 12 and Section 3.3):

    .. math::
        a_{ij} = \exp(-(\Delta^{(1)}_i + \Delta^{(2)}_j + \Delta'_{ij}) / 3), \qquad
        A_{ij} = \gamma \frac{a_{ij}}{\sum_{j'} a_{ij'} + \exp(-\Psi_i)}

    Without :math:`\Delta'`, the exponent is divided by 2. Rows sum to less than
    :math:`\gamma`. In floating point, :math:`\exp(-\Psi_i)` may round to nothing
    beside the sum, so that :math:`\mathbf{I} - \mathbf{A}` is singular. The root of its
    square plus that of 16 machine epsilons times the sum stands in for it, which ends
    the ranges of float32 at 512 steps on a path, and changes none below 100 by more
    than rounding does. Exponents are shifted by the largest one of each row, so that
    selectivities of any size are normalized without underflow.

    Args:
        edge_index (torch.Tensor): The edges :math:`j \to i`,
            :math:`[2, |\mathcal{E}|]`.
        num_nodes (int): The number of nodes.
        target (torch.Tensor): :math:`\Delta^{(1)}`, :math:`[|\mathcal{V}|, H]`.
        source (torch.Tensor): :math:`\Delta^{(2)}`, :math:`[|\mathcal{V}|, H]`.
        psi (torch.Tensor): :math:`\Psi`, :math:`[|\mathcal{V}|, H]`.
        edge (torch.Tensor, optional): :math:`\Delta'`, :math:`[|\mathcal{E}|, H]`.
        gamma (float, optional): :math:`0 < \gamma \leq 1`. (default: :obj:`1.0`)
        dtype (torch.dtype, optional): The dtype of :math:`A`. Rounding margins of 1e-6
            to float32 changes :math:`(\mathbf{I} - \mathbf{A})^{-1}`. The machine
            epsilon is that of :obj:`psi` in any case. (default: that of :obj:`psi`)

    Returns:
        torch.Tensor: :math:`A`, :math:`[|\mathcal{E}|, H]`.

    Raises:
        IndexError: If an edge is out of range.
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If shapes disagree, or :obj:`gamma` is out of range.
    """
    given = edge_index, num_nodes, target, source, psi, edge
    return transition_and_rest(*given, gamma, dtype)[0]


def transition_and_rest(
    edge_index: Tensor,
    num_nodes: int,
    target: Tensor,
    source: Tensor,
    psi: Tensor,
    edge: Tensor | None,
    gamma: float,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor]:
    r"""The weights of :func:`chimera_transition`, and what those of a row leave of one,
    :math:`1 - \sum_j A_{ij}`, [V, H] in the dtype of psi, without the error of a
    difference.
    """
    check_number("gamma", gamma)
    if not 0 < gamma <= 1:
        raise ValueError(f"'gamma' must be in (0, 1], got {gamma}")
    nodes = {"target": target, "source": source, "psi": psi}
    edge_index = _checked(edge_index, num_nodes, **nodes, edge=edge)
    margin = LEAST_MARGIN * torch.finfo(psi.dtype).eps
    given = edge_index, target, source, psi, edge
    return edge_softmax(*given, gamma, margin, dtype or psi.dtype)


def released_transition(
    edge_index: Tensor,
    num_nodes: int,
    target: Tensor,
    source: Tensor,
    psi: Tensor,
    edge: Tensor | None = None,
) -> Tensor:
    r"""The transitions of the released Chimera code for graphs, which differ from the
    paper's: they are normalized over the edges *out of* a node, and only where they are
    large:

    .. math::
        A_{ij} = \frac{a_{ij}}{\max(1, \sum_{i'} a_{i'j} + \exp(-\Psi_j)) + 0.05}

    Columns sum to less than one. The arguments are those of :func:`chimera_transition`.

    Args:
        edge_index (torch.Tensor): :math:`[2, |\mathcal{E}|]`.
        num_nodes (int): The number of nodes.
        target (torch.Tensor): :math:`[|\mathcal{V}|, H]`.
        source (torch.Tensor): :math:`[|\mathcal{V}|, H]`.
        psi (torch.Tensor): :math:`[|\mathcal{V}|, H]`.
        edge (torch.Tensor, optional): :math:`[|\mathcal{E}|, H]`.

    Returns:
        torch.Tensor: :math:`A`, :math:`[|\mathcal{E}|, H]`.

    Raises:
        TypeError: If an argument has the wrong type or dtype.
        ValueError: If shapes disagree, or an edge is out of range.
    """
    nodes = {"target": target, "source": source, "psi": psi}
    edge_index = _checked(edge_index, num_nodes, **nodes, edge=edge)
    if readable():
        check_edge_index(edge_index, num_nodes)
    col, row = edge_index[0], edge_index[1]
    decay = target[row] + source[col]
    weight = torch.exp(-decay / 2 if edge is None else -(decay + edge) / 3)
    total = _sum(weight, col, num_nodes) + torch.exp(-psi)
    total = torch.where(total < 1, 1, total)  # unlike clamp, NaN has a gradient of NaN
    return weight / (total + 0.05)[col]


def dag_transition(
    edge_index: Tensor,
    num_nodes: int,
    delta: Tensor,
    root: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""The transitions of a DAG and the input gates of its nodes, from `"Chimera: State
    Space Models Beyond Sequences" <https://arxiv.org/abs/2510.12111>`_ (Equation 15),
    where node :math:`i` has parents :math:`p(i)`:

    .. math::
        A_{ij} = \frac{\exp(-\Delta_{ij})}{\sqrt{|p(i)|}}, \qquad
        s_i = \frac{1}{\sqrt{|p(i)|}} \sum_{j \in p(i)} \Delta_{ij}

    Args:
        edge_index (torch.Tensor): The edges :math:`j \to i`,
            :math:`[2, |\mathcal{E}|]`.
        num_nodes (int): The number of nodes.
        delta (torch.Tensor): :math:`\Delta`, :math:`[|\mathcal{E}|, H]`.
        root (torch.Tensor, optional): The input gate of nodes without parents,
            :math:`[|\mathcal{V}|, H]`. Without it, zero, as in the formula.
        scale (torch.Tensor, optional): In place of :math:`1 / \sqrt{|p(i)|}`,
            :math:`[|\mathcal{V}|]`, zero for nodes without parents, such as
            :func:`~pyg_chimera.ops.structure.parent_scale`.

    Returns:
        tuple[torch.Tensor, torch.Tensor]: :math:`A`, :math:`[|\mathcal{E}|, H]`, and
        :math:`s`, :math:`[|\mathcal{V}|, H]`.

    Raises:
        ValueError: If shapes disagree.
    """
    edge_index = _checked(edge_index, num_nodes, delta=delta, root=root)
    row = edge_index[1]
    if scale is None:
        parents = _sum(delta.new_ones(row.size(0), 1), row, num_nodes)
        scale = torch.where(parents == 0, 0, parents.rsqrt())
    else:
        check_shape("scale", scale, "[nodes]", [num_nodes])
        scale = scale.to(delta.dtype).unsqueeze(1)
    input_gate = _sum(delta, row, num_nodes) * scale
    if root is not None:
        input_gate = torch.where(scale == 0, root, input_gate)
    return torch.exp(-delta) * scale[row], input_gate


def grid_transition(
    parent: Tensor,
    delta: Tensor,
    root: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    r"""The transitions and input gates of :func:`dag_transition` on grids, in the
    layout of :func:`grid_dag_scan`, without a list of edges.

    Args:
        parent (torch.Tensor): The node before each node in :math:`O` orientations and
            two directions, as indices into a flattened :math:`[|\mathcal{V}|, O]`,
            :math:`[|\mathcal{V}|, O, 2]`; the node's own index where there is none, as
            returned by :func:`~pyg_chimera.ops.structure.grid_parents`.
        delta (torch.Tensor): :math:`\Delta` of these edges,
            :math:`[|\mathcal{V}|, O, 2, H]`. For edges that do not exist, any value
            from 0 on.
        root (torch.Tensor, optional): The input gate of nodes without parents,
            :math:`[|\mathcal{V}|, O, H]`. Without it, zero.
        scale (torch.Tensor, optional): As of :func:`dag_transition`,
            :math:`[|\mathcal{V}|, O]`.

    Returns:
        tuple[torch.Tensor, torch.Tensor]: :math:`A`, :math:`[|\mathcal{V}|, O, 2, H]`,
        and :math:`s`, :math:`[|\mathcal{V}|, O, H]`.

    Raises:
        ValueError: If shapes disagree.
    """
    check_dim("delta", delta, "[nodes, orientations, 2, heads]", 4)
    num_nodes, orientations, _, heads = delta.shape
    shape = [num_nodes, orientations, 2, heads]
    check_shape("delta", delta, "[nodes, orientations, 2, heads]", shape)
    shape = [num_nodes, orientations, 2]
    check_shape("parent", parent, "[nodes, orientations, 2]", shape)
    if root is not None:
        shape = [num_nodes, orientations, heads]
        check_shape("root", root, "[nodes, orientations, heads]", shape)
    places = torch.arange(parent.numel() // 2, device=parent.device)
    exists = parent != places.view(*parent.shape[:2], 1)
    parents = exists.sum(2, keepdim=True)
    if scale is None:
        scale = parents.clamp(min=1).to(delta.dtype).rsqrt()
    else:
        check_shape("scale", scale, "[nodes, orientations]", shape[:2])
        scale = scale.to(delta).unsqueeze(2)
    scale = (exists * scale).unsqueeze(-1)
    input_gate = (delta * scale).sum(2)
    if root is not None:
        input_gate = torch.where(parents == 0, root, input_gate)
    return torch.exp(-delta) * scale, input_gate


def path_transition(
    edge_index: Tensor, num_nodes: int, weight: Tensor, psi: Tensor
) -> Tensor:
    r"""The transitions of undirected paths, from `"Chimera: State Space Models Beyond
    Sequences" <https://arxiv.org/abs/2510.12111>`_ (Appendix B.1). They bound the
    product around each edge instead of the row sums:

    .. math::
        A_{ij} = \frac{a_{ij}}{2 \sqrt{a_{ij} a_{ji} + \psi_{ij}}}, \qquad
        A_{ij} A_{ji} < \tfrac{1}{4}, \qquad
        \psi_{ij} = \exp(-(\Psi_i + \Psi_j) / 2)

    A single :math:`A_{ij}` may be of any size. :func:`balanced_path_transition` keeps
    all of them below :math:`1 / 2`.

    Args:
        edge_index (torch.Tensor): The edges of disjoint paths, each in both
            directions, :math:`[2, |\mathcal{E}|]`.
        num_nodes (int): The number of nodes.
        weight (torch.Tensor): :math:`a > 0`, :math:`[|\mathcal{E}|, H]`.
        psi (torch.Tensor): :math:`\Psi`, :math:`[|\mathcal{V}|, H]`.

    Returns:
        torch.Tensor: :math:`A`, :math:`[|\mathcal{E}|, H]`.

    Raises:
        ValueError: If shapes disagree, an edge has no reverse, or the graph is not made
            of paths.
    """
    edge_index = _checked(edge_index, num_nodes, weight=weight, psi=psi)
    reverse = _path_reverse(edge_index, num_nodes)
    tiny = torch.finfo(weight.dtype).tiny
    log = weight.masked_fill(weight < tiny, tiny).log()
    tilt, fall = _log_path_transition(edge_index, reverse, log, psi)
    return torch.exp(tilt + fall) / 2


def balanced_path_transition(
    edge_index: Tensor,
    num_nodes: int,
    log_weight: Tensor,
    psi: Tensor,
    log_source: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""The transitions of :func:`path_transition` between states that are divided by
    :math:`\exp(\theta_i)`,

    .. math::
        \bar{A}_{ij} = \exp(-\theta_i) A_{ij} \exp(\theta_j) \leq \tfrac{1}{2},
        \qquad (\mathbf{I} - \mathbf{A})^{-1}_{ij} = \exp(\theta_i) \,
        (\mathbf{I} - \bar{\mathbf{A}})^{-1}_{ij} \exp(-\theta_j)

    where :math:`\theta_i` is at least the logarithm :math:`\sigma_i` of what node
    :math:`i` writes, and the least for which this holds. So neither weights nor states
    overflow, whatever the size of :math:`a`, and what reaches a node does not underflow
    beside what does not.

    Args:
        edge_index (torch.Tensor): The edges of disjoint paths, each in both
            directions, :math:`[2, |\mathcal{E}|]`.
        num_nodes (int): The number of nodes.
        log_weight (torch.Tensor): :math:`\log a`, :math:`[|\mathcal{E}|, H]`.
        psi (torch.Tensor): :math:`\Psi`, :math:`[|\mathcal{V}|, H]`.
        log_source (torch.Tensor): :math:`\sigma`, :math:`[|\mathcal{V}|, H]`.

    Returns:
        tuple[torch.Tensor, torch.Tensor]: :math:`\bar{A}`, :math:`[|\mathcal{E}|, H]`,
        and :math:`\theta`, :math:`[|\mathcal{V}|, H]`, to be treated as a constant.

    Raises:
        ValueError: As in :func:`path_transition`.
    """
    given = {"log_weight": log_weight, "psi": psi, "log_source": log_source}
    edge_index = _checked(edge_index, num_nodes, **given)
    reverse = _path_reverse(edge_index, num_nodes)
    tilt, fall = _log_path_transition(edge_index, reverse, log_weight, psi)
    gain, own = (tilt + fall).detach(), log_source.detach()  # any scale cancels
    if is_portable():
        scale = portable_form("path_scale")(edge_index, gain, own)
    else:
        scale = _path_scale(gain, own, *_path_places(edge_index, num_nodes))
    source, target = scale[edge_index]
    return torch.exp(tilt + (source - target) + fall) / 2, scale


def _log_path_transition(
    edge_index: Tensor, reverse: Tensor, log_weight: Tensor, psi: Tensor
) -> tuple[Tensor, Tensor]:
    """The terms of log(2 A) = tilt + fall, from log a, as products of a underflow.

    Of both directions of an edge, tilts cancel exactly, so A_ij A_ji stays below 1/4.
    """
    mirrored = log_weight[reverse]
    # log(a_ij a_ji) less log(a_ij a_ji + psi_ij)
    fall = logsigmoid(log_weight + mirrored + psi[edge_index].mean(0))
    return (log_weight - mirrored) / 2, fall / 2


@torch.library.custom_op(
    "pyg_chimera::path_scale", mutates_args=(), **NOT_IN_CUDA_GRAPHS
)
def _path_scale(
    gain: Tensor, source: Tensor, node: Tensor, there: Tensor, back: Tensor
) -> Tensor:
    """The largest sum of a source and the gains over edges from it, for each node."""
    arrays = (gain.double().nan_to_num(0, 0, 0), source.double().nan_to_num(0, 0, 0))
    out = torch.empty_like(source, dtype=torch.double, device="cpu")
    _largest_sums(*(as_array(x.cpu()) for x in (*arrays, node, there, back, out)))
    return out.to(source)


_path_scale.register_fake(lambda gain, source, *_: torch.empty_like(source))
torch.library.register_vmap(_path_scale, one_by_one(_path_scale))


@compiled()
def _largest_sums(gain, source, node, there, back, out):
    """M[i] = max(source[i], M[i - 1] + gain[i]) along each path, in both directions."""
    for h in range(source.shape[1]):
        most = 0.0
        for k in range(len(node)):
            i, edge = node[k], there[k]
            own = source[i, h]
            most = max(own, most + gain[edge, h]) if edge < len(gain) else own
            out[i, h] = most
        for k in range(len(node) - 1, -1, -1):
            i, edge = node[k], back[k]
            own = source[i, h]
            most = max(own, most + gain[edge, h]) if edge < len(gain) else own
            out[i, h] = max(out[i, h], most)


def _checked(
    edge_index: Tensor, num_nodes: int, **selectivities: Tensor | None
) -> Tensor:
    """Checks selectivities of nodes, [V, H], and of edges, [E, H], with as many heads
    as the first one; returns the edges as int64.
    """
    given: dict[str, Any] = {
        name: x
        for name, x in selectivities.items()
        if x is not None or name not in ("edge", "root")
    }
    for name, x in given.items():
        check_float(name, x)
    edge_index = check_edges("edge_index", edge_index, next(iter(given.values())))
    heads = None
    for name, x in given.items():
        on_edges = name in ("edge", "delta", "weight", "log_weight")
        rows = edge_index.size(1) if on_edges else num_nodes
        layout = "[edges, heads]" if on_edges else "[nodes, heads]"
        check_dim(name, x, layout, 2)
        heads = x.size(1) if heads is None else heads
        check_shape(name, x, layout, [rows, heads])
    return edge_index


def _sum(x: Tensor, index: Tensor, num_nodes: int) -> Tensor:
    return x.new_zeros(num_nodes, x.size(1)).index_add(0, index, x)


@structural_op(lambda edges, _: edges.new_empty(edges.size(1), dtype=torch.int64))
def _path_reverse(edge_index: Tensor, num_nodes: int) -> Tensor:
    """The index of each edge's reverse, in a graph of undirected paths."""
    check_edge_index(edge_index, num_nodes)
    col, row = to_numpy(edge_index)
    key, mirrored = col * num_nodes + row, row * num_nodes + col
    reverse = places(key, mirrored)
    alone = np.flatnonzero(reverse < 0)
    if alone.size:
        e = int(alone[0])
        raise ValueError(
            f"'edge_index' must hold both directions of each edge of a path, but edge "
            f"{e}, {col[e]} -> {row[e]}, has no reverse; use "
            "'torch_geometric.utils.to_undirected', or 'ChimeraConv', which takes any "
            "graph"
        )
    degree = np.bincount(row, minlength=num_nodes)
    parts = len(connected_components(edge_index, num_nodes).unique())
    # A forest whose nodes have at most two neighbours is a set of paths.
    if degree.max(initial=0) > 2 or len(row) != 2 * (num_nodes - parts):
        raise ValueError(
            "'edge_index' must be a graph whose components are simple paths, but has "
            f"{len(row)} edges between {num_nodes} nodes in {parts} components, and a "
            f"node of degree {degree.max(initial=0)}; 'ChimeraConv' and "
            "'chimera_transition' take any graph"
        )
    return torch.from_numpy(reverse).to(edge_index.device)


@structural_op(lambda edges, size: edges.new_empty(3, size, dtype=torch.int64).unbind())
def _path_places(edge_index: Tensor, num_nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """The nodes path by path, each from end to end; the edges from the node before, and
    from the node after, or the number of edges at ends.
    """
    (col, row), num_edges = to_numpy(edge_index), edge_index.size(1)
    edges, node = np.arange(num_edges), np.arange(num_nodes)
    if num_edges:
        graph = csr_array((edges, (row, col)), (num_nodes, num_nodes))
        node = reverse_cuthill_mckee(graph, symmetric_mode=True).astype(np.int64)
    place = np.argsort(node)
    there, back = np.full((2, num_nodes), num_edges)
    ahead = place[col] < place[row]
    there[row[ahead]], back[row[~ahead]] = edges[ahead], edges[~ahead]
    first, second, third = (
        torch.from_numpy(x).to(edge_index.device)
        for x in (node, there[node], back[node])
    )
    return first, second, third
