"""The layers of pLSTM as their suites see them: inputs and options."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from dense_layers import Graphs
from torch import Tensor

from pyg_chimera.nn import PLSTMConv, PLSTMGridConv

IN, OUT, EDGE = 5, 8, 3
DAGS = [  # with duplicate edges, and against the order of nodes
    [(0, 1), (1, 2), (0, 2), (0, 2), (2, 6), (4, 5), (2, 1 + 2)],
    [(2, 1), (1, 0), (6, 2), (6, 1), (5, 4), (2, 0)],
    [(5, 0), (4, 1), (3, 6), (0, 4)],
]
GRAPH = [(0, 1), (1, 0), (1, 2), (2, 2), (2, 0), (0, 1), (4, 5), (5, 4), (2, 6), (6, 0)]
NODES = 7  # nodes 3 and 6 are alone somewhere

Edges = tuple[Tensor, Tensor | None]
Layer = PLSTMConv | PLSTMGridConv


def linear(lin: torch.nn.Module, x: Tensor) -> Tensor:
    return x @ lin.weight.t() + (0 if lin.bias is None else lin.bias)


def split_gates(x: Tensor, names: dict[str, tuple]) -> list[dict[str, Tensor]]:
    """The gates of each row, by name."""
    sizes = [math.prod(shape) for shape in names.values()]
    assert x.size(1) == sum(sizes)
    parts = x.split(sizes, dim=1)
    return [{name: part[i].view(shape)
             for (name, shape), part in zip(names.items(), parts, strict=True)}
            for i in range(x.size(0))]  # fmt: skip


def node_gates(conv: Layer, x: Tensor, d: int) -> dict[str, Tensor]:
    """What is made of the nodes for one DAG, by name."""
    H, p = conv.heads, int(conv.mode == "P")
    if isinstance(conv, PLSTMGridConv):
        names = {
            "D": (H,), "S": (2, H), "M": (2, H),
            "decay": (4, H) if p else (3, H), "angle": (p * H,),
        }  # fmt: skip
        biased = list(names)
    else:
        J, row = conv.tracking, p * int(conv.normalization == "row")
        names = {"D": (H,), "S": (H, J), "M": (H, J), "second": (H, J),
                 "first": (H, J), "row": (row * H,), "S'": (H, J), "M'": (H, J),
                 "second'": (H, J), "column": ((p - row) * H,)}  # fmt: skip
        biased = ["D", "S", "M", "second"]
    gates = linear(conv.lin_gate, x).unflatten(1, (conv.gate_bias.size(0), -1))[:, d]
    rows = split_gates(gates, names)
    gates = {name: torch.stack([row[name] for row in rows]) for name in names}
    (bias,) = split_gates(conv.gate_bias[d : d + 1], {n: names[n] for n in biased})
    return gates | {name: gates[name] + bias[name] for name in biased}


def graphs_of(conv: Any, dags: list[Edges], mask: Tensor | None = None) -> Graphs:
    """As the formula takes them."""
    edges, attrs = map(list, zip(*dags, strict=True))
    return Graphs(edges, None if conv.edge_dim is None else attrs, mask=mask)


def make_conv(*args, layer: type[Layer] = PLSTMConv, **kwargs) -> Layer:
    """A layer whose gates are neither shut nor the same everywhere."""
    conv = layer(*args or (IN, OUT), **kwargs)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn_like(parameter) / 3)
        conv.lin_gate.weight /= 4
    return conv


def make_inputs(
    conv: Layer, dtype: torch.dtype = torch.double
) -> tuple[Tensor, list[Edges]]:
    is_dag = isinstance(conv, PLSTMConv) and conv.order in (None, "auto")
    edges = DAGS[: conv.num_dags] if is_dag else [GRAPH]
    graphs = [
        (torch.tensor(e).t().contiguous(), torch.randn(len(e), EDGE, dtype=dtype))
        for e in edges
    ]
    return torch.randn(NODES, IN, dtype=dtype), graphs


def call(conv: Layer, x: Tensor, graphs: list[Edges], **kwargs) -> Tensor:
    if isinstance(conv, PLSTMGridConv):
        return conv(x, **({"height": 1, "width": max(x.size(0), 1)} | kwargs))
    edge_index, attrs = map(list, zip(*graphs, strict=True))
    edge_attr = None if conv.edge_dim is None else attrs
    if len(graphs) == 1:
        return conv(x, edge_index[0], edge_attr and edge_attr[0], **kwargs)
    return conv(x, edge_index, edge_attr, **kwargs)


OPTIONS = [
    {},
    {"mode": "D"},
    {"normalization": "row"},
    {"edge_dim": EDGE, "heads": 2},
    {"edge_dim": EDGE, "heads": 2, "normalization": "row"},
    {"edge_dim": EDGE, "heads": 2, "mode": "D"},
    {"state_channels": 3, "heads": 4, "bias": False},
    {"backend": "torch", "form": "state", "heads": 2},
    {"backend": "reference", "mode": "D"},
    {"tracking": 2, "heads": 2},
    {"tracking": 3, "mode": "D", "edge_dim": EDGE},
    {"tracking": 2, "normalization": "row", "edge_dim": EDGE, "order": "order"},
    {"num_dags": 2, "edge_dim": EDGE, "heads": 2},
    {"num_dags": 3, "mode": "D", "edge_dim": EDGE},
    {"num_dags": 2, "tracking": 2, "normalization": "row"},
    {"order": "order", "heads": 2},
    {"order": "order", "mode": "D", "edge_dim": EDGE},
    {"order": "degree", "normalization": "row", "heads": 2, "edge_dim": EDGE},
    {"order": "bfs", "backend": "reference"},
    {"order": "bfs", "turns": False, "edge_dim": EDGE},
    {"order": "bfs", "mode": "D", "tracking": 2, "heads": 2},
]
GRIDS = [
    {"heads": 2},
    {"normalization": "row"},
    {"mode": "D", "heads": 4, "state_channels": 3},
    {"mode": "D", "heads": 2, "num_dags": 1},
    {"num_dags": 2},
    {"heads": 2, "bias": False, "backend": "reference"},
]


def named(x: dict) -> str:
    return "-".join(f"{k}={v}" for k, v in x.items()) or "default"


on_graphs = pytest.mark.parametrize("options", OPTIONS, ids=named)
on_grids = pytest.mark.parametrize("options", GRIDS, ids=named)
everywhere = pytest.mark.parametrize(
    "layer",
    [partial(PLSTMConv, **options) for options in OPTIONS]
    + [partial(PLSTMGridConv, **options) for options in GRIDS],
    ids=lambda layer: f"{layer.func.__name__}-{named(layer.keywords)}",
)
