"""What is special to `GatedDeltaConv`: its formula, and keys of length one."""

import math

import pytest
import torch
import torch.nn.functional as F
from asserts import assert_near
from convs import CASES, CHANNELS
from torch_geometric.utils import to_undirected

from pyg_chimera.nn import GatedDeltaConv
from pyg_chimera.nn.conv.gated_delta_conv import unit, unit_silu
from pyg_chimera.ops import CycleError
from pyg_chimera.ops.common import memory

KINDS = [name for name in CASES if name.startswith("GatedDeltaConv")]


def direction(y):
    return y / y.square().sum(-1, keepdim=True).sqrt()


def transitions(conv, index, delta, edge):
    """A of one head, [V, V], from what softplus makes of selectivities [V, gates]."""
    n, A = len(delta), delta.new_zeros(len(delta), len(delta))
    decays = []
    for e, (j, i) in enumerate(index.t().tolist()):
        source = [delta[j, 0] if conv.acyclic else delta[j, 1]]
        if conv.selectivity == "target":
            source = []
        parts = [delta[i, 0], *source, *([] if edge is None else [edge[e]])]
        decays.append(torch.exp(-sum(parts) / len(parts)))
    for i in range(n):
        into = [e for e in range(len(decays)) if index[1, e] == i]
        total = math.sqrt(len(into)) if conv.acyclic else None
        if not conv.acyclic:
            total = sum(decays[e] for e in into) + torch.exp(-delta[i, 2])
            total = total / conv.gamma
        for e in into:
            A[i, index[0, e]] += decays[e] / total
    return A


def memories(A, key, value, beta):
    """The states of one head, from S = (I - b k k^T) (A S) + b k v^T over and over."""
    S = key.new_zeros(*key.shape, value.size(1))
    for _ in range(4000):
        before = torch.einsum("ij,jnp->inp", A, S)
        wrong = value - torch.einsum("inp,in->ip", before, key)
        after = before + torch.einsum("i,in,ip->inp", beta, key, wrong)
        if (after - S).abs().max() < 1e-15:
            break
        S = after
    return S


@pytest.mark.parametrize("name", KINDS)
def test_the_formula(name):
    case = CASES[name]
    conv, inputs = case.trained(), case.inputs()
    x, index, attr, *_ = inputs
    parts = [conv.lin_value(x), conv.lin_key(x), conv.lin_query(x)]
    if conv.local_weight is not None:
        y, filtered = torch.cat(parts, 1), 0
        for weight in conv.local_weight.t():
            filtered, near = filtered + y * weight, torch.zeros_like(y)
            for i in range(len(x)):
                tails = index[0, index[1] == i]
                near[i] = y[tails].mean(0) if len(tails) else 0
            y = near
        parts = filtered.split([p.size(1) for p in parts], 1)
    value, key, query = map(F.silu, parts)
    delta = conv.lin_delta(x).unflatten(1, (-1, conv.heads)) + conv.delta_bias
    outs = []
    for h in range(conv.heads):
        g, N = h * conv.groups // conv.heads, conv.state_channels
        q, k = (direction(y[:, g * N : (g + 1) * N]) for y in (query, key))
        edge = None
        if conv.lin_edge is not None:
            edge = F.softplus(conv.lin_edge(attr)[:, h] + conv.edge_bias[0, h])
        A = transitions(conv, index, F.softplus(delta[:, :-1, h]), edge)
        v = value.unflatten(1, (conv.heads, -1))[:, h]
        beta = torch.sigmoid(delta[:, -1, h])
        S = memories(A, k, v, beta)
        y = torch.einsum("inp,in->ip", S, q)
        outs.append(y + conv.skip[h] * v)
    y = torch.cat(outs, 1)
    y = y / (y.square().mean(1, keepdim=True) + 1e-5).sqrt() * conv.norm.weight
    if conv.lin_gate is not None:
        y = y * F.silu(conv.lin_gate(x))
    assert_near(case.call(conv, inputs), conv.lin_out(y), 1e-8)


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
