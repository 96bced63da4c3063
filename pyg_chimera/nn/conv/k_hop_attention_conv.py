import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import Adj

from pyg_chimera.nn._inputs import (
    as_edges,
    at_least_float32,
    check_batch,
    check_heads,
    check_nodes,
    edge_features,
)
from pyg_chimera.nn._norm import RMSNorm
from pyg_chimera.nn._rotary import rotary_angles, rotate, scaled_base
from pyg_chimera.nn.conv._base import Mixer
from pyg_chimera.ops import CycleError, neighborhood_attention
from pyg_chimera.ops.common.checks import (
    check_edges,
    check_integer,
    check_option,
    readable,
    trusted,
)
from pyg_chimera.ops.structure import k_hop_index as find_pairs
from pyg_chimera.ops.structure import topological_rank
from pyg_chimera.ops.structure.k_hop import checked_distance, pairs_of_edges
from pyg_chimera.ops.structure.node_sequences import dense_rank

__all__ = ["KHopAttentionConv"]


class KHopAttentionConv(Mixer):
    r"""Softmax attention of each node to itself and to the nodes from which it is
    reached in at most :math:`k` steps along the edges: on an undirected graph its
    :math:`k`-hop neighbourhood, on a DAG its ancestors up to :math:`k` generations
    back, and on a directed path the sliding window of sequence models.

    .. math::
        \mathbf{x}'_i = \mathbf{W}_o \sum_{j : d(j, i) \leq k} \textrm{softmax}_j
        \left( \frac{\mathbf{q}_i^{\top} \mathbf{k}_j}{\sqrt{N}} + b_{d(j, i)} \right)
        \mathbf{v}_j

    Queries, keys and values are projections of the nodes, and :math:`b_d` is learned
    for each distance and head. Time and memory are linear in the number of pairs of
    nodes that attend to each other, see
    :func:`~pyg_chimera.ops.neighborhood_attention`. Options add

    * *grouped queries*, where several heads share keys and values, `"GQA"
      <https://arxiv.org/abs/2305.13245>`_;
    * *rotary positions*, `"RoFormer" <https://arxiv.org/abs/2104.09864>`_: given
      positions, or the depth of nodes in a DAG. For graphs longer than in training,
      :obj:`rotary_length` sets the "NTK-aware" base :math:`10000 \, s^{N / (N - 2)}`,
      `"YaRN" <https://arxiv.org/abs/2309.00071>`_ (Definition 1);
    * *differential attention*, `"Differential Transformer"
      <https://arxiv.org/abs/2410.05258>`_: the difference of two softmaxes,
      :math:`\mathbf{A}_1 - \lambda \mathbf{A}_2`, where a head's queries and keys have
      half as many channels as its values, :math:`\lambda = \exp(\lambda_{q_1}^{\top}
      \lambda_{k_1}) - \exp(\lambda_{q_2}^{\top} \lambda_{k_2}) + \lambda_0` with
      :math:`\lambda_0 = 0.8 - 0.6 \exp(-0.3 (l - 1))` in layer :math:`l`, and the
      output of a head is normalized and scaled by :math:`1 - \lambda_0`; or
      *rectified*, where the positive part of the difference is renormalized to sum to
      one, :math:`\max(0, \mathbf{A}_1 - \lambda \mathbf{A}_2)` divided by its row sums
      plus :math:`10^{-6}`, so that a head computes a mean of values and needs no norm;
    * *latent* keys and values, projections of one low-rank vector, `"DeepSeek-V2"
      <https://arxiv.org/abs/2405.04434>`_ (Section 2.1.2), but without its separate
      rotary channels: the keys themselves are rotated.

    Args:
        in_channels (int): Size of each input sample, or :obj:`-1` to derive the size
            from the first input.
        out_channels (int, optional): Size of each output sample. (default:
            :obj:`in_channels`)
        heads (int, optional): Number of heads; divides :obj:`out_channels`.
            (default: :obj:`1`)
        k (int, optional): The largest number of steps. (default: :obj:`1`)
        groups (int, optional): Number of different keys and values; divides
            :obj:`heads`. (default: :obj:`heads`)
        rotary (bool, optional): Whether queries and keys are rotated by positions:
            :obj:`pos` if given, otherwise the topological depth, which only DAGs have.
            (default: :obj:`False`)
        rotary_length (float, optional): With :obj:`rotary`, the longest extent of
            positions in training, such as the number of nodes of the longest path. In a
            graph :math:`s` times as long, the base of the angles grows as above. Graphs
            are those of :obj:`batch`; without it, all nodes form one graph. (default:
            :obj:`None`, for no such scaling)
        differential (bool or str, optional): Whether attention is differential,
            :obj:`True` or :obj:`"rectified"`. Both compute twice as many logits.
            (default: :obj:`False`)
        depth (int, optional): The position of the layer in the model, counted from 1,
            for the initial :math:`\lambda` of differential attention. (default:
            :obj:`1`)
        latent_channels (int, optional): The size of the latent vector of which keys and
            values are projections. (default: :obj:`None`, they are projections of the
            nodes)
        edge_dim (int, optional): Size of edge features, a projection of which is then
            added to the logits of the pairs that the edges join, or :obj:`-1`.
            Duplicate edges add up. (default: :obj:`None`)
        bias (bool, optional): If :obj:`False`, projections have no additive bias.
            (default: :obj:`True`)
        backend (str, optional): :obj:`"torch"`, :obj:`"reference"` or :obj:`"auto"`.
        **kwargs (optional): Additional arguments of
            :class:`torch_geometric.nn.conv.MessagePassing`, :obj:`aggr` excepted. With
            :obj:`flow="target_to_source"`, nodes of a DAG attend to their descendants.

    Shapes:
        - **input:**
          node features :math:`(|\mathcal{V}|, F_{in})`,
          edge indices :math:`(2, |\mathcal{E}|)` or a sparse adjacency,
          edge features :math:`(|\mathcal{E}|, D)` *(optional)*,
          batch vector :math:`(|\mathcal{V}|)` *(optional)*
        - **output:** node features :math:`(|\mathcal{V}|, F_{out})`

    Raises:
        ValueError: If :obj:`k` is less than 1, sizes are not divisible as required, or
            options are incompatible.

    Example:
        >>> conv = KHopAttentionConv(16, 32, heads=4, k=2, groups=2)
        >>> edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        >>> conv(torch.randn(3, 16), edge_index).shape
        torch.Size([3, 32])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int = 1,
        k: int = 1,
        *,
        groups: int | None = None,
        rotary: bool = False,
        rotary_length: float | None = None,
        differential: bool | str = False,
        depth: int = 1,
        latent_channels: int | None = None,
        edge_dim: int | None = None,
        bias: bool = True,
        backend: str = "auto",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        out_channels = in_channels if out_channels is None else out_channels
        groups = heads if groups is None else groups
        check_heads(out_channels, heads, groups=groups)
        check_integer("k", k, 1)
        check_integer("depth", depth, 1)
        if latent_channels is not None:
            check_integer("latent_channels", latent_channels, 1)
        check_option("differential", differential, (False, True, "rectified"))
        self.maps = 2 if differential else 1
        multiple = self.maps * (2 if rotary else 1)
        if out_channels // heads % multiple != 0:
            raise ValueError(
                f"The {out_channels // heads} channels of a head must be a multiple of "
                f"{multiple} with rotary={rotary} and differential={differential}"
            )
        if rotary_length is not None and not (rotary and rotary_length >= 1):
            raise ValueError(
                "'rotary_length' must be 1 or more, and goes with rotary=True, got "
                f"{rotary_length} and rotary={rotary}"
            )

        self.in_channels = in_channels
        self.out_channels = out_channels
        self.heads = heads
        self.k = k
        self.groups = groups
        self.rotary = rotary
        self.rotary_length = rotary_length
        self.differential = differential
        self.latent_channels = latent_channels
        self.edge_dim = edge_dim
        self.backend = backend

        def linear(size: int, out: int, bias: bool = bias) -> Linear:
            return Linear(
                size, out, bias, weight_initializer="glorot", bias_initializer="zeros"
            )

        shared = out_channels // heads * groups
        self.lin_query = linear(in_channels, out_channels)
        self.lin_latent = self.norm_latent = None
        if latent_channels is not None:
            self.lin_latent = linear(in_channels, latent_channels, bias=False)
            self.norm_latent = RMSNorm(latent_channels, eps=1e-5)
        source = in_channels if latent_channels is None else latent_channels
        self.lin_key = linear(source, shared)
        self.lin_value = linear(source, shared)
        self.hop_bias = Parameter(torch.empty(k + 1, self.maps * heads))
        self.lin_edge = None
        if edge_dim is not None:
            self.lin_edge = linear(edge_dim, self.maps * heads, bias=False)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * (depth - 1))
        self.norm = None
        size = out_channels // heads
        if differential:
            self.lambdas = Parameter(torch.empty(2, 2, size // 2))
        if self.maps == 2 and differential != "rectified":
            self.norm = RMSNorm(size, eps=1e-5)
        self.lin_out = linear(out_channels, out_channels)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        super().reset_parameters()
        for module in self.children():
            if isinstance(module, (Linear, RMSNorm)):
                module.reset_parameters()
        torch.nn.init.zeros_(self.hop_bias)
        if self.differential:
            torch.nn.init.normal_(self.lambdas, std=0.1)

    def forward(
        self,
        x: Tensor,
        edge_index: Adj,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        *,
        pos: Tensor | None = None,
        k_hop_index: Tensor | None = None,
        k_hop_distance: Tensor | None = None,
    ) -> Tensor:
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The node features.
            edge_index (torch.Tensor or SparseTensor): The edge indices.
            edge_attr (torch.Tensor, optional): The edge features, for layers with
                :obj:`edge_dim`. (default: :obj:`None`)
            batch (torch.Tensor, optional): The graph of each node. Without
                :obj:`rotary_length`, outputs don't depend on it.
                (default: :obj:`None`)
            pos (torch.Tensor, optional): The positions of :obj:`rotary`,
                :math:`[|\mathcal{V}|]`, or :math:`[|\mathcal{V}|, D]` with an equal
                number of channels for each of :math:`D` coordinates. (default:
                :obj:`None`)
            k_hop_index (torch.Tensor, optional): The pairs of nodes, given together
                with :obj:`k_hop_distance`, as stored by
                :class:`~pyg_chimera.transforms.AddKHopIndex` for these edges. (default:
                :obj:`None`, they are computed and cached)
            k_hop_distance (torch.Tensor, optional): Their distances.
                (default: :obj:`None`)

        Raises:
            TypeError: If an argument has the wrong type or dtype.
            ValueError: If an argument does not fit the layer, pairs are not those of
                the edges, or as in :func:`~pyg_chimera.ops.neighborhood_attention`.
        """
        check_nodes(x, self.in_channels)
        check_batch(batch, x.size(0))
        if self.explain:
            raise ValueError(
                "Edge masks explain layers whose messages follow edges, but those of "
                f"{type(self).__name__} join pairs of nodes"
            )
        num_nodes = x.size(0)
        edge_index, edge_attr = as_edges(
            edge_index, edge_attr, num_nodes, self.flow, self.edge_dim
        )
        if k_hop_index is None and k_hop_distance is None:
            pairs, distance = find_pairs(edge_index, num_nodes, self.k)
        else:
            pairs, distance = self._given_pairs(k_hop_index, k_hop_distance)
            if torch.compiler.is_compiling() or not trusted():
                distance = checked_distance(edge_index, pairs, distance, num_nodes)
        bias = F.embedding(distance, self.hop_bias)
        if self.lin_edge is not None:
            edge_attr = edge_features(edge_attr, self.edge_dim, edge_index.size(1))
            place = pairs_of_edges(edge_index, pairs, num_nodes)
            bias = bias.index_add(0, place, self.lin_edge(edge_attr).to(bias.dtype))

        query, key, value = self._project(x)
        if self.rotary:
            angles = self._angles(edge_index, batch, pos, query)
            query, key = rotate(query, angles), rotate(key, angles)
        attend = partial(
            neighborhood_attention, query, key, edge_index=pairs, batch=batch,
            edge_bias=bias, backend=self.backend,
        )  # fmt: skip
        if not self.differential:
            y = attend(value)
        elif self.norm is None:  # rectified
            y = attend(value, contrast=self._lambda().expand(self.heads))
        else:
            both = at_least_float32(attend(value.repeat(1, 2, 1)))
            first, second = both.chunk(2, dim=1)
            # In half precision, a factor near one would cancel all of equal maps.
            y = self.norm(first - self._lambda() * second)
            y = (y * (1 - self.lambda_init)).to(x.dtype)
        return self.lin_out(y.flatten(1))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [V, maps * heads, N], keys [V, maps * groups, N], values."""
        size = self.out_channels // self.heads
        query = self.lin_query(x).unflatten(1, (-1, size // self.maps))
        if self.lin_latent is not None and self.norm_latent is not None:
            x = self.norm_latent(self.lin_latent(x))
        key = self.lin_key(x).unflatten(1, (-1, size // self.maps))
        value = self.lin_value(x).unflatten(1, (-1, size))
        return query, key, value

    def _lambda(self) -> Tensor:
        """The factor of the second map, the same for all heads."""
        query, key = at_least_float32(self.lambdas).unbind(1)
        grown, shrunk = (query * key).sum(-1).exp().unbind()
        return grown - shrunk + self.lambda_init

    def _angles(
        self, edge_index: Tensor, batch: Tensor | None, pos: Tensor | None, like: Tensor
    ) -> Tensor:
        """The rotary angles of nodes, [V, 1, N / 2]."""
        num_nodes, _, size = like.shape
        if pos is None:
            try:
                pos = topological_rank(edge_index, num_nodes)
            except CycleError as error:
                raise ValueError(
                    "'pos' must be given for rotary=True on graphs with cycles, as "
                    "their nodes have no depth (without rotary positions, distances "
                    "still have a learned bias)"
                ) from error
        if not isinstance(pos, Tensor):
            raise TypeError(f"'pos' must be a torch.Tensor, got {type(pos).__name__}")
        if pos.dim() not in (1, 2) or pos.size(0) != num_nodes:
            raise ValueError(
                f"'pos' must be [nodes] or [nodes, coordinates] with {num_nodes} "
                f"nodes, got {list(pos.shape)}"
            )
        dtype = torch.promote_types(like.dtype, torch.float32)
        places = (pos.unsqueeze(1) if pos.dim() == 1 else pos).to(dtype)
        coordinates = places.size(1)
        if size % (2 * coordinates) != 0:
            raise ValueError(
                f"The {size} channels of queries must be a multiple of "
                f"{2 * coordinates} for 'pos' of {coordinates} coordinates"
            )
        if self.rotary_length is None:
            return rotary_angles(places, size, dtype=dtype).unsqueeze(1)
        stretch = (_extent(places, batch) / self.rotary_length).clamp(min=1)
        base = scaled_base(stretch, size // coordinates)
        return rotary_angles(places, size, base, dtype).unsqueeze(1)

    def _given_pairs(
        self, index: Tensor | None, distance: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        if index is None or distance is None:
            raise ValueError(
                "'k_hop_index' and 'k_hop_distance' must be given together"
            )
        for name, x in (("k_hop_index", index), ("k_hop_distance", distance)):
            if not isinstance(x, Tensor) or x.is_floating_point() or x.is_complex():
                kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
                raise TypeError(f"'{name}' must be a tensor of integers, got {kind}")
        index = check_edges("k_hop_index", index, distance)
        if list(distance.shape) != [index.size(1)]:
            raise ValueError(
                f"'k_hop_distance' must be [pairs] = [{index.size(1)}], like "
                f"'k_hop_index', got {list(distance.shape)}"
            )
        if readable() and distance.numel() > 0:
            low, high = torch.aminmax(distance)
            if low < 0 or high > self.k:
                raise ValueError(
                    f"'k_hop_distance' must be in [0, k] = [0, {self.k}], got "
                    f"{int(low if low < 0 else high)}; use 'AddKHopIndex(k={self.k})'"
                )
        if self.flow == "target_to_source":
            index = index.flip(0)
        return index.long(), distance.long()

    def __repr__(self) -> str:
        groups = "" if self.groups == self.heads else f", groups={self.groups}"
        return (
            f"{self.__class__.__name__}({self.in_channels}, {self.out_channels}, "
            f"heads={self.heads}, k={self.k}{groups})"
        )


def _extent(places: Tensor, batch: Tensor | None) -> Tensor:
    """The most positions that a coordinate spans in each node's graph, [V]."""
    places = places.detach()
    if batch is None:
        batch = places.new_zeros(places.size(0), dtype=torch.long)
    graph = dense_rank(batch).unsqueeze(1).expand_as(places)
    low, high = (
        torch.zeros_like(places).scatter_reduce(
            0, graph, places, reduce, include_self=False
        )
        for reduce in ("amin", "amax")
    )
    return (high - low).gather(0, graph).amax(1) + 1
