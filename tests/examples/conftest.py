import sys
from pathlib import Path

#: The examples are scripts, whose folder Python puts on the path.
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
