"""The states of power flow, and the protocol by which models of them are compared."""

import json
from functools import partial

import common
import numpy as np
import power_grids as compared
import power_states
import pytest
import torch
from power_states import PQ, PV, SLACK, Drawn, PowerStates
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch_geometric.data import Batch

from pyg_chimera.nn import GraphModel
from pyg_chimera.transforms import AddEliminationOrder

#: The test system of IEEE with 14 buses, and its published solution.
IEEE = """function mpc = case14
mpc.baseMVA = 100;
mpc.bus = [
1 3 0 0 0 0 1 1.06 0 0 1 1.06 0.94; 2 2 21.7 12.7 0 0 1 1.045 0 0 1 1.06 0.94;
3 2 94.2 19 0 0 1 1.01 0 0 1 1.06 0.94; 4 1 47.8 -3.9 0 0 1 1 0 0 1 1.06 0.94;
5 1 7.6 1.6 0 0 1 1 0 0 1 1.06 0.94; 6 2 11.2 7.5 0 0 1 1.07 0 0 1 1.06 0.94;
7 1 0 0 0 0 1 1 0 0 1 1.06 0.94; 8 2 0 0 0 0 1 1.09 0 0 1 1.06 0.94;
9 1 29.5 16.6 0 19 1 1 0 0 1 1.06 0.94; 10 1 9 5.8 0 0 1 1 0 0 1 1.06 0.94;
11 1 3.5 1.8 0 0 1 1 0 0 1 1.06 0.94; 12 1 6.1 1.6 0 0 1 1 0 0 1 1.06 0.94;
13 1 13.5 5.8 0 0 1 1 0 0 1 1.06 0.94; 14 1 14.9 5 0 0 1 1 0 0 1 1.06 0.94];
mpc.gen = [
1 232.4 0 10 0 1.06 100 1 332.4 0; 2 40 0 50 -40 1.045 100 1 140 0;
3 0 0 40 0 1.01 100 1 100 0; 6 0 0 24 -6 1.07 100 1 100 0; 8 0 0 24 -6 1.09 100 1 100 0;
4 500 0 0 0 1.2 100 0 500 0];
mpc.branch = [
1 2 0.01938 0.05917 0.0528 0 0 0 0 0 1; 1 5 0.05403 0.22304 0.0492 0 0 0 0 0 1;
2 3 0.04699 0.19797 0.0438 0 0 0 0 0 1; 2 4 0.05811 0.17632 0.034 0 0 0 0 0 1;
2 5 0.05695 0.17388 0.0346 0 0 0 0 0 1; 3 4 0.06701 0.17103 0.0128 0 0 0 0 0 1;
4 5 0.01335 0.04211 0 0 0 0 0 0 1; 4 7 0 0.20912 0 0 0 0 0.978 0 1;
4 9 0 0.55618 0 0 0 0 0.969 0 1; 5 6 0 0.25202 0 0 0 0 0.932 0 1;
6 11 0.09498 0.1989 0 0 0 0 0 0 1; 6 12 0.12291 0.25581 0 0 0 0 0 0 1;
6 13 0.06615 0.13027 0 0 0 0 0 0 1; 7 8 0 0.17615 0 0 0 0 0 0 1;
7 9 0 0.11001 0 0 0 0 0 0 1; 9 10 0.03181 0.0845 0 0 0 0 0 0 1;
9 14 0.12711 0.27038 0 0 0 0 0 0 1; 10 11 0.08205 0.19207 0 0 0 0 0 0 1;
12 13 0.22092 0.19988 0 0 0 0 0 0 1; 13 14 0.17093 0.34802 0 0 0 0 0 0 1;
1 14 0.1 0.1 0 0 0 0 0 0 0];
"""
ANGLES = [0, -4.98, -12.73, -10.31, -8.77, -14.22, -13.36, -13.36]
ANGLES += [-14.94, -15.10, -14.79, -15.08, -15.16, -16.03]
MAGNITUDES = [1.060, 1.045, 1.010, 1.018, 1.020, 1.070, 1.062, 1.090]
MAGNITUDES += [1.056, 1.051, 1.057, 1.055, 1.050, 1.036]


@pytest.fixture
def ieee(tmp_path):
    path = tmp_path / "case14.m"
    path.write_text(IEEE)
    return path


@pytest.fixture
def call(smoke, tmp_path):
    """Runs the comparison on few states of generated grids."""
    fixed = compared.get_args, compared.STUDY.run, "--processed-root", str(tmp_path)
    return partial(smoke, *fixed)


def as_filed(grid) -> Drawn:
    kept = np.ones(len(grid.impedance), bool)
    return Drawn(power_states.schedule(grid), grid.set_point, kept)


def flows(grid, drawn, voltage) -> np.ndarray:
    """The power that leaves each bus, branch by branch: an ideal transformer, then a
    line between two halves of its charging.
    """
    out = voltage * (grid.shunt * voltage).conj()
    for b in np.flatnonzero(drawn.kept):
        f, t = grid.ends[:, b]
        inner = voltage[f] / grid.ratio[b]
        half = 0.5j * grid.charging[b]
        line = (inner - voltage[t]) / grid.impedance[b]
        out[f] += inner * (line + half * inner).conj()  # an ideal one has no losses
        out[t] += voltage[t] * (half * voltage[t] - line).conj()
    return out


def assert_solved(grid, drawn, voltage) -> None:
    miss = flows(grid, drawn, voltage) - drawn.power
    assert abs(miss.real[grid.kind != SLACK]).max() < 1e-7
    assert abs(miss.imag[grid.kind == PQ]).max() < 1e-7
    at = grid.kind != PQ
    assert np.allclose(abs(voltage)[at], drawn.set_point[at], atol=1e-12)


# Power flow ----------------------------------------------------------------------


def test_published_solution(ieee):
    grid = power_states.read_grid(ieee)
    assert grid.kind.tolist() == [SLACK, PV, PV, PQ, PQ, PV, PQ, PV, *6 * [PQ]]
    assert np.flatnonzero(grid.transformer).tolist() == [7, 8, 9]
    drawn = as_filed(grid)
    voltage = power_states.solve(grid, drawn, grid.voltage)
    assert_solved(grid, drawn, voltage)
    found = power_states.relative(voltage, np.zeros(14), 0)
    assert np.allclose(found[:, 0], ANGLES, atol=0.02)
    assert np.allclose(found[:, 1], MAGNITUDES, atol=1.1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_drawn_states_satisfy_the_balance(tmp_path, seed):
    path = power_states.write_grid(tmp_path / "grid.npz", 40, seed)
    grid, rng = power_states.read_grid(path), np.random.default_rng(seed)
    candidates = power_states.removable(grid)
    for _ in range(4):
        drawn, voltage = power_states.draw(grid, candidates, rng)
        assert_solved(grid, drawn, voltage)
        assert (~drawn.kept).sum() == 1
        slack = grid.kind == SLACK
        fed = flows(grid, drawn, voltage) - drawn.power
        assert abs(fed.real[slack]) < power_states.BALANCE  # as scheduled


def test_a_step_is_that_of_the_derivatives(tmp_path):
    """Newton's step, from a Jacobian by central differences."""
    path = power_states.write_grid(tmp_path / "grid.npz", 15, 0)
    grid = power_states.read_grid(path)
    drawn = as_filed(grid)
    angles, magnitudes = (np.flatnonzero(x) for x in (grid.kind > 0, grid.kind == PQ))
    start = 1 + 0.05 * np.random.default_rng(0).standard_normal((2, 15))

    def balance(values):
        voltage = values[1] * np.exp(1j * values[0])
        miss = flows(grid, drawn, voltage) - drawn.power
        return np.r_[miss.real[angles], miss.imag[magnitudes]]

    columns = []
    for row, at in ((0, angles), (1, magnitudes)):
        for node in at:
            shift = np.zeros((2, 15))
            shift[row, node] = 1e-6
            columns.append((balance(start + shift) - balance(start - shift)) / 2e-6)
    step = np.linalg.solve(np.stack(columns, axis=1), -balance(start))
    expected = start.copy()
    expected[0, angles] += step[: len(angles)]
    expected[1, magnitudes] += step[len(angles) :]
    voltage = start[1] * np.exp(1j * start[0])
    matrix = power_states.admittance(grid, drawn.kept)
    found = power_states.newton_step(matrix, drawn.power, grid.kind, voltage)
    assert np.allclose(found, expected[1] * np.exp(1j * expected[0]), atol=1e-6)


def test_without_a_solution_there_is_none(ieee):
    grid = power_states.read_grid(ieee)
    drawn = as_filed(grid)
    heavy = drawn._replace(power=20 * drawn.power)
    assert power_states.solve(grid, heavy, grid.voltage) is None


@pytest.mark.parametrize("stored", [np.rad2deg(0.3), -0.3])
def test_the_operating_point_tells_the_unit_of_shifts(ieee, stored):
    grid = power_states.read_grid(ieee)
    turned = grid._replace(ratio=grid.ratio * np.exp(0.3j * (np.arange(20) == 7)))
    voltage = power_states.solve(turned, as_filed(grid), grid.voltage)
    case = power_states.read_case(ieee)
    case["bus"][:, 7], case["bus"][:, 8] = abs(voltage), np.rad2deg(np.angle(voltage))
    case["branch"][7, 9] = stored
    np.savez(ieee.with_suffix(".npz"), **case)
    found = power_states.read_grid(ieee.with_suffix(".npz"))
    assert np.allclose(np.angle(found.ratio), 0.3 * (np.arange(20) == 7))


@pytest.mark.parametrize(
    ("name", "degrees", "units", "missed"),
    [
        ("1354pegase", 0.5, 3e-3, 1.1),  # 13, if shifts were in degrees
        ("1888rte", 0.7, 4e-2, 0.2),
        ("ACTIVSg200", 1e-3, 1e-4, 1e-3),
        ("ACTIVSg500", 1e-3, 1e-4, 1e-3),
        ("ACTIVSg2000", 5e-2, 1e-4, 1e-3),
    ],
)
def test_real_grids_are_at_the_operating_point_of_their_files(
    shared_data, name, degrees, units, missed
):
    """At which some generators of the real ones do not feed in what they should."""
    grid = power_states.read_grid(shared_data / "power-grids" / name)
    drawn = as_filed(grid)._replace(set_point=abs(grid.voltage))
    voltage = power_states.solve(grid, drawn, grid.voltage)
    assert_solved(grid, drawn, voltage)
    slack = np.flatnonzero(grid.kind == SLACK)[0]
    turned = voltage / grid.voltage * (grid.voltage / voltage)[slack]
    assert abs(np.rad2deg(np.angle(turned))).max() < degrees
    assert abs(abs(voltage) - abs(grid.voltage)).max() < units
    miss = flows(grid, drawn, grid.voltage) - drawn.power
    assert abs(miss.real[grid.kind != SLACK]).max() < missed


# Without learning ----------------------------------------------------------------


def test_direct_current_is_that_of_a_dense_solver(ieee):
    grid = power_states.read_grid(ieee)
    turned = grid.ratio * np.exp(0.1j * (np.arange(20) == 3))
    grid = grid._replace(ratio=turned)
    drawn = as_filed(grid)
    angle = power_states.direct_current(grid, drawn)
    assert angle[0] == 0
    out = grid.shunt.real.copy()
    for b, (f, t) in enumerate(grid.ends.T):
        flow = angle[f] - angle[t] - np.angle(grid.ratio[b])
        flow /= grid.impedance[b].imag * abs(grid.ratio[b])
        out[f] += flow
        out[t] -= flow
    lossy = drawn.power.real
    expected = lossy - lossy.sum() * grid.demand.real / grid.demand.real.sum()
    assert np.allclose(out, expected, atol=1e-9)  # at the slack, too


def test_direct_current_is_the_limit_of_small_angles(ieee):
    """Without losses, charging and shunts, at magnitudes of one."""
    grid = power_states.read_grid(ieee)
    size, none = len(grid.kind), np.zeros(20)
    grid = grid._replace(
        kind=np.where(grid.kind == SLACK, SLACK, PV),
        impedance=1j * grid.impedance.imag,
        ratio=np.exp(1e-3j * np.arange(20)),
        charging=none,
        shunt=np.zeros(size),
    )
    drawn = as_filed(grid)
    power = 0.01 * (drawn.power.real - drawn.power.real.mean())
    drawn = Drawn(power, np.ones(size), drawn.kept)
    voltage = power_states.solve(grid, drawn, np.ones(size, complex))
    angle = power_states.direct_current(grid, drawn)
    assert np.allclose(np.angle(voltage / voltage[0]), angle, atol=2e-4)
    assert abs(angle).max() > 1e-2


def test_interpolation_is_exact_without_currents(ieee):
    grid = power_states.read_grid(ieee)
    magnitude = power_states.interpolated(grid, as_filed(grid))
    at = grid.kind != PQ
    assert np.allclose(magnitude[at], grid.set_point[at])
    alone = grid._replace(kind=np.where(grid.kind == SLACK, SLACK, PQ))
    alone = alone._replace(shunt=np.zeros(14), charging=np.zeros(20))
    drawn = Drawn(np.zeros(14), grid.set_point, np.arange(20) != 8)  # no loop of taps
    drawn.kept[9] = False
    voltage = power_states.solve(alone, drawn, np.ones(14, complex))
    assert np.allclose(abs(voltage), power_states.interpolated(alone, drawn))


def test_unit_response_is_what_one_unit_at_each_bus_leads_to(ieee):
    grid = power_states.read_grid(ieee)
    turned, raised = power_states.unit_response(grid, as_filed(grid))
    active, reactive = np.zeros((2, 14))
    for b, (f, t) in enumerate(grid.ends.T):
        weight, ratio = 1 / abs(grid.impedance[b]), abs(grid.ratio[b])
        flow = weight / ratio * (turned[f] - turned[t])
        active[[f, t]] += flow, -flow
        flow = weight * (raised[f] / ratio - raised[t])  # behind the transformer
        reactive[[f, t]] += flow / ratio, -flow
    free, at = grid.kind != SLACK, grid.kind == PQ
    assert np.allclose(active[free], 1)
    assert np.allclose(reactive[at], 1)
    assert turned[~free] == 0
    assert (raised[~at] == 0).all()


# States --------------------------------------------------------------------------


def test_parts_are_at_the_operating_point_of_their_grid(ieee, tmp_path, monkeypatch):
    monkeypatch.setattr(power_states, "PART", (5, 30))
    monkeypatch.setattr(power_states, "CONSUMED", 0.01)
    other = power_states.write_grid(tmp_path / "other.npz", 60, 0)
    rng, sizes = np.random.default_rng(0), set()
    for grid in map(power_states.read_grid, (ieee, other)):
        drawn = as_filed(grid)
        solved = power_states.solve(grid, drawn, grid.voltage)
        slack = np.flatnonzero(grid.kind == SLACK)[0]
        more = (flows(grid, drawn, solved) - drawn.power).real[slack]
        generation = grid.generation + more * (grid.generators == slack)
        grid = grid._replace(voltage=solved, generation=generation)
        parts = [power_states.cut(grid, rng) for _ in range(20)]
        parts = [part for part in parts if part is not None]
        assert len(parts) > 5
        for part in parts:
            sizes.add(len(part.kind))
            graph = coo_array(
                (np.ones(len(part.ends[0])), part.ends), 2 * (len(part.kind),)
            )
            assert connected_components(graph, directed=False)[0] == 1
            assert (part.kind == SLACK).sum() == 1
            assert_solved(part, as_filed(part), part.voltage)
            drawn, voltage = power_states.draw(part, np.arange(0), rng)
            assert_solved(part, drawn, voltage)
    assert len(sizes) > 5
    assert min(sizes) >= 5


def test_parts_take_the_place_of_a_grid(tmp_path, monkeypatch):
    monkeypatch.setattr(power_states, "PART", (10, 30))
    path = power_states.write_grid(tmp_path / "grid.npz", 60, 0)
    states = PowerStates(tmp_path, [path], 2, num_parts=3)
    assert len(states) == 6
    assert len({data.num_nodes for data in states}) > 1
    for first, second in zip(states[::2], states[1::2], strict=True):
        assert torch.equal(first.kind, second.kind)
        assert not torch.equal(first.y, second.y)
    monkeypatch.setattr(power_states, "make_all", None)  # not made again
    assert len(PowerStates(tmp_path, [path], 2, num_parts=3)) == 6


def test_parts_without_states_are_drawn_again(ieee, tmp_path, monkeypatch):
    real, calls = power_states.cut, iter(range(1000))
    monkeypatch.setattr(
        power_states, "cut", lambda *x: real(*x) if next(calls) >= 2 else None
    )
    assert len(PowerStates(tmp_path, [ieee], 1, num_parts=2)) == 2
    monkeypatch.setattr(power_states, "cut", lambda *_: None)
    with pytest.raises(ValueError, match="only 0 of 300 parts"):
        PowerStates(tmp_path, [ieee], 1, num_parts=3)


def test_no_branch_is_removed_that_divides_the_grid(ieee, tmp_path):
    grid = power_states.read_grid(ieee)
    assert set(range(20)) - set(power_states.removable(grid)) == {13}  # to bus 8
    text = IEEE.replace("7 9 0 0.11", "8 7 0 0.3 0 0 0 0 0 0 1; 7 9 0 0.11")
    ieee.write_text(text)
    assert len(power_states.removable(power_states.read_grid(ieee))) == 21


def test_graphs_hold_what_was_drawn(ieee, tmp_path):
    states, outages = PowerStates(tmp_path, [ieee], 6), set()
    grid = power_states.read_grid(ieee)
    for data in states:
        assert data.x.shape == (14, 17)
        assert data.edge_index.shape == (2, 38)
        assert data.edge_attr.shape == (38, 8)
        forth, back = data.edge_index[:, :19], data.edge_index[:, 19:]
        assert torch.equal(forth, back.flip(0))
        assert data.x[:, :3].argmax(1).tolist() == grid.kind.tolist()
        assert data.y[0, 0] == data.start[0, 0] == data.step[0, 0] == 0
        known = data.kind != PQ
        assert torch.allclose(data.y[known, 1], data.start[known, 1])
        assert torch.allclose(data.y[known, 1], 1 + data.x[known, 7] / 10)
        # the voltages are a solution for the powers that are read
        kept = np.array([end in forth.t().tolist() for end in grid.ends.T.tolist()])
        outages |= set(np.flatnonzero(~kept))
        x, y = data.x.double().numpy(), data.y.double().numpy()
        voltage = y[:, 1] * np.exp(1j * np.deg2rad(y[:, 0]))
        power = np.sinh(x[:, 3]) + 1j * np.sinh(x[:, 4])
        miss = flows(grid, Drawn(power, y[:, 1], kept), voltage) - power
        assert abs(miss.real).max() < power_states.BALANCE + 1e-4
        assert abs(miss.imag[grid.kind == PQ]).max() < 1e-4
    assert len(outages) > 1
    assert len({float(data.y[3, 0]) for data in states}) == 6


def test_directions_of_edges(ieee):
    grid = power_states.read_grid(ieee)
    shifted = grid._replace(ratio=grid.ratio * np.exp(0.2j * (np.arange(20) == 7)))
    edge_index, attributes = power_states.edges(shifted)
    assert edge_index[:, [7, 27]].tolist() == [[3, 6], [6, 3]]
    forth, back = attributes[[7, 27]]
    tap = 10 * np.log(0.978)
    assert np.allclose(forth[1:], [0, -1, 0, tap, 0.2, 1, 1])
    assert np.allclose(back[1:], [0, -1, 0, -tap, -0.2, 1, -1])
    line = np.array([0.01938, 0.05917]) / np.hypot(0.01938, 0.05917)
    for row in (attributes[0], attributes[20]):
        assert np.allclose(row[1:3], line * [1, -1])
        assert np.allclose(row[4:], 0)
        assert row[3] == pytest.approx(0.0528, rel=1e-3)


def test_nothing_that_is_read_depends_on_the_solution(ieee):
    """Inputs are made from what was drawn, and in that is no output of generators but
    their schedule.
    """
    grid = power_states.read_grid(ieee)
    drawn, voltage = power_states.draw(grid, np.arange(7), np.random.default_rng(0))
    before = power_states.describe(grid, drawn)
    # another operating point; set-points that hold nowhere; reactive power at PV
    free, at = grid.kind == PQ, grid.kind != PQ
    other = grid._replace(voltage=voltage, set_point=np.full(14, 9.0))
    drawn.set_point[free] = abs(voltage)[free]
    drawn_again = drawn._replace(set_point=np.where(free, 9.0, drawn.set_point))
    after = power_states.describe(other, drawn_again)
    for name in ("x", "start", "step"):
        assert np.array_equal(before[name], after[name])
    reactive = flows(grid, drawn, voltage).imag
    assert np.allclose(np.sinh(before["x"][free, 4]), reactive[free], atol=1e-6)
    assert abs(np.sinh(before["x"][at, 4]) - reactive[at]).min() > 1e-3
    assert np.allclose(np.sinh(before["x"][:, 4]), drawn.power.imag)
    mismatch = before["x"][:, 13:]  # zero where the equations say nothing
    assert (mismatch[grid.kind == SLACK] == 0).all()
    assert (mismatch[grid.kind == PV][:, [1, 3]] == 0).all()


def test_states_are_kept_and_a_function_of_their_seed(ieee, tmp_path, monkeypatch):
    first = PowerStates(tmp_path / "one", [ieee], 2)
    again = PowerStates(tmp_path / "two", [ieee], 2)
    other = PowerStates(tmp_path / "one", [ieee], 2, seed=1)
    assert torch.equal(first[1].y, again[1].y)
    assert not torch.equal(first[1].y, other[1].y)
    monkeypatch.setattr(power_states, "make_states", None)  # not made again
    assert torch.equal(PowerStates(tmp_path / "one", [ieee], 2)[0].x, first[0].x)
    assert not list(tmp_path.glob("**/*.part"))


def test_states_without_a_solution_are_counted(ieee, tmp_path, monkeypatch):
    real, calls = power_states.solve, iter(range(1000))
    monkeypatch.setattr(
        power_states, "solve", lambda *x: real(*x) if next(calls) >= 2 else None
    )
    states = PowerStates(tmp_path / "some", [ieee], 3)
    assert (len(states), states.dropped) == (3, {"case14": 2})
    monkeypatch.setattr(power_states, "solve", lambda *_: None)
    with pytest.raises(ValueError, match="solves only 0 of 10 states"):
        PowerStates(tmp_path / "none", [ieee], 2)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [("1 3 0 0", "1 2 0 0", "of type 3"), ("1 232.4", "1 -900", "must be positive")],
)
def test_files_that_are_no_grid(ieee, old, new, words):
    ieee.write_text(IEEE.replace(old, new))
    with pytest.raises(ValueError, match=words):
        power_states.read_grid(ieee)


# Protocol ------------------------------------------------------------------------


def test_no_grid_is_on_two_sides():
    for train, val, test in compared.SPLITS.values():
        names = (*train, *val, *test)
        assert len(names) == len(set(names))
    train, val, test = compared.SPLITS["default"]
    assert (len(train), len(val), len(test)) == (4, 1, 8)
    assert all(name.endswith("rte") for name in train)


def test_graphs_count_alike_in_the_errors(ieee, tmp_path):
    other = power_states.write_grid(tmp_path / "other.npz", 40, 0)
    graphs = [PowerStates(tmp_path, [path], 1)[0] for path in (ieee, other)]
    batch = Batch.from_data_list(graphs)
    shift = torch.where(batch.batch == 0, 0.1, 0.3)
    shift[batch.kind == SLACK] = 5  # neither counts there
    miss = torch.stack([shift, 0.02 * shift], dim=1)
    miss[batch.kind == PV, 1] = 5
    found = compared.errors(batch.y + miss, batch)
    assert torch.allclose(found["angle"], torch.tensor([0.1, 0.3]), atol=1e-4)
    assert torch.allclose(found["magnitude"], torch.tensor([0.002, 0.006]), atol=1e-5)
    assert torch.allclose(found["error"], torch.tensor([0.3, 0.9]), atol=2e-3)
    task = compared.get_task()
    out = (batch.y + miss - batch.start) * torch.tensor([1.0, 100.0])
    assert float(task.loss(out, batch)) == pytest.approx(0.6, abs=2e-3)
    for name, row in task.rows(out, batch).items():
        task.metrics[name].update(*row)
    assert task.metrics["angle"].compute().item() == pytest.approx(0.2, abs=1e-4)


@pytest.mark.parametrize(("arm", "option"), [("chimera", 3), ("gated-gcn", 2)])
def test_nothing_is_added_if_nothing_is_missing(tmp_path, arm, option):
    path = power_states.write_grid(tmp_path / "grid.npz", 40, 0)
    states = PowerStates(tmp_path, [path], 2, 0, AddEliminationOrder())
    data, x = Batch.from_data_list(list(states)), [state.x for state in states]
    model = compared.build_model("layer_norm", arm, option, 16, 32)
    out = model(**model.inputs(data))
    assert torch.equal(data.x, torch.cat(x))  # is not changed
    assert out.shape == (80, 2)
    assert out.abs().min() > 0
    single = model(**model.inputs(states[1]))
    assert torch.allclose(out[40:], single, atol=1e-5)
    balanced = data.clone()
    balanced.x[:, 13:] = 0
    assert torch.equal(model(**model.inputs(balanced)), torch.zeros(80, 2))
    plain = GraphModel.forward
    expected = plain(model, **model.inputs(data))
    expected -= plain(model, **model.inputs(balanced))
    assert torch.equal(out, expected)


def test_smoke(call, tmp_path):
    first = call("--arms", "mlp")
    both = call("--arms", "hops", "--resume")
    assert list(both["rows"]) == ["flat", "dc", "newton-step", "mlp", "hops"]
    assert both["rows"]["mlp"] == first["rows"]["mlp"]
    row = both["rows"]["hops"]
    assert (row["seeds"], row["steps"]) == (1, 2)
    assert {"val_error", "generated-30_angle", "generated-30_magnitude", "K"} <= set(
        row
    )
    flat, start, step = (both["rows"][x] for x in ("flat", "dc", "newton-step"))
    for metric in ("error", "angle", "magnitude"):
        name = f"generated-30_{metric}"
        assert 0 < step[name] < 0.2 * start[name] < 0.2 * flat[name]
    search = tmp_path / "out" / "mlp" / "search-depth-2-lr-0.001" / "results.json"
    assert "generated-30_angle" not in json.loads(search.read_text())["best"]


def test_missing_grids_are_named(tmp_path, capsys):
    args = compared.get_args(["--root", str(tmp_path), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        common.main(compared.STUDY.run, args)
    assert "there is no 1888rte.npz or 1888rte.m" in capsys.readouterr().err
