"""Tiny calls, timed by a clock of the test's own."""

import json
import warnings

import numpy as np
import pytest
import torch

from pyg_chimera import calibrate
from pyg_chimera.ops import dag_scan, explain
from pyg_chimera.ops.common import coefficients, predicted_time
from pyg_chimera.ops.common.coefficients import COMMITTED, STEPS, calibration
from pyg_chimera.ops.recurrence import choose


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder, which is not ignored."""
    monkeypatch.delenv(coefficients.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    calibration.cache_clear()
    yield tmp_path / "pyg_chimera"
    calibration.cache_clear()


@pytest.fixture
def few_calls(monkeypatch):
    """Of which each takes as long as this machine would if steps took other times."""
    few = [
        ("dag_scan", {**calibrate._mix(calibrate._paths(2, size), 2, 3, 4), "form": x})
        for size in (5, 40, 90)
        for x in ("state", "chunk")
    ]
    monkeypatch.setattr(calibrate, "_calls", lambda: iter(few))
    monkeypatch.setattr(calibrate, "_measured", lambda call, _: seconds(call))


def seconds(call):
    """Everything takes three times as long as committed."""
    return sum(3e-9 * COMMITTED[x] * y for x, y in calibrate._counted(call).items())


def path(size=200):
    x, node = torch.randn(size, 2, 8), torch.arange(size)
    return x, x, x, torch.stack([node[:-1], node[1:]]), torch.rand(size - 1, 2)


def test_it_measures_fits_and_keeps(folder, few_calls, capsys):
    before = explain("dag_scan", *path()).cost
    assert calibrate.main([]) == 0
    said = capsys.readouterr().out
    assert "6 calls; predictions are off by a factor of" in said
    assert said.count("1.00 (median), 1.00") == 2
    assert "scan: state and lane" in said
    for name, time in calibration().items():
        assert time == pytest.approx(3 * COMMITTED[name], rel=1e-6)
    after = explain("dag_scan", *path()).cost
    assert after.steps == before.steps
    expected = sum(3e-9 * COMMITTED[x] * y for x, y in (("call", 1), *after.steps))
    assert after.seconds == pytest.approx(expected, rel=1e-6)  # not scaled once more
    assert calibrate.main(["--show"]) == 0
    assert "chunk: path" in capsys.readouterr().out


def test_it_overwrites_only_if_it_is_told_to(folder, few_calls, capsys):
    assert calibrate.main(["--show"]) == 1
    assert "nothing is kept" in capsys.readouterr().out
    coefficients.keep(dict(COMMITTED))
    written = (folder / "calibration.json").read_text()
    assert calibrate.main([]) == 2
    assert "--overwrite" in capsys.readouterr().out
    assert (folder / "calibration.json").read_text() == written
    assert calibrate.main(["--overwrite"]) == 0
    assert calibration() != COMMITTED
    assert [x.name for x in folder.iterdir()] == ["calibration.json"]


def test_an_interrupt_changes_nothing(folder, few_calls, monkeypatch, capsys):
    def interrupted(call, clock):
        raise KeyboardInterrupt

    threads = torch.get_num_threads()
    monkeypatch.setattr(calibrate, "_measured", interrupted)
    assert calibrate.main([]) == 130
    assert "nothing has changed" in capsys.readouterr().out
    assert not folder.exists()
    assert torch.get_num_threads() == threads


def test_a_folder_that_cannot_be_written_to(folder, few_calls, capsys):
    folder.write_text("not a folder")
    assert calibrate.main([]) == 1
    assert "not kept" in capsys.readouterr().out


BROKEN = {
    "not JSON": ("{", "is not JSON"),
    "a list": ("[]", "is not a dictionary"),
    "another machine": ({"abacus": dict(COMMITTED)}, "is of abacus, not of"),
    "another version": ({coefficients.machine(): {"call": 1.0}}, "of another version"),
    "words": ({coefficients.machine(): dict.fromkeys(STEPS, "1")}, "another version"),
    "NaN": ({coefficients.machine(): dict.fromkeys(STEPS, float("nan"))}, "another"),
    "negative": ({coefficients.machine(): dict.fromkeys(STEPS, -1.0)}, "another"),
}


@pytest.mark.parametrize("key", BROKEN)
def test_files_of_others_are_ignored(key, folder):
    content, why = BROKEN[key]
    folder.mkdir()
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "calibration.json").write_text(text)
    with pytest.warns(UserWarning, match=why):
        assert coefficients.nanoseconds() == COMMITTED
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it warns once
        assert coefficients.nanoseconds() == COMMITTED


def test_other_machines_are_kept(folder):
    folder.mkdir()
    (folder / "calibration.json").write_text(json.dumps({"abacus": {"call": 1.0}}))
    coefficients.keep(dict(COMMITTED))
    assert calibration() == COMMITTED
    kept = json.loads((folder / "calibration.json").read_text())
    assert kept["abacus"] == {"call": 1.0}


def test_it_can_be_switched_off(folder, monkeypatch):
    coefficients.keep({**COMMITTED, "call": 7.0})
    assert coefficients.nanoseconds()["call"] == 7
    monkeypatch.setenv(coefficients.VARIABLE, "0")
    calibration.cache_clear()
    assert coefficients.nanoseconds() == COMMITTED


def test_choices_change_and_results_do_not(folder, monkeypatch):
    monkeypatch.setattr(predicted_time, "_slowness", lambda _: 1.0)
    inputs, found = path(), {}
    for kind in ("chunk", "scan"):
        slow = {x: 1e3 * y for x, y in COMMITTED.items() if x.startswith(kind)}
        coefficients.keep({**COMMITTED, **slow})
        found[explain("dag_scan", *inputs).form] = dag_scan(*inputs)
    assert found.keys() == {"state", "chunk"}
    torch.testing.assert_close(found["state"], found["chunk"])


def test_a_call_is_repeated_and_its_first_time_does_not_count():
    call = ("dag_scan", calibrate._mix(calibrate._paths(1, 3), 1, 2, 2))
    times = iter([0.0, 8.0, 8.0, 9.0, 9.0, 12.0, 12.0, 14.0])
    assert calibrate._measured(call, lambda: next(times)) == 2


def test_what_calls_do_not_determine_is_scaled_with_the_rest():
    parts = np.array([[1.0, 2.0, 0.0], [3.0, 1.0, 0.0]])
    ratios = calibrate._fitted(parts, 2 * parts.sum(1))
    assert ratios == pytest.approx([2, 2, 2])
    parts = np.eye(3)[:2].repeat(20, axis=0)
    ratios = calibrate._fitted(parts, np.array([1.0, 4.0]).repeat(20))
    assert (ratios > 0).all()
    assert ratios[:2] == pytest.approx([1, 4], rel=0.1)


@pytest.mark.parametrize("vector", [16, 32, 64])
def test_calls_take_all_steps_twice_or_more(vector, monkeypatch):
    """On processors with vectors of so many bytes."""
    for module in (calibrate, choose):
        monkeypatch.setattr(
            module, "vector_lanes", lambda x: (vector // x.itemsize, 4 * vector)
        )
    counted = {name: 0 for name in STEPS}
    algorithms = set()
    for call in calibrate._calls():
        name, inputs = call
        for step, number in calibrate._counted(call).items():
            counted[step] += number > 0
        algorithms.add((name, inputs.get("solver"), inputs.get("form")))
    assert min(counted.values()) >= 2, counted
    assert len(algorithms) == 12
