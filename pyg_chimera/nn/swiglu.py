import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.dense.linear import Linear

from pyg_chimera.ops.common.checks import check_integer

__all__ = ["SwiGLU"]


class SwiGLU(torch.nn.Module):
    r"""The gated feed-forward network of `"GLU Variants Improve Transformer"
    <https://arxiv.org/abs/2002.05202>`_ (Equation 6), applied to each node separately.

    .. math::
        \mathbf{x}' = \mathbf{W}_2 \left( \text{SiLU}(\mathbf{W}_1 \mathbf{x}) \odot
        \mathbf{W}_3 \mathbf{x} \right)

    As in the paper, there are no biases. Pass it to :class:`~pyg_chimera.nn.GPSLayer`
    as :obj:`mlp`.

    Args:
        channels (int): Size of each input and output sample.
        hidden_channels (int, optional): Size of :math:`\mathbf{W}_1 \mathbf{x}`.
            (default: :obj:`None`, 8/3 of :obj:`channels`, rounded up to a multiple of
            8, which gives as many parameters as a two-layer network with
            :obj:`4 * channels` hidden channels)
        dropout (float, optional): Dropout probability of the hidden channels.
            (default: :obj:`0.0`)

    Shapes:
        - **input** and **output:** features :math:`(*, F)`

    Raises:
        ValueError: If a size is not positive.

    Example:
        >>> SwiGLU(64)
        SwiGLU(64, 176)
    """

    def __init__(
        self,
        channels: int,
        hidden_channels: int | None = None,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        channels = check_integer("channels", channels, 1)
        if hidden_channels is None:
            hidden_channels = 8 * -(-channels // 3)
        hidden_channels = check_integer("hidden_channels", hidden_channels, 1)
        self.channels = channels
        self.hidden_channels = hidden_channels
        self.dropout = dropout
        self.lin_in = Linear(channels, 2 * hidden_channels, bias=False)
        self.lin_out = Linear(hidden_channels, channels, bias=False)

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        self.lin_in.reset_parameters()
        self.lin_out.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The features.
        """
        gate, value = self.lin_in(x).chunk(2, dim=-1)
        hidden = F.dropout(F.silu(gate) * value, self.dropout, self.training)
        return self.lin_out(hidden)

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.channels}, {self.hidden_channels})"
