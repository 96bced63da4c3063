import time
from itertools import count
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import timing

    return timing


def test_interleave_takes_turns_and_drops_the_first_round(timing):
    calls, numbers = [], count()

    def step(name):
        calls.append(name)
        return timing.Timing(0.0, next(numbers))

    steps = {name: lambda name=name: step(name) for name in "AB"}
    rounds = timing.interleave(steps, repeats=2, budget=10.0)

    assert "".join(calls) == "ABABAB"
    assert [x and x.total for x in rounds["A"]] == [None, 2, 4]
    assert timing.summary(rounds["B"])["total"] == {
        "median": 4,
        "min": 3,
        "all": [3, 5],
    }


def test_interleave_times_a_slow_step_once(timing):
    def slow():
        time.sleep(0.02)
        return timing.Timing(0.0, 0.02)

    steps = {"fast": lambda: timing.Timing(0.0, 0.01), "slow": slow}
    rounds = timing.interleave(steps, repeats=3, budget=0.01)

    assert [x is None for x in rounds["slow"]] == [True, False, True, True]
    assert [x is None for x in rounds["fast"]] == [True, False, False, False]
    # The first call is not timed, however long it takes.
    assert timing.ratio(rounds["slow"], rounds["fast"]) == pytest.approx(2.0)


def test_ratio_is_the_median_of_the_ratios_of_rounds(timing):
    a, b = ([None, *(timing.Timing(0, x) for x in y)] for y in ([2, 90, 3], [1, 30, 3]))

    assert timing.ratio(a, b) == 2.0


def test_wrong_results_are_not_timed(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import mixing

    right = mixing.CASES["auto"]

    def wrong():
        conv = right.make()
        conv.lin_out.register_forward_hook(lambda *args: 1.001 * args[-1])
        return conv

    monkeypatch.setitem(mixing.CASES, "auto", right._replace(make=wrong))
    with pytest.raises(SystemExit, match="auto is wrong on planar graph, 9 nodes: its"):
        mixing.check(mixing.planar(9), ["auto"], "cpu")
