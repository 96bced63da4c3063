"""Voltage angles of transmission grids under random loads."""

import os.path as osp
import re
from collections.abc import Sequence
from hashlib import sha1
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
from scipy.sparse import csc_array
from scipy.sparse.csgraph import connected_components, laplacian
from scipy.sparse.linalg import splu
from torch_geometric.data import Data

from pyg_chimera.datasets._splits import SPLITS, GeneratedDataset

__all__ = ["PowerFlow"]

#: Columns of MATPOWER's matrices.
_BUS_ID, _DEMAND = 0, 2
_FROM, _TO, _REACTANCE, _TAP, _BRANCH_STATUS = 0, 1, 3, 8, 10
_GENERATOR_BUS, _GENERATOR_STATUS, _CAPACITY = 0, 7, 8
#: The smallest reactance, in p.u.
_FLOOR = 1e-5


class _Grid(NamedTuple):
    """The largest component of a grid, of n buses and g generators."""

    susceptance: csc_array  # [n, n], symmetric
    demand: np.ndarray  # [n]
    generators: np.ndarray  # [g], the bus of each
    capacity: np.ndarray  # [g]


class PowerFlow(GeneratedDataset):
    r"""DC power flow on transmission grids with random loads: from the power that is
    injected at each bus, find the voltage angles.

    The grids are files of `MATPOWER <https://matpower.org>`_, which you put, under
    their own licenses, into :obj:`root/raw`: case files (:obj:`case2869pegase.m`), or
    the same matrices in NumPy's format (an :obj:`.npz` file with the arrays
    :obj:`bus`, :obj:`gen` and :obj:`branch`). Of case files, only these matrices are
    read, and none of the code that may follow them.

    Nodes are the buses of the largest component of branches in service, edges are its
    branches. A branch has the susceptance :math:`b = 1 / (\textrm{reactance} \cdot
    \textrm{tap ratio})` in p.u., parallel ones their sum. Angles :math:`\theta` in
    radians and injections :math:`P` in p.u. satisfy

    .. math::
        \sum_j b_{ij} (\theta_i - \theta_j) = P_i.

    Negative reactances (series capacitors, and equivalents of transformers with three
    windings) enter with their absolute values, and those below :math:`10^{-5}` with
    this value, so that the matrix is positive semidefinite. Phase shifters are ignored.

    Samples differ by their loads. Each bus demands its demand of the file times
    :math:`\exp(\epsilon / 2)`, and in addition :math:`\eta / 10` times the root mean
    square of all demands, with standard normal :math:`\epsilon` and :math:`\eta`.
    Generators in service cover the sum, with shares proportional to their capacities
    times random numbers of an exponential distribution. Injections are then scaled to a
    root mean square of 1 over the grid, that is, measured in this unit instead of p.u.;
    angles, which are linear in them, are those that result.

    Angles at one bus depend on injections everywhere. Measure errors relative to the
    angles, :math:`\sqrt{\sum_i (\hat{y}_i - y_i)^2 / \sum_i y_i^2}` over the buses of
    a sample: predicting 0 then costs 1 on each grid, whatever its size, while the root
    mean square of angles varies between 0.1 and 2. (It also varies between samples, and
    a part of it may lie in few buses behind a weak branch.)

    Training and test samples are of the same grids under different loads. For unseen
    grids, create another data set with other :obj:`grids`.

    A sample of :math:`V` buses has the attributes

    * :obj:`x`: float :math:`(V, 3)`, the injection :math:`P_i`; :math:`50 P_i / B_i`
      with the bus's total susceptance :math:`B_i = \sum_j b_{ij}`, in p.u.; and
      :math:`(\ln B_i - 5) / 2`. The constants are the same for all grids, and bring
      features to the order of 1,
    * :obj:`edge_index`: int64 :math:`(2, E)`, both directions of each edge,
    * :obj:`edge_attr`: float :math:`(E, 1)`, :math:`\ln b_{ij}`,
    * :obj:`y`: float :math:`(V, 1)`, the angles minus their mean; the equation above
      holds with :obj:`x[:, 0]` as :math:`P`,
    * :obj:`grid`: int64 :math:`(1)`, the position in :obj:`grids`.

    A sample is a function of its grid (with its name), of :obj:`split`, :obj:`seed` and
    its position among those of the grid. Only the split that is asked for is generated,
    in a few seconds per 1,000 samples
    of 2,000 buses.

    Args:
        root (str): Folder with the grids in :obj:`root/raw`. It may be read-only if
            :obj:`processed_root` is given.
        grids (sequence[str]): The names of their files, without extension.
        split (str, optional): :obj:`"train"`, :obj:`"val"` or :obj:`"test"`, which
            have 80%, 10% and 10% of the samples. (default: :obj:`"train"`)
        num_samples (int, optional): The number of samples of each grid in all three
            splits together, at least 3. (default: :obj:`100`)
        seed (int, optional): Seed of the loads. (default: :obj:`0`)
        processed_root (str, optional): Folder in which processed files are kept, in a
            subfolder per choice of grids, number of samples and seed.
            (default: :obj:`None`, which is :obj:`root`)
        **kwargs (optional): Additional arguments of
            :class:`~torch_geometric.data.InMemoryDataset`.

    Raises:
        FileNotFoundError: If a grid's file is missing.
        ValueError: If :obj:`split` is unknown, a number is out of range, no grid is
            named or one twice, or a file has unexpected contents.
    """

    def __init__(
        self,
        root: str,
        grids: Sequence[str],
        split: str = "train",
        num_samples: int = 100,
        seed: int = 0,
        processed_root: str | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(grids, str) or not grids or len(set(grids)) < len(grids):
            raise ValueError(
                f"'grids' must be a sequence of different names (got {grids!r})"
            )
        if num_samples < len(SPLITS):
            raise ValueError(
                f"'num_samples' must be at least {len(SPLITS)}, one a split "
                f"(got {num_samples})"
            )
        self.grids = tuple(grids)
        self.num_samples = num_samples
        self.processed_root = osp.expanduser(processed_root or root)
        super().__init__(root, split, seed, **kwargs)

    @property
    def processed_dir(self) -> str:
        """Where the splits of these grids, number of samples and seed are kept."""
        # All names may be too long for one folder.
        grids = sha1(repr(self.grids).encode(), usedforsecurity=False).hexdigest()[:12]
        name = f"power-flow-{grids}-{self.num_samples}-seed{self.seed}"
        return osp.join(self.processed_root, name, "processed")

    def generate(self) -> list[Data]:
        """The samples of the split; consecutive ones are of different grids."""
        size = self.split_size(self.num_samples)
        samples = [
            self._samples(number, name, size) for number, name in enumerate(self.grids)
        ]
        return [data for row in zip(*samples, strict=True) for data in row]

    def _samples(self, number: int, name: str, size: int) -> list[Data]:
        grid = _largest_component(_read(osp.join(self.raw_dir, name)), name)
        matrix = grid.susceptance.tocoo()
        edge_index = torch.from_numpy(np.stack(matrix.coords).astype(np.int64))
        edge_attr = torch.from_numpy(np.log(matrix.data)).float().view(-1, 1)
        total = grid.susceptance.sum(axis=0)
        # The angle of the first bus is 0, until the mean is subtracted.
        solve = splu(csc_array(laplacian(grid.susceptance))[1:, 1:]).solve
        samples = []
        for i in range(size):
            entropy = [self.seed, SPLITS.index(self.split), crc32(name.encode()), i]
            power = _injections(np.random.default_rng(entropy), grid)
            angle = np.concatenate([[0.0], solve(power[1:])])
            x = [power, 50 * power / total, (np.log(total) - 5) / 2]
            data = Data(
                x=torch.from_numpy(np.stack(x, axis=1)).float(),
                edge_index=edge_index,
                edge_attr=edge_attr,
                y=torch.from_numpy(angle - angle.mean()).float().view(-1, 1),
                grid=torch.tensor([number]),
            )
            samples.append(data)
        return samples

    def __repr__(self) -> str:
        return (
            f"{self.__class__.__name__}({len(self)}, split={self.split!r}, "
            f"grids={len(self.grids)})"
        )


def _read(path: str) -> dict[str, np.ndarray]:
    """The matrices of a grid, from one of the two formats."""
    names = ("bus", "gen", "branch")
    if osp.isfile(f"{path}.npz"):
        with np.load(f"{path}.npz") as file:
            found = {name: file[name] for name in names if name in file}
    elif osp.isfile(f"{path}.m"):
        with open(f"{path}.m") as text:
            code = re.sub(r"%.*|\.\.\..*\n", "", text.read())
        pattern = r"\bmpc\.(bus|gen|branch)\s*=\s*\[(.*?)\]"
        found = {
            name: np.array(
                [
                    row.replace(",", " ").split()
                    for row in re.split(r"[;\n]", block)
                    if row.strip()
                ],
                float,
            )
            for name, block in re.findall(pattern, code, re.DOTALL)
        }
    else:
        raise FileNotFoundError(
            f"{path}.npz or {path}.m is missing: put the grid's file there"
        )
    for name, columns in zip(names, (3, 9, 11), strict=True):
        shape = found[name].shape if name in found else None
        if shape is None or len(shape) != 2 or shape[1] < columns:
            raise ValueError(
                f"The file of {path} must hold the matrix '{name}' with {columns} or "
                f"more columns (got {shape})"
            )
    return found


def _largest_component(case: dict[str, np.ndarray], name: str) -> _Grid:
    bus, gen, branch = case["bus"], case["gen"], case["branch"]
    ids = bus[:, _BUS_ID].astype(int)
    index = {bus_id: i for i, bus_id in enumerate(ids.tolist())}
    branch = branch[branch[:, _BRANCH_STATUS] > 0]
    try:
        ends = np.vectorize(index.__getitem__, otypes=[int])(branch[:, [_FROM, _TO]])
        gen = gen[gen[:, _GENERATOR_STATUS] > 0]
        generators = np.vectorize(index.__getitem__, otypes=[int])(
            gen[:, _GENERATOR_BUS]
        )
    except KeyError as error:
        raise ValueError(f"{name!r} has no bus {error}, which it refers to") from None
    reactance = np.maximum(np.abs(branch[:, _REACTANCE]), _FLOOR)
    tap = np.where(branch[:, _TAP] == 0, 1.0, np.abs(branch[:, _TAP]))
    u, v = ends.T
    pair = np.concatenate([u, v]), np.concatenate([v, u])
    weight = np.tile((u != v) / (reactance * tap), 2)
    matrix = csc_array((weight, pair), shape=(len(bus),) * 2)  # sums parallel ones
    matrix.eliminate_zeros()  # a branch from a bus to itself
    label = connected_components(matrix, directed=False)[1]
    kept = label == np.bincount(label).argmax()
    if kept.sum() < 2:
        raise ValueError(f"{name!r} has no branch in service")
    inside = kept[generators]
    return _Grid(
        susceptance=matrix[kept][:, kept],
        demand=bus[kept, _DEMAND],
        generators=(np.cumsum(kept) - 1)[generators[inside]],
        capacity=np.maximum(gen[inside, _CAPACITY], 0),
    )


def _injections(rng: np.random.Generator, grid: _Grid) -> np.ndarray:
    """Random injections, whose sum is 0 and whose root mean square is 1."""
    size = len(grid.demand)
    # A grid without any demand has random ones.
    unit = np.sqrt(np.mean(grid.demand**2)) or 1.0
    power = -grid.demand * np.exp(0.5 * rng.standard_normal(size))
    power -= 0.1 * unit * rng.standard_normal(size)
    share = grid.capacity * rng.exponential(size=len(grid.capacity))
    if share.sum() > 0:
        np.add.at(power, grid.generators, -power.sum() * share / share.sum())
    # All buses share what generators, if there are none, or rounding left.
    power -= power.mean()
    return power / np.sqrt(np.mean(power**2))
