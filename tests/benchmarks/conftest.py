import sys
from importlib.util import find_spec
from pathlib import Path

#: Scripts, whose folders Python puts on the path; behind that of tests, which has a
#: module of layers as well.
ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / name) for name in ("benchmarks/comparisons", "examples")]

needed = ("matplotlib", "ogb", "pytorch_lightning", "rdkit", "sklearn", "torchmetrics")
if any(find_spec(name) is None for name in needed):
    # the extra "examples" is not installed
    collect_ignore_glob = ["test_*.py", "comparisons/test_*.py"]
