"""The edges of a graph in any of the forms that PyG has for them."""

import torch
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.typing import Adj
from torch_geometric.utils import is_sparse, to_edge_index


def edges_of(graph: Adj) -> Tensor:
    r"""The edges :math:`j \to i` of a graph in any form, as a plain tensor; those of a
    sparse matrix in the order of its entries.
    """
    if is_sparse(graph):
        if isinstance(graph, Tensor) and graph.layout == torch.sparse_coo:
            # PyG's function would mark the user's matrix as coalesced, in place.
            row, col = graph._indices()
        else:
            row, col = to_edge_index(graph)[0]
        return torch.stack([col, row])
    if isinstance(graph, EdgeIndex):
        # Writes to an EdgeIndex do not change its tensor's version: make a new tensor.
        return graph.as_tensor().view(2, -1)
    return graph
