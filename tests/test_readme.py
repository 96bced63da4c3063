"""Runs the Python blocks of the README and of the documentation, as they stand."""

import functools
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def blocks(page: str) -> list[str]:
    """The Python blocks of a page, each at its line so that errors point there."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        "\n" * text.count("\n", 0, match.start(1)) + match[1]
        for match in BLOCK.finditer(text)
    ]


@pytest.mark.parametrize("page", sorted(page for page in PAGES if blocks(page)))
def test_blocks_run(page, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    # The blocks must run where no C++ compiler is installed, and quickly:
    compile_eagerly = functools.partial(torch.compile, backend="aot_eager")
    monkeypatch.setattr(torch, "compile", compile_eagerly)
    names: dict[str, object] = {"__name__": "__page__"}
    for block in blocks(page):
        # PyG's Sequential imports the file that calls it; where that fails, it runs
        # the code of the last one that any test has made.
        exec(compile(block, __file__, "exec"), names)
    result = names.get("out", names.get("loss"))
    assert isinstance(result, torch.Tensor)
    assert torch.isfinite(result).all()


def test_readme_keeps_its_promises():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = blocks("README.md")
    assert len([line for line in example.splitlines() if line.strip()]) <= 20
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test", "lint", "docs", "bench", "help"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    assert "make demo" in text
    assert "make test" in text


@pytest.mark.parametrize("page", sorted(PAGES))
def test_links_to_files_hold(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    folder = (ROOT / page).parent
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
    missing = [target for target in targets if not (folder / target).exists()]
    assert missing == []
