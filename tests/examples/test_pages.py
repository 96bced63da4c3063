"""Examples are pages: short, and readable on their own."""

import ast
import importlib
from pathlib import Path
from urllib.error import URLError

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGES = sorted(path for path in EXAMPLES.glob("*.py") if path.name != "lrgb.py")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_page(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 150
    tree = ast.parse(text)
    imported = {
        node.module.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    }
    others = {other.stem for other in EXAMPLES.glob("*.py")}
    assert not imported & others  # nothing to look up elsewhere
    assert f"python examples/{path.name}" in ast.get_docstring(tree)
    page = (EXAMPLES.parent / "docs" / "examples.md").read_text()
    assert f"`{path.name}`" in page or f"`examples/{path.name}`" in page


@pytest.mark.parametrize(
    ("name", "download", "argv"),
    [
        ("city_roads", "CityRoads", []),
        ("large_graph", "HeterophilousGraphDataset", ["--dataset", "minesweeper"]),
        ("molecules", "LRGBDataset", ["--dataset", "peptides-func"]),
        ("with_lightning", "TUDataset", []),
    ],
)
def test_missing_data_are_named(monkeypatch, tmp_path, name, download, argv):
    """In a sentence, with what to do, and not by a traceback."""
    if name == "with_lightning":
        pytest.importorskip("pytorch_lightning")
    page = importlib.import_module(name)

    def offline(*args, **kwargs):
        raise URLError("no network")

    monkeypatch.setattr(page, download, offline)
    said = r"could not be downloaded to \S+: .*no network.*[Cc]opy .* has run with"
    with pytest.raises(SystemExit, match=said):
        page.main([*argv, "--root", str(tmp_path)])


def test_a_missing_stream_is_named(monkeypatch, tmp_path):
    page = importlib.import_module("temporal_links")

    def offline(*args, **kwargs):
        raise URLError("no network")

    monkeypatch.setattr(page, "download_url", offline)
    with pytest.raises(SystemExit, match=r"no network.*: save https://\S+ as \S+gz$"):
        page.load("messages", str(tmp_path))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_names_its_picture(path):
    text = path.read_text()
    assert f'default="{path.stem}.png"' in text
    assert "savefig(" in text


def test_an_empty_prompt_is_refused_before_training(capsys):
    with pytest.raises(SystemExit):
        importlib.import_module("text").main(["--prompt", ""])
    assert "--prompt needs at least one character" in capsys.readouterr().err
