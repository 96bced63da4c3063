from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def long_range_data(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The graphs of the long-range tasks."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import long_range_data

    return long_range_data
