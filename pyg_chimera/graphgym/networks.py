from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.graphgym import register
from torch_geometric.graphgym.config import cfg
from torch_geometric.graphgym.models.gnn import FeatureEncoder, GNNPreMP
from torch_geometric.nn import GCNConv, GINConv, GINEConv
from torch_geometric.nn.dense.linear import Linear

from pyg_chimera.graphgym.mixers import (
    edge_width,
    edges_read,
    make_hybrid,
    make_mixer,
    structure,
)
from pyg_chimera.nn import GatedGCNConv, GPSLayer, MixtureOfDepths
from pyg_chimera.ops.common.checks import check_option

__all__ = ["GPSNetwork"]

_Layers = tuple[Sequence[torch.nn.Module], torch.nn.Module | None]
_CONVS = ("gated_gcn", "gin", "gcn", "none")


class GPSNetwork(torch.nn.Module):
    r"""A network of :class:`~pyg_chimera.nn.GPSLayer` between the encoders and the
    heads of GraphGym, registered for each mixer, such as
    :class:`~pyg_chimera.nn.ChimeraConv` as :obj:`model.type: ChimeraGPS`. Layers
    combine the mixer and a local convolution; those of :obj:`HybridGPS` are the blocks
    of a :class:`~pyg_chimera.nn.HybridModel`, recurrences and attention according to
    :obj:`chimera.pattern`, with their own norms and networks, and no convolution.

    Its width is :obj:`gnn.dim_inner`, its depth :obj:`gnn.layers_mp`;
    :obj:`gnn.layers_pre_mp`, :obj:`gnn.act`, :obj:`gnn.dropout`,
    :obj:`gnn.batchnorm` and :obj:`gnn.head` have the same meaning as in GraphGym's own.

    Args:
        dim_in (int): Size of the node features.
        dim_out (int): Size of the predictions.
        mixer (str): The name of the mixer, such as :obj:`"Chimera"`, or
            :obj:`"Hybrid"`.

    Raises:
        ValueError: If an option in :obj:`chimera.*` is unknown or does not fit the
            mixer, or nodes don't have the width of the layers; in the forward method,
            if the batch lacks the edge features that options require.
    """

    def __init__(self, dim_in: int, dim_out: int, mixer: str) -> None:
        super().__init__()
        self.mixer = mixer
        channels = cfg.gnn.dim_inner
        self.encoder = FeatureEncoder(dim_in)
        dim_in = self.encoder.dim_in
        if cfg.gnn.layers_pre_mp > 0:
            self.pre_mp = GNNPreMP(dim_in, channels, cfg.gnn.layers_pre_mp)
            dim_in = channels
        if dim_in != channels:
            raise ValueError(
                f"Nodes must have the width of the layers, 'gnn.dim_inner' ({channels})"
                f", got {dim_in}. Set 'gnn.layers_pre_mp: 1', or encode them with "
                "'dataset.node_encoder: True'."
            )
        self.mp = _Stage(channels, self._layers)
        self.post_mp = register.head_dict[cfg.gnn.head](channels, dim_out)

    def forward(self, batch: Data) -> tuple:
        r"""Returns what the head returns: predictions and labels.

        Args:
            batch (torch_geometric.data.Data): The batch.
        """
        for module in self.children():
            batch = module(batch)
        return batch

    def _layers(self, channels: int, edge_dim: int | None) -> _Layers:
        """The layers, for nodes and edges (if any) of these sizes, and a final norm or
        None.
        """
        num_layers, layers = cfg.gnn.layers_mp, []
        sizes = {"heads": cfg.gnn.att_heads, "edge_dim": edge_dim}
        if self.mixer == "Hybrid":
            dropout = cfg.gnn.dropout
            model = make_hybrid(channels, num_layers, dropout=dropout, **sizes)
            return list(model.layers), model.norm
        norm = {"eps": cfg.bn.eps, "momentum": cfg.bn.mom}
        for index in range(num_layers):
            mixer = make_mixer(self.mixer, channels, index=index, **sizes)
            # Edges updated by the last layer are read only by its own mixer, if that
            # takes edges and follows the convolution.
            read = cfg.chimera.arrangement == "sequential"
            read = read and self.mixer != "GraphMamba"
            conv = _local_conv(
                channels, edge_dim is not None, index + 1 < num_layers or read
            )
            layer = GPSLayer(
                channels,
                conv=conv,
                mixer=mixer,
                dropout=cfg.gnn.dropout,
                arrangement=cfg.chimera.arrangement,
                norm="graph_batch_norm" if cfg.gnn.batchnorm else None,
                norm_kwargs=norm if cfg.gnn.batchnorm else None,
                act=register.act_dict[cfg.gnn.act](),
            )
            layers.append(layer)
        return layers, None


class _Stage(torch.nn.Module):
    """The layers, as a module that maps batches to batches."""

    def __init__(
        self, channels: int, make: Callable[[int, int | None], _Layers]
    ) -> None:
        super().__init__()
        self.edge_dim = edge_width(channels)
        layers, self.norm = make(channels, None if self.edge_dim is None else channels)
        self.layers = torch.nn.ModuleList(layers)
        self.edge_lin = None
        if self.edge_dim not in (None, channels) and _reads_edges(self.layers):
            self.edge_lin = Linear(self.edge_dim, channels)

    def forward(self, batch: Data) -> Data:
        x, edge_attr = batch.x, edges_read(batch, self.edge_dim)
        if self.edge_lin is not None:
            edge_attr = self.edge_lin(edge_attr)
        layer: Any
        for layer in self.layers:
            routed = isinstance(layer, MixtureOfDepths)  # structure is of all nodes
            stored = {} if routed else structure(batch, layer.accepts)
            out = layer(x, batch.edge_index, batch.batch, edge_attr, **stored)
            x, edge_attr = out if isinstance(out, tuple) else (out, edge_attr)
        batch.x = x if self.norm is None else self.norm(x, batch.batch)
        if edge_attr is not None:
            batch.edge_attr = edge_attr
        return batch


def _reads_edges(layers: torch.nn.Module) -> bool:
    """Whether a convolution or a mixer of the layers has parameters for edges."""
    return any(
        isinstance(module, GINEConv) or getattr(module, "edge_dim", None)
        for module in layers.modules()
    )


def _local_conv(
    channels: int, has_edges: bool, update_edges: bool
) -> torch.nn.Module | None:
    """The local layer according to `chimera.conv`, or None."""
    name = cfg.chimera.conv
    check_option("chimera.conv", name, _CONVS)
    if name == "none":
        return None
    if name == "gcn":
        return GCNConv(channels, channels)
    act = register.act_dict[cfg.gnn.act]()
    if name == "gin":
        mlp = torch.nn.Sequential(
            Linear(channels, channels), act, Linear(channels, channels)
        )
        return GINEConv(mlp, edge_dim=channels) if has_edges else GINConv(mlp)
    return GatedGCNConv(
        channels,
        channels,
        edge_dim=channels if has_edges else None,
        update_edges=update_edges,
        norm="graph_batch_norm" if cfg.gnn.batchnorm else None,
        act=act,
    )
