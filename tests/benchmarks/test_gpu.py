import math
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


def test_predictions_by_hand(gpu):
    """One graph of 40 nodes is a matrix of 64 x 64 for each of 2 heads."""
    kernels = {x.name: x for x in gpu.mask_form([40], 10, gpu.Heads(2, 3, 5))}
    matrix = 2 * 64 * 64 * 4
    assert kernels["_adjoint"].bytes == 3 * matrix
    assert kernels["_adjoint"].operations == 3 * 2 * 2 * 64**3
    assert kernels["_general_inverse"].steps == 64
    assert kernels["_masked_product, y"].bytes == matrix + 4 * 40 * 2 * 16
    assert sum(x.launches for x in kernels.values()) == 10

    limits = gpu.Limits("one", 1e12, 1e14, 10, reached=(0.5, 0.5))
    kernel = gpu.Kernel("some", 2, 1e6, 1e6, steps=100, programs=25)
    want = 2 * 5e-6 + 2e-6 + 2 * 100 * 0.3e-6  # 25 programs take two waves
    assert math.isclose(kernel.time(limits), want)


def test_the_page_says_what_is_predicted(gpu):
    page = ROOT / "docs/notes/gpu_kernels.md"
    assert gpu.predicted().strip() in page.read_text(encoding="utf-8")
