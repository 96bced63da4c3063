r"""Training on parts of one large graph.

The parts are found by METIS: ``pip install 'pyg-chimera[metis]'``. PyG's own
:class:`~torch_geometric.loader.ClusterData` needs pyg-lib or torch-sparse.
"""

import os
import sys
from collections.abc import Callable, Sequence
from copy import copy
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch_geometric.data import Data
from torch_geometric.utils import select

from pyg_chimera.ops.common.checks import check_edge_index, check_integer
from pyg_chimera.ops.common.optional import required
from pyg_chimera.ops.structure.csr import adjacency, grouped, to_numpy

__all__ = ["ClusterData", "ClusterLoader"]


class Partition(NamedTuple):
    """Nodes and edges by cluster; an edge belongs to the cluster of its source."""

    node_perm: Tensor  #: the nodes, [nodes]
    partptr: Tensor  #: where those of each cluster begin, [clusters + 1]
    edge_perm: Tensor  #: the edges, [edges]
    edge_ptr: Tensor  #: where those of each cluster begin, [clusters + 1]


class ClusterData(Dataset):
    r"""The clusters of a graph, by METIS, as PyG's
    :class:`~torch_geometric.loader.ClusterData` has them (`"Cluster-GCN"
    <https://arxiv.org/abs/1905.07953>`_).

    Clusters are of about equal size, with few edges between them. Each is the subgraph
    of its nodes, in their order in the data: attributes of nodes and edges are those of
    the data, :obj:`n_id` has the number of each node there, and all other attributes
    are kept. Directions of edges and self-loops do not count for the clusters. The same
    graph always has the same clusters, so that several processes can share them.

    Args:
        data (Data): The graph, with an :obj:`edge_index` :math:`[2, |\mathcal{E}|]`.
        num_parts (int): The number of clusters, from 1 to the number of nodes. METIS
            may leave some empty, which are left out.
        recursive (bool, optional): Whether to bisect recursively.
            (default: :obj:`False`)
        save_dir (str, optional): A folder that keeps the clusters for later runs, in a
            file for each graph and number. Files are never half written.
            (default: :obj:`None`)
        log (bool, optional): Whether to say when METIS begins and ends.
            (default: :obj:`True`)

    Raises:
        ImportError: If :obj:`pymetis` is missing.
        TypeError: If :obj:`data` is no :class:`~torch_geometric.data.Data`.
        ValueError: If it has no :obj:`edge_index`, or :obj:`num_parts` is out of
            range.
    """

    def __init__(
        self,
        data: Data,
        num_parts: int,
        recursive: bool = False,
        save_dir: str | None = None,
        log: bool = True,
    ) -> None:
        if not isinstance(data, Data):
            raise TypeError(
                f"'data' must be one graph, a Data, got {type(data).__name__}; of "
                "HeteroData, pass data.to_homogeneous()"
            )
        if data.edge_index is None:
            raise ValueError("'data' must have an 'edge_index', got none")
        num_parts = check_integer("num_parts", num_parts, 1)
        num_nodes = int(data.num_nodes or 0)
        if num_parts > num_nodes:
            raise ValueError(
                f"'num_parts' must be at most the number of nodes, {num_nodes}, got "
                f"{num_parts}"
            )
        self.num_parts, self.recursive, self.data = num_parts, recursive, copy(data)
        self.data.num_nodes = num_nodes
        check_edge_index(data.edge_index, num_nodes)
        device = data.edge_index.device
        if "n_id" not in data:  # such as of a sample of a larger graph
            self.data.n_id = torch.arange(num_nodes, device=device)
        edge_index = to_numpy(data.edge_index)
        part = _partition(edge_index, num_nodes, num_parts, recursive, save_dir, log)
        number, part = np.unique(part, return_inverse=True)
        labels = part, part[edge_index[0]]
        groups = [x for label in labels for x in grouped(label, len(number))]
        self.partition = Partition(*(torch.from_numpy(x).to(device) for x in groups))

    def __len__(self) -> int:
        return self.partition.partptr.numel() - 1

    def __getitem__(self, index: int | slice | Sequence[int]) -> Data:
        """A cluster; or of several, each once, the subgraph of all their nodes."""
        if isinstance(index, slice):
            index = range(len(self))[index]
        which = torch.as_tensor(index).view(-1)
        if not ((which >= -len(self)) & (which < len(self))).all():
            raise IndexError(f"clusters are from 0 to {len(self) - 1}, got {index}")
        which = (which % len(self)).unique()
        node_perm, partptr, edge_perm, edge_ptr = self.partition
        node = _concatenate_slices(node_perm, partptr, which).sort().values
        edge = _concatenate_slices(edge_perm, edge_ptr, which).sort().values
        place = node.new_full((self.data.num_nodes,), -1)
        place[node] = torch.arange(node.numel(), device=node.device)
        edge_index = place[self.data.edge_index[:, edge]]
        inside = edge_index[1] >= 0
        edge = edge[inside]
        out = copy(self.data)
        for key, value in self.data.items():
            if key in ("edge_index", "num_nodes"):
                continue
            # Of the whole graph: a part may have as many edges as nodes.
            of_nodes = self.data.is_node_attr(key)
            if of_nodes or self.data.is_edge_attr(key):
                dim = self.data.__cat_dim__(key, value)
                out[key] = select(value, node if of_nodes else edge, dim)
        out.edge_index, out.num_nodes = edge_index[:, inside], node.numel()
        return out

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)})"


class ClusterLoader(DataLoader):
    r"""Batches of clusters, each the subgraph of all nodes of some clusters, with the
    edges between these, as in PyG's :class:`~torch_geometric.loader.ClusterLoader`.

    To train clusters without the edges between them, which allows to store their
    elimination orders, pass them as a list to PyG's
    :class:`~torch_geometric.loader.DataLoader`. ::

        data = AddEliminationOrder()(data)  # applies to all subgraphs
        clusters = ClusterData(data, num_parts=64)
        loader = ClusterLoader(clusters, batch_size=4, shuffle=True, num_workers=2)
        sampler = DistributedSampler(clusters)  # of several processes: their shares
        loader = ClusterLoader(clusters, batch_size=4, sampler=sampler)

    Args:
        cluster_data (ClusterData): The clusters.
        transform (callable, optional): Applied to each batch, in the workers. What
            transforms have stored about the edges of the whole graph is not valid in
            parts of it, elimination orders apart. (default: :obj:`None`)
        **kwargs (optional): Arguments of :class:`torch.utils.data.DataLoader`, such as
            :obj:`batch_size`, :obj:`shuffle`, :obj:`sampler` or :obj:`num_workers`.
    """

    def __init__(
        self,
        cluster_data: ClusterData,
        transform: Callable[[Data], Data] | None = None,
        **kwargs: Any,
    ) -> None:
        for key in ("dataset", "collate_fn"):  # Lightning passes them to a copy
            kwargs.pop(key, None)
        self.cluster_data, self.transform = cluster_data, transform
        super().__init__(
            range(len(cluster_data)),  # type: ignore[arg-type]
            collate_fn=self._collate,
            **kwargs,
        )

    def _collate(self, which: list[int]) -> Data:
        data = self.cluster_data[which]
        return data if self.transform is None else self.transform(data)


def _partition(
    edge_index: np.ndarray,
    num_nodes: int,
    num_parts: int,
    recursive: bool,
    folder: str | None,
    log: bool,
) -> np.ndarray:
    """The cluster of each node, from the file in `folder` if it exists."""
    if folder is None:
        return _metis(edge_index, num_nodes, num_parts, recursive, log)
    digest = blake2b(edge_index.tobytes(), digest_size=12)
    digest.update(repr((num_nodes, num_parts, bool(recursive))).encode())
    path = Path(folder, f"metis-{num_parts}-{digest.hexdigest()}.npy")
    if not path.exists():
        part = _metis(edge_index, num_nodes, num_parts, recursive, log)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}.part")
        with unfinished.open("wb") as file:
            np.save(file, part)
        os.replace(unfinished, path)
    return np.load(path)


def _metis(
    edge_index: np.ndarray, num_nodes: int, num_parts: int, recursive: bool, log: bool
) -> np.ndarray:
    pymetis = required("pymetis", "'ClusterData'", "metis")
    if log:
        print("Computing METIS partitioning...", file=sys.stderr, flush=True)
    # METIS needs a symmetric matrix without a diagonal, and does not check it.
    graph = pymetis.CSRAdjacency(*adjacency(*edge_index, num_nodes))
    _, part = pymetis.part_graph(num_parts, graph, recursive=recursive)
    if log:
        print("Done!", file=sys.stderr)
    return np.asarray(part)


def _concatenate_slices(x: Tensor, ptr: Tensor, which: Tensor) -> Tensor:
    return torch.cat([x[ptr[i] : ptr[i + 1]] for i in which.tolist()] or [x[:0]])
