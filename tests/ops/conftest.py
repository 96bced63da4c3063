from collections.abc import Callable, Iterator

import pytest
import torch

from pyg_chimera.ops.common import triton_runtime


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Inputs are tiny: threads would only wait. Some tests ask for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def _scans_by_doubling() -> Iterator[None]:
    """Of Triton's interpreter, which otherwise takes seconds."""
    if not (triton_runtime.INTERPRETED and triton_runtime.WITH_TRITON):
        yield
        return
    from triton_watch import scans_by_doubling

    with scans_by_doubling():
        yield


@pytest.fixture
def allow_tf32() -> Iterator[Callable[[], None]]:
    """Allows products of float32 to be coarse, for the rest of a test."""
    yield lambda: torch.set_float32_matmul_precision("high")
    torch.set_float32_matmul_precision("highest")
