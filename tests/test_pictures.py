"""The pictures of the documentation, and the script that makes them."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

DOCS = Path(__file__).parents[1] / "docs"
PAGES = "".join(
    (DOCS / name).read_text(encoding="utf-8")
    for name in (
        "examples.md",
        "index.md",
        "meshes.md",
        "pictures.md",
        "power.md",
        "results.md",
        "water.md",
    )
)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    for needed in ("matplotlib", "rdkit"):
        pytest.importorskip(needed)
    spec = importlib.util.spec_from_file_location(
        "make_pictures", DOCS / "make_pictures.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_small_and_shown():
    files = sorted((DOCS / "pictures").iterdir())
    assert len(files) == 12
    for path in files:
        assert path.suffix == (".svg" if path.stem == "recurrence" else ".png")
        assert path.stat().st_size < 100_000
        assert f"](pictures/{path.name})" in PAGES


@pytest.mark.slow
def test_script_makes_them(script, tmp_path, capsys):
    script.main(["--steps", "1", "--out", str(tmp_path)])
    made = {path.name for path in tmp_path.iterdir()}
    there = {path.name for path in (DOCS / "pictures").iterdir()}
    examples = {f"{name}.png" for name in ("city_roads", "water")}  # make their own
    assert made == there - examples
    assert capsys.readouterr().out.count("of the answers are right") == 4


def test_grid_has_four_dags(script):
    dags = script.four_dags()
    edges = [set(map(tuple, dag.t().tolist())) for dag in dags]
    assert all(len(x) == 2 * script.SIDE * (script.SIDE - 1) for x in edges)
    right_down, left_down, right_up, left_up = edges
    assert (0, 1) in right_down & right_up
    assert (0, script.SIDE) in right_down & left_down
    assert right_down == {(target, source) for source, target in left_up}
    assert left_down == {(target, source) for source, target in right_up}


def test_planar_graph(script):
    """No point is within the circle around an edge."""
    pos, edge_index = script.planar(40)
    row, col = edge_index
    assert 40 < edge_index.size(1) // 2 <= 3 * 40 - 6
    apart = (pos[:, None] - pos).norm(dim=2)
    assert apart[~torch.eye(40, dtype=torch.bool)].min() > 0.05
    middle, radius = (pos[row] + pos[col]) / 2, apart[row, col] / 2
    inside = (middle[:, None] - pos).norm(dim=2) < 0.999 * radius[:, None]
    assert not inside.any()
    joined = torch.eye(40, dtype=torch.bool)
    joined[row, col] = True
    assert torch.linalg.matrix_power(joined.double(), 40).gt(0).all()


def test_states_move_a_step_at_a_time(script):
    figure = script.recurrence(1)
    shown = [len(axis.collections[0].get_offsets()) for axis in figure.axes[:4]]
    assert shown[0] < shown[1] < shown[2] < shown[3] == 120
