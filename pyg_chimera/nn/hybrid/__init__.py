"""The systems of a review of hybrid models, thin, on top of the other layers."""

from pyg_chimera.nn.hybrid.attention import (
    DifferentialAttentionConv,
    DifferentialSelfAttention,
    LatentAttentionConv,
    WindowAttentionConv,
)
from pyg_chimera.nn.hybrid.memories import (
    DifferentialGatedDeltaConv,
    HierarchicalMemoryConv,
    SurpriseGatedDeltaConv,
)
from pyg_chimera.nn.hybrid.mixture_of_depths import MixtureOfDepths

__all__ = [
    "DifferentialAttentionConv",
    "DifferentialGatedDeltaConv",
    "DifferentialSelfAttention",
    "HierarchicalMemoryConv",
    "LatentAttentionConv",
    "MixtureOfDepths",
    "SurpriseGatedDeltaConv",
    "WindowAttentionConv",
]
