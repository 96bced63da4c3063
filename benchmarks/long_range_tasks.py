"""The tasks of `long_range.py`: graphs, losses, measures, settings, published figures.

Nothing here was chosen on test data.
"""

from collections.abc import Callable, Sequence
from copy import copy
from functools import cache
from hashlib import sha1
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from long_range_data import (
    FAMILIES,
    HOPS,
    Kept,
    echo_graphs,
    ising_graphs,
    power_flow_graphs,
    sentiment_trees,
    superpixel_graphs,
)
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import AddRandomWalkPE
from torch_geometric.utils import scatter, to_undirected

from pyg_chimera.datasets import CityRoads
from pyg_chimera.transforms import (
    AddEliminationOrder,
    AddTopologicalOrder,
    LaplacianEncoding,
)

#: Lengths of random walks, and numbers of eigenvectors, that are encoded.
WALK, EIGENVECTORS = 16, 8


class Source(NamedTuple):
    """Where data are, and whether only a little of them is wanted."""

    data: Path  #: raw files, a folder for each collection
    cache: Path  #: generated and processed files
    smoke: bool

    def kept(self, make: Callable[..., list[Data]], *args: Any) -> Kept:
        """Graphs that are made once."""
        return Kept(self.cache, make, *args)


class Task(NamedTuple):
    """What has to be learned, and how."""

    load: Callable[[str, Source], list[Data]]  #: graphs of a split or an extra set
    in_channels: int | Sequence[int]
    out_channels: int
    unit: str  #: of the measure, for titles
    loss: str
    edge_dim: int | Sequence[int] | None = None
    raw: str = ""  #: folder of raw files, if there are any
    extra: tuple[str, ...] = ()  #: further test sets, of other sizes than in training
    graph: bool = False  #: whether graphs have the targets, not nodes
    directed: bool = False  #: whether graphs are DAGs
    better: int = -1  #: 1 if more is better
    # The same for all models:
    local: str = "sage"  #: the local convolution of our blocks, sage or gatedgcn
    aggr: str | list[str] = "mean"  #: of SAGE
    channels: int = 64
    parameters: int = 160_000  #: of all layers together
    batch: int = 16  #: graphs per batch
    dropout: float = 0.0
    norm: str = "graph_batch_norm"
    #: Whether our blocks have neither norms nor local convolutions, which would change
    #: amplitudes.
    plain: bool = False
    pool: str = "mean"
    seconds: float = 600.0  #: of a core's time for each model
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)  #: learning rates to choose from


# Graphs ------------------------------------------------------------------------------


def cities(name: str) -> Callable[[str, Source], list[Data]]:
    def load(split: str, source: Source) -> list[Data]:
        city, masked = (name, True) if split in SPLITS else (split, False)
        root, wanted = source.cache / "city-networks", source.data / "city-networks"
        link = root / "raw"
        root.mkdir(parents=True, exist_ok=True)
        if link.is_symlink() and link.resolve() != wanted.resolve():
            link.unlink()
        if not link.exists():
            link.symlink_to(wanted.resolve(), target_is_directory=True)
        data = copy(CityRoads(str(root), city, (0.6, 0.2))[0])
        data.mask = data[f"{split}_mask"] if masked else torch.ones_like(data.test_mask)
        if source.smoke:  # a quarter of town
            distance = (data.pos - data.pos.median(0).values).norm(dim=1)
            data = data.subgraph(distance.argsort()[:200].sort().values)
        names = ("x", "edge_index", "edge_attr", "y", "mask")
        return [Data(**{key: data[key] for key in names})]

    return load


def echo(task: str) -> Callable[[str, Source], list[Data]]:
    def load(split: str, source: Source) -> list[Data]:
        if split in SPLITS:
            number = 60 if source.smoke else 10_080
            return list(source.kept(echo_graphs, task, split, number))
        number = 18 if source.smoke else 240
        families = [FAMILIES.index(name) for name in ("line", "tree")]
        larger = source.kept(echo_graphs, task, "test", number, 4)
        return [data for data in larger if int(data.family) in families]

    return load


#: Graphs in all splits together; a tenth is for tests.
ISING = {"16": 10_000, "32": 320, "64": 160, "128": 40, "256": 20}


def ising(split: str, source: Source) -> list[Data]:
    """Energies in units of their standard deviation in training."""

    def make(side: str, part: str) -> Kept:
        number = (40 if side == "16" else 10) if source.smoke else ISING[side]
        return source.kept(ising_graphs, int(side), part, number)

    scale = make("16", "train").y.std()
    graphs = list(make("16", split) if split in SPLITS else make(split, "test"))
    for data in graphs:
        data.y = data.y / scale
    return graphs


GRIDS = (
    "ACTIVSg200", "ACTIVSg500", "1354pegase", "1888rte", "1951rte", "ACTIVSg2000",
)  # fmt: skip
UNSEEN_IN_VALIDATION = "2848rte"
UNSEEN = (
    "2868rte", "2869pegase", "6468rte", "6515rte", "9241pegase", "ACTIVSg10k",
    "13659pegase",
)  # fmt: skip


def power_flow(split: str, source: Source) -> list[Data]:
    """The `group` is 1 for grids that are unseen in training."""

    def make(grids: Sequence[str], part: str, number: int) -> list[Data]:
        number, folder = 10 if source.smoke else number, source.data / "power-grids"
        return list(source.kept(power_flow_graphs, folder, grids, part, number))

    grids, held_out = GRIDS, UNSEEN_IN_VALIDATION
    unseen = split not in SPLITS
    if source.smoke:
        grids, held_out = GRIDS[:1], GRIDS[1]
        split = GRIDS[1] if unseen else split
    number = 50 if unseen else 200 if split == "train" else 100
    graphs = make([split] if unseen else grids, "test" if unseen else split, number)
    groups = [int(unseen)] * len(graphs)
    if split == "val":
        graphs += (more := make([held_out], "val", 100))
        groups += [1] * len(more)
    for data, group in zip(graphs, groups, strict=True):
        data.group = torch.tensor([group])
    return graphs


def sst(split: str, source: Source) -> list[Data]:
    trees = source.kept(sentiment_trees, source.data / "sst", split)
    return list(trees[:64] if source.smoke else trees)


def superpixels(split: str, source: Source) -> list[Data]:
    number = {"train": 10_000, "val": 2_000, "test": 5_000}[split]
    number = 32 if source.smoke else number
    folder = source.data / "images"
    graphs = list(source.kept(superpixel_graphs, folder, split, number))
    for data in graphs:
        data.x = torch.cat([data.x, data.pos], dim=1)
        del data.pos
    return graphs


SPLITS = ("train", "val", "test")
#: Words of SST's training sentences in lower case, inner nodes and unknown words.
SST_WORDS = 16_583
TASKS = {
    "pasadena": Task(
        cities("pasadena"), 37, 10, "accuracy", "cross-entropy", 25, "city-networks",
        local="gatedgcn", better=1, dropout=0.2, batch=1,
    ),
    "huangpu": Task(
        cities("huangpu"), 37, 10, "accuracy", "cross-entropy", 25, "city-networks",
        ("pasadena",), local="gatedgcn", better=1, dropout=0.2, batch=1,
    ),
    "sssp": Task(echo("sssp"), 2, 1, "MAE in hops", "l1", extra=("4 x",), batch=32),
    "eccentricity": Task(
        echo("eccentricity"), 1, 1, "MAE in hops", "l1", extra=("4 x",),
        aggr=["sum", "max"], batch=32,
    ),
    "diameter": Task(
        echo("diameter"), 1, 1, "MAE in hops", "l1", extra=("4 x",), graph=True,
        pool="max", aggr=["sum", "max"], batch=32,
    ),
    "ising": Task(
        ising, 1, 1, "log10(MSE / variance)", "mse", extra=("32", "64", "128", "256"),
        plain=True,
    ),
    "power-flow": Task(
        power_flow, 3, 1, "relative error", "relative", 1, "power-grids", UNSEEN,
        plain=True, batch=4, channels=32, parameters=40_000,
    ),
    "sst": Task(
        sst, (SST_WORDS,), 5, "accuracy", "cross-entropy", (2,), "sst", directed=True,
        better=1, local="gatedgcn", dropout=0.3, batch=32,
    ),
    "superpixels": Task(
        superpixels, 5, 10, "accuracy", "cross-entropy", 1, "images", graph=True,
        better=1, local="gatedgcn", dropout=0.1, batch=32,
    ),
}  # fmt: skip

#: Of Chimera, where targets are distances: from a source, or to the farthest node.
DISTANCES = {"reach": (1, 16), "heads": 8, "state_channels": 8, "log_sums": 2}
FARTHEST = DISTANCES | {"reach": (1, 64)}
#: Arguments of our mixers' constructors, by task, beside the settings for all.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "pasadena": {"chimera": {"reach": (2, 32)}},
    "huangpu": {"chimera": {"reach": (2, 32)}},
    "sssp": {"chimera": DISTANCES},
    "eccentricity": {"chimera": FARTHEST},
    "diameter": {"chimera": FARTHEST},
    "ising": {"chimera": {"reach": (1, 16), "norm": None}},
    "power-flow": {"chimera": {"reach": (8, 512), "norm": None}},
}


# Losses and measures -----------------------------------------------------------------


def asked(out: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Outputs and targets of those nodes (or graphs) that are asked for."""
    if "mask" in batch:
        return out[batch.mask], batch.y[batch.mask]
    return out, batch.y


def relative(out: Tensor, batch: Batch) -> Tensor:
    """The error of each graph, relative to its target, both about their means."""
    graphs = {"index": batch.batch, "dim_size": batch.num_graphs}
    out = out - scatter(out, reduce="mean", **graphs)[batch.batch]
    error = scatter((out - batch.y).square(), **graphs)
    return (error / scatter(batch.y.square(), **graphs)).sqrt().view(-1)


def loss_of(task: Task, out: Tensor, batch: Batch) -> Tensor:
    if task.loss == "relative":
        return relative(out, batch).mean()
    out, y = asked(out, batch)
    match task.loss:
        case "cross-entropy":
            return F.cross_entropy(out, y)
        case "l1":
            return F.l1_loss(out, y)
        case "log-mse":
            return F.mse_loss(out, y).log10()
    return F.mse_loss(out, y)


def items(name: str, out: Tensor, batch: Batch) -> dict[str, Tensor]:
    """What is averaged for the measures, of each node or graph; and `distance`, in
    hops, if errors are shown by it.
    """
    task = TASKS[name]
    if name == "power-flow":
        error = relative(out, batch)
        unseen = batch.group == 1
        return {"seen": error[~unseen], "unseen": error[unseen]}
    out, y = asked(out, batch)
    if task.loss == "cross-entropy":
        right = (out.argmax(1) == y).float()
        if name == "sst":
            return {"roots": right[batch.root_mask], "all nodes": right}
        return {"accuracy": right}
    if name == "ising":
        return {"log10 MSE": (out - y).square().view(-1)}
    return {
        "MAE": HOPS * (out - y).abs().view(-1),
        "distance": (HOPS * y).round().long().view(-1),
    }


def measure(name: str, found: list[dict[str, Tensor]]) -> dict[str, Any]:
    """The measures of a set, and a list of distances, errors and numbers."""
    columns = {key: torch.cat([row[key] for row in found]) for key in found[0]}
    distance = columns.pop("distance", None)
    means = {key: x.mean().item() for key, x in columns.items() if x.numel()}
    if name == "ising":
        means = {key: float(np.log10(x)) for key, x in means.items()}
    if distance is None:
        return means
    (error,), rows = columns.values(), []
    for hops in distance.unique().tolist():
        here = distance == hops
        rows.append([hops, error[here].mean().item(), int(here.sum())])
    return means | {"by_distance": rows}


def score(means: dict[str, Any]) -> float:
    """The mean of a set's measures, by which models are chosen in validation."""
    return float(np.mean([x for x in means.values() if isinstance(x, float)]))


# Structure that models read ----------------------------------------------------------


def expander(nodes: int, seed: int) -> Tensor:
    """Edges of two random cycles through all nodes, in both directions: a random graph
    of degree 4, which almost always is an expander.
    """
    rng = np.random.default_rng(seed)
    cycles = [rng.permutation(nodes) for _ in range(2)]
    edges = np.concatenate([np.stack([c, np.roll(c, 1)]) for c in cycles], axis=1)
    return torch.from_numpy(np.concatenate([edges, edges[::-1]], axis=1))


def structure(need: str, data: Data) -> dict[str, Any]:
    """What a model reads beside features, by attribute."""
    if need == "expander":
        return {"expander_index": expander(data.num_nodes, data.num_edges)}
    if need == "walk":  # without directions: along a DAG, no walk returns
        both = to_undirected(data.edge_index, num_nodes=data.num_nodes)
        data = Data(edge_index=both, num_nodes=data.num_nodes)
    bare = Data(edge_index=data.edge_index, num_nodes=data.num_nodes)
    found = {
        "elimination": AddEliminationOrder(),
        "topological": AddTopologicalOrder(),
        "laplacian": LaplacianEncoding(EIGENVECTORS, is_undirected=False),
        "walk": AddRandomWalkPE(WALK),
    }[need](bare).to_dict()
    return {k: v for k, v in found.items() if k not in ("edge_index", "num_nodes")}


@cache
def load(name: str, split: str, need: str | None, source: Source) -> list[Data]:
    """The graphs of a split, or of an extra test set."""
    if need is None:
        return TASKS[name].load(split, source)
    known: dict[bytes, dict[str, Any]] = {}
    graphs = []
    for data in load(name, split, None, source):
        # Samples of one grid, or of one size of spins, share it.
        edges = data.edge_index.numpy().tobytes() + str(data.num_nodes).encode()
        key = sha1(edges, usedforsecurity=False).digest()
        if key not in known:
            known[key] = structure(need, data)
        graphs.append(copy(data).update(known[key]))
    return graphs


# Published ---------------------------------------------------------------------------

_PARIS = (
    "Liang et al. 2026, test accuracy on Paris: another city, 114,000 nodes, 10 / 10 / "
    "80 % of them, undirected"
)
_ECHO = "Miglior et al. 2025, official files of ECHO, not at equal time"
_LATER = "a later paper, on the official files of ECHO, not at equal time"
_ISING = "official files of LRIM: log10 MSE in their scale, not relative to variance"
_SOCHER = "Socher et al. 2013, without pretrained vectors"
_PIXELS = "all 45,000 training graphs of the benchmark, from the original images"
#: Models, their figures, and how the protocol differs.
PUBLISHED: dict[str, list[tuple[str, str, str]]] = {
    **{
        city: [
            ("GAT", "0.558", _PARIS), ("Exphormer", "0.551", _PARIS),
            ("ChebNet", "0.541", _PARIS), ("GPS", "0.521", _PARIS),
        ]
        for city in ("pasadena", "huangpu")
    },
    "sssp": [
        ("GCN", "2.10", _ECHO), ("SWAN", "0.896", _ECHO), ("GPS", "0.472", _ECHO),
        ("GRIT", "0.121", _ECHO), ("newest", "0.035", _LATER),
    ],
    "eccentricity": [("DRew", "4.651", _ECHO), ("newest", "0.885", _LATER)],
    "diameter": [("GRIT", "1.014", _ECHO), ("LGSM", "0.859", _LATER)],
    "ising": [
        ("GIN", "-2.533", _ISING), ("GatedGCN", "-3.844", _ISING),
        ("LGSM", "-4.284", _ISING), ("GPS, Laplacian", "-4.334", _ISING),
    ],
    "sst": [
        ("RNN", "0.432 / 0.790", _SOCHER), ("MV-RNN", "0.444 / 0.787", _SOCHER),
        ("RNTN", "0.457 / 0.807", _SOCHER),
        ("Tree-LSTM", "0.510 (roots)", "Tai et al. 2015, with GloVe vectors"),
    ],
    "superpixels": [
        ("GCN", "0.557", _PIXELS), ("GatedGCN", "0.673", _PIXELS),
        ("GPS", "0.723", _PIXELS), ("Graph-Mamba", "0.737", _PIXELS),
    ],
}  # fmt: skip
