"""What holds for every layer of pLSTM."""

from functools import partial

import pytest
import torch
from asserts import assert_near
from plstm import (
    IN,
    OUT,
    everywhere,
    node_gates,
)

from pyg_chimera.nn import PLSTMConv, PLSTMGridConv


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
