"""Generated graphs with distances of up to 40 hops: the synthetic tasks of ECHO."""

import os.path as osp
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components, shortest_path
from torch_geometric.data import Data
from torch_geometric.utils import from_scipy_sparse_matrix

from pyg_chimera.datasets._splits import SPLITS, GeneratedDataset

__all__ = ["EchoSynth"]

#: How far branches may reach from the spine of a tree (``None``: no limit).
_REACH = {"line": 0, "caterpillar": 1, "lobster": 2, "tree": None}
#: The probability that an edge of a grid is removed.
_REMOVED = 0.2


class EchoSynth(GeneratedDataset):
    r"""The synthetic tasks of the `"Can You Hear Me Now? A Benchmark for Long-Range
    Graph Propagation" <https://arxiv.org/abs/2512.17762>`_ paper (ECHO), on graphs
    generated anew.

    The graphs have diameters of 17 to 40 and are of six families, with as many graphs
    of each in every split:

    * :obj:`"line"`: a path;
    * :obj:`"ladder"`: two paths with rungs;
    * :obj:`"grid"`: the largest component of a grid of which 20% of the edges are
      removed;
    * :obj:`"tree"`: a random tree;
    * :obj:`"caterpillar"`: a tree whose nodes are within 1 hop of a path (its spine);
    * :obj:`"lobster"`: a tree whose nodes are within 2 hops of a path.

    Trees are a spine, whose length is their diameter :math:`d`, to which :math:`d` to
    :math:`3d` nodes are added, each as the neighbour of a random node. All diameters
    are equally frequent, except among grids, whose diameters depend on the removed
    edges. Nodes are numbered at random.

    The task is to predict

    * :obj:`"sssp"`: the distance of each node to a source,
    * :obj:`"eccentricity"`: the largest distance from each node to another one,
    * :obj:`"diameter"`: the largest distance between two nodes.

    Targets are divided by 40 hops, as in the benchmark, which reports mean absolute
    errors in hops (multiply by :obj:`HOPS`) and trains with :math:`\log_{10}` of the
    mean squared error. With another :obj:`scale`, all lengths are multiplied by it but
    the number of rows of grids, and the unit of the targets remains: targets exceed 1,
    which shows whether a model extrapolates.

    Families, range of diameters, features, targets and number of graphs are those of
    the benchmark. The sizes of trees and grids (and with them the numbers of nodes),
    the frequencies of diameters and the split are this library's, so that results are
    not comparable with published ones to the last digit. Lines and ladders of the same
    diameter differ in their features only, and occur in all three splits.

    A graph of :math:`V` nodes has the attributes

    * :obj:`x`: float :math:`(V, 1)`, a random number between 0 and 1, and for
      :obj:`"sssp"` float :math:`(V, 2)`, with a second feature that is 1 for the source
      and 0 for others,
    * :obj:`edge_index`: int64 :math:`(2, E)`, both directions of each edge,
    * :obj:`y`: float :math:`(V, 1)`, or :math:`(1, 1)` for :obj:`"diameter"`, in units
      of 40 hops,
    * :obj:`family`: int64 :math:`(1)`, the position in :obj:`FAMILIES`.

    A graph is a function of its position in the split, of :obj:`split`, :obj:`scale`
    and :obj:`seed`, and is the same for all tasks. Only the split that is asked for is
    generated, in 2 to 3 seconds per 1,000 graphs, or 12 with :obj:`scale=4`.

    Args:
        root (str): Folder in which processed files are kept, in a subfolder per task,
            number of graphs, scale and seed.
        task (str, optional): :obj:`"sssp"`, :obj:`"eccentricity"` or
            :obj:`"diameter"`. (default: :obj:`"sssp"`)
        split (str, optional): :obj:`"train"`, :obj:`"val"` or :obj:`"test"`, which
            have 80%, 10% and 10% of the graphs. (default: :obj:`"train"`)
        num_graphs (int, optional): The number of graphs in all three splits together,
            a multiple of 6 and at least 18. (default: :obj:`10_080`)
        scale (int, optional): By how much lengths are multiplied.
            (default: :obj:`1`)
        seed (int, optional): Seed of the graphs. (default: :obj:`0`)
        **kwargs (optional): Additional arguments of
            :class:`~torch_geometric.data.InMemoryDataset`.

    Raises:
        ValueError: If :obj:`task` or :obj:`split` is unknown, or a number is out of
            range.
    """

    #: The names of the families, in the order of :obj:`family`.
    FAMILIES = ("line", "ladder", "grid", "tree", "caterpillar", "lobster")
    #: The smallest and the largest diameter, for :obj:`scale=1`.
    DIAMETERS = (17, 40)
    #: The unit of targets.
    HOPS = 40
    _tasks = ("sssp", "eccentricity", "diameter")

    def __init__(
        self,
        root: str,
        task: str = "sssp",
        split: str = "train",
        num_graphs: int = 10_080,
        scale: int = 1,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        if task not in self._tasks:
            raise ValueError(f"'task' must be one of {self._tasks} (got {task!r})")
        kinds = len(self.FAMILIES)
        if num_graphs < 3 * kinds or num_graphs % kinds:
            raise ValueError(
                f"'num_graphs' must be a multiple of {kinds}, the number of families, "
                f"and at least {3 * kinds} (got {num_graphs})"
            )
        if scale < 1:
            raise ValueError(f"'scale' must be at least 1 (got {scale})")
        self.task = task
        self.num_graphs = num_graphs
        self.scale = scale
        super().__init__(root, split, seed, **kwargs)

    @property
    def processed_dir(self) -> str:
        """Where the splits of this task, number of graphs, scale and seed are kept."""
        name = f"echo-{self.task}-{self.num_graphs}-scale{self.scale}-seed{self.seed}"
        return osp.join(self.root, name, "processed")

    def generate(self) -> list[Data]:
        """The graphs of the split; consecutive ones are of different families."""
        kinds = len(self.FAMILIES)
        size = kinds * self.split_size(self.num_graphs // kinds)
        return [self._graph(i) for i in range(size)]

    def _graph(self, i: int) -> Data:
        entropy = [self.seed, SPLITS.index(self.split), self.scale, i]
        rng = np.random.default_rng(entropy)
        number, family = divmod(i, len(self.FAMILIES))
        name = self.FAMILIES[family]
        low, high = self.DIAMETERS
        # 7 is coprime to their number: the diameters of a few graphs are spread out.
        diameter = self.scale * (low + 7 * number % (high - low + 1))
        if name == "grid":
            edges = _grid(rng, diameter, self.scale, high * self.scale)
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
        if self.task == "sssp":
            flag = np.arange(nodes)[:, None] == source
            x = np.concatenate([x, flag.astype(np.float32)], axis=1)
            hops = shortest_path(adjacency, unweighted=True, indices=source)
        else:
            hops = shortest_path(adjacency, unweighted=True).max(axis=0)
            if self.task == "diameter":
                hops = hops.max()
        return Data(
            x=torch.from_numpy(x),
            edge_index=from_scipy_sparse_matrix(adjacency)[0],
            y=torch.as_tensor(hops / self.HOPS, dtype=torch.float).view(-1, 1),
            family=torch.tensor([family]),
        )

    def __repr__(self) -> str:
        return (
            f"{self.__class__.__name__}({len(self)}, task={self.task!r}, "
            f"split={self.split!r}, scale={self.scale})"
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


def _grid(
    rng: np.random.Generator, diameter: int, scale: int, largest: int
) -> np.ndarray:
    """The edges of a grid's largest component after the removal of some edges."""
    while True:
        # Removal makes detours: start with a grid of a smaller diameter.
        length = round(0.85 * diameter)
        rows = int(rng.integers(3, length // (2 * scale) + 2))
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
        if EchoSynth.DIAMETERS[0] * scale <= hops <= largest:
            return edges
