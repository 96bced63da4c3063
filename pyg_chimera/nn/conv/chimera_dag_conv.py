import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.typing import Adj

from pyg_chimera.nn._inputs import check_inputs, side_by_side
from pyg_chimera.nn.conv._gated_block import ChimeraBlock, mean_of_ends
from pyg_chimera.nn.conv._init import softplus_
from pyg_chimera.ops import dag_scan, dag_transition
from pyg_chimera.ops.common.checks import check_flag, check_integer, check_option
from pyg_chimera.ops.structure import parent_scale

__all__ = ["ChimeraDAGConv"]

#: Which of the different projections each DAG uses.
_SHARING: dict[str, Callable[[int], list[int]]] = {
    "all": lambda num_dags: [0] * num_dags,
    "none": lambda num_dags: list(range(num_dags)),
    "diagonal": lambda num_dags: [d // 2 for d in range(num_dags)],
    "row": lambda _: [0, 1, 1, 0],
}


class ChimeraDAGConv(ChimeraBlock):
    r"""The Chimera layer for directed acyclic graphs from `"Chimera: State Space Models
    Beyond Sequences" <https://arxiv.org/abs/2510.12111>`_ (Section 4.1): its recurrence
    is a single pass in topological order, linear in the number of nodes and edges.

    .. math::
        \mathbf{H}_i = \sum_{j \in p(i)} A_{ij} \mathbf{H}_j + s_i \mathbf{B}_i
        \mathbf{v}_i^{\top}, \qquad
        \mathbf{x}'_i = \mathbf{W}_{\text{out}} \left( \text{RMSNorm}(
        \mathbf{H}_i^{\top} \mathbf{C}_i + \mathbf{D} \odot \mathbf{v}_i) \odot
        \text{SiLU}(\mathbf{z}_i) \right)

    where :math:`p(i)` are the parents of a node, and
    :math:`\mathbf{B}, \mathbf{C}, \mathbf{V}` are projections of the nodes, followed by
    SiLU. The transitions :math:`A_{ij}` and input gates :math:`s_i`, see
    :func:`~pyg_chimera.ops.dag_transition`, come from selectivities :math:`\Delta =
    \text{softplus}(\mathbf{W} \mathbf{x} + \mathbf{b})` of nodes and, with
    :obj:`edge_dim`, edges. On deep DAGs whose paths meet again, they are scaled down
    so that float32 does not overflow, see
    :func:`~pyg_chimera.ops.structure.parent_scale`.

    On a directed path, the recurrence with :obj:`selectivity="target"` is that of
    `"Mamba-2" <https://arxiv.org/abs/2405.21060>`_. With also
    :obj:`norm_before_gate=False` and :obj:`qk_norm=False`, the layer is its block,
    with the rates :math:`A` of heads fixed at :math:`-1`, :obj:`groups=1`, as many
    channels inside as outside, and no convolution. (:class:`ChimeraGridConv` has one,
    without a bias.)

    Several DAGs over the same nodes, such as those of
    :class:`~pyg_chimera.transforms.DAGDecomposition`, have separate selectivities; what
    :math:`\mathbf{C}` reads from them is summed and divided by
    :math:`\sqrt{\text{num\_dags}}`. Along a single DAG, a node is influenced by its
    ancestors only. Unless this is intended, add its reverse as a second DAG, as in the
    example.

    Size:
        in_channels (int): Size of each input sample, or :obj:`-1` to derive the size
            from the first input.
        out_channels (int, optional): Size of each output sample. (default:
            :obj:`in_channels`)
        heads (int, optional): Number of heads, each with its own :math:`\mathbf{A}`;
            divides :obj:`out_channels`. (default: the largest of 4, 2 and 1 that does)
        state_channels (int, optional): Size of :math:`\mathbf{B}_i` and
            :math:`\mathbf{C}_i`. (default: :obj:`16`)
        num_dags (int, optional): The number of DAGs. (default: :obj:`1`)

    Recurrence:
        order (str, optional): With :obj:`"auto"` and a single DAG, the graph may have
            cycles: each component that has any is divided into two DAGs, of the edges
            to later and to earlier nodes in a breadth-first search (without
            self-loops), and outputs along both, with the same parameters, are averaged.
            Not so in compiled and exported models, nor given :obj:`rank`. With
            :obj:`None`, cycles are an error. (default: :obj:`"auto"`)
        share (str, optional): Which DAGs share :math:`\mathbf{B}` and
            :math:`\mathbf{C}` (Table 6 of the paper): :obj:`"all"`; :obj:`"none"`;
            :obj:`"diagonal"`, each pair of consecutive DAGs, of which
            :class:`~pyg_chimera.transforms.DAGDecomposition` makes the second the
            reverse of the first; or :obj:`"row"`, of the four DAGs of a grid, the two
            that run down the rows and the two that run up. (default: :obj:`"all"`)
        selectivity (str, optional): The selectivity of an edge: the :obj:`"mean"` of
            those of its two nodes, or that of its :obj:`"target"`, as in Mamba-2.
            (default: :obj:`"mean"`)
        roots (str, optional): Whether nodes without parents :obj:`"write"` or are
            :obj:`"silent"`, as in Equation 15. (default: :obj:`"write"`)
        local_conv (bool, optional): Whether to add a depthwise mean over the parents in
            each DAG to :math:`\mathbf{B}, \mathbf{C}, \mathbf{V}`, before SiLU.
            (default: :obj:`False`)
        qk_norm (bool, optional): As in :class:`~pyg_chimera.nn.ChimeraConv`. (default:
            :obj:`True`)
        norm_before_gate (bool, optional): Whether :math:`\text{RMSNorm}` comes before
            the gate :math:`\mathbf{z}`, as above, or after it, as in Mamba-2:
            :math:`\text{RMSNorm}(\ldots \odot \text{SiLU}(\mathbf{z}_i))`. (default:
            :obj:`True`)

    Execution:
        **kwargs (optional): The options :obj:`groups`, :obj:`edge_dim`, :obj:`gated`,
            :obj:`bias`, :obj:`reach` (here not limited; a head writes as much as it
            forgets), :obj:`form` (but :obj:`"mask"`) and :obj:`backend` of
            :class:`~pyg_chimera.nn.ChimeraConv`, and those of
            :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:**
          node features :math:`(|\mathcal{V}|, F_{in})`,
          edge indices :math:`(2, |\mathcal{E}|)` or a sparse adjacency,
          edge features :math:`(|\mathcal{E}|, D)` *(optional)*,
          batch vector :math:`(|\mathcal{V}|)` *(optional)*;
          with :obj:`num_dags > 1` lists of edge indices and of edge features
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        ValueError: If sizes are not divisible as required, or an option is unknown.

    Example:
        >>> conv = ChimeraDAGConv(16, 32, heads=2, num_dags=2)
        >>> there = torch.tensor([[0, 1, 1], [1, 2, 3]])
        >>> conv(torch.randn(4, 16), [there, there.flip(0)]).shape
        torch.Size([4, 32])
    """

    gate_std = 3**-0.5  #: more would shorten the ranges of heads

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int | None = None,
        state_channels: int = 16,
        *,
        num_dags: int = 1,
        order: str | None = "auto",
        share: str = "all",
        selectivity: str = "mean",
        roots: str = "write",
        local_conv: bool = False,
        qk_norm: bool = True,
        norm_before_gate: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, heads, state_channels, **kwargs)
        num_dags = check_integer("num_dags", num_dags, 1)
        check_option("order", order, (None, "auto"))
        check_option("share", share, tuple(_SHARING))
        wanted = {"row": num_dags == 4, "diagonal": num_dags % 2 == 0}
        if not wanted.get(share, True):
            allowed = [name for name in _SHARING if wanted.get(name, True)]
            raise ValueError(
                f"'share' must be one of {allowed} for num_dags={num_dags}, got "
                f"{share!r}: 'row' is for four DAGs of a grid, 'diagonal' for pairs"
            )
        check_option("selectivity", selectivity, ("mean", "target"))
        check_option("roots", roots, ("write", "silent"))
        check_flag("local_conv", local_conv)
        check_flag("qk_norm", qk_norm)
        check_flag("norm_before_gate", norm_before_gate)
        self.order = order
        self.share = share
        self.selectivity = selectivity
        self.roots = roots
        self.qk_norm = qk_norm
        self.norm_before_gate = norm_before_gate
        copies = len(set(_SHARING[share](num_dags)))
        self.add_parameters(
            num_dags, num_dags=num_dags, copies=copies, kernel=1 + local_conv
        )
        self.reset_parameters()

    def _set_reach(self, steps: Tensor) -> None:
        # A head writes as much as it forgets: along a path, the weights sum to one.
        softplus_(self.delta_bias, (1 / steps).expand_as(self.delta_bias))
        if self.edge_bias is not None:
            softplus_(self.edge_bias, (1 / steps).expand_as(self.edge_bias))

    def forward(
        self,
        x: Tensor,
        edge_index: Adj | Sequence[Adj],
        edge_attr: Tensor | Sequence[Tensor] | None = None,
        batch: Tensor | None = None,
        rank: Tensor | Sequence[Tensor] | None = None,
    ) -> Tensor:
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The node features.
            edge_index (torch.Tensor or SparseTensor): The edge indices; with
                :obj:`num_dags > 1` a list of them, one for each DAG.
            edge_attr (torch.Tensor, optional): The edge features (or a list), for
                layers with :obj:`edge_dim`. (default: :obj:`None`)
            batch (torch.Tensor, optional): The graph of each node. Used for speed only:
                outputs don't depend on it. (default: :obj:`None`)
            rank (torch.Tensor, optional): The topological rank (or a list), as stored
                by :class:`~pyg_chimera.transforms.AddTopologicalOrder`. (default:
                :obj:`None`)

        Raises:
            TypeError: If an argument has the wrong type or dtype.
            ValueError: If an argument does not fit the layer, or as in
                :func:`~pyg_chimera.ops.dag_scan`.
            CycleError: If there is a cycle where :obj:`order` does not allow it.
        """
        check_inputs(x, self.in_channels, batch)
        if rank is None:
            out = self.along_halves(x, edge_index, edge_attr, batch)
            if out is not None:
                return out
        index, features, batch, rank = side_by_side(
            x.size(0), self.num_dags, self.flow, self.edge_dim, edge_index, edge_attr,
            batch, rank,
        )  # fmt: skip
        each = [self.edge_selectivity(*edges, d) for d, edges in enumerate(features)]
        edges = [edge for edge in each if edge is not None]
        edge = torch.cat(edges) if edges else None
        nodes = self.project(x, self.over_edges(index))

        num_nodes, D = x.size(0), self.num_dags
        delta = nodes.delta + self.delta_bias
        # In this order, as compiled code may expect other strides of softplus.
        node = F.softplus(delta.transpose(0, 1).flatten(0, 1))
        source = node if self.selectivity == "mean" else None
        delta = mean_of_ends(index, node, source, edge)
        root = node if self.roots == "write" else None
        scale = parent_scale(index, D * num_nodes)
        weight, gate = dag_transition(index, D * num_nodes, delta, root, scale)
        query, key, value = self.query_key_value(nodes, gate if D == 1 else None)
        if D > 1:
            value = value.repeat(D, 1, 1) * gate.unsqueeze(-1)
        out = dag_scan(
            self._for_each_dag(query),
            self._for_each_dag(key),
            value,
            index,
            self.explained(weight, num_nodes),
            batch,
            rank=rank,
            form=self.form,
            backend=self.backend,
        )
        if D > 1:
            out = out.unflatten(0, (D, num_nodes)).sum(0) / math.sqrt(D)
        return self.output(out, nodes)

    def _for_each_dag(self, y: Tensor) -> Tensor:
        """[V, copies * groups, N] -> [D * V, groups, N], for the nodes of all DAGs."""
        if self.num_dags == 1:
            return y
        copies = y.unflatten(1, (-1, self.groups)).unbind(1)
        return torch.cat([copies[c] for c in self._copy_of_dags()])

    def _copy_of_dags(self) -> list[int]:
        """The index of each DAG's projection among the different ones."""
        return _SHARING[self.share](self.num_dags)
