"""Generated graph tasks with known answers, on which `learning.py` trains.

A graph depends only on the seed of its generator. Its nodes are in random order, so
that their numbers carry no information. Each node has a class `y`, or -1 if it is not
asked for, and a `distance` to the information that determines it. Nodes whose answer is
far away, or needs what the task is about, are `hard`.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import torch
from scipy.sparse import coo_matrix
from scipy.sparse.csgraph import dijkstra
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import AddRandomWalkPE
from torch_geometric.utils import to_undirected
from workloads import DATA

from pyg_chimera.datasets import (
    ATOM_FEATURE_SIZES,
    BOND_FEATURE_SIZES,
    GeneratedPeptides,
)
from pyg_chimera.transforms import AddEliminationOrder, AddTopologicalOrder

#: Length of the random walks whose return probabilities are encoded.
WALK = 16
NOT_ASKED = -1
#: Leaves of the largest tree.
MAX_KEYS = 16


class Task(NamedTuple):
    """What a model has to learn, and how that is measured."""

    make: Callable[[np.random.Generator], Data] | None  #: None: peptides
    in_channels: int | Sequence[int]
    out_channels: int
    distance: str = ""  #: what the distance measures, if there is one
    hard: str = ""  #: what hard nodes have in common
    edge_dim: int | Sequence[int] | None = None
    directed: bool = False  #: whether graphs are DAGs, for layers along DAGs
    metric: str = "accuracy"
    batch: int = 32  #: graphs per batch; more if each has only one label
    #: Graphs for training, or of peptides in all, of which 70% are for training and 15%
    #: for tests. The second number is for smoke tests.
    graphs: tuple[int, int] = (4096, 64)


# Parts of generators -----------------------------------------------------------------


def random_tree(rng: np.random.Generator, size: int) -> np.ndarray:
    """A uniformly random tree, as edges in both directions."""
    code = rng.integers(size, size=size - 2).tolist()
    return both_ways(np.array(nx.from_prufer_sequence(code).edges))


def both_ways(edges: np.ndarray) -> np.ndarray:
    """Edges, one per row, in both directions: first all forward, then all backward."""
    return np.concatenate([edges, edges[:, ::-1]])


def path_edges(size: int) -> np.ndarray:
    """Edges from each node of a path to the next one."""
    return np.stack([np.arange(size - 1), np.arange(1, size)], axis=1)


def lengths(
    edges: np.ndarray, size: int, sources: Any, weight: np.ndarray | None = None
) -> np.ndarray:
    """Lengths of the shortest paths from sources to all nodes, [sources, size]."""
    values = np.ones(len(edges)) if weight is None else weight
    matrix = coo_matrix((values, edges.T), shape=(size, size)).tocsr()
    return dijkstra(matrix, indices=sources)


def one_hot(classes: Any, number: int) -> np.ndarray:
    return np.eye(number)[classes]


def shuffled(
    rng: np.random.Generator,
    edges: np.ndarray,
    x: np.ndarray,
    y: np.ndarray,
    distance: np.ndarray,
    hard: np.ndarray,
    edge_attr: np.ndarray | None = None,
) -> Data:
    """A graph whose nodes are in random order."""
    node = rng.permutation(len(x))
    place = np.argsort(node)
    data = Data(
        x=torch.from_numpy(x[node]).float(),
        edge_index=torch.from_numpy(np.ascontiguousarray(place[edges].T)),
        y=torch.from_numpy(y[node]).long(),
        distance=torch.from_numpy(distance[node]).long(),
        hard=torch.from_numpy(hard[node]),
    )
    if edge_attr is not None:
        data.edge_attr = torch.from_numpy(edge_attr).float()
    return data


# Generators --------------------------------------------------------------------------


def nearest_source(rng: np.random.Generator) -> Data:
    """Three nodes of a tree have a class: which class has the nearest of them?"""
    size = int(rng.integers(60, 121))
    edges = random_tree(rng, size)
    sources, classes = rng.choice(size, 3, replace=False), rng.integers(4, size=3)
    steps = lengths(edges, size, sources)
    nearest, y = steps.min(0), classes[steps.argmin(0)]
    tie = ((steps == nearest) & (classes[:, None] != y)).any(0)
    y = np.where(tie | (nearest == 0), NOT_ASKED, y)
    x = np.zeros((size, 4))
    x[sources] = one_hot(classes, 4)
    return shuffled(rng, edges, x, y, nearest, nearest >= 6)


def ring_transfer(rng: np.random.Generator) -> Data:
    """One node of a ring is asked for the class of the node opposite to it."""
    half = int(rng.choice([2, 3, 4, 5, 6, 8, 10, 12, 16]))
    size, name = 2 * half, rng.integers(5)
    edges = np.concatenate([path_edges(size), [[size - 1, 0]]])
    x, y = np.zeros((size, 6)), np.full(size, NOT_ASKED)
    x[0, 5], x[half, name], y[0] = 1, 1, name
    distance = np.full(size, half)
    return shuffled(rng, both_ways(edges), x, y, distance, distance >= 6)


def tree_match(rng: np.random.Generator) -> Data:
    """Leaves of a binary tree have keys and values, its root has one of the keys: which
    value belongs to it? (NeighborsMatch in https://arxiv.org/abs/2006.05205.)
    """
    depth = int(rng.integers(1, 5))
    leaves = 2**depth
    size, child = 2 * leaves - 1, np.arange(1, 2 * leaves - 1)
    edges = np.stack([(child - 1) // 2, child], axis=1)
    keys, values = rng.permutation(leaves), rng.integers(4, size=leaves)
    x, y = np.zeros((size, MAX_KEYS + 5)), np.full(size, NOT_ASKED)
    x[-leaves:, :-1] = np.hstack([one_hot(keys, MAX_KEYS), one_hot(values, 4)])
    asked = rng.integers(leaves)
    x[0, keys[asked]], x[0, -1], y[0] = 1, 1, values[asked]
    distance = np.full(size, depth)
    return shuffled(rng, both_ways(edges), x, y, distance, distance >= 3)


def path_sum(rng: np.random.Generator) -> Data:
    """Nodes of a path have +1 or -1: what sign has the sum from the start to a node?

    Edges lead both ways, and their features say which way leads away from the start.
    """
    size = int(rng.integers(20, 41))
    steps = rng.choice([-1, 1], size)
    x = np.zeros((size, 3))
    x[:, :2], x[0, 2] = one_hot((steps + 1) // 2, 2), 1
    way = one_hot(np.repeat([0, 1], size - 1), 2)
    y, place = np.sign(steps.cumsum()) + 1, np.arange(1, size + 1)
    return shuffled(rng, both_ways(path_edges(size)), x, y, place, place >= 10, way)


def weighted_nearest(rng: np.random.Generator) -> Data:
    """Edges of a tree are 1, 2 or 3 long: which of two marked nodes is nearer?

    Nodes are hard if their numbers of steps to both differ by at most one.
    """
    size = int(rng.integers(20, 51))
    edges = random_tree(rng, size)
    weight = np.tile(rng.integers(1, 4, size - 1), 2)
    ends = rng.choice(size, 2, replace=False)
    steps, far = lengths(edges, size, ends), lengths(edges, size, ends, weight)
    x = np.zeros((size, 2))
    x[ends] = np.eye(2)
    y = np.where(far[0] == far[1], NOT_ASKED, far.argmin(0))
    hard = abs(steps[0] - steps[1]) <= 1
    length = one_hot(weight - 1, 3)
    return shuffled(rng, edges, x, y, steps.min(0), hard, length)


def reachability(rng: np.random.Generator) -> Data:
    """Which nodes of a DAG can be reached from a marked one? The distance ignores
    directions, so that it is defined for nodes that can't be reached.
    """
    size = int(rng.integers(30, 61))
    while True:
        pairs = [
            (parent, child)
            for child in range(1, size)
            for parent in rng.choice(
                np.arange(max(0, child - 4), child),
                min(child, 1 + int(rng.random() < 0.3)),
                replace=False,
            )
        ]
        edges = np.array(pairs)
        reached = np.isfinite(lengths(edges, size, range(size)))
        share = (reached.sum(1) - 1) / (size - 1)
        fitting = np.flatnonzero((share >= 0.3) & (share <= 0.7))
        if len(fitting) > 0:
            break
    source = rng.choice(fitting)
    y = reached[source].astype(int)
    y[source] = NOT_ASKED
    x = one_hot((np.arange(size) == source).astype(int), 2)
    steps = lengths(both_ways(edges), size, source)
    return shuffled(rng, edges, x, y, steps, steps >= 4)


def parity(rng: np.random.Generator) -> Data:
    """Nodes of a directed path have bits: is their sum up to a node even or odd?"""
    size = int(rng.integers(6, 31))
    bits, place = rng.integers(2, size=size), np.arange(1, size + 1)
    y = bits.cumsum() % 2
    hard = place >= 12
    return shuffled(rng, path_edges(size), one_hot(bits, 2), y, place, hard)


TO_SOURCE, PLACE = "steps to the nearest source", "place on the path"
TASKS = {
    "nearest-source": Task(nearest_source, 4, 4, TO_SOURCE, "6 steps and more"),
    "ring-transfer": Task(
        ring_transfer, 6, 5, "steps to the source", "6 steps and more", batch=128
    ),
    "tree-match": Task(
        tree_match, MAX_KEYS + 5, 4, "depth of the tree", "depth 3 and more", batch=128,
        graphs=(16_384, 64),  # of fewer, those of depth 4 are learned by heart
    ),
    "path-sum": Task(path_sum, 3, 3, PLACE, "10 places and more", edge_dim=2),
    "weighted-nearest": Task(
        weighted_nearest, 2, 2, TO_SOURCE, "steps alike", edge_dim=3
    ),
    "reachability": Task(
        reachability, 2, 2, "steps to the source, in any direction", "4 steps and more",
        directed=True, metric="balanced accuracy",
    ),
    "parity": Task(parity, 2, 2, PLACE, "12 places and more", directed=True),
    "peptides": Task(
        None, ATOM_FEATURE_SIZES, 6, edge_dim=BOND_FEATURE_SIZES,
        metric="average precision", batch=16, graphs=(2000, 60),
    ),
}  # fmt: skip


# Data sets ---------------------------------------------------------------------------


#: Graphs for tests. The second number is for smoke tests.
TEST_GRAPHS = (512, 32)


def graphs(name: str, split: str, smoke: bool) -> list[Data]:
    """The graphs of a split, without derived structure."""
    task = TASKS[name]
    if task.make is None:
        number = task.graphs[smoke]
        found = GeneratedPeptides(str(DATA), split, "small", number, log=False)
        return [
            Data(x=g.x, edge_index=g.edge_index, edge_attr=g.edge_attr, y=g.y)
            for g in found
        ]
    first = 0 if split == "train" else 10**6  # seed
    number = (task.graphs if split == "train" else TEST_GRAPHS)[smoke]
    seeds = range(first, first + number)
    return [task.make(np.random.default_rng(seed)) for seed in seeds]


@cache
def load(name: str, split: str, smoke: bool) -> list[Batch]:
    """A split in batches, with the derived structure that layers read."""
    directed = TASKS[name].directed
    order = AddTopologicalOrder() if directed else AddEliminationOrder()
    walk, found = AddRandomWalkPE(WALK), []
    for graph in graphs(name, split, smoke):
        data = order(graph)
        both = data.edge_index
        if directed:  # along a DAG, no walk returns
            both = to_undirected(both, num_nodes=data.num_nodes)
        walked = walk(Data(edge_index=both, num_nodes=data.num_nodes))
        data.random_walk_pe = walked.random_walk_pe
        found.append(data)
    size = TASKS[name].batch
    starts = range(0, len(found), size)
    return [Batch.from_data_list(found[i : i + size]) for i in starts]
