"""A small depthwise convolution of grids."""

from pyg_chimera.ops.grid_conv.op import grid_conv

__all__ = ["grid_conv"]
