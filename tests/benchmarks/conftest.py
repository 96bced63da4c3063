import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def long_range_data(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The graphs of the long-range tasks."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    import long_range_data

    return long_range_data


@pytest.fixture
def run_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs a benchmark as a script and returns what it prints.

    In this process, as importing PyTorch anew takes longer than most of them; `make
    smoke` starts them from a shell.
    """

    def run(name: str, *arguments: object) -> str:
        script = str(BENCHMARKS / name)
        monkeypatch.syspath_prepend(BENCHMARKS)
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        threads = torch.get_num_threads()
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            torch.set_num_threads(threads)
        return capsys.readouterr().out

    return run
