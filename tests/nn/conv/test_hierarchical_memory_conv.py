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
    """Before anything is learnt, for nodes of zeros; and they are evenly routed."""
    conv = HierarchicalMemoryConv(CHANNELS, heads=2)
    expected = [[-math.log(decay)] * 2 for decay in (0.8, 0.99, 0.999)]
    assert_near(F.softplus(conv.delta_bias[:3]), torch.tensor(expected), 1e-6)
    assert not conv.delta_bias[3:].any()
