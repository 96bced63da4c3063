"""What benchmarks time, and what not."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def timing(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("timing")


class Slow:
    """A step whose first call takes long, as it compiles kernels."""

    def __init__(self, timing, first: float, later: float) -> None:
        self.timing, self.totals, self.calls = timing, (first, later), 0

    def __call__(self):
        self.calls += 1
        total = self.totals[self.calls > 1]
        return self.timing.Timing(total / 2, total)


@pytest.mark.parametrize("budget", [0.0, 1e9])
def test_first_calls_are_not_timed_however_long_they_take(timing, budget):
    steps = {"ours": Slow(timing, 15.2, 1.3), "other": Slow(timing, 30, 2.6)}
    rounds = timing.interleave(steps, 3, budget)
    ours, other = (timing.summary(rounds[name])["total"] for name in steps)
    assert set(ours["all"]) == {1.3}
    assert set(other["all"]) == {2.6}
    assert len(ours["all"]) == (3 if budget else 1)
    assert steps["ours"].calls == (4 if budget else 2)
    assert timing.ratio(rounds["ours"], rounds["other"]) == 0.5
