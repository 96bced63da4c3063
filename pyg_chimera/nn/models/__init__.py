"""Complete models, from raw features to predictions."""

from pyg_chimera.nn.models.graph_model import CategoricalEncoder, GraphModel

__all__ = ["CategoricalEncoder", "GraphModel"]
