import torch

from pyg_chimera import selftest
from pyg_chimera.ops.causal_conv1d import torch_backend
from pyg_chimera.ops.common import triton_runtime


def _raise(*_):
    raise RuntimeError("no such instruction\nin line 7")


def test_the_table(capsys, monkeypatch):
    assert selftest.main(["causal_conv1d"]) == 0
    said = capsys.readouterr().out
    assert f"torch {torch.__version__}" in said
    rows = [x.split() for x in said.splitlines() if x.startswith("causal_conv1d")]
    kinds = {(x[3], x[4]) for x in rows}
    dtypes = ("bfloat16", "float32", "float64")
    backends = {"numba", "torch", *(["triton"] * triton_runtime.INTERPRETED)}
    assert kinds == {(x, y) for x in backends for y in dtypes}
    assert all(x[-1] == "right" and float(x[5]) < 1e-2 for x in rows)
    monkeypatch.setattr(torch_backend, "forward", _raise)
    assert selftest.main(["causal_conv1d"]) == 1
    said = capsys.readouterr().out
    assert said.count("it raises RuntimeError: no such instruction") == 3
    assert selftest.main(["dag_scam"]) == 2
    said = capsys.readouterr().out
    assert selftest.main(["--help"]) == 0
    assert "prints a table for bug reports" in capsys.readouterr().out
    assert "no such operators: dag_scam; known: causal_conv1d, grid_conv" in said
