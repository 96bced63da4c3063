"""Graphs with distances of up to 40 hops: the synthetic tasks of ECHO."""

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, shortest_path
from torch_geometric.data import Data
from torch_geometric.utils import from_scipy_sparse_matrix

from long_range_data.splits import SPLITS, split_size

FAMILIES = ("line", "ladder", "grid", "tree", "caterpillar", "lobster")
#: The smallest and the largest diameter, and the unit of targets.
DIAMETERS, HOPS = (17, 40), 40
#: How far branches may reach from the spine of a tree (`None`: no limit).
_REACH = {"line": 0, "caterpillar": 1, "lobster": 2, "tree": None}
#: The probability that an edge of a grid is removed.
_REMOVED = 0.2


def echo_graphs(task: str, split: str, num_graphs: int) -> list[Data]:
    """The synthetic tasks of ECHO (https://arxiv.org/abs/2512.17762), on graphs
    generated anew.

    There are as many graphs of each family in every split: paths, ladders, the largest
    components of grids of which 20 % of the edges are removed, and trees, of which
    those of two families stay within 1 hop of a path (caterpillars) or 2 (lobsters).
    Trees are a spine, whose length is their diameter d, to which d to 3d nodes are
    added, each as the neighbour of a random node. All diameters are equally frequent,
    except among grids. Nodes are numbered at random.

    Families, diameters, features, targets and number of graphs are those of the
    benchmark; the sizes of trees and grids, the frequencies of diameters and the split
    are not, so that results are not comparable with published ones to the last digit.

    Args:
        task: `"sssp"` (the distance of each node to a source), `"eccentricity"` (the
            largest distance from each node to another one) or `"diameter"`.
        split: `"train"`, `"val"` or `"test"`, 80, 10 and 10 % of the graphs.
        num_graphs: Of all splits, a multiple of 6 and at least 18.

    Returns:
        Graphs with `x`, a random number and, with `"sssp"`, whether a node is the
        source; both directions of each edge; `y` [V, 1], or [1, 1] with `"diameter"`,
        in units of `HOPS`; and `family`, a position in `FAMILIES`. A graph is a
        function of its position and the split, and the same for all tasks.
    """
    size = len(FAMILIES) * split_size(split, num_graphs // len(FAMILIES))
    return [_graph(task, split, i) for i in range(size)]


def _graph(task: str, split: str, i: int) -> Data:
    rng = np.random.default_rng([0, SPLITS.index(split), 1, i])  # 1: a former option
    number, family = divmod(i, len(FAMILIES))
    name = FAMILIES[family]
    low, high = DIAMETERS
    # 7 is coprime to their number: the diameters of a few graphs are spread out.
    diameter = low + 7 * number % (high - low + 1)
    if name == "grid":
        edges = _grid(rng, diameter)
    elif name == "ladder":
        edges = _lattice(2, diameter)
    else:
        edges = _tree(rng, diameter, _REACH[name])

    nodes = edges.max() + 1
    u, v = rng.permutation(nodes)[edges]
    ones = np.ones(2 * len(u), np.float32)
    both = np.concatenate([u, v]), np.concatenate([v, u])
    adjacency = csr_array((ones, both), shape=(nodes, nodes))
    x = rng.random((nodes, 1), np.float32)
    source = int(rng.integers(nodes))
    if task == "sssp":
        flag = np.arange(nodes)[:, None] == source
        x = np.concatenate([x, flag.astype(np.float32)], axis=1)
        hops = shortest_path(adjacency, unweighted=True, indices=source)
    else:
        hops = shortest_path(adjacency, unweighted=True).max(axis=0)
        if task == "diameter":
            hops = hops.max()
    return Data(
        x=torch.from_numpy(x),
        edge_index=from_scipy_sparse_matrix(adjacency)[0],
        y=torch.as_tensor(hops / HOPS, dtype=torch.float).view(-1, 1),
        family=torch.tensor([family]),
    )


def _tree(rng: np.random.Generator, diameter: int, reach: int | None) -> np.ndarray:
    """The edges of a tree whose first nodes are a path as long as its diameter."""
    spine = np.arange(diameter + 1)
    # How far down from a node a branch may reach: no farther than the nearer end of
    # the spine, or the diameter would grow.
    room = np.minimum(spine, diameter - spine)
    if reach is not None:
        room = np.minimum(room, reach)
    left, parents = room.tolist(), list(range(diameter))
    able = [node for node, steps in enumerate(left) if steps]
    extra = int(rng.integers(diameter, 3 * diameter + 1)) if able else 0
    for choice in rng.random(extra):
        parent = able[int(choice * len(able))]
        if left[parent] > 1:
            able.append(len(left))
        left.append(left[parent] - 1)
        parents.append(parent)
    return np.array([parents, range(1, len(left))])


def _lattice(rows: int, columns: int) -> np.ndarray:
    """The edges of a grid."""
    node = np.arange(rows * columns).reshape(rows, columns)
    right = np.stack([node[:, :-1].ravel(), node[:, 1:].ravel()])
    down = np.stack([node[:-1].ravel(), node[1:].ravel()])
    return np.concatenate([right, down], axis=1)


def _grid(rng: np.random.Generator, diameter: int) -> np.ndarray:
    """The edges of a grid's largest component after the removal of some edges."""
    while True:
        # Removal makes detours: start with a grid of a smaller diameter.
        length = round(0.85 * diameter)
        rows = int(rng.integers(3, length // 2 + 2))
        edges = _lattice(rows, length + 2 - rows)
        edges = edges[:, rng.random(edges.shape[1]) >= _REMOVED]
        nodes = rows * (length + 2 - rows)
        adjacency = csr_array((np.ones(edges.shape[1]), edges), shape=(nodes, nodes))
        label = connected_components(adjacency, directed=False)[1]
        kept = label == np.bincount(label).argmax()
        edges = (np.cumsum(kept) - 1)[edges[:, kept[edges[0]]]]
        hops = shortest_path(
            csr_array((np.ones(edges.shape[1]), edges), shape=(kept.sum(),) * 2),
            directed=False,
            unweighted=True,
        ).max()
        if DIAMETERS[0] <= hops <= DIAMETERS[1]:
            return edges
