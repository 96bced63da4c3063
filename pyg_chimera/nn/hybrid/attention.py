"""Attention by differences, by latent keys and values, and in windows."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter

from pyg_chimera.nn._inputs import check_channels, heads_of
from pyg_chimera.nn._norm import RMSNorm
from pyg_chimera.nn.attention import SelfAttention
from pyg_chimera.nn.conv.k_hop_attention_conv import KHopAttentionConv, glorot_linear
from pyg_chimera.nn.hybrid._contrast import Contrast, ResetsAll
from pyg_chimera.ops import neighborhood_attention
from pyg_chimera.ops.common.checks import check_integer, check_number

__all__ = [
    "DifferentialAttentionConv",
    "DifferentialSelfAttention",
    "LatentAttentionConv",
    "WindowAttentionConv",
]


class DifferentialAttentionConv(ResetsAll, KHopAttentionConv):
    r"""The attention of the `"Differential Transformer"
    <https://arxiv.org/abs/2410.05258>`_ along edges: that of
    :class:`~pyg_chimera.nn.KHopAttentionConv` by the difference of two maps,
    :math:`(\mathbf{A}_1 - \lambda \mathbf{A}_2) \mathbf{V}`, with the :math:`\lambda`
    of :class:`~pyg_chimera.nn.DifferentialGatedDeltaConv`. Queries and keys of a map
    have half as many channels as values (rounded up, with :obj:`rotary` to pairs). What
    a head reads is normalized and multiplied by :math:`1 - \lambda_0`.

    Args:
        in_channels, out_channels, heads, k, rotary, \*\*kwargs: As in
            :class:`~pyg_chimera.nn.KHopAttentionConv`, and so are shapes and errors.
        depth (int, optional): The position of the layer in the model, counted from 1.
            (default: :obj:`1`)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int | None = None,
        k: int = 1,
        *,
        depth: int = 1,
        rotary: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, heads, k, rotary=rotary, **kwargs)
        whole, pairs = self.out_channels // self.heads, 2 if rotary else 1
        size, maps = -(-whole // (2 * pairs)) * pairs, 2 * self.heads
        shared = 2 * self.groups * size
        self.lin_query = glorot_linear(self.in_channels, maps * size, self.bias)
        self.lin_key = glorot_linear(self.in_channels, shared, self.bias)
        self.hop_bias = Parameter(torch.empty(self.k + 1, maps))
        if self.lin_edge is not None:
            self.lin_edge = glorot_linear(self.lin_edge.in_channels, maps, False)
        self.contrast = Contrast(self.heads, size, depth, whole)
        self.reset_parameters()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [V, 2 * heads, N], key [V, 2 * groups, N], value [V, groups, 2 N]."""
        query = self.lin_query(x).unflatten(1, (2 * self.heads, -1))
        key = self.lin_key(x).unflatten(1, (2 * self.groups, -1))
        return query, key, self.lin_value(x).unflatten(1, (self.groups, -1))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *others: Any) -> Tensor:
        """The output. Maps are ordered by group, then first and second."""
        pairs, batch, bias = others
        y = neighborhood_attention(
            query, key, value.repeat_interleave(2, 1), pairs, batch, edge_bias=bias,
            backend=self.backend,
        )  # fmt: skip
        y = y.unflatten(1, (self.groups, 2, -1)).transpose(2, 3).flatten(1, 2)
        return self.lin_out(self.contrast(y).flatten(1))


class DifferentialSelfAttention(ResetsAll, SelfAttention):
    r"""The attention of the `"Differential Transformer"
    <https://arxiv.org/abs/2410.05258>`_ between all nodes of each graph: what
    :class:`~pyg_chimera.nn.DifferentialAttentionConv` is to
    :class:`~pyg_chimera.nn.KHopAttentionConv`, to
    :class:`~pyg_chimera.nn.SelfAttention`.

    Args:
        channels, heads, rotary, \*\*kwargs: As in
            :class:`~pyg_chimera.nn.SelfAttention`, and so are shapes and errors.
        depth (int, optional): The position of the layer in the model, counted from 1.
            (default: :obj:`1`)
    """

    def __init__(
        self,
        channels: int,
        heads: int | None = None,
        *,
        depth: int = 1,
        rotary: str | None = None,
        **kwargs: Any,
    ) -> None:
        multiple = {"sequence": 4, "grid": 8}.get(rotary or "", 2)
        heads = heads_of(check_integer("channels", channels, 1), heads, multiple)
        super().__init__(channels, heads, rotary=rotary, **kwargs)
        size = self.channels // self.heads
        if size % multiple != 0:
            raise ValueError(
                f"'heads' must leave each head a multiple of {multiple} channels, half "
                f"for each map, got {self.heads} heads of {size} channels"
            )
        self.contrast = Contrast(self.heads, size // 2, depth, size)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query and key, [B, 2 * heads, N, P / 2], and value, [B, heads, N, P]."""
        query, key, value = super().project(x)
        query, key = (
            y.unflatten(-1, (2, -1)).transpose(2, 3).flatten(1, 2) for y in (query, key)
        )
        return query, key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *seen: Any) -> Tensor:
        """The output, [B, N, F]."""
        mask, causal = seen or (None, False)
        value = value.repeat_interleave(2, 1)
        y = F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal)
        y = y.transpose(1, 2).unflatten(2, (-1, 2))
        return self.lin_out(self.contrast(y).flatten(2))


class LatentAttentionConv(ResetsAll, KHopAttentionConv):
    r"""Attention along edges whose keys and values are projections of one narrow
    vector, as in the latent attention of `"DeepSeek-V2"
    <https://arxiv.org/abs/2405.04434>`_ (Section 2.1.2): the layer
    :class:`~pyg_chimera.nn.KHopAttentionConv` with

    .. math::
        \mathbf{c}_i = \textrm{RMSNorm}(\mathbf{W}_c \mathbf{x}_i), \qquad
        \mathbf{k}_i = \mathbf{W}_k \mathbf{c}_i, \qquad
        \mathbf{v}_i = \mathbf{W}_v \mathbf{c}_i

    With :obj:`rotary`, the keys themselves are rotated; there are no separate channels
    for that.

    Args:
        in_channels, out_channels, heads, k, \*\*kwargs: As in
            :class:`~pyg_chimera.nn.KHopAttentionConv`, and so are shapes and errors.
        latent_channels (int, optional): The size of :math:`\mathbf{c}`. (default: a
            quarter of :obj:`out_channels`)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int | None = None,
        k: int = 1,
        *,
        latent_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, heads, k, **kwargs)
        if latent_channels is None:
            latent_channels = max(1, self.out_channels // 4)
        self.latent_channels = check_integer("latent_channels", latent_channels, 1)
        shared = self.lin_key.out_channels
        self.lin_key = glorot_linear(latent_channels, shared, self.bias)
        self.lin_value = glorot_linear(latent_channels, shared, self.bias)
        self.lin_latent = glorot_linear(self.in_channels, latent_channels, False)
        self.norm_latent = RMSNorm(latent_channels, eps=1e-5)
        self.reset_parameters()

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [V, heads, N], key and value [V, groups, N]."""
        latent = self.norm_latent(self.lin_latent(x))
        parts = self.lin_query(x), self.lin_key(latent), self.lin_value(latent)
        size = self.out_channels // self.heads
        query, key, value = (y.unflatten(1, (-1, size)) for y in parts)
        return query, key, value


class WindowAttentionConv(KHopAttentionConv):
    r"""Attention in a sliding window, with grouped queries and "NTK-aware" rotary
    positions: :class:`~pyg_chimera.nn.KHopAttentionConv` along DAGs, with the base of
    `"YaRN" <https://arxiv.org/abs/2309.00071>`_ (Definition 1), :math:`10000 \, s^{N /
    (N - 2)}`, which stretches the longest wavelength by :math:`s` and leaves the
    shortest one, for graphs longer than in training.

    Args:
        in_channels, out_channels, heads, k, groups, rotary, \*\*kwargs: As in
            :class:`~pyg_chimera.nn.KHopAttentionConv`, and so are shapes and errors;
            by default, :obj:`k=128`, four heads are a group, and :obj:`rotary=True`.
        stretch (float, optional): The factor :math:`s`, at least one: by how much
            graphs are longer than in training, after which the attribute of this name
            may be set. (default: :obj:`1.0`)
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int | None = None,
        k: int = 128,
        *,
        groups: int | None = None,
        rotary: bool = True,
        stretch: float = 1.0,
        **kwargs: Any,
    ) -> None:
        in_channels, out_channels, _ = check_channels(in_channels, out_channels)
        heads = heads_of(out_channels, heads, 2 if rotary else 1)
        if groups is None:
            most = max(1, heads // 4)
            groups = next(x for x in range(most, 0, -1) if heads % x == 0)
        super().__init__(
            in_channels, out_channels, heads, k, groups=groups, rotary=rotary, **kwargs
        )
        check_number("stretch", stretch)
        if not stretch >= 1:
            raise ValueError(
                "'stretch' must be at least 1, the factor by which graphs are longer "
                f"than in training, got {stretch}"
            )
        self.stretch = stretch

    def _angles(self, edge_index: Tensor, pos: Tensor | None, like: Tensor) -> Tensor:
        angles = super()._angles(edge_index, pos, like)
        coordinates = pos.size(1) if pos is not None and pos.dim() == 2 else 1
        size = angles.size(-1) // coordinates
        step = torch.arange(size, device=angles.device, dtype=angles.dtype)
        return angles * (self.stretch ** (-step / max(1, size - 1))).repeat(coordinates)
