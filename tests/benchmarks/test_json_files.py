"""How results are written."""

import importlib
import json
import os
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def json_files(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("json_files")


def test_failed_json_leaves_the_old_one(json_files, tmp_path):
    path = tmp_path / "new" / "results.json"
    json_files.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        json_files.write_json(path, {"a": object()})

    assert json.loads(path.read_text()) == {"a": 1}
    assert list(path.parent.iterdir()) == [path]


def test_half_a_file_does_not_replace_a_whole_one(json_files, tmp_path, monkeypatch):
    path = tmp_path / "results.json"
    json_files.write_json(path, {"a": 1})
    monkeypatch.setattr(os, "replace", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        json_files.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}


def test_rows_are_lines(json_files):
    row = {"name": "x" * 100, "curve": [[0.5, 1.0]] * 20}
    content = {"machine": {"cores": 2}, "rows": [row, row], "curve": [1.5] * 99}
    text = json_files.layout(content)

    assert json.loads(text) == content
    rows = [f"  {json.dumps(row)}", f" {json.dumps(content['curve'])}"]
    assert text.splitlines() == [
        *("{", ' "machine": {"cores": 2},', ' "rows": ['),
        *(f"{rows[0]},", rows[0], " ],"),
        *(f' "curve":{rows[1]}', "}"),
    ]


def test_committed_results_are_laid_out(json_files):
    for path in (BENCHMARKS / "results").glob("*.json"):
        text = path.read_text()
        assert text == json_files.layout(json.loads(text)) + "\n", path.name
