import json

import pytest


@pytest.mark.slow
def test_smoke(run_script, tmp_path):
    out = tmp_path / "smoke.json"
    printed = run_script("orders.py", "--smoke", "--out", out)
    rows = json.loads(out.read_text())["orders"]
    assert [row["name"] for row in rows] == ["molecules", "planar-480", "mesh-8"]
    for row in rows:
        ours, theirs = (row["methods"][x] for x in ("minimum_fill", "mmd"))
        assert 0 < ours["fill"] < 1.03 * theirs["fill"]
        assert ours["seconds"] > 0
        assert row["name"] in printed
