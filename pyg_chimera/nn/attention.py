from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Linear

from pyg_chimera.nn._inputs import heads_of
from pyg_chimera.nn._rotary import rotary_angles, rotate
from pyg_chimera.ops.common.checks import check_integer, check_option, check_shape
from pyg_chimera.ops.common.memory import check_memory

__all__ = ["SelfAttention"]


class SelfAttention(torch.nn.Module):
    r"""Softmax attention between all nodes of each graph, `"Attention Is All You Need"
    <https://arxiv.org/abs/1706.03762>`_, as a mixer for
    :class:`~pyg_chimera.nn.GPSLayer`: :class:`torch.nn.MultiheadAttention`, with rotary
    positions, from `"RoFormer" <https://arxiv.org/abs/2104.09864>`_, and causal masks.

    .. math::
        \mathbf{x}'_i = \mathbf{W}_o \sum_j \textrm{softmax}_j \left(
        \frac{(\mathbf{R}_i \mathbf{q}_i)^{\top} \mathbf{R}_j \mathbf{k}_j}
        {\sqrt{P}} \right) \mathbf{v}_j

    with rotations :math:`\mathbf{R}` of pairs of channels by the node's position times
    :math:`10000^{-2 k / P}`.

    Args:
        channels (int): Size of each input and output sample.
        heads (int, optional): The number of heads; divides :obj:`channels`.
            (default: the largest of 4, 2 and 1 that does)
        rotary (str, optional): The positions to rotate by: those in a
            :obj:`"sequence"`, with nodes in order, or columns and rows of a
            :obj:`"grid"`, with nodes row by row and half of the channels for each. With
            :obj:`None`, attention ignores positions. (default: :obj:`None`)
        causal (bool, optional): If set to :obj:`True`, nodes attend to earlier ones and
            themselves only. (default: :obj:`False`)
        bias (bool, optional): If :obj:`False`, projections have no additive bias.
            (default: :obj:`True`)

    Shapes:
        - **input:**
          padded nodes :math:`(B, N, F)`,
          mask of the actual nodes :math:`(B, N)`,
          widths :math:`(B)` *(for a grid)*
        - **output:** :math:`(B, N, F)`

    Raises:
        ValueError: If :obj:`heads` does not divide :obj:`channels`, or with
            :obj:`rotary` the channels of a head are not a multiple of 2, or of 4 for a
            grid; in the forward method, if the width of a grid is missing.
    """

    def __init__(
        self,
        channels: int,
        heads: int | None = None,
        *,
        rotary: str | None = None,
        causal: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        check_option("rotary", rotary, (None, "sequence", "grid"))
        multiple = {None: 1, "sequence": 2, "grid": 4}[rotary]
        channels = check_integer("channels", channels, 1)
        heads = check_integer("heads", heads_of(channels, heads, multiple), 1)
        if channels % heads != 0:
            raise ValueError(f"'heads' must divide 'channels', got {heads}, {channels}")
        if channels // heads % multiple != 0:
            raise ValueError(
                f"The {channels // heads} channels of a head must be a multiple of "
                f"{multiple} for rotary={rotary!r}"
            )
        self.channels = channels
        self.heads = heads
        self.rotary = rotary
        self.causal = causal
        self.lin_in = Linear(channels, 3 * channels, bias=bias)
        self.lin_out = Linear(channels, channels, bias=bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        for lin in (self.lin_in, self.lin_out):
            torch.nn.init.xavier_uniform_(lin.weight)
            if lin.bias is not None:
                torch.nn.init.zeros_(lin.bias)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, width: int | Tensor | None = None
    ) -> Tensor:
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The nodes of each graph, padded.
            mask (torch.Tensor, optional): Which of them are actual nodes; without it,
                all are. (default: :obj:`None`)
            width (int or torch.Tensor, optional): The number of columns of each grid.
                (default: :obj:`None`)
        """
        if x.dim() != 3 or x.size(2) != self.channels:
            raise ValueError(
                f"'x' must be [graphs, nodes, {self.channels}], padded, as by a "
                f"GPSLayer for its mixer, got {list(x.shape)}"
            )
        if mask is not None and mask.dtype != torch.bool:
            raise TypeError(
                f"'mask' must be bool, True for actual nodes, got {mask.dtype}"
            )
        if mask is not None:
            check_shape("mask", mask, "[graphs, nodes]", list(x.shape[:2]))
        query, key, value = self.project(x)
        if self.rotary is not None:
            places = self._places(x, width)
            query, key = _rotate(query, places), _rotate(key, places)
        seen = None if mask is None else mask[:, None, None, :]
        causal = self.causal
        if causal and seen is not None:
            if not torch.compiler.is_compiling():  # where numbers are symbols
                what = f"A causal mask of {x.size(1):,} nodes"
                check_memory(what, x.size(1) ** 2, "use shorter sequences", x.device)
            past = x.new_ones(x.size(1), x.size(1), dtype=torch.bool).tril()
            seen, causal = seen & past, False
        return self.attend(query, key, value, seen, causal)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, [B, heads, N, P]."""
        query, key, value = (
            y.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for y in self.lin_in(x).chunk(3, dim=-1)
        )
        return query, key, value

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        seen: Tensor | None = None,
        causal: bool = False,
    ) -> Tensor:
        """The output, [B, N, F], where nodes see those of a mask, or earlier ones."""
        out = F.scaled_dot_product_attention(query, key, value, seen, is_causal=causal)
        return self.lin_out(out.transpose(1, 2).flatten(2))

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        r"""Extends each sequence by one node, as
        :meth:`GPSLayer.step <pyg_chimera.nn.GPSLayer.step>`. The state holds the keys
        and values of earlier nodes. Requires causal attention.

        Raises:
            ValueError: If attention is not causal, or is on grids.
        """
        if not self.causal or self.rotary == "grid":
            raise ValueError(
                "Sequences are continued with causal=True, and rotary=None or "
                f"'sequence', got {self.causal} and {self.rotary!r}"
            )
        query, key, value = self.project(x.unsqueeze(1))
        if self.rotary is not None:
            place = torch.full((1, 1, 1), 0 if state is None else state[0].size(2))
            query, key = (_rotate(y, place.to(x.device)) for y in (query, key))
        if state is not None:
            key, value = (
                torch.cat(pair, dim=2) for pair in zip(state, (key, value), strict=True)
            )
        return self.attend(query, key, value).squeeze(1), (key, value)

    def _places(self, x: Tensor, width: int | Tensor | None) -> Tensor:
        """The positions of the nodes of each graph, [B or 1, N, 1 or 2]."""
        place = torch.arange(x.size(1), device=x.device).unsqueeze(0)
        if self.rotary == "sequence":
            return place.unsqueeze(-1)
        if width is None:
            raise ValueError(
                "'width' must be given for rotary='grid' (to a 'GraphModel' as "
                "structure={'width': 'width'})"
            )
        width = torch.as_tensor(width, device=x.device).view(-1, 1)
        return torch.stack([place % width, place // width], dim=-1)

    def __repr__(self) -> str:
        rotary = "" if self.rotary is None else f", rotary={self.rotary!r}"
        return (
            f"{self.__class__.__name__}({self.channels}, heads={self.heads}{rotary}, "
            f"causal={self.causal})"
        )


def _rotate(x: Tensor, places: Tensor) -> Tensor:
    """Rotates [B, H, N, P] by positions [B, N, D], P / D channels per coordinate."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    angles = rotary_angles(places, x.size(-1), dtype)
    return rotate(x, angles.unsqueeze(1))
