import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

#: The examples are scripts, whose folder Python puts on the path.
EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

needed = ("lightning_fabric", "matplotlib", "ogb", "rdkit", "sklearn", "tqdm")
if any(find_spec(name) is None for name in needed):
    collect_ignore_glob = ["test_*.py"]  # the extra "examples" is not installed


@pytest.fixture(scope="session")
def data_root(tmp_path_factory) -> str:
    """A folder for the generated peptides, which the tests share."""
    return str(tmp_path_factory.mktemp("data"))
