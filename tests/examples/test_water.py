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


def run(capsys, root, *argv):
    """What it says, and the errors in it."""
    argv = [*argv, "--root", str(root / "states"), "--out", str(root / "map.png")]
    water.main(argv)
    said = capsys.readouterr().out
    found = dict(re.findall(r"^(\w+, [\w ]+): (\S+) m$", said, re.MULTILINE))
    assert (root / "map.png").stat().st_size > 10_000
    return said, {name: float(value) for name, value in found.items()}


def test_it_learns(tmp_path, capsys):
    argv = ["--train", "Net1", "--test", "Net1", "--epochs", "2"]
    said, error = run(capsys, tmp_path, *argv)
    names = "mean", "interpolation", "least squares", "model"
    assert list(error) == [f"Net1, {name}" for name in names]
    assert said.count("epoch") == 2
    assert error["Net1, model"] < 0.7 * error["Net1, least squares"]  # 1.1 and 3.2
    assert water.BEHIND not in said


def test_it_says_where_least_squares_are_ahead(tmp_path, capsys):
    argv = ["--train", "Net1", "--test", "Net2", "Net3", "--smoke"]
    said, error = run(capsys, tmp_path, *argv)
    assert len(error) == 8
    for network in ("Net2", "Net3"):
        assert error[f"{network}, model"] > error[f"{network}, least squares"]
    assert said.count(water.BEHIND) == 2


def test_it_needs_no_model(tmp_path, capsys):
    argv = ["--test", "Net1", "--smoke", "--epochs"]
    _, error = run(capsys, tmp_path, *argv, "0")
    assert list(error) == ["Net1, mean", "Net1, interpolation", "Net1, least squares"]
    with pytest.raises(SystemExit):
        water.main([*argv, "-1"])


def test_a_missing_file_is_named(tmp_path):
    argv = ["--train", "nowhere.inp", "--root", str(tmp_path)]
    with pytest.raises(FileNotFoundError, match=r"no file nowhere\.inp"):
        water.main(argv)
