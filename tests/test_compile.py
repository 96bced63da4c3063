import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pyg_chimera import compile as command
from pyg_chimera import nn, ops, transforms

ROOT = Path(__file__).parents[1]

#: Whatever is in the cache, jitted functions know the types they were called with.
SCRIPT = """
import gc, sys
import torch
from numba.core.dispatcher import Dispatcher
from pyg_chimera import compile as command
sys.path.insert(0, "tests")
from convs import CASES

def versions():
    found = (x for x in gc.get_objects() if isinstance(x, Dispatcher))
    ours = (x for x in found if x.py_func.__module__.startswith("pyg_chimera"))
    return {(x.py_func, types) for x in ours for types in x.overloads}

torch.set_num_threads(1)
for call, dtype in command._calls(float64=False):
    command._run(call, dtype)
before = versions()
assert len(before) > 50
for name, case in CASES.items():
    inputs = case.inputs(torch.float32)
    inputs.x.requires_grad_()
    case.call(case.conv().train(), inputs).sum().backward()
    with torch.no_grad():
        case.call(case.conv(), inputs)
    for function, types in versions() - before:
        print(name, function.__module__, function.__qualname__, types)
"""


@pytest.mark.slow
def test_no_layer_needs_more():
    """Of all layers with all their options."""
    out = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True
    )
    assert (out.returncode, out.stdout) == (0, ""), out.stdout + out.stderr


def test_what_is_called():
    """All operators and layers with kernels, and all transforms of graphs."""
    called = {call.name for call, _ in command._calls(float64=False)}
    without = {"GPSLayer", "GatedGCNConv", "SelfAttention", "neighborhood_attention"}
    without |= {*nn.hybrid.__all__}  # whose kernels are those of others
    assert {x for x in nn.__all__ if x.endswith("Conv")} - without <= called
    assert {x for x in ops.__all__ if "_scan" in x or "mix" in x} <= called
    plain = {"EventsToDAG", "ImageToGraph", "LaplacianEncoding", "LineGraphData"}
    plain |= {"PadBatch", "SequenceToGraph"}
    assert set(transforms.__all__) - plain <= called
    both = command._calls(float64=True)
    assert {call.name for call, dtype in both if dtype.itemsize == 8} == called


@pytest.fixture
def two_calls(tmp_path, monkeypatch):
    """Of a command whose calls compile little, into a cache of its own."""
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    code = """
from pyg_chimera import compile as command

calls = [x for x in command._calls(float64=False) if x[0].name in NAMES]
command._calls = lambda float64: calls
if __name__ == "__main__":
    raise SystemExit(command.main(["--workers", "2"]))
"""
    script = tmp_path / "script.py"
    script.write_text(code.replace("NAMES", "('causal_conv1d', 'AddTopologicalOrder')"))
    return [sys.executable, str(script)]


@pytest.mark.slow
def test_what_has_been_compiled_is_on_disk(two_calls, tmp_path):
    for expected in (r"[1-9]\d* functions", "0 functions"):
        out = subprocess.run(two_calls, capture_output=True, text=True)
        assert out.returncode == 0, out.stderr
        assert re.fullmatch(f"{expected} compiled in \\d+ s.\n", out.stdout)
        assert "| 2/2 [" in out.stderr
        assert "once a machine" not in out.stderr  # said to those who did not ask
    assert list(tmp_path.glob("causal_conv1d_*/*.nbi"))


@pytest.mark.slow
def test_what_cannot_be_kept_is_said(two_calls, tmp_path, monkeypatch):
    """From the start, or when it is written."""
    given = tmp_path / "given"
    given.write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(given))
    out = subprocess.run(two_calls, capture_output=True, text=True)
    assert (out.returncode, out.stdout) == (1, "")
    assert out.stderr.count("NUMBA_CACHE_DIR") == 1
    assert out.stderr.endswith("Nothing is compiled, as it would not be kept.\n")

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    code = Path(two_calls[1]).read_text()
    Path(two_calls[1]).write_text("""
import os
def replace(old, new):
    raise OSError(28, "No space left on device")
os.replace = replace
""" + code)  # fmt: skip
    out = subprocess.run(two_calls, capture_output=True, text=True)
    assert out.returncode == 1, out.stderr
    assert re.match(r"[1-9]\d* functions compiled", out.stdout)
    assert "NUMBA_CACHE_DIR" not in out.stderr
    last = out.stderr.splitlines()[-1]
    assert last.startswith("Not all of them are kept on disk: OSError: [Errno 28]")
    assert list(tmp_path.rglob("*.nb*")) == []


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="needs signals")
def test_it_can_be_interrupted_and_run_again(two_calls):
    started = subprocess.Popen(
        two_calls, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert started.stderr is not None
    started.stderr.read(1)  # of the progress
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=60)
    assert (started.returncode, out) == (130, "")
    assert err.endswith("Interrupted; the next run goes on from here.\n")
    assert "Traceback" not in err
    subprocess.run(two_calls, check=True, capture_output=True)


def test_bad_arguments(capsys, monkeypatch):
    for args, said in (
        (["--workers", "0"], "argument --workers: expected at least 1, got 0"),
        (["--workers", "many"], "argument --workers: invalid int value: 'many'"),
        (["ChimeraConv"], "unrecognized arguments: ChimeraConv"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command.main(args)
        assert said in capsys.readouterr().err
    monkeypatch.setenv("NUMBA_DISABLE_JIT", "1")
    with pytest.raises(SystemExit, match="2"):
        command.main([])
    assert "unset it" in capsys.readouterr().err


def test_a_call_that_fails(monkeypatch):
    call = command.Call("ChimeraConv", {"heads": 3})
    monkeypatch.setattr(command, "_calls", lambda float64: [(call, None)])
    with pytest.raises(Exception, match=r"heads|dtype"):
        command.main(["--workers", "1"])
