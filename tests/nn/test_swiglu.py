import pytest
import torch
from asserts import assert_near
from torch.nn import Dropout, Linear

from pyg_chimera.nn import ChimeraConv, GPSLayer, SelfAttention, SwiGLU

C = 8


def test_by_hand():
    mlp = SwiGLU(2, 1, dropout=0.9).eval()
    with torch.no_grad():
        mlp.lin_in.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
        mlp.lin_out.weight.copy_(torch.tensor([[1.0], [-1.0]]))
    # SiLU(1) = 1 / (1 + 1 / e) = 0.731059, times 2 * 3.
    expected = torch.tensor([[4.386351, -4.386351], [0.0, 0.0]])
    assert_near(mlp(torch.tensor([[1.0, 3.0], [0.0, 5.0]])), expected, 1e-6)


def test_the_formula():
    mlp, x = SwiGLU(C, 5).double(), torch.randn(2, 7, C, dtype=torch.double)
    gate, value = mlp.lin_in.weight.view(2, 5, C)
    inner = x @ gate.t()
    expected = inner / (1 + (-inner).exp()) * (x @ value.t()) @ mlp.lin_out.weight.t()
    assert_near(mlp(x), expected)
    x.requires_grad_()
    assert torch.autograd.gradcheck(mlp, (x,))
    assert mlp(x[:, :0]).shape == (2, 0, C)


@pytest.mark.parametrize(("channels", "hidden"), [(3, 8), (64, 176), (96, 256)])
def test_hidden_channels(channels, hidden):
    """8/3 of the channels, as a multiple of 8."""
    mlp = SwiGLU(channels)
    assert hidden % 8 == 0
    assert hidden - 8 < channels * 8 / 3 <= hidden
    assert mlp.lin_out.weight.shape == (channels, hidden)
    assert repr(mlp) == f"SwiGLU({channels}, {hidden})"


def test_reset_and_dropout():
    mlp, x = SwiGLU(C, dropout=0.5), torch.randn(4, C)
    assert not mlp(x).equal(mlp(x))
    out = mlp.eval()(x)
    assert out.equal(mlp(x))
    mlp.reset_parameters()
    assert not mlp(x).equal(out)


@pytest.mark.parametrize(
    ("args", "name"), [((-1,), ""), ((0,), ""), ((8, 0), "hidden_")]
)
def test_errors(args, name):
    with pytest.raises(ValueError, match=f"'{name}channels' must be"):
        SwiGLU(*args)


# ------------------------------------------------------------------- in a `GPSLayer`


@pytest.mark.parametrize("norm_first", [False, True])
def test_as_the_network_of_a_layer(norm_first):
    mlp = SwiGLU(C)
    layer = GPSLayer(
        C, mixer=ChimeraConv(C), mlp=mlp, norm_first=norm_first, dropout=0.5
    )
    assert isinstance(layer.mlp[0], SwiGLU)
    assert isinstance(layer.mlp[1], Dropout)
    layer.eval()
    bare = GPSLayer(
        C, mixer=layer.mixer, mlp_channels=0, norm_first=norm_first, norm=None
    )
    bare.norms = layer.norms
    x, edge_index = torch.randn(3, C), torch.tensor([[0, 1], [1, 2]])
    h, norm = bare(x, edge_index), layer.norms["mlp"]
    expected = h + mlp(norm(h)) if norm_first else norm(h + mlp(h))
    out = layer(x, edge_index)
    assert_near(out, expected, 1e-6)
    layer.reset_parameters()
    assert not layer(x, edge_index).equal(out)


def test_sequences_are_continued():
    mixer = SelfAttention(C, causal=True)
    norms = {"norm": "layer_norm", "norm_first": True}
    layer = GPSLayer(C, mixer=mixer, mlp=SwiGLU(C), **norms).eval()
    x = torch.randn(4, C)
    out, state = layer(x, torch.empty(2, 0, dtype=torch.long)), None
    for i in range(4):
        last, state = layer.step(x[i : i + 1], state)
        assert_near(last[0], out[i], 1e-5)


def test_errors_of_a_layer():
    with pytest.raises(ValueError, match="'mlp_channels' must not be given"):
        GPSLayer(C, mixer=ChimeraConv(C), mlp=SwiGLU(C), mlp_channels=4)
    layer = GPSLayer(C, mixer=ChimeraConv(C), mlp=Linear(C, 1))
    with pytest.raises(ValueError, match=r"'mlp' must return.*\[3, 8\], got \[3, 1\]"):
        layer(torch.randn(3, C), torch.tensor([[0], [1]]))
