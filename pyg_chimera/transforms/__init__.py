r"""Transforms: they compute and store the structure of graphs.

All of them add plain tensors, which PyG's loaders batch by their own rules.
"""

from pyg_chimera.transforms.dag_decomposition import DAGDecomposition
from pyg_chimera.transforms.encodings import LaplacianEncoding
from pyg_chimera.transforms.events_to_dag import EventsToDAG
from pyg_chimera.transforms.image_to_graph import ImageToGraph
from pyg_chimera.transforms.line_graph import (
    DirectedLineGraph,
    LineGraphData,
    MultitreePruning,
)
from pyg_chimera.transforms.node_order import NodeOrder
from pyg_chimera.transforms.pad_batch import PadBatch
from pyg_chimera.transforms.sequence_to_graph import SequenceToGraph
from pyg_chimera.transforms.structure import (
    AddDiameter,
    AddEliminationOrder,
    AddKHopIndex,
    AddTopologicalOrder,
)

__all__ = [
    "AddDiameter",
    "AddEliminationOrder",
    "AddKHopIndex",
    "AddTopologicalOrder",
    "DAGDecomposition",
    "DirectedLineGraph",
    "EventsToDAG",
    "ImageToGraph",
    "LaplacianEncoding",
    "LineGraphData",
    "MultitreePruning",
    "NodeOrder",
    "PadBatch",
    "SequenceToGraph",
]
