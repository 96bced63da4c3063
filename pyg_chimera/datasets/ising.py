"""Spins with long-range couplings on a torus, and the energy of each."""

import os.path as osp
from typing import Any

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch_geometric.data import Data

from pyg_chimera.datasets._splits import SPLITS, GeneratedDataset

__all__ = ["LongRangeIsing"]

#: Nodes per block. The graphs of a block are sampled together, with a random stream of
#: its own, so that a graph does not depend on the number of graphs.
_BLOCK = 16384


class LongRangeIsing(GeneratedDataset):
    r"""Spins of the long-range Ising model, as in the `"LRIM: a Physics-Based Benchmark
    for Provably Evaluating Long-Range Capabilities in Graph Learning"
    <https://openreview.net/forum?id=IAZXEX1dVV>`_ paper, sampled anew.

    Spins :math:`s_i = \pm 1` on a square lattice with periodic boundaries have the
    energy

    .. math::
        H = - \frac{1}{2} \sum_{i \neq j} J_{ij} s_i s_j, \qquad
        J_{ij} = r_{ij}^{-(2 + \sigma)},

    and the target of node :math:`i` is :math:`y_i = s_i \sum_{j \neq i} J_{ij} s_j`.
    Flipping its spin changes the energy by :math:`2 y_i`, and
    :math:`H = - \frac{1}{2} \sum_i y_i`. The graph joins nearest neighbours only,
    while each target depends on all spins, the more on distant ones the smaller
    :math:`\sigma` is. Targets are computed by FFT, in double precision.

    Spins are sampled at the pseudo-critical temperature, at which they are correlated
    over all distances and the susceptibility
    :math:`N (\langle m^2 \rangle - \langle |m| \rangle^2) / T` of the magnetization
    :math:`m` peaks. :obj:`TEMPERATURES` lists where this was found, to about 1%, for
    the benchmark's sides, 16 to 256, and its :math:`\sigma`, 0.6 ("hard") and 1.5
    ("easy"). Other models need a :obj:`temperature`.

    Each graph is the end of a Markov chain of its own: :obj:`SWEEPS` updates of all
    clusters (Swendsen-Wang, in linear time by the method of Fukui and Todo), from
    random spins. At the listed temperatures, correlations of :math:`m^2` between
    updates fall to about 0.1 within 16 of them at side 64, and within 32 at side 256,
    so that 64 reach equilibrium, and graphs are independent.

    As in the benchmark are the Hamiltonian, features, target (not standardized),
    number of graphs and sizes of the splits; its measure is :math:`\log_{10}` of the
    mean squared error over all nodes. Divide errors by the variance of the training
    targets, :obj:`dataset.y.var()`, to compare different sides and :math:`\sigma`. The
    distance :math:`r_{ij}` is the Euclidean one to the nearest periodic image, which
    may differ from the benchmark's convention at large distances, and so may the
    temperatures. The official files list one direction of each edge.

    A graph of :math:`V = \textrm{side}^2` nodes has the attributes

    * :obj:`x`: float :math:`(V, 1)`, the spins, -1 or 1,
    * :obj:`edge_index`: int64 :math:`(2, 4 V)`, both directions of each edge,
    * :obj:`pos`: float :math:`(V, 2)`, row and column, from 0 to
      :math:`\textrm{side} - 1`,
    * :obj:`y`: float :math:`(V, 1)`, in units of the coupling of nearest neighbours.

    A graph is a function of its position in the split, and of :obj:`split`,
    :obj:`side`, :obj:`sigma`, :obj:`temperature` and :obj:`seed`. Only the split that
    is asked for is generated, in about 4 seconds per 1,000 graphs of side 16, or one or
    two seconds per graph of side 256.

    Args:
        root (str): Folder in which processed files are kept, in a subfolder per model,
            number of graphs and seed.
        side (int, optional): The side of the lattice, at least 3.
            (default: :obj:`16`)
        sigma (float, optional): The decay :math:`\sigma` of couplings, above 0.
            (default: :obj:`0.6`)
        split (str, optional): :obj:`"train"`, :obj:`"val"` or :obj:`"test"`, which
            have 80%, 10% and 10% of the graphs. (default: :obj:`"train"`)
        num_graphs (int, optional): The number of graphs in all three splits together,
            at least 3. (default: :obj:`10_000`)
        temperature (float, optional): The temperature :math:`k_B T`, in units of the
            coupling of nearest neighbours. (default: :obj:`None`, that of
            :obj:`TEMPERATURES`)
        seed (int, optional): Seed of the spins. (default: :obj:`0`)
        **kwargs (optional): Additional arguments of
            :class:`~torch_geometric.data.InMemoryDataset`.

    Raises:
        ValueError: If :obj:`split` is unknown, a number is out of range, or no
            temperature is listed for :obj:`side` and :obj:`sigma`.
    """

    #: Pseudo-critical temperatures, by :obj:`sigma` and :obj:`side`.
    TEMPERATURES = {  # noqa: RUF012 (read only)
        0.6: {16: 8.97, 32: 10.19, 64: 11.01, 128: 11.53, 256: 11.88},
        1.5: {16: 5.36, 32: 5.51, 64: 5.56, 128: 5.58, 256: 5.59},
    }
    #: The number of updates of all clusters.
    SWEEPS = 64

    def __init__(
        self,
        root: str,
        side: int = 16,
        sigma: float = 0.6,
        split: str = "train",
        num_graphs: int = 10_000,
        temperature: float | None = None,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        if side < 3:
            raise ValueError(f"'side' must be at least 3 (got {side})")
        if not sigma > 0:
            raise ValueError(f"'sigma' must be above 0 (got {sigma})")
        if num_graphs < len(SPLITS):
            raise ValueError(
                f"'num_graphs' must be at least {len(SPLITS)}, one a split "
                f"(got {num_graphs})"
            )
        if temperature is None:
            temperature = self.TEMPERATURES.get(sigma, {}).get(side)
            if temperature is None:
                raise ValueError(
                    f"'temperature' must be given for side={side} and sigma={sigma}, "
                    f"which are not in TEMPERATURES (got None)"
                )
        if not temperature > 0:
            raise ValueError(f"'temperature' must be above 0 (got {temperature})")
        self.side = side
        self.sigma = sigma
        self.num_graphs = num_graphs
        self.temperature = temperature
        super().__init__(root, split, seed, **kwargs)

    @property
    def processed_dir(self) -> str:
        """Where the splits of this model, number of graphs and seed are kept."""
        name = (
            f"ising-{self.side}-sigma{self.sigma:g}-T{self.temperature:g}-"
            f"{self.num_graphs}-seed{self.seed}"
        )
        return osp.join(self.root, name, "processed")

    def generate(self) -> list[Data]:
        """The graphs of the split."""
        couplings = couplings_of(self.side, self.sigma)
        block = max(1, _BLOCK // couplings.size)
        graphs: list[Data] = []
        row, column = np.indices(couplings.shape).reshape(2, -1)
        pos = torch.from_numpy(np.stack([row, column], axis=1)).float()
        right = row * self.side + (column + 1) % self.side
        down = (row + 1) % self.side * self.side + column
        node = np.arange(couplings.size)
        edges = np.stack([[node, node], [right, down]]).reshape(2, -1)
        edge_index = torch.from_numpy(np.concatenate([edges, edges[::-1]], axis=1))
        size = self.split_size(self.num_graphs)
        for number in range(-(-size // block)):
            entropy = [self.seed, SPLITS.index(self.split), self.side, number]
            rng = np.random.default_rng(entropy)
            spins = _sample(rng, couplings, self.temperature, block, self.SWEEPS)
            for s, y in zip(spins, spins * fields_of(spins, couplings), strict=True):
                x = torch.from_numpy(s.astype(np.float32)).view(-1, 1)
                energy = torch.from_numpy(y.astype(np.float32)).view(-1, 1)
                graphs.append(Data(x=x, edge_index=edge_index, y=energy, pos=pos))
        return graphs[:size]

    def __repr__(self) -> str:
        return (
            f"{self.__class__.__name__}({len(self)}, split={self.split!r}, "
            f"side={self.side}, sigma={self.sigma:g})"
        )


def couplings_of(side: int, sigma: float) -> np.ndarray:
    """The couplings of the node at (0, 0) to all nodes; 0 to itself."""
    steps = np.minimum(np.arange(side), side - np.arange(side)).astype(float)
    square = steps[:, None] ** 2 + steps**2
    square[0, 0] = np.inf
    return square ** -(1 + sigma / 2)


def fields_of(spins: np.ndarray, couplings: np.ndarray) -> np.ndarray:
    """The sums of all other spins, weighted by their couplings."""
    product = np.fft.rfft2(spins) * np.fft.rfft2(couplings)
    return np.fft.irfft2(product, s=couplings.shape)


def _sample(
    rng: np.random.Generator,
    couplings: np.ndarray,
    temperature: float,
    num_graphs: int,
    sweeps: int,
) -> np.ndarray:
    """Spins of so many graphs after updates of all clusters, from random spins.

    Between the two spins of a pair that are equal, a bond is laid with probability
    1 - exp(-2 J / T): if a Poisson variable of mean 2 J / T is not 0. Instead of one
    for each of the many pairs, their sum is drawn, and its units are distributed among
    the pairs in proportion to J.
    """
    side, size = len(couplings), couplings.size
    total = np.cumsum(couplings.ravel())
    nodes = num_graphs * size
    spins = 2 * rng.integers(2, size=nodes) - 1
    for _ in range(sweeps):
        bonds = rng.poisson(nodes * total[-1] / temperature)
        steps = np.searchsorted(total, total[-1] * rng.random(bonds), side="right")
        one = rng.integers(nodes, size=bonds)
        graph, place = np.divmod(one, size)
        row = (place // side + steps // side) % side
        column = (place % side + steps % side) % side
        other = graph * size + row * side + column
        equal = spins[one] == spins[other]
        bond = one[equal], other[equal]
        matrix = coo_array((np.ones(len(bond[0]), np.int8), bond), (nodes, nodes))
        clusters, label = connected_components(matrix, directed=False)
        spins = (2 * rng.integers(2, size=clusters) - 1)[label]
    return spins.reshape(num_graphs, side, side)
