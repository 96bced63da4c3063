import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu

    return gpu


def run(gpu, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["benchmarks/gpu.py", *map(str, arguments)])
    gpu.main()


def test_wrong_results_end_it(gpu, monkeypatch):
    args = gpu.parse(["--smoke", "--only", "molecules"])
    call = next(gpu.calls(args))
    wrong = gpu.Measured(
        call, lambda **x: 1.001 * call.function(**x), "cpu", trust=False
    )
    with pytest.raises(SystemExit, match="ours is wrong on two small graphs"):
        gpu.check(call, wrong, "cpu")


def test_without_a_gpu_nothing_is_timed(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no GPU"):
        run(gpu, monkeypatch)
