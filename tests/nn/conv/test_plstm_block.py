"""What holds for every layer of pLSTM."""

import copy
import io
from functools import partial

import pytest
import torch
from asserts import assert_near
from plstm import (
    DAGS,
    EDGE,
    IN,
    NODES,
    OUT,
    call,
    everywhere,
    formula,
    make_conv,
    make_inputs,
    node_gates,
)
from torch_geometric.utils import to_undirected

from pyg_chimera.nn import GPSLayer, PLSTMConv, PLSTMGridConv
from pyg_chimera.ops import line_graph


@everywhere
@pytest.mark.parametrize("num_nodes", [0, 1, 3])
def test_no_edges(layer, num_nodes):
    conv = make_conv(IN, OUT, layer=layer).double()
    x = torch.randn(num_nodes, IN, dtype=torch.double, requires_grad=True)
    none = torch.empty(2, 0, dtype=torch.long), torch.empty(0, EDGE).double()
    if layer.func is PLSTMGridConv:  # of single nodes
        one = torch.ones(num_nodes, dtype=torch.long)
        out = conv(x, height=one, width=one)
        expected = [formula(conv, y.view(1, -1), [], (1, 1)) for y in x]
    else:
        out = call(conv, x, [none] * conv.num_dags)
        expected = [formula(conv, x, [none] * conv.num_dags)] if num_nodes else []
    assert out.shape == (num_nodes, OUT)
    if num_nodes > 0:
        assert_near(out, torch.cat(expected))
    out.sum().backward()
    assert x.grad.isfinite().all()
    if layer.keywords.get("backend") != "reference":
        names = [n for n, p in conv.named_parameters() if p.grad is None]
        assert names == []


@everywhere
def test_every_parameter_is_trained(layer):
    """From the start on, those of gates that begin at zero among them."""
    conv = layer(IN, OUT).double()
    x = torch.randn(9, IN, dtype=torch.double)
    pairs = torch.combinations(torch.arange(9)).t()
    if layer.func is PLSTMGridConv:
        out = conv(x, height=3, width=3)
    else:
        edge_index = pairs if conv.order is None else to_undirected(pairs)
        attr = torch.randn(edge_index.size(1), EDGE, dtype=torch.double)
        out = call(conv, x, [(edge_index, attr)] * conv.num_dags)
    out.square().sum().backward()
    for name, parameter in conv.named_parameters():
        grad = parameter.grad.view(parameter.size(0), -1)
        rows = (grad != 0).any(1)
        assert rows.all() if "lin" in name else rows.any(), name


@everywhere
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(layer, dtype):
    conv = layer(IN, OUT)
    x, graphs = make_inputs(conv, torch.float32)
    expected = call(conv, x, graphs)
    with torch.autocast("cpu", dtype=dtype):
        out = call(conv, x, graphs)
        out.float().sum().backward()
    assert_near(out, expected, 0.05)
    assert all(p.grad.isfinite().all() for p in conv.parameters())
    conv = conv.to(dtype)
    conv.zero_grad()
    graphs = [(index, attr.to(dtype)) for index, attr in graphs]
    out = call(conv, x.to(dtype), graphs)
    assert out.dtype == dtype
    assert_near(out, expected, 0.05)
    out.sum().backward()
    for parameter in conv.parameters():
        assert parameter.grad.dtype == dtype
        assert parameter.grad.isfinite().all()


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
    else:
        assert torch.autograd.gradcheck(lambda *y: conv(y[0], edge_index, y[1]),
                                        (x, attr))  # fmt: skip


@everywhere
def test_gates_at_the_start(layer):
    """Nearly shut, and without decay; the same for all nodes and edges."""
    conv = layer(IN, OUT)
    gates = node_gates(conv, torch.randn(3, IN), 0)
    assert not conv.lin_gate.weight.any()
    if layer.func is PLSTMGridConv:
        assert (gates["D"] == -6).all()
        assert (gates["S"] == -4).all()
        assert (gates["M"] == -4).all()
        assert (gates["decay"] == 1).all()
        if conv.mode == "P":  # heads spread over the angles
            spread = {1: [0], 2: [-2, 2]}[conv.heads]
            assert (gates["angle"] == torch.tensor(spread)).all()
    else:
        assert conv.lin_edge is None or not conv.lin_edge.weight.any()
        assert (gates["D"] == -5).all()
        assert (gates["S"] == -5).all()
        assert (gates["M"] == -5).all()
        assert (gates["second"] == 1).all()


@everywhere
def test_lazy_channels(layer):
    unknown = {"edge_dim": -1} if "edge_dim" in layer.keywords else {}
    lazy = layer(-1, OUT, **unknown)
    conv = layer(IN, OUT)
    inputs = make_inputs(conv, torch.float32)
    twin = copy.deepcopy(lazy)
    for made in (lazy, twin):
        torch.manual_seed(3)
        call(made, *inputs)
        assert not made.lin_gate.weight.any()
    shapes = [{n: p.shape for n, p in made.state_dict().items()} for made in
              (lazy, twin, conv)]  # fmt: skip
    assert shapes[0] == shapes[1] == shapes[2]
    unmade = layer(-1, OUT, **unknown)
    for made in (lazy, unmade):
        made.load_state_dict(conv.state_dict())
        assert_near(call(made, *inputs), call(conv, *inputs), 1e-6)


@everywhere
def test_copies_and_files(layer):
    conv = make_conv(IN, OUT, layer=layer)
    inputs = make_inputs(conv, torch.float32)
    out = call(conv, *inputs)
    assert call(copy.deepcopy(conv), *inputs).equal(out)
    other = make_conv(IN, OUT, layer=layer)
    assert not torch.allclose(call(other, *inputs), out)
    file = io.BytesIO()
    torch.save(conv.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert call(other, *inputs).equal(out)


@everywhere
def test_reset_parameters(layer):
    used = make_conv(IN, OUT, layer=layer)
    fresh = layer(IN, OUT)
    for conv in (used, fresh):
        torch.manual_seed(1)
        conv.reset_parameters()
    for (name, a), b in zip(used.named_parameters(), fresh.parameters(), strict=True):
        assert a.equal(b), name


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
    conv = layer(IN, OUT, gate_biases=biases, gate_std=2.0)
    direct, source, mark, decay = (
        x.detach() for x in conv.gate_bias.split(conv._biased, dim=1)[:4]
    )
    for x, start in zip((source, mark, direct, decay), (*biases, 1.0), strict=True):
        assert (x == start).all()
    assert float(conv.lin_gate.weight.detach().std()) == pytest.approx(
        2 / IN**0.5, rel=0.3
    )
    lazy = layer(-1, OUT, gate_std=2.0)
    lazy(torch.randn(4, IN), torch.tensor([[0], [1]]), **kwargs)
    assert lazy.lin_gate.weight.std() > 0
    default = layer(IN, OUT)
    assert not default.lin_gate.weight.any()
    assert float(default.gate_bias.detach().min()) == (-6 if kwargs else -5)
    with pytest.raises(ValueError, match="'gate_biases' must be three numbers"):
        layer(IN, OUT, gate_biases=(1.0,))
    with pytest.raises(ValueError, match="'gate_std' must be >= 0"):
        layer(IN, OUT, gate_std=-1.0)
