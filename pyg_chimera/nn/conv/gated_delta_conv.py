from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.typing import Adj

from pyg_chimera.nn._inputs import at_least_float32
from pyg_chimera.nn.conv._gated_block import ChimeraBlock, mean_of_ends
from pyg_chimera.nn.conv._init import softplus_
from pyg_chimera.ops import chimera_transition, dag_transition, delta_scan
from pyg_chimera.ops.common.checks import check_flag, check_integer, check_option
from pyg_chimera.ops.structure import parent_scale

__all__ = ["GatedDeltaConv"]


class GatedDeltaConv(ChimeraBlock):
    r"""The layer of `"Gated Delta Networks: Improving Mamba2 with Delta Rule"
    <https://arxiv.org/abs/2412.06464>`_ on any graph: a recurrence whose states are
    key-value memories. A node overwrites what its key reads, where
    :class:`~pyg_chimera.nn.ChimeraConv` can only add to it.

    .. math::
        \mathbf{S}'_i = \sum_{j \to i} A_{ij} \mathbf{S}_j, \qquad
        \mathbf{S}_i = \mathbf{S}'_i + \beta_i \mathbf{k}_i (\mathbf{v}_i -
        \mathbf{S}_i'^{\top} \mathbf{k}_i)^{\top}, \qquad
        \mathbf{x}'_i = \mathbf{W}_{\text{out}} \left( \text{RMSNorm}(
        \mathbf{S}_i^{\top} \mathbf{q}_i + \mathbf{D} \odot \mathbf{v}_i) \odot
        \text{SiLU}(\mathbf{z}_i) \right)

    Queries, keys and values are projections of the nodes, followed by SiLU, with
    queries and keys normalized to length one, and :math:`\beta_i` is the sigmoid of a
    projection. The transitions :math:`\mathbf{A}` come from selectivities, as in the
    Chimera layers. On any graph, cycles included, they are those of
    :func:`~pyg_chimera.ops.chimera_transition` with :obj:`gamma=0.9999`. Their rows sum
    to less than one, so that there is exactly one solution, which is computed by
    solving a dense linear system for each graph, see
    :func:`~pyg_chimera.ops.delta_scan`. With :obj:`acyclic`, they are those of
    :func:`~pyg_chimera.ops.dag_transition`, and time is linear.

    On a directed path, the recurrence with :obj:`selectivity="target"` is that of Gated
    DeltaNet. The layer is then the `released one
    <https://github.com/fla-org/flash-linear-attention>`_, except that the rates
    :math:`A` of heads are fixed at :math:`-1`, there is a skip connection
    :math:`\mathbf{D}`, and all heads are normalized together instead of each by itself.

    Args:
        in_channels (int): Size of each input sample, or :obj:`-1` to derive the size
            from the first input.
        out_channels (int, optional): Size of each output sample. (default:
            :obj:`in_channels`)
        heads (int, optional): Number of heads, each with its own :math:`\mathbf{A}` and
            :math:`\beta`; divides :obj:`out_channels`. (default: the largest of 4, 2
            and 1 that does)
        state_channels (int, optional): Size of queries and keys. (default: :obj:`16`)
        acyclic (bool, optional): Whether graphs are directed and acyclic.
            (default: :obj:`False`)
        selectivity (str, optional): With :obj:`acyclic`, the selectivity of an edge:
            the :obj:`"mean"` of those of its two nodes, or that of its :obj:`"target"`,
            as in Gated DeltaNet. (default: :obj:`"mean"`)
        conv_kernel (int, optional): The number of generations in the filters of the
            local convolution in front of :math:`\mathbf{q}, \mathbf{k}, \mathbf{v}`:
            the node itself, the mean of its neighbours, the mean of their means, and so
            on; with :obj:`1`, there is no convolution. (default: :obj:`None`, which is
            :obj:`4` with :obj:`acyclic`, along a directed path the filter of Gated
            DeltaNet, and :obj:`1` otherwise)
        **kwargs (optional): The options :obj:`groups`, :obj:`edge_dim`, :obj:`gated`,
            :obj:`bias`, :obj:`reach` (the distance at which a memory has fallen to
            :math:`1/e` if it is not overwritten; on graphs with cycles, at most 70
            steps), :obj:`form` (on graphs with cycles,
            :obj:`"mask"`) and :obj:`backend` of :class:`~pyg_chimera.nn.ChimeraConv`,
            and those of :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:**
          node features :math:`(|\mathcal{V}|, F_{in})`,
          edge indices :math:`(2, |\mathcal{E}|)` or a sparse adjacency,
          edge features :math:`(|\mathcal{E}|, D)` *(optional)*,
          batch vector :math:`(|\mathcal{V}|)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        ValueError: If sizes are not divisible as required, or an option is unknown or
            out of range.

    Example:
        >>> conv = GatedDeltaConv(16, 32, heads=2)
        >>> edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        >>> conv(torch.randn(3, 16), edge_index).shape
        torch.Size([3, 32])
    """

    additive = False
    #: The bound of the row sums of A on cycles, where only states that fade have a
    #: solution. Along a path, it allows ranges of up to 70 steps.
    gamma = 0.9999

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int | None = None,
        state_channels: int = 16,
        *,
        acyclic: bool = False,
        selectivity: str = "mean",
        conv_kernel: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, heads, state_channels, **kwargs)
        check_flag("acyclic", acyclic)
        check_option("selectivity", selectivity, ("mean", "target"))
        if selectivity == "target" and not acyclic:
            raise ValueError(
                "selectivity='target' is for DAGs; on cycles, transitions depend on "
                "both nodes of an edge; pass acyclic=True"
            )
        if conv_kernel is None:
            conv_kernel = 4 if acyclic else 1
        conv_kernel = check_integer("conv_kernel", conv_kernel, 1)
        self.acyclic = acyclic
        self.selectivity = selectivity
        # Of transitions, one, or target, source and psi; and beta.
        self.add_parameters(2 if acyclic else 4, kernel=conv_kernel)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        super().reset_parameters()
        torch.nn.init.zeros_(self.delta_bias[-1])  # beta starts in the middle

    def _set_reach(self, steps: Tensor) -> None:
        if not self.acyclic:
            self._set_row_sums(steps, self.gamma)
            return
        softplus_(self.delta_bias[0], 1 / steps)
        if self.edge_bias is not None:
            softplus_(self.edge_bias[0], 1 / steps)

    def forward(
        self,
        x: Tensor,
        edge_index: Adj,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> Tensor:
        r"""Runs the forward pass of the module. Takes arguments of
        :meth:`ChimeraConv.forward <pyg_chimera.nn.ChimeraConv.forward>`.

        Raises:
            CycleError: With :obj:`acyclic`, if there is a cycle, which the error names.
            TypeError: If an argument has the wrong type or dtype.
            ValueError: If an argument does not fit the layer, or as in
                :func:`~pyg_chimera.ops.delta_scan`.
        """
        edge_index, edge = self.edges(x, edge_index, edge_attr, batch)
        nodes = self.project(x, self.over_edges(edge_index))
        value = F.silu(nodes.value).unflatten(1, (self.heads, -1))
        both = torch.stack((nodes.query, nodes.key)).unflatten(2, (self.groups, -1))
        query, key = unit_silu(both).unbind(0)
        *deltas, beta = (nodes.delta + self.delta_bias).unbind(1)
        weight = self._transition(
            edge_index, x.size(0), [F.softplus(y) for y in deltas], edge
        )
        weight, beta = self.explained(weight, x.size(0)), beta.sigmoid()
        y = self.recalled(query, key, value, beta, edge_index, weight, batch)
        return self.output(y, nodes)

    def recalled(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        beta: Tensor,
        edge_index: Tensor,
        weight: Tensor,
        batch: Tensor | None,
    ) -> Tensor:
        """What queries read from the memories, [V, heads, P]."""
        return delta_scan(
            query, key, value, beta, edge_index, weight, batch,
            acyclic=self.acyclic, form=self.form, backend=self.backend,
        )  # fmt: skip

    def _transition(
        self,
        edge_index: Tensor,
        num_nodes: int,
        deltas: list[Tensor],
        edge: Tensor | None,
    ) -> Tensor:
        """The weights of the edges, [E, heads]."""
        if not self.acyclic:
            target, source, psi = deltas
            return chimera_transition(
                edge_index, num_nodes, target, source, psi, edge, self.gamma
            )
        (node,) = deltas
        other = node if self.selectivity == "mean" else None
        delta = mean_of_ends(edge_index, node, other, edge)
        scale = parent_scale(edge_index, num_nodes)
        return dag_transition(edge_index, num_nodes, delta, None, scale)[0]


def unit_silu(x: Tensor) -> Tensor:
    """SiLU, normalized to length one. Divided by the largest sigmoid of what is not
    zero, it does not underflow, however negative x is.
    """
    x = at_least_float32(x)
    sigmoid, zero = F.logsigmoid(x), x == 0
    largest = sigmoid.detach().masked_fill(zero, -torch.inf).amax(-1, keepdim=True)
    return unit(x * torch.exp((sigmoid - largest).masked_fill(zero, 0)))


def unit(x: Tensor) -> Tensor:
    """Normalizes x to length one, without overflow; zeros become some unit vector."""
    x = at_least_float32(x)
    scale = x.detach().abs().amax(-1, keepdim=True)  # cancels in the result
    nothing = scale < 1e-30
    x = x / scale.masked_fill(nothing, 1)
    return F.normalize(x.masked_fill(nothing, 1), dim=-1)
