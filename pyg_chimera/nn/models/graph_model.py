from collections.abc import Callable, Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.nn import MLP
from torch_geometric.nn.aggr import Aggregation
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.nn.inits import reset
from torch_geometric.nn.resolver import aggregation_resolver
from torch_geometric.typing import Adj

from pyg_chimera.nn._inputs import (
    TakesTensors,
    check_edge_rows,
    check_in_channels,
    check_inputs,
    check_size,
    with_values,
)
from pyg_chimera.nn._norm import Norm, norm_arguments
from pyg_chimera.nn._routing import Route
from pyg_chimera.nn.graph_batch_norm import masked_norm
from pyg_chimera.nn.models._pretrained import (
    build,
    load_model,
    recorded,
    save_model,
)
from pyg_chimera.ops.common.checks import (
    check_edge_index,
    check_edges,
    check_integer,
    check_option,
    readable,
)
from pyg_chimera.ops.structure import check_stored

__all__ = ["CategoricalEncoder", "GraphModel"]


class CategoricalEncoder(torch.nn.Module):
    r"""Encodes rows of categories as the sum of one embedding per column.

    .. math::
        \mathbf{x}^{\prime}_i = \sum_f \mathbf{E}_f [ x_{i,f} ]

    Args:
        num_categories (Sequence[int]): The number of categories in each column.
        out_channels (int): Size of each output sample.

    Shapes:
        - **input:** categories :math:`(*, F)`, or :math:`(N)` for a single column,
          integers
        - **output:** features :math:`(*, F_{out})`

    Raises:
        ValueError: If there is no column or an empty one; in the forward method, if the
            input has the wrong number of columns, or a category is out of range.
        TypeError: In the forward method, if the input is not integer.
    """

    def __init__(self, num_categories: Sequence[int], out_channels: int) -> None:
        super().__init__()
        if len(num_categories) == 0:
            raise ValueError("'num_categories' must be of at least one column, got []")
        self.num_categories = [
            check_integer("num_categories", number, 1) for number in num_categories
        ]
        self.out_channels = check_integer("out_channels", out_channels, 1)
        self.embeddings = torch.nn.ModuleList(
            torch.nn.Embedding(num, out_channels) for num in self.num_categories
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        for weight in self.embeddings.parameters():
            torch.nn.init.xavier_uniform_(weight)

    def forward(self, x: Tensor) -> Tensor:
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The categories.
        """
        if not isinstance(x, Tensor):
            raise TypeError(
                f"A CategoricalEncoder needs a torch.Tensor, got {type(x).__name__}."
            )
        if x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
            raise TypeError(
                f"A CategoricalEncoder needs integers, got {x.dtype}. Pass categories, "
                "or give the number of channels instead of numbers of categories."
            )
        shape = list(x.shape)
        if x.dim() == 1 and len(self.embeddings) == 1:
            x = x.unsqueeze(-1)
        if x.dim() < 2 or x.size(-1) != len(self.embeddings):
            raise ValueError(
                f"Expected {len(self.embeddings)} columns of categories, got shape "
                f"{shape}."
            )
        try:
            x = x.long()
            parts = [lookup(x[..., f]) for f, lookup in enumerate(self.embeddings)]
        except IndexError as e:
            largest = x.reshape(-1, x.size(-1)).amax(dim=0).tolist()
            raise ValueError(
                "Categories must lie in [0, num_categories) of their column, with "
                f"num_categories={self.num_categories}; got up to {largest}, or "
                "negative ones."
            ) from e
        return sum(parts[1:], parts[0])

    def __repr__(self) -> str:
        return f"{self.__class__.__name__}({self.num_categories}, {self.out_channels})"


class GraphModel(TakesTensors, torch.nn.Module):
    r"""A complete graph neural network: an encoder of nodes (and edges), a stack of
    layers of equal width, and a head for graphs, nodes or pairs of nodes.

    .. code-block:: python

        def layer(index: int) -> GPSLayer:
            conv = GatedGCNConv(64, 64, edge_dim=64)
            return GPSLayer(64, conv, ChimeraConv(64, edge_dim=64), dropout=0.1)

        # Molecules: vocabularies of atoms and bonds, from ogb.
        model = GraphModel(
            get_atom_feature_dims(), 64, 10, layer, num_layers=8,
            edge_dim=get_bond_feature_dims(),
        )
        out = model(**model.inputs(data))

    Args:
        in_channels (int or Sequence[int]): The size of the node features, which a
            linear layer encodes (:obj:`-1` to derive it from the first input), or the
            number of categories in each column of categorical features, whose
            embeddings a :class:`CategoricalEncoder` sums.
        channels (int): The size of nodes (and edges) between the layers.
        out_channels (int): Size of each output sample.
        layers (Callable, Iterable[torch.nn.Module] or Mapping[str, Any]): The layers,
            or a function that builds a layer from its position in the stack, or the
            description of a layer as plain data: the name of its class in
            :mod:`pyg_chimera.nn` or :mod:`torch_geometric.nn` and its arguments, as in
            ``{"class": "GPSLayer", "channels": 64, "mixer": {"class": "ChimeraConv",
            "in_channels": 64}}``. A list may have a description for each layer. A layer
            is a :class:`~pyg_chimera.nn.GPSLayer` or any
            :obj:`layer(x, edge_index, ...)`.
            Of :obj:`batch`, :obj:`edge_attr` and further arguments, it gets those that
            its forward method accepts. It returns nodes, or nodes and edges.
        num_layers (int, optional): The number of layers, required if :obj:`layers` is a
            function or a description. (default: :obj:`None`)
        edge_dim (int or Sequence[int], optional): Like :obj:`in_channels`, for edges.
            If set to :obj:`None`, the model takes no edge features. (default:
            :obj:`None`)
        head (str, optional): What is predicted: one row for each :obj:`"graph"` (pooled
            nodes), each :obj:`"node"`, or each :obj:`"edge"`, meaning any pair of nodes
            in :obj:`edge_label_index`. (default: :obj:`"graph"`)
        pool (str or Aggregation, optional): How graphs are pooled: :obj:`"mean"`,
            :obj:`"sum"`, :obj:`"max"`, or anything in
            :mod:`torch_geometric.nn.aggr` that keeps the width.
            (default: :obj:`"mean"`)
        decoder (str, optional): How pairs of nodes are scored: :obj:`"dot"`, the
            inner product of the nodes after the head's network, or :obj:`"mlp"`, the
            head's network on both nodes, source first. (default: :obj:`"dot"`)
        head_layers (int, optional): The number of linear layers in the head; hidden
            ones are :obj:`channels` wide. These start with the values of `"Delving Deep
            into Rectifiers" <https://arxiv.org/abs/1502.01852>`_, which keep the scale,
            except before inner products. (default: :obj:`2`)
        head_norm (str, optional): The normalization after each hidden linear layer of
            the head, :obj:`"batch_norm"`, :obj:`"layer_norm"` (each row on its own) or
            :obj:`None`. Pooled nodes are almost the same in all molecules: batch norm,
            here and in the layers, brings out how they differ. It needs batches of
            several graphs, and a learning rate that decays to zero. (default:
            :obj:`None`)
        norm (str or torch.nn.Module, optional): A final normalization between layers
            and head, for layers with :obj:`norm_first=True`. (default: :obj:`None`)
        act (str or Callable, optional): The non-linear activation function of the
            head. (default: :obj:`"relu"`)
        dropout (float, optional): Dropout probability of the head's hidden layers.
            (default: :obj:`0.0`)
        structure (Mapping[str, str], optional): Maps arguments of the layers to the
            attributes of a data object that :meth:`inputs` passes as these arguments,
            such as :obj:`{"rank": "elimination_rank"}`. (default: :obj:`None`)
        encodings (Mapping[str, torch.nn.Module], optional): Encoders of positions or
            structure, such as a :class:`~pyg_chimera.nn.LaplacianEncoder`, keyed by the
            attribute of a data object that each reads. Their outputs, of size
            :obj:`encoder.out_channels`, are concatenated to the encoded nodes, which
            take the rest of :obj:`channels`. (default: :obj:`None`)

    Shapes:
        - **inputs:**
          node features :math:`(|\mathcal{V}|, F_{in})`,
          edge indices :math:`(2, |\mathcal{E}|)`,
          edge features :math:`(|\mathcal{E}|, D)` *(optional)*,
          batch vector :math:`(|\mathcal{V}|)` *(optional)*,
          pairs of nodes :math:`(2, L)` *(only for the edge head)*,
          inputs of the encoders in :obj:`encodings`, one row per node, by name
        - **outputs:** predictions :math:`(B, F_{out})` for :math:`B` graphs,
          :math:`(|\mathcal{V}|, F_{out})` for nodes, or :math:`(L, F_{out})` for
          pairs of nodes

    Raises:
        ValueError: If an option is unknown, :obj:`num_layers` does not fit
            :obj:`layers`, or :obj:`encodings` leave no channels for the nodes; in the
            forward method, if edge features, pairs of nodes or encodings are missing,
            or given to a model built without them.
        TypeError: In the forward method, if no layer accepts a further argument.
    """

    _arguments: tuple[dict[str, Any], list[str]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = recorded(cls.__init__)  # type: ignore[method-assign]

    @recorded
    def __init__(
        self,
        in_channels: int | Sequence[int],
        channels: int,
        out_channels: int,
        layers: Callable[[int], torch.nn.Module]
        | Iterable[torch.nn.Module | Mapping[str, Any]]
        | Mapping[str, Any],
        num_layers: int | None = None,
        *,
        edge_dim: int | Sequence[int] | None = None,
        head: str = "graph",
        pool: str | Aggregation = "mean",
        decoder: str = "dot",
        head_layers: int = 2,
        head_norm: str | None = None,
        norm: str | torch.nn.Module | None = None,
        act: str | Callable | None = "relu",
        dropout: float = 0.0,
        structure: Mapping[str, str] | None = None,
        encodings: Mapping[str, torch.nn.Module] | None = None,
    ) -> None:
        super().__init__()
        check_option("head", head, ("graph", "node", "edge"))
        check_option("decoder", decoder, ("dot", "mlp"))
        check_option("head_norm", head_norm, ("batch_norm", "layer_norm", None))
        channels = check_integer("channels", channels, 1)
        out_channels = check_integer("out_channels", out_channels, 1)
        head_layers = check_integer("head_layers", head_layers, 1)
        if head == "edge" and decoder == "dot" and out_channels != 1:
            raise ValueError(
                "'out_channels' must be 1 for 'decoder=\"dot\"', got "
                f"{out_channels}. Use 'decoder=\"mlp\"' for several."
            )
        encoders = (encodings or {}).values()
        taken = sum(cast(int, encoder.out_channels) for encoder in encoders)
        if taken and taken >= channels:
            raise ValueError(
                "The encoders in 'encodings' must have fewer output channels together "
                f"than 'channels', {channels}, got {taken}. Make them narrower, or "
                "the model wider."
            )

        if not isinstance(in_channels, Iterable):
            in_channels = check_in_channels(in_channels)
        if edge_dim is not None and not isinstance(edge_dim, Iterable):
            edge_dim = check_integer("edge_dim", edge_dim, -1) or None
        self.in_channels = in_channels
        self.channels = channels
        self.out_channels = out_channels
        self.edge_dim = edge_dim
        self.head = head
        self.decoder = decoder
        self.structure = dict(structure or {})

        self.node_encoder = _encoder(in_channels, channels - taken)
        self.encodings = torch.nn.ModuleDict(encodings)
        self._encoder_routes = [Route.of(x) for x in self.encodings.values()]
        self.edge_encoder = None if edge_dim is None else _encoder(edge_dim, channels)
        self.layers = torch.nn.ModuleList(_make_layers(layers, num_layers))
        self._routes = [Route.of(layer, graph=True) for layer in self.layers]
        if edge_dim is not None and not self._reads("edge_attr"):
            raise ValueError(
                f"'edge_dim' is {edge_dim}, but no layer reads edge features. "
                "Construct layers with their own 'edge_dim', or leave it out."
            )
        self.norm = Norm(norm, channels)
        self.pool = aggregation_resolver(pool) if head == "graph" else None

        pairs = head == "edge"
        self._is_dot = pairs and decoder == "dot"
        self.mlp = MLP(
            in_channels=2 * channels if pairs and not self._is_dot else channels,
            hidden_channels=channels,
            out_channels=channels if self._is_dot else out_channels,
            num_layers=head_layers,
            dropout=float(dropout),
            act=act,
            norm=head_norm,
            norm_kwargs=norm_arguments(head_norm) if head_norm else None,
        )
        self._reset_head()

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        for module in self.children():
            reset(module)
        self._reset_head()

    def _reset_head(self) -> None:
        if self._is_dot:
            return  # inner products would be large
        # PyTorch's own values divide what distinguishes graphs, and its gradient, by
        # 2.4 in each layer. The last layer keeps them, so that first answers are small.
        for lin in self.mlp.lins[:-1]:
            torch.nn.init.kaiming_normal_(lin.weight, nonlinearity="relu")
            torch.nn.init.zeros_(lin.bias)

    def save_pretrained(self, path: str | PathLike, card: str = "") -> None:
        r"""Saves the model as a folder, for :meth:`from_pretrained`: the arguments of
        the constructor that are plain data (:obj:`config.json`), the weights
        (:obj:`model.pth`), and a card (:obj:`README.md`). The folder appears when all
        of it is written.

        Functions and modules, such as :obj:`layers` unless they are a description, are
        no plain data: whoever loads the model passes them again.

        Args:
            path (str or os.PathLike): The folder, which must not exist yet.
            card (str, optional): What a user should know, in Markdown: data, split,
                seed, metrics, licence. (default: :obj:`""`, no card)

        Raises:
            ValueError: If :obj:`path` exists, or the sizes of some weights are not
                known yet.
        """
        from pyg_chimera import __version__

        plain, other = self._arguments
        config = {
            "class": type(self).__name__,
            "version": __version__,
            "arguments": plain,
            "missing": other,
        }
        save_model(path, config, self.state_dict(), card)

    @classmethod
    def from_pretrained(cls, path: str | PathLike, **kwargs: Any) -> "GraphModel":
        r"""Loads a model that :meth:`save_pretrained` has saved: on the CPU, in
        evaluation mode. Files are read as data, and run no code but the constructors
        of modules of this library and of PyTorch Geometric.

        .. code-block:: python

            model.save_pretrained("my_model")
            model = GraphModel.from_pretrained("my_model", layers=layer)

        Args:
            path (str or os.PathLike): The folder.
            **kwargs (optional): Arguments of the constructor that are not stored, or
                take the place of stored ones. Functions have to be the same as before:
                others are only noticed if the weights do not fit.

        Raises:
            ValueError: If files are missing or damaged, an argument is neither stored
                nor given, or the weights do not fit the model.
        """
        config, state = load_model(path)
        missing = [name for name in config["missing"] if name not in kwargs]
        if missing:
            raise ValueError(
                f"The model in {str(path)!r} was built with {missing} that are no "
                "plain data. Pass the same again: 'from_pretrained(path, "
                f"{', '.join(f'{name}=...' for name in missing)})'"
            )
        try:
            model = cls(**(config["arguments"] | kwargs))
            dtypes = {y.dtype for y in state.values() if y.is_floating_point()}
            if len(dtypes) == 1:
                model.to(dtypes.pop())
            model.load_state_dict(state)
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(
                f"The {config.get('class', 'model')} in {str(path)!r}, saved by "
                f"version {config['version']}, does not fit: {error}"
            ) from error
        return model.eval()

    def inputs(self, data: Data | Batch) -> dict[str, Any]:
        r"""The arguments of the forward method, taken from :obj:`data`.

        As this is a separate method, rather than a second form of :meth:`forward`, it
        works with wrappers for compilation and for several processes.

        Args:
            data (Data or Batch): One graph, or a batch of graphs.

        Raises:
            TypeError: If :obj:`data` is not homogeneous.
            ValueError: If :obj:`data` lacks an attribute that the model reads,
                including those named in :obj:`structure` and :obj:`encodings`, one in
                :obj:`structure` was stored for other edges, see
                :func:`~pyg_chimera.ops.structure.check_stored`, or a graph has padding
                within it, as by :class:`torch_geometric.transforms.Pad`.
        """
        if not isinstance(data, Data):
            raise TypeError(
                "'data' must be a 'torch_geometric.data.Data' or a batch of them, got "
                f"{type(data).__name__}. For several types of nodes, put the model "
                "into a 'HeteroLayer', with head='node', and call that with "
                "'data.x_dict, data.edge_index_dict'; or use 'data.to_homogeneous()'"
            )
        adj = "adj_t" if "adj_t" in data else "edge_index"
        args: dict[str, Any] = {
            "x": _attribute(data, "x", "the node encoder reads"),
            "edge_index": _attribute(data, adj, "the layers are called with"),
            "batch": data.batch if "batch" in data else None,
        }
        if "pad_node_mask" in data:
            args["pad_node_mask"] = mask = data.pad_node_mask
            if readable():
                _check_padding(mask, data.num_nodes, args["batch"])
        # The values of an 'adj_t' may be the edge features.
        if self.edge_encoder is not None and (adj != "adj_t" or "edge_attr" in data):
            reader = f"a model with edge_dim={self.edge_dim} reads"
            args["edge_attr"] = _attribute(data, "edge_attr", reader)
        if self.head == "graph" and isinstance(data, Batch):
            args["batch_size"] = data.num_graphs
        if self.head == "edge":
            reader = "the head of edges scores"
            args["edge_label_index"] = _attribute(data, "edge_label_index", reader)
        if readable():
            check_stored(data, self.structure.values())
        for name, attr in self.structure.items():
            reader = f"'structure' names for the layers' argument '{name}'"
            args[name] = _attribute(data, attr, reader)
        if len(self.encodings) > 0:
            args["encodings"] = {
                attr: _attribute(data, attr, "'encodings' has an encoder for")
                for attr in self.encodings
            }
        return args

    def forward(
        self,
        x: Tensor,
        edge_index: Adj,
        edge_attr: Tensor | None = None,
        batch: Tensor | None = None,
        batch_size: int | None = None,
        edge_label_index: Tensor | None = None,
        encodings: Mapping[str, Tensor] | None = None,
        pad_node_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The node features.
            edge_index (torch.Tensor or SparseTensor): The edge indices.
            edge_attr (torch.Tensor, optional): The edge features.
                (default: :obj:`None`)
            batch (torch.Tensor, optional): The batch vector, which assigns each
                node to a graph. (default: :obj:`None`)
            batch_size (int, optional): The number of graphs, derived from :obj:`batch`
                if not given. (default: :obj:`None`)
            edge_label_index (torch.Tensor, optional): The pairs of nodes that the
                edge head scores. (default: :obj:`None`)
            encodings (Mapping[str, torch.Tensor], optional): The inputs of the encoders
                in :obj:`encodings`, by name. (default: :obj:`None`)
            pad_node_mask (torch.Tensor, optional): The nodes that are no padding, bool,
                see :class:`~pyg_chimera.transforms.PadBatch`. Batch norms leave the
                others, and graphs of them, out. (default: :obj:`None`)
            **kwargs (optional): Further arguments of the layers, by name.
        """
        for name in kwargs:
            if not self._reads(name):
                raise TypeError(
                    f"'{name}' is not a parameter that a layer's forward method takes."
                )
        edge_index, edge_attr = self._edges(x, edge_index, edge_attr)
        check_edge_rows(edge_attr, edge_index)
        if (edge_attr is None) != (self.edge_encoder is None):
            raise ValueError(
                f"'edge_attr' is {'missing' if edge_attr is None else 'given'}, but "
                f"the model was built with edge_dim={self.edge_dim}. Set 'edge_dim' "
                "exactly if there are edge features."
            )
        if (edge_label_index is None) != (self.head != "edge"):
            raise ValueError(
                "'edge_label_index' must be given exactly if 'head' is 'edge', got "
                f"{'none' if edge_label_index is None else 'one'} with "
                f"head={self.head!r}."
            )

        if (encodings or {}).keys() != self.encodings.keys():
            raise ValueError(
                f"'encodings' must hold {sorted(self.encodings)}, for which the model "
                f"has encoders, got {sorted(encodings or {})}."
            )

        masks = {} if pad_node_mask is None else {"pad_node_mask": pad_node_mask}
        x = _encode(self.node_encoder, x, "x")
        check_inputs(x, batch=batch)
        if pad_node_mask is not None:
            _check_mask(pad_node_mask, x.size(0))
            if self.pool is not None and batch is None:
                raise ValueError(
                    "'batch' must be given with 'pad_node_mask', as padding belongs to "
                    "graphs of its own, got None."
                )
        batch = None if batch is None else batch.long()
        if encodings:
            pairs = zip(self.encodings.items(), self._encoder_routes, strict=True)
            parts = [
                encoder(encodings[name], **route.select(masks))
                for (name, encoder), route in pairs
            ]
            x = torch.cat([x, *parts], dim=-1)
        if edge_attr is not None and self.edge_encoder is not None:
            edge_attr = _encode(self.edge_encoder, edge_attr, "edge_attr")

        check_size(edge_index, x.size(0))
        for i, (route, layer) in enumerate(
            zip(self._routes, self.layers, strict=False)
        ):
            given = {"batch": batch, "edge_attr": edge_attr, **masks, **kwargs}
            args = {k: v for k, v in given.items() if route.accepts(k, layer)}
            out = route.call(layer, x, edge_index, batch, args)
            x, edge_attr = self._outputs(i, out, edge_attr)
        x, mask = self.norm(x, batch, pad_node_mask), pad_node_mask

        if self.pool is not None:
            if batch is None:  # One graph, even if it has no nodes.
                batch_size = 1
            x = self.pool(x, batch, dim_size=batch_size)
            if mask is not None and batch is not None:  # graphs without padding
                padding = mask.new_zeros(x.size(0), dtype=torch.long)
                mask = padding.index_add(0, batch, (~mask).long()) == 0
        if edge_label_index is None:
            return self._predict(x, mask)
        if readable():
            check_edge_index(edge_label_index, x.size(0), "edge_label_index")
        source, target = check_edges("edge_label_index", edge_label_index, x)
        if not self._is_dot:
            return self.mlp(torch.cat([x[source], x[target]], dim=-1))
        x = self.mlp(x)
        return (x[source] * x[target]).sum(dim=-1, keepdim=True)

    def _predict(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """The head's network; batch norms leave rows out that are not in the mask."""
        if mask is None:
            return self.mlp(x)
        mlp = self.mlp  # its forward method passes norms no mask, hence its steps here
        for lin, norm, p in zip(mlp.lins, mlp.norms, mlp.dropout, strict=False):
            x = masked_norm(norm, lin(x), mask)
            x = F.dropout(x if mlp.act is None else mlp.act(x), p, self.training)
        return mlp.lins[-1](x)

    def _edges(
        self, x: Tensor, edge_index: Adj, edge_attr: Tensor | None
    ) -> tuple[Adj, Tensor | None]:
        """Edges and their features, or else the values of a sparse matrix."""
        if edge_attr is not None:
            return edge_index, edge_attr
        edge_index, values = with_values(edge_index)
        dims = self.edge_dim
        single = len(dims) == 1 if isinstance(dims, Sequence) else dims in (1, -1)
        read = values is not None and (values.dim() == 2 or single)
        return edge_index, values if self.edge_encoder is not None and read else None

    def _outputs(self, index: int, out: Any, edge_attr: Any) -> tuple[Tensor, Any]:
        """The nodes and the edge features after a layer."""
        if not isinstance(out, tuple):
            return out, edge_attr
        shape = None if edge_attr is None else edge_attr.shape
        if len(out) != 2 or getattr(out[1], "shape", None) != shape:
            raise ValueError(
                f"Layer {index} must return nodes, or a pair of nodes and of edge "
                "features of the shape that it was given, got "
                f"{[getattr(y, 'shape', type(y).__name__) for y in out]}"
            )
        return out

    def _reads(self, name: str) -> bool:
        pairs = zip(self._routes, self.layers, strict=False)
        return any(route.accepts(name, layer) for route, layer in pairs)

    def __repr__(self) -> str:
        return (
            f"{self.__class__.__name__}({self.in_channels}, {self.channels}, "
            f"{self.out_channels}, num_layers={len(self.layers)}, head={self.head})"
        )


def _encoder(in_channels: int | Sequence[int], channels: int) -> torch.nn.Module:
    if isinstance(in_channels, Iterable):
        return CategoricalEncoder(in_channels, channels)
    return Linear(in_channels, channels)


def _encode(encoder: torch.nn.Module, x: Tensor, name: str) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"'{name}' must be a torch.Tensor, got {type(x).__name__}.")
    if isinstance(encoder, CategoricalEncoder):
        return encoder(x)
    if not x.is_floating_point():
        raise TypeError(
            f"'{name}' must hold floating point numbers for a linear encoder, got "
            f"{x.dtype}. Convert it, or give the number of categories in each column "
            "if these are categories."
        )
    x = x.view(-1, 1) if x.dim() == 1 else x
    size = getattr(encoder, "in_channels", -1)  # unknown of one that took its place
    if x.size(-1) != size and size > 0:
        raise ValueError(f"'{name}' must be [rows, {size}], got {list(x.shape)}.")
    if x.size(-1) == 0:
        raise ValueError(f"'{name}' must have features, got {list(x.shape)}.")
    return encoder(x)


def _check_mask(mask: Any, num_nodes: int) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = getattr(mask, "dtype", type(mask).__name__)
        raise TypeError(f"'pad_node_mask' must be a tensor of bools, got {got}.")
    if not torch.compiler.is_compiling() and list(mask.shape) != [num_nodes]:
        raise ValueError(
            f"'pad_node_mask' must be of shape [num_nodes] = [{num_nodes}], got "
            f"{list(mask.shape)}."
        )


def _check_padding(mask: Any, num_nodes: Any, batch: Tensor | None) -> None:
    """Checks that padding is in graphs of its own; reads the mask."""
    _check_mask(mask, num_nodes)
    graph = torch.zeros_like(mask, dtype=torch.long) if batch is None else batch
    if bool(torch.isin(graph[~mask], graph[mask]).any()):
        raise ValueError(
            "'data.pad_node_mask' must not mark padding in a graph that has other "
            "nodes, as that of 'torch_geometric.transforms.Pad': layers and pooling "
            "would count it. Use 'pyg_chimera.transforms.PadBatch', which adds graphs."
        )


def _attribute(data: Data | Batch, attr: str, reader: str) -> Tensor:
    if attr not in data:
        raise ValueError(
            f"The data has no attribute '{attr}', which {reader}; it has "
            f"{sorted(data.keys())}. Add it, by the transform for it if there is one "
            "('ImageToGraph' and 'SequenceToGraph' add 'height' and 'width')."
        )
    return data[attr]


def _make_layers(layers: Any, num_layers: int | None) -> list[torch.nn.Module]:
    # Modules are callable too, so iterables, such as lists of modules, come first.
    single = isinstance(layers, torch.nn.Module) and not isinstance(layers, Iterable)
    if single or isinstance(layers, type):
        kind = layers if isinstance(layers, type) else type(layers)
        raise TypeError(
            "'layers' must be a list of layers, or a function that makes one, such as "
            f"'lambda index: GPSLayer(...)', got a single {kind.__name__}"
        )
    described = isinstance(layers, Mapping)
    if isinstance(layers, Iterable) and not described:
        made = [build(x) if isinstance(x, Mapping) else x for x in layers]
        if num_layers not in (None, len(made)):
            raise ValueError(
                f"'num_layers' is {num_layers}, but 'layers' has {len(made)}. Leave "
                "'num_layers' out for given layers."
            )
        return made
    if num_layers is None:
        raise ValueError(
            "'num_layers' must be a number of layers for a function 'layers', got None."
        )
    positions = range(check_integer("num_layers", num_layers, 0))
    return [build(layers) if described else layers(i) for i in positions]
