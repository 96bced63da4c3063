"""Imported once by the server that forks fresh processes, so that they start at once.

Loads what is slow to load and starts no thread, as forks of threads are not safe.
"""

import torch_geometric.nn  # noqa: F401
from workloads import planar

import pyg_chimera.nn  # noqa: F401
from pyg_chimera.ops.structure.system import build_system

_GRAPH = planar(9)
build_system(_GRAPH.edge_index, _GRAPH.num_nodes, _GRAPH.batch)
