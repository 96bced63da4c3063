"""Small depthwise convolutions of packed sequences and of grids."""

from pyg_chimera.ops.short_conv.op import causal_conv1d, grid_conv

__all__ = ["causal_conv1d", "grid_conv"]
