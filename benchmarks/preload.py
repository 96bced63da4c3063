"""Imported once by the server that forks fresh processes, so that these start quickly.

Loads what is slow to load, and starts no threads, as forking threads is not safe.
"""

import torch_geometric.nn  # noqa: F401
from workloads import planar

import pyg_chimera.nn  # noqa: F401
from pyg_chimera.ops.structure.symbolic_factor import symbolic_factor

_GRAPH = planar(9)
symbolic_factor(_GRAPH.edge_index, _GRAPH.batch, None, _GRAPH.num_nodes)
