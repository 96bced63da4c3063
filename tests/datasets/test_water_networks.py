import gzip
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares as optimize
from scipy.sparse import coo_array, diags_array
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import spsolve
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.transforms import BaseTransform, Compose, VirtualNode
from torch_geometric.utils import scatter

from pyg_chimera.datasets import SampleSensors, WaterNetworks, water_networks
from pyg_chimera.nn import PLSTMConv
from pyg_chimera.transforms import (
    AddEliminationOrder,
    DAGDecomposition,
    DirectedLineGraph,
)

pytest.importorskip("wntr", reason="reads networks: the extra 'water'")

#: Two loops, j1-j2-j3-j4 and j3-j4-j5-j6; a pump from the reservoir, a check valve,
#: and j8, which only a closed pipe leads to. j2 has two demands, one with a pattern.
TINY = """
[JUNCTIONS]
 j1 10 0
 j2 12 5
 j3 11 4
 j4 9 6
 j5 8 3
 j6 13 2
 j7 14 1
 j8 10 0
[RESERVOIRS]
 source 20
[TANKS]
 tank 45 3 1 6 12 0
[PIPES]
 p12 j1 j2 500 250 120 0 Open
 p23 j2 j3 400 200 110 0 Open
 p34 j3 j4 300 200 110 0 Open
 p41 j4 j1 450 250 120 0 Open
 p45 j4 j5 350 150 100 0 Open
 p56 j5 j6 300 150 100 0 Open
 p63 j6 j3 250 150 100 0 Open
 p67 j7 j6 200 150 100 0 CV
 pt j7 tank 100 300 130 0 Open
 p78 j7 j8 100 100 100 0 Closed
[PUMPS]
 pump source j1 HEAD curve
[DEMANDS]
 j2 3 double
 j2 2
[PATTERNS]
 double 1 3
[CURVES]
 curve 25 35
[CONTROLS]
 LINK pump CLOSED AT TIME 0
[TIMES]
 Duration 2:00
 Pattern Timestep 1:00
[OPTIONS]
 Units LPS
 Headloss H-W
[COORDINATES]
 j1 0 0
 j2 1 0
[END]
"""
NODES = ["j1", "j2", "j3", "j4", "j5", "j6", "j7", "source", "tank"]
LINKS = 10


@pytest.fixture
def tiny(tmp_path):
    path = tmp_path / "tiny.inp"
    path.write_text(TINY)
    return str(path)


@pytest.fixture
def load(tmp_path):
    def load(*paths, **kwargs):
        options = {"num_states": 5, "sensors": SampleSensors(0.3, seed=0)} | kwargs
        return WaterNetworks(str(tmp_path / "root"), list(paths), **options)

    return load


def links_of(data):
    """The links between the nodes by name, as wntr orders them."""
    order = {0: "junctions", 1: "tank", 2: "source"}
    names, seen = [], 0
    for kind in data.node_type.tolist():
        seen += kind == 0
        names.append(f"j{seen}" if kind == 0 else order[kind])
    return [(names[a], names[b]) for a, b in data.edge_index.t().tolist()]


def test_the_graph(load, tiny):
    dataset = load(tiny)
    assert len(dataset) == 5
    data = dataset[2]
    assert data.name == "tiny"
    assert data.state == 2
    assert data.node_type.bincount().tolist() == [7, 1, 1]  # j8 is cut off
    links = links_of(data)
    assert len(links) == 2 * LINKS
    assert [(b, a) for a, b in links[:LINKS]] == links[LINKS:]
    ends = {frozenset(link) for link in links}
    assert {frozenset(x) for x in [("source", "j1"), ("j7", "tank")]} <= ends
    assert all("j8" not in link for link in links)
    kinds = data.edge_attr[:LINKS, 3:6].sum(0).tolist()
    assert kinds == [9, 1, 0]
    along = dict(zip(links, data.edge_attr[:, 6].tolist(), strict=True))
    assert along["source", "j1"] == along["j7", "j6"] == 1
    assert along["j1", "source"] == along["j6", "j7"] == -1
    assert sum(map(abs, along.values())) == 4
    for key in ("y", "elevation", "demand", "conductance", "edge_attr", "x", "pos"):
        assert data[key].dtype == torch.float32
        assert data[key].isfinite().all()
    assert data.validate()


def test_edges_are_described(load, tiny):
    data = load(tiny)[0]
    (at,) = (i for i, x in enumerate(links_of(data)) if x == ("j1", "j2"))
    # Hazen and Williams, as in the manual of EPANET
    loss = 10.67 * 500 / 120**1.852 / 0.25**4.871
    flow = loss ** (-1 / 1.852)
    expected = [np.log(flow / 0.01), np.log(5.0), np.log(0.25 / 0.2), 1, 0, 0, 0]
    assert np.allclose(data.edge_attr[at], expected, atol=1e-5)
    assert data.conductance[at].item() == pytest.approx(flow, rel=1e-5)
    pump = data.edge_attr[:, 4] == 1
    median = data.conductance[:LINKS][~pump[:LINKS]].median()
    assert np.allclose(data.conductance[pump], median / 1000)
    assert np.allclose(data.edge_attr[pump, :3], 0)


def test_demands_are_means_over_a_day(load, tiny):
    data = load(tiny)[0]
    # 3 L/s times a pattern of mean 2, and 2 L/s
    assert np.allclose(1000 * data.demand[1], 8, atol=1e-4)
    assert np.allclose(1000 * data.demand[data.node_type > 0], 0)


def test_flows_are_balanced(load, tiny, monkeypatch):
    """By heads and conductances: an oracle that knows nothing of EPANET."""
    monkeypatch.setattr(water_networks, "DEMAND_SIGMA", 0)  # one factor for all
    factors = []
    for data in load(tiny):
        source, target = data.edge_index
        fall = (data.y[source] - data.y[target]).double()
        flow = data.conductance * fall.sign() * fall.abs() ** (1 / 1.852)
        flow[data.edge_attr[:, 4] == 1] = 0  # a pump
        flow[flow * data.edge_attr[:, 6] < 0] = 0  # back through the check valve
        arrives = scatter(flow, target, dim_size=data.num_nodes)
        drawn, demand = arrives[1:7], data.demand[1:7]  # not j1, where the pump is
        factors.append((drawn.sum() / demand.sum()).item())
        assert np.allclose(drawn, factors[-1] * demand, atol=3e-5)
    assert min(factors) >= 0.4
    assert max(factors) <= 1.4
    assert max(factors) - min(factors) > 0.1


@pytest.mark.parametrize(
    ("formula", "roughness"), [("H-W", 110.0), ("C-M", 0.012), ("D-W", 0.5)]
)
def test_a_pipe_loses_one_metre(load, tmp_path, monkeypatch, formula, roughness):
    """At its conductance, by EPANET's own formulas."""
    meters = roughness / 1000 if formula == "D-W" else roughness
    flow = water_networks._flow(formula, 300.0, 0.2, meters)
    (tmp_path / "pipe.inp").write_text(
        f"[JUNCTIONS]\n a 0 {1000 * flow}\n[RESERVOIRS]\n r 50\n[OPTIONS]\n Units LPS\n"
        f" Headloss {formula}\n[PIPES]\n p r a 300 200 {roughness} 0 Open\n[END]\n"
    )
    for name, value in (
        ("DEMAND_SIGMA", 0),
        ("DEMAND_FACTOR", (1, 1)),
        ("SOURCE_METRES", 0),
    ):
        monkeypatch.setattr(water_networks, name, value)
    data = load(str(tmp_path / "pipe.inp"))[0]
    assert data.conductance[0].item() == pytest.approx(flow, rel=1e-5)
    assert (data.y.max() - data.y.min()).item() == pytest.approx(1, abs=0.02)


def test_us_units_are_converted(load, tiny, tmp_path):
    text = TINY.replace("Units LPS", "Units GPM")
    (tmp_path / "feet.inp").write_text(text)
    feet, metres = load(str(tmp_path / "feet.inp"))[0], load(tiny)[0]
    assert np.allclose(feet.elevation, 0.3048 * metres.elevation, atol=1e-4)
    tank = feet.node_type == 1
    assert 0.3048 * 46 <= feet.y[tank].item() <= 0.3048 * 51
    assert 46 <= metres.y[tank].item() <= 51


def test_states_vary(load, tiny):
    dataset = load(tiny, num_states=40)
    heads = torch.stack([data.y for data in dataset])
    assert (heads.std(dim=0) > 0.05).all()
    types = dataset[0].node_type
    levels = heads[:, types == 1] - 45
    assert levels.min() >= 1
    assert levels.max() <= 6
    assert levels.max() - levels.min() > 3
    sources = heads[:, types == 2] - 20
    assert sources.abs().max() <= 2
    assert sources.max() - sources.min() > 2


def test_networks_of_ones_own_need_no_number(load, tiny):
    data = load(tiny)[0]
    assert int(data.state) == 0
    del data.state
    mask = data.sensor_mask
    assert torch.equal(SampleSensors(0.3, seed=0)(data).sensor_mask, mask)


def test_no_head_but_those_of_sensors_is_in_the_inputs(load, tiny):
    data = load(tiny)[3]
    other = data.clone()
    other.y = torch.where(
        data.sensor_mask, data.y, data.y + torch.randn(data.num_nodes)
    )
    SampleSensors(0.3, seed=0)(other)
    assert torch.equal(other.sensor_mask, data.sensor_mask)
    for key in set(data.keys()) - {"y"}:
        same = data[key] == other[key]
        assert same if isinstance(same, bool) else same.all(), key
    assert (data.x[~data.sensor_mask, 0] == 0).all()


def test_a_reservoirs_head_is_not_its_elevation(load, tiny, tmp_path):
    (tmp_path / "high.inp").write_text(TINY.replace("source 20", "source 31"))
    low, high = load(tiny)[0], load(str(tmp_path / "high.inp"))[0]
    assert torch.equal(low.elevation, high.elevation)
    assert low.elevation[low.node_type == 2].item() == 10  # that of j1


def test_sensors(load, tiny):
    data = load(tiny, sensors=SampleSensors(0.3, seed=0))[1]
    at = data.sensor_mask
    assert at.sum() == 2
    assert (data.node_type[at] == 0).all()
    assert torch.equal(data.target_mask, (data.node_type == 0) & ~at)
    assert np.allclose(data.sensor_mean, data.y[at].mean())
    assert np.allclose(data.sensor_scale, max(0.5, data.y[at].std(correction=0)))
    heads = data.sensor_mean + data.sensor_scale * data.x[:, 0]
    assert np.allclose(heads[at], data.y[at], atol=1e-4)
    assert torch.equal(data.x[:, 1], at.float())
    above = data.sensor_mean + 10 * data.x[:, 2]
    assert np.allclose(above, data.elevation, atol=1e-4)
    demand = data.x[:, 3].sinh() * data.demand.mean()
    assert np.allclose(demand, data.demand, atol=1e-6)
    assert torch.equal(data.x[:, 4:7].argmax(dim=1), data.node_type)


def interpolate(data):
    """The Laplacian system of nodes without sensors, where links lead to one."""
    source, target = data.edge_index.numpy()
    shape = 2 * (data.num_nodes,)
    weight = data.conductance.double()
    adjacency = coo_array((weight, (target, source)), shape).tocsr()
    rows = (diags_array(adjacency.sum(axis=1)) - adjacency).tocsr()
    at, found = data.sensor_mask.numpy(), data.x[:, 0].double().numpy()
    _, part = connected_components(adjacency)
    free = ~at & np.isin(part, part[at])
    right = found[free] - rows[free][:, at] @ found[at]
    found[free] = spsolve(rows[free][:, free].tocsc(), right)
    return found


def likeliest(data):
    """The heads at which the sum of squares is least, by a general optimizer, of what
    they miss of sensors, of the balance of nodes, of interpolation where no balance is
    known, and the common factor, each by its deviation. And the deviation of heads.
    """
    nodes, scale = data.num_nodes, data.sensor_scale[0].item()
    (source, target), demand = data.edge_index.numpy(), data.demand.double().numpy()
    pipe = (data.edge_attr[:, [3, 6]].numpy() == [1, 0]).all(axis=1)
    loose = (data.node_type > 0).numpy()
    loose[source[~pipe]] = True
    source, target = source[pipe], target[pipe]
    conductance = data.conductance.double().numpy()[pipe]
    own = 0.5 * abs(demand) + 0.02 * abs(demand).mean()
    at, guess = data.sensor_mask.numpy(), data.harmonic.double().numpy()

    def misses(state):
        heads, factor = state[:-1], state[-1]
        fall = scale * (heads[source] - heads[target])
        flow = conductance * fall * np.hypot(fall, 0.003) ** (data.flow_power - 1)
        left = np.bincount(target, flow, nodes) - demand * (1 + 0.3 * factor)
        parts = (
            (heads - data.x[:, 0].double().numpy())[at] / (0.01 / scale),
            (heads - guess)[loose] / max(2, 20 / scale),
            (left / own)[~loose],
            [factor],
        )
        return np.concatenate(parts)

    first = np.append(data.start.double().numpy(), 0)
    found = optimize(misses, first, x_scale="jac")
    covariance = np.linalg.inv(found.jac.T @ found.jac)
    return found.x[:-1], np.diag(covariance)[:-1] ** 0.5


@pytest.mark.parametrize("network", ["tiny", "Net1", "Net2", "Net3"])
@pytest.mark.parametrize("order", [None, AddEliminationOrder()])
def test_the_start_is_the_likeliest_state(load, tiny, network, order):
    path = tiny if network == "tiny" else network
    sensors = SampleSensors(0.1, seed=1)
    for data in load(path, num_states=2, sensors=sensors, pre_transform=order):
        heads, deviation = likeliest(data)
        off = abs(data.start.numpy() - heads) / deviation
        assert off.max() < 0.2
        assert off.mean() < 0.05
        # Of 16 random states, variances deviate by a third.
        ratio = ((data.spread.numpy() - 0.003) / deviation) ** 2
        assert ratio.min() > 0.1
        assert ratio.max() < 4
        assert 0.5 < ratio.mean() < 1.6


def assert_known(data):
    assert np.allclose(data.harmonic, interpolate(data), atol=1e-4)
    assert data.x.shape == (data.num_nodes, 9)
    assert torch.equal(data.x[:, 7], data.start)
    assert torch.equal(data.x[:, 8], data.spread.log())
    at = data.sensor_mask
    off = data.sensor_scale * (data.start - data.x[:, 0])
    assert off[at].abs().max() < 0.05  # metres
    pipe = (data.edge_attr[:, 3] == 1) & (data.edge_attr[:, 6] == 0)
    ends = data.edge_index[:, pipe].numpy()
    pipes = coo_array((np.ones(ends.shape[1]), ends), 2 * (data.num_nodes,))
    _, zone = connected_components(pipes)
    assert np.array_equal(data.in_zone, np.isin(zone, zone[at]))


@pytest.mark.parametrize("network", ["tiny", "Net1", "Net3", "ky4", "ky10"])
@pytest.mark.parametrize("order", [None, AddEliminationOrder()])
def test_what_is_known(load, tiny, network, order):
    path = tiny if network == "tiny" else network
    for data in load(path, num_states=2, pre_transform=order):
        assert_known(data)


@pytest.mark.parametrize("network", ["ky2", "Richmond_standard", "KL"])
def test_what_is_known_of_real_networks(shared_data, load, network):
    path = shared_data / "water" / f"{network}.inp.gz"
    if not path.exists():
        pytest.skip(f"there is no {path}")
    for data in load(str(path), num_states=2, sensors=SampleSensors(0.05, seed=0)):
        assert_known(data)


def test_least_squares_are_ahead_of_interpolation(load):
    errors, spreads = [], []
    for data in load("ky4", num_states=10, sensors=SampleSensors(0.05, seed=0)):
        at = data.target_mask & data.in_zone
        heads = (data.y - data.sensor_mean) / data.sensor_scale
        error = (data.start - heads).abs()[at]
        assert error.mean() < 0.2 * (data.harmonic - heads).abs()[at].mean()
        errors.append(error)
        spreads.append(data.spread[at])
    off = (torch.cat(errors) / torch.cat(spreads)).square().mean().sqrt()
    assert 0.1 < off < 1.5  # sensors are exact, and taken to be off by 1 cm


def test_parts_without_sensors(load, tiny):
    """They start at the mean of the sensors, and are as far off as can be."""
    data = load(tiny)[0]
    data.edge_index, data.edge_attr = data.edge_index[:, :0], data.edge_attr[:0]
    data.conductance = data.conductance[:0]
    data = SampleSensors(0.3, seed=0)(data)
    away = ~data.sensor_mask
    assert (data.harmonic[away] == 0).all()
    assert (data.start[away] == 0).all()
    least = max(2, 20 / data.sensor_scale[0].item())
    assert (data.spread[away] > 0.5 * least).all()
    assert torch.equal(data.in_zone, data.sensor_mask)


def test_a_zone_without_sensors(load, tiny):
    """Behind valves, little is known."""
    data = load(tiny)[0]
    ends = [set(x) for x in data.edge_index.T.tolist()]
    valves = torch.tensor([x in ({3, 4}, {2, 5}) for x in ends])  # j4 - j5, j3 - j6
    data.edge_attr[valves, 3:6] = torch.tensor([0.0, 0.0, 1.0])
    data.y[[3, 4, 5, 6]] = torch.nan
    data = SampleSensors(1)(data)
    assert data.in_zone.tolist() == 4 * [True] + 5 * [False]
    assert data.start.isfinite().all()
    assert data.spread[4:7].min() > 10 * data.spread[:3].max()


def test_what_is_known_does_not_touch_the_generator(load, tiny):
    dataset = load(tiny)
    torch.manual_seed(3)
    first = dataset[0].spread
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(1), after)
    assert torch.equal(dataset[0].spread, first)


def test_heads_that_were_measured(load, tiny):
    """All others, NaN here, follow from them."""
    dataset = load(tiny)
    (names,) = dataset.node_names
    assert sorted(names) == sorted(NODES)
    whole = dataset[0]
    at = [names.index(name) for name in ("j2", "j6")]
    data = dataset.graphs[0].clone()
    data.y = torch.full_like(whole.y, torch.nan)
    data.y[at] = whole.y[at]
    data.y[names.index("tank")] = 48.0  # no junction
    data = SampleSensors(1)(data)
    assert data.sensor_mask.nonzero().view(-1).tolist() == sorted(at)
    assert data.target_mask.sum() == 0  # none whose head is known
    assert data.x.isfinite().all()
    heads = data.sensor_mean + data.sensor_scale * data.start
    assert np.allclose(heads[at], whole.y[at], atol=0.05)
    data.y[at] = torch.nan
    with pytest.raises(ValueError, match=r"'data\.y' must have the head of at least"):
        SampleSensors(1)(data)


def test_sensors_are_drawn_anew_or_fixed(load, tiny):
    def drawn(dataset):
        masks = [torch.stack([x.sensor_mask for x in dataset]) for _ in range(2)]
        return masks[0], masks[1]

    fixed = drawn(load(tiny, num_states=10))
    assert torch.equal(*fixed)
    assert len(fixed[0].unique(dim=0)) > 1  # by state
    other = drawn(load(tiny, num_states=10, sensors=SampleSensors(0.3, seed=1)))
    assert not torch.equal(fixed[0], other[0])
    anew = drawn(load(tiny, num_states=10, sensors=0.3))
    assert not torch.equal(*anew)
    assert "0.3, seed=1" in repr(SampleSensors(0.3, seed=1))


def test_at_least_one_sensor(load, tiny):
    assert load(tiny, sensors=0.01)[0].sensor_mask.sum() == 1
    assert load(tiny, sensors=1)[0].target_mask.sum() == 0


def test_files_are_kept(load, tiny, tmp_path, monkeypatch):
    first = load(tiny)
    (path,) = first.processed_paths
    y = first[4].y
    assert Path(path).stat().st_size < 20_000
    monkeypatch.setattr(water_networks, "_read", None)  # not read again
    assert torch.equal(load(tiny)[4].y, y)
    packed = tmp_path / "tiny.inp.gz"
    packed.write_bytes(gzip.compress(TINY.encode()))
    assert load(str(packed)).processed_paths == [path]  # of the same contents
    monkeypatch.undo()
    assert not torch.equal(load(tiny, seed=1)[4].y, y)
    (tmp_path / "tiny.inp").write_text(TINY.replace("j7 14 1", "j7 14 2"))
    assert load(tiny).processed_paths != [path]
    Path(path).unlink()
    assert torch.equal(load(str(packed))[4].y, y)  # a function of the seed


def test_reload(load, tiny):
    (path,) = load(tiny).processed_paths
    before = Path(path).stat().st_mtime_ns
    load(tiny)
    assert Path(path).stat().st_mtime_ns == before
    load(tiny, force_reload=True)
    assert Path(path).stat().st_mtime_ns > before


def test_states_do_not_depend_on_other_networks(load, tiny):
    alone = load(tiny)[2].y
    dataset = load("Net1", tiny, force_reload=True)
    assert [data.name for data in dataset] == ["Net1"] * 5 + ["tiny"] * 5
    assert torch.equal(dataset[7].y, alone)
    assert torch.equal(dataset[5:][2].y, alone)


def test_batches(load, tiny, tmp_path):
    (tmp_path / "nowhere.inp").write_text(TINY.replace("j2 1 0", "j2 0 0"))
    nowhere = str(tmp_path / "nowhere.inp")
    dataset = load(tiny, nowhere, pre_transform=AddEliminationOrder())
    assert dataset[5].pos.isnan().all()
    batch = next(iter(DataLoader(dataset, 10)))
    assert batch.num_graphs == 10
    for key in (
        "x",
        "y",
        "harmonic",
        "start",
        "spread",
        "in_zone",
        "elimination_rank",
        "sensor_mean",
        "target_mask",
    ):
        assert len(batch[key]) == batch.num_nodes
    assert batch.state.tolist() == [0, 1, 2, 3, 4] * 2


def test_a_transform_sees_sensors(load, tiny):
    def count(data):
        data.count = int(data.sensor_mask.sum())
        return data

    assert load(tiny, transform=count)[0].count == 2


def test_states_are_dropped_and_counted(load, tmp_path):
    scarce = tmp_path / "scarce.inp"
    scarce.write_text(TINY.replace("j5 8 3", "j5 8 60"))
    dataset = load(str(scarce), num_states=20)
    assert dataset.dropped["scarce"] > 0
    assert load(str(scarce), num_states=20).dropped == dataset.dropped
    for data in dataset:
        asks = (data.demand > 0) & (data.node_type == 0)
        assert (data.y >= data.elevation)[asks].all()
    scarce.write_text(TINY.replace("j5 8 3", "j5 8 900"))
    with pytest.raises(
        ValueError, match=r"EPANET solves only 0 of 400 states of scarce"
    ):
        load(str(scarce), num_states=20)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"networks": []}, "'networks' must be a list of at least one"),
        ({"networks": "tiny.inp"}, "'networks' must be a list of at least one"),
        ({"num_states": 0}, "'num_states' must be"),
        ({"seed": -1}, "'seed' must be"),
        ({"sensors": 0.0}, r"'share' must be in \(0, 1\]"),
        ({"sensors": 1.5}, r"'share' must be in \(0, 1\]"),
    ],
)
def test_rejects(tmp_path, kwargs, message):
    with pytest.raises(ValueError, match=message):
        WaterNetworks(str(tmp_path), **({"networks": ["Net1"]} | kwargs))


def test_missing_networks(load):
    with pytest.raises(FileNotFoundError, match=r"no file nowhere\.inp: pass the path"):
        load("nowhere.inp")
    with pytest.raises(FileNotFoundError, match=r"no network 'ky99': .*'Net1'"):
        load("ky99")


def test_nothing_is_supplied(load, tmp_path):
    (tmp_path / "dry.inp").write_text(
        "[JUNCTIONS]\n a 0 1\n b 0 1\n[RESERVOIRS]\n r 50\n[OPTIONS]\n Units LPS\n"
        "[PIPES]\n p r a 300 200 100 0 Closed\n q a b 300 200 100 0 Open\n[END]\n"
    )
    with pytest.raises(ValueError, match=r"no open link leads .* junction of dry"):
        load(str(tmp_path / "dry.inp"))


def test_without_wntr(load, tiny, monkeypatch):
    load(tiny)
    monkeypatch.setitem(sys.modules, "wntr", None)
    assert len(load(tiny)) == 5  # processed before
    for paths, kwargs in ((["Net1"], {}), ([tiny], {"seed": 7})):
        with pytest.raises(ImportError, match=r"pip install 'pyg-chimera\[water\]'"):
            load(*paths, **kwargs)


@pytest.mark.parametrize(
    ("name", "nodes", "edges"),
    [("ky2", 815, 2250), ("Balerma", 447, 908), ("L-TOWN", 785, 1818)],
)
def test_real_networks(shared_data, load, name, nodes, edges):
    path = shared_data / "water" / f"{name}.inp.gz"
    if not path.exists():
        pytest.skip(f"there is no {path}")
    dataset = load(str(path), sensors=SampleSensors(0.05, seed=0))
    data = dataset[0]
    assert (data.num_nodes, data.num_edges) == (nodes, edges)
    assert data.sensor_mask.sum() == round(0.05 * int((data.node_type == 0).sum()))
    pressure = (data.y - data.elevation)[data.demand > 0]
    assert pressure.min() >= 0
    assert dataset.dropped[name] < 20


def test_files_are_those_of_a_pre_transform(load, tiny):
    plain = load(tiny)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as of PyG, that files are of another one
        ordered = load(tiny, pre_transform=AddEliminationOrder())
    assert "elimination_rank" in ordered[0]
    assert "elimination_rank" not in plain[0]
    assert "elimination_rank" not in load(tiny)[0]
    assert torch.equal(ordered[4].y, plain[4].y)


class Unnamed:
    def __call__(self, data):
        return data


def halved(data):
    data.conductance = data.conductance / 2
    return data


def doubled(data):
    data.conductance = data.conductance * 2
    return data


def test_functions_that_transform_are_told_apart(load, tiny):
    plain, half, double = (
        load(tiny, pre_transform=x)[0].conductance for x in (None, halved, doubled)
    )
    assert torch.equal(half, plain / 2)
    assert torch.equal(double, plain * 2)

    def local(data):
        return data

    for wrong in (lambda data: data, local, Compose([Unnamed()])):
        with pytest.raises(ValueError, match="must print as what it does"):
            load(tiny, pre_transform=wrong)


def emptied(data):
    return Data(edge_index=data.edge_index, num_nodes=data.num_nodes)


class Chosen(BaseTransform):
    """Some of the nodes, in an order."""

    def __init__(self, *nodes):
        self.nodes = torch.tensor(nodes)

    def forward(self, data):
        return data.subgraph(self.nodes)

    def __repr__(self):
        return f"Chosen{tuple(self.nodes.tolist())}"


def test_heads_and_names_follow_nodes(load, tiny):
    plain, order = load(tiny), list(range(len(load(tiny).node_names[0])))
    for nodes in (order[::-1], order[1:]):
        chosen = load(tiny, pre_transform=Chosen(*nodes))
        assert chosen.node_names[0] == [plain.node_names[0][i] for i in nodes]
        assert torch.equal(chosen[0].y, plain[0].y[nodes])
        assert torch.equal(chosen[0].elevation, plain[0].elevation[nodes])
        assert "n_id" not in chosen[0]

    for wrong in (emptied, VirtualNode()):
        with pytest.raises(ValueError, match="must keep attributes of nodes"):
            load(tiny, pre_transform=wrong)


def test_line_graphs_are_batched_as_such(load, tiny):
    to_line = Compose([DAGDecomposition(), DirectedLineGraph("dag")])
    data = load(tiny, pre_transform=to_line)[0]
    batch = Batch.from_data_list([data, data])
    conv = PLSTMConv(data.num_features, 8, num_dags=2)

    def along(x):
        lines = {"line_edge_index": x.dag_line_edge_index, "batch": x.batch}
        return conv(x.x, x.dag_edge_index, **lines)

    torch.testing.assert_close(along(batch), along(data).repeat(2, 1))
