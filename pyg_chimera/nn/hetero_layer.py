from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.nn.module_dict import ModuleDict
from torch_geometric.typing import Adj, EdgeType, Metadata, NodeType

from pyg_chimera.nn._inputs import (
    TakesTensors,
    check_in_channels,
    check_inputs,
    check_size,
    edge_features,
    with_values,
)
from pyg_chimera.nn._routing import Route, Wrapper, reset_layer, unwrapped
from pyg_chimera.ops.common.checks import check_edges, check_integer, readable
from pyg_chimera.ops.structure.edges import edges_of

__all__ = ["HeteroLayer"]


class HeteroLayer(TakesTensors, torch.nn.Module):
    r"""Runs a layer on a graph of several types of nodes and edges, as if it were one
    homogeneous graph, whose edge features tell the layer the types of edges.

    With :math:`\phi(i)` the type of node :math:`i` and :math:`\tau(e)` that of edge
    :math:`e`, the layer is given

    .. math::
        \mathbf{x}^{\prime}_i = \mathbf{W}_{\phi(i)} \mathbf{x}_i +
        \mathbf{b}_{\phi(i)} \qquad \mathbf{e}^{\prime}_e = \mathbf{t}_{\tau(e)} +
        \mathbf{U}_{\tau(e)} \mathbf{e}_e

    where :math:`\mathbf{t}` is a learned vector for each type of edge, and the last
    term is left out for types without edge features. In contrast to
    :class:`torch_geometric.nn.HeteroConv`, which has one layer for each type of edge, a
    recurrence continues along paths over edges of several types.

    .. code-block:: python

        conv = GatedGCNConv(64, 64, edge_dim=64)
        layer = GPSLayer(64, conv=conv, mixer=ChimeraConv(64, 64, edge_dim=64))
        layer = HeteroLayer(layer, 64, data.metadata())
        x_dict = layer(data.x_dict, data.edge_index_dict)

    Layers that follow one another may each be in a :class:`HeteroLayer`. Or one of them
    holds a stack of layers, such as a :class:`torch_geometric.nn.Sequential`, or a
    :class:`~pyg_chimera.nn.GraphModel` with :obj:`edge_dim=channels` and
    :obj:`head="node"`, which projects only once, and can pass on edge features that
    layers update.

    Args:
        layer (torch.nn.Module): Any :obj:`layer(x, edge_index, ...)` that reads
            :obj:`edge_attr`, with :obj:`channels` input channels and (if it has an
            argument :obj:`edge_dim`) :obj:`edge_dim=channels`. It is also given
            :obj:`batch` if it accepts it. If it returns nodes and edges, only the nodes
            are kept.
        channels (int): Size of the nodes and edges that the layer is given.
        metadata (Tuple[List[str], List[Tuple[str, str, str]]]): The types of nodes and
            edges, as from :meth:`torch_geometric.data.HeteroData.metadata`.
        in_channels (int or Dict[str, int], optional): Size of the input samples of
            every node type, or of each; :obj:`-1` to derive it from the first input.
            (default: :obj:`-1`)
        edge_dim (int or Dict[Tuple[str, str, str], int], optional): Size of the edge
            features of every edge type, or of those types that have any; :obj:`-1` to
            derive it from the first input, :obj:`0` for none. (default: :obj:`None`, no
            edge features)

    Shapes:
        - **inputs:**
          node features :math:`(|\mathcal{V}_{\phi}|, F_{\phi})`,
          edge indices :math:`(2, |\mathcal{E}_{\tau}|)` or sparse adjacencies (whose
          values are read by types with edge features only),
          edge features :math:`(|\mathcal{E}_{\tau}|, D_{\tau})` *(optional)*,
          batch vectors :math:`(|\mathcal{V}_{\phi}|)` *(optional)*, each by type
        - **outputs:** node features :math:`(|\mathcal{V}_{\phi}|, F_{out})` by type, of
          the types that are in the input

    Raises:
        ValueError: If the layer reads no edge features, so that types of edges would be
            lost, or a type in :obj:`in_channels` or :obj:`edge_dim` is not in
            :obj:`metadata`; in the forward method, if a type is unknown, an input has
            the wrong shape, an edge index is out of range, or edge features are missing
            or given without a size in :obj:`edge_dim`.
        TypeError: In the forward method, if an input has the wrong type or dtype.

    Example:
        >>> types = ["user", "film"], [("user", "likes", "film")]
        >>> conv = ChimeraConv(16, edge_dim=16)
        >>> layer = HeteroLayer(conv, 16, types)
        >>> x_dict = {"user": torch.randn(3, 5), "film": torch.randn(2, 4)}
        >>> likes = torch.tensor([[0, 1, 2], [0, 0, 1]])
        >>> out = layer(x_dict, {("user", "likes", "film"): likes})
        >>> {name: x.shape for name, x in out.items()}
        {'user': torch.Size([3, 16]), 'film': torch.Size([2, 16])}
    """

    def __init__(
        self,
        layer: torch.nn.Module,
        channels: int,
        metadata: Metadata,
        *,
        in_channels: int | dict[NodeType, int] = -1,
        edge_dim: int | dict[EdgeType, int] | None = None,
    ) -> None:
        super().__init__()
        channels = check_integer("channels", channels, 1)
        if not isinstance(metadata, (tuple, list)) or len(metadata) != 2:
            raise TypeError(
                "'metadata' must be lists of the types of nodes and of edges, as "
                f"'data.metadata()', got {type(metadata).__name__}"
            )
        node_types, edge_types = list(metadata[0]), [tuple(x) for x in metadata[1]]
        ends = [name for key in edge_types for name in (key[0], key[-1])]
        _check_types("metadata", ends, node_types, "its list of node types")
        if not isinstance(in_channels, dict):
            in_channels = dict.fromkeys(node_types, in_channels)
        if not isinstance(edge_dim, dict):
            edge_dim = {} if edge_dim is None else dict.fromkeys(edge_types, edge_dim)
        _check_types("in_channels", in_channels, node_types)
        _check_types("metadata", node_types, in_channels, "'in_channels'")
        _check_types("edge_dim", edge_dim, edge_types)
        sizes = {t: check_integer("edge_dim", n, -1) for t, n in edge_dim.items()}

        self.channels = channels
        self.node_types = node_types
        self.edge_types = edge_types

        self.layer = layer
        self._route = Route.of(layer, graph=True)
        if not self._accepts("edge_attr"):
            raise ValueError(
                f"'layer' must read 'edge_attr', which tells types of edges apart, got "
                f"{layer}. Construct it with 'edge_dim={channels}', or combine it in a "
                "GPSLayer with a convolution that does, such as GatedGCNConv."
            )
        self.lins = ModuleDict(
            {
                name: Linear(check_in_channels(size), channels)
                for name, size in in_channels.items()
            }
        )
        self.edge_lins = ModuleDict(
            {t: Linear(n, channels, bias=False) for t, n in sizes.items() if n}
        )
        self.type_vectors = Embedding(len(edge_types), channels)
        self.edge_masks = ModuleDict({key: _EdgeMask() for key in edge_types})

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        for module in self.children():
            reset_layer(module)

    def forward(
        self,
        x_dict: Mapping[NodeType, Tensor],
        edge_index_dict: Mapping[EdgeType, Adj],
        edge_attr_dict: Mapping[EdgeType, Tensor] | None = None,
        batch_dict: Mapping[NodeType, Tensor] | None = None,
    ) -> dict[NodeType, Tensor]:
        r"""Runs the forward pass of the module.

        Args:
            x_dict (Dict[str, torch.Tensor]): The node features of each type. Types
                without nodes may be missing.
            edge_index_dict (Dict[Tuple[str, str, str], torch.Tensor or SparseTensor]):
                The edge indices of each type. Types without edges may be missing.
            edge_attr_dict (Dict[Tuple[str, str, str], torch.Tensor], optional): The
                edge features of the types in :obj:`edge_dim`. (default: :obj:`None`)
            batch_dict (Dict[str, torch.Tensor], optional): The batch vector of each
                type, which assigns each node to a graph. (default: :obj:`None`)
        """
        for name, given in {
            "x_dict": x_dict,
            "edge_index_dict": edge_index_dict,
            "edge_attr_dict": edge_attr_dict,
            "batch_dict": batch_dict,
        }.items():
            if given is not None and not isinstance(given, Mapping):
                raise TypeError(
                    f"'{name}' must be a dictionary of tensors by type, as of "
                    f"'HeteroData', got {type(given).__name__}"
                )
        attrs = edge_attr_dict or {}
        _check_types("x_dict", x_dict, self.node_types)
        _check_types("edge_index_dict", edge_index_dict, self.edge_types)
        _check_types("edge_attr_dict", attrs, self.edge_lins.keys(), "'edge_dim'")
        types = [name for name in self.node_types if name in x_dict]

        xs = [
            _name_type_in_errors(name, self._nodes, name, x_dict[name])
            for name in types
        ]
        vectors = self.type_vectors.weight
        x = torch.cat(xs) if xs else vectors[:0]
        sizes = [x.size(0) for x in xs]
        ranges = {t: (sum(sizes[:i]), sizes[i]) for i, t in enumerate(types)}
        parts = [(x.new_empty(2, 0, dtype=torch.long), vectors[:0])]
        for key in self.edge_types:
            if key in edge_index_dict:
                graph = (edge_index_dict[key], attrs.get(key), ranges)
                parts.append(_name_type_in_errors(key, self._edges, key, *graph))
        indices, features = zip(*parts, strict=True)
        edge_index, edge_attr = torch.cat(indices, dim=1), torch.cat(features)

        batch = place = None
        if batch_dict is not None and xs:
            # Some layers need the nodes of a graph side by side.
            _check_types("x_dict", types, batch_dict, "'batch_dict'")
            batches = [batch_dict[name] for name in types]
            for name, vector, y in zip(types, batches, xs, strict=True):
                _name_type_in_errors(name, check_inputs, y, self.channels, vector)
            batch, order = torch.cat(batches).long().sort(stable=True)
            place = order.argsort()
            x, edge_index = x[order], place[edge_index]

        args = {"edge_attr": edge_attr, "batch": batch}
        args = {name: value for name, value in args.items() if self._accepts(name)}
        explained: AbstractContextManager = nullcontext()
        if any(mask.explain for mask in self.edge_masks.values()):
            keys = [key for key in self.edge_types if key in edge_index_dict]
            masks = [
                _name_type_in_errors(key, self.edge_masks[key], x, index.size(1))
                for key, index in zip(keys, indices[1:], strict=True)
            ]
            explained = _masked(self.layer, torch.cat(masks), edge_index)
        with explained:
            out = self._route.call(self.layer, x, edge_index, batch, args)
        out = out[0] if isinstance(out, tuple) else out
        if out.size(0) != x.size(0):
            raise ValueError(
                f"'layer' must return a row for each of {x.size(0)} nodes, got "
                f"{list(out.shape)}"
            )
        out = out if place is None else out[place]
        return dict(zip(types, out.split(sizes), strict=True))

    def _nodes(self, name: NodeType, x: Tensor) -> Tensor:
        """The projected nodes of one type."""
        check_inputs(x, self.lins[name].in_channels)
        return self.lins[name](x)

    def _edges(
        self,
        key: EdgeType,
        graph: Adj,
        edge_attr: Tensor | None,
        ranges: Mapping[NodeType, tuple[int, int]],
    ) -> tuple[Tensor, Tensor]:
        """The edges of one type, and their features; `ranges` has the first node and
        the number of nodes of each type.
        """
        (source, num_sources), (target, num_targets) = (
            ranges.get(name, (0, 0)) for name in (key[0], key[-1])
        )
        check_size(graph, num_targets, num_sources)
        has_features = key in self.edge_lins
        if has_features and edge_attr is None:
            graph, edge_attr = with_values(graph)
        edges = check_edges("edge_index", edges_of(graph), self.type_vectors.weight)
        if readable():
            limits = edges.new_tensor([[num_sources], [num_targets]])
            if bool(((edges < 0) | (edges >= limits)).any()):
                raise ValueError(
                    f"'edge_index' must hold numbers of {num_sources} source nodes and "
                    f"of {num_targets} target nodes, got numbers up to "
                    f"{edges.amax(dim=1).tolist()}, or negative ones"
                )
        vector = self.type_vectors.weight[self.edge_types.index(key)]
        features = vector.expand(edges.size(1), -1)
        if has_features:
            lin = self.edge_lins[key]
            edge_attr = edge_features(edge_attr, lin.in_channels, edges.size(1))
            features = features + lin(edge_attr)
        return torch.stack([edges[0] + source, edges[1] + target]), features

    def _accepts(self, name: str) -> bool:
        # A layer may pass edge features on as one of its '**kwargs'.
        if name == "edge_attr" and not isinstance(unwrapped(self.layer), Wrapper):
            return self._route.is_open or self._route.accepts(name)
        return self._route.accepts(name, self.layer)

    def __repr__(self) -> str:
        return (
            f"{self.__class__.__name__}({self.layer}, {self.channels}, "
            f"node_types={self.node_types}, edge_types={self.edge_types})"
        )


class _EdgeMask(MessagePassing):
    """A place for an explainer's mask of the edges of one type."""

    def forward(self, like: Tensor, num_edges: int) -> Tensor:
        """The mask of edges, or ones."""
        if not self.explain:
            return like.new_ones(num_edges)
        mask: Any = self._edge_mask
        mask = mask.sigmoid() if self._apply_sigmoid else mask
        if mask.shape != (num_edges,):
            raise ValueError(
                f"an edge mask must have an entry for each of {num_edges} edges, got "
                f"{list(mask.shape)}; explain a model that takes types of edges"
            )
        return mask


@contextmanager
def _masked(layer: torch.nn.Module, mask: Tensor, edge_index: Tensor) -> Iterator[None]:
    """Lets convolutions apply an edge mask, as PyG's explainers do."""
    convs: list[Any] = [
        x
        for x in layer.modules()
        if isinstance(x, MessagePassing) and x.explain is not False
    ]
    for conv in convs:
        conv._parameters.pop("_edge_mask", None)  # which would take no other tensor
        conv.explain, conv._edge_mask, conv._apply_sigmoid = True, mask, False
        conv._loop_mask = edge_index[0] != edge_index[1]
    try:
        yield
    finally:
        for conv in convs:
            conv.explain, conv._edge_mask, conv._apply_sigmoid = None, None, True
            conv._loop_mask = None


def _check_types(
    name: str, given: Collection, known: Collection, where: str = "the metadata"
) -> None:
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ValueError(
            f"'{name}' has types that {where} does not have, {unknown}; known are "
            f"{list(known)}"
        )


def _name_type_in_errors(
    key: NodeType | EdgeType, function: Callable, *args: Any
) -> Any:
    """Calls the function, and names the type in its errors."""
    try:
        return function(*args)
    except (TypeError, ValueError) as error:
        raise type(error)(f"Of type {key!r}: {error}") from error
