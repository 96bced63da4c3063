"""How far layers hear before they have learnt anything, and how loud that is."""

import math
from unittest.mock import patch

import networkx as nx
import pytest
import torch
from torch_geometric.utils import from_networkx

from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraDAGConv,
    ChimeraPathConv,
    GatedDeltaConv,
)
from pyg_chimera.nn.conv import chimera_conv, chimera_dag_conv, chimera_path_conv
from pyg_chimera.ops import dag_scan, resolvent_mix

MODULES = {
    ChimeraConv: (chimera_conv, "resolvent_mix", resolvent_mix),
    ChimeraPathConv: (chimera_path_conv, "resolvent_mix", resolvent_mix),
    ChimeraDAGConv: (chimera_dag_conv, "dag_scan", dag_scan),
}
CHANNELS = 32


def weights_and_mix(conv, x, edge_index, edge_attr=None):
    """The transitions [E, heads] of a layer, and what it mixes [V, heads, P]."""
    module, name, operator = MODULES[type(conv)]
    with patch.object(module, name, wraps=operator) as spy, torch.no_grad():
        conv(x, edge_index, edge_attr)
        args = spy.call_args.args
        return args[4], operator(*args)


def resolvent(weight, edge_index, n):
    """(I - A)^-1, [heads, n, n]."""
    A = torch.zeros(weight.size(1), n, n, dtype=torch.float64)
    A[:, edge_index[1], edge_index[0]] = weight.double().t()
    return torch.linalg.inv(torch.eye(n, dtype=torch.float64) - A)


def edges(graph):
    return from_networkx(graph).edge_index


@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("layer", [ChimeraConv, ChimeraPathConv, ChimeraDAGConv])
def test_influence_along_a_path(layer, heads, edge_dim):
    """It falls to 1/e after as many steps as heads are to hear, or a little fewer."""
    n, reach = 400, (2.0, 20.0)
    graph = nx.path_graph(n, nx.DiGraph if layer is ChimeraDAGConv else None)
    conv = layer(CHANNELS, heads=heads, reach=reach, edge_dim=edge_dim)
    if layer is not ChimeraDAGConv:  # what starts at random, and shortens ranges
        torch.nn.init.constant_(conv.delta_bias[:2], -10)
    x, edge_index = torch.zeros(n, CHANNELS), edges(graph)
    attr = None if edge_dim is None else torch.zeros(edge_index.size(1), edge_dim)
    weight, _ = weights_and_mix(conv, x, edge_index, attr)
    L = resolvent(weight, edge_index, n)
    found = -1 / (L[:, 201, 200] / L[:, 200, 200]).log()
    spaced = [(h + 0.5) / heads for h in range(heads)]
    expected = [reach[0] * (reach[1] / reach[0]) ** at for at in spaced]
    assert found.tolist() == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("with_batch", [True, False])
def test_ranges_grow_with_the_root_of_the_size(with_batch):
    """In larger graphs, and shrink in smaller ones, whatever the labels of a batch."""
    conv = ChimeraConv(CHANNELS, heads=1, reach=(8, 8), reach_nodes=100)
    torch.nn.init.constant_(conv.delta_bias[:2], -10)
    sizes = torch.tensor([100, 400, 36])
    paths = [nx.path_graph(n) for n in sizes.tolist()]
    batch = torch.tensor([3, 900, 7]).repeat_interleave(sizes) if with_batch else None
    found = []
    for graph in [nx.disjoint_union_all(paths)] if with_batch else paths:
        n = len(graph)
        x, edge_index = torch.zeros(n, CHANNELS), edges(graph)
        with patch.object(chimera_conv, "resolvent_mix", wraps=resolvent_mix) as spy:
            conv(x, edge_index, batch=batch)
        L = resolvent(spy.call_args.args[4].detach(), edge_index, n)[0]
        middles = [50, 300, 518] if with_batch else [n // 2]
        found += [-1 / float((L[i + 1, i] / L[i, i]).log()) for i in middles]
    assert found == pytest.approx([8, 16, 4.8], rel=0.05)


@pytest.mark.parametrize("layer", [ChimeraConv, ChimeraPathConv, GatedDeltaConv])
def test_edge_features_matter_from_the_start(layer):
    """Selectivities of edges follow their features, as softplus has a slope there."""
    conv = layer(CHANNELS, heads=4, edge_dim=CHANNELS)
    attr = torch.randn(200, CHANNELS)
    linear = conv.lin_edge(attr)
    delta = conv.edge_selectivity(attr, 200)
    assert torch.allclose(conv.edge_selectivity(0 * attr, 200), torch.ones(200, 4))
    slope = ((delta - 1) * linear).sum() / linear.square().sum()
    assert slope > 0.5  # of 1


@pytest.mark.parametrize("sides", [(30, 30), (9, 9, 9)])
def test_influence_on_lattices(sides):
    """Beside what spreads out, it falls as along a path: it is a screened Laplacian."""
    graph = nx.convert_node_labels_to_integers(nx.grid_graph(sides, periodic=True))
    conv = ChimeraConv(CHANNELS, reach=(3, 3))
    n, edge_index = graph.number_of_nodes(), edges(graph)
    weight, _ = weights_and_mix(conv, torch.zeros(n, CHANNELS), edge_index)
    L = resolvent(weight, edge_index, n)[0, 0].view(sides)
    planes = L.flatten(1).sum(1)  # of all nodes as many steps away along an axis
    steps = torch.arange(sides[0], dtype=torch.float64)
    there, around = (-steps / 3).exp(), (-(sides[0] - steps) / 3).exp()
    assert torch.allclose(
        planes / planes[0], (there + around) / (1 + around[0]), atol=0.02
    )


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("state_channels", [16, 64])
@pytest.mark.parametrize(
    "graph",
    [
        nx.path_graph(200),
        nx.cycle_graph(200),
        nx.balanced_tree(2, 7),
        nx.random_labeled_tree(150, seed=0),
        nx.convert_node_labels_to_integers(nx.grid_2d_graph(16, 16)),
    ],
    ids=["path", "ring", "binary tree", "random tree", "grid"],
)
def test_input_gates(graph, state_channels, qk_norm):
    """What heads mix is ten times as loud as the skip, or a few times more."""
    torch.manual_seed(0)
    ratios = []
    for _ in range(4):
        conv = ChimeraConv(
            CHANNELS, None, 4, state_channels, qk_norm=qk_norm, input_gate="free"
        )
        x, edge_index = torch.randn(len(graph), CHANNELS), edges(graph)
        _, mixed = weights_and_mix(conv, x, edge_index)
        with torch.no_grad():
            value = conv.query_key_value(conv.project(x))[2]
        norms = (y.square().mean((0, 2)).sqrt() for y in (mixed, value))
        ratios.append(torch.div(*norms))
    ratio = torch.stack(ratios).mean(0) / conv.skip.detach()
    assert (ratio > 5).all()
    assert (ratio < 80).all()


def test_released_normalisation_cannot_hear_far():
    """Its columns sum to d / (d + 0.05) at most, to 4.5 steps along a path."""
    conv = ChimeraConv(CHANNELS, heads=2, normalization="released", reach=(1.0, 16.0))
    n, edge_index = 200, edges(nx.path_graph(200))
    weight, _ = weights_and_mix(conv, torch.zeros(n, CHANNELS), edge_index)
    L = resolvent(weight, edge_index, n)
    found = -1 / (L[:, 101, 100] / L[:, 100, 100]).log()
    assert found[1].item() == pytest.approx(1 / math.acosh(1.025), rel=0.05)
    assert found[0] < found[1]
    assert (torch.nn.functional.softplus(conv.delta_bias[3]) < 0.11).all()  # unused


@pytest.mark.parametrize("layer", [ChimeraConv, ChimeraPathConv, ChimeraDAGConv])
def test_values_of_the_paper(layer):
    conv = layer(CHANNELS, heads=4, reach=None)
    delta = torch.nn.functional.softplus(conv.delta_bias.detach())
    assert (delta > 0.99e-3).all()
    assert (delta < 1.01e-1).all()
    assert (conv.skip == 1).all()


@pytest.mark.parametrize(
    ("reach", "gamma"), [(400, 1.0), (3000, 1.0), (300, 0.99), (300, 0.9)]
)
def test_far_reaches_and_gamma(reach, gamma):
    """Heads hear as far as they can, and are no less loud for it."""
    given = {"reach": (reach, reach), "gamma": gamma, "input_gate": "free"}
    conv = ChimeraConv(CHANNELS, **given)
    n, edge_index = 4000, edges(nx.path_graph(4000))
    weight, _ = weights_and_mix(conv, torch.zeros(n, CHANNELS), edge_index)
    heard = (torch.arange(n) == 2000).double().view(n, 1, 1)
    one = torch.ones_like(heard)
    call = (one, one, heard, edge_index, weight[:, :1].double())
    L = resolvent_mix(*call).flatten()
    at_most = min(512, reach) if gamma == 1 else 1 / math.acosh(1 / gamma)
    assert -100 / (L[2100] / L[2000]).log() == pytest.approx(at_most, rel=0.05)
    torch.manual_seed(0)
    x = torch.randn(n, CHANNELS)
    _, mixed = weights_and_mix(conv, x, edge_index)
    with torch.no_grad():
        value = conv.query_key_value(conv.project(x))[2]
    assert mixed.square().mean() > 25 * value.square().mean()


@pytest.mark.parametrize("reach", [(0.5, 2.0), (8.0, 4.0), (1, 2, 3), 8, (4, math.inf)])
def test_bad_reach(reach):
    with pytest.raises(ValueError, match="'reach' must be two numbers of steps"):
        ChimeraConv(CHANNELS, reach=reach)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_made_in_half_precision(dtype):
    """The ranges of heads must not be those of its rounding."""
    want = ChimeraConv(8, heads=4).delta_bias
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        got = ChimeraConv(8, heads=4).delta_bias
    finally:
        torch.set_default_dtype(before)
    assert torch.allclose(got[2].float(), want[2], rtol=1e-2)
