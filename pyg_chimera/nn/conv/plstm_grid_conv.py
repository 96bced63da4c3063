from typing import Any

import torch
from torch import Tensor
from torch_geometric.nn.dense.linear import Linear

from pyg_chimera.nn.conv._grid import OnGrids, check_grid
from pyg_chimera.nn.conv._plstm_block import PLSTMBlock, Projected
from pyg_chimera.nn.conv._window import Filter
from pyg_chimera.ops import grid_scan
from pyg_chimera.ops.grid_gates import Layout, grid_gates

__all__ = ["PLSTMGridConv"]


class PLSTMGridConv(OnGrids, PLSTMBlock):
    r"""The pLSTM layer for grids and sequences from `"pLSTM: parallelizable Linear
    Source Transition Mark networks" <https://arxiv.org/abs/2506.11997>`_ (Section 4.3).

    The nodes of each graph form a grid, row by row. It has four DAGs: right and down,
    left and up, right and up, left and down. Each has its own gates, and their outputs
    are averaged. The recurrence of :class:`~pyg_chimera.nn.PLSTMConv` runs on each of
    them, with gates of the node where an edge begins (source) or ends (mark), or which
    two edges have in common (transitions):

    * :obj:`mode="P"`: :math:`T(\cdot \rightarrow \textrm{right}) = g \, a` and
      :math:`T(\cdot \rightarrow \textrm{down}) = g \, (1 - a)` with a decay :math:`g =
      \tanh(5 \cdot)` and an angle :math:`a = \sigma(\cdot)`, which is initially
      different for each head.
    * :obj:`mode="D"`: :math:`T = g`, and zero from down to right.

    No graph is built, and edges are not read. For edge features or state tracking on a
    grid, pass its four DAGs to :class:`~pyg_chimera.nn.PLSTMConv`.

    Args:
        in_channels, out_channels, heads, mode: As in
            :class:`~pyg_chimera.nn.PLSTMConv`.
        num_dags (int, optional): How many of the four DAGs to use: 1, 2 or 4. For a
            sequence, under :obj:`mode="D"`, 2 run forwards and backwards, and 1 runs
            forwards only. (default: :obj:`4`)
        window (tuple[int, int], optional): The rows and columns of a depthwise
            convolution of :math:`\mathbf{q}, \mathbf{k}, \mathbf{v}` around each node,
            or with :obj:`num_dags=1` above and to the left of it. With :obj:`None`,
            there is none. (default: :obj:`(3, 3)`)
        normalization (str, optional): Under :obj:`"P"`: whether :obj:`a` and :math:`1 -
            a` are the shares of the edges that leave a node, :obj:`"column"`, or of
            those that enter it, :obj:`"row"`. (default: :obj:`"column"`)
        gate_biases (Sequence[float], optional): The initial values of the source, mark
            and direct gates, before the sigmoid. In the paper they start nearly closed,
            at :obj:`(-4, -4, -6)`, and learning begins with a plateau. (default:
            :obj:`(0, 0, -3)`)
        **kwargs (optional): The options :obj:`state_channels`, :obj:`reach`,
            :obj:`bias`, :obj:`form` (or :obj:`"mask"`, as in
            :func:`~pyg_chimera.ops.grid_scan`) and :obj:`backend` of
            :class:`~pyg_chimera.nn.PLSTMConv`, and those of
            :class:`torch_geometric.nn.conv.MessagePassing`.

    Shapes:
        - **input:**
          node features :math:`(|\mathcal{V}|, F_{in})`, grid after grid,
          batch vector :math:`(|\mathcal{V}|)`, sorted *(optional)*,
          heights and widths :math:`(B)`, or one number each if grids are of one size
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        ValueError: If sizes are not divisible as required, or an option is unknown.

    Example:
        >>> conv = PLSTMGridConv(16, 32, heads=2)
        >>> conv(torch.randn(6, 16), height=2, width=3).shape
        torch.Size([6, 32])
    """

    forward = OnGrids.forward
    step = OnGrids.step

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int | None = None,
        state_channels: int | None = None,
        *,
        mode: str = "P",
        num_dags: int = 4,
        window: tuple[int, int] | None = (3, 3),
        **kwargs: Any,
    ) -> None:
        check_grid(num_dags, kwargs)
        super().__init__(
            in_channels, out_channels, heads, state_channels, mode=mode, **kwargs
        )
        heads = self.heads
        # Gates of a node in an orientation: direct, source, mark, decay, angle.
        self._layout = Layout(heads, mode == "P", self.normalization == "column")
        biased = self._layout.kinds
        self.add_parameters(num_dags, biased, sum(biased))
        self.num_dags = num_dags
        channels = 2 * heads * self.state_channels + self.out_channels
        self._add_window(window, channels)
        self.lin_out = Linear(self.out_channels, self.out_channels, bias=self.bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        super().reset_parameters()
        if self.mode == "P":  # heads prefer different directions
            spread = torch.linspace(-2, 2, self.heads) if self.heads > 1 else 0.0
            self.gate_bias.data[:, -self.heads :] = spread
        self._reset_filters()

    def _decays_of_heads(self, values: Tensor) -> Tensor:
        return values.repeat(self._biased[3] // self.heads)

    def _mix(
        self,
        x: Tensor,
        filtered: Filter | None,
        height: int | Tensor,
        width: int | Tensor,
    ) -> Tensor:
        options = {"form": self.form, "backend": self.backend}
        nodes = self.project(x, filtered)
        inputs = *self.query_key_value(nodes), *self._gates(nodes)
        return self.output(grid_scan(*inputs, height, width, **options), x)

    def _extend(
        self, x: Tensor, filtered: Filter | None, state: Any
    ) -> tuple[Tensor, Any]:
        nodes = self.project(x, filtered)
        query, key, value = self.query_key_value(nodes)
        source, transition, mark, direct = self._gates(nodes)
        # The gates of edges to the right: a sequence is a single row.
        source, mark, transition = (
            gate[:, 0, 0][..., None, None]
            for gate in (source, mark, transition[:, :, 0])
        )
        written = key.unsqueeze(3) * value.unsqueeze(2)
        read = direct[..., None, None] * written
        if state is not None:
            read = read + mark * state
        out = torch.einsum("bhn,bhnp->bhp", query, read)
        state = source * written + (0 if state is None else transition * state)
        return self.output(out, x), state

    def _gates(self, nodes: Projected) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Source [V, D, 2, heads], transition [V, D, 2, 2, heads], mark, direct."""
        return grid_gates(nodes.gate, self.gate_bias, self._layout)
