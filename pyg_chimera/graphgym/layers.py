from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.graphgym.config import cfg
from torch_geometric.graphgym.init import init_weights
from torch_geometric.graphgym.models.layer import LayerConfig
from torch_geometric.nn.dense.linear import Linear
from typing_extensions import Self

from pyg_chimera.graphgym.mixers import edge_width, make_mixer, run_mixer
from pyg_chimera.nn._routing import Route

__all__ = ["MixerLayer"]


class MixerLayer(torch.nn.Module):
    r"""A mixer as a layer of GraphGym's :obj:`model.type: gnn`, from batch to batch,
    registered for each mixer, such as :class:`~pyg_chimera.nn.ChimeraConv` as
    :obj:`gnn.layer_type: chimera`.

    Norm, activation, dropout and residual connection are those that GraphGym puts
    around its layers, by its options :obj:`gnn.*`. Where the width changes, a linear
    layer comes first.

    Args:
        layer_config (LayerConfig): The configuration of the layer.
        mixer (str): The name of the mixer, such as :obj:`"Chimera"`.
        **kwargs (optional): Other arguments that GraphGym passes to layers; not used.

    Raises:
        ValueError: If an option in :obj:`chimera.*` does not fit the mixer; in the
            forward method, if the batch lacks the edge features that options require.
    """

    def __init__(self, layer_config: LayerConfig, mixer: str, **kwargs: Any) -> None:
        super().__init__()
        channels = layer_config.dim_out
        self.lin = None
        if layer_config.dim_in != channels:
            self.lin = Linear(layer_config.dim_in, channels)
        self.edge_dim = edge_width(cfg.gnn.dim_inner)
        self.model = make_mixer(
            mixer, channels, heads=cfg.gnn.att_heads, edge_dim=self.edge_dim
        )
        self._route = Route.of(self.model, graph=True)

    def apply(self, fn: Any) -> Self:
        """As that of any module, except for what GraphGym calls to reinitialise all
        linear layers, with biases of zero: a state space model would then forget all
        but its last inputs.
        """
        return self if fn is init_weights else super().apply(fn)

    def forward(self, batch: Data) -> Data:
        r"""Replaces the node features of the batch.

        Args:
            batch (torch_geometric.data.Data): The batch.
        """
        x = batch.x if self.lin is None else self.lin(batch.x)
        batch.x = run_mixer(self.model, self._route, x, batch, self.edge_dim)
        return batch
