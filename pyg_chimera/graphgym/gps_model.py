"""Layers of GraphGPS with our mixers; importing this module requires GraphGPS."""

from warnings import warn

import torch
from graphgps.layer.gps_layer import GPSLayer
from graphgps.network.gps_model import GPSModel
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.graphgym.config import cfg

from pyg_chimera.graphgym.mixers import MIXERS, edge_width, make_mixer, run_mixer
from pyg_chimera.nn._routing import Route

__all__ = ["ChimeraGPSLayer", "ChimeraGPSModel"]


class ChimeraGPSLayer(GPSLayer):
    r"""A :obj:`GPSLayer` of GraphGPS whose global model is one of our mixers.

    The mixer runs after the local model. As in GraphGPS, it reads the same nodes as the
    local model, but the edges that :obj:`CustomGatedGCN` has updated.
    """

    def __init__(self, layer: GPSLayer, name: str, index: int) -> None:
        # All that the layer has, in place of making it again: the arguments of its
        # constructor depend on the version of GraphGPS.
        self.__dict__.update(layer.__dict__)
        # The parts after the global model have these names in GraphGPS, or in the code
        # of "Where Did the Gap Go?" (toenshoff/LRGB).
        kinds = [x for x in ("attn", "global") if hasattr(layer, f"dropout_{x}")]
        if not kinds:
            raise ValueError(
                "This GPSLayer has neither 'dropout_attn' nor 'dropout_global', behind "
                "which our mixers stand: take one of the networks instead, such as "
                "model.type ChimeraGPS"
            )
        self.dropout = getattr(layer, f"dropout_{kinds[0]}")
        self.norm_name = f"norm1_{kinds[0]}"
        self.global_model_type = name
        self.edge_dim = edge_width(cfg.gnn.get("dim_edge", layer.dim_h))
        sizes = {"heads": layer.num_heads, "edge_dim": self.edge_dim}
        self.mixer = make_mixer(name, layer.dim_h, index=index, **sizes)
        self._route = Route.of(self.mixer, graph=True)
        self._batch: Data | None = None

    def forward(self, batch: Data) -> Data:
        r"""Replaces the node features of the batch, and where updated, its edge
        features.
        """
        self._batch = batch
        try:
            out = super().forward(batch)
            if self._batch is not None:
                raise self._misplaced("never calls it")
            return out
        finally:
            self._batch = None

    # GPSLayer sums the outputs of its local and its global model, h, then adds the
    # feed-forward block: h + ff(h). Its forward method hard-codes the known global
    # models, so ours, m, joins here: h + (m + ff(h + m)) = (h + m) + ff(h + m).
    def _ff_block(self, x: Tensor) -> Tensor:
        batch, self._batch = self._batch, None
        if batch is None:
            raise self._misplaced("calls it more than once")
        mixed = self._mix(batch)
        return mixed + super()._ff_block(x + mixed)

    def _misplaced(self, what: str) -> ValueError:
        return ValueError(
            f"The mixer {self.global_model_type} is part of the feed-forward block of "
            f"a GPSLayer, '_ff_block', but this one {what}: set 'gt.ff' to "
            "True if there is such an option, or take one of the networks, such as "
            "model.type ChimeraGPS"
        )

    def _mix(self, batch: Data) -> Tensor:
        x = run_mixer(self.mixer, self._route, batch.x, batch, self.edge_dim)
        x = batch.x + self.dropout(x)
        if self.layer_norm:
            x = getattr(self, self.norm_name)(x, batch.batch)
        if self.batch_norm:
            x = getattr(self, self.norm_name)(x)
        return x


class ChimeraGPSModel(GPSModel):
    r"""The :obj:`GPSModel` of GraphGPS, which also accepts
    :obj:`gt.layer_type: <local model>+Chimera`, :obj:`+PLSTM`, :obj:`+GraphMamba`,
    :obj:`+GatedDelta` and :obj:`+KHopAttention`.

    Args:
        dim_in (int): Size of the node features.
        dim_out (int): Size of the predictions.

    Raises:
        ValueError: If an option in :obj:`chimera.*` does not fit the mixer.
    """

    layers: torch.nn.Sequential

    def __init__(self, dim_in: int, dim_out: int) -> None:
        layer_type = cfg.gt.layer_type
        local, _, name = layer_type.partition("+")
        if name not in MIXERS:
            for known in MIXERS:
                if name.lower() == known.lower():
                    raise ValueError(
                        f"gt.layer_type is {layer_type!r}, but must be "
                        f"'{local}+{known}'"
                    )
            super().__init__(dim_in, dim_out)
            return
        if cfg.train.get("mode") == "log-attn-weights":
            raise ValueError(
                f"train.mode must not be 'log-attn-weights' for {layer_type!r}, which "
                "has no attention weights"
            )
        if cfg.gt.get("attn_dropout", 0) > 0:
            warn(
                f"gt.attn_dropout={cfg.gt.attn_dropout} has no effect with {name}, "
                "which drops no attention weights; gt.dropout has",
                stacklevel=2,
            )
        # GPSModel refuses names that it does not know; with 'None', it builds all parts
        # of a layer except the global model.
        cfg.gt.layer_type = f"{local}+None"
        try:
            super().__init__(dim_in, dim_out)
        finally:
            cfg.gt.layer_type = layer_type
        self.layers = torch.nn.Sequential(
            *(ChimeraGPSLayer(x, name, index) for index, x in enumerate(self.layers))
        )
