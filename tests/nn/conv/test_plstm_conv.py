import copy
import io
import math

import pytest
import torch
import torch_geometric.typing
from asserts import assert_batched_equals_single, assert_near, assert_permutes
from hypothesis import given, settings
from strategies import Graph, dags, graphs
from torch import Tensor
from torch_geometric import EdgeIndex
from torch_geometric.data import Data
from torch_geometric.explain import Explainer, GNNExplainer
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks
from torch_geometric.loader import DataLoader
from torch_geometric.nn import Sequential
from torch_geometric.utils import (
    coalesce,
    grid,
    to_torch_coo_tensor,
    to_torch_csr_tensor,
    to_undirected,
)

from pyg_chimera.nn import GPSLayer, PLSTMConv
from pyg_chimera.ops import CycleError, line_graph, multitree, node_order

IN, OUT, EDGE = 5, 8, 3
DAGS = [  # with duplicate edges, and against the order of nodes
    [(0, 1), (1, 2), (0, 2), (0, 2), (2, 6), (4, 5), (2, 1 + 2)],
    [(2, 1), (1, 0), (6, 2), (6, 1), (5, 4), (2, 0)],
    [(5, 0), (4, 1), (3, 6), (0, 4)],
]
GRAPH = [(0, 1), (1, 0), (1, 2), (2, 2), (2, 0), (0, 1), (4, 5), (5, 4), (2, 6), (6, 0)]
NODES = 7  # nodes 3 and 6 are alone somewhere
SIZES = [(2, 3), (1, 4), (3, 1), (1, 1)]  # of grids

Edges = tuple[Tensor, Tensor | None]


@pytest.fixture(autouse=True)
def _one_thread():
    """Inputs are tiny: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -------------------------------------------------------------------- the whole formula


def linear(lin: torch.nn.Module, x: Tensor) -> Tensor:
    return x @ lin.weight.t() + (0 if lin.bias is None else lin.bias)


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + torch.exp(-x))


def orthogonal(vectors: Tensor) -> Tensor:
    out = eye = torch.eye(vectors.size(1), dtype=vectors.dtype)
    for v in vectors:
        out = out @ (eye - 2 * torch.outer(v, v) / v.dot(v))
    return out


class Projected:
    """What is made of the nodes and edges for one DAG, by name."""

    def __init__(self, conv: PLSTMConv, x: Tensor, d: int):
        H, J = conv.heads, conv.tracking
        p = int(conv.mode == "P")
        if conv.orient == "grid":
            names = {
                "D": (H,), "S": (2, H), "M": (2, H),
                "decay": (4, H) if p else (3, H), "angle": (p * H,),
            }  # fmt: skip
            biased = list(names)
        else:
            row = p * int(conv.normalization == "row")
            names = {"D": (H,), "S": (H, J), "M": (H, J), "second": (H, J),
                     "first": (H, J), "row": (row * H,), "S'": (H, J), "M'": (H, J),
                     "second'": (H, J), "column": ((p - row) * H,)}  # fmt: skip
            biased = ["D", "S", "M", "second"]
        self.nodes = self._named(linear(conv.lin_gate, x), conv, d, names)
        (bias,) = self._split(conv.gate_bias[d : d + 1], {n: names[n] for n in biased})
        for name in biased:
            self.nodes[name] = self.nodes[name] + bias[name]

    @staticmethod
    def _split(x: Tensor, names: dict) -> list[dict[str, Tensor]]:
        sizes = [math.prod(shape) for shape in names.values()]
        assert x.size(1) == sum(sizes)
        parts = x.split(sizes, dim=1)
        return [{name: part[i].view(shape)
                 for (name, shape), part in zip(names.items(), parts, strict=True)}
                for i in range(x.size(0))]  # fmt: skip

    def _named(self, x, conv, d, names) -> dict[str, Tensor]:
        x = x.view(x.size(0), conv._copies, x.size(1) // conv._copies)[:, d]
        rows = self._split(x, names)
        return {name: torch.stack([row[name] for row in rows]) for name in names}


def transitions(
    conv: PLSTMConv,
    x: Tensor,
    d: int,
    h: int,
    edge_index: Tensor,
    edge_attr: Tensor | None,
    lines: list[tuple[int, int]],
) -> tuple[list[Tensor], list[Tensor], dict, Tensor]:
    """Source and mark of each edge [J], matrices of line edges, direct of nodes."""
    node = {name: y[:, h] if y.size(1) else None
            for name, y in Projected(conv, x, d).nodes.items()}  # fmt: skip
    edges = edge_index.t().tolist()
    J, p = conv.tracking, conv.mode == "P"
    attr = {name: [0.0] * len(edges) for name in ("S", "M", "second", "first", "soft")}
    if conv.edge_dim is not None:
        names = {name: (conv.heads, J) for name in ("S", "M", "second", "first")}
        names["soft"] = (conv.heads if p else 0,)
        table = linear(conv.lin_edge, edge_attr).unflatten(1, (conv._copies, -1))
        for e, row in enumerate(Projected._split(table[:, d], names)):
            for name in names:
                attr[name][e] = row[name][h] if row[name].size(0) else None

    source = [sigmoid(node["S"][u] + node["S'"][w] + attr["S"][e])
              for e, (u, w) in enumerate(edges)]  # fmt: skip
    mark = [sigmoid(node["M"][u] + node["M'"][w] + attr["M"][e])
            for e, (u, w) in enumerate(edges)]  # fmt: skip
    if conv.tracking > 1:
        vectors = linear(conv.lin_track, x).view(-1, *conv.track_bias.shape)
        vectors = (vectors + conv.track_bias)[:, d, :, h]
    transition = {}
    for before, e in lines:
        (t, u), (_, w) = edges[before], edges[e]
        assert edges[before][1] == edges[e][0]
        total = node["first"][t] + node["second"][u] + node["second'"][w]
        g = torch.tanh(5 * (total + attr["first"][before] + attr["second"][e]))
        alpha = 1.0
        if p and conv.normalization == "column":
            near = [k for k in range(len(edges)) if edges[k][0] == u]
            score = {k: torch.exp(node["column"][edges[k][1]] + attr["soft"][k])
                     for k in near}  # fmt: skip
            alpha = score[e] / sum(score.values())
        elif p:
            near = [k for k in range(len(edges)) if edges[k][1] == u]
            score = {k: torch.exp(node["row"][edges[k][0]] + attr["soft"][k])
                     for k in near}  # fmt: skip
            alpha = score[before] / sum(score.values())
        matrix = torch.diag(g)
        if conv.tracking > 1:
            U, W = (orthogonal(v) for v in vectors[u])
            matrix = U @ matrix @ W.t()
        transition[before, e] = alpha * matrix
    return source, mark, transition, sigmoid(node["D"])


def grid_dags(height: int, width: int) -> list[tuple[Tensor, list[int]]]:
    """Edges of the four orientations, and their directions."""
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
    conv: PLSTMConv, x: Tensor, d: int, h: int, edge_index: Tensor, direction: list[int]
) -> tuple[list[Tensor], list[Tensor], dict, Tensor]:
    node = {name: y[..., h] if y.size(-1) else None
            for name, y in Projected(conv, x, d).nodes.items()}  # fmt: skip
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


def formula(
    conv: PLSTMConv,
    x: Tensor,
    graphs: list[Edges],
    size: tuple[int, int] | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """The docstring: DAG by DAG, head by head, edge by edge, one state at a time."""
    V, H = x.size(0), conv.heads
    query, key = (
        linear(lin, x).view(V, H, -1) for lin in (conv.lin_query, conv.lin_key)
    )
    value = linear(conv.lin_value, x).view(V, H, -1)
    query = query / math.sqrt(conv.state_channels)
    if size is not None:
        graphs = grid_dags(*size)
    elif conv.orient is not None:
        graphs, mask = oriented(conv.orient, V, *graphs[0], mask)
    rows = []
    for h in range(H):
        y = [0 * value[v, h] for v in range(V)]
        for d, (edge_index, attr) in enumerate(graphs):
            edges = edge_index.t().tolist()
            if size is not None:
                gates = grid_transitions(conv, x, d, h, edge_index, attr)
            else:
                kept = line_graph(edge_index, V).edge_index
                if conv.mode == "D":
                    kept = kept[:, multitree(kept, len(edges))]
                lines = [tuple(line) for line in kept.t().tolist()]
                gates = transitions(conv, x, d, h, edge_index, attr, lines)
            mark, direct = gates[1], gates[3]
            states = {}

            def state(e, states=states, edges=edges, gates=gates, h=h, d=d):
                if e not in states:
                    u = edges[e][0]
                    own = torch.outer(key[u, h], value[u, h])
                    total = gates[0][e].view(-1, 1, 1) * own
                    for before, after in gates[2]:
                        if after == e:
                            total = total + torch.einsum(
                                "ij,jnp->inp", gates[2][before, e], state(before)
                            )
                    states[e] = total * (1 if mask is None else mask[d][e])
                return states[e]

            for v in range(V):
                own = torch.outer(key[v, h], value[v, h])
                total = direct[v] * own
                for e, (_, w) in enumerate(edges):
                    if w == v:
                        total = total + torch.einsum("j,jnp->np", mark[e], state(e))
                y[v] = y[v] + query[v, h] @ total / len(graphs)
        y = torch.stack(y) if V else value[:, h]
        rows.append(y / torch.sqrt(y.square().mean(-1, keepdim=True) + 1e-5))
    y = torch.cat(rows, dim=1) * conv.norm_weight
    return linear(conv.lin_out, y)


def oriented(
    method: str, num_nodes: int, edge_index: Tensor, attr: Tensor, mask: Tensor | None
) -> tuple[list[Edges], list[Tensor] | None]:
    rank = node_order(edge_index, num_nodes, method)
    if method == "order":
        assert rank.tolist() == list(range(num_nodes))
    row, col = rank[edge_index]
    parts = (row < col, row > col)
    graphs = [(edge_index[:, part], None if attr is None else attr[part])
              for part in parts]  # fmt: skip
    return graphs, None if mask is None else [mask[part] for part in parts]


def make_conv(*args, **kwargs) -> PLSTMConv:
    """A layer whose gates are neither shut nor the same everywhere."""
    conv = PLSTMConv(*args or (IN, OUT), **kwargs)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randn_like(parameter) / 3)
        conv.lin_gate.weight /= 4
    return conv


def make_inputs(
    conv: PLSTMConv, dtype: torch.dtype = torch.double
) -> tuple[Tensor, list[Edges]]:
    edges = DAGS[: conv.num_dags] if conv.orient is None else [GRAPH]
    graphs = [
        (torch.tensor(e).t().contiguous(), torch.randn(len(e), EDGE, dtype=dtype))
        for e in edges
    ]
    return torch.randn(NODES, IN, dtype=dtype), graphs


def call(conv: PLSTMConv, x: Tensor, graphs: list[Edges], **kwargs) -> Tensor:
    if conv.orient == "grid":
        kwargs = {"height": 1, "width": max(x.size(0), 1)} | kwargs
        return conv(x, None, **kwargs)
    if len(graphs) == 1:
        return conv(x, *graphs[0], **kwargs)
    edge_index, edge_attr = map(list, zip(*graphs, strict=True))
    return conv(x, edge_index, edge_attr, **kwargs)


def assert_is(conv: PLSTMConv, out: Tensor, expected: Tensor, x: Tensor) -> None:
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
    {"backend": "torch", "form": "mask"},
    {"backend": "reference", "mode": "D"},
    {"tracking": 2, "heads": 2},
    {"tracking": 3, "mode": "D", "edge_dim": EDGE},
    {"tracking": 2, "normalization": "row", "edge_dim": EDGE, "orient": "order"},
    {"num_dags": 2, "edge_dim": EDGE, "heads": 2},
    {"num_dags": 3, "mode": "D", "edge_dim": EDGE},
    {"num_dags": 2, "tracking": 2, "normalization": "row"},
    {"orient": "order", "heads": 2},
    {"orient": "order", "mode": "D", "edge_dim": EDGE},
    {"orient": "degree", "normalization": "row", "heads": 2, "edge_dim": EDGE},
    {"orient": "bfs", "backend": "reference"},
]
GRIDS = [
    {"orient": "grid", "heads": 2},
    {"orient": "grid", "normalization": "row"},
    {"orient": "grid", "mode": "D", "heads": 4, "state_channels": 3},
    {"orient": "grid", "heads": 2, "bias": False, "backend": "reference"},
]


def named(x: dict) -> str:
    return "-".join(f"{k}={v}" for k, v in x.items()) or "default"


on_graphs = pytest.mark.parametrize("options", OPTIONS, ids=named)
on_grids = pytest.mark.parametrize("options", GRIDS, ids=named)
everywhere = pytest.mark.parametrize("options", OPTIONS + GRIDS, ids=named)


@on_graphs
def test_formula(options):
    conv = make_conv(IN, OUT, **options).double()
    x, graphs = make_inputs(conv)
    x.requires_grad_()
    assert_is(conv, call(conv, x, graphs), formula(conv, x, graphs), x)


@on_grids
@pytest.mark.parametrize("size", [(3, 4), (1, 3), (2, 1), (1, 1)])
def test_formula_on_grids(options, size):
    conv = make_conv(IN, OUT, **options).double()
    height, width = size
    x = torch.randn(height * width, IN, dtype=torch.double, requires_grad=True)
    out = conv(x, None, height=height, width=width)
    assert_is(conv, out, formula(conv, x, [], size), x)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(graph=dags(min_nodes=1, max_nodes=6, max_edges=10))
def test_formula_on_random_dags(graph: Graph):
    edge_index, num_nodes = graph
    x = torch.randn(num_nodes, 3, dtype=torch.double)
    attr = torch.randn(edge_index.size(1), 1, dtype=torch.double)
    for options in ({}, {"mode": "D"}, {"normalization": "row", "tracking": 2}):
        conv = make_conv(3, 4, 2, edge_dim=1, **options).double()
        assert_near(conv(x, edge_index, attr), formula(conv, x, [(edge_index, attr)]))


@settings(max_examples=25, derandomize=True, deadline=None)
@given(graph=graphs(min_nodes=1, max_nodes=6, max_edges=10))
def test_formula_on_random_graphs(graph: Graph):
    edge_index, num_nodes = graph
    x = torch.randn(num_nodes, 3, dtype=torch.double)
    attr = torch.randn(edge_index.size(1), 1, dtype=torch.double)
    for options in ({"orient": "order"}, {"orient": "bfs", "mode": "D"}):
        conv = make_conv(3, 4, 2, edge_dim=1, **options).double()
        assert_near(conv(x, edge_index, attr), formula(conv, x, [(edge_index, attr)]))


def plain(**kwargs) -> PLSTMConv:
    """One channel, gates of 1/2 and no decay; what is read is what comes out."""
    conv = PLSTMConv(1, 1, bias=False, **kwargs).double()
    with torch.no_grad():
        for lin in (conv.lin_query, conv.lin_key, conv.lin_value, conv.lin_out):
            lin.weight.fill_(1)
        conv.gate_bias[:, :-1] = 0
        conv.gate_bias[:, -1:] = 100
    return conv


def readings(conv: PLSTMConv, x: list[float], *args, **kwargs) -> Tensor:
    """Before the norm, divided by the query and the square of what is written."""
    seen = []
    hook = conv.lin_out.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    conv(torch.tensor(x, dtype=torch.double).view(-1, 1), *args, **kwargs)
    hook.remove()
    (y,) = seen
    # y / sqrt(y^2 + eps), undone.
    return (y * math.sqrt(1e-5) / torch.sqrt(1 - y.square())).view(-1)


@pytest.mark.parametrize("mode", ["P", "D"])
def test_path_by_hand(mode):
    """On a path 0 -> 1 -> 2, gates of 1/2 and no decay."""
    x = [0.01, 0.03, 0.02]
    edge_index = torch.tensor([[1, 0, 1, 2], [0, 1, 2, 1]])
    a, b, c = (z**2 for z in x)
    out = readings(plain(mode=mode), x, edge_index[:, 1:3])
    expected = [a / 2, b / 2 + a / 4, c / 2 + (a + b) / 4]
    assert_near(out, torch.tensor(expected) * torch.tensor(x), 1e-6)
    # Both ways, halved: everybody hears everybody.
    out = readings(plain(mode=mode, orient="order"), x, edge_index)
    expected = [a / 2 + (b + c) / 8, b / 2 + (a + c) / 8, c / 2 + (a + b) / 8]
    assert_near(out, torch.tensor(expected) * torch.tensor(x), 1e-6)


def test_diamond_by_hand():
    """0 -> 1 -> (2 or 3) -> 4 -> 5: P splits the signal, D goes one way to the end."""
    x = [0.04, 0.01, 0.02, 0.015, 0.03, 0.01]
    edge_index = torch.tensor([[0, 1, 1, 2, 3, 4], [1, 2, 3, 4, 4, 5]])
    a, b, c, d, e, f = (z**2 for z in x)
    first = [a / 2, b / 2 + a / 4]
    split = [c / 2 + b / 4 + a / 8, d / 2 + b / 4 + a / 8,
             e / 2 + (c + d) / 4 + b / 2 + a / 4]  # fmt: skip
    end = f / 2 + (e + c + d) / 4 + b / 2 + a / 4
    out = readings(plain(mode="P"), x, edge_index)
    assert_near(out, torch.tensor([*first, *split, end]) * torch.tensor(x), 1e-6)
    whole = [c / 2 + (b + a) / 4, d / 2 + (b + a) / 4,
             e / 2 + (c + d) / 4 + b / 2 + a / 2]  # fmt: skip
    end = f / 2 + (e + c + b + a) / 4  # not by way of 3
    out = readings(plain(mode="D"), x, edge_index)
    assert_near(out, torch.tensor([*first, *whole, end]) * torch.tensor(x), 1e-6)


# ----------------------------------------------------------- what holds for any of them


@pytest.mark.parametrize(
    "options", [x for x in OPTIONS if "orient" not in x], ids=named
)
def test_permutation_and_batching(options):
    """Of D too, as no two ways lead to the same edge of these graphs."""
    conv = make_conv(IN, OUT, **options).double()
    x, graphs = make_inputs(conv)
    batch = torch.tensor([0, 0, 0, 0, 1, 1, 0])

    # All DAGs as one list of edges, which remembers which of them each belongs to.
    edge_index = torch.cat([index for index, _ in graphs], dim=1)
    edge_attr = torch.cat([attr for _, attr in graphs])
    which = torch.cat([torch.full((len(a),), d) for d, (_, a) in enumerate(graphs)])
    inside = batch[edge_index[0]] == batch[edge_index[1]]
    edge_index, edge_attr, which = (
        edge_index[:, inside],
        edge_attr[inside],
        which[inside],
    )

    def layer(nodes, edge_index, edges, batch):
        attr, which = edges
        graphs = [(edge_index[:, which == d], attr[which == d])
                  for d in range(conv.num_dags)]  # fmt: skip
        return call(conv, *nodes, graphs, batch=batch)

    args = (x,), edge_index, (edge_attr, which), batch
    assert_permutes(layer, *args)
    assert_batched_equals_single(layer, *args)


@pytest.mark.parametrize("mode", ["P", "D"])
@pytest.mark.parametrize("orient", ["order", "degree", "bfs"])
def test_batches_of_graphs(orient, mode):
    conv = make_conv(IN, OUT, 2, mode, orient=orient, edge_dim=EDGE).double()
    x, ((edge_index, attr),) = make_inputs(conv)
    nodes = [torch.arange(4), torch.tensor([6]), torch.tensor([4, 5]), torch.arange(0)]
    items = []
    for node in nodes:
        inside = torch.isin(edge_index, node).all(0)
        place = torch.full((NODES,), -1)
        place[node] = torch.arange(node.numel())
        items.append(Data(x=x[node], edge_index=place[edge_index[:, inside]],
                          edge_attr=attr[inside]))  # fmt: skip
    (data,) = DataLoader(items, batch_size=len(items))
    outs = [conv(item.x, item.edge_index, item.edge_attr) for item in items]
    for batch in (data.batch, None):
        out = conv(data.x, data.edge_index, data.edge_attr, batch=batch)
        assert_near(out, torch.cat(outs))


@on_grids
def test_batches_of_grids(options):
    conv = make_conv(IN, OUT, **options).double()
    none = torch.empty(2, 0, dtype=torch.long)
    items = [
        Data(x=torch.randn(h * w, IN, dtype=torch.double), edge_index=none, height=h,
             width=w)
        for h, w in SIZES
    ]  # fmt: skip
    (data,) = DataLoader(items, batch_size=len(items))
    outs = [conv(y.x, y.edge_index, height=y.height, width=y.width) for y in items]
    out = conv(data.x, None, batch=data.batch, height=data.height, width=data.width)
    assert_near(out, torch.cat(outs))
    x = data.x[:12]  # two grids that are alike
    out = conv(x, None, height=2, width=3)
    assert_near(out[6:], conv(x[6:], None, height=2, width=3))


@everywhere
@pytest.mark.parametrize("num_nodes", [0, 1, 3])
def test_no_edges(options, num_nodes):
    conv = make_conv(IN, OUT, **options).double()
    x = torch.randn(num_nodes, IN, dtype=torch.double, requires_grad=True)
    none = torch.empty(2, 0, dtype=torch.long), torch.empty(0, EDGE).double()
    if conv.orient == "grid":  # of single nodes
        one = torch.ones(num_nodes, dtype=torch.long)
        out = conv(x, None, height=one, width=one)
        expected = [formula(conv, y.view(1, -1), [], (1, 1)) for y in x]
    else:
        out = call(conv, x, [none] * conv.num_dags)
        expected = [formula(conv, x, [none] * conv.num_dags)] if num_nodes else []
    assert out.shape == (num_nodes, OUT)
    if num_nodes > 0:
        assert_near(out, torch.cat(expected))
    out.sum().backward()
    assert x.grad.isfinite().all()
    if options.get("backend") != "reference":
        names = [n for n, p in conv.named_parameters() if p.grad is None]
        assert names == []


@everywhere
def test_every_parameter_is_trained(options):
    """From the start on, those of gates that begin at zero among them."""
    conv = PLSTMConv(IN, OUT, **options).double()
    x = torch.randn(9, IN, dtype=torch.double)
    pairs = torch.combinations(torch.arange(9)).t()
    edge_index = pairs if conv.orient is None else to_undirected(pairs)
    attr = torch.randn(edge_index.size(1), EDGE, dtype=torch.double)
    size = {"height": 3, "width": 3} if conv.orient == "grid" else {}
    out = call(conv, x, [(edge_index, attr)] * conv.num_dags, **size)
    out.square().sum().backward()
    for name, parameter in conv.named_parameters():
        grad = parameter.grad.view(parameter.size(0), -1)
        rows = (grad != 0).any(1)
        assert rows.all() if "lin" in name else rows.any(), name


@everywhere
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(options, dtype):
    conv = PLSTMConv(IN, OUT, **options)
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
    "options",
    [
        {"heads": 2, "edge_dim": 2},
        {"mode": "D"},
        {"tracking": 2},
        {"orient": "order"},
        {"orient": "grid"},
    ],
    ids=named,
)
def test_gradcheck(options):
    conv = make_conv(2, 2, **options).double()
    x = torch.randn(4, 2, dtype=torch.double, requires_grad=True)
    attr = torch.randn(4, 2, dtype=torch.double, requires_grad=True)
    edge_index = torch.tensor([[0, 1, 1, 2], [1, 2, 3, 3]])
    if conv.orient == "grid":
        assert torch.autograd.gradcheck(lambda x: conv(x, None, height=2, width=2), x)
    else:
        assert torch.autograd.gradcheck(lambda *y: conv(y[0], edge_index, y[1]),
                                        (x, attr))  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"edge_dim": EDGE}, {"mode": "D"}, {"tracking": 2}, {"orient": "grid"}],
    ids=named,
)  # fmt: skip
def test_compile(options):
    torch._dynamo.reset()
    conv = make_conv(IN, OUT, 2, **options)
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    x, ((edge_index, attr),) = make_inputs(conv, torch.float32)
    if conv.orient == "grid":
        x, kwargs = x[:6], {"height": 2, "width": 3}
    else:
        kwargs = {"line_edge_index": line_graph(edge_index, NODES).edge_index}
    grads = []
    for layer in (conv, compiled):
        conv.zero_grad()
        out = layer(x, edge_index, **kwargs) if conv.orient else layer(
            x, edge_index, attr, **kwargs
        )  # fmt: skip
        out.square().sum().backward()
        grads.append([out, *(p.grad.clone() for p in conv.parameters())])
    for a, b in zip(*grads, strict=True):
        assert_near(a, b, 1e-5)


# -------------------------------------------------------------- the start of training


@pytest.mark.parametrize("options", [{}, {"edge_dim": EDGE, "num_dags": 2}, *GRIDS])
def test_gates_at_the_start(options):
    """Nearly shut, and without decay; the same for all nodes and edges."""
    conv = PLSTMConv(IN, OUT, **options)
    assert not conv.lin_gate.weight.any()
    assert conv.lin_edge is None or not conv.lin_edge.weight.any()
    gates = Projected(conv, torch.randn(3, IN), 0).nodes
    grid = conv.orient == "grid"
    assert (gates["D"] == (-6 if grid else -5)).all()
    assert (gates["S"] == (-4 if grid else -5)).all()
    assert (gates["M"] == (-4 if grid else -5)).all()
    assert (gates["decay" if grid else "second"] == 1).all()
    if grid and conv.mode == "P":  # heads spread over the angles
        spread = {1: [0], 2: [-2, 2]}[conv.heads]
        assert (gates["angle"] == torch.tensor(spread)).all()


# ---------------------------------------------------------------------- a PyG citizen


@everywhere
def test_lazy_channels(options):
    lazy_options = options | ({"edge_dim": -1} if "edge_dim" in options else {})
    lazy = PLSTMConv(-1, OUT, **lazy_options)
    conv = PLSTMConv(IN, OUT, **options)
    inputs = make_inputs(conv, torch.float32)
    twin = copy.deepcopy(lazy)
    for layer in (lazy, twin):
        torch.manual_seed(3)
        call(layer, *inputs)
        assert not layer.lin_gate.weight.any()
    shapes = [{n: p.shape for n, p in layer.state_dict().items()} for layer in
              (lazy, twin, conv)]  # fmt: skip
    assert shapes[0] == shapes[1] == shapes[2]
    unmade = PLSTMConv(-1, OUT, **lazy_options)
    for layer in (lazy, unmade):
        layer.load_state_dict(conv.state_dict())
        assert_near(call(layer, *inputs), call(conv, *inputs), 1e-6)


@everywhere
def test_copies_and_files(options):
    conv = make_conv(IN, OUT, **options)
    inputs = make_inputs(conv, torch.float32)
    out = call(conv, *inputs)
    assert call(copy.deepcopy(conv), *inputs).equal(out)
    other = make_conv(IN, OUT, **options)
    assert not torch.allclose(call(other, *inputs), out)
    file = io.BytesIO()
    torch.save(conv.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert call(other, *inputs).equal(out)


@everywhere
def test_reset_parameters(options):
    used = make_conv(IN, OUT, **options)
    fresh = PLSTMConv(IN, OUT, **options)
    for conv in (used, fresh):
        torch.manual_seed(1)
        conv.reset_parameters()
    for (name, a), b in zip(used.named_parameters(), fresh.parameters(), strict=True):
        assert a.equal(b), name


def test_defaults():
    conv = PLSTMConv(16, heads=2)
    assert (conv.in_channels, conv.out_channels, conv.state_channels) == (16, 16, 8)
    assert conv.lin_edge is None
    edge_index = torch.tensor(DAGS[0]).t()
    assert conv(torch.randn(NODES, 16), edge_index).shape == (NODES, 16)


def test_repr():
    text = "PLSTMConv(5, 8, heads=2, mode='D', orient='bfs')"
    assert str(PLSTMConv(5, 8, heads=2, mode="D", orient="bfs")) == text


def test_edge_features():
    conv = make_conv(IN, OUT, 2, edge_dim=1).double()
    x, ((edge_index, attr),) = make_inputs(conv)
    flat = conv(x, edge_index, attr[:, 0])
    assert_near(flat, conv(x, edge_index, attr[:, :1]))
    assert not torch.allclose(flat, conv(x, edge_index, attr[:, 1]))
    # Without edge_dim, they are ignored.
    conv = make_conv(IN, OUT, 2).double()
    assert conv(x, edge_index, attr).equal(conv(x, edge_index))


@pytest.mark.parametrize("mode", ["P", "D"])
def test_given_line_graph(mode):
    conv = make_conv(IN, OUT, 2, mode, num_dags=2).double()
    x, graphs = make_inputs(conv)
    index = [index for index, _ in graphs]
    lines = [line_graph(y, NODES).edge_index for y in index]
    out = conv(x, index)
    assert_near(conv(x, tuple(index), line_edge_index=tuple(lines)), out)
    pruned = [line[:, multitree(line, y.size(1))]
              for line, y in zip(lines, index, strict=True)]  # fmt: skip
    if mode == "D":
        assert_near(conv(x, index, line_edge_index=pruned), out)
    # Any part of it is used as it is.
    none = [line[:, :0] for line in lines]
    short = conv(x, index, line_edge_index=none)
    assert not torch.allclose(short, out)
    conv = make_conv(IN, OUT, 2, mode).double()
    line = torch.tensor([[0], [1]])
    path = torch.tensor([[0, 1, 0], [1, 2, 2]])
    assert_near(conv(x[:3], path, line_edge_index=line), conv(x[:3], path))


def test_directions_are_not_altered():
    conv = make_conv(IN, OUT, edge_dim=EDGE).double()
    x, ((edge_index, attr),) = make_inputs(conv)
    kept = edge_index.clone(), attr.clone()
    out = conv(x, edge_index, attr)
    assert edge_index.equal(kept[0])
    assert attr.equal(kept[1])
    assert not torch.allclose(conv(x, edge_index.flip(0), attr), out)


def test_adjacency_forms():
    conv = make_conv(IN, OUT, 2, edge_dim=EDGE).double()
    x, ((edge_index, edge_attr),) = make_inputs(conv)
    edge_index, edge_attr = coalesce(edge_index, edge_attr, sort_by_row=False)
    out = conv(x, edge_index, edge_attr)
    size = (NODES, NODES)

    index = EdgeIndex(edge_index, sparse_size=size, sort_order="col")
    assert_near(conv(x, index, edge_attr), out)
    for to_sparse in (to_torch_coo_tensor, to_torch_csr_tensor):
        adj_t = to_sparse(edge_index.flip(0), size=size)
        assert_near(conv(x, adj_t, edge_attr), out)
    valued = torch.sparse_coo_tensor(edge_index.flip(0), edge_attr, (*size, EDGE))
    assert_near(conv(x, valued.coalesce()), out)

    conv = make_conv(IN, OUT, 2, num_dags=2).double()
    x, graphs = make_inputs(conv)
    graphs = [coalesce(index, sort_by_row=False) for index, _ in graphs]
    sparse = [to_torch_csr_tensor(index.flip(0), size=size) for index in graphs]
    assert_near(conv(x, sparse), conv(x, graphs))


@pytest.mark.skipif(
    not torch_geometric.typing.WITH_TORCH_SPARSE, reason="needs torch-sparse"
)
def test_sparse_tensor():
    conv = make_conv(IN, OUT, 2, edge_dim=EDGE)
    x, ((edge_index, edge_attr),) = make_inputs(conv, dtype=torch.float32)
    edge_index, edge_attr = coalesce(edge_index, edge_attr, sort_by_row=False)
    out = conv(x, edge_index, edge_attr)
    adj_t = torch_geometric.typing.SparseTensor(
        row=edge_index[1], col=edge_index[0], value=edge_attr,
        sparse_sizes=(NODES, NODES),
    )  # fmt: skip
    assert_near(conv(x, adj_t), out, 1e-5)


@pytest.mark.parametrize("orient", [None, "order"])
def test_flow(orient):
    conv = make_conv(IN, OUT, 2, edge_dim=EDGE, orient=orient).double()
    back = make_conv(
        IN, OUT, 2, edge_dim=EDGE, orient=orient, flow="target_to_source"
    ).double()
    back.load_state_dict(conv.state_dict())
    x, ((edge_index, edge_attr),) = make_inputs(conv)
    out = conv(x, edge_index, edge_attr)
    assert_near(back(x, edge_index.flip(0), edge_attr), out)
    assert not torch.allclose(back(x, edge_index, edge_attr), out)
    if orient is None:  # also as the transforms store it, of the edges as they are
        line = line_graph(edge_index.flip(0), NODES).edge_index
        out = back(x, edge_index.flip(0), edge_attr, line_edge_index=line)
        assert_near(out, conv(x, edge_index, edge_attr))


def test_sequential():
    first, second = make_conv(IN, OUT), make_conv(OUT, 4, mode="D", orient="bfs")
    model = Sequential("x, edge_index, batch", [
        (first, "x, edge_index, batch=batch -> x"),
        torch.nn.ReLU(),
        (second, "x, edge_index -> x"),
    ])  # fmt: skip
    x, ((edge_index, _),) = make_inputs(first, torch.float32)
    batch = torch.zeros(NODES, dtype=torch.long)
    expected = second(first(x, edge_index).relu(), edge_index)
    assert_near(model(x, edge_index, batch), expected, 1e-5)


@pytest.mark.parametrize("options", [{}, {"orient": "order"}, {"orient": "grid"}])
def test_in_a_gps_layer(options):
    """Whatever the layer takes is taken by name."""
    conv = PLSTMConv(OUT, heads=2, **options)
    layer = GPSLayer(OUT, conv=conv)
    x = torch.randn(NODES, OUT)
    edge_index = torch.tensor(DAGS[0]).t()
    if options.get("orient") == "grid":
        kwargs = {"height": 1, "width": NODES}
    elif options.get("orient"):
        kwargs = {}
    else:
        kwargs = {"line_edge_index": line_graph(edge_index, NODES).edge_index}
    batch = torch.zeros(NODES, dtype=torch.long)
    out = layer(x, edge_index, batch, **kwargs)
    assert out.shape == x.shape
    out.sum().backward()
    assert all(p.grad is not None for p in conv.parameters())


MASKED = [{}, {"tracking": 2}, {"mode": "D"}, {"orient": "order"}]


@pytest.mark.parametrize("options", MASKED, ids=named)
def test_masks_scale_states(options):
    conv = make_conv(IN, OUT, 2, **options).double()
    x, graphs = make_inputs(conv)
    edge_index = graphs[0][0]
    mask = torch.rand(edge_index.size(1), dtype=torch.double)
    bare = conv(x, edge_index)
    set_masks(conv, mask, edge_index, apply_sigmoid=False)
    out = conv(x, edge_index)
    clear_masks(conv)
    expected = formula(conv, x, graphs, mask=[mask] if conv.orient is None else mask)
    assert_near(out, expected)
    assert not torch.allclose(out, bare)
    assert conv(x, edge_index).equal(bare)


def test_masks_that_are_refused():
    conv = make_conv(IN, OUT, num_dags=2)
    x, graphs = make_inputs(conv, torch.float32)
    set_masks(conv, torch.ones(7), graphs[0][0], apply_sigmoid=False)
    with pytest.raises(ValueError, match="one graph, not several DAGs"):
        call(conv, x, graphs)
    conv = make_conv(IN, OUT, orient="grid")
    set_masks(conv, torch.ones(7), graphs[0][0], apply_sigmoid=False)
    with pytest.raises(ValueError, match="not grids with orient='grid'"):
        conv(x, None, height=1, width=NODES)


@pytest.mark.parametrize("options", [{}, {"orient": "bfs", "mode": "D"}], ids=named)
def test_explainer(options):
    explainer = Explainer(
        make_conv(IN, OUT, 2, **options),
        GNNExplainer(epochs=5),
        explanation_type="model",
        node_mask_type="attributes",
        edge_mask_type="object",
        model_config={"mode": "regression", "task_level": "node", "return_type": "raw"},
    )
    x = torch.randn(NODES, IN)
    edges = [(0, 1), (1, 2), (0, 2), (4, 5), (5, 6)]
    edge_index = torch.tensor(edges).t()
    if options:
        edge_index = to_undirected(edge_index)
    mask = explainer(x, edge_index, index=2).edge_mask
    near = (edge_index < 3).all(dim=0)
    assert (mask[near & (edge_index[0] < edge_index[1])] > 0).all()
    assert (mask[~near] == 0).all()


def test_learns_across_a_long_path():
    """The last node's label is the first one's feature, 24 edges away."""
    torch.manual_seed(0)
    n = 25
    edge_index = torch.stack([torch.arange(n - 1), torch.arange(1, n)])
    model = torch.nn.ModuleList(
        [torch.nn.Linear(2, 16), PLSTMConv(16, heads=2, mode="D"),
         torch.nn.Linear(16, 2)]
    )  # fmt: skip
    items = []
    for i in range(32):
        x = torch.zeros(n, 2)
        x[0, i % 2] = 1
        items.append(Data(x=x, edge_index=edge_index, y=torch.tensor([i % 2])))
    (data,) = DataLoader(items, batch_size=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-2)
    losses = []
    for _ in range(60):
        h = model[1](model[0](data.x), data.edge_index, batch=data.batch)
        out = model[2](h)[data.ptr[1:] - 1]
        loss = torch.nn.functional.cross_entropy(out, data.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


# ----------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "PD"}, r"'mode' must be one of \('P', 'D'\), got 'PD'"),
        ({"orient": "tree"}, "'orient' must be one of .*, got 'tree'"),
        ({"normalization": "rows"}, "'normalization' must be one of .*, got 'rows'"),
        ({"heads": 3}, "'heads' must divide 'out_channels', got 3 and 8"),
        ({"heads": 0}, "'heads' must divide 'out_channels', got 0 and 8"),
        ({"state_channels": 0}, "'state_channels' must be >= 1, got 0"),
        ({"num_dags": 0}, "'num_dags' must be >= 1.*, got 0 and orient=None"),
        ({"num_dags": 2, "orient": "bfs"}, "unless orient=None, got 2 and orient='bfs"),
        ({"tracking": 0}, "'tracking' must be >= 1.*, got 0"),
        ({"tracking": 2, "orient": "grid"}, "1 with orient='grid', got 2"),
        ({"edge_dim": 2, "orient": "grid"}, "None with orient='grid', got 2"),
        ({"form": "matrix"}, "'form' must be one of .*, got 'matrix'"),
        ({"backend": "cuda"}, "'backend' must be one of .*, got 'cuda'"),
    ],
)
def test_bad_options(options, match):
    x = torch.randn(NODES, IN)
    edge_index = torch.tensor(DAGS[0]).t()
    with pytest.raises(ValueError, match=match):
        PLSTMConv(IN, OUT, **options)(x, edge_index)


def test_unknown_options():
    with pytest.raises(TypeError, match="num_head"):
        PLSTMConv(IN, OUT, num_head=3)
    with pytest.raises(ValueError, match="'out_channels' must be given, got -1"):
        PLSTMConv(-1)


def test_bad_inputs():
    conv = PLSTMConv(IN, OUT)
    x, ((edge_index, attr),) = make_inputs(conv, torch.float32)
    with pytest.raises(ValueError, match=r"'x' must be \[nodes, channels\], got \[5\]"):
        conv(x[0], edge_index)
    with pytest.raises(ValueError, match=r"'x' must be .*, got tuple"):
        conv((x, x), edge_index)
    with pytest.raises(ValueError, match="must be one tensor, got a list of 2"):
        conv(x, [edge_index, edge_index])
    with pytest.raises(TypeError, match=r"'edge_index' must be .*NoneType"):
        conv(x, None)
    with pytest.raises(ValueError, match="joins different graphs of 'batch'"):
        conv(x, edge_index, batch=torch.arange(NODES))
    for shift, got in ((3, 9), (-1, -1)):
        with pytest.raises(ValueError, match=rf"= \[0, 7\) \(got {got}"):
            conv(x, edge_index + shift)

    conv = PLSTMConv(IN, OUT, edge_dim=EDGE)
    with pytest.raises(ValueError, match="must be given, as 'edge_dim' is 3"):
        conv(x, edge_index)
    with pytest.raises(ValueError, match=r"each of 7 edges, got \[2, 3\]"):
        conv(x, edge_index, attr[:2])

    conv = PLSTMConv(IN, OUT, num_dags=2)
    match = "must be a list with an entry for each of 2 DAGs"
    with pytest.raises(ValueError, match=f"'edge_index' {match}, got one Tensor"):
        conv(x, edge_index)
    with pytest.raises(ValueError, match=f"'edge_index' {match}, got 3"):
        conv(x, [edge_index] * 3)
    with pytest.raises(ValueError, match=f"'line_edge_index' {match}, got one Tensor"):
        conv(x, [edge_index] * 2, line_edge_index=edge_index[:, :0])


@pytest.mark.parametrize("mode", ["P", "D"])
def test_cycles(mode):
    edge_index = torch.tensor([[0, 1, 2, 4], [1, 2, 0, 1]])
    x = torch.randn(5, IN)
    with pytest.raises(CycleError, match="has the cycle"):
        PLSTMConv(IN, OUT, mode=mode)(x, edge_index)
    line = torch.tensor([[0, 1, 2], [1, 2, 0]])
    with pytest.raises(CycleError, match="has the cycle"):
        PLSTMConv(IN, OUT, mode=mode)(x, edge_index, line_edge_index=line)
    dag = edge_index[:, :2]
    with pytest.raises(CycleError, match="has the cycle 0 -> 1 -> 2 -> 0"):
        PLSTMConv(IN, OUT, mode=mode, num_dags=2)(x, [dag, edge_index])


def test_bad_line_graphs():
    x = torch.randn(5, IN)
    edge_index = torch.tensor([[0, 1, 2], [1, 2, 3]])
    conv = PLSTMConv(IN, OUT, edge_dim=EDGE)
    attr = torch.randn(3, EDGE)

    def run(line):
        conv(x, edge_index, attr, line_edge_index=line)

    with pytest.raises(ValueError, match="begins where it ends"):
        run(torch.tensor([[0], [2]]))
    with pytest.raises(ValueError, match="it runs against the graph"):
        run(torch.tensor([[1], [0]]))
    for wrong in (3, -1):
        with pytest.raises(ValueError, match=rf"= \[0, 3\) \(got {wrong}"):
            run(torch.tensor([[0], [wrong]]))
    with pytest.raises(
        ValueError, match=r"of shape \[2, num_lines\] \(got shape \[3\]"
    ):
        run(torch.tensor([0, 1, 2]))
    with pytest.raises(TypeError, match=r"of integers .* \(got dtype torch.float32"):
        run(torch.ones(2, 1))
    conv = PLSTMConv(IN, OUT, orient="order")
    with pytest.raises(ValueError, match="must be None with orient='order'"):
        conv(x, edge_index, line_edge_index=torch.tensor([[0], [1]]))


def test_bad_grids():
    conv = PLSTMConv(IN, OUT, orient="grid")
    x = torch.randn(6, IN)
    with pytest.raises(ValueError, match="'height' and 'width' must be given"):
        conv(x, None)
    with pytest.raises(ValueError, match=r"'edge_attr' must be None .* Tensor"):
        conv(x, None, x, height=2, width=3)
    with pytest.raises(ValueError, match="grids of 6 nodes in all, got 8"):
        conv(x, None, height=2, width=4)
    with pytest.raises(ValueError, match="grids of 6 nodes in all, got 5"):
        conv(x, None, height=torch.tensor([2, 1]), width=torch.tensor([2, 1]))
    with pytest.raises(ValueError, match="must be None with orient='grid'"):
        conv(x, None, height=2, width=3, line_edge_index=torch.tensor([[0], [1]]))


def test_error_of_a_non_finite_input():
    conv = PLSTMConv(IN, OUT)
    x, ((edge_index, _),) = make_inputs(conv, torch.float32)
    x[2, 3] = torch.nan
    with pytest.raises(ValueError, match="'transition' must be finite"):
        conv(x, edge_index)


@pytest.mark.parametrize("orient", [None, "order", "bfs"])
@pytest.mark.parametrize("mode", ["P", "D"])
@pytest.mark.filterwarnings("ignore")
def test_compile_finds_the_structure_itself(mode, orient):
    """With graph breaks, where sizes depend on the graph, but the same numbers."""
    edge_index, _ = grid(3, 4)
    edge_index = edge_index[:, edge_index[0] != edge_index[1]]
    if orient is None:
        edge_index = edge_index[:, edge_index[0] < edge_index[1]]
    x = torch.randn(12, IN)
    conv = PLSTMConv(IN, OUT, mode=mode, orient=orient)
    for weight in (conv.gate_bias, conv.lin_gate.weight):
        torch.nn.init.normal_(weight)
    expected = conv(x, edge_index)
    out = torch.compile(conv, backend="aot_eager")(x, edge_index)
    assert torch.allclose(out, expected, atol=1e-5)


@pytest.mark.parametrize("orient", ["order", "grid"])
def test_where_gates_start(orient):
    biases = (-1.0, 0.5, 2.0)
    conv = PLSTMConv(IN, OUT, orient=orient, gate_biases=biases, gate_std=2.0)
    direct, source, mark, decay = (
        x.detach() for x in conv.gate_bias.split(conv._biased, dim=1)[:4]
    )
    for x, start in zip((source, mark, direct, decay), (*biases, 1.0), strict=True):
        assert (x == start).all()
    assert float(conv.lin_gate.weight.std()) == pytest.approx(2 / IN**0.5, rel=0.3)
    lazy = PLSTMConv(-1, OUT, orient=orient, gate_std=2.0)
    lazy(torch.randn(4, IN), torch.tensor([[0], [1]]), height=2, width=2)
    assert lazy.lin_gate.weight.std() > 0
    default = PLSTMConv(IN, OUT, orient=orient)
    assert not default.lin_gate.weight.any()
    assert float(default.gate_bias.min()) == (-6 if orient == "grid" else -5)
    with pytest.raises(ValueError, match="'gate_biases' must be three numbers"):
        PLSTMConv(IN, OUT, gate_biases=(1.0,))
    with pytest.raises(ValueError, match="'gate_std' must be >= 0"):
        PLSTMConv(IN, OUT, gate_std=-1.0)


@pytest.mark.parametrize("orient", ["order", "degree", "bfs"])
def test_inference_then_training(orient):
    conv = PLSTMConv(IN, OUT, orient=orient)
    edge_index, _ = grid(3, 5)
    x = torch.randn(15, IN)
    with torch.inference_mode():
        expected = conv(x, edge_index)
    out = conv(x, edge_index)
    out.sum().backward()
    assert torch.equal(out, expected)


def test_grids_are_the_graphs_of_the_batch():
    conv = PLSTMConv(IN, OUT, orient="grid")
    x, batch = torch.randn(10, IN), torch.tensor([0] * 4 + [1] * 6)
    height, width = torch.tensor([2, 2]), torch.tensor([2, 3])
    assert conv(x, None, batch=batch, height=height, width=width).shape == (10, OUT)
    for sizes in ((height, width.flip(0)), (2, 5), (1, 1)):
        with pytest.raises(ValueError, match="must be those of the graphs of 'batch'"):
            conv(x, None, batch=batch, height=sizes[0], width=sizes[1])
    with pytest.raises(ValueError, match="must be those of the graphs of 'batch'"):
        conv(x, None, batch=batch.flip(0), height=height.flip(0), width=width.flip(0))
