from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.typing import Adj

from pyg_chimera.nn._inputs import as_edges, at_least_float32, check_batch, check_nodes
from pyg_chimera.nn.conv._chimera_block import ChimeraBlock, mean
from pyg_chimera.nn.conv._init import softplus_
from pyg_chimera.ops import chimera_transition, dag_transition, delta_scan

__all__ = ["GatedDeltaConv"]


class GatedDeltaConv(ChimeraBlock):
    r"""The layer of `"Gated Delta Networks: Improving Mamba2 with Delta Rule"
    <https://arxiv.org/abs/2412.06464>`_ on any graph: a recurrence whose states are
    memories of pairs of keys and values, in which a node overwrites what its key reads,
    where :class:`~pyg_chimera.nn.ChimeraConv` only adds.

    .. math::
        \mathbf{S}'_i = \sum_{j \to i} A_{ij} \mathbf{S}_j, \qquad
        \mathbf{S}_i = \mathbf{S}'_i + \beta_i \mathbf{k}_i (\mathbf{v}_i -
        \mathbf{S}_i'^{\top} \mathbf{k}_i)^{\top}, \qquad
        \mathbf{x}'_i = \mathbf{W}_{\text{out}} \left( \text{RMSNorm}(
        \mathbf{S}_i^{\top} \mathbf{q}_i + \mathbf{D} \odot \mathbf{v}_i) \odot
        \text{SiLU}(\mathbf{z}_i) \right)

    Queries and keys are of length one; they and values are projections of the nodes,
    followed by SiLU, and :math:`\beta_i` is the sigmoid of one. The transitions
    :math:`\mathbf{A}` come from selectivities, as in the Chimera layers: on any graph,
    cycles included, they are those of :func:`~pyg_chimera.ops.chimera_transition`,
    whose rows sum to less than one, so that there is exactly one solution; it is found
    by linear systems, see :func:`~pyg_chimera.ops.delta_scan`. With :obj:`acyclic`,
    they are those of :func:`~pyg_chimera.ops.dag_transition`. On a directed path this
    is Gated DeltaNet.

    Args:
        in_channels (int): Size of each input sample, or :obj:`-1` to derive the size
            from the first input.
        out_channels (int, optional): Size of each output sample. (default:
            :obj:`in_channels`)
        heads (int, optional): Number of heads, each with its own :math:`\mathbf{A}` and
            :math:`\beta`; divides :obj:`out_channels`. (default: :obj:`1`)
        state_channels (int, optional): Size of queries and keys. (default: :obj:`64`)
        acyclic (bool, optional): Whether graphs are directed and acyclic.
            (default: :obj:`False`)
        surprise (bool, optional): Whether nodes write the more the more their value
            differs from what their query reads before, relative to a temperature that
            each head learns, from 1 on: the surprise of `"Titans: Learning to Memorize
            at Test Time" <https://arxiv.org/abs/2501.00663>`_. Takes :obj:`acyclic`.
            (default: :obj:`False`)
        reflections (bool, optional): Whether :math:`\beta` ranges up to 2 and not 1, so
            that nodes can turn what their key reads into its opposite, which state
            tracking takes. (default: :obj:`False`)
        groups (int, optional): Number of different queries and keys; divides
            :obj:`heads`. (default: :obj:`1`)
        edge_dim (int, optional): Size of edge features, on which the transitions then
            depend too, or :obj:`-1`. (default: :obj:`None`)
        gamma (float, optional): Upper bound of the row sums of :math:`\mathbf{A}`, in
            (0, 1), unless :obj:`acyclic`. Along a path, it lets heads hear 70 steps
            far. (default: :obj:`0.9999`)
        local_conv (bool, optional): As in :class:`~pyg_chimera.nn.ChimeraConv`.
            (default: :obj:`False`)
        gated (bool, optional): Whether there is a gate :math:`\mathbf{z}`. (default:
            :obj:`True`)
        bias (bool, optional): If :obj:`False`, projections have no additive bias.
            (default: :obj:`True`)
        reach (tuple[float, float], optional): The interval of initial ranges, in steps,
            which is divided evenly among the heads on a log scale, as in
            :class:`~pyg_chimera.nn.ChimeraConv`: the distance along a path at which a
            memory that nobody overwrites has fallen to :math:`1/e`. With :obj:`None`,
            selectivities start log-uniform in [0.001, 0.1]. (default: :obj:`(4, 64)`)
        differential (bool, optional): Whether a head is the difference of two
            recurrences with the same queries, keys and values, and transitions of their
            own, the second times a number that is learnt, from 0.2 on: what both have
            taken up alike cancels, as in the `"Differential Transformer"
            <https://arxiv.org/abs/2410.05258>`_. Takes twice the time. (default:
            :obj:`False`)
        form (str, optional): :obj:`"state"` (on DAGs), :obj:`"mask"`, :obj:`"chunk"`
            (on directed paths) or :obj:`"auto"`.
        backend (str, optional): :obj:`"numba"` (CPU), :obj:`"torch"`,
            :obj:`"reference"` or :obj:`"auto"`.
        **kwargs (optional): Additional arguments of
            :class:`torch_geometric.nn.conv.MessagePassing`, :obj:`aggr` excepted.

    Shapes:
        - **input:**
          node features :math:`(|\mathcal{V}|, F_{in})`,
          edge indices :math:`(2, |\mathcal{E}|)` or a sparse adjacency,
          edge features :math:`(|\mathcal{E}|, D)` *(optional)*,
          batch vector :math:`(|\mathcal{V}|)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        ValueError: If sizes don't divide, or an option is unknown or out of range.

    Example:
        >>> conv = GatedDeltaConv(16, 32, heads=2)
        >>> edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        >>> conv(torch.randn(3, 16), edge_index).shape
        torch.Size([3, 32])
    """

    additive = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int = 1,
        state_channels: int = 64,
        *,
        acyclic: bool = False,
        surprise: bool = False,
        reflections: bool = False,
        groups: int = 1,
        edge_dim: int | None = None,
        gamma: float = 0.9999,
        local_conv: bool = False,
        gated: bool = True,
        bias: bool = True,
        reach: tuple[float, float] | None = (4.0, 64.0),
        differential: bool = False,
        form: str = "auto",
        backend: str = "auto",
        **kwargs: Any,
    ) -> None:
        if not 0 < gamma < 1:
            raise ValueError(
                "'gamma' must be in (0, 1), as on cycles only states that fade have a "
                f"solution, got {gamma}"
            )
        if surprise and not acyclic:
            raise ValueError(
                "surprise=True is for DAGs: the rule is not linear then, and may have "
                "no solution on cycles; pass acyclic=True"
            )
        super().__init__(
            in_channels, out_channels, heads, state_channels, groups=groups,
            edge_dim=edge_dim, taps=(2,) if local_conv else None, gated=gated,
            bias=bias, reach=reach, differential=differential, form=form,
            backend=backend, num_selectivities=2 if acyclic else 4, num_dags=1,
            copies=1, **kwargs,
        )  # fmt: skip
        self.acyclic = acyclic
        self.reflections = reflections
        self.gamma = gamma
        self.log_temperature = None
        if surprise:
            self.log_temperature = Parameter(torch.empty(self.scan_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        super().reset_parameters()
        torch.nn.init.zeros_(self.delta_bias[-1])  # of beta, which starts in the middle
        if self.log_temperature is not None:
            torch.nn.init.zeros_(self.log_temperature)

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
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The node features.
            edge_index (torch.Tensor or SparseTensor): The edge indices.
            edge_attr (torch.Tensor, optional): The edge features. Ignored without
                :obj:`edge_dim`. (default: :obj:`None`)
            batch (torch.Tensor, optional): The graph of each node. A hint for speed:
                outputs don't depend on it. (default: :obj:`None`)

        Raises:
            TypeError: If an argument has a wrong type or dtype.
            ValueError: If something does not fit the layer, or see
                :func:`~pyg_chimera.ops.delta_scan`.
        """
        check_nodes(x)
        check_batch(batch)
        num_nodes = x.size(0)
        edge_index, edge_attr = as_edges(edge_index, edge_attr, num_nodes, self.flow)
        query, key, value = self.project(x, self.over_edges(edge_index))
        *deltas, beta = (self.selectivities(x) + self.delta_bias).unbind(1)
        edge = self.edge_selectivity(edge_attr, edge_index.size(1))
        weight = self._transition(
            edge_index, num_nodes, [F.softplus(y) for y in deltas], edge
        )
        surprise = None
        if self.log_temperature is not None:
            surprise = at_least_float32(self.log_temperature).exp()
        y = delta_scan(
            unit(query), unit(key), value, (1 + self.reflections) * beta.sigmoid(),
            edge_index, self.explained(weight, num_nodes), batch, surprise=surprise,
            form=self.form, backend=self.backend,
        )  # fmt: skip
        return self.output(y, x, value)

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
        parts = [node[edge_index[1]], node[edge_index[0]]]
        if edge is not None:
            parts.append(edge)
        weight, _ = dag_transition(edge_index, num_nodes, mean(parts))
        return weight


def unit(x: Tensor) -> Tensor:
    """Vectors of length one, large or small as those of x may be; of zeros, any one."""
    x = at_least_float32(x)
    scale = x.detach().abs().amax(-1, keepdim=True)  # which no direction depends on
    nothing = scale < 1e-30
    x = x / scale.masked_fill(nothing, 1)
    return F.normalize(x.masked_fill(nothing, 1), dim=-1)
