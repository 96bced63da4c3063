"""States of AC power flow: random loads on grids in the format of MATPOWER.

Columns and formulas are those of MATPOWER's manual (https://matpower.org). Powers,
admittances and voltages are in per unit. Limits of generators are not enforced.
"""

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import networkx as nx
import numpy as np
import torch
from scipy.sparse import block_array, coo_array, csr_array, diags_array
from scipy.sparse.csgraph import breadth_first_order, connected_components
from scipy.sparse.linalg import MatrixRankWarning, spsolve
from torch import Tensor
from torch_geometric.data import Data, Dataset
from tqdm import tqdm

sys.path.append(str(Path(__file__).parents[1]))
from long_range_data.power_flow import read_case

SLACK, PV, PQ = range(3)
#: The system's load, and the deviations of the logarithms of loads and generation.
LOAD, LOAD_SIGMA, GENERATION_SIGMA = (0.7, 1.1), 0.3, 0.3
#: The deviation of set-points, and the lowest voltage of a state that is kept.
SET_POINT_SIGMA, LOWEST = 0.01, 0.5
#: So many draws for each state before a grid is refused.
TRIES = 5
#: The greatest mismatch of power in a solution, and the steps to get there.
TOLERANCE, STEPS = 1e-8, 12
#: What the slack may feed in beside its schedule, and solutions to get there.
BALANCE, ROUNDS = 0.01, 4
#: The least and the greatest number of buses of a part that is cut out of a grid, and
#: the least ratio of its net demand to the sum of all, outflows and inflows included.
PART, CONSUMED = (100, 1000), 0.3
#: The columns of `x` with what misses the balance, see `describe`.
MISSES = slice(13, 17)
#: Of the states: to be raised when they change, so that files of others are not read.
VERSION = 2


class Grid(NamedTuple):
    """The part of a grid around its slack: n buses, b branches and g generators."""

    kind: np.ndarray  # [n], slack, PV or PQ
    demand: np.ndarray  # [n], complex power
    shunt: np.ndarray  # [n], complex admittance
    voltage: np.ndarray  # [n], complex, the operating point of the file
    set_point: np.ndarray  # [n], magnitudes, which hold at slack and PV
    generators: np.ndarray  # [g], the bus of each
    generation: np.ndarray  # [g], active power
    ends: np.ndarray  # [2, b], buses; taps are at the first
    impedance: np.ndarray  # [b], complex
    charging: np.ndarray  # [b], the susceptance of both ends together
    ratio: np.ndarray  # [b], complex tap ratio
    transformer: np.ndarray  # [b], whether it is one


class Drawn(NamedTuple):
    """What is known of a state."""

    power: np.ndarray  # [n], complex, fed in: all active, reactive of loads alone
    set_point: np.ndarray  # [n]
    kept: np.ndarray  # [b], branches in service


# Grids ---------------------------------------------------------------------------


def read_grid(path: Path) -> Grid:
    """Reads a `.npz` or `.m` of MATPOWER, whose suffix may be left out.

    The first reference bus is the slack, and buses without a generator are PQ.

    Raises:
        ValueError: If there is no reference bus, or nothing is generated or consumed.
    """
    case = read_case(path)
    base, bus, gen, branch = (case[x] for x in ("base_mva", "bus", "gen", "branch"))
    bus = bus[bus[:, 1] < 4]  # others are isolated
    order = np.argsort(bus[:, 0])

    def find(ids: np.ndarray) -> np.ndarray:
        """The rows of buses; -1 without one."""
        at = order[np.searchsorted(bus[order, 0], ids).clip(max=len(bus) - 1)]
        return np.where(bus[at, 0] == ids, at, -1)

    gen = gen[(gen[:, 7] > 0) & (find(gen[:, 0]) >= 0)]
    ends = find(branch[:, :2])
    good = (branch[:, 10] > 0) & (ends >= 0).all(1) & (ends[:, 0] != ends[:, 1])
    ends, branch = ends[good], branch[good]
    generators = find(gen[:, 0])
    kind = np.full(len(bus), PQ)
    kind[generators[bus[generators, 1] > 1]] = PV
    if not (bus[:, 1] == 3).any():
        raise ValueError(f"{path}: a bus must be of type 3, the reference")
    slack = np.flatnonzero(bus[:, 1] == 3)[0]
    kind[slack] = SLACK
    set_point = bus[:, 7].copy()
    set_point[generators] = gen[:, 5]

    size = 2 * (len(bus),)
    _, part = connected_components(coo_array((np.ones(len(ends)), ends.T), size))
    tap = np.where(branch[:, 8] == 0, 1.0, branch[:, 8])
    levels = bus[ends.T, 9]
    impedance = branch[:, 2] + 1j * branch[:, 3]
    whole = Grid(
        kind=kind,
        demand=(bus[:, 2] + 1j * bus[:, 3]) / base,
        shunt=(bus[:, 4] + 1j * bus[:, 5]) / base,
        voltage=bus[:, 7] * np.exp(1j * np.deg2rad(bus[:, 8])),
        set_point=set_point,
        generators=generators,
        generation=gen[:, 1] / base,
        ends=ends.T,
        impedance=np.where(impedance == 0, 1e-5j, impedance),
        charging=branch[:, 4],
        ratio=tap * np.exp(1j * np.deg2rad(branch[:, 9])),
        transformer=(tap != 1) | (branch[:, 9] != 0) | (levels[0] != levels[1]),
    )
    grid = restrict(whole, part == part[slack])
    if min(grid.generation.sum(), grid.demand.real.sum()) <= 0:
        raise ValueError(f"{path}: the sums of generation and demand must be positive")
    # Shifts of the files from PEGASE are negative radians: taken for degrees, up to
    # 63 p.u. are missing at an operating point, which is 0.2 to 3 p.u. otherwise.
    other = grid._replace(ratio=tap * np.exp(-1j * branch[:, 9]))
    missed = [filed_mismatch(x) for x in (grid, other)]
    return other if missed[1] < 0.1 * missed[0] else grid


def restrict(grid: Grid, inside: np.ndarray) -> Grid:
    """The part of a grid with some of its buses [n], and the branches between them."""
    number = np.cumsum(inside) - 1
    kept, ours = inside[grid.ends].all(axis=0), inside[grid.generators]
    return Grid(
        kind=grid.kind[inside],
        demand=grid.demand[inside],
        shunt=grid.shunt[inside],
        voltage=grid.voltage[inside],
        set_point=grid.set_point[inside],
        generators=number[grid.generators[ours]],
        generation=grid.generation[ours],
        ends=number[grid.ends[:, kept]],
        impedance=grid.impedance[kept],
        charging=grid.charging[kept],
        ratio=grid.ratio[kept],
        transformer=grid.transformer[kept],
    )


def schedule(grid: Grid) -> np.ndarray:
    """The power [n] of the file, as in `Drawn`."""
    power = -grid.demand
    np.add.at(power, grid.generators, grid.generation)
    return power


def filed_mismatch(grid: Grid) -> float:
    """The most active power that is missing at a bus at the operating point."""
    matrix = admittance(grid, np.ones(len(grid.impedance), bool))
    miss = mismatch(matrix, schedule(grid), grid.kind, grid.voltage)
    return float(abs(miss.real).max())


def cut(grid: Grid, rng: np.random.Generator) -> Grid | None:
    """A connected part of a grid, of random size and place; all of a small one. None if
    no generator feeds in, or if most of what is consumed flows in at the border.

    At its border, what flows out of it at the operating point of the file is consumed
    instead, so that this stays one of the part. Its slack is the strongest generator.
    """
    whole = admittance(grid, np.ones(len(grid.impedance), bool))
    size = round(float(np.exp(rng.uniform(*np.log(PART)))))
    start = rng.integers(len(grid.kind))
    near, _ = breadth_first_order(abs(whole), start, directed=False)
    inside = np.zeros(len(grid.kind), bool)
    inside[near[:size]] = True
    part = restrict(grid, inside)
    own = admittance(part, np.ones(len(part.impedance), bool))
    out = (whole @ grid.voltage)[inside] - own @ part.voltage  # currents
    part = part._replace(
        kind=np.where(part.kind == SLACK, PV, part.kind),
        demand=part.demand + part.voltage * out.conj(),
    )
    fed = np.zeros(len(part.kind))
    np.add.at(fed, part.generators, part.generation)
    fed[part.kind == PQ] = 0
    demand = part.demand.real
    if fed.max() <= 0 or demand.sum() < CONSUMED * abs(demand).sum():
        return None
    part.kind[fed.argmax()] = SLACK
    return part


def write_grid(path: Path, num_buses: int, seed: int) -> Path:
    """Writes a random grid of lines and some transformers as `.npz`."""
    rng = np.random.default_rng(seed)
    place = rng.random((num_buses, 2))
    bus, gen = np.zeros((num_buses, 13)), np.zeros((num_buses // 5 + 1, 10))
    bus[:, 0], bus[:, 1], bus[:, 7], bus[:, 9] = range(num_buses), 1, 1, 100
    bus[:, 2] = rng.uniform(2, 10, num_buses)
    bus[:, 3] = 0.3 * bus[:, 2]
    gen[:, 0] = rng.choice(num_buses, len(gen), replace=False)
    gen[:, 1], gen[:, 7] = 1.02 * bus[:, 2].sum() / len(gen), 1
    gen[:, 5] = rng.uniform(0.99, 1.03, len(gen))
    bus[gen[:, 0].astype(int), 1] = 2
    bus[int(gen[0, 0]), 1] = 3
    rows = []
    for i in range(1, num_buses):  # to the two nearest of those before
        far = np.linalg.norm(place[:i] - place[i], axis=1)
        for j in far.argsort()[:2]:
            rows.append([j, i, 0.1 * far[j], 0.4 * far[j], 0.02 * far[j], 0, 0, 0])
    branch = np.pad(rows, ((0, 0), (0, 3)))
    branch[:, 10] = 1
    tapped = rng.random(len(branch)) < 0.2
    branch[tapped, 8] = rng.uniform(0.96, 1.04, tapped.sum())
    branch[tapped, 9] = rng.uniform(-2, 2, tapped.sum())
    np.savez(path, bus=bus, gen=gen, branch=branch, base_mva=100.0)
    return path


def removable(grid: Grid) -> np.ndarray:
    """The branches without which the grid is still in one part."""
    pairs = np.sort(grid.ends, axis=0).T
    graph = nx.Graph()
    graph.add_edges_from(pairs.tolist())
    bridges = set(nx.bridges(graph))
    bridges |= {(v, u) for u, v in bridges}
    _, at, count = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
    parallel = count[at.ravel()] > 1
    bridge = np.array([tuple(pair) in bridges for pair in pairs.tolist()], bool)
    return np.flatnonzero(parallel | ~bridge)


def admittance(grid: Grid, kept: np.ndarray) -> csr_array:
    """The matrix [n, n] by which voltages give the currents into the grid."""
    f, t = grid.ends[:, kept]
    series, ratio = 1 / grid.impedance[kept], grid.ratio[kept]
    own = series + 0.5j * grid.charging[kept]
    bus, size = np.arange(len(grid.kind)), 2 * (len(grid.kind),)
    parts = own / abs(ratio) ** 2, own, -series / ratio.conj(), -series / ratio
    rows, columns = np.r_[f, t, f, t, bus], np.r_[f, t, t, f, bus]
    return coo_array((np.r_[(*parts, grid.shunt)], (rows, columns)), size).tocsr()


# Power flow ----------------------------------------------------------------------


def mismatch(
    matrix: csr_array, power: np.ndarray, kind: np.ndarray, voltage: np.ndarray
) -> np.ndarray:
    """The complex power [n] that voltages take from buses, less what is fed in; zero
    where it is free: all at the slack, and the reactive part at PV.
    """
    miss = voltage * (matrix @ voltage).conj() - power
    return np.where(kind == SLACK, 0, miss.real) + 1j * np.where(
        kind == PQ, miss.imag, 0
    )


def newton_step(
    matrix: csr_array, power: np.ndarray, kind: np.ndarray, voltage: np.ndarray
) -> np.ndarray:
    """The voltages [n] after a step of Newton's method in polar coordinates."""
    angles, magnitudes = np.flatnonzero(kind != SLACK), np.flatnonzero(kind == PQ)
    miss = mismatch(matrix, power, kind, voltage)
    current = diags_array((matrix @ voltage).conj())
    outer, unit = diags_array(voltage), diags_array(voltage / abs(voltage))
    turned = 1j * outer @ (current - (matrix @ outer).conj())
    grown = outer @ (matrix @ unit).conj() + current @ unit
    turned, grown = turned.tocsr()[:, angles], grown.tocsr()[:, magnitudes]
    rows = [
        [turned.real[angles], grown.real[angles]],
        [turned.imag[magnitudes], grown.imag[magnitudes]],
    ]
    right = -np.r_[miss.real[angles], miss.imag[magnitudes]]
    step = spsolve(block_array(rows, format="csc"), right)
    angle, magnitude = np.angle(voltage), abs(voltage)
    angle[angles] += step[: len(angles)]
    magnitude[magnitudes] += step[len(angles) :]
    return magnitude * np.exp(1j * angle)


def solve(grid: Grid, drawn: Drawn, start: np.ndarray) -> np.ndarray | None:
    """The voltages [n] of a state, None if Newton's method does not find them."""
    matrix = admittance(grid, drawn.kept)
    magnitude = np.where(grid.kind == PQ, abs(start), drawn.set_point)
    voltage = magnitude * start / abs(start)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", MatrixRankWarning)
        for _ in range(STEPS):
            miss = mismatch(matrix, drawn.power, grid.kind, voltage)
            worst = max(abs(miss.real).max(), abs(miss.imag).max())
            if worst < TOLERANCE:
                return voltage
            if not np.isfinite(worst):
                break
            voltage = newton_step(matrix, drawn.power, grid.kind, voltage)
    return None


# Without learning ----------------------------------------------------------------


def laplacian(
    size: int, ends: np.ndarray, weight: np.ndarray, ratio: np.ndarray | float = 1.0
) -> csr_array:
    """The matrix [n, n] of weighted differences along branches, where values at their
    first ends are divided by a ratio.
    """
    f, t = ends
    rows, columns = np.r_[f, t, f, t], np.r_[f, t, t, f]
    values = np.r_[weight / ratio**2, weight, -weight / ratio, -weight / ratio]
    return coo_array((values, (rows, columns)), (size, size)).tocsr()


def solve_grounded(
    matrix: csr_array, free: np.ndarray, right: np.ndarray
) -> np.ndarray:
    """The solution [n] of the rows of free buses, which is zero at all others."""
    found = np.zeros(len(free))
    found[free] = spsolve(matrix[free][:, free].tocsc(), right[free])
    return found


def direct_current(grid: Grid, drawn: Drawn) -> np.ndarray:
    """The angles [n] in radians of DC power flow, as MATPOWER's `makeBdc`.

    It has no losses. Those that are scheduled are added to the loads, or they would all
    flow into the slack.
    """
    ends, ratio = grid.ends[:, drawn.kept], grid.ratio[drawn.kept]
    weight = 1 / (grid.impedance[drawn.kept].imag * abs(ratio))
    power = drawn.power.real - grid.shunt.real
    power -= power.sum() * abs(grid.demand.real) / abs(grid.demand.real).sum()
    np.add.at(power, ends[0], weight * np.angle(ratio))
    np.add.at(power, ends[1], -weight * np.angle(ratio))
    matrix = laplacian(len(grid.kind), ends, weight)
    return solve_grounded(matrix, grid.kind != SLACK, power)


def interpolated(grid: Grid, drawn: Drawn) -> np.ndarray:
    """Magnitudes [n] that are means of their neighbours', weighted by admittance, and
    as set at generators. Without currents, it is the solution.
    """
    weight, ratio = 1 / abs(grid.impedance[drawn.kept]), abs(grid.ratio[drawn.kept])
    matrix = laplacian(len(grid.kind), grid.ends[:, drawn.kept], weight, ratio)
    free = grid.kind == PQ
    known = np.where(free, 0, drawn.set_point)
    return known + solve_grounded(matrix, free, -(matrix @ known))


def unit_response(grid: Grid, drawn: Drawn) -> tuple[np.ndarray, np.ndarray]:
    """The angles [n] in radians, and the magnitudes [n], that a unit of active power,
    and of reactive power, at each bus would add, by branches' admittances alone.
    """
    weight, ratio = 1 / abs(grid.impedance[drawn.kept]), abs(grid.ratio[drawn.kept])
    ends, one = grid.ends[:, drawn.kept], np.ones(len(grid.kind))
    active = laplacian(len(one), ends, weight / ratio)
    reactive = laplacian(len(one), ends, weight, ratio)
    turned = solve_grounded(active, grid.kind != SLACK, one)
    return turned, solve_grounded(reactive, grid.kind == PQ, one)


# States --------------------------------------------------------------------------


def draw(
    grid: Grid, candidates: np.ndarray, rng: np.random.Generator
) -> tuple[Drawn, np.ndarray] | None:
    """A state and its voltages [n], None if it is to be dropped: random loads,
    generation and set-points, without one of the branches `candidates`.

    Generation covers the losses, too, so that the slack feeds in what it should.
    """
    factor, size = rng.uniform(*LOAD), len(grid.kind)
    demand = factor * grid.demand * np.exp(LOAD_SIGMA * rng.standard_normal(size))
    spread = GENERATION_SIGMA * rng.standard_normal(len(grid.generation))
    part, share = grid.generation * np.exp(spread), np.zeros(size)
    np.add.at(share, grid.generators, part / part.sum())
    losses = factor**2 * (grid.generation.sum() - grid.demand.real.sum())
    kept = np.ones(len(grid.impedance), bool)
    if len(candidates):
        kept[rng.choice(candidates)] = False
    set_point = grid.set_point + SET_POINT_SIGMA * rng.standard_normal(size)
    total = demand.real.sum() + losses
    matrix, slack = admittance(grid, kept), int(np.argmin(grid.kind))
    start = grid.voltage
    for _ in range(ROUNDS):
        drawn = Drawn(total * share - demand, set_point, kept)
        voltage = solve(grid, drawn, start)
        if voltage is None or abs(voltage).min() < LOWEST:
            return None
        start, fed = voltage, voltage[slack] * (matrix @ voltage)[slack].conj()
        more = float((fed - drawn.power[slack]).real)
        if abs(more) < BALANCE:
            break
        total += more
    return drawn, start


def relative(voltage: np.ndarray, start: np.ndarray, slack: int) -> np.ndarray:
    """Angles to the slack in degrees, by the branch next to those of `start` in
    radians, and magnitudes [n, 2].
    """
    turned = voltage * voltage[slack].conj() * np.exp(-1j * start)
    return np.stack([np.rad2deg(start + np.angle(turned)), abs(voltage)], axis=1)


def describe(grid: Grid, drawn: Drawn) -> dict[str, np.ndarray]:
    """What models read of a state, `x` [n, 17], and what is known without learning:
    `start` and `step` [n, 2], in degrees and per unit.

    What is missing in the balance of power at a bus is given twice: as the
    voltage that it would lead to at this bus alone, and if it were missing everywhere,
    of which a weighted mean over buses is about the correction.
    """
    matrix, slack = admittance(grid, drawn.kept), int(np.argmin(grid.kind))
    angle, magnitude = direct_current(grid, drawn), interpolated(grid, drawn)
    start = magnitude * np.exp(1j * angle)
    step = newton_step(matrix, drawn.power, grid.kind, start)
    miss = mismatch(matrix, drawn.power, grid.kind, start)
    strength = np.zeros(len(grid.kind))
    for end in grid.ends[:, drawn.kept]:
        np.add.at(strength, end, 1 / abs(grid.impedance[drawn.kept]))
    turned, raised = unit_response(grid, drawn)
    columns = [grid.kind == kind for kind in (SLACK, PV, PQ)]
    columns += [np.arcsinh(part(drawn.power)) for part in (np.real, np.imag)]
    columns += [np.arcsinh(part(grid.shunt)) for part in (np.real, np.imag)]
    columns += [np.where(grid.kind == PQ, 0, 10 * (drawn.set_point - 1))]
    columns += [(np.log(strength) - 5) / 2, angle, 10 * (magnitude - 1)]
    columns += [np.log(x.clip(min=1e-4)) / 2 for x in (turned, raised)]
    columns += [0.1 * turned * miss.real, raised * miss.imag]
    columns += [np.arcsinh(50 * part(miss) / strength) for part in (np.real, np.imag)]
    return {
        "x": np.stack(columns, axis=1),
        "start": np.stack([np.rad2deg(angle), magnitude], axis=1),
        "step": relative(step, angle, slack),
    }


def edges(grid: Grid) -> tuple[np.ndarray, np.ndarray]:
    """Both directions of all branches [2, 2b], and their features [2b, 8]: of the
    series admittance its logarithm, and its conductance and susceptance as shares;
    charging; logarithm of the tap ratio, phase shift, whether there is a transformer,
    and its direction. Where these have one, they change sign with the direction.
    """
    series = 1 / grid.impedance
    columns = [(np.log(abs(series)) - 4) / 2, series.real / abs(series)]
    columns += [series.imag / abs(series), np.arcsinh(grid.charging)]
    signed = [10 * np.log(abs(grid.ratio)), np.angle(grid.ratio)]
    columns += [*signed, grid.transformer, grid.transformer]
    forth = np.stack(columns, axis=1)
    back = forth * [1, 1, 1, 1, -1, -1, 1, -1]
    both = np.concatenate([grid.ends, grid.ends[::-1]], axis=1)
    return both, np.concatenate([forth, back])


def draw_states(
    grid: Grid, number: int, rng: np.random.Generator, path: Path
) -> tuple[list[tuple[Drawn, np.ndarray]], int]:
    """So many states with their voltages, and how many were drawn without solution."""
    candidates = removable(grid)
    states: list[tuple[Drawn, np.ndarray]] = []
    with tqdm(total=number, desc=path.stem, disable=None, leave=False) as bar:
        for tries in range(1, TRIES * number + 1):
            if (found := draw(grid, candidates, rng)) is None:
                continue
            states.append(found)
            bar.update()
            if len(states) == number:
                return states, tries - number
    raise ValueError(
        f"{path}: Newton's method solves only {len(states)} of {TRIES * number} "
        "states. Check that its operating point is a solution, or leave it out"
    )


class PowerStates(Dataset):
    """Solved states of grids, consecutive ones of one grid; they are made once, and
    kept in a folder.

    Args:
        folder: For processed states, made if need be.
        grids: Files of MATPOWER, `.m` or `.npz`.
        num_states: Of each grid, or of each part.
        seed: Of what is drawn. States are a function of it, of the file and of the
            other arguments.
        pre_transform: Applied once to the graph of each grid, with all its branches.
        num_parts: If given, each grid is replaced by so many parts of 100 to 1,000
            buses, see `cut`.

    Graphs have `x` [V, 17] and `edge_attr` [E, 8] (see `describe` and `edges`), the
    angles in degrees and magnitudes `y` [V, 2], `start` [V, 2], DC power flow and
    interpolated set-points, `step` [V, 2], a step of Newton's method from there, and
    `kind` [V], slack, PV or PQ. The branch that is out is not among the edges.

    Raises:
        ValueError: If a file is no grid, or too few of its states have a solution.
    """

    def __init__(
        self,
        folder: Path,
        grids: Sequence[Path],
        num_states: int,
        seed: int = 0,
        pre_transform: Callable | None = None,
        num_parts: int | None = None,
    ) -> None:
        super().__init__()
        self.num_states = num_states
        self.graphs: list[Data] = []
        self.states: list[dict[str, Tensor]] = []
        #: How many states of each grid were dropped, parts that were refused aside.
        self.dropped: dict[str, int] = {}
        for path in grids:
            content = path.read_bytes() + repr((pre_transform, num_parts)).encode()
            digest = sha256(content).hexdigest()[:10]
            name = f"{path.stem}-{digest}-{num_states}-seed{seed}-v{VERSION}.pt"
            out = folder / "power-states" / name
            if not out.exists():
                rng = np.random.default_rng([seed, int(digest, 16)])
                made = make_all(path, num_parts, num_states, rng, pre_transform)
                out.parent.mkdir(parents=True, exist_ok=True)
                part = out.with_suffix(f".{os.getpid()}.part")  # never half a file
                torch.save(made, part)
                part.rename(out)
            found = torch.load(out, weights_only=True)
            self.graphs += [Data.from_dict(graph) for graph, _, _ in found]
            self.states += [states for _, states, _ in found]
            self.dropped[path.stem] = sum(dropped for _, _, dropped in found)

    def len(self) -> int:
        """The number of states of all grids and parts."""
        return len(self.graphs) * self.num_states

    def get(self, idx: int) -> Data:
        """A state."""
        number, state = divmod(idx, self.num_states)
        data = copy(self.graphs[number])
        found = {name: rows[state] for name, rows in self.states[number].items()}
        kept = found.pop("kept").repeat(2)
        data.edge_index = data.edge_index[:, kept]
        data.edge_attr = data.edge_attr[kept]
        return data.update(found)


Made = tuple[dict[str, Tensor], dict[str, Tensor], int]


def make_all(
    path: Path,
    num_parts: int | None,
    num_states: int,
    rng: np.random.Generator,
    pre_transform: Callable | None,
) -> list[Made]:
    """What `make_states` makes of a grid, or of its parts. Parts that are not balanced,
    or of which Newton's method does not solve enough states, are drawn again.
    """
    grid = read_grid(path)
    if num_parts is None:
        found = draw_states(grid, num_states, rng, path)
        return [make_states(grid, *found, pre_transform)]
    made: list[Made] = []
    with tqdm(total=num_parts, desc=f"parts of {path.stem}", disable=None) as bar:
        for _ in range(100 * num_parts):
            if (part := cut(grid, rng)) is None:
                continue
            try:
                found = draw_states(part, num_states, rng, path)
            except ValueError:  # too few have a solution
                continue
            made.append(make_states(part, *found, pre_transform))
            bar.update()
            if len(made) == num_parts:
                return made
    raise ValueError(
        f"{path}: only {len(made)} of {100 * num_parts} parts have states with a "
        "solution. Check that its operating point is a solution, or leave it out"
    )


def make_states(
    grid: Grid,
    drawn: list[tuple[Drawn, np.ndarray]],
    dropped: int,
    pre_transform: Callable | None,
) -> Made:
    """The graph of a grid, its states, and how many were dropped."""
    edge_index, edge_attr = edges(grid)
    graph = Data(
        edge_index=torch.from_numpy(edge_index).contiguous(),
        edge_attr=torch.from_numpy(edge_attr).float(),
        kind=torch.from_numpy(grid.kind),
        num_nodes=len(grid.kind),
    )
    if pre_transform is not None:
        graph = pre_transform(graph)
    slack, states = int(np.argmin(grid.kind)), []
    for state, voltage in drawn:
        known = describe(grid, state)
        y = relative(voltage, np.deg2rad(known["start"][:, 0]), slack)
        states.append(known | {"y": y, "kept": state.kept})
    stacked = {
        name: torch.from_numpy(np.stack([state[name] for state in states]))
        for name in states[0]
    }
    stacked = {x: y.float() if y.is_floating_point() else y for x, y in stacked.items()}
    return graph.to_dict(), stacked, dropped
