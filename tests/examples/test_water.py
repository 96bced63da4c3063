import re

import numpy as np
import pytest

from pyg_chimera.datasets import SampleSensors, WaterNetworks

pytest.importorskip("wntr", reason="reads networks: the extra 'water'")
water = pytest.importorskip("water", reason="needs matplotlib: the extra 'examples'")


def load(root, network):
    sensors = SampleSensors(0.05, seed=0)
    return WaterNetworks(str(root), [str(network)], num_states=3, sensors=sensors)


def test_errors_are_in_metres(tmp_path):
    data = load(tmp_path, "Net1")[0]
    exact = (data.y - data.sensor_mean) / data.sensor_scale
    assert water.errors(exact, data).max() < 1e-4
    shifted = exact + 3 / data.sensor_scale
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
