"""The layers of pLSTM as their suites see them: inputs, options, and their formula.

The formula is written from the docstring alone, one state of one edge at a time.
"""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from asserts import assert_near
from torch import Tensor

from pyg_chimera.nn import PLSTMConv, PLSTMGridConv
from pyg_chimera.ops import multitree, node_order

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


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def orthogonal(vectors: Tensor) -> Tensor:
    out = eye = torch.eye(vectors.size(1), dtype=vectors.dtype)
    for v in vectors:
        out = out @ (eye - 2 * torch.outer(v, v) / v.dot(v))
    return out


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


def transitions(
    conv: PLSTMConv,
    x: Tensor,
    h: int,
    edge_index: Tensor,
    edge_attr: Tensor | None,
    dag: list[int],
    lines: list[tuple[int, int]],
) -> tuple[list[Tensor], list[Tensor], dict, Tensor]:
    """Source and mark of each edge [J], matrices of line edges, direct of nodes."""
    node = [{name: y[:, h] if y.size(1) else None
             for name, y in node_gates(conv, x, d).items()}
            for d in range(conv.gate_bias.size(0))]  # fmt: skip
    edges = edge_index.t().tolist()
    J, p = conv.tracking, conv.mode == "P"
    attr = {name: [0.0] * len(edges) for name in ("S", "M", "second", "first", "soft")}
    if conv.edge_dim is not None:
        names = {name: (conv.heads, J) for name in ("S", "M", "second", "first")}
        names["soft"] = (conv.heads if p else 0,)
        table = linear(conv.lin_edge, edge_attr).unflatten(1, (len(node), -1))
        own = [row[d : d + 1] for row, d in zip(table, dag, strict=True)]
        for e, row in enumerate(split_gates(torch.cat([table[:0, 0], *own]), names)):
            for name in names:
                attr[name][e] = row[name][h] if row[name].size(0) else None

    source = [sigmoid(node[dag[e]]["S"][u] + node[dag[e]]["S'"][w] + attr["S"][e])
              for e, (u, w) in enumerate(edges)]  # fmt: skip
    mark = [sigmoid(node[dag[e]]["M"][u] + node[dag[e]]["M'"][w] + attr["M"][e])
            for e, (u, w) in enumerate(edges)]  # fmt: skip
    if conv.tracking > 1:
        vectors = linear(conv.lin_track, x).view(-1, *conv.track_bias.shape)
        vectors = (vectors + conv.track_bias)[..., h, :, :]
    transition = {}
    for before, e in lines:
        (t, u), (_, w) = edges[before], edges[e]
        there, here = node[dag[before]], node[dag[e]]
        assert edges[before][1] == edges[e][0]
        total = there["first"][t] + here["second"][u] + here["second'"][w]
        g = torch.tanh(5 * (total + attr["first"][before] + attr["second"][e]))
        alpha = 1.0
        if p and conv.normalization == "column":
            near = [k for k in range(len(edges))
                    if edges[k][0] == u and dag[k] == dag[e]]  # fmt: skip
            score = {k: torch.exp(here["column"][edges[k][1]] + attr["soft"][k])
                     for k in near}  # fmt: skip
            alpha = score[e] / sum(score.values())
        elif p:
            near = [k for k in range(len(edges))
                    if edges[k][1] == u and dag[k] == dag[before]]  # fmt: skip
            score = {k: torch.exp(there["row"][edges[k][0]] + attr["soft"][k])
                     for k in near}  # fmt: skip
            alpha = score[before] / sum(score.values())
        matrix = torch.diag(g)
        if conv.tracking > 1:
            U, W = (orthogonal(v) for v in vectors[u, dag[e]])
            matrix = U @ matrix @ W.t()
        transition[before, e] = alpha * matrix
    return source, mark, transition, sum(sigmoid(y["D"]) for y in node)


def graph_lines(
    conv: PLSTMConv, edge_index: Tensor, dag: list[int]
) -> list[tuple[int, int]]:
    """Consecutive edges of a DAG, and turns from the second DAG of an order."""
    edges = edge_index.t().tolist()
    turns = conv.order not in (None, "auto") and conv.turns
    lines = [
        (a, b)
        for a, (t, u) in enumerate(edges)
        for b, (v, w) in enumerate(edges)
        if u == v and (dag[a] == dag[b] or (turns and dag[a] > dag[b] and t != w))
    ]
    if conv.mode == "D":
        pairs = torch.tensor(lines, dtype=torch.long).view(-1, 2).t()
        kept = multitree(pairs, len(edges))
        lines = [line for line, keep in zip(lines, kept.tolist(), strict=True) if keep]
    return lines


def grid_dags(height: int, width: int) -> list[tuple[Tensor, list[int]]]:
    """Edges of the four orderations, and their directions."""
    outs = []
    for right, down in ((1, 1), (-1, -1), (1, -1), (-1, 1)):
        edges, direction = [], []
        for i in range(height):
            for j in range(width):
                if 0 <= j + right < width:
                    edges.append((i * width + j, i * width + j + right))
                    direction.append(0)
                if 0 <= i + down < height:
                    edges.append((i * width + j, (i + down) * width + j))
                    direction.append(1)
        outs.append((torch.tensor(edges).view(-1, 2).t(), direction))
    return outs


def grid_transitions(
    conv: PLSTMGridConv,
    x: Tensor,
    d: int,
    h: int,
    edge_index: Tensor,
    direction: list[int],
) -> tuple[list[Tensor], list[Tensor], dict, Tensor]:
    node = {name: y[..., h] if y.size(-1) else None
            for name, y in node_gates(conv, x, d).items()}  # fmt: skip
    edges = edge_index.t().tolist()
    source = [sigmoid(node["S"][u, direction[e], None])
              for e, (u, _) in enumerate(edges)]  # fmt: skip
    mark = [sigmoid(node["M"][w, direction[e], None])
            for e, (_, w) in enumerate(edges)]  # fmt: skip
    transition = {}
    for before, (_, u) in enumerate(edges):
        for e, (v, _) in enumerate(edges):
            if u != v:
                continue
            start, to = direction[before], direction[e]
            if conv.mode == "D":
                if (start, to) == (1, 0):
                    continue
                which = {(0, 0): 0, (0, 1): 1, (1, 1): 2}[start, to]
                g = torch.tanh(5 * node["decay"][u, which])
            else:
                angle = sigmoid(node["angle"][u])
                way = to if conv.normalization == "column" else start
                g = torch.tanh(5 * node["decay"][u, 2 * to + start])
                g = g * (angle if way == 0 else 1 - angle)
            transition[before, e] = g.view(1, 1)
    return source, mark, transition, sigmoid(node["D"])


def windows(y: Tensor, conv: PLSTMGridConv, height: int, width: int) -> Tensor:
    """What is around each node, by PyTorch's own convolution."""
    rows, columns = conv.local_weight.shape[1:]
    above, left = rows // 2, columns // 2
    pad = (left, columns - 1 - left, above, rows - 1 - above)
    if conv.num_dags == 1:
        pad = (columns - 1, 0, rows - 1, 0)
    image = F.pad(y.t().reshape(1, -1, height, width), pad)
    return (
        F.conv2d(image, conv.local_weight[:, None], groups=y.size(1))[0].flatten(1).t()
    )


def formula(
    conv: Layer,
    x: Tensor,
    graphs: list[Edges],
    size: tuple[int, int] | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The docstring: head by head, edge by edge, one state at a time."""
    V, H = x.size(0), conv.heads
    lins = (conv.lin_query, conv.lin_key, conv.lin_value)
    parts = [linear(lin, x) for lin in lins]
    if size is not None and conv.local_weight is not None:
        sizes = [part.size(1) for part in parts]
        parts = windows(torch.cat(parts, dim=1), conv, *size).split(sizes, dim=1)
    query, key, value = (part.view(V, H, -1) for part in parts)
    query = query / math.sqrt(conv.state_channels)
    num_dags = conv.gate_bias.size(0)
    if size is None:
        edge_index, attr, dag, mask = joined(conv, V, graphs, mask)
        lines = graph_lines(conv, edge_index, dag)
    rows = []
    for h in range(H):
        if size is None:
            gates = transitions(conv, x, h, edge_index, attr, dag, lines)
            passes = [(edge_index, gates)]
        else:
            passes = [
                (index, grid_transitions(conv, x, d, h, index, direction))
                for d, (index, direction) in enumerate(grid_dags(*size)[:num_dags])
            ]
        y = [0 * value[v, h] for v in range(V)]
        for index, (source, mark, transition, direct) in passes:
            edges = index.t().tolist()
            states = {}

            def state(
                e, states=states, edges=edges, source=source, transition=transition, h=h
            ):
                if e not in states:
                    u = edges[e][0]
                    own = torch.outer(key[u, h], value[u, h])
                    total = source[e].view(-1, 1, 1) * own
                    for before, after in transition:
                        if after == e:
                            total = total + torch.einsum(
                                "ij,jnp->inp", transition[before, e], state(before)
                            )
                    states[e] = total * (1 if mask is None else mask[e])
                return states[e]

            for v in range(V):
                own = torch.outer(key[v, h], value[v, h])
                total = direct[v] * own
                for e, (_, w) in enumerate(edges):
                    if w == v:
                        total = total + torch.einsum("j,jnp->np", mark[e], state(e))
                y[v] = y[v] + query[v, h] @ total / num_dags
        y = torch.stack(y) if V else value[:, h]
        rows.append(y / torch.sqrt(y.square().mean(-1, keepdim=True) + 1e-5))
    y = torch.cat(rows, dim=1) * conv.norm_weight
    return linear(conv.lin_out, y)


def joined(
    conv: PLSTMConv, num_nodes: int, graphs: list[Edges], mask: Tensor | None
) -> tuple[Tensor, Tensor | None, list[int], Tensor | None]:
    """The edges of all DAGs, their features, the DAG of each, and their masks."""
    edge_index = torch.cat([index for index, _ in graphs], dim=1)
    attrs = [attr for _, attr in graphs if attr is not None]
    attr = torch.cat(attrs) if attrs else None
    if conv.order in (None, "auto"):
        dag = [d for d, (index, _) in enumerate(graphs) for _ in index[0]]
        return edge_index, attr, dag, mask
    rank = node_order(edge_index, num_nodes, conv.order)
    if conv.order == "order":
        assert rank.tolist() == list(range(num_nodes))
    row, col = rank[edge_index]
    kept = row != col
    dag = (row > col)[kept].long().tolist()
    attr, mask = (None if y is None else y[kept] for y in (attr, mask))
    return edge_index[:, kept], attr, dag, mask


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


def assert_is(conv: Layer, out: Tensor, expected: Tensor, x: Tensor) -> None:
    """So are the gradients of everything."""
    assert_near(out, expected)
    weigh = torch.randn_like(out)
    wrt = {"x": x, **dict(conv.named_parameters())}
    options = {"allow_unused": True, "materialize_grads": True}
    grads = torch.autograd.grad(out, list(wrt.values()), weigh, **options)
    expected = torch.autograd.grad(expected, list(wrt.values()), weigh, **options)
    for name, a, b in zip(wrt, grads, expected, strict=True):
        assert_near(a, b, 1e-8, name)


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
