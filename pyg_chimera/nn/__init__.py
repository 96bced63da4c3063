"""Graph layers, the layer around them, and models."""

from pyg_chimera.nn.conv import ChimeraConv, GatedGCNConv, PLSTMConv
from pyg_chimera.nn.gps_layer import GPSLayer
from pyg_chimera.nn.models import CategoricalEncoder, GraphModel

__all__ = [
    "CategoricalEncoder",
    "ChimeraConv",
    "GPSLayer",
    "GatedGCNConv",
    "GraphModel",
    "PLSTMConv",
]
