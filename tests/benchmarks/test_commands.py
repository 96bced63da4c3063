import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_scripts_exist():
    """Of all commands that are listed, wherever scripts have moved."""
    listed = subprocess.run(
        [sys.executable, ROOT / "benchmarks/commands.py"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    scripts = set(re.findall(r"(?:examples|benchmarks)/[\w/]+\.py", listed))
    assert len(scripts) > 15
    assert [x for x in sorted(scripts) if not (ROOT / x).exists()] == []
