"""A short causal depthwise convolution of packed sequences."""

from pyg_chimera.ops.causal_conv1d.op import causal_conv1d

__all__ = ["causal_conv1d"]
