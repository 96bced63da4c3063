import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

for module in ("lightning_fabric", "matplotlib", "ogb", "rdkit", "sklearn"):
    pytest.importorskip(module)


@pytest.fixture(scope="session")
def examples() -> Path:
    """The folder of the examples."""
    return EXAMPLES


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Small models: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the generated peptides of all tests lie."""
    return tmp_path_factory.mktemp("data")
