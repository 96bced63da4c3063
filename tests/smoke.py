"""Every example and benchmark for a few seconds, as from a shell: `make smoke`.

`make test` does not collect this file: it tests what the scripts are made of.
"""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def shell(tmp_path):
    """Runs a script in a folder of its own and returns what it prints."""

    def run(script: str, *arguments: object) -> str:
        command = [sys.executable, str(ROOT / script), "--smoke", *map(str, arguments)]
        done = subprocess.run(
            command,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run


@pytest.fixture
def benchmark(shell, tmp_path):
    """Runs a benchmark and returns its results, and what it prints."""

    def run(name: str, *arguments: object) -> tuple[dict, str]:
        out = tmp_path / "smoke.json"
        printed = shell(f"benchmarks/{name}.py", "--out", out, *arguments)
        return json.loads(out.read_text()), printed

    return run


def is_picture(path: Path) -> bool:
    return path.stat().st_size > 10_000


@pytest.mark.parametrize(
    "name",
    [
        "arrow_pointing",
        "tudataset",
        "graph_mamba",
        "node_classification",
        "image_grid",
        "masked_lm",
        "sentences",
        "recall",
        "syntax_trees",
        "water_networks",
        "meshes",
        "power_grids",
        "rna",
        "distances",
        "roads",
    ],
)
def test_comparison(shell, tmp_path, name):
    shell(f"benchmarks/comparisons/{name}.py")
    assert list(tmp_path.glob("runs/**/results.json"))


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("molecules", r"Test average precision .*: 0\.\d+"),
        ("images", r"epoch 1: .* test accuracy [01]\.\d+"),
        ("text", r"Held-out text: \d\.\d+ bits per byte\ndef "),
        ("trees", r"epoch 1: .* test accuracy [01]\.\d+"),
        ("large_graph", r"Test accuracy [01]\.\d+; of the most frequent class"),
        ("with_lightning", r"Test accuracy .*: [01]\.\d+"),
    ],
)
def test_example(shell, tmp_path, name, printed):
    assert re.search(printed, shell(f"examples/{name}.py"))
    assert is_picture(tmp_path / f"{name}.png")


def test_lrgb(shell, tmp_path):
    shell("examples/lrgb.py")
    assert list(tmp_path.glob("runs/**/results.json"))


def test_city_roads(shell, tmp_path):
    shell("examples/city_roads.py", "--out", "map.png")
    assert is_picture(tmp_path / "map.png")


def test_water(shell, tmp_path):
    pytest.importorskip("wntr")
    for epochs, more in ((1, ["model"]), (0, [])):
        printed = shell("examples/water.py", "--epochs", epochs)
        found = re.findall(r"^ky10, ([\w ]+): \d+\.\d+ m$", printed, re.MULTILINE)
        assert found == ["mean", "interpolation", "least squares", *more]
        assert printed.count("epoch") == epochs
        assert is_picture(tmp_path / "water.png")


def test_gridfm_scenarios(shell, tmp_path):
    printed = shell("benchmarks/comparisons/gridfm_scenarios.py", "--out", "out")
    assert printed.count("\nDC start") == 1
    lines = (tmp_path / "out/random/raw/pf_node.csv").read_text().splitlines()
    assert len(lines) == 1 + 2 * 100


def test_heterogeneous(shell, tmp_path):
    printed = shell("examples/heterogeneous.py")
    for name in ("sage", "deep-sage", "hgt", "chimera"):
        assert re.search(rf"^{name} .* [01]\.\d+", printed, re.MULTILINE), printed
    assert "by their steps by rail to the nearest depot" in printed
    assert is_picture(tmp_path / "heterogeneous.png")


def test_temporal_links(shell, tmp_path):
    for argv in ((), ("--task", "ratings")):
        printed = shell("examples/temporal_links.py", *argv)
        assert re.search(r"best: val \S+, test \S+ in temporal_links.png", printed)
    assert is_picture(tmp_path / "temporal_links.png")


def test_temporal(benchmark):
    results, printed = benchmark("temporal")
    rows = results["temporal"]
    assert len(rows) == 6
    for row in rows:
        kinds = ("random", "historical", "inductive")
        scores = kinds if row["task"] == "messages" else ("val", "test")
        assert all(math.isfinite(row[name]) for name in scores)
        assert f"| {row['task']} | {row['arm']} |" in printed


def test_amplitudes(benchmark):
    arms = ("default", "plain", "gcn-8")
    results, printed = benchmark("amplitudes", "--only", "poisson", "--arms", *arms)
    assert [row["arm"] for row in results["runs"]] == [*arms]
    for row in results["runs"]:
        assert math.isfinite(row["seen"] + row["unseen"])
        assert str(row) in printed


def test_decisions(benchmark):
    results, printed = benchmark("decisions")
    rows = results["decisions"]
    assert len(rows) == 10
    for row in rows:
        assert max(row["errors"].values()) < 1e-5
        assert row["times"].keys() == row["ratios"].keys() == row["errors"].keys()
        assert min(row["ratios"].values()) > 0
        assert f"| {row['name']} | " in printed


def test_orders(benchmark):
    results, printed = benchmark("orders")
    rows = results["orders"]
    assert [row["name"] for row in rows] == ["molecules", "planar-480", "mesh-8"]
    for row in rows:
        ours, theirs = (row["methods"][x] for x in ("minimum_fill", "mmd"))
        assert 0 < ours["fill"] < 1.03 * theirs["fill"]
        assert ours["seconds"] > 0
        assert row["name"] in printed


def test_operations(benchmark):
    results, printed = benchmark("operations")
    assert all(number > 0 for number in results["operations"].values())
    assert "GPSConv" in printed


def test_solvers(benchmark):
    results, printed = benchmark("solvers")
    rows = results["solvers"]
    assert len(rows) == 4
    for row in rows:
        assert row["error"] < 1e-9
        assert row["name"] in printed
        assert row["solve"]["ratio"] == 1
        assert row["solve, new graph"]["total"] > row["solve, new graph"]["forward"]


def test_predictions(benchmark):
    results, printed = benchmark("predictions")
    rows = results["predictions"]
    assert len(rows) == 7  # of all layers but GraphMambaConv, which has no costs
    for row in rows:
        assert row["name"] in printed
        assert row["predicted"].keys() == {"seconds", "mebibytes"}
        assert min(*row["predicted"].values(), row["measured"]["seconds"]) > 0


def test_learning(benchmark, tmp_path):
    results, _ = benchmark("learning")
    runs = results["runs"]
    assert len(runs) == len({(x["task"], x["mixer"]) for x in runs}) == 56
    assert len({x["task"] for x in runs}) == 8
    assert all(x["steps"] > 0 and 0 <= x["score"] <= 1 for x in runs)
    assert is_picture(tmp_path / "smoke.png")


def test_crossovers(benchmark):
    results, printed = benchmark("crossovers")
    assert len(results["times"]) == 8
    assert all("small" in row and "large" in row for row in results["times"])
    assert len(results["crossovers"]) == 4
    assert "chunk: nodes" in printed


def test_gpu(benchmark):
    """Every call is compared, and nothing is said about times."""
    results, _ = benchmark("gpu")
    parts = {"molecules", "dags", "grids", "paths", "sequences"}
    assert {row["part"] for row in results["calls"]} == parts
    assert len(results["calls"]) == 8
    for row in results["calls"]:
        assert row["errors"]["worst"] <= 1e-5
        assert "output" in row["errors"]["errors"]
        assert "times" not in row


def test_prefetching(benchmark):
    results, _ = benchmark("prefetching")
    rows = {row["layer"]: row for row in results["layers"]}
    assert set(rows) == {"ChimeraConv", "PLSTMConv", "PLSTMConv, mode D"}
    for row in rows.values():
        assert all(row[x] > 0 for x in ("in the step", "by workers", "transform"))


def test_epochs(benchmark):
    results, printed = benchmark("epochs")
    rows = results["epochs"]
    assert len(rows) == 14
    for row in rows:
        assert row["step"] > 0
        assert sum(row["shares"].values()) == pytest.approx(1)
        assert min(row["shares"].values()) >= 0
        assert f"| {row['task']} | {row['mixer']} |" in printed


def test_layers(benchmark):
    results, printed = benchmark("layers")
    rows = results["layers"]
    assert len(rows) == 8
    for row in rows:
        assert len(row["times"]) == 2
        assert len(row["errors"]) == (2 if row["nodes"] <= 2048 else 0)
        assert row["ratio"] > 0
        assert f"| {row['name']} | `" in printed


def test_commands(shell):
    """Of the scripts that are listed, wherever they have moved, none is missing."""
    printed = shell("benchmarks/commands.py")
    scripts = set(re.findall(r"(?:examples|benchmarks)/[\w/]+\.py", printed))
    assert len(scripts) > 15
    assert [x for x in sorted(scripts) if not (ROOT / x).exists()] == []


def test_none_is_forgotten():
    """A script is what has a command line."""
    text = Path(__file__).read_text()
    for folder in ("examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            if '__name__ == "__main__"' in path.read_text():
                assert f'"{path.stem}"' in text or f"/{path.name}" in text, path
