"""Complete models, from raw features to predictions."""

from pyg_chimera.nn.models.graph_model import CategoricalEncoder, GraphModel
from pyg_chimera.nn.models.hybrid_model import HybridModel
from pyg_chimera.nn.models.image_classifier import ImageClassifier
from pyg_chimera.nn.models.sequence_encoder import SequenceEncoder

__all__ = [
    "CategoricalEncoder",
    "GraphModel",
    "HybridModel",
    "ImageClassifier",
    "SequenceEncoder",
]
