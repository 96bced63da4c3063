"""Voltage angles of transmission grids under random loads."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch
from scipy.sparse import csc_array
from scipy.sparse.csgraph import connected_components, laplacian
from scipy.sparse.linalg import splu
from torch_geometric.data import Data

from long_range_data.splits import SPLITS, split_size

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


def power_flow_graphs(
    folder: Path, grids: Sequence[str], split: str, num_samples: int
) -> list[Data]:
    r"""DC power flow with random loads: from the power that is injected at each bus,
    find the voltage angles.

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
    root mean square of 1 over the grid.

    Args:
        folder: Files of MATPOWER (https://matpower.org): case files
            (`case2869pegase.m`), or their matrices `bus`, `gen` and `branch` as
            `.npz`.
        grids: The names of the files, without extension.
        split: `"train"`, `"val"` or `"test"`, 80, 10 and 10 % of the samples.
        num_samples: Of each grid in all splits, 3 at least.

    Returns:
        Samples, consecutive ones of different grids. `x` [V, 3]: the injection
        :math:`P_i`; :math:`50 P_i / B_i` with the bus's total susceptance :math:`B_i`;
        and :math:`(\ln B_i - 5) / 2`. (The constants bring features to the order of
        1.) `edge_index`: both directions of each edge. `edge_attr` [E, 1]:
        :math:`\ln b_{ij}`. `y` [V, 1]: the angles minus their mean. `grid`: the
        position in `grids`. A sample is a function of its grid, with its name, of the
        split and of its position.
    """
    size = split_size(split, num_samples)
    samples = [
        _samples(folder / name, number, split, size)
        for number, name in enumerate(grids)
    ]
    return [data for row in zip(*samples, strict=True) for data in row]


def _samples(path: Path, number: int, split: str, size: int) -> list[Data]:
    grid = _largest_component(read_case(path))
    matrix = grid.susceptance.tocoo()
    edge_index = torch.from_numpy(np.stack(matrix.coords).astype(np.int64))
    edge_attr = torch.from_numpy(np.log(matrix.data)).float().view(-1, 1)
    total = grid.susceptance.sum(axis=0)
    # The angle of the first bus is 0, until the mean is subtracted.
    solve = splu(csc_array(laplacian(grid.susceptance))[1:, 1:]).solve
    samples = []
    for i in range(size):
        entropy = [0, SPLITS.index(split), crc32(path.name.encode()), i]
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


def read_case(path: Path) -> dict[str, np.ndarray]:
    """The matrices of a grid and its `base_mva`, from one of the two formats."""
    if path.with_suffix(".npz").exists():
        with np.load(path.with_suffix(".npz")) as file:
            return dict(file)
    code = re.sub(r"%.*|\.\.\..*\n", "", path.with_suffix(".m").read_text())
    pattern = r"\bmpc\.(bus|gen|branch)\s*=\s*\[(.*?)\]"
    base = re.search(r"\bmpc\.baseMVA\s*=\s*([\d.eE+]+)", code)
    case = {"base_mva": np.array(float(base[1]) if base else 100.0)}
    for name, block in re.findall(pattern, code, re.DOTALL):
        rows = (row.replace(",", " ").split() for row in re.split(r"[;\n]", block))
        case[name] = np.array([row for row in rows if row], float)
    return case


def _largest_component(case: dict[str, np.ndarray]) -> _Grid:
    bus, gen, branch = case["bus"], case["gen"], case["branch"]
    ids = bus[:, _BUS_ID].astype(int)
    index = {bus_id: i for i, bus_id in enumerate(ids.tolist())}
    branch = branch[branch[:, _BRANCH_STATUS] > 0]
    ends = np.vectorize(index.__getitem__, otypes=[int])(branch[:, [_FROM, _TO]])
    gen = gen[gen[:, _GENERATOR_STATUS] > 0]
    generators = np.vectorize(index.__getitem__, otypes=[int])(gen[:, _GENERATOR_BUS])
    reactance = np.maximum(np.abs(branch[:, _REACTANCE]), _FLOOR)
    tap = np.where(branch[:, _TAP] == 0, 1.0, np.abs(branch[:, _TAP]))
    u, v = ends.T
    pair = np.concatenate([u, v]), np.concatenate([v, u])
    weight = np.tile((u != v) / (reactance * tap), 2)
    matrix = csc_array((weight, pair), shape=(len(bus),) * 2)  # sums parallel ones
    matrix.eliminate_zeros()  # a branch from a bus to itself
    label = connected_components(matrix, directed=False)[1]
    kept = label == np.bincount(label).argmax()
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
