r"""Compares models that solve partial differential equations on unstructured meshes.

The domains are random, planar and have up to three holes. Coefficients, loads, and
values on a random part of the boundary are random, too; the rest of the boundary is
natural. Targets are solutions by finite elements, linear on triangles. Trains on meshes
of 500 to 2,000 nodes, and tests on others of these sizes and on meshes of 20,000, twice
ten (``large``, ``fresh``)::

    python benchmarks/comparisons/meshes.py                          # hours
    python benchmarks/comparisons/meshes.py --problem elasticity
    python benchmarks/comparisons/meshes.py --norm graph_batch_norm --out runs/norms
    python benchmarks/comparisons/meshes.py --resume --arms chimera gps

Problems, where k varies smoothly, or is that of two materials:

* ``poisson``: - div(k grad u) = f
* ``convection-diffusion``: - div(k grad u) + v · grad u = f, with div v = 0
* ``elasticity``: displacements in plane stress, where k is Young's modulus

Arms, with the option that each searches (see ``protocol.py``):

* ``chimera``: three blocks of GatedGCN, ChimeraConv, whose ranges grow with the mesh,
  and a feed-forward network, or six, of which every third has ChimeraConv
* ``gated-gcn``: blocks of GatedGCN and a feed-forward network; depth
* ``gps``: three blocks of GatedGCN, attention and a feed-forward network; encodings
* ``gat``: residual blocks of GAT; depth
* ``mlp``: a network of each node alone; depth
* ``meshgraphnets``: processors of MeshGraphNets (arXiv 2010.03409); depth
* ``graph-unet``: PyG's GraphUNet (arXiv 1905.05178), without features of edges; depth

Beside them are the mean of the given values; their harmonic extension, the solution for
constant k without load or velocity; and the solution of a linear system along edges,
weighted by k. ``unexplained`` is the share of the variance at nodes without a given
value that is not explained, averaged over graphs.
"""

import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from common import Task, main, make_parser
from protocol import (
    SHARED_ARMS,
    WALK,
    DrawnGraphs,
    Study,
    build_layer,
    reads,
    without_learning,
)
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import spsolve
from scipy.spatial import Delaunay, cKDTree
from torch import Tensor
from torch.nn import LayerNorm, Linear, Module, ReLU, Sequential
from torch_geometric.data import Batch, Data, InMemoryDataset
from torch_geometric.nn import GraphUNet
from torch_geometric.utils import scatter
from torchmetrics import MeanMetric
from tqdm import trange

from pyg_chimera import ops
from pyg_chimera.datasets._common import save_atomically
from pyg_chimera.nn import GraphModel
from pyg_chimera.transforms import AddEliminationOrder

ARMS = SHARED_ARMS | {
    "meshgraphnets": ("depth", (8, 15)),
    "graph-unet": ("depth", (3, 5)),
}
#: The numbers of unknowns of a node, and of its features and those of an edge.
PROBLEMS = {
    "poisson": (1, 5, 4),
    "convection-diffusion": (1, 7, 5),
    "elasticity": (2, 8, 4),
}
#: About the size of the meshes to train on: ranges grow with larger ones.
REACH_NODES = 1000
#: Of the graphs: to be raised when they change, so that files of others are not read.
VERSION = 3
#: `train` and so on are numbers of meshes, with `nodes` from and to; `large` of
#: `large_nodes` are drawn twice. An epoch is `length` meshes, drawn from `train`.
PRESETS: dict[str, dict[str, Any]] = {
    "default": dict(
        nodes=(500, 2000), large_nodes=20_000, train=500, held_out=50, large=10,
        length=200, batch_size=4, norm="layer_norm",
    ),
    "smoke": dict(
        nodes=(60, 120), large_nodes=300, train=4, held_out=2, large=1, length=4,
        batch_size=2, norm="layer_norm",
    ),
}  # fmt: skip

# Meshes --------------------------------------------------------------------------

#: Half the side of a square that has all domains.
HALF = 1.6
#: Random points in it for each node, and steps of Lloyd's algorithm.
CANDIDATES, LLOYD_STEPS = 100, 10
#: The area of an equilateral triangle's share of nodes, for sides of length one.
CELL = 3**0.5 / 2
#: Triangles whose height is a smaller part of the longest side are left out.
THIN = 0.04


class Field:
    """A smooth random function of the plane, of variance one: a sum of waves.

    Its values at points a correlation length apart are correlated by exp(-1/2).
    """

    def __init__(self, rng: np.random.Generator, length: float) -> None:
        self.waves = rng.normal(0, 1 / length, (64, 2))
        self.phases = rng.uniform(0, 2 * np.pi, 64)

    def __call__(self, points: np.ndarray) -> np.ndarray:
        return np.cos(points @ self.waves.T + self.phases).sum(1) * 32**-0.5

    def curl(self, points: np.ndarray) -> np.ndarray:
        """A field of vectors without divergence, [P, 2]."""
        slopes = -np.sin(points @ self.waves.T + self.phases) @ self.waves * 32**-0.5
        return np.stack([slopes[:, 1], -slopes[:, 0]], axis=1)


class Curve(NamedTuple):
    """A closed curve whose radius is a series of cosines of the angle."""

    centre: np.ndarray
    radius: float
    amplitudes: np.ndarray
    phases: np.ndarray

    def at(self, angles: np.ndarray) -> np.ndarray:
        """The radius by angle."""
        orders = np.arange(2, 2 + len(self.phases))
        waves = np.cos(orders * angles[:, None] + self.phases)
        return self.radius * (1 + waves @ self.amplitudes)

    def surrounds(self, points: np.ndarray) -> np.ndarray:
        """Which points are inside, [P]."""
        x, y = (points - self.centre).T
        return np.hypot(x, y) < self.at(np.arctan2(y, x))

    def trace(self, number: int = 2000) -> np.ndarray:
        """Points along it, the first one again at the end, [number + 1, 2]."""
        angles = np.linspace(0, 2 * np.pi, number + 1)
        way = np.stack([np.cos(angles), np.sin(angles)], axis=1)
        return self.centre + self.at(angles)[:, None] * way


class Domain(NamedTuple):
    """What is inside of a curve and outside of holes."""

    outer: Curve
    holes: list[Curve]

    def covers(self, points: np.ndarray) -> np.ndarray:
        """Which points it has, [P]."""
        covered = self.outer.surrounds(points)
        for hole in self.holes:
            covered &= ~hole.surrounds(points)
        return covered


class Mesh(NamedTuple):
    """Triangles between points, counterclockwise."""

    points: np.ndarray  #: [V, 2]
    triangles: np.ndarray  #: [T, 3]

    def sides(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The x and y of those opposite to the corners, [T, 3] each, and areas, [T]."""
        corners = self.points[self.triangles]
        x, y = np.moveaxis(np.roll(corners, 1, 1) - np.roll(corners, -1, 1), 2, 0)
        return x, y, (x[:, 0] * y[:, 1] - x[:, 1] * y[:, 0]) / 2

    def gradients(self) -> np.ndarray:
        """Those of the functions that are one at a corner and zero at the two others,
        [T, 3, 2].
        """
        x, y, areas = self.sides()
        return np.stack([-y, x], axis=2) / (2 * areas[:, None, None])

    def edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Each edge once, [E, 2], and how many triangles it has, [E]."""
        sides = self.triangles[:, [0, 1, 1, 2, 2, 0]].reshape(-1, 2)
        return np.unique(np.sort(sides, axis=1), axis=0, return_counts=True)

    def on_boundary(self) -> np.ndarray:
        """Which nodes are, [V]."""
        edges, triangles = self.edges()
        return np.isin(np.arange(len(self.points)), edges[triangles == 1])

    def nodal_areas(self) -> np.ndarray:
        """A third of the triangles around each node, [V]."""
        share = np.repeat(self.sides()[2] / 3, 3)
        return np.bincount(self.triangles.ravel(), share, len(self.points))


def draw_domain(rng: np.random.Generator) -> Domain:
    """A domain of about the size of the unit disc, with up to three holes."""

    def draw_curve(centre: np.ndarray, radius: float) -> Curve:
        amplitudes = 0.4 * rng.normal(size=5) / np.arange(2, 7)
        amplitudes *= min(1, 0.5 / np.abs(amplitudes).sum())
        return Curve(centre, radius, amplitudes, rng.uniform(0, 2 * np.pi, 5))

    domain, wanted = Domain(draw_curve(np.zeros(2), 1.0), []), rng.integers(4)
    for _ in range(100):
        if len(domain.holes) == wanted:
            break
        hole = draw_curve(rng.uniform(-1, 1, 2), rng.uniform(0.08, 0.25))
        others = [x.trace(200) for x in (domain.outer, *domain.holes)]
        distance = np.hypot(*(np.concatenate(others) - hole.centre).T).min()
        if domain.covers(hole.centre[None])[0] and distance > 1.5 * hole.radius + 0.2:
            domain.holes.append(hole)
    return domain


def draw_mesh(rng: np.random.Generator, domain: Domain, nodes: int) -> Mesh:
    """A mesh of about so many nodes, finer where a random function is small."""
    field = Field(rng, 0.7)

    def size(points: np.ndarray) -> np.ndarray:
        return np.exp(0.35 * np.clip(field(points), -2, 2))

    box = rng.uniform(-HALF, HALF, (CANDIDATES * nodes, 2))
    inside = box[domain.covers(box)]
    density = size(inside) ** -2.0
    # With sides of length h, A / h^2 nodes, of which B / h are on the boundary.
    area = density.sum() / len(box) * (2 * HALF) ** 2 / CELL
    lines = [x.trace() for x in (domain.outer, *domain.holes)]
    steps = [np.hypot(*np.diff(x, axis=0).T) / size(x[:-1]) for x in lines]
    length = sum(x.sum() for x in steps) / 2
    h = 2 * area / (np.sqrt(length**2 + 4 * area * nodes) - length)
    ends = []
    for line, step in zip(lines, steps, strict=True):
        way = np.concatenate([[0.0], step.cumsum()])
        stops = np.linspace(0, way[-1], max(6, round(way[-1] / h)), endpoint=False)
        ends.append(np.stack([np.interp(stops, way, x) for x in line.T], axis=1))
    rim = np.concatenate(ends)
    share = density / density.sum()
    points = rng.choice(inside, max(1, nodes - len(rim)), False, share)
    weight = density**2  # Lloyd's algorithm leaves the square root of a density
    for _ in range(LLOYD_STEPS):
        _, nearest = cKDTree(np.concatenate([points, rim])).query(inside)
        columns = (weight, *(weight * x for x in inside.T))
        sums = [np.bincount(nearest, x, len(points)) for x in columns]
        total, *sums = (x[: len(points), None] for x in sums)
        with np.errstate(invalid="ignore"):
            points = np.where(total > 0, np.concatenate(sums, 1) / total, points)
    return triangulate(np.concatenate([points, rim]), domain)


def triangulate(points: np.ndarray, domain: Domain) -> Mesh:
    """The Delaunay triangulation in a domain, of what is connected to most of it."""
    triangles = Delaunay(points).simplices
    x, y, areas = Mesh(points, triangles).sides()
    thick = 2 * areas > THIN * (x**2 + y**2).max(axis=1)
    triangles = triangles[thick & domain.covers(points[triangles].mean(axis=1))]
    ones = np.ones(len(triangles) * 2)
    ends = triangles[:, [0, 1]].ravel(), triangles[:, [1, 2]].ravel()
    graph = coo_array((ones, ends), 2 * (len(points),))
    _, part = connected_components(graph, directed=False)
    triangles = triangles[part[triangles[:, 0]] == np.bincount(part).argmax()]
    kept, triangles = np.unique(triangles, return_inverse=True)
    return Mesh(points[kept], triangles.reshape(-1, 3))


# Finite elements -----------------------------------------------------------------


def assemble(parts: np.ndarray, unknowns: np.ndarray) -> csr_array:
    """The sum of the matrices of triangles, [T, D, D], at their unknowns, [T, D]."""
    wide = unknowns.shape[1]
    places = np.repeat(unknowns, wide, axis=1), np.tile(unknowns, wide)
    ends = tuple(x.ravel() for x in places)
    return coo_array((parts.ravel(), ends), 2 * (unknowns.max() + 1,)).tocsr()


def scalar_matrix(
    mesh: Mesh, k: np.ndarray, velocity: np.ndarray | None = None
) -> csr_array:
    """That of - div(k grad u) + v · grad u, with k and v of triangles, [T], [T, 2]."""
    slopes, areas = mesh.gradients(), mesh.sides()[2][:, None, None]
    parts = k[:, None, None] * areas * (slopes @ slopes.swapaxes(1, 2))
    if velocity is not None:
        parts += areas / 3 * (slopes @ velocity[:, :, None]).swapaxes(1, 2)
    return assemble(parts, mesh.triangles)


def elastic_matrix(mesh: Mesh, k: np.ndarray, ratio: float) -> csr_array:
    """That of plane stress, with Young's modulus of triangles, [T], and Poisson's
    ratio. The unknowns of node i are 2 i and 2 i + 1.
    """
    slopes, areas = mesh.gradients(), mesh.sides()[2]
    strain = np.zeros((len(areas), 3, 3, 2))  # triangles, (xx, yy, xy), corners, (x, y)
    strain[:, 0, :, 0] = strain[:, 2, :, 1] = slopes[:, :, 0]
    strain[:, 1, :, 1] = strain[:, 2, :, 0] = slopes[:, :, 1]
    strain = strain.reshape(-1, 3, 6)
    stress = np.array([[1, ratio, 0], [ratio, 1, 0], [0, 0, (1 - ratio) / 2]])
    parts = strain.swapaxes(1, 2) @ (stress / (1 - ratio**2)) @ strain
    unknowns = 2 * np.repeat(mesh.triangles, 2, axis=1) + np.tile([0, 1], 3)
    return assemble((k * areas)[:, None, None] * parts, unknowns)


def solve(
    matrix: csr_array, load: np.ndarray, fixed: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """The solution with `values`, [V, C], at nodes that are `fixed`, [V]."""
    fixed = np.repeat(fixed, values.shape[1])
    solution = values.ravel() * fixed
    right = (load.ravel() - matrix @ solution)[~fixed]
    solution[~fixed] = spsolve(matrix[~fixed][:, ~fixed].tocsc(), right)
    return solution.reshape(values.shape)


# Graphs --------------------------------------------------------------------------


class Case(NamedTuple):
    """What is given of a problem: at nodes, unless stated otherwise."""

    mesh: Mesh
    log_k: np.ndarray  #: [V]
    load: np.ndarray  #: [V, C]
    fixed: np.ndarray  #: where values are given, bool [V]
    values: np.ndarray  #: [V, C]
    velocity: np.ndarray | None = None  #: [V, 2], for convection and diffusion
    ratio: float | None = None  #: Poisson's, for elasticity

    def solve(self) -> np.ndarray:
        """The solution, [V, C]."""
        three = self.mesh.triangles
        k = np.exp(self.log_k[three].mean(axis=1))
        if self.ratio is not None:
            matrix = elastic_matrix(self.mesh, k, self.ratio)
        elif self.velocity is not None:
            matrix = scalar_matrix(self.mesh, k, self.velocity[three].mean(axis=1))
        else:
            matrix = scalar_matrix(self.mesh, k)
        load = self.load * self.mesh.nodal_areas()[:, None]
        return solve(matrix, load, self.fixed, self.values)


def draw_case(problem: str, nodes: int, rng: np.random.Generator) -> Case:
    """A problem on a mesh of its own."""
    mesh = draw_mesh(rng, draw_domain(rng), nodes)

    def draw() -> np.ndarray:
        fields = [Field(rng, 0.5)(mesh.points) for _ in range(PROBLEMS[problem][0])]
        return np.stack(fields, axis=1)

    flows = problem == "convection-diffusion"
    log_k = (0.5 if flows else 1.0) * Field(rng, 0.4)(mesh.points)
    if rng.random() < 0.5:  # two materials
        log_k = np.abs(log_k).mean() * np.sign(log_k)
    boundary = mesh.on_boundary()
    order = Field(rng, 0.7)(mesh.points)
    fixed = boundary & (order >= np.quantile(order[boundary], rng.uniform(0.2, 0.8)))
    values, load = draw(), np.exp(rng.normal(0, 0.5)) * draw()
    given = Case(mesh, log_k, load, fixed, values)
    if flows:
        velocity = Field(rng, 0.5).curl(mesh.points)
        return given._replace(velocity=velocity * rng.uniform(0, 4))
    if problem == "elasticity":
        return given._replace(ratio=rng.uniform(0.1, 0.4))
    return given


def get_scale(case: Case) -> tuple[np.ndarray, float, float]:
    """About where solutions are, [C], and of which size they are, by what is given: the
    mean and the deviation of values, and by how much a disc of this area rises if the
    load is everywhere its root mean square; with the unit of loads, A / 4πκ.
    """
    values = case.values[case.fixed]
    unit = case.mesh.sides()[2].sum() / (4 * np.pi * np.exp(case.log_k.mean()))
    rise = unit * np.sqrt((case.load**2).sum(axis=1).mean())
    return values.mean(axis=0), np.sqrt(values.var(axis=0).sum()) + rise, unit


def get_inputs(case: Case) -> Data:
    """What models are given.

    Without a unit are, by the area A, the geometric mean κ of k, and the mean u' and
    the scale s of :func:`get_scale`,

    * :obj:`x`: the load f of the cell a of a node, as n a f / 4πκs for n nodes;
      log(k / κ); whether u is given; (u - u') / s where it is; whether on the boundary;
      the velocity v as v √A / 10κ; Poisson's ratio;
    * :obj:`edge_attr`: the direction; log(length / √c), c the geometric mean of the
      cells of its ends; log(k / κ) halfway; the velocity along the edge times its
      length, divided by k;
    * :obj:`free`: the nodes where u is not given.

    Cells are relative to their mean A / n, and lengths to cells, as stiffness is in two
    dimensions: it is that of any mesh of the same shape, whatever its size. Meshes can
    be drawn by :obj:`pos` and :obj:`face`, which no model reads.
    """
    mesh, (centre, scale, unit) = case.mesh, get_scale(case)
    cells = mesh.nodal_areas()[:, None]
    area, fixed = cells.sum(), case.fixed[:, None]
    log_k = (case.log_k - case.log_k.mean())[:, None]
    load = case.load * unit / scale
    columns = [load * cells * len(cells) / area, log_k, fixed]
    columns += [(case.values - centre) / scale * fixed, mesh.on_boundary()[:, None]]
    ends = mesh.edges()[0]
    ends = np.concatenate([ends, ends[:, ::-1]])
    way = mesh.points[ends[:, 1]] - mesh.points[ends[:, 0]]
    length = np.hypot(*way.T)[:, None]
    halfway = log_k[ends].mean(axis=1)
    relative = np.log(length) - np.log(cells)[ends].mean(axis=1) / 2
    features = [way / length, relative, halfway]
    if case.velocity is not None:
        velocity = case.velocity / np.exp(case.log_k.mean())
        columns.append(velocity * np.sqrt(area) / 10)
        along = (velocity[ends].mean(axis=1) * way).sum(axis=1, keepdims=True)
        features.append(along / np.exp(halfway))
    if case.ratio is not None:
        columns.append(np.full_like(cells, case.ratio))
    x, edge_attr = (np.concatenate(each, axis=1) for each in (columns, features))
    return Data(
        x=torch.from_numpy(x).float(),
        edge_index=torch.from_numpy(ends.T).long().contiguous(),
        edge_attr=torch.from_numpy(edge_attr).float(),
        free=torch.from_numpy(~case.fixed),
        pos=torch.from_numpy(mesh.points).float(),
        face=torch.from_numpy(mesh.triangles.T).long().contiguous(),
    )


def draw_graph(problem: str, nodes: int, seed: list[int]) -> Data:
    """A problem, with the solution as :obj:`y`: (u - u') / s, see `get_scale`."""
    case = draw_case(problem, nodes, np.random.default_rng(seed))
    data, (centre, scale, _) = get_inputs(case), get_scale(case)
    data.y = torch.from_numpy((case.solve() - centre) / scale).float()
    return data


def add_walks(data: Data) -> Data:
    """Sets what PyG's AddRandomWalkPE does: how likely a random walk returns. Products
    of sparse matrices, up to half of the steps, take a hundredth of its time.
    """
    source, target = data.edge_index.numpy()
    shape = 2 * (data.num_nodes,)
    walk = coo_array((1 / np.bincount(source)[source], (source, target)), shape).tocsr()
    powers = [walk]
    while len(powers) < WALK // 2:
        powers.append(powers[-1] @ walk)
    pairs = [((n - 1) // 2, n - 2 - (n - 1) // 2) for n in range(2, WALK + 1)]
    found = [(powers[a] * powers[b].T).sum(axis=1) for a, b in pairs]
    data.random_walk_pe = torch.from_numpy(np.stack([walk.diagonal(), *found], 1))
    data.random_walk_pe = data.random_walk_pe.float()
    return data


class Meshes(InMemoryDataset):
    """So many graphs of a problem, with numbers of nodes from and to, made once."""

    def __init__(
        self, root: Path, problem: str, number: int, nodes: tuple[int, int], seed: int
    ) -> None:
        self.problem, self.number, self.nodes, self.seed = problem, number, nodes, seed
        super().__init__(str(root))
        self.load(self.processed_paths[0])

    @property
    def processed_file_names(self) -> list[str]:
        nodes = "-".join(map(str, self.nodes))
        name = f"{self.problem}-{self.number}-of-{nodes}-seed{self.seed}-v{VERSION}.pt"
        return [name]

    def process(self) -> None:
        graphs, order = [], AddEliminationOrder()
        for number in trange(self.number, desc=self.problem, disable=None):
            seed = [self.seed, number]
            nodes = np.random.default_rng(seed).integers(*self.nodes, endpoint=True)
            graphs.append(add_walks(order(draw_graph(self.problem, int(nodes), seed))))
        save_atomically(graphs, self.processed_paths[0])


def get_datasets(args: Namespace) -> dict[str, Any]:
    """Meshes to train on, to select by and to test on: as many nodes, and more."""
    same = args.held_out, args.nodes
    large = args.large, (args.large_nodes, args.large_nodes)
    # Choices were made by looking at `large`; `fresh` was drawn afterwards.
    kinds = {
        "train": (args.train, args.nodes, 0),
        "val": (*same, 1),
        "test": (*same, 2),
        "large": (*large, 3),
        "fresh": (*large, 10),
    }
    found: dict[str, Any] = {
        name: Meshes(args.processed_root, args.problem, number, nodes, seed)
        for name, (number, nodes, seed) in kinds.items()
    }
    return found | {"train": DrawnGraphs(found["train"], args.length)}


def unexplained(out: Tensor, data: Data) -> Tensor:
    """The share of the variance at free nodes that is not explained, by graph."""
    batch = (
        data.batch if isinstance(data, Batch) else data.edge_index.new_zeros(len(out))
    )
    number, y = batch[data.free], data.y[data.free]
    spread = y - scatter(y, number, reduce="mean")[number]
    error, variance = (
        scatter(x.square().sum(dim=1), number) for x in (out[data.free] - y, spread)
    )
    return error / variance


def get_task() -> Task:
    """The unexplained share of the variance, a mean over graphs."""
    return Task(
        lambda out, batch: unexplained(out, batch).mean(),
        {"unexplained": MeanMetric()},
        lambda out, batch: {"unexplained": (unexplained(out, batch),)},
        mode="min",
    )


# Without learning ----------------------------------------------------------------


def harmonic_extension(data: Data) -> Tensor:
    """The solution, of each component, for constant k without load or velocity."""
    mesh = Mesh(data.pos.double().numpy(), data.face.t().numpy())
    matrix = scalar_matrix(mesh, np.ones(len(mesh.triangles)))
    wide, fixed = data.y.size(1), ~data.free.numpy()
    given = data.x[:, wide + 2 : 2 * wide + 2].double().numpy()
    found = [solve(matrix, 0 * x, fixed, x[:, None]) for x in given.T]
    return torch.from_numpy(np.concatenate(found, axis=1)).float()


def edge_system(data: Data) -> Tensor:
    """The solution, of each component, of one linear system along edges: means of
    neighbours, weighted by k halfway, and loads. Exact for diffusion if triangles are
    equilateral.
    """
    wide, target = data.y.size(1), data.edge_index[1]
    x, free = data.x.double(), data.free[:, None]
    weight = data.edge_attr[:, 3].double().exp() / np.sqrt(3)
    total = scatter(weight, target, dim_size=len(x))
    load = x[:, :wide] * 4 * np.pi / len(x) / total[:, None]
    right = torch.where(free, load, x[:, wide + 2 : 2 * wide + 2])
    share = weight / total[target] * data.free[target]
    return ops.solve(data.edge_index, share, right).float()


UNTRAINED: dict[str, Callable[[Data], Tensor]] = {
    "mean": lambda data: torch.zeros_like(data.y),
    "harmonic": harmonic_extension,
    "edge-system": edge_system,
}


# Models --------------------------------------------------------------------------


class Processor(Module):
    """A step of MeshGraphNets: networks of each edge and its ends, then of each node
    and the sum of its edges; both are residual.
    """

    def __init__(self, channels: int, hidden: int) -> None:
        super().__init__()

        def network(inputs: int) -> Module:
            first, second = Linear(inputs, hidden), Linear(hidden, hidden)
            last = Linear(hidden, channels), LayerNorm(channels)
            return Sequential(first, ReLU(), second, ReLU(), *last)

        self.edges, self.nodes = network(3 * channels), network(2 * channels)

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor
    ) -> tuple[Tensor, Tensor]:
        source, target = edge_index
        ends = torch.cat([edge_attr, x[source], x[target]], dim=1)
        edge_attr = edge_attr + self.edges(ends)
        around = scatter(edge_attr, target, dim_size=x.size(0))
        return x + self.nodes(torch.cat([x, around], dim=1)), edge_attr


def build_model(
    problem: str, norm: str, arm: str, option: Any, channels: int, hidden: int
) -> GraphModel:
    """A model of a width, with feed-forward networks of another."""
    out_channels, in_channels, edge_dim = PROBLEMS[problem]
    depth = option if ARMS[arm][0] == "depth" else 3

    def layer(place: int) -> Module:
        if arm == "meshgraphnets":
            return Processor(channels, hidden)
        if arm == "graph-unet":
            return GraphUNet(channels, hidden, channels, option)
        return build_layer(
            norm, arm, option, place, channels, hidden, reach_nodes=REACH_NODES
        )

    return GraphModel(
        in_channels,
        channels,
        out_channels,
        layer,
        1 if arm == "graph-unet" else depth,
        edge_dim=None if arm in ("mlp", "graph-unet") else edge_dim,
        head="node",
        norm=norm,
        **reads(arm, option, channels),
    )


# Runs ----------------------------------------------------------------------------


def get_study(problem: str) -> Study:
    """The comparison on a problem."""
    build = partial(build_model, problem)
    given = partial(
        without_learning,
        UNTRAINED,
        lambda x, data: {"unexplained": unexplained(x, data)},
    )
    return Study(ARMS, build, get_task, get_datasets, given)


def get_args(argv: list[str] | None = None) -> Namespace:
    """The command line, completed by a recipe."""
    parser = make_parser(__doc__, ["default"], root="")
    add = parser.add_argument_group("data").add_argument
    add("--problem", choices=PROBLEMS, default="poisson", help="default: poisson")
    root = Path("data", "meshes")
    add("--processed-root", type=Path, default=root, help=f"default: {root}")
    args = get_study("poisson").parse(parser, argv, PRESETS)
    args.out = args.out or Path("runs", "meshes", args.problem, args.preset)
    return args


if __name__ == "__main__":
    args = get_args()
    sys.exit(main(get_study(args.problem).run, args))
