"""Layers of pLSTM are compiled and exported whole, for graphs not seen before."""

from collections.abc import Callable

import pytest
import torch
from asserts import assert_near
from plstm import EDGE, make_conv
from torch import Tensor
from torch_geometric.utils import grid

from pyg_chimera.nn import GPSLayer, PLSTMGridConv
from pyg_chimera.ops import line_graph
from pyg_chimera.ops.structure import cache

SIZE = 4  # of nodes' features


class Stack(torch.nn.Module):
    """A layer of each mode, on its own or in a layer of GPS."""

    def __init__(self, order: str | None, gps: bool):
        super().__init__()
        P = make_conv(SIZE, SIZE, 2, order=order, edge_dim=EDGE)
        D = make_conv(SIZE, SIZE, 2, "D", order=order, tracking=2)
        convs = [GPSLayer(SIZE, conv=conv) for conv in (P, D)] if gps else [P, D]
        self.convs = torch.nn.ModuleList(convs)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, **lines):
        for conv in self.convs:
            x = conv(x, edge_index, edge_attr=edge_attr, **lines)
        return x


def unseen(order: str | None, height: int) -> tuple[Tensor, ...]:
    """A graph of which nothing is remembered, and its features."""
    edge_index, _ = grid(height, height + 1)
    row, col = edge_index
    edge_index = edge_index[:, row < col if order is None else row != col]
    edge_index = torch.randperm(height * (height + 1))[edge_index]
    cache._CACHE.values.clear()
    x = torch.randn(height * (height + 1), SIZE)
    return x, edge_index, torch.randn(edge_index.size(1), EDGE)


def assert_same(
    compiled: Callable, module: torch.nn.Module, *args, **kwargs: Tensor
) -> None:
    """Outputs and gradients; the compiled one is called first."""
    results = []
    for call in (compiled, module):
        module.zero_grad()
        out = call(*args, **kwargs)
        out.square().sum().backward()
        results.append([out, *(p.grad.clone() for p in module.parameters())])
    for a, b in zip(*results, strict=True):
        assert_near(a, b, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(
    ("gps", "backend"), [(False, "eager"), (False, "aot_eager"), (True, "aot_eager")]
)
@pytest.mark.parametrize("order", [None, "order", "degree", "bfs"])
def test_compile(order, gps, backend, dynamic):
    model = Stack(order, gps).eval().double()  # some gradients are tiny
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)
    for height in (3, 4):
        x, edge_index, attr = unseen(order, height)
        assert_same(compiled, model, x.double(), edge_index, attr.double())


@pytest.mark.slow
def test_compile_with_line_graphs():
    model = Stack(None, gps=False)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for height in (3, 4):
        x, edge_index, attr = unseen(None, height)
        lines = line_graph(edge_index, x.size(0)).edge_index
        cache._CACHE.values.clear()
        assert_same(compiled, model, x, edge_index, attr, line_edge_index=lines)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("mode", ["P", "D"])
def test_compile_grids(mode, backend):
    conv = make_conv(SIZE, SIZE, 2, mode, layer=PLSTMGridConv)
    compiled = torch.compile(conv, fullgraph=True, backend=backend)
    for height in (2, 3):
        x = torch.randn(height * 3, SIZE)
        cache._CACHE.values.clear()
        assert_same(compiled, conv, x, height=height, width=3)


@pytest.mark.parametrize("mode", ["P", "D"])
@pytest.mark.parametrize("order", [None, "order", "degree", "bfs"])
def test_export(order, mode):
    conv = make_conv(SIZE, SIZE, 2, mode, order=order, edge_dim=EDGE)
    nodes, edges = torch.export.Dim("nodes", min=2), torch.export.Dim("edges", min=2)
    shapes = {"x": {0: nodes}, "edge_index": {1: edges}, "edge_attr": {0: edges}}
    args = unseen(order, 3)
    exported = torch.export.export(conv, args, dynamic_shapes=shapes).module()
    for height in (3, 5):
        args = unseen(order, height)
        assert_near(exported(*args), conv(*args), 1e-5)


@pytest.mark.parametrize("mode", ["P", "D"])
def test_export_grids(mode):
    """Of one size, as sizes are numbers."""
    conv = make_conv(SIZE, SIZE, 2, mode, layer=PLSTMGridConv)
    sizes = {"height": 3, "width": 4}
    exported = torch.export.export(conv, (torch.randn(12, SIZE),), sizes).module()
    x = torch.randn(12, SIZE)
    assert_near(exported(x, **sizes), conv(x, **sizes), 1e-5)
