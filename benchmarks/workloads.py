"""The graphs that benchmarks measure on."""

import csv
import gzip
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from scipy.spatial import Delaunay
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.utils import remove_self_loops, to_undirected

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("PYG_CHIMERA_SHARED", REPOSITORY.parent / "shared"))
#: Where the raw file of Peptides-func is expected.
PEPTIDES = SHARED / "data" / "peptides-functional"
#: Where the heterophilous graphs are expected, as their authors publish them.
HETEROPHILOUS = SHARED / "data" / "heterophilous"
#: Where processed and generated graphs are kept.
DATA = REPOSITORY / "data"


@dataclass
class Workload:
    """A batch of graphs to measure on."""

    name: str
    edge_index: Tensor
    batch: Tensor

    def __post_init__(self) -> None:
        self.num_nodes = self.batch.numel()

    @classmethod
    def of(cls, name: str, graphs: list[Data]) -> "Workload":
        """The graphs as one batch."""
        batch = Batch.from_data_list(graphs)
        return cls(name, batch.edge_index, batch.batch)


def planar(*sizes: int) -> Workload:
    """Delaunay triangulations of random points."""
    graphs = []
    for size in sizes:
        points = np.random.default_rng(size).random((size, 2))
        corners = Delaunay(points).simplices
        edges = np.concatenate([corners[:, pair] for pair in ([0, 1], [1, 2], [2, 0])])
        edges = np.unique(np.concatenate([edges, edges[:, ::-1]]), axis=0)
        edge_index = torch.from_numpy(edges.T.astype(np.int64)).contiguous()
        graphs.append(Data(edge_index=edge_index, num_nodes=size))
    total = f"{sum(sizes):,} nodes"
    return Workload.of(f"planar graph{'s' * (len(sizes) > 1)}, {total}", graphs)


def filling(smoke: bool) -> Iterator[Workload]:
    """Graphs whose factors fill up: a random one, and heterophilous ones if present."""
    size = 100 if smoke else 5000
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(size, (2, 4 * size), generator=generator)
    graphs = {f"random graph, {size:,} nodes": (edges, size)}
    for path in [] if smoke else sorted(HETEROPHILOUS.glob("*.npz")):
        raw = np.load(path)
        edges = torch.from_numpy(raw["edges"].T.copy())
        graphs[path.stem] = edges, len(raw["node_labels"])
    for name, (edges, size) in graphs.items():
        edges = to_undirected(remove_self_loops(edges)[0], num_nodes=size)
        graph = Data(edge_index=edges, num_nodes=size)
        yield Workload.of(name, [graph])


def peptides(root: Path, sizes: list[int], smoke: bool) -> Iterator[Workload]:
    """Batches of the first real peptides in a folder, or of generated ones."""
    path = root / "raw" / "peptide_multi_class_dataset.csv.gz"
    if path.is_file() and not smoke:
        from ogb.utils import smiles2graph

        kind, graphs = "Peptides-func", []
        with gzip.open(path, "rt", newline="") as file:
            for row, _ in zip(csv.DictReader(file), range(max(sizes)), strict=False):
                graph = smiles2graph(row["smiles"])
                edge_index = torch.from_numpy(graph["edge_index"])
                graphs.append(Data(edge_index=edge_index, num_nodes=graph["num_nodes"]))
    else:
        kind, graphs = "generated peptides", generated(2 * max(sizes), smoke)
    for size in sizes:
        name = f"{kind}, batch of {size}"
        yield Workload.of(name, graphs[:size])


def all_peptides(root: Path, smoke: bool) -> tuple[str, list[Data]]:
    """All graphs of Peptides-func, or some generated peptides."""
    from pyg_chimera.datasets import PeptidesFunctional

    if smoke or not PeptidesFunctional.holds_raw_files(str(root)):
        return "generated peptides", generated(20 if smoke else 1000, smoke)
    folder = str(DATA / "peptides-functional")
    graphs = [
        Data(edge_index=graph.edge_index, num_nodes=graph.num_nodes)
        for split in ("train", "val", "test")
        for graph in PeptidesFunctional(str(root), split, processed_root=folder)
    ]
    return "Peptides-func", graphs


def generated(count: int, smoke: bool) -> list[Data]:
    """The training graphs (70%) of `count` generated peptides."""
    from pyg_chimera.datasets import GeneratedPeptides

    preset = "small" if smoke else "full"
    graphs = GeneratedPeptides(str(DATA), preset=preset, num_graphs=count, log=False)
    return [Data(edge_index=x.edge_index, num_nodes=x.num_nodes) for x in graphs]
