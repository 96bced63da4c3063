import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_chimera.nn.conv._gated_block import Projected
from pyg_chimera.nn.conv._grid import OnGrids, check_grid
from pyg_chimera.nn.conv._window import Filter
from pyg_chimera.nn.conv.chimera_dag_conv import ChimeraDAGConv
from pyg_chimera.ops import grid_dag_scan, grid_transition
from pyg_chimera.ops.structure.grid import grid_parents
from pyg_chimera.ops.structure.parent_scale import grid_parent_scale

__all__ = ["ChimeraGridConv"]


class ChimeraGridConv(OnGrids, ChimeraDAGConv):
    r"""The Chimera layer for images and sequences from `"Chimera: State Space Models
    Beyond Sequences" <https://arxiv.org/abs/2510.12111>`_ (Sections 4.1.1 and 5).

    The nodes of each graph form a grid, row by row. It has four DAGs: right and down,
    left and up, right and up, left and down. On these, the layer is
    :class:`~pyg_chimera.nn.ChimeraDAGConv`, with the same parameters. A sequence is a
    grid of one row with two DAGs, forwards and backwards, or with :obj:`num_dags=1`
    only the former, as in a causal model.

    No graph is built or searched, and edges are not read.

    Args:
        in_channels, out_channels, heads, state_channels: As in
            :class:`~pyg_chimera.nn.ChimeraDAGConv`.
        num_dags (int, optional): How many of the four DAGs to use: 1, 2 or 4. (default:
            :obj:`4`)
        window (tuple[int, int], optional): The rows and columns of a depthwise
            convolution of :math:`\mathbf{B}, \mathbf{C}, \mathbf{V}`, before SiLU,
            around each node, or with :obj:`num_dags=1` above and to the left of it.
            With :obj:`None`, there is none. (default: :obj:`(3, 3)`)
        share (str, optional): As in :class:`~pyg_chimera.nn.ChimeraDAGConv`. (default:
            :obj:`"none"`)
        **kwargs (optional): Further arguments of
            :class:`~pyg_chimera.nn.ChimeraDAGConv`, except :obj:`edge_dim` and
            :obj:`local_conv`.

    Shapes:
        - **input:**
          node features :math:`(|\mathcal{V}|, F_{in})`, grid after grid,
          batch vector :math:`(|\mathcal{V}|)`, sorted *(optional)*,
          heights and widths :math:`(B)`, or one number each if grids are of one size
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        ValueError: If sizes are not divisible as required, or an option is unknown.

    Example:
        >>> conv = ChimeraGridConv(16, 32, heads=2)
        >>> conv(torch.randn(6, 16), height=2, width=3).shape
        torch.Size([6, 32])
    """

    forward = OnGrids.forward  # type: ignore[assignment]
    step = OnGrids.step

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int | None = None,
        state_channels: int = 16,
        *,
        num_dags: int = 4,
        window: tuple[int, int] | None = (3, 3),
        share: str = "none",
        **kwargs: Any,
    ) -> None:
        check_grid(num_dags, kwargs)
        if kwargs.get("edge_dim") is not None:
            raise ValueError(
                "'edge_dim' must be None for grids, whose edges are not looked at; "
                "'ChimeraDAGConv' takes DAGs with edge features"
            )
        super().__init__(
            in_channels,
            out_channels,
            heads,
            state_channels,
            num_dags=num_dags,
            share=share,
            order=None,
            local_conv=False,
            **kwargs,
        )
        lins = (self.lin_value, self.lin_key, self.lin_query)
        self._add_window(window, sum(lin.out_channels for lin in lins))
        self._reset_filters()

    def _mix(
        self,
        x: Tensor,
        filtered: Filter | None,
        height: int | Tensor,
        width: int | Tensor,
    ) -> Tensor:
        nodes = self.project(x, filtered)
        query, key, value = self.query_key_value(nodes)
        copies = (y.unflatten(1, (-1, self.groups)).unbind(1) for y in (query, key))
        gates = [gate.unbind(1) for gate in self._gates(nodes, height, width)]
        mixed = []
        for dags, q, k in zip(self._dags_of_copies(), *copies, strict=True):
            source, transition = (torch.stack([g[d] for d in dags], 1) for g in gates)
            inputs = q, k, value, source, transition, height, width
            options = {"form": self.form, "backend": self.backend}
            mixed.append(grid_dag_scan(*inputs, orientations=dags, **options))
        return self.output(sum(mixed[1:], mixed[0]), nodes)

    def _dags_of_copies(self) -> list[list[int]]:
        """The DAGs of each of the different projections."""
        copy = self._copy_of_dags()
        return [
            [d for d, other in enumerate(copy) if other == c]
            for c in range(len(set(copy)))
        ]

    def _gates(
        self, nodes: Projected, height: int | Tensor, width: int | Tensor
    ) -> tuple[Tensor, Tensor]:
        """Source [V, D, heads] and transition [V, D, 2, heads]."""
        delta = nodes.delta
        grids = height, width, self.num_dags, delta.size(0)
        parent = grid_parents(*grids).to(delta.device)
        node = F.softplus(delta + self.delta_bias)
        edge = node.unsqueeze(2).expand(-1, -1, 2, -1)
        if self.selectivity == "mean":
            before = node.flatten(0, 1).index_select(0, parent.flatten())
            edge = (edge + before.view_as(edge)) / 2
        root = node if self.roots == "write" else None
        scale = grid_parent_scale(*grids)
        transition, source = grid_transition(parent, edge, root, scale)
        return source / math.sqrt(self.num_dags), transition

    def _extend(
        self, x: Tensor, filtered: Filter | None, state: Any
    ) -> tuple[Tensor, Any]:
        before, hidden = (0.0, 0.0) if state is None else state
        nodes = self.project(x, filtered)
        delta = F.softplus(nodes.delta + self.delta_bias).squeeze(1)
        if state is None:
            gate = delta if self.roots == "write" else torch.zeros_like(delta)
        else:
            gate = delta if self.selectivity == "target" else (delta + before) / 2
            hidden = torch.exp(-gate)[..., None, None] * hidden
        query, key, value = self.query_key_value(nodes, gate)
        query, key = (
            y.repeat_interleave(self.heads // self.groups, 1) for y in (query, key)
        )
        hidden = hidden + key.unsqueeze(3) * value.unsqueeze(2)
        out = torch.einsum("bhn,bhnp->bhp", query, hidden)
        return self.output(out, nodes), (delta, hidden)
