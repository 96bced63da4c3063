"""The common part of layers on grids."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.typing import Adj

from pyg_chimera.nn._inputs import (
    check_grids,
    check_inputs,
    check_no_edge_attr,
)
from pyg_chimera.nn.conv._window import (
    Continued,
    check_window,
    over_grids,
    reset_window_,
)


def check_grid(num_dags: int, kwargs: dict[str, Any]) -> None:
    """Checks the options of a layer on grids."""
    if num_dags not in (1, 2, 4):
        raise ValueError(f"'num_dags' must be 1, 2 or 4 of a grid, got {num_dags}")
    if kwargs.get("flow", "source_to_target") != "source_to_target":
        raise ValueError(
            "'flow' must be 'source_to_target' for grids, whose edges are not "
            f"looked at, got {kwargs['flow']!r}; num_dags=2 has both directions"
        )


class OnGrids:
    """A layer on the nodes of grids, row by row; edges are not read.

    Layers define `_mix`, which returns their output, given a filter over windows of
    nodes and the sizes of grids; and `_extend`, which returns that of one more node of
    each sequence, given its filter and a state (None at first), and the next state.
    They name `forward` and `step` again, for the documentation.
    """

    in_channels: int
    num_dags: int
    backend: str
    explain: bool
    local_weight: Parameter | None
    _mix: Any
    _extend: Any

    def _add_window(self, window: Any, channels: int) -> None:
        """Adds filters over a window for the channels of the projections."""
        window = check_window(window)
        self.local_weight = None
        if window is not None:
            self.local_weight = Parameter(torch.empty(channels, *window))

    def _reset_filters(self) -> None:
        if self.local_weight is not None:
            reset_window_(self.local_weight, causal=self.num_dags == 1)

    def forward(
        self,
        x: Tensor,
        edge_index: Adj | None = None,
        edge_attr: None = None,
        batch: Tensor | None = None,
        height: int | Tensor | None = None,
        width: int | Tensor | None = None,
    ) -> Tensor:
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The node features.
            edge_index (torch.Tensor or SparseTensor, optional): Not used; accepted for
                containers that call all their layers in the same way. (default:
                :obj:`None`)
            edge_attr (None, optional): Not supported, likewise. (default: :obj:`None`)
            batch (torch.Tensor, optional): The graph of each node, used to check the
                sizes. (default: :obj:`None`)
            height (int or torch.Tensor): The number of rows, for all grids or for each.
            width (int or torch.Tensor): The number of columns, for all grids or for
                each.

        Raises:
            TypeError: If an argument has the wrong type or dtype.
            ValueError: If sizes are missing or do not match the nodes.
        """
        check_inputs(x, self.in_channels, batch)
        check_no_edge_attr(self, edge_attr)
        if self.explain:
            raise ValueError("Edge masks explain edges, which grids do not look at")
        height, width = check_grids(x, batch, height, width)
        causal = self.num_dags == 1
        filtered = over_grids(self.local_weight, height, width, causal, self.backend)
        return self._mix(x, filtered, height, width)

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        r"""Extends each sequence by one node, as
        :meth:`GPSLayer.step <pyg_chimera.nn.GPSLayer.step>`, in time independent of how
        many nodes came before. Requires :obj:`num_dags=1`.

        Raises:
            ValueError: If the layer is not causal.
        """
        check_inputs(x, self.in_channels)
        if self.num_dags != 1:
            raise ValueError(
                f"Sequences are continued with num_dags=1, got {self.num_dags}"
            )
        state, seen = (None, None) if state is None else state
        window = None
        if self.local_weight is not None:
            window = Continued(self.local_weight, seen)
        out, state = self._extend(x, window, state)
        return out, (state, None if window is None else window.seen)
