import os
import signal
import sys
from pathlib import Path

import pytest
import torch

#: Where real files lie when they are at hand: beside the checkout, or as told.
SHARED = Path(
    os.environ.get("PYG_CHIMERA_SHARED", Path(__file__).parents[2] / "shared")
)

# Where `host_waits` finds how to look into operators.
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

# Choices are tested as they are without what `pyg_chimera.calibrate` has kept.
os.environ["PYG_CHIMERA_CALIBRATION"] = "0"

#: Words in names of tests of what PyTorch 2.5 cannot do (see docs/installation.md).
NEWER = ("compile", "export", "jacobians", "gradients_per_sample", "onnx", "portable")
NEWER += ("and_the_rest_of_a", "do_not_lose_sizes", "a_backend_of_ones_own")


@pytest.hookimpl(trylast=True)  # behind those that deselect some
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Each process begins with kernels of its own, or all would compile the same ones.

    The tests are dealt out in as many runs, which are of one length.
    """
    if torch.__version__.startswith("2.5."):
        for item in items:
            if any(word in item.name for word in NEWER):
                item.add_marker(pytest.mark.skip(reason="needs a newer PyTorch"))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    compiling = "ops/test_operators.py::test_outputs_and_gradients["
    first = [x for x in items if compiling in x.nodeid and workers > 1]
    rest = [x for x in items if compiling not in x.nodeid or workers == 1]
    ordered: list[pytest.Item] = []
    for i in range(workers):
        ordered += first[len(first) * i // workers : len(first) * (i + 1) // workers]
        more = max(0, len(items) * (i + 1) // workers - len(ordered))
        ordered, rest = ordered + rest[:more], rest[more:]
    items[:] = ordered + rest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with the real data sets; the test is skipped without it."""
    path = SHARED / "data"
    if not path.is_dir():
        pytest.skip(f"real data not found under {path} (set PYG_CHIMERA_SHARED)")
    return path


@pytest.fixture(autouse=True, scope="session")
def _heed_ctrl_c() -> None:
    """Shells have what they run in the background ignore it, and what that starts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    if "compile" in request.node.name:  # else earlier tests count as recompilations
        torch.compiler.reset()
