"""What is special to `GatedDeltaConv`: keys of length one, and reach."""

import math

import pytest
import torch
import torch.nn.functional as F
from asserts import assert_near
from convs import CHANNELS
from torch_geometric.utils import to_undirected

from pyg_chimera.nn import GatedDeltaConv
from pyg_chimera.nn.conv.gated_delta_conv import unit, unit_silu
from pyg_chimera.ops import CycleError
from pyg_chimera.ops.common import memory


def direction(y):
    return y / y.square().sum(-1, keepdim=True).sqrt()


def test_unit():
    """Whatever the size; zeros have a direction, too, but no gradient."""
    x = torch.randn(6, 2, 5) * torch.tensor([1, 1e-20, 1e30, 1, 0, 1.0]).view(6, 1, 1)
    x.requires_grad_()
    y = unit(x)
    assert_near(y.norm(dim=-1), torch.ones(6, 2), 1e-6)
    assert_near(y[:4], direction(x[:4].double()).float(), 1e-6)
    y[..., 0].sum().backward()
    assert x.grad.isfinite().all()
    assert not x.grad[4].any()
    assert unit(torch.full((1, 2), torch.nan)).isnan().all()


@pytest.mark.parametrize("acyclic", [False, True])
def test_nodes_without_features(acyclic):
    """Nor bias: their keys are zero before they get a length."""
    conv = GatedDeltaConv(CHANNELS, heads=2, bias=False, acyclic=acyclic)
    x = torch.zeros(4, CHANNELS, requires_grad=True)
    index = torch.tensor([[0, 1, 2], [1, 2, 3]])
    out = conv(x, index)
    out.sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("options", [{}, {"acyclic": True}], ids=str)
def test_reach(options, heads):
    """What nobody overwrites falls to 1/e along a path after so many steps."""
    n, index = 300, torch.stack([torch.arange(299), torch.arange(1, 300)])
    conv = GatedDeltaConv(
        CHANNELS, heads=heads, state_channels=3, reach=(2.0, 20.0), **options
    )
    if not conv.acyclic:
        index = to_undirected(index)
    delta = F.softplus(conv.project(torch.zeros(n, CHANNELS)).delta + conv.delta_bias)
    deltas = list(delta.unbind(1))[:-1]
    weight = conv._transition(index, n, deltas, None).detach().double()
    A = torch.zeros(heads, n, n).double()
    A[:, index[1], index[0]] = weight.t()
    L = torch.linalg.inv(torch.eye(n).double() - A)
    found = -1 / (L[:, 151, 150] / L[:, 150, 150]).log()
    expected = [2 * 10 ** ((h + 0.5) / heads) for h in range(heads)]
    assert found.tolist() == pytest.approx(expected, rel=0.05)


def test_bad_selectivities():
    with pytest.raises(ValueError, match=r"'selectivity' must be one of .* got 'both'"):
        GatedDeltaConv(CHANNELS, acyclic=True, selectivity="both")
    with pytest.raises(ValueError, match=r"selectivity='target' .* pass acyclic=True"):
        GatedDeltaConv(CHANNELS, selectivity="target")


@pytest.mark.parametrize("steps", [1, 64])
def test_cycles_where_there_should_be_none(steps):
    """Named, also where weights are so small that there would be a solution."""
    conv = GatedDeltaConv(CHANNELS, acyclic=True, reach=(steps, steps))
    x, index = torch.zeros(4, CHANNELS), torch.tensor([[3, 0, 1, 2], [0, 1, 2, 0]])
    with pytest.raises(CycleError, match="has the cycle 0 -> 1 -> 2 -> 0"):
        conv(x, index)


def test_what_is_known_is_first_corrected_by_half():
    conv = GatedDeltaConv(CHANNELS, heads=2, state_channels=3)
    assert (conv.delta_bias[-1].sigmoid() == 0.5).all()


def test_a_large_graph_with_cycles(monkeypatch):
    """Its matrices are refused, with what to do."""
    monkeypatch.setattr(memory, "available_bytes", lambda device: 2.0**30)
    node = torch.arange(12_000)
    edge_index = torch.stack([node, node.roll(1)])
    conv, x = GatedDeltaConv(8, state_channels=8), torch.randn(12_000, 8)
    with pytest.raises(ValueError, match=r"'mask' .* GiB, more than .*clusters"):
        conv(x, edge_index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keys_where_silu_underflows(dtype):
    """Their direction is that of SiLU in exact arithmetic."""
    x = [[-1000.0, -1001.0], [-1e5, -2e5], [1.0, -1e3], [0.0, 0.0], [0.0, -1e3]]
    x = torch.tensor(x, dtype=dtype, requires_grad=True)
    tail = 1.001 * math.exp(-1)  # silu(-1001) / silu(-1000)
    expected = [[-1.0, -tail], [-1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, -1.0]]
    expected = F.normalize(torch.tensor(expected, dtype=dtype))
    out = unit_silu(x)
    assert_near(out, expected, 1e-6)
    assert_near(out[2], unit(F.silu(x[2])), 1e-6)
    out[:, 0].sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad[0, 1] > 0.1  # moving the second nearer turns the key away
