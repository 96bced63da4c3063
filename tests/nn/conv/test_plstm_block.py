"""What holds for every layer of pLSTM."""

from functools import partial

import pytest
import torch
from asserts import assert_near
from plstm import (
    DAGS,
    IN,
    NODES,
    OUT,
    everywhere,
    make_conv,
    node_gates,
)

from pyg_chimera.nn import GPSLayer, PLSTMConv, PLSTMGridConv
from pyg_chimera.ops import line_graph


@pytest.mark.parametrize(
    "layer",
    [
        partial(PLSTMConv, heads=2, edge_dim=2),
        partial(PLSTMConv, mode="D"),
        partial(PLSTMConv, tracking=2),
        partial(PLSTMConv, order="order"),
        PLSTMGridConv,
    ],
    ids=["edge_dim", "D", "tracking", "order", "grid"],
)
def test_gradcheck(layer):
    conv = make_conv(2, 2, layer=layer).double()
    x = torch.randn(4, 2, dtype=torch.double, requires_grad=True)
    attr = torch.randn(4, 2, dtype=torch.double, requires_grad=True)
    edge_index = torch.tensor([[0, 1, 1, 2], [1, 2, 3, 3]])
    if layer is PLSTMGridConv:
        assert torch.autograd.gradcheck(lambda x: conv(x, height=2, width=2), x)
    elif conv.edge_dim is None:
        assert torch.autograd.gradcheck(lambda x: conv(x, edge_index), x)
    else:
        assert torch.autograd.gradcheck(lambda *y: conv(y[0], edge_index, y[1]),
                                        (x, attr))  # fmt: skip


@everywhere
def test_gates_at_the_start(layer):
    """The same for all nodes and edges, and without decay if so asked."""
    conv = layer(IN, OUT, reach=None)
    gates = node_gates(conv, torch.randn(3, IN), 0)
    assert not conv.lin_gate.weight.any()
    if layer.func is PLSTMGridConv:
        assert (gates["D"] == -3).all()
        assert (gates["S"] == 0).all()
        assert (gates["M"] == 0).all()
        assert (gates["decay"] == 1).all()
        if conv.mode == "P":  # heads spread over the angles
            spread = {1: [0.0], 2: [-2, 2], 4: [-2, -2 / 3, 2 / 3, 2]}[conv.heads]
            assert_near(
                gates["angle"], torch.tensor(spread).expand_as(gates["angle"]), 1e-6
            )
    else:
        assert conv.lin_edge is None or not conv.lin_edge.weight.any()
        assert (gates["D"] == -3).all()
        assert (gates["S"] == 0).all()
        assert (gates["M"] == 0).all()
        assert (gates["second"] == 1).all()


@pytest.mark.parametrize("which", ["dag", "order", "grid"])
def test_in_a_gps_layer(which):
    """Whatever the layer takes is taken by name."""
    edge_index = torch.tensor(DAGS[0]).t()
    line = line_graph(edge_index, NODES).edge_index
    conv, kwargs = {
        "dag": (PLSTMConv(OUT, heads=2), {"line_edge_index": line}),
        "order": (PLSTMConv(OUT, heads=2, order="order"), {}),
        "grid": (PLSTMGridConv(OUT, heads=2), {"height": 1, "width": NODES}),
    }[which]
    x, batch = torch.randn(NODES, OUT), torch.zeros(NODES, dtype=torch.long)
    out = GPSLayer(OUT, conv=conv)(x, edge_index, batch, **kwargs)
    assert out.shape == x.shape
    out.sum().backward()
    assert all(p.grad is not None for p in conv.parameters())


@pytest.mark.parametrize(
    ("layer", "kwargs"),
    [
        (partial(PLSTMConv, order="order"), {}),
        (PLSTMGridConv, {"height": 2, "width": 2}),
    ],
    ids=["order", "grid"],
)
def test_where_gates_start(layer, kwargs):
    biases = (-1.0, 0.5, 2.0)
    conv = layer(IN, OUT, gate_biases=biases, reach=None)
    direct, source, mark, decay = (
        x.detach() for x in conv.gate_bias.split(conv._biased, dim=1)[:4]
    )
    for x, start in zip((source, mark, direct, decay), (*biases, 1.0), strict=True):
        assert (x == start).all()
    lazy = layer(-1, OUT)
    lazy(torch.randn(4, IN), torch.tensor([[0], [1]]), **kwargs)
    default = layer(IN, OUT)
    assert not lazy.lin_gate.weight.any()
    assert not default.lin_gate.weight.any()
    assert default.gate_bias.detach().flatten()[0] == -3
    with pytest.raises(ValueError, match="'gate_biases' must be three numbers"):
        layer(IN, OUT, gate_biases=(1.0,))


@everywhere
def test_reach(layer):
    """What is left of a signal after as many steps as a head is to hear is 1 / e."""
    conv = layer(IN, OUT, reach=(2.0, 32.0))
    gates = node_gates(conv, torch.zeros(3, IN), 0)
    grid = layer.func is PLSTMGridConv
    passed = torch.tanh(5 * (gates["decay"] if grid else gates["second"].mT))
    heads = (torch.arange(conv.heads) + 0.5) / conv.heads
    expected = torch.exp(-1 / (2 * 16**heads))
    assert_near(passed.detach(), expected.expand_as(passed), 1e-5)
    with pytest.raises(ValueError, match="'reach' must be two numbers of steps"):
        layer(IN, OUT, reach=(0.0, 4.0))
