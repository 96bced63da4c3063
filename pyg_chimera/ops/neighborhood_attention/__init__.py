"""Softmax attention of each node over the sources of its incoming edges."""

from pyg_chimera.ops.neighborhood_attention.op import neighborhood_attention

__all__ = ["neighborhood_attention"]
