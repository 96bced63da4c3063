import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_smoke(tmp_path):
    out = tmp_path / "smoke.json"
    command = [sys.executable, BENCHMARKS / "attention.py", "--smoke", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())["attention"]
    assert len(rows) == 3
    for row in rows:
        assert {x["case"] for x in row["errors"]} == set(row["ratios"])
        assert row["ratios"]["numba"] == 1
        assert row["name"] in done.stdout
