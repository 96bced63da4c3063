import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear, Parameter, Sequential, SiLU
from torch_geometric.nn.inits import reset
from torch_geometric.typing import Adj

from pyg_chimera.nn._inputs import at_least_float32
from pyg_chimera.nn.conv._gated_block import ChimeraBlock, gated_value, mean_of_ends
from pyg_chimera.nn.conv._init import softplus_
from pyg_chimera.nn.conv.gated_delta_conv import unit
from pyg_chimera.ops import dag_scan, dag_transition, delta_scan
from pyg_chimera.ops.common.checks import check_flag
from pyg_chimera.ops.structure import parent_scale

__all__ = ["HierarchicalMemoryConv"]

#: The share of each level that remains after a step along a path, before training. The
#: decays of levels are the first rows of selectivities.
_DECAYS = (0.8, 0.99, 0.999)
_LEVELS = len(_DECAYS)


class HierarchicalMemoryConv(ChimeraBlock):
    r"""Memories of three time scales along a directed acyclic graph, and a router that
    weighs what is read from them: a memory of the last few nodes, one of many important
    nodes, and one of what was surprising. The ideas are from `"HGRN2"
    <https://arxiv.org/abs/2404.07904>`_, where each layer forgets more slowly than the
    one before it, and from `"Titans: Learning to Memorize at Test Time"
    <https://arxiv.org/abs/2501.00663>`_; the layer is that of neither.

    .. math::
        \mathbf{F}_i &= \sum_{j \to i} A^{(1)}_{ij} \mathbf{F}_j +
        s^{(1)}_i \mathbf{k}_i \mathbf{v}_i^{\top}, \qquad
        \mathbf{G}_i = \sum_{j \to i} A^{(2)}_{ij} \mathbf{G}_j +
        s^{(2)}_i r_i \mathbf{k}_i \mathbf{v}_i^{\top}, \\
        \mathbf{S}_i &= \mathbf{S}'_i + \beta_i \sigma_i \boldsymbol{\phi}_i
        (\mathbf{v}_i - \mathbf{S}_i'^{\top} \boldsymbol{\phi}_i)^{\top}, \qquad
        \mathbf{S}'_i = \sum_{j \to i} A^{(3)}_{ij} \mathbf{S}_j, \\
        \mathbf{y}_i &= w_{i1} \mathbf{F}_i^{\top} \mathbf{q}_i +
        w_{i2} \mathbf{G}_i^{\top} \mathbf{q}_i +
        w_{i3} \mathbf{S}_i^{\top} \boldsymbol{\psi}_i

    The fast and the slow memory are those of :class:`~pyg_chimera.nn.ChimeraDAGConv`;
    what the slow one takes up is gated by its importance :math:`r_i`, a sigmoid of the
    node. The third is a network of two layers, :math:`\mathbf{S}^{\top}
    \boldsymbol{\phi}(\mathbf{k})`. Each node updates the outer layer by a step of
    gradient descent on the error of its prediction, :math:`\| \mathbf{S}^{\top}
    \boldsymbol{\phi}_i - \mathbf{v}_i \|^2 / 2`; the more surprising the node, the
    larger the step, see :func:`~pyg_chimera.ops.delta_scan`. The inner layer, which
    maps keys to :math:`\boldsymbol{\phi}_i` and queries to :math:`\boldsymbol{\psi}_i`,
    is learned in training. The weights :math:`\mathbf{w}_i` of the router are a softmax
    of the node. The gated block around all this is that of the Chimera layers.

    Args:
        in_channels, out_channels, heads, state_channels, local_conv: As in
            :class:`~pyg_chimera.nn.ChimeraConv`.
        **kwargs (optional): The options :obj:`groups`, :obj:`edge_dim` (on whose
            features the decay of all levels along an edge then depends), :obj:`gated`,
            :obj:`bias` and :obj:`backend` of :class:`~pyg_chimera.nn.ChimeraConv`, and
            those of :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:**
          node features :math:`(|\mathcal{V}|, F_{in})`,
          edge indices :math:`(2, |\mathcal{E}|)` or a sparse adjacency,
          edge features :math:`(|\mathcal{E}|, D)` *(optional)*,
          batch vector :math:`(|\mathcal{V}|)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        ValueError: If sizes are not divisible as required.

    Example:
        >>> conv = HierarchicalMemoryConv(16, 32, heads=2)
        >>> edge_index = torch.tensor([[0, 1, 0], [1, 2, 2]])
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
        local_conv: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, heads, state_channels, **kwargs)
        check_flag("local_conv", local_conv)
        self.add_parameters(2 * _LEVELS + 2, kernel=1 + local_conv)
        self.features = Sequential(
            Linear(state_channels, 2 * state_channels),
            SiLU(),
            Linear(2 * state_channels, state_channels),
        )
        self.log_temperature = Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        super().reset_parameters()
        reset(self.features)
        lost = torch.tensor([[-math.log(x)] for x in _DECAYS])
        softplus_(self.delta_bias[:_LEVELS], lost.expand(-1, self.heads))
        torch.nn.init.zeros_(self.delta_bias[_LEVELS:])  # half open, evenly routed
        if self.edge_bias is not None:
            softplus_(self.edge_bias, torch.ones_like(self.edge_bias))
        torch.nn.init.zeros_(self.log_temperature)

    def forward(
        self,
        x: Tensor,
        edge_index: Adj,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
    ) -> Tensor:
        r"""Runs the forward pass of the module. Takes arguments of
        :meth:`ChimeraConv.forward <pyg_chimera.nn.ChimeraConv.forward>`, for edges of
        a DAG.

        Raises:
            TypeError: If an argument has the wrong type or dtype.
            ValueError: If an argument does not fit the layer, or as in
                :func:`~pyg_chimera.ops.dag_scan`.
            CycleError: If there is a cycle.
        """
        edge_index, edge = self.edges(x, edge_index, edge_attr, batch)
        num_nodes, heads = x.size(0), self.heads
        query, key, value = self.project(x, self.over_edges(edge_index))
        gates = self.selectivities(x) + self.delta_bias
        node = F.softplus(gates[:, :_LEVELS]).flatten(1)  # [V, levels * heads]
        importance, beta = gates[:, _LEVELS : _LEVELS + 2].sigmoid().unbind(1)
        router = gates[:, _LEVELS + 2 :].transpose(0, 1).softmax(0)

        delta = mean_of_ends(edge_index, node, node)
        if edge is not None:  # a common factor keeps the order of levels
            delta = delta * edge.repeat(1, _LEVELS)
        scale = parent_scale(edge_index, num_nodes)
        weight, gate = dag_transition(edge_index, num_nodes, delta, node, scale)
        weight = self.explained(weight, num_nodes)

        # The fast and the slow level are one scan, with separate groups.
        fast, slow = gate[:, : 2 * heads].split(heads, dim=1)
        written = [gated_value(value, fast), gated_value(value, slow * importance)]
        scanned = dag_scan(
            query.repeat(1, 2, 1), key.repeat(1, 2, 1), torch.cat(written, dim=1),
            edge_index, weight[:, : 2 * heads], batch, backend=self.backend,
        )  # fmt: skip
        query, key = (unit(self.features(y.to(x.dtype))) for y in (query, key))
        recalled = delta_scan(
            query, key, value, beta, edge_index, weight[:, 2 * heads :], batch,
            surprise=at_least_float32(self.log_temperature).exp(), backend=self.backend,
        )  # fmt: skip
        levels = torch.stack([*scanned.split(heads, dim=1), recalled])
        y = (router.to(levels.dtype).unsqueeze(-1) * levels).sum(0)
        return self.output(y, x, value)
