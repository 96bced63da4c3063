"""Complete models, from raw features to predictions."""

from pyg_chimera.nn.models.graph_model import CategoricalEncoder, GraphModel
from pyg_chimera.nn.models.image_classifier import ImageClassifier
from pyg_chimera.nn.models.sequence_encoder import SequenceEncoder

__all__ = [
    "CategoricalEncoder",
    "GraphModel",
    "ImageClassifier",
    "SequenceEncoder",
]
