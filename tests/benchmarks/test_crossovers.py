from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def crossovers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import crossovers
    import timing

    # Beside thousands of tests, collecting garbage takes most of a second.
    monkeypatch.setattr(timing.gc, "collect", lambda: 0)
    return crossovers


def rows(*times):
    return [{"size": x, "small": y, "large": z} for x, y, z in times]


def test_times_between_sizes_are_powers_of_them(crossovers):
    """x squared and 50 x."""
    sizes = (10, 1000, 20, 100)
    assert crossovers.crossover(rows(*((x, x**2, 50 * x) for x in sizes))) == (
        pytest.approx(50)
    )


def test_there_may_be_no_crossover(crossovers):
    assert crossovers.crossover([]) is None
    assert crossovers.crossover(rows((1, 1, 2), (2, 1, 2))) is None
    assert crossovers.crossover(rows((1, 2, 1), (2, 2, 1))) is None
    assert crossovers.crossover(rows((1, 1, 2), (2, 2, 1), (3, 1, 2))) is None
    unfinished = [*rows((1, 1, 2)), {"size": 2, "small": 1, "large problem": "full"}]
    assert crossovers.crossover(unfinished) is None


def test_both_algorithms_of_a_case_run(crossovers):
    for case in crossovers.cases(smoke=True, device="cpu"):
        row = crossovers.measure(case, "cpu", 1)
        assert row["small"] > 0
        assert row["large"] > 0
        assert row["size"] == case.size


def test_what_fails_is_told(crossovers):
    case = next(iter(crossovers.cases(smoke=True, device="cpu")))
    options = ({"solver": "dense", "backend": "numba"}, {"solver": "sparse"})
    row = crossovers.measure(case._replace(options=options), "cpu", 1)
    assert "no numba backend" in row["small problem"]
    assert row["large"] > 0
