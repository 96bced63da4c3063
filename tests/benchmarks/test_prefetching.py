import json
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
def test_smoke(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import prefetching

    out, threads = tmp_path / "smoke.json", torch.get_num_threads()
    arguments = ["prefetching.py", "--smoke", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", arguments)
    prefetching.main()
    torch.set_num_threads(threads)

    rows = {row["layer"]: row for row in json.loads(out.read_text())["layers"]}
    assert set(rows) == {"ChimeraConv", "PLSTMConv", "PLSTMConv, mode D"}
    for row in rows.values():
        assert all(row[x] > 0 for x in ("in the step", "by workers", "transform"))
