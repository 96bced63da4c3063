import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import layouts
import pytest

#: They are scripts, whose folders Python puts on the path.
ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "benchmarks" / "comparisons")]

needed = ("matplotlib", "ogb", "pytorch_lightning", "rdkit", "sklearn", "torchmetrics")
if any(find_spec(name) is None for name in needed):
    collect_ignore_glob = ["test_*.py"]  # the extra "examples" is not installed


@pytest.fixture(scope="session")
def root(tmp_path_factory) -> Path:
    """A folder with the raw files of all data sets, as downloads leave them."""
    root = tmp_path_factory.mktemp("root")
    for name in layouts.LRGB:
        layouts.write_lrgb(root, name)
    for name in ("MNIST", "CIFAR10", "PATTERN", "CLUSTER"):
        layouts.write_gnn_benchmark(root, name)
    layouts.write_malnet_tiny(root / "malnet-tiny")
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
