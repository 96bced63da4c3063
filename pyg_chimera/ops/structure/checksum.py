"""Checksums of edges, which show whether what transforms stored is still right."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyg_chimera.ops.common.cache import scrambled
from pyg_chimera.ops.structure.edges import edges_of

#: An attribute with this ending is a checksum, for all attributes that begin alike,
#: unless those have one that is more alike.
SUFFIX = "_checksum"


def checksum(
    edge_index: Tensor,
    num_nodes: int,
    dags: Sequence[Tensor] = (),
    *,
    multigraph: bool = False,
) -> Tensor:
    """A number for each node, which changes if the edges that leave it do.

    It is a sum of hashes of how far their targets are from the node, by number. So it
    batches by concatenation, is independent of the order of edges, and changes if nodes
    are renumbered.

    Args:
        edge_index (torch.Tensor): The edges, [2, edges].
        num_nodes (int): The number of nodes.
        dags (Sequence[torch.Tensor]): Edges that are stored, and whose nodes must not
            be renumbered alone either.
        multigraph (bool): Whether self-loops and duplicates make a difference; with
            DAGs, duplicates do in any case.

    Returns:
        torch.Tensor: int64 [nodes].
    """
    out = torch.zeros(num_nodes, dtype=torch.long, device=edge_index.device)
    for edges in (edge_index, *dags):
        source, target = edges_of(edges).to(out.device).long()
        if not multigraph:
            proper = source != target
            source, target = source[proper], target[proper]
        if not multigraph and not dags:
            key = torch.unique(source * num_nodes + target)
            source, target = key // max(num_nodes, 1), key % max(num_nodes, 1)
        x = scrambled((target - source) * -7046029254386353131 + 1442695040888963407)
        out = (out * 6364136223846793005).index_add_(0, source, x)
    return out


def check_stored(data: Any, names: Iterable[str] | None = None) -> None:
    r"""Checks that what transforms have stored in a graph still belongs to it: that no
    edge or node has been added, removed or renumbered since. The removal of whole
    connected components goes unnoticed.

    Layers themselves refuse ranks, line graphs and :math:`k`-hop pairs that do not fit
    the edges, but cannot know where a score, a DAG or a number of terms comes from. So
    transforms store a checksum of the edges with these, one number per node.
    :class:`~pyg_chimera.nn.GraphModel` checks those of the attributes that it reads.
    For a batch of 10,000 nodes, this takes one to two milliseconds.

    Args:
        data (Data or Batch): One graph, or a batch of graphs.
        names (Iterable[str], optional): The attributes to check. (default: all that
            :class:`~pyg_chimera.transforms.AddDiameter`,
            :class:`~pyg_chimera.transforms.DAGDecomposition`,
            :class:`~pyg_chimera.transforms.DirectedLineGraph`,
            :class:`~pyg_chimera.transforms.MultitreePruning` and
            :class:`~pyg_chimera.transforms.NodeOrder` store)

    Raises:
        ValueError: If an attribute was stored for other edges or nodes.
    """
    keys = sorted(data.keys())
    given = keys if names is None else names
    names = [x for x in given if x in keys and not x.endswith(SUFFIX)]
    stems = [
        key.removesuffix(SUFFIX)
        for key, x in ((key, data[key]) for key in keys if key.endswith(SUFFIX))
        # It may be ours, rather than something of that name.
        if isinstance(x, Tensor) and x.dtype == torch.long and x.dim() == 1
    ]

    def owner(name: str) -> str:
        found = (x for x in stems if f"{name}_".startswith(f"{x}_"))
        return max(found, key=len, default="")

    for stem in stems:
        stored = [name for name in names if owner(name) == stem]
        if stored and (got := _difference(data, stem)):
            raise ValueError(
                f"'data.{stored[0]}' must belong to the edges of the data, got {got}: "
                "edges or nodes have been added, removed or renumbered since it was "
                "stored. Apply the transform that stores it after what does so, or as "
                "the 'transform' of a loader that samples. To use it all the same, "
                f"delete 'data.{stem}{SUFFIX}'"
            )


def _difference(data: Any, stem: str) -> str:
    """How the edges differ from those of the checksum; empty if they do not."""
    stored, num_nodes = data[f"{stem}{SUFFIX}"], data.num_nodes
    edge_index = edges_of(data.adj_t if "adj_t" in data else data.edge_index)
    dags, ranks = (
        data[key] if key in data and isinstance(data[key], list) else []
        for key in (f"{stem}_edge_index", f"{stem}_rank")
    )
    for edges in (edge_index, *dags):
        if edges.numel() > 0 and int(edges.max()) >= num_nodes:
            return f"node {int(edges.max())} for {num_nodes} nodes"
    if stored.size(0) != num_nodes:
        return f"{num_nodes} nodes instead of {stored.size(0)}"
    if ranks and not dags:  # which the checksum is of, too, have been removed
        return ""
    now = checksum(edge_index, num_nodes, dags, multigraph=stem == "line_edge")
    changed = (now != stored.to(now.device)).nonzero().view(-1)
    return f"other edges at node {int(changed[0])}" if changed.numel() > 0 else ""
