import json

import pytest


@pytest.mark.slow
def test_smoke(run_script, tmp_path):
    out = tmp_path / "smoke.json"
    printed = run_script("attention.py", "--smoke", "--out", out)
    rows = json.loads(out.read_text())["attention"]
    assert len(rows) == 3
    for row in rows:
        assert {x["case"] for x in row["errors"]} == set(row["ratios"])
        assert row["ratios"]["numba"] == 1
        assert row["name"] in printed
