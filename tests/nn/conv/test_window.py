"""Filters in front of the layers on grids."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from asserts import assert_near

from pyg_chimera.nn import ChimeraGridConv, PLSTMGridConv
from pyg_chimera.ops import explain, grid_conv

IN = 4
LAYERS = {"chimera": ChimeraGridConv, "plstm": PLSTMGridConv}
layers = pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)


def sources(conv, node, height, width):
    """The nodes on which the output of one depends."""
    x = torch.randn(height * width, IN, requires_grad=True)
    conv(x, height=height, width=width)[node].sum().backward()
    return x.grad.abs().sum(1).nonzero().flatten().tolist()


@layers
def test_a_filter_of_the_node_itself_is_none(layer):
    conv, plain = layer(IN, 6, heads=2), layer(IN, 6, heads=2, window=None)
    with torch.no_grad():
        conv.local_weight.zero_()[:, 1, 1] = 1
    state = conv.state_dict()
    del state["local_weight"]
    plain.load_state_dict(state)
    x, sizes = torch.randn(12, IN), {"height": 3, "width": 4}
    assert_near(conv(x, **sizes), plain(x, **sizes), 1e-5)


def test_projections_are_those_of_the_neighbourhood():
    options = {"share": "all", "window": (3, 5), "qk_norm": False}
    conv = ChimeraGridConv(IN, IN, state_channels=3, **options)
    x, sizes = torch.randn(12, IN), {"height": 3, "width": 4}
    nodes = conv.project(x, lambda y: grid_conv(y, conv.local_weight, **sizes))
    query, key, value = conv.query_key_value(nodes)
    lins = (conv.lin_value, conv.lin_key, conv.lin_query)
    for lin, y, weight in zip(
        lins, (value, key, query), conv.local_weight.split((IN, 3, 3)), strict=True
    ):
        expected = F.silu(grid_conv(lin(x), weight, **sizes))
        assert_near(y.flatten(1), expected, 1e-5)


@layers
def test_causal_windows_see_nothing_of_the_future(layer):
    conv = layer(IN, num_dags=1, window=(2, 3))
    assert sources(conv, 6, 3, 4) == [0, 1, 2, 4, 5, 6]


@layers
def test_bad_windows(layer):
    for bad in ((3,), 3, (0, 3), "33", (3.0, 3)):
        with pytest.raises((TypeError, ValueError), match="'window' must be"):
            layer(IN, window=bad)


@layers
@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_the_backend_is_that_of_filters_too(layer, backend):
    conv, x = layer(IN, 6, heads=2, backend=backend), torch.randn(6, IN)
    found = [x.backend for x in explain(conv, x, height=2, width=3)]
    assert set(found) == {backend}
    assert len(found) > 1
    if backend == "reference":  # which has derivatives of any kind and order
        function = partial(conv, height=2, width=3)
        torch.func.hessian(lambda y: function(y).sum())(x)
        torch.func.jvp(function, (x,), (x,))
