from collections.abc import Callable
from typing import Any, ClassVar, Optional

import torch
from torch import Tensor
from torch_geometric.nn import BatchNorm
from torch_geometric.nn.conv import MessagePassing
from torch_geometric.nn.dense.linear import Linear
from torch_geometric.nn.inits import reset
from torch_geometric.nn.resolver import activation_resolver
from torch_geometric.typing import Adj, OptTensor, PairTensor

from pyg_chimera.nn._inputs import (
    at_least_float32,
    check_channels,
    check_in_channels,
    check_inputs,
    check_size,
    edge_features,
    named,
    plain_edges,
)
from pyg_chimera.nn.conv._base import Layer
from pyg_chimera.nn.graph_batch_norm import GraphBatchNorm, masked_norm
from pyg_chimera.ops.common.checks import check_edges
from pyg_chimera.ops.common.portability import is_portable

__all__ = ["GatedGCNConv"]


class GatedGCNConv(Layer, MessagePassing):
    r"""The gated graph convolution from the `"Residual Gated Graph ConvNets"
    <https://arxiv.org/abs/1711.07553>`_ paper, in the form with edge features of
    the `"Benchmarking Graph Neural Networks" <https://arxiv.org/abs/2003.00982>`_
    paper, which updates the nodes and the edges.

    .. math::
        \hat{\mathbf{e}}_{j,i} &= \mathbf{W}_t \mathbf{x}_i + \mathbf{W}_s
        \mathbf{x}_j + \mathbf{W}_e \mathbf{e}_{j,i}

        \eta_{j,i} &= \frac{\sigma(\hat{\mathbf{e}}_{j,i})}
        {\sum_{k \in \mathcal{N}(i)} \sigma(\hat{\mathbf{e}}_{k,i}) + \epsilon}

        \mathbf{x}^{\prime}_i &= \phi \Big( \textrm{norm} \Big( \mathbf{W}_r
        \mathbf{x}_i + \sum_{j \in \mathcal{N}(i)} \eta_{j,i} \odot \mathbf{W}_v
        \mathbf{x}_j \Big) \Big)

        \mathbf{e}^{\prime}_{j,i} &= \phi \big( \textrm{norm} (
        \hat{\mathbf{e}}_{j,i} ) \big)

    with the sigmoid :math:`\sigma`, an activation :math:`\phi`, :math:`\epsilon =
    10^{-6}`, and separate norms for nodes and edges. Without edge features,
    :math:`\mathbf{W}_e \mathbf{e}_{j,i}` is dropped, and only the nodes are updated and
    returned.

    .. note::

        The layer returns *updates*: dropout and the residual connections, for both
        nodes and edges, belong to the layer around it, such as
        :class:`~pyg_chimera.nn.GPSLayer`. For example, :math:`\mathbf{x} +
        \textrm{dropout}(\textrm{relu}(\textrm{bn}(\cdot)))`, the usual recipe, is
        ``GPSLayer(64, conv=GatedGCNConv(64, 64, edge_dim=64), dropout=0.1)``. With
        :obj:`norm=None` and :obj:`act=None`, the layer has neither norms nor
        :math:`\phi`.

    Args:
        in_channels (int or tuple): Size of each input sample, or :obj:`-1` to
            derive the size from the first input(s) to the forward method.
            A tuple corresponds to the sizes of source and target
            dimensionalities in case of a bipartite graph.
        out_channels (int): Size of each output sample, for nodes and edges.
        edge_dim (int, optional): Edge feature dimensionality, or :obj:`-1` to derive
            it from the first input. (default: :obj:`None`, no edge features)
        update_edges (bool, optional): With :obj:`edge_dim`, whether edge features are
            updated, and returned together with the nodes. If set to :obj:`False`, they
            are only read. Use this for the last
            layer of a stack if nothing after it, such as a mixer, reads the edges:
            otherwise, the parameters of their norm get no gradients, which is an error
            in distributed training. (default: :obj:`True`)
        norm (str, optional): The normalization of nodes and of edges:
            :obj:`"graph_batch_norm"` (:class:`~pyg_chimera.nn.GraphBatchNorm`),
            :obj:`"batch_norm"`, :obj:`"layer_norm"` (each row on its own) or
            :obj:`None`. (default: :obj:`"graph_batch_norm"`)
        act (str or Callable, optional): The activation :math:`\phi`.
            (default: :obj:`"relu"`)
        bias (bool, optional): If set to :obj:`False`, the layer will not learn
            additive biases. (default: :obj:`True`)
        **kwargs (optional): Additional arguments of
            :class:`torch_geometric.nn.conv.MessagePassing`, :obj:`aggr` excepted.

    Shapes:
        - **inputs:**
          node features :math:`(|\mathcal{V}|, F_{in})` or
          :math:`((|\mathcal{V_s}|, F_{s}), (|\mathcal{V_t}|, F_{t}))`
          if bipartite,
          edge indices :math:`(2, |\mathcal{E}|)`,
          edge features :math:`(|\mathcal{E}|, D)` *(optional)*
        - **outputs:** node features :math:`(|\mathcal{V}|, F_{out})` or
          :math:`(|\mathcal{V_t}|, F_{out})` if bipartite.
          With :obj:`edge_dim`, unless :obj:`update_edges=False`,
          :math:`((|\mathcal{V}|, F_{out}), (|\mathcal{E}|, F_{out}))`

    Raises:
        ValueError: If :obj:`norm` is unknown; in the forward method, if edge features
            are missing with :obj:`edge_dim`, given without, or do not have one row per
            edge.
        TypeError: In the forward method, if features are not floating-point tensors.
    """

    eps = 1e-6

    # Attributes rather than PyG's type comments: PyG would resolve their names with a
    # star import of this module, from which `__all__` hides them.
    propagate_type: ClassVar = {"value": PairTensor, "gate": Tensor}
    edge_updater_type: ClassVar = {
        "target": Tensor,
        "source": Tensor,
        "edge": OptTensor,
    }

    def __init__(
        self,
        in_channels: int | tuple[int, int],
        out_channels: int,
        edge_dim: int | None = None,
        *,
        update_edges: bool = True,
        norm: str | None = "graph_batch_norm",
        act: str | Callable | None = "relu",
        bias: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(aggr="add", **named(self, kwargs))

        sizes = in_channels if isinstance(in_channels, tuple) else (in_channels,) * 2
        if len(sizes) != 2:
            raise ValueError(
                "'in_channels' must be an integer, or a pair of them for source and "
                f"target nodes, got {in_channels!r}"
            )
        source, out_channels, edge_dim = check_channels(
            sizes[0], out_channels, edge_dim
        )
        target = check_in_channels(sizes[1])
        self.in_channels = (
            (source, target) if isinstance(in_channels, tuple) else source
        )
        self.out_channels = out_channels
        self.edge_dim = edge_dim
        self.update_edges = update_edges and edge_dim is not None

        # The sum of three projections needs only one bias, that of the target.
        self.lin_root = Linear(target, out_channels, bias=bias)
        self.lin_value = Linear(source, out_channels, bias=bias)
        self.lin_target = Linear(target, out_channels, bias=bias)
        self.lin_source = Linear(source, out_channels, bias=False)
        self.lin_edge = self.norm_edge = None
        if edge_dim is not None:
            self.lin_edge = Linear(edge_dim, out_channels, bias=False)
        if self.update_edges:
            self.norm_edge = _row_norm(norm, out_channels)
        self.norm = _row_norm(norm, out_channels)
        self.unsure_without_batch = isinstance(self.norm, GraphBatchNorm)
        self.act = activation_resolver(act)

        self.reset_parameters()

    def reset_parameters(self) -> None:
        r"""Resets all learnable parameters of the module."""
        super().reset_parameters()
        for module in self.children():
            reset(module)

    def forward(
        self,
        x: Tensor | PairTensor,
        edge_index: Adj,
        edge_attr: OptTensor = None,
        batch: OptTensor = None,
        pad_node_mask: OptTensor = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        r"""Runs the forward pass of the module.

        Args:
            x (torch.Tensor or (torch.Tensor, torch.Tensor)): The node features.
            edge_index (torch.Tensor or SparseTensor): The edge indices.
            edge_attr (torch.Tensor, optional): The edge features, for layers with
                :obj:`edge_dim`. A sparse :obj:`edge_index` may hold them as its values,
                one row per edge. (default: :obj:`None`)
            batch (torch.Tensor, optional): The batch vector of the (target) nodes,
                which :obj:`norm="graph_batch_norm"` reads. Without it, graphs are
                unknown, and this norm is plain batch norm. (default: :obj:`None`)
            pad_node_mask (torch.Tensor, optional): The (target) nodes that are no
                padding, bool, see :class:`~pyg_chimera.transforms.PadBatch`. Batch
                norms leave the others out. (default: :obj:`None`)

        Returns:
            The update of the nodes, or with :obj:`edge_dim` and :obj:`update_edges` a
            pair of the updates of nodes and edges.
        """
        if isinstance(x, tuple) and len(x) != 2:
            raise TypeError(
                "'x' must be a torch.Tensor, or a pair of them for source and target "
                f"nodes, got a tuple of {len(x)}"
            )
        x_source, x_target = x if isinstance(x, tuple) else (x, x)
        check_inputs(x_source, getattr(self.lin_source, "in_channels", -1))
        check_inputs(x_target, getattr(self.lin_target, "in_channels", -1), batch)
        check_size(edge_index, x_target.size(0), x_source.size(0))
        # PyG's propagation does not take all forms, and gains nothing from others.
        edge_index, edge_attr = plain_edges(edge_index, edge_attr, self.edge_dim)
        edge_index = check_edges("edge_index", edge_index, x_source)
        if self.lin_edge is not None:
            num_edges = edge_index.size(1)
            edge_attr = edge_features(edge_attr, self.edge_dim, num_edges)
            edge_attr = self.lin_edge(edge_attr)

        edge = self.edge_updater(
            edge_index,
            target=self.lin_target(x_target),
            source=self.lin_source(x_source),
            edge=edge_attr,
        )

        gate = at_least_float32(edge)
        # For onnxruntime, which rounds off small sigmoids; these are divided.
        gate = 1 / (1 + torch.exp(-gate)) if is_portable() else gate.sigmoid()
        # Some explainers, such as GraphMaskExplainer, read the nodes of a message.
        more = {"x": (x_source, x_target)} if self.explain else {}
        # The second entry only tells the number of targets. Sums of gates may be too
        # small to divide by in half precision.
        root = self.lin_root(x_target)
        out = root + self.propagate(
            edge_index,
            value=(self.lin_value(x_source), root),
            gate=gate,
            **more,
        )
        mask = pad_node_mask
        out = self._finish(out.to(root.dtype), self.norm, batch, mask)

        if not self.update_edges:
            return out
        of_edges = [None if y is None else y[edge_index[1]] for y in (batch, mask)]
        return out, self._finish(edge, self.norm_edge, *of_edges)

    def _finish(
        self,
        x: Tensor,
        norm: torch.nn.Module | None,
        batch: OptTensor,
        mask: OptTensor,
    ) -> Tensor:
        if isinstance(norm, GraphBatchNorm) and batch is not None:
            x = norm(x, batch, mask)
        elif isinstance(norm, GraphBatchNorm) and mask is None:
            x = BatchNorm.forward(norm, x)
        elif norm is not None:
            x = masked_norm(norm, x, mask)
        return x if self.act is None else self.act(x)

    def edge_update(
        self, target_i: Tensor, source_j: Tensor, edge: OptTensor
    ) -> Tensor:
        r"""Computes :math:`\hat{\mathbf{e}}_{j,i}`."""
        out = target_i + source_j
        return out if edge is None else out + edge

    def message(self, value_j: Tensor, gate: Tensor) -> Tensor:
        r"""Constructs :math:`\sigma(\hat{\mathbf{e}}_{j,i}) \odot \mathbf{W}_v
        \mathbf{x}_j`.
        """
        return gate * value_j

    def aggregate(
        self,
        inputs: Tensor,
        gate: Tensor,
        index: Tensor,
        ptr: OptTensor = None,
        dim_size: Optional[int] = None,  # noqa: UP045 (PyG cannot parse the other)
    ) -> Tensor:
        r"""Sums the messages and divides by the sum of their gates.

        Dividing here, rather than each gate before, saves an array as large as the
        edges. Messages masked by an explanation leave the gates unchanged, as in PyG's
        attention.
        """
        total = super().aggregate(gate, index, ptr=ptr, dim_size=dim_size)
        out = super().aggregate(inputs, index, ptr=ptr, dim_size=dim_size)
        return out / (total + self.eps)

    def __repr__(self) -> str:
        return (
            f"{self.__class__.__name__}({self.in_channels}, {self.out_channels}, "
            f"edge_dim={self.edge_dim})"
        )


def _row_norm(norm: str | None, channels: int) -> torch.nn.Module | None:
    if norm is None:
        return None
    if norm == "graph_batch_norm":
        return GraphBatchNorm(channels)
    if norm == "batch_norm":  # A graph may have a single edge, or none at all.
        return BatchNorm(channels, allow_single_element=True)
    if norm == "layer_norm":
        return torch.nn.LayerNorm(channels)
    raise ValueError(
        "'norm' must be 'graph_batch_norm', 'batch_norm', 'layer_norm' or None, got "
        f"{norm!r}."
    )
