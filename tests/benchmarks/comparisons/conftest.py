import os
import signal
from pathlib import Path

import layouts
import pytest


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """A folder with the raw files of all data sets, as downloads leave them."""
    root = tmp_path_factory.mktemp("root")
    for name in ("peptides-func", "peptides-struct"):
        layouts.write_lrgb(root, name)
    layouts.write_tudataset(root, "LABELLED", labelled=True)
    layouts.write_tudataset(root, "BARE", labelled=False)
    return root


@pytest.fixture
def interrupt():
    """Makes tasks signal this process in one of the calls of their losses."""
    # Lightning ignores Ctrl-C from the first one on. And a process in the background of
    # a shell script is started with Ctrl-C ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    calls = iter(range(10_000))

    def interrupt(task, call: int, number: int = signal.SIGINT):
        def loss(out, batch):
            if next(calls) == call:
                os.kill(os.getpid(), number)
            return task.loss(out, batch)

        return task._replace(loss=loss)

    yield interrupt
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def smoke(tmp_path, monkeypatch):
    """Runs a comparison in one folder, in seconds and without pictures."""
    monkeypatch.setattr("common.draw_curves", lambda *_: None)

    def smoke(get_args, run, *argv):
        fixed = "--smoke", "--device", "cpu", "--out", str(tmp_path / "out")
        args = get_args([*fixed, *argv])
        return run(args)

    return smoke


@pytest.fixture
def refused(capsys):
    """Calls what must end the program with one line, and returns the line."""

    def refused(call, *args) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            call(*args)
        assert stop.value.code == 2
        text = capsys.readouterr().err
        assert text.splitlines()[-1].partition(": error: ")[1]
        return text

    return refused
