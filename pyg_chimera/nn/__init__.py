"""Graph layers, the blocks around them, encoders, and models."""

from pyg_chimera.nn.attention import SelfAttention
from pyg_chimera.nn.conv import (
    ChimeraConv,
    ChimeraDAGConv,
    ChimeraGridConv,
    ChimeraPathConv,
    GatedDeltaConv,
    GatedGCNConv,
    GraphMambaConv,
    KHopAttentionConv,
    PLSTMConv,
    PLSTMGridConv,
    RGLRUConv,
)
from pyg_chimera.nn.encoders import (
    LaplacianEncoder,
    PositionEmbedding,
    RandomWalkEncoder,
)
from pyg_chimera.nn.gps_layer import GPSLayer
from pyg_chimera.nn.graph_batch_norm import GraphBatchNorm
from pyg_chimera.nn.hetero_layer import HeteroLayer
from pyg_chimera.nn.hybrid import (
    DifferentialAttentionConv,
    DifferentialGatedDeltaConv,
    DifferentialSelfAttention,
    HierarchicalMemoryConv,
    LatentAttentionConv,
    MixtureOfDepths,
    SurpriseGatedDeltaConv,
    WindowAttentionConv,
)
from pyg_chimera.nn.models import (
    CategoricalEncoder,
    GraphModel,
    HybridModel,
    ImageClassifier,
    SequenceEncoder,
)
from pyg_chimera.nn.swiglu import SwiGLU

__all__ = [
    "CategoricalEncoder",
    "ChimeraConv",
    "ChimeraDAGConv",
    "ChimeraGridConv",
    "ChimeraPathConv",
    "DifferentialAttentionConv",
    "DifferentialGatedDeltaConv",
    "DifferentialSelfAttention",
    "GPSLayer",
    "GatedDeltaConv",
    "GatedGCNConv",
    "GraphBatchNorm",
    "GraphMambaConv",
    "GraphModel",
    "HeteroLayer",
    "HierarchicalMemoryConv",
    "HybridModel",
    "ImageClassifier",
    "KHopAttentionConv",
    "LaplacianEncoder",
    "LatentAttentionConv",
    "MixtureOfDepths",
    "PLSTMConv",
    "PLSTMGridConv",
    "PositionEmbedding",
    "RGLRUConv",
    "RandomWalkEncoder",
    "SelfAttention",
    "SequenceEncoder",
    "SurpriseGatedDeltaConv",
    "SwiGLU",
    "WindowAttentionConv",
]
