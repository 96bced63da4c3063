import re

import numpy as np
import pytest
from scipy.sparse import coo_array, diags_array
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import spsolve

from pyg_chimera.datasets import SampleSensors, WaterNetworks

pytest.importorskip("wntr", reason="reads networks: the extra 'water'")
water = pytest.importorskip("water", reason="needs matplotlib: the extra 'examples'")


def by_scipy(data):
    """The Laplacian system of the nodes without sensors, in float64.

    Parts that have no sensor at all get the mean of the sensors.
    """
    source, target = data.edge_index.numpy()
    shape = 2 * (data.num_nodes,)
    weight = coo_array((data.conductance.double(), (target, source)), shape).tocsr()
    laplacian = (diags_array(weight.sum(axis=1)) - weight).tocsr()
    at = data.sensor_mask.numpy()
    _, part = connected_components(weight)
    free = ~at & np.isin(part, part[at])
    heads = data.sensor_mean.double().numpy().copy()
    heads[at] = data.y[data.sensor_mask].double().numpy()
    right = -laplacian[free][:, at] @ heads[at]
    heads[free] = spsolve(laplacian[free][:, free].tocsc(), right)
    return heads


def interpolated(data):
    heads = water.harmonic_interpolation(data)[:, 0]
    return data.sensor_mean + data.sensor_scale * heads


def load(root, network):
    sensors = SampleSensors(0.05, seed=0)
    return WaterNetworks(str(root), [str(network)], num_states=3, sensors=sensors)


@pytest.mark.parametrize("name", ["Net1", "Net3", "ky4"])
def test_harmonic_interpolation(tmp_path, name):
    for data in load(tmp_path, name):
        found = interpolated(data)
        assert np.allclose(found, by_scipy(data), atol=1e-3)
        assert np.allclose(found[data.sensor_mask], data.y[data.sensor_mask], atol=1e-3)


@pytest.mark.parametrize("name", ["ky2", "Richmond_standard", "KL"])
def test_harmonic_interpolation_of_real_networks(shared_data, tmp_path, name):
    path = shared_data / "water" / f"{name}.inp.gz"
    if not path.exists():
        pytest.skip(f"there is no {path}")
    for data in load(tmp_path, path):
        assert np.allclose(interpolated(data), by_scipy(data), atol=1e-3)


def test_errors_are_in_metres(tmp_path):
    data = load(tmp_path, "Net1")[0]
    exact = ((data.y - data.sensor_mean) / data.sensor_scale).view(-1, 1)
    assert water.errors(exact, data).max() < 1e-4
    shifted = exact + 3 / data.sensor_scale.view(-1, 1)
    assert np.allclose(water.errors(shifted, data), 3, atol=1e-4)
    assert len(water.errors(exact, data)) == data.target_mask.sum()


def test_it_learns_and_says_how_well(tmp_path, capsys):
    argv = ["--train", "Net1", "--test", "Net1", "Net2", "--epochs", "6"]
    argv += ["--root", str(tmp_path / "states"), "--out", str(tmp_path / "map.png")]
    water.main(argv)
    said = capsys.readouterr().out
    first, *_, last = map(float, re.findall(r"epoch \d+: last error (\S+) m", said))
    assert last < first
    found = dict(re.findall(r"^(\w+, \w+): (\S+) m$", said, re.MULTILINE))
    assert list(found) == [
        f"{network}, {name}"
        for network in ("Net1", "Net2")
        for name in ("mean", "harmonic", "model")
    ]
    error = {name: float(value) for name, value in found.items()}
    assert error["Net1, model"] < error["Net1, mean"]
    behind = [error[f"{x}, model"] > error[f"{x}, harmonic"] for x in ("Net1", "Net2")]
    assert said.count("Interpolation, which learns nothing, is ahead") == sum(behind)
    assert (tmp_path / "map.png").stat().st_size > 10_000


def test_a_missing_file_is_named(tmp_path):
    argv = ["--train", "nowhere.inp", "--root", str(tmp_path)]
    with pytest.raises(FileNotFoundError, match=r"no file nowhere\.inp"):
        water.main(argv)
