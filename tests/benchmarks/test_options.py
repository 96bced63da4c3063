"""Where benchmarks write."""

import importlib
from argparse import ArgumentParser
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def options(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("options")


def test_nothing_is_replaced_unasked(options, monkeypatch, tmp_path):
    monkeypatch.setattr(options, "REPOSITORY", tmp_path)
    parser = ArgumentParser()
    options.add_output(parser)
    default = tmp_path / "runs" / "some.json"
    assert options.output(parser.parse_args([]), "some") == default
    default.parent.mkdir()
    default.write_text("{}")
    for own in ([], ["--out", str(default)]):
        with pytest.raises(SystemExit, match=r"exists: pass --overwrite, or another"):
            options.output(parser.parse_args(own), "some")
    for own in (["--overwrite"], ["--smoke"]):
        assert options.output(parser.parse_args(own), "some") == default
    other = tmp_path / "other.json"
    assert options.output(parser.parse_args(["--out", str(other)]), "some") == other
