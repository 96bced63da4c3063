"""Graph layers, the layer around them, encoders, and models."""

from pyg_chimera.nn.conv import (
    ChimeraConv,
    ChimeraDAGConv,
    ChimeraGridConv,
    ChimeraPathConv,
    GatedGCNConv,
    GraphMambaConv,
    PLSTMConv,
    PLSTMGridConv,
)
from pyg_chimera.nn.encoders import LaplacianEncoder, RandomWalkEncoder
from pyg_chimera.nn.gps_layer import GPSLayer
from pyg_chimera.nn.models import CategoricalEncoder, GraphModel

__all__ = [
    "CategoricalEncoder",
    "ChimeraConv",
    "ChimeraDAGConv",
    "ChimeraGridConv",
    "ChimeraPathConv",
    "GPSLayer",
    "GatedGCNConv",
    "GraphMambaConv",
    "GraphModel",
    "LaplacianEncoder",
    "PLSTMConv",
    "PLSTMGridConv",
    "RandomWalkEncoder",
]
