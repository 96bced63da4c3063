"""What is special to `HierarchicalMemoryConv`: its levels, and their router."""

import math

import pytest
import torch
import torch.nn.functional as F
from asserts import assert_near
from convs import CASES, CHANNELS

from pyg_chimera.nn import HierarchicalMemoryConv

KINDS = [name for name in CASES if name.startswith("HierarchicalMemoryConv")]


def path(length):
    return torch.stack([torch.arange(length - 1), torch.arange(1, length)])


@pytest.mark.parametrize("name", KINDS)
def test_the_formula(name):
    """Node by node, from what is learnt."""
    case = CASES[name]
    conv, inputs = case.trained(), case.inputs()
    x, index, attr, *_ = inputs
    filtered = conv.over_edges(index)
    query, key, value = conv.project(x, filtered)
    gates = conv.lin_delta(x).unflatten(1, (8, conv.heads)) + conv.delta_bias
    order = sorted(range(len(x)), key=lambda i: depth(index, i))
    y = torch.zeros_like(value)
    for h in range(conv.heads):
        g = h * conv.groups // conv.heads
        phi, psi = (F.normalize(conv.features(z[:, g]), dim=1) for z in (key, query))
        decay = F.softplus(gates[:, :3, h])
        importance, beta = torch.sigmoid(gates[:, 3:5, h]).t()
        weight = torch.softmax(gates[:, 5:, h], 1)
        states = [[torch.zeros(3, value.size(2)).double()] * len(x) for _ in range(3)]
        for i in order:
            parents = [(j, e) for e, (j, k) in enumerate(index.t().tolist()) if k == i]
            for level in range(3):
                before, lost = torch.zeros_like(states[0][0]), []
                for j, e in parents:
                    delta = (decay[i, level] + decay[j, level]) / 2
                    if conv.lin_edge is not None:
                        own = conv.lin_edge(attr[e])[h] + conv.edge_bias[0, h]
                        delta = delta * F.softplus(own)
                    scale = math.sqrt(len(parents))
                    before = before + torch.exp(-delta) / scale * states[level][j]
                    lost.append(delta / scale)
                gate = sum(lost) if parents else decay[i, level]
                if level < 2:
                    written = gate * (importance[i] if level else 1) * value[i, h]
                    after = before + torch.outer(key[i, g], written)
                    read = query[i, g] @ after
                else:
                    error = value[i, h] - psi[i] @ before
                    temperature = conv.log_temperature[h].exp()
                    share = torch.sigmoid(error.square().mean() / temperature)
                    wrong = value[i, h] - phi[i] @ before
                    after = before + beta[i] * share * torch.outer(phi[i], wrong)
                    read = psi[i] @ after
                states[level][i] = after
                y[i, h] = y[i, h] + weight[i, level] * read
    assert_near(case.call(conv, inputs), conv.output(y, x, value), 1e-8)


def depth(index, i):
    return max([1 + depth(index, j) for j, k in index.t().tolist() if k == i] or [0])


def test_how_fast_levels_forget_at_first():
    """Before anything is learnt, for nodes of zeros: by their decays."""
    conv = HierarchicalMemoryConv(CHANNELS, heads=2, decays=(0.5, 0.9, 0.99))
    conv = conv.double()
    x = torch.zeros(30, CHANNELS).double()
    x[0] = torch.randn(CHANNELS).double()
    # All nodes read what the first one has written, and write nothing themselves.
    for lin in (conv.lin_value, conv.lin_key):
        lin.bias.data.zero_()
    for lin in (conv.lin_query, conv.lin_delta):
        lin.weight.data.zero_()
    levels = conv.levels(x, path(30))
    assert levels.read.shape == (3, 30, 2, CHANNELS // 2)
    # The network also corrects what it has stored, by a share that depends on it.
    for read, decay in zip(levels.read[:2], (0.5, 0.9), strict=True):
        assert_near(read[2:], decay * read[1:-1], 1e-6)
    assert_near(F.softplus(conv.delta_bias[2]), torch.full((2,), -math.log(0.99)), 1e-6)
    assert_near(levels.weight.sum(0), torch.ones(30, 2).double())
    conv.reset_parameters()
    even = conv.levels(torch.zeros_like(x), path(30)).weight
    assert_near(even, torch.full_like(even, 1 / 3))
    assert_near(levels.importance, torch.full((30, 2), 0.5).double())


def test_levels_are_what_the_output_is_made_of():
    conv = HierarchicalMemoryConv(CHANNELS, heads=2)
    x, index = torch.randn(9, CHANNELS), path(9)
    levels = conv.levels(x, index)
    y = (levels.weight.unsqueeze(-1) * levels.read).sum(0)
    value = conv.project(x, None)[2]
    assert_near(conv(x, index), conv.output(y, x, value), 1e-6)


@pytest.mark.parametrize("decays", [(0.9, 0.8, 0.99), (0, 0.5, 0.9), (0.5, 0.9)])
def test_bad_decays(decays):
    with pytest.raises(ValueError, match=r"'decays' must be three numbers.* got"):
        HierarchicalMemoryConv(CHANNELS, decays=decays)
