import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn.dense.linear import Linear

from pyg_chimera.nn._inputs import check_channels
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
        in_channels (int): Size of each input sample, or :obj:`-1` to derive the size
            from the first input.
        hidden_channels (int, optional): Size of :math:`\mathbf{W}_1 \mathbf{x}`.
            (default: :obj:`None`, 8/3 of :obj:`out_channels`, rounded up to a multiple
            of 8, which gives as many parameters as a two-layer network with
            :obj:`4 * out_channels` hidden channels)
        out_channels (int, optional): Size of each output sample. (default:
            :obj:`in_channels`)
        dropout (float, optional): Dropout probability of the hidden channels.
            (default: :obj:`0.0`)

    Shapes:
        - **input:** features :math:`(*, F_{in})`
        - **output:** features :math:`(*, F_{out})`

    Raises:
        ValueError: If a size is not positive.

    Example:
        >>> SwiGLU(64)
        SwiGLU(64, 176, 64)
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int | None = None,
        out_channels: int | None = None,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        in_channels, out_channels, _ = check_channels(in_channels, out_channels)
        if hidden_channels is None:
            hidden_channels = 8 * -(-out_channels // 3)
        hidden_channels = check_integer("hidden_channels", hidden_channels, 1)
        self.in_channels = in_channels
        self.hidden_channels = hidden_channels
        self.out_channels = out_channels
        self.dropout = dropout
        self.lin_in = Linear(in_channels, 2 * hidden_channels, bias=False)
        self.lin_out = Linear(hidden_channels, out_channels, bias=False)

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
        return (
            f"{self.__class__.__name__}({self.lin_in.in_channels}, "
            f"{self.hidden_channels}, {self.out_channels})"
        )
