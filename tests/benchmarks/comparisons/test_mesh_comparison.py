"""The meshes, finite elements and models of the comparison on them."""

import json
from functools import partial

import meshes as compared
import numpy as np
import pytest
import torch
from protocol import NORMS
from scipy.spatial import Delaunay
from torch_geometric.data import Batch, Data
from torch_geometric.transforms import AddRandomWalkPE
from torch_geometric.utils import contains_isolated_nodes, is_undirected

from pyg_chimera.nn import ChimeraConv

SCALARS = ("poisson", "convection-diffusion")


@pytest.fixture
def call(smoke, tmp_path):
    """Runs the comparison on few small meshes."""

    def run(args):
        return compared.get_study(args.problem).run(args)

    return partial(smoke, compared.get_args, run, "--processed-root", str(tmp_path))


def draw_case(problem, seed, nodes=300):
    return compared.draw_case(problem, nodes, np.random.default_rng(seed))


def square(steps):
    """A mesh of the unit square: a lattice whose inner points are moved."""
    line = np.linspace(0, 1, steps + 1)
    points = np.stack(np.meshgrid(line, line), axis=2).reshape(-1, 2)
    inner = ((points > 0) & (points < 1)).all(axis=1)[:, None]
    moved = np.random.default_rng(steps).uniform(-0.2, 0.2, points.shape) / steps
    points = points + moved * inner
    return compared.Mesh(points, Delaunay(points).simplices)


# Meshes --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_a_mesh_is_one_piece_of_its_domain(seed):
    rng = np.random.default_rng(seed)
    domain = compared.draw_domain(rng)
    mesh = compared.draw_mesh(rng, domain, 200 + 100 * seed)
    ends, triangles = mesh.edges()
    nodes = len(mesh.points)
    assert nodes == 200 + 100 * seed
    # By Euler's formula; pieces that touch at a point would have another boundary.
    assert nodes - len(ends) + len(mesh.triangles) == 1 - len(domain.holes)
    assert set(triangles) == {1, 2}
    assert (np.bincount(ends[triangles == 1].ravel())[mesh.on_boundary()] == 2).all()
    part = np.arange(nodes)
    while True:
        smaller = part.copy()
        np.minimum.at(smaller, ends, part[ends[:, ::-1]])
        if (smaller == part).all():
            break
        part = smaller
    assert (part == 0).all()
    area = mesh.sides()[2]
    assert area.min() > 0
    assert area.sum() == pytest.approx(mesh.nodal_areas().sum())
    random = np.random.default_rng(0).uniform(-1.6, 1.6, (40_000, 2))
    assert area.sum() == pytest.approx(domain.covers(random).mean() * 3.2**2, rel=0.05)


def test_domains_differ_in_their_holes():
    domains = [compared.draw_domain(np.random.default_rng(seed)) for seed in range(30)]
    assert {len(x.holes) for x in domains} == {0, 1, 2, 3}


def test_meshes_are_finer_in_places():
    area = draw_case("poisson", 0, 1000).mesh.sides()[2]
    assert np.quantile(area, 0.95) > 3 * np.quantile(area, 0.05)


# Finite elements -----------------------------------------------------------------


def wave_error(problem, steps):
    """Of a solution on the unit square that is known, the largest at a node."""
    mesh = square(steps)
    x, y = mesh.points.T
    sin, cos = np.sin(np.pi * mesh.points).T, np.cos(np.pi * mesh.points).T
    inside = mesh.points[mesh.triangles].mean(axis=1)
    cells = mesh.nodal_areas()[:, None]
    if problem == "elasticity":  # (sin sin, 0), all around given
        k, ratio = 3.0, 0.3
        load = [(3 - ratio) / 2 * sin[0] * sin[1], -(1 + ratio) / 2 * cos[0] * cos[1]]
        load = k / (1 - ratio**2) * np.pi**2 * np.stack(load, axis=1)
        matrix = compared.elastic_matrix(mesh, np.full(len(inside), k), ratio)
        u, fixed = np.stack([sin[0] * sin[1], 0 * x], axis=1), mesh.on_boundary()
    else:  # cos cos, given at one side; there is no flux through the others
        u, fixed = (cos[0] * cos[1])[:, None], x == 0
        slopes = -np.pi * np.stack([sin[0] * cos[1], cos[0] * sin[1]], axis=1)
        load = 2 * np.pi**2 * (1 + x / 2) * u[:, 0] - slopes[:, 0] / 2
        velocity = None
        if problem == "convection-diffusion":
            velocity = np.stack([inside[:, 1], 3 - inside[:, 0]], axis=1)
            load += y * slopes[:, 0] + (3 - x) * slopes[:, 1]
        matrix = compared.scalar_matrix(mesh, 1 + inside[:, 0] / 2, velocity)
        load = load[:, None]
    return np.abs(compared.solve(matrix, cells * load, fixed, u) - u).max()


@pytest.mark.parametrize("problem", compared.PROBLEMS)
def test_the_error_falls_with_the_square_of_the_length(problem):
    coarse, middle, fine = (wave_error(problem, steps) for steps in (8, 16, 32))
    assert coarse < 0.2
    assert middle < coarse / 2.5
    assert fine < coarse / 10


def test_a_stretched_sheet_gets_thinner():
    """Linear solutions are exact, and nothing pulls at natural boundaries."""
    mesh, ratio = square(6), 0.35
    matrix = compared.elastic_matrix(mesh, np.ones(len(mesh.triangles)), ratio)
    x, y = mesh.points.T
    u = np.stack([x, -ratio * y], axis=1)
    fixed = (x == 0) | (x == 1)
    found = compared.solve(matrix, 0 * u, fixed, u * fixed[:, None])
    assert np.allclose(found, u, atol=1e-12)
    turned = np.stack([-y, x], axis=1)
    assert np.allclose(matrix @ turned.ravel(), 0, atol=1e-12)


@pytest.mark.parametrize("problem", SCALARS)
@pytest.mark.parametrize("seed", range(5))
def test_solutions_without_load_are_between_given_values(problem, seed):
    case = draw_case(problem, seed)
    values = case.values[case.fixed]
    u = case._replace(load=0 * case.load).solve()
    spread = 0.02 * np.ptp(values)  # where triangles are obtuse, or the flow is fast
    assert values.min() - spread <= u.min()
    assert u.max() <= values.max() + spread
    assert np.ptp(u) > 0


@pytest.mark.parametrize("problem", compared.PROBLEMS)
def test_given_values_are_kept(problem):
    case = draw_case(problem, 1)
    u = case.solve()
    assert np.array_equal(u[case.fixed], case.values[case.fixed])
    assert 0 < case.fixed.sum() < case.mesh.on_boundary().sum()
    assert not case.fixed[~case.mesh.on_boundary()].any()


# Graphs --------------------------------------------------------------------------


def same(a: Data, b: Data) -> bool:
    return all(torch.allclose(a[x], b[x], atol=1e-4) for x in ("x", "edge_attr"))


@pytest.mark.parametrize("problem", compared.PROBLEMS)
def test_inputs_need_no_solution_and_no_place(problem, monkeypatch):
    case = draw_case(problem, 2)
    moved = case._replace(mesh=case.mesh._replace(points=case.mesh.points + 5))
    # Values that are not given have no effect.
    others = case._replace(values=case.values + 100 * ~case.fixed[:, None])
    monkeypatch.delattr(compared, "solve")
    data = compared.get_inputs(case)
    _, features, edge_features = compared.PROBLEMS[problem]
    assert data.x.shape == (300, features)
    assert data.edge_attr.shape == (data.num_edges, edge_features)
    assert "y" not in data
    assert same(compared.get_inputs(moved), data)
    assert same(compared.get_inputs(others), data)
    assert is_undirected(data.edge_index)
    assert not contains_isolated_nodes(data.edge_index, data.num_nodes)


@pytest.mark.parametrize("problem", compared.PROBLEMS)
def test_units_do_not_matter(problem):
    """Of values and loads, of coefficients, and of lengths."""
    case = draw_case(problem, 3)
    flow = case.velocity
    others = [
        case._replace(values=4 * case.values + 1, load=4 * case.load),
        case._replace(
            log_k=case.log_k + np.log(5),
            load=5 * case.load,
            velocity=None if flow is None else 5 * flow,
        ),
        case._replace(
            mesh=case.mesh._replace(points=2 * case.mesh.points),
            load=case.load / 4,
            velocity=None if flow is None else flow / 2,
        ),
    ]

    def target(case):
        centre, scale, _ = compared.get_scale(case)
        return (case.solve() - centre) / scale

    for other in others:
        assert same(compared.get_inputs(other), compared.get_inputs(case))
        assert np.allclose(target(other), target(case), atol=1e-8)


@pytest.mark.parametrize("steps", [6, 12])
def test_lengths_are_relative_to_cells(steps):
    """Those of a finer mesh of the same shape are the same, but for the rim."""
    line = np.linspace(0, 1, steps + 1)
    points = np.stack(np.meshgrid(line, line), axis=2).reshape(-1, 2)
    node = np.arange(len(points)).reshape(steps + 1, steps + 1)
    corners = node[:-1, :-1], node[:-1, 1:], node[1:, 1:], node[1:, :-1]
    a, b, c, d = (x.ravel() for x in corners)
    mesh = compared.Mesh(points, np.stack([[a, b, c], [a, c, d]]).swapaxes(1, 2))
    mesh = mesh._replace(triangles=mesh.triangles.reshape(-1, 3))
    zeros = np.zeros((len(points), 1))
    given = compared.Case(mesh, zeros[:, 0], zeros + 1, mesh.on_boundary(), zeros)
    data = compared.get_inputs(given)
    inner = ~given.fixed[data.edge_index.numpy()].any(axis=0)
    lengths = data.edge_attr[inner, 2].numpy().round(4)
    assert np.allclose(np.unique(lengths), [0, np.log(2) / 2], atol=1e-4)


@pytest.mark.parametrize("problem", compared.PROBLEMS)
def test_loads_do_not_shrink_with_cells(problem):
    """The mean of one that is constant is the rise that it would lead to."""
    for nodes in (150, 600):
        case = draw_case(problem, 4, nodes)
        case = case._replace(load=np.ones_like(case.load))
        _, scale, unit = compared.get_scale(case)
        loads = compared.get_inputs(case).x[:, : case.load.shape[1]]
        assert loads.mean(dim=0).tolist() == pytest.approx(
            case.load.shape[1] * [unit / scale], rel=1e-5
        )


def test_the_harmonic_extension_solves_the_plain_problem():
    case = draw_case("poisson", 4)
    plain = case._replace(log_k=0 * case.log_k, load=0 * case.load)
    data = compared.get_inputs(plain)
    centre, scale, _ = compared.get_scale(plain)
    data.y = torch.from_numpy((plain.solve() - centre) / scale).float()
    found = compared.harmonic_extension(data)
    assert torch.allclose(found, data.y, atol=1e-4)
    assert compared.unexplained(found, data).item() < 1e-6
    assert compared.unexplained(0 * found, data).item() > 0.5


def test_the_system_of_edges_is_exact_for_equilateral_triangles():
    row, column = np.divmod(np.arange(81), 9)
    points = np.stack([column + row / 2, row * 0.75**0.5], axis=1)
    at = np.flatnonzero((row < 8) & (column < 8))
    corners = (at, at + 1, at + 9), (at + 1, at + 10, at + 9)
    mesh = compared.Mesh(points, np.concatenate([np.stack(x, 1) for x in corners]))
    draw = np.random.default_rng(0).normal
    fixed = mesh.on_boundary()
    assert fixed.sum() == 32
    values, load = draw(size=(81, 1)), draw(size=(81, 1))
    case = compared.Case(mesh, np.full(81, 0.3), load, fixed, values)
    data = compared.get_inputs(case)
    centre, scale, _ = compared.get_scale(case)
    data.y = torch.from_numpy((case.solve() - centre) / scale).float()
    found = compared.edge_system(data)
    assert torch.allclose(found, data.y, atol=1e-4)
    graphs = [compared.draw_graph("poisson", 300, [seed]) for seed in range(5)]
    shares = [compared.unexplained(compared.edge_system(x), x).item() for x in graphs]
    assert np.median(shares) < 0.05  # close to it on most others


def test_walks_are_those_of_pyg():
    data = compared.draw_graph("poisson", 200, [0])
    expected = AddRandomWalkPE(compared.WALK, "walk")(data.clone()).walk
    assert torch.allclose(compared.add_walks(data).random_walk_pe, expected, atol=1e-6)


def test_no_mesh_is_on_two_sides(tmp_path, monkeypatch):
    args = compared.get_args(["--smoke", "--processed-root", str(tmp_path)])
    data = compared.get_datasets(args)
    graphs = [x for name in ("val", "test", "large", "fresh") for x in data[name]]
    graphs += list(data["train"].graphs)
    assert len(graphs) == 4 + 2 + 2 + 1 + 1
    assert len({float(x.pos.sum()) for x in graphs}) == len(graphs)
    assert {x.num_nodes for x in data["large"]} == {300}
    assert all(60 <= x.num_nodes <= 120 for x in data["train"].graphs)
    monkeypatch.delattr(compared, "draw_graph")  # as they are kept
    again = compared.get_datasets(args)
    assert torch.equal(again["val"][0].x, data["val"][0].x)


def test_graphs_count_alike_in_the_error():
    def graph(y):
        y = torch.tensor(y).view(-1, 1)
        free = torch.arange(len(y)) > 0  # the first is given
        return Data(x=y, edge_index=torch.empty(2, 0).long(), y=y, free=free)

    small, large = graph([50.0, 1.0, 3.0]), graph([9.0, 0.0, 4.0, 0.0, 4.0])
    batch = Batch.from_data_list([small, large])
    shares = compared.unexplained(batch.y + 1, batch)
    assert shares.tolist() == [1, 0.25]  # of the variances 1 and 4
    task = compared.get_task()
    assert task.loss(batch.y + 1, batch) == 0.625
    task.metrics["unexplained"].update(*task.rows(batch.y + 1, batch)["unexplained"])
    assert task.metrics["unexplained"].compute() == 0.625
    assert compared.unexplained(large.y + 1, large).tolist() == [0.25]


# Models --------------------------------------------------------------------------


def test_ranges_grow_with_meshes():
    ours = compared.get_study("poisson").build(NORMS[0], "chimera", 3, 16, 16)
    ranges = [x.reach_nodes for x in ours.modules() if isinstance(x, ChimeraConv)]
    assert ranges == 3 * [compared.REACH_NODES]


def test_a_processor_sums_its_edges():
    """Edge by edge, as in the paper."""
    torch.manual_seed(0)
    step, x = compared.Processor(4, 6), torch.randn(3, 4)
    edge_index, edge_attr = torch.tensor([[0, 1, 2], [1, 2, 1]]), torch.randn(3, 4)
    nodes, edges = step(x, edge_index, edge_attr)
    sums = torch.zeros_like(x)
    for e, (source, target) in enumerate(edge_index.t().tolist()):
        new = edge_attr[e] + step.edges(torch.cat([edge_attr[e], x[source], x[target]]))
        assert torch.allclose(edges[e], new, atol=1e-6)
        sums[target] += new
    for v in range(3):
        new = x[v] + step.nodes(torch.cat([x[v], sums[v]]))
        assert torch.allclose(nodes[v], new, atol=1e-6)


# Runs ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("problem", compared.PROBLEMS)
def test_arms_are_trained_and_tested(problem, call, tmp_path, refused):
    argv = ("--problem", problem, "--arms", "chimera", "meshgraphnets")
    rows = call(*argv)["rows"]
    untrained = ["mean", "harmonic", "edge-system"]
    assert list(rows) == [*untrained, "chimera", "meshgraphnets"]
    keys = {f"{x}_unexplained" for x in ("val", "test", "large", "fresh")}
    for row in rows.values():
        assert keys <= set(row)
        assert all(row[key] > 0 for key in keys)
    assert rows["mean"]["test_unexplained"] >= 1
    search = tmp_path / "out" / "chimera" / "search-depth-3-lr-0.001" / "results.json"
    found = json.loads(search.read_text())
    assert "test_unexplained" not in found["best"]
    assert found["config"]["problem"] == problem
    other = next(x for x in compared.PROBLEMS if x != problem)
    assert problem in refused(call, "--problem", other, "--resume")


def test_each_problem_has_its_folder():
    for problem in compared.PROBLEMS:
        args = compared.get_args(["--problem", problem])
        assert args.out.parts == ("runs", "meshes", problem, "default")
