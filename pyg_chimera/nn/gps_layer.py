from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Linear, Sequential
from torch_geometric.nn.resolver import activation_resolver
from torch_geometric.typing import Adj

from pyg_chimera.nn._dropout import Dropout
from pyg_chimera.nn._inputs import (
    TakesTensors,
    check_edge_rows,
    check_inputs,
    check_size,
    with_values,
)
from pyg_chimera.nn._norm import Norm
from pyg_chimera.nn._routing import Route, Wrapper, reset_layer
from pyg_chimera.ops.common.checks import check_integer, check_option

__all__ = ["GPSLayer"]


class GPSLayer(TakesTensors, Wrapper, torch.nn.Module):
    r"""Combines local message passing with any mixer over longer distances, as in the
    `"Recipe for a General, Powerful, Scalable Graph Transformer"
    <https://arxiv.org/abs/2205.12454>`_ paper.

    A local convolution, a mixer and a feed-forward network, each with dropout and a
    norm, follow one another,

    .. math::
        \mathbf{X} \leftarrow \textrm{norm} (\mathbf{X} + f(\mathbf{X})), \qquad
        f = \textrm{conv}, \textrm{mixer}, \textrm{mlp},

    or with :obj:`arrangement="parallel"`, as in that paper and in
    :class:`torch_geometric.nn.GPSConv`, convolution and mixer read the same nodes:

    .. math::
        \mathbf{H} &= \textrm{norm} (\mathbf{X} + \textrm{conv}(\mathbf{X})) +
        \textrm{norm} (\mathbf{X} + \textrm{mixer}(\mathbf{X}))

        \mathbf{X}^{\prime} &= \textrm{norm} (\mathbf{H} +
        \textrm{mlp}(\mathbf{H}))

    With :obj:`norm_first=True`, each :math:`f` reads normalized nodes, and the residual
    path stays free of norms: :math:`\mathbf{X} + f(\textrm{norm} (\mathbf{X}))`. Both
    branches of the parallel layer then share one residual, :math:`\mathbf{H} =
    \mathbf{X} + \textrm{conv}(\textrm{norm}(\mathbf{X})) +
    \textrm{mixer}(\textrm{norm}(\mathbf{X}))`.

    The forward methods of :obj:`conv` and :obj:`mixer` are inspected once, by the
    constructor (so neither can be replaced by a module of another class), and each is
    called with the arguments that it accepts:

    * :obj:`edge_attr` is passed to a module that accepts it, unless its attribute
      :obj:`edge_dim` is :obj:`None`, which is how PyG's layers indicate that they were
      built without edge features;
    * :obj:`batch` and any further keyword (:obj:`edge_weight`, :obj:`edge_type`,
      :obj:`rank`, ...) are passed to whichever accepts them;
    * a keyword with the prefix :obj:`conv_` or :obj:`mixer_` is passed to that one
      only. In particular, :obj:`mixer_edge_index` is a separate graph for the mixer,
      which then gets only :obj:`batch` and the arguments with the prefix;
    * a mixer without edges may be a module on nodes, :obj:`forward(x)` or
      :obj:`forward(x, batch)`, a :class:`torch.nn.MultiheadAttention`, or a module on
      padded graphs, :obj:`forward(x, mask)`, such as
      :class:`torch_geometric.nn.attention.PerformerAttention` (the amount of padding
      affects the results of PyG's, but not those of the former).

    If the convolution returns a pair, as :class:`~pyg_chimera.nn.GatedGCNConv` does,
    its second entry updates the edges: :math:`\mathbf{E}^{\prime} = \mathbf{E} +
    \textrm{dropout}(\cdot)`. A sequential mixer reads :math:`\mathbf{E}^{\prime}`, a
    parallel one :math:`\mathbf{E}`.

    .. code-block:: python

        layer = GPSLayer(
            64,
            conv=GatedGCNConv(64, 64, edge_dim=64),
            mixer=ChimeraConv(64, 64, heads=2, edge_dim=64),
            dropout=0.1,
            norm_first=True,
        )
        x, edge_attr = layer(x, edge_index, batch, edge_attr)

    Args:
        channels (int): Size of each input and output sample.
        conv (torch.nn.Module, optional): The local message passing layer,
            :obj:`conv(x, edge_index, ...)`. (default: :obj:`None`)
        mixer (torch.nn.Module, optional): The layer that mixes all nodes of a
            graph. (default: :obj:`None`)
        dropout (float, optional): Dropout probability after the convolution, the
            mixer, and both layers of the feed-forward network.
            (default: :obj:`0.0`)
        arrangement (str, optional): :obj:`"parallel"` or :obj:`"sequential"`.
            (default: :obj:`"sequential"`, with which Chimera learned four of five
            generated tasks better, mostly with one seed)
        norm (str or torch.nn.Module, optional): The normalization function, by its name
            in :mod:`torch_geometric.nn.norm` or as a module that is copied for each
            use. It gets :obj:`batch` if it accepts it. :obj:`"graph_batch_norm"` is a
            :class:`~pyg_chimera.nn.GraphBatchNorm`: batch norm brings out how graphs
            and nodes differ, which molecules need, and this one also evaluates a single
            graph as it trains. :obj:`"batch_norm"`, as in
            :class:`torch_geometric.nn.GPSConv`, always evaluates by running statistics,
            which lag behind the weights until the learning rate has decayed.
            :obj:`"layer_norm"` normalizes each node separately, and no graph of a batch
            affects another in training. (default: :obj:`"graph_batch_norm"`)
        norm_kwargs (Dict[str, Any], optional): Arguments passed to the normalization
            function defined by :obj:`norm`. For :obj:`"batch_norm"`,
            :obj:`allow_single_element` is set unless given here, and for layer norm,
            :obj:`mode="node"`. (default: :obj:`None`)
        norm_first (bool, optional): If set to :obj:`True`, normalizes the input of
            each part instead of its residual sum. A stack of such layers needs one
            more norm at its end. (default: :obj:`False`)
        act (str or Callable, optional): The non-linear activation function of the
            feed-forward network. (default: :obj:`"relu"`)
        mlp_channels (int, optional): The hidden size of the feed-forward network;
            :obj:`0` leaves the network out. If set to :obj:`None`, it is
            :obj:`2 * channels`. (default: :obj:`None`)
        mlp (torch.nn.Module, optional): Another feed-forward network, :obj:`mlp(x)`,
            such as :class:`~pyg_chimera.nn.SwiGLU`, in place of the one that :obj:`act`
            and :obj:`mlp_channels` describe. Dropout follows it. (default: :obj:`None`)

    Shapes:
        - **inputs:**
          node features :math:`(|\mathcal{V}|, F)`,
          edge indices :math:`(2, |\mathcal{E}|)`,
          batch vector :math:`(|\mathcal{V}|)` *(optional)*,
          edge features :math:`(|\mathcal{E}|, D)` *(optional)*
        - **outputs:** node features :math:`(|\mathcal{V}|, F)`, or
          :math:`((|\mathcal{V}|, F), (|\mathcal{E}|, D))` if the convolution
          updates the edges

    Raises:
        ValueError: If neither :obj:`conv` nor :obj:`mixer` is given, :obj:`arrangement`
            is unknown, or both :obj:`mlp` and :obj:`mlp_channels` are given; in the
            forward method, if the input or an output of :obj:`conv`, :obj:`mixer` or
            :obj:`mlp` does not have the shape that the residual sums need, or
            :obj:`edge_attr` does not have one row per edge.
        TypeError: If :obj:`conv` or :obj:`mixer` is not a module; in the forward
            method, if an argument has the wrong type or dtype, such as edge features in
            place of :obj:`batch`, or neither accepts a keyword argument.
    """

    def __init__(
        self,
        channels: int,
        conv: torch.nn.Module | None = None,
        mixer: torch.nn.Module | None = None,
        *,
        dropout: float = 0.0,
        arrangement: str = "sequential",
        norm: str | torch.nn.Module | None = "graph_batch_norm",
        norm_kwargs: dict[str, Any] | None = None,
        norm_first: bool = False,
        act: str | Callable | None = "relu",
        mlp_channels: int | None = None,
        mlp: torch.nn.Module | None = None,
    ) -> None:
        super().__init__()

        if conv is None and mixer is None:
            raise ValueError(
                "GPSLayer needs a 'conv' or a 'mixer', got neither. Pass at least one, "
                "for example 'mixer=ChimeraConv(channels)'."
            )
        check_option("arrangement", arrangement, ("parallel", "sequential"))
        if mlp is not None and mlp_channels is not None:
            raise ValueError(
                "'mlp_channels' must not be given with an 'mlp', which has its own, "
                f"got {mlp_channels}."
            )
        parts = {"conv": conv, "mixer": mixer}
        for name, part in parts.items():
            if not isinstance(part, torch.nn.Module | None):
                raise TypeError(
                    f"'{name}' must be a module, such as ChimeraConv(64, 64, heads=4), "
                    f"got {part!r}"
                )

        self.channels = channels = check_integer("channels", channels, 1)
        self.arrangement = arrangement
        self.norm_first = norm_first

        self.conv = conv
        self.mixer = mixer
        self._routes = {
            name: Route.of(part, graph=name == "conv")
            for name, part in parts.items()
            if part is not None
        }

        self.drop = Dropout(dropout)
        self.mlp = None
        if mlp_channels is None:
            mlp_channels = 2 * channels
        mlp_channels = check_integer("mlp_channels", mlp_channels, 0)
        if mlp is not None:
            self.mlp = Sequential(mlp, Dropout(dropout))
        elif mlp_channels > 0:
            self.mlp = Sequential(
                Linear(channels, mlp_channels),
                activation_resolver(act) or torch.nn.Identity(),
                Dropout(dropout),
                Linear(mlp_channels, channels),
                Dropout(dropout),
            )

        # Only parts that exist have a norm.
        norms = {
            name: Norm(norm, channels, norm_kwargs)
            for name, part in {**parts, "mlp": self.mlp}.items()
            if (norm is not None or norm_kwargs) and part is not None
        }
        self.norms = torch.nn.ModuleDict(norms)

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        for module in self.children():
            reset_layer(module)

    def accepts(self, name: str) -> bool:
        r"""Whether the forward method accepts a keyword argument called :obj:`name`,
        for either :obj:`conv` or :obj:`mixer`. It takes :obj:`edge_attr` in any case,
        but this tells whether one of them reads it.
        """
        if name in ("batch", "pad_node_mask"):
            return True
        for role, route in self._routes.items():
            if name.startswith(f"{role}_"):
                bare = name.removeprefix(f"{role}_")
                return bare == "edge_index" or route.is_open or route.accepts(bare)
        return any(route.accepts(name) for route in self._routes.values())

    def forward(
        self,
        x: Tensor,
        edge_index: Adj,
        batch: Tensor | None = None,
        edge_attr: Tensor | None = None,
        pad_node_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor): The node features.
            edge_index (torch.Tensor or SparseTensor): The edge indices.
            batch (torch.Tensor, optional): The batch vector, which assigns each
                node to a graph. (default: :obj:`None`)
            edge_attr (torch.Tensor, optional): The edge features.
                (default: :obj:`None`)
            pad_node_mask (torch.Tensor, optional): The nodes that are no padding, bool,
                see :class:`~pyg_chimera.transforms.PadBatch`. Batch norms leave the
                others out. (default: :obj:`None`)
            **kwargs (optional): Arguments of :obj:`conv` and :obj:`mixer`, by name.

        Returns:
            The node features, or a pair of node and edge features if :obj:`conv`
            updates both.
        """
        check_inputs(x, self.channels, batch)
        batch = None if batch is None else batch.long()  # some norms take no others
        check_edge_rows(edge_attr, edge_index)
        check_size(edge_index, x.size(0))
        if edge_attr is None:
            edge_index, values = with_values(edge_index)
            edge_attr = values if values is not None and values.dim() == 2 else None
        for name in kwargs:
            if not self.accepts(name):
                raise TypeError(
                    f"'{name}' is not a parameter that the forward method of 'conv' or "
                    "'mixer' takes. Remove it, or prefix it with 'conv_' or 'mixer_' "
                    "for a module with '**kwargs'."
                )

        parallel, mask = self.arrangement == "parallel", pad_node_mask
        if mask is not None:
            kwargs["pad_node_mask"] = mask
        out, sums = x, []
        edges: Any = edge_attr
        for role in ("conv", "mixer"):
            if getattr(self, role) is None:
                continue
            h, e = (x, edge_attr) if parallel else (out, edges)
            h = self._norm(role, h, batch, mask) if self.norm_first else h
            h, update = self._call(role, h, edge_index, batch, e, kwargs)
            h = self.drop(h)
            if update is not None:
                edges = edges + self.drop(update)

            if self.norm_first:
                out = out + h
            elif parallel:
                sums.append(self._norm(role, x + h, batch, mask))
            else:
                out = self._norm(role, out + h, batch, mask)
        if len(sums) > 0:
            out = sums[0] if len(sums) == 1 else sums[0] + sums[1]

        out = self._feed_forward(out, batch, mask)
        return out if edges is edge_attr else (out, edges)

    def step(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
        r"""Extends each sequence by one node; returns the output of :meth:`forward` for
        this node. Requires a causal mixer with a method :obj:`step`, no convolution,
        and norms that normalize each node separately, as plain batch norm does only in
        evaluation.

        Args:
            x (torch.Tensor): The features of the new nodes, one for each sequence,
                :math:`[B, F]`.
            state (Any, optional): The state that the previous step returned. (default:
                :obj:`None`, for the first nodes)

        Returns:
            tuple[torch.Tensor, Any]: :math:`[B, F]`, and the state for the next step.

        Raises:
            ValueError: If there is a convolution, the mixer does not support it, or
                norms read whole graphs, as does the default,
                :class:`~pyg_chimera.nn.GraphBatchNorm`.
        """
        check_inputs(x, self.channels)
        if self.conv is not None or not hasattr(self.mixer, "step"):
            raise ValueError(
                "Sequences are continued by a layer without 'conv', with a mixer that "
                f"has a method 'step', got conv={self.conv} and mixer={self.mixer}"
            )
        for norm in self.norms.values():
            if cast(Norm, norm).reads_graphs:
                raise ValueError(
                    "Sequences are continued by a layer with norms of each node, got "
                    f"{norm.norm}, which reads whole graphs. Construct it with "
                    "norm='layer_norm', or 'batch_norm' for evaluation only."
                )
        h = self._norm("mixer", x, None) if self.norm_first else x
        h, state = cast(Any, self.mixer).step(h, state)
        out = x + self.drop(h)
        out = out if self.norm_first else self._norm("mixer", out, None)
        return self._feed_forward(out, None), state

    def _feed_forward(
        self, x: Tensor, batch: Tensor | None, mask: Tensor | None = None
    ) -> Tensor:
        if self.mlp is None:
            return x
        out = self.mlp(self._norm("mlp", x, batch, mask) if self.norm_first else x)
        if out.shape != x.shape:
            raise ValueError(
                "'mlp' must return node features with the shape of its input, "
                f"{list(x.shape)}, got {list(out.shape)}."
            )
        return x + out if self.norm_first else self._norm("mlp", x + out, batch, mask)

    def _norm(
        self, name: str, x: Tensor, batch: Tensor | None, mask: Tensor | None = None
    ) -> Tensor:
        return self.norms[name](x, batch, mask) if name in self.norms else x

    def _call(
        self,
        role: str,
        x: Tensor,
        edge_index: Adj,
        batch: Tensor | None,
        edge_attr: Tensor | None,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Calls a role; returns the update of nodes, and that of edges or None."""
        if role not in self._routes:
            raise ValueError(
                f"'{role}' must be given to the constructor, as a part that the layer "
                "does not have has no norm either"
            )
        prefix = f"{role}_"
        for_role = {
            name.removeprefix(prefix): value
            for name, value in kwargs.items()
            if name.startswith(prefix)
        }
        shared = {"batch": batch}
        if "pad_node_mask" in kwargs:
            shared["pad_node_mask"] = kwargs["pad_node_mask"]
        if for_role.get("edge_index") is None:
            shared = {**shared, "edge_attr": edge_attr, **kwargs}
        args = self._routes[role].select(shared) | for_role
        replaced = args.pop("edge_index", None)
        edge_index = edge_index if replaced is None else replaced

        out = self._routes[role].call(getattr(self, role), x, edge_index, batch, args)

        update = None
        if isinstance(out, tuple):
            expected = None if edge_attr is None else list(edge_attr.shape)
            shapes = [list(getattr(part, "shape", [])) for part in out]
            if len(out) != 2 or shapes[1] != expected:
                raise ValueError(
                    f"'{role}' must return node features, or a pair of them and of "
                    f"edge features that has the shape of 'edge_attr', {expected}; "
                    f"got a tuple with the shapes {shapes}. Encode the edge features "
                    "to their later width before the first layer."
                )
            out, update = out
        if out.shape != x.shape:
            raise ValueError(
                f"'{role}' must return node features with the shape of its input, "
                f"{list(x.shape)}, got {list(out.shape)}. Give it {self.channels} "
                "output channels, all heads together."
            )
        return out, update

    def __repr__(self) -> str:
        return (
            f"{self.__class__.__name__}({self.channels}, conv={self.conv}, "
            f"mixer={self.mixer}, arrangement={self.arrangement})"
        )
