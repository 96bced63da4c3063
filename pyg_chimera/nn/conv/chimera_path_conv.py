import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.typing import Adj

from pyg_chimera.nn.conv._gated_block import ChimeraBlock, gated_value, mean_of_ends
from pyg_chimera.nn.conv._init import softplus_
from pyg_chimera.ops import balanced_path_transition, resolvent_mix
from pyg_chimera.ops.common.checks import check_flag

__all__ = ["ChimeraPathConv"]


class ChimeraPathConv(ChimeraBlock):
    r"""The Chimera layer for undirected paths, such as text or protein chains, from
    `"Chimera: State Space Models Beyond Sequences" <https://arxiv.org/abs/2510.12111>`_
    (Appendix B.1): exact in both directions at once, in time linear in the number of
    nodes.

    It is :class:`~pyg_chimera.nn.ChimeraConv` with the transitions of
    :func:`~pyg_chimera.ops.path_transition`, which bound the products :math:`A_{ij}
    A_{ji}` instead of the row sums, so that a signal can keep its size along the whole
    path.

    Args:
        in_channels, out_channels, heads, state_channels, local_conv, qk_norm: As in
            :class:`~pyg_chimera.nn.ChimeraConv`.
        **kwargs (optional): The options :obj:`groups`, :obj:`edge_dim`, :obj:`gated`,
            :obj:`bias`, :obj:`reach` (here not limited), :obj:`form` and :obj:`backend`
            of :class:`~pyg_chimera.nn.ChimeraConv`, and those of
            :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:**
          node features :math:`(|\mathcal{V}|, F_{in})`,
          edge indices :math:`(2, |\mathcal{E}|)` or a sparse adjacency, each edge in
          both directions,
          edge features :math:`(|\mathcal{E}|, D)` *(optional)*,
          batch vector :math:`(|\mathcal{V}|)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        ValueError: If sizes are not divisible as required, or an option is unknown.

    Example:
        >>> conv = ChimeraPathConv(16, 32, heads=2)
        >>> edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        >>> conv(torch.randn(3, 16), edge_index).shape
        torch.Size([3, 32])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int | None = None,
        state_channels: int = 16,
        *,
        local_conv: bool = False,
        qk_norm: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, heads, state_channels, **kwargs)
        check_flag("local_conv", local_conv)
        check_flag("qk_norm", qk_norm)
        self.qk_norm = qk_norm
        self.add_parameters(4, kernel=1 + local_conv)
        self.reset_parameters()

    def _set_reach(self, steps: Tensor) -> None:
        psi = -2 * torch.sinh(1 / steps).log() + 2 * self._start_edges()
        softplus_(self.delta_bias[2], psi.clamp(min=0.01))
        softplus_(self.delta_bias[3], self._loudness(steps))

    def forward(
        self,
        x: Tensor,
        edge_index: Adj,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        rank: Tensor | None = None,
    ) -> Tensor:
        r"""Runs the forward pass of the module. Takes arguments of
        :meth:`ChimeraConv.forward <pyg_chimera.nn.ChimeraConv.forward>`, for edges of
        disjoint paths in both directions.

        Raises:
            TypeError: If an argument has the wrong type or dtype.
            ValueError: If an edge has no reverse, the graph is not made of paths, or as
                in :func:`~pyg_chimera.ops.resolvent_mix`.
        """
        edge_index, edge = self.edges(x, edge_index, edge_attr, batch)
        num_nodes = x.size(0)
        query, key, value = self.project(x, self.over_edges(edge_index))

        gates = self.selectivities(x) + self.delta_bias
        target, source, psi = F.softplus(gates[:, :3]).unbind(1)
        log_gate = log_softplus(gates[:, 3])
        log_weight = -mean_of_ends(edge_index, target, source, edge)
        log_value = value.detach().abs().amax(2).clamp(min=math.exp(-40)).log()
        weight, scale = balanced_path_transition(
            edge_index, num_nodes, log_weight, psi, log_gate.detach() + log_value
        )
        y = resolvent_mix(
            query, key, gated_value(value, torch.exp(log_gate - scale)), edge_index,
            self.explained(weight, num_nodes), batch, rank=rank, form=self.form,
            backend=self.backend,
        )  # fmt: skip
        return self.output(y, x, value, scale)


def log_softplus(x: Tensor) -> Tensor:
    """The logarithm of softplus(x), which itself underflows."""
    low = x < -20
    return torch.where(low, x, F.softplus(x.masked_fill(low, 0)).log())
