"""Road networks of cities; classes depend on roads 16 hops away."""

import os.path as osp
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch_geometric.data import Data, InMemoryDataset, download_url
from torch_geometric.utils import scatter

from pyg_chimera.datasets._common import atomic_path, save_atomically
from pyg_chimera.ops.common.array_views import as_array

__all__ = ["CityRoads"]

_SMALL = ("huangpu", "pasadena")
_URL = (
    "https://github.com/LeonResearch/City-Networks/raw/"
    "8b9b7fbe1bab37eba1f21e4ae1e67b8ef39d8a8f/data"
)
#: The raw arrays, and the downloaded files that they are made from.
_FILES = {
    "node_features": "node_features",
    "edge_index": "edge_indices",
    "edge_features": "edge_features",
    "label": "10-chunk_node_labels",
    "eccentricity": "16-hop_eccentricities",
}


class CityRoads(InMemoryDataset):
    r"""The small road networks of the `"Towards Quantifying Long-Range Interactions in
    Graph Machine Learning: a Large Graph Dataset and a Measurement"
    <https://arxiv.org/abs/2503.09008>`_ paper, besides the four cities of its
    benchmark.

    Those four, Paris, Shanghai, Los Angeles and London, with 114,000 to 569,000 nodes,
    are downloaded by :class:`~torch_geometric.datasets.CityNetwork`. The small ones
    have the same features, labels and splits: :obj:`"huangpu"` in Shanghai has 5,268
    nodes and 12,902 edges (2,081 one way, 11 self-loops, 107 parallel), and
    :obj:`"pasadena"` in California 12,409 and 31,373 (1,857, 166 and 486).

    Nodes are junctions and edges are roads between them. The eccentricity of a node is
    the largest distance, along roads, from it to those nodes that lead to it by 16 or
    fewer edges. (Distances disregard directions.) The task is to predict in which tenth
    of all eccentricities that of a node is, which depends on roads 16 hops away.

    The two small networks are downloaded from the history of the repository
    `LeonResearch/City-Networks <https://github.com/LeonResearch/City-Networks>`_
    (commit 8b9b7fb) and kept as :obj:`root/raw/<city>.npz`, with the arrays
    :obj:`node_features` :math:`(V, 12)`, :obj:`edge_index` :math:`(2, E)`,
    :obj:`edge_features` :math:`(E, 25)`, :obj:`label` :math:`(V)` and
    :obj:`eccentricity` :math:`(V)`. The data are from OpenStreetMap and licensed under
    the ODbL.

    The data set has one graph, with the attributes

    * :obj:`x`: float32 :math:`(V, 37)`, 12 features of the node (longitude, latitude,
      number of streets, land use as one-hot), and the means of the 25 features of the
      edges that end at it, all standardised,
    * :obj:`edge_index`: int64 :math:`(2, E)`,
    * :obj:`edge_attr`: float32 :math:`(E, 25)`, length and speed, and one-way, lanes,
      reversed and kind of road as one-hot, all standardised,
    * :obj:`length`: float32 :math:`(E)`, the length of the road in metres,
    * :obj:`pos`: float32 :math:`(V, 2)`, longitude and latitude in degrees,
    * :obj:`y`: int64 :math:`(V)`, the class, from 0 (smallest eccentricity) to 9,
    * :obj:`eccentricity`: float32 :math:`(V)`, in metres,
    * :obj:`train_mask`, :obj:`val_mask`, :obj:`test_mask`: bool :math:`(V)`.

    Standardised columns have mean 0 and variance 1 over all nodes, or edges; those that
    are constant are 0. The authors' files have the same features without
    standardisation. Unlike these networks, those of the benchmark are undirected,
    without self-loops and parallel edges, and so are their eccentricities.

    Args:
        root (str): Folder with the raw file. Processed files are kept in it, too.
        city (str, optional): :obj:`"huangpu"` or :obj:`"pasadena"`, or the name of
            another file of the same layout. (default: :obj:`"huangpu"`)
        shares (tuple[float, float], optional): Shares of the nodes for training and for
            validation; the others are for test. (default: :obj:`(0.1, 0.1)`, those of
            the benchmark)
        seed (int, optional): Seed of the order in which nodes are assigned to these,
            :obj:`numpy.random.RandomState(seed).permutation(V)`. (default: :obj:`0`,
            that of the benchmark)
        transform (callable, optional): As in
            :class:`~torch_geometric.data.InMemoryDataset`.
        pre_transform (callable, optional): As there.
        force_reload (bool, optional): Whether to process the raw file again.
            (default: :obj:`False`)

    Raises:
        FileNotFoundError: If the raw file is missing and can't be downloaded.
        ValueError: If shares or seed are out of range.
    """

    def __init__(
        self,
        root: str,
        city: str = "huangpu",
        shares: tuple[float, float] = (0.1, 0.1),
        seed: int = 0,
        transform: Callable | None = None,
        pre_transform: Callable | None = None,
        force_reload: bool = False,
    ) -> None:
        if len(shares) != 2 or min(shares) <= 0 or sum(shares) >= 1:
            raise ValueError(
                f"'shares' must be two positive numbers whose sum is less than 1, got "
                f"{shares!r}"
            )
        if seed < 0:
            raise ValueError(f"'seed' must not be negative, got {seed}")
        self.city = city
        self.shares = shares
        self.seed = seed
        super().__init__(root, transform, pre_transform, force_reload=force_reload)
        self.load(self.processed_paths[0])

    @property
    def raw_file_names(self) -> list[str]:
        """The file of the city, under :obj:`root/raw`."""
        return [f"{self.city}.npz"]

    @property
    def processed_dir(self) -> str:
        """The folder of the processed graph with these masks."""
        train, val = self.shares
        name = f"{self.city}-{train}-{val}-seed{self.seed}"
        return osp.join(self.root, "processed", name)

    @property
    def processed_file_names(self) -> list[str]:
        """The file of the graph."""
        return ["data.pt"]

    def download(self) -> None:
        """Downloads the tensors of a small network and makes the raw file."""
        if self.city not in _SMALL:
            raise FileNotFoundError(
                f"No {self.raw_paths[0]}: put a network there, or use one of {_SMALL}, "
                "which are downloaded (for Paris, Shanghai, Los Angeles and London, "
                "use torch_geometric.datasets.CityNetwork)"
            )
        with TemporaryDirectory() as folder:
            arrays: dict[str, Any] = {
                key: as_array(
                    torch.load(
                        download_url(f"{_URL}/{self.city}/{name}.pt", folder),
                        weights_only=True,
                    )
                )
                for key, name in _FILES.items()
            }
        with atomic_path(self.raw_paths[0]) as part, open(part, "wb") as file:
            np.savez_compressed(file, **arrays)

    def process(self) -> None:
        """Turns the raw file into the processed graph."""
        with np.load(self.raw_paths[0]) as file:
            raw: dict[str, Any] = {k: torch.from_numpy(file[k]) for k in file.files}
        edge_index, edges = raw["edge_index"].long(), raw["edge_features"].double()
        nodes, num_nodes = raw["node_features"], raw["label"].numel()
        incident = scatter(edges, edge_index[1], dim_size=num_nodes, reduce="mean")
        data = Data(
            x=_standardise(torch.cat([nodes.double(), incident], dim=1)),
            edge_index=edge_index,
            edge_attr=_standardise(edges),
            length=edges[:, 0].float(),
            pos=nodes[:, :2].clone(),
            y=raw["label"].long(),
            eccentricity=raw["eccentricity"].float(),
        )
        order = np.random.RandomState(self.seed).permutation(num_nodes)
        ends = np.cumsum([0, *(int(num_nodes * share) for share in self.shares)])
        for i, split in enumerate(("train", "val", "test")):
            mask = torch.zeros(num_nodes, dtype=torch.bool)
            mask[order[ends[i] : [*ends, num_nodes][i + 1]]] = True
            data[f"{split}_mask"] = mask
        if self.pre_transform is not None:
            data = self.pre_transform(data)
        save_atomically([data], self.processed_paths[0])


def _standardise(columns: torch.Tensor) -> torch.Tensor:
    """To mean 0 and variance 1; constant columns to 0."""
    centred = columns - columns.mean(dim=0)
    constant = (columns == columns[:1]).all(dim=0)
    scaled = centred / centred.square().mean(dim=0).sqrt().masked_fill(constant, 1.0)
    return scaled.masked_fill(constant, 0.0).float()
