import pytest
import torch
from asserts import assert_near
from torch.nn import MultiheadAttention
from torch_geometric.data import Batch

from pyg_chimera.nn import GPSLayer, SelfAttention
from pyg_chimera.nn.attention import _rotate
from pyg_chimera.transforms import ImageToGraph

C = 8


def test_it_is_multihead_attention():
    ours, torchs = SelfAttention(C, 2), MultiheadAttention(C, 2, batch_first=True)
    with torch.no_grad():
        ours.lin_in.weight.copy_(torchs.in_proj_weight)
        ours.lin_in.bias.copy_(torchs.in_proj_bias)
        ours.lin_out.weight.copy_(torchs.out_proj.weight)
        ours.lin_out.bias.copy_(torchs.out_proj.bias)
    x = torch.randn(3, 5, C)
    mask = torch.arange(5) < torch.tensor([[5], [2], [1]])
    expected = torchs(x, x, x, key_padding_mask=~mask)[0]
    assert_near(ours(x, mask)[mask], expected[mask], 1e-5)
    assert_near(ours(x), torchs(x, x, x)[0], 1e-5)


def naive(conv: SelfAttention, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Of one graph, [N, F], pair by pair, with complex numbers that are turned."""
    q, k, v = (y.view(len(x), conv.heads, -1) for y in conv.lin_in(x).chunk(3, dim=1))
    half = q.size(2) // 2
    share = half // places.size(1)
    step = 10_000.0 ** (-torch.arange(share, dtype=x.dtype) / share)
    angle = (places.unsqueeze(-1) * step).flatten(1).unsqueeze(1)
    turn = torch.polar(torch.ones_like(angle), angle)
    q, k = (torch.complex(y[..., :half], y[..., half:]) * turn for y in (q, k))
    scores = torch.einsum("ihc,jhc->hij", q, k.conj()).real / (2 * half) ** 0.5
    if conv.causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    out = torch.einsum("hij,jhc->ihc", scores.softmax(-1), v)
    return conv.lin_out(out.flatten(1))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_rotary_sequences(causal, masked):
    conv = SelfAttention(C, 2, rotary="sequence", causal=causal).double()
    x = torch.randn(2, 6, C, dtype=torch.double)
    mask = torch.arange(6) < torch.tensor([[6], [4]]) if masked else None
    out = conv(x, mask)
    for i, n in enumerate((6, 4 if masked else 6)):
        places = torch.arange(n, dtype=torch.double).view(-1, 1)
        assert_near(out[i, :n], naive(conv, x[i, :n], places))
    if not causal:  # only differences of places count
        q = torch.randn(1, 2, 6, 4, dtype=torch.double)
        places = torch.arange(6).view(1, 6, 1)
        one, two = _rotate(q, places), _rotate(q, places + 7)
        assert_near(one @ one.mT, two @ two.mT)


def test_rotary_grids_in_a_layer():
    conv = SelfAttention(C, 2, rotary="grid").double()
    layer = GPSLayer(C, mixer=conv, norm=None, mlp_channels=0)
    graphs = [
        ImageToGraph()(torch.randn(C, h, w).double()) for h, w in ((2, 3), (3, 1))
    ]
    batch = Batch.from_data_list(graphs)
    out = layer(batch.x, batch.edge_index, batch.batch, width=batch.width) - batch.x
    expected = [naive(conv, graph.x, graph.pos.double()) for graph in graphs]
    assert_near(out, torch.cat(expected))


def test_errors_and_representation():
    with pytest.raises(ValueError, match="'heads' must divide 'channels', got 3, 8"):
        SelfAttention(8, 3)
    with pytest.raises(ValueError, match=r"2 channels of a head .* multiple of 4"):
        SelfAttention(8, 4, rotary="grid")
    with pytest.raises(ValueError, match="'rotary' must be one of"):
        SelfAttention(8, rotary="path")
    with pytest.raises(ValueError, match="'width' must be given"):
        SelfAttention(8, rotary="grid")(torch.randn(1, 4, 8))
    with pytest.raises(ValueError, match=r"'x' must be \[graphs, nodes, 8\], padded"):
        SelfAttention(8)(torch.randn(4, 8))
    for wrong in ((2, 4), (1, 3)):  # the latter would be broadcast
        with pytest.raises(ValueError, match=r"'mask' must be .* = \[2, 3\], got"):
            SelfAttention(8)(torch.randn(2, 3, 8), torch.ones(wrong).bool())
    with pytest.raises(TypeError, match=r"'mask' must be bool.*got torch\.float32"):
        SelfAttention(8)(torch.randn(1, 4, 8), torch.ones(1, 4))
    text = "SelfAttention(8, heads=2, rotary='grid', causal=False)"
    assert repr(SelfAttention(8, 2, rotary="grid")) == text
