import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_smoke(tmp_path):
    out = tmp_path / "smoke.json"
    command = [sys.executable, BENCHMARKS / "orders.py", "--smoke", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["orders"]
    assert [row["name"] for row in rows] == ["molecules", "planar-480", "mesh-8"]
    for row in rows:
        ours, theirs = (row["methods"][x] for x in ("minimum_fill", "mmd"))
        assert 0 < ours["fill"] < 1.03 * theirs["fill"]
        assert ours["seconds"] > 0
        assert row["name"] in done.stdout
