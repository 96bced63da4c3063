"""Examples are pages: short, and readable on their own."""

import ast
from pathlib import Path

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
