from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.typing import Adj

from pyg_chimera.nn._inputs import (
    as_edges,
    check_channels,
    check_heads,
    check_inputs,
    edge_features,
    heads_of,
)
from pyg_chimera.nn._rotary import rotary_angles, rotate
from pyg_chimera.nn.conv._base import Mixer
from pyg_chimera.ops import CycleError, neighborhood_attention
from pyg_chimera.ops.common.checks import (
    check_edges,
    check_flag,
    check_integer,
    readable,
    trusted,
)
from pyg_chimera.ops.structure import k_hop_index as find_pairs
from pyg_chimera.ops.structure import topological_rank
from pyg_chimera.ops.structure.k_hop import checked_distance, pairs_of_edges

__all__ = ["KHopAttentionConv"]


class KHopAttentionConv(Mixer):
    r"""Softmax attention of each node to itself and to all nodes at most :math:`k`
    steps before it along the edges: on an undirected graph its
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
      positions, or the depth of nodes in a DAG.

    Size:
        in_channels (int): Size of each input sample, or :obj:`-1` to derive the size
            from the first input.
        out_channels (int, optional): Size of each output sample. (default:
            :obj:`in_channels`)
        heads (int, optional): Number of heads; divides :obj:`out_channels`.
            (default: the largest of 4, 2 and 1 that does)
        groups (int, optional): Number of different keys and values; divides
            :obj:`heads`. (default: :obj:`heads`)
        edge_dim (int, optional): Size of edge features, a projection of which is then
            added to the logits of the pairs that the edges join, or :obj:`-1`.
            Duplicate edges add up. (default: :obj:`None`)
        bias (bool, optional): If :obj:`False`, projections have no additive bias.
            (default: :obj:`True`)

    Attention:
        k (int, optional): The largest number of steps. (default: :obj:`1`)
        rotary (bool, optional): Whether queries and keys are rotated by positions:
            :obj:`pos` if given, otherwise the topological depth, which only DAGs have.
            (default: :obj:`False`)

    Execution:
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
        ValueError: If :obj:`k` is less than 1, or sizes are not divisible as required.

    Example:
        >>> conv = KHopAttentionConv(16, 32, heads=4, k=2, groups=2)
        >>> edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        >>> conv(torch.randn(3, 16), edge_index).shape
        torch.Size([3, 32])
    """

    _backends = ("auto", "torch", "reference")

    def __init__(
        self,
        in_channels: int,
        out_channels: int | None = None,
        heads: int | None = None,
        k: int = 1,
        *,
        groups: int | None = None,
        rotary: bool = False,
        edge_dim: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        in_channels, out_channels, edge_dim = check_channels(
            in_channels, out_channels, edge_dim
        )
        check_flag("rotary", rotary)
        heads = heads_of(out_channels, heads, 1 + rotary)
        groups = heads if groups is None else groups
        heads, _, groups = check_heads(out_channels, heads, groups=groups)
        k = check_integer("k", k, 1)
        if rotary and out_channels // heads % 2 != 0:
            raise ValueError(
                f"The {out_channels // heads} channels of a head must be a multiple of "
                "2 with rotary=True"
            )

        self.in_channels = in_channels
        self.out_channels = out_channels
        self.heads = heads
        self.k = k
        self.groups = groups
        self.rotary = rotary
        self.edge_dim = edge_dim

        shared, bias = out_channels // heads * groups, self.bias
        self.lin_query = glorot_linear(in_channels, out_channels, bias)
        self.lin_key = glorot_linear(in_channels, shared, bias)
        self.lin_value = glorot_linear(in_channels, shared, bias)
        self.hop_bias = Parameter(torch.empty(k + 1, heads))
        self.lin_edge = None
        if edge_dim is not None:
            self.lin_edge = glorot_linear(edge_dim, heads, bias=False)
        self.lin_out = glorot_linear(out_channels, out_channels, bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        super().reset_parameters()
        torch.nn.init.zeros_(self.hop_bias)

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
            batch (torch.Tensor, optional): The graph of each node. Outputs don't depend
                on it. (default: :obj:`None`)
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
        check_inputs(x, self.in_channels, batch)
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
                given = edge_index, pairs, distance, num_nodes, self.k
                distance = checked_distance(*given)
        bias = F.embedding(distance, self.hop_bias)
        if self.lin_edge is not None:
            edge_attr = edge_features(edge_attr, self.edge_dim, edge_index.size(1))
            place = pairs_of_edges(edge_index, pairs, num_nodes)
            bias = bias.index_add(0, place, self.lin_edge(edge_attr).to(bias.dtype))

        query, key, value = self.project(x)
        if self.rotary:
            angles = self._angles(edge_index, pos, query)
            query, key = rotate(query, angles), rotate(key, angles)
        return self.attend(query, key, value, pairs, batch, bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query [V, heads, N], key and value [V, groups, N]."""
        size = self.out_channels // self.heads
        query, key, value = (
            lin(x).unflatten(1, (-1, size))
            for lin in (self.lin_query, self.lin_key, self.lin_value)
        )
        return query, key, value

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        pairs: Tensor,
        batch: Tensor | None,
        bias: Tensor,
    ) -> Tensor:
        """The output, where nodes see the sources of pairs, with a bias [pairs, heads]
        of each.
        """
        y = neighborhood_attention(
            query, key, value, pairs, batch, edge_bias=bias, backend=self.backend
        )
        return self.lin_out(y.flatten(1))

    def _angles(self, edge_index: Tensor, pos: Tensor | None, like: Tensor) -> Tensor:
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
        return rotary_angles(places, size, dtype).unsqueeze(1)

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


def glorot_linear(in_channels: int, out_channels: int, bias: bool) -> Linear:
    """A projection as in attention: Glorot's weights, and biases of zero."""
    starts = {"weight_initializer": "glorot", "bias_initializer": "zeros"}
    return Linear(in_channels, out_channels, bias, **starts)
