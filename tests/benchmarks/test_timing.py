"""What benchmarks time, and how they write it down."""

import json
import os
import time
from argparse import ArgumentParser, Namespace
from itertools import count
from pathlib import Path

import json_files
import options
import pytest
import timing

RESULTS = Path(options.__file__).parent / "results"


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch):
    """Beside thousands of tests, collecting garbage takes most of a second."""
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)


def test_interleave_takes_turns_and_drops_the_first_round():
    calls, numbers = [], count(10)

    def step(name):
        calls.append(name)
        return timing.Timing(0.0, next(numbers))

    steps = {name: lambda name=name: step(name) for name in "AB"}
    rounds = timing.interleave(steps, repeats=2, budget=10.0)
    assert "".join(calls) == "ABABAB"
    assert [x and x.total for x in rounds["A"]] == [None, 12, 14]
    total = timing.summary(rounds["B"])["total"]
    assert total == {"median": 14, "min": 13, "all": [13, 15]}


def test_short_steps_are_timed_after_themselves():
    calls = []

    def step(name, seconds):
        calls.append(name)
        return timing.Timing(0.0, seconds * len(calls))

    steps = {"long": lambda: step("l", 1.0), "short": lambda: step("s", 1e-3)}
    rounds = timing.interleave(steps, repeats=2, budget=10.0)
    assert "".join(calls) == "ls" + "llss" * 2
    totals = [x and x.total for x in rounds["short"]]
    assert totals == pytest.approx([None, 6e-3, 10e-3])


def test_interleave_times_a_slow_step_once():
    def slow():
        time.sleep(0.02)
        return timing.Timing(0.0, 0.02)

    steps = {"fast": lambda: timing.Timing(0.0, 0.01), "slow": slow}
    rounds = timing.interleave(steps, repeats=3, budget=0.01)
    assert [x is None for x in rounds["slow"]] == [True, False, True, True]
    assert [x is None for x in rounds["fast"]] == [True, False, False, False]
    assert timing.ratio(rounds["slow"], rounds["fast"]) == pytest.approx(2.0)


@pytest.mark.parametrize("budget", [0.0, 1e9])
def test_first_calls_are_not_timed_however_long_they_take(budget):
    """They compile kernels."""
    calls = {"ours": iter([15.2, *[1.3] * 3]), "other": iter([30, *[2.6] * 3])}
    steps = {name: lambda x=x: timing.Timing(0.0, next(x)) for name, x in calls.items()}
    rounds = timing.interleave(steps, 3, budget)
    for name, later in (("ours", 1.3), ("other", 2.6)):
        assert timing.summary(rounds[name])["total"]["all"] == [later] * (
            3 if budget else 1
        )
    assert timing.ratio(rounds["ours"], rounds["other"]) == 0.5


def test_ratio_is_the_median_of_the_ratios_of_rounds():
    a, b = ([None, *(timing.Timing(0, x) for x in y)] for y in ([2, 90, 3], [1, 30, 3]))
    assert timing.ratio(a, b) == 2.0


def test_nothing_is_replaced_unasked(monkeypatch, tmp_path):
    monkeypatch.setattr(options, "REPOSITORY", tmp_path)
    parser = ArgumentParser()
    options.add_output(parser)
    default = tmp_path / "runs" / "some.json"
    assert options.output(parser.parse_args([]), "some") == default
    default.parent.mkdir()
    default.write_text("{}")
    for own in ([], ["--out", str(default)]):
        with pytest.raises(SystemExit, match=r"exists: pass --overwrite, or another"):
            options.output(parser.parse_args(own), "some")
    with pytest.raises(SystemExit, match="exists"):
        options.output(parser.parse_args(["--smoke", "--out", str(default)]), "some")
    assert options.output(parser.parse_args(["--overwrite"]), "some") == default
    smoke = default.with_name("some-smoke.json")
    for _ in range(2):  # of which nothing is kept
        assert options.output(parser.parse_args(["--smoke"]), "some") == smoke
        smoke.write_text("{}")
    other = tmp_path / "other.json"
    assert options.output(parser.parse_args(["--out", str(other)]), "some") == other


def test_half_a_file_does_not_replace_a_whole_one(tmp_path, monkeypatch):
    path = tmp_path / "new" / "results.json"
    json_files.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        json_files.write_json(path, {"a": object()})
    assert list(path.parent.iterdir()) == [path]
    monkeypatch.setattr(os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        json_files.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}


def test_committed_results_are_laid_out():
    for path in RESULTS.glob("*.json"):
        text = path.read_text()
        assert text == json_files.layout(json.loads(text)) + "\n", path.name


def test_rows_are_measured_by_name(tmp_path, capsys):
    args = Namespace(out=tmp_path / "x.json", overwrite=True, smoke=True, only=None)
    rows = [("a", 1), ("b", 2), ("c", None)]

    def call(*only):
        args.only = only or None
        options.measure_rows("sizes", rows, lambda _, x: x and {"x": x}, str, args)
        return json.loads(args.out.read_text())["sizes"]

    assert call() == [{"x": 1}, {"x": 2}]
    assert "[{'x': 1}, {'x': 2}]" in capsys.readouterr().out
    assert call("b") == [{"x": 2}]
    with pytest.raises(
        SystemExit, match=r"unknown rows \['d', 'e'\]; there are \['a', 'b', 'c'\]"
    ):
        call("e", "a", "d")
    assert json.loads(args.out.read_text())["sizes"] == [{"x": 1}]
