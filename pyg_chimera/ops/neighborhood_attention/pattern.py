"""The attention pattern of all heads, as one sparse matrix, and its transpose."""

import warnings
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pyg_chimera.ops.common.checks import (
    check_batch,
    check_edge_index,
    check_within_graphs,
)
from pyg_chimera.ops.common.memory import check_memory
from pyg_chimera.ops.structure.csr import compress, to_numpy


class Pattern(NamedTuple):
    """The edges as compressed rows, with a block of rows for each of the H heads, and a
    block of columns for each of the G groups. All tensors are int64.
    """

    ptr: Tensor  #: [H V + 1], where the edges into each row begin
    row: Tensor  #: [H E], the row that reads
    col: Tensor  #: [H E], the column that is read
    edge: Tensor  #: [E], the index of each edge of a head
    back_ptr: Tensor  #: [G V + 1], of the transpose
    back_col: Tensor  #: [H E]
    back: Tensor  #: [H E], the place of an entry of the transpose


def pattern(
    edge_index: Tensor, batch: Tensor | None, num_nodes: int, heads: int, groups: int
) -> Pattern:
    """Compresses the edges by target and by source.

    Raises:
        ValueError: If a shape is wrong, an index is out of range, an edge joins two
            graphs of the batch, or there are more edges than fit into memory.
    """
    check_edge_index(edge_index, num_nodes)
    source, target = to_numpy(edge_index)
    if batch is not None:
        check_batch(batch, num_nodes)
        check_within_graphs(source, target, to_numpy(batch))
    check_memory(
        f"Attention of {heads} heads over {len(source):,} pairs of nodes",
        52 * heads * len(source),  # four indices, places, and logits with gradients
        "use fewer heads, fewer neighbours (a smaller 'k'), or samples of the graph",
    )
    ptr, edge = compress(target, np.arange(len(target)), num_nodes)
    head = np.arange(heads)[:, None]
    row = (head * num_nodes + target[edge]).ravel()
    col = (head * groups // heads * num_nodes + source[edge]).ravel()
    ptr = np.append((head * len(edge) + ptr[:-1]).ravel(), len(row))
    back_ptr, back = compress(col, np.arange(len(col)), groups * num_nodes)
    arrays = (ptr, row, col, edge, back_ptr, row[back], back)
    with warnings.catch_warnings():  # PyTorch warns once that CSR is a beta feature
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0], [], [], (0, 0), check_invariants=False)
    return Pattern(*(torch.from_numpy(x).to(edge_index.device) for x in arrays))
