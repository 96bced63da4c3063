"""How often layers call PyTorch: not more often than was found once."""

import operations
import pytest

from pyg_chimera.ops.common import triton_runtime

#: In a training step; a few more than with PyTorch 2.13, as others may count otherwise.
MOST = {
    "GPSConv": 135,
    "GatedGCNConv": 95,
    "ChimeraConv": 110,
    "ChimeraDAGConv": 145,
    "ChimeraPathConv": 240,
    "ChimeraGridConv": 295,
    "PLSTMConv": 168,
    "PLSTMGridConv": 120,
    "GatedDeltaConv": 160,
    "GraphMambaConv": 176,
    "RGLRUConv": 185,
}

#: On a GPU, in a training step.
MOST_LAUNCHES = {"ChimeraConv": 40}


@pytest.mark.parametrize("name", operations.cases())
def test_layers_call_pytorch_no_more_often(name):
    found = operations.count(*operations.cases()[name]())
    assert 0 < found.total() <= MOST[name], found.most_common(20)


@pytest.mark.skipif(
    not (triton_runtime.INTERPRETED and triton_runtime.WITH_TRITON),
    reason="needs TRITON_INTERPRET=1: make test-triton",
)
@pytest.mark.parametrize("name", MOST_LAUNCHES)
def test_layers_launch_no_more_with_triton(name):
    case = operations.cases()[name](backend="triton")
    found = operations.count(*case, on_gpus=True)
    assert 0 < found.total() <= MOST_LAUNCHES[name], found.most_common(20)


def test_the_table(capsys, tmp_path):
    operations.main(["GPSConv", "--names", "--out", str(tmp_path / "found.json")])
    printed = capsys.readouterr().out
    assert "GPSConv" in printed
    assert "aten::linear" in printed
    assert "GPSConv" in (tmp_path / "found.json").read_text()
    with pytest.raises(SystemExit):
        operations.main(["GCNConv"])
