"""Spins with long-range couplings on a torus, and the energy of each."""

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch_geometric.data import Data

from long_range_data.kept import SPLITS, split_size

#: The decay of couplings, that of the benchmark's hard task.
SIGMA = 0.6
#: Where the susceptibility was found to peak, to about 1 %, by side.
TEMPERATURES = {16: 8.97, 32: 10.19, 64: 11.01, 128: 11.53, 256: 11.88}
#: The number of updates of all clusters. At these temperatures, correlations of m^2
#: fall to about 0.1 within 16 of them at side 64, and within 32 at side 256.
_SWEEPS = 64
#: Nodes per block. The graphs of a block are sampled together, with a random stream of
#: its own, so that a graph does not depend on the number of graphs.
_BLOCK = 16384


def ising_graphs(
    side: int, split: str, num_graphs: int, temperature: float | None = None
) -> list[Data]:
    r"""Spins of the long-range Ising model, as in LRIM
    (https://openreview.net/forum?id=IAZXEX1dVV), sampled anew.

    Spins s_i = -1 or 1 on a square lattice with periodic boundaries have the energy

    .. math::
        H = - \frac{1}{2} \sum_{i \neq j} J_{ij} s_i s_j, \qquad
        J_{ij} = r_{ij}^{-(2 + \sigma)},

    and the target of a node is :math:`y_i = s_i \sum_{j \neq i} J_{ij} s_j`: flipping
    its spin changes the energy by :math:`2 y_i`. The graph joins nearest neighbours
    only, while each target depends on all spins.

    Spins are sampled at the pseudo-critical temperature, at which they are correlated
    over all distances and the susceptibility
    :math:`N (\langle m^2 \rangle - \langle |m| \rangle^2) / T` of the magnetization
    peaks. Each graph is the end of a Markov chain of its own, from random spins:
    updates of all clusters (Swendsen-Wang, in linear time by the method of Fukui and
    Todo).

    Distances are Euclidean ones to the nearest periodic image, which may differ from
    the benchmark's convention, and so may the temperatures.

    Args:
        side: The side of the lattice.
        split: `"train"`, `"val"` or `"test"`, 80, 10 and 10 % of the graphs.
        num_graphs: Of all splits, 3 at least.
        temperature: In units of the coupling of nearest neighbours, by default that of
            `TEMPERATURES`.

    Returns:
        Graphs with the spins `x` and energies `y` [V, 1], in units of the coupling of
        nearest neighbours; both directions of each edge; and `pos` [V, 2], row and
        column.
    """
    if temperature is None:
        temperature = TEMPERATURES[side]
    couplings = couplings_of(side)
    block = max(1, _BLOCK // couplings.size)
    graphs: list[Data] = []
    row, column = np.indices(couplings.shape).reshape(2, -1)
    pos = torch.from_numpy(np.stack([row, column], axis=1)).float()
    right = row * side + (column + 1) % side
    down = (row + 1) % side * side + column
    node = np.arange(couplings.size)
    edges = np.stack([[node, node], [right, down]]).reshape(2, -1)
    edge_index = torch.from_numpy(np.concatenate([edges, edges[::-1]], axis=1))
    size = split_size(split, num_graphs)
    for number in range(-(-size // block)):
        rng = np.random.default_rng([0, SPLITS.index(split), side, number])
        spins = sample(rng, couplings, temperature, block, _SWEEPS)
        for s, y in zip(spins, spins * fields_of(spins, couplings), strict=True):
            x = torch.from_numpy(s.astype(np.float32)).view(-1, 1)
            energy = torch.from_numpy(y.astype(np.float32)).view(-1, 1)
            graphs.append(Data(x=x, edge_index=edge_index, y=energy, pos=pos))
    return graphs[:size]


def couplings_of(side: int) -> np.ndarray:
    """The couplings of the node at (0, 0) to all nodes; 0 to itself."""
    steps = np.minimum(np.arange(side), side - np.arange(side)).astype(float)
    square = steps[:, None] ** 2 + steps**2
    square[0, 0] = np.inf
    return square ** -(1 + SIGMA / 2)


def fields_of(spins: np.ndarray, couplings: np.ndarray) -> np.ndarray:
    """The sums of all other spins, weighted by their couplings."""
    product = np.fft.rfft2(spins) * np.fft.rfft2(couplings)
    return np.fft.irfft2(product, s=couplings.shape)


def sample(
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
