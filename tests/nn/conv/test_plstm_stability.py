"""With all gates at their bound, signals neither explode nor vanish.

But for the law of the paper's Appendix C.2: on a grid, what P sends spreads sideways.
"""

import math

import pytest
import torch
from torch import Tensor
from torch_geometric.utils import softmax

from pyg_chimera.nn import PLSTMConv, PLSTMGridConv
from pyg_chimera.nn.conv import plstm_conv, plstm_grid_conv
from pyg_chimera.ops import grid_scan, line_graph, multitree, stm_scan

DEPTH = 1000
SIDE = 64


def path() -> Tensor:
    return torch.stack([torch.arange(DEPTH - 1), torch.arange(1, DEPTH)])


def deep_dag() -> Tensor:
    """A path through all nodes and many short cuts, in any order."""
    tail = torch.randint(DEPTH - 1, (2 * DEPTH,))
    head = tail + 1 + torch.randint(9, tail.shape)
    edges = torch.cat([path(), torch.stack([tail, head])[:, head < DEPTH]], dim=1)
    return edges[:, torch.randperm(edges.size(1))]


GRAPHS = {"path": path, "deep dag": deep_dag}
on_graphs = pytest.mark.parametrize("make", GRAPHS.values(), ids=GRAPHS)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.double)


def signs(*shape: int) -> Tensor:
    return 2.0 * torch.randint(2, shape, dtype=torch.double) - 1


def scan(
    edge_index: Tensor, line: Tensor, source: Tensor, transition: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What nodes read, the states, and the gradients of the last node's reading.

    Queries, keys, values and marks are one, so the gradients of marks are states.
    """
    heads = source.size(1)
    value = ones(DEPTH, heads, 1).requires_grad_()
    mark = ones(edge_index.size(1), heads).requires_grad_()
    node = ones(DEPTH, heads, 1)
    direct = torch.zeros(DEPTH, heads, dtype=torch.double)
    out = stm_scan(
        node, node, value, source, transition, mark, direct, edge_index, line
    )
    (states,) = torch.autograd.grad(out.sum(), mark, retain_graph=True)
    (grad,) = torch.autograd.grad(out[-1].sum(), value)
    return out.detach()[..., 0], states, grad[..., 0]


def split(index: Tensor, size: int) -> Tensor:
    """Weights that sum to one in each group."""
    return softmax(3 * torch.randn(index.numel(), 1, dtype=torch.double), index,
                   num_nodes=size)  # fmt: skip


# ------------------------------------------------------------------------ the operators


@on_graphs
def test_columns_conserve_the_sum(make):
    """P: each node writes a total of one, and all of it crosses every later cut."""
    edge_index = make()
    tail, head = edge_index
    line, _ = line_graph(edge_index, DEPTH)
    source = split(tail, DEPTH)
    transition = split(tail, DEPTH)[line[1]]
    out, states, grad = scan(edge_index, line, source, transition)
    for node in range(0, DEPTH - 1, 37):
        crosses = (tail <= node) & (head > node)
        assert (states[crosses].sum() - (node + 1)).abs() < 1e-9 * DEPTH
    assert (out[-1] - (DEPTH - 1)).abs() < 1e-9 * DEPTH
    # Whatever a node writes, the last one reads in full.
    assert (grad[:-1] - 1).abs().max() < 1e-9
    assert grad[-1] == 0

    # With any signs, no more than that.
    transition = transition * signs(line.size(1), 1)
    out, mixed, grad = scan(edge_index, line, source, transition)
    assert (mixed.abs() <= states + 1e-9).all()
    assert (grad.abs() <= 1 + 1e-9).all()
    assert (grad[:-1] != 0).all()


@on_graphs
def test_rows_keep_the_largest(make):
    """The dual: what the first node writes is everywhere, and nowhere larger."""
    edge_index = make()
    tail, head = edge_index
    line, _ = line_graph(edge_index, DEPTH)
    source = (tail == 0).double().unsqueeze(1)
    transition = split(head, DEPTH)[line[0]]
    _, states, grad = scan(edge_index, line, source, transition)
    assert (states - 1).abs().max() < 1e-9
    assert (grad[0] - (head == DEPTH - 1).sum()).abs() < 1e-9
    transition = transition * signs(line.size(1), 1)
    _, states, _ = scan(edge_index, line, source * signs(len(tail), 1), transition)
    assert states.abs().max() < 1 + 1e-9


@on_graphs
def test_multitrees_carry_all_the_way(make):
    """D: a state is reached by one way with weight one, or not at all."""
    edge_index = make()
    num_edges = edge_index.size(1)
    line, _ = line_graph(edge_index, DEPTH)
    line = line[:, multitree(line, num_edges)]
    starts = torch.cat([(edge_index[0] == 0).nonzero()[:1, 0],
                        torch.randperm(num_edges)[:7]])  # fmt: skip
    source = torch.nn.functional.one_hot(starts, num_edges).t().double()
    transition = signs(line.size(1), 8)
    _, states, _ = scan(edge_index, line, source, transition)
    reached = source.bool()
    heard = edge_index[0][line[1]].argsort(stable=True)  # lines in topological order
    for e, f in line[:, heard].t().tolist():
        reached[f] |= reached[e]
    assert states.abs().equal(reached.double())
    assert int(reached[:, 0].sum()) >= DEPTH - 1 - 9


def binomial(n: int, p: float) -> Tensor:
    k = torch.arange(n + 1, dtype=torch.double)
    log = math.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)
    return torch.exp(log + k * math.log(p) + (n - k) * math.log(1 - p))


def test_power_law_on_a_grid():
    """P: all that the corner writes crosses each antidiagonal, as a binomial."""
    angles = torch.tensor([0.3, 0.5, 0.8], dtype=torch.double)
    V, H = SIDE * SIDE, angles.numel()
    split = torch.stack([angles, 1 - angles])  # [to, heads]
    node = ones(V, H, 1)
    value = ones(V, H, 1).requires_grad_()
    source = torch.zeros(V, 1, 2, H, dtype=torch.double)
    source[0, 0] = split
    out = grid_scan(
        node, node, value, source, split.unsqueeze(1).expand(V, 1, 2, 2, H),
        ones(V, 1, 2, H), torch.zeros(V, H, dtype=torch.double), SIDE, SIDE,
    )  # fmt: skip
    y = out.detach().view(SIDE, SIDE, H)
    for h, a in enumerate(angles.tolist()):
        for n in (1, 2, 17, 40, SIDE - 1):
            column = torch.arange(n + 1)
            arrived = y[n - column, column, h]
            assert (arrived.sum() - 1).abs() < 1e-12
            assert (arrived - binomial(n, a)).abs().max() < 1e-12
            if n > 30:
                assert abs(int(arrived.argmax()) - a * n) <= 1
                law = 1 / math.sqrt(2 * math.pi * a * (1 - a) * n)
                assert abs(arrived.max() / law - 1) < 0.02
    # So do the gradients of what a node far away reads.
    (grad,) = torch.autograd.grad(out[SIDE // 2 * SIDE + SIDE // 2 - 1].sum(), value)
    expected = [binomial(SIDE - 1, a)[SIDE // 2 - 1] for a in angles.tolist()]
    assert (grad[0, :, 0] - torch.stack(expected)).abs().max() < 1e-12


@pytest.mark.parametrize("height", [1, 7, SIDE])
def test_every_node_of_a_grid_is_reached(height):
    """D: right along the first row, then down: the same weight everywhere."""
    V = height * SIDE
    node = ones(V, 1, 1)
    value = ones(V, 1, 1).requires_grad_()
    source = torch.zeros(V, 1, 2, 1, dtype=torch.double)
    source[0] = 1
    transition = signs(V, 1, 2, 2, 1)
    transition[:, :, 0, 1] = 0
    out = grid_scan(
        node, node, value, source, transition, ones(V, 1, 2, 1),
        torch.zeros(V, 1, dtype=torch.double), height, SIDE,
    )  # fmt: skip
    assert (out.detach().abs().view(-1)[1:] == 1).all()
    (grad,) = torch.autograd.grad(out[-1].sum(), value)
    assert grad[0].abs() == 1


def test_rotations_keep_lengths():
    """State tracking: orthogonal transitions along a path, J components."""
    J = 4
    turns = torch.linalg.qr(torch.randn(DEPTH - 2, 1, J, J, dtype=torch.double))[0]
    source = torch.zeros(DEPTH - 1, 1, J, dtype=torch.double)
    source[0] = torch.nn.functional.normalize(torch.randn(J).double(), dim=0)
    node, mark = ones(DEPTH, 1, 1), ones(DEPTH - 1, 1, J).requires_grad_()
    line = path()[:, :-1]
    direct = torch.zeros(DEPTH, 1, dtype=torch.double)
    out = stm_scan(node, node, node, source, turns, mark, direct, path(), line)
    (states,) = torch.autograd.grad(out.sum(), mark)
    assert (states.norm(dim=-1) - 1).abs().max() < 1e-9


# ---------------------------------------------------------------------------- the layer


def gates(
    monkeypatch: pytest.MonkeyPatch, conv: torch.nn.Module, *args, **kwargs
) -> list:
    """What the layer gives to its operator: source, transition and so on."""
    seen = []

    def spy(query, key, value, *args, **kwargs):
        seen.extend(args)
        return torch.zeros_like(value)

    monkeypatch.setattr(plstm_conv, "stm_scan", spy)
    monkeypatch.setattr(plstm_grid_conv, "grid_scan", spy)
    conv(*args, **kwargs)
    return seen


def size_of(transition: Tensor) -> Tensor:
    """The spectral norm of each line edge's transition."""
    if transition.dim() == 2:
        return transition.abs()
    return torch.linalg.matrix_norm(transition, 2)


def wild(layer: type = PLSTMConv, **kwargs) -> torch.nn.Module:
    """A layer whose gates are all over their range, the very bounds included."""
    conv = layer(4, 4, heads=2, **kwargs)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.normal_(std=3)
    return conv


@pytest.mark.parametrize("order", [None, "order"])
@pytest.mark.parametrize("normalization", ["column", "row"])
@pytest.mark.parametrize("tracking", [1, 3])
def test_bound_of_p(monkeypatch, order, normalization, tracking):
    conv = wild(order=order, normalization=normalization, tracking=tracking, edge_dim=2)
    edge_index = deep_dag()[:, :500]
    _, transition, *_, edges, line = gates(
        monkeypatch, conv, torch.randn(DEPTH, 4), edge_index, torch.randn(500, 2)
    )[:6]
    norm = size_of(transition)
    # Sums over e of what leaves e', or over e' of what enters e.
    side = 0 if normalization == "column" else 1
    total = torch.zeros(edges.size(1), 2).index_add(0, line[side], norm)
    assert line.size(1) > 100
    assert total.max() <= 1 + 1e-5
    assert total.max() > 0.9


@pytest.mark.parametrize("normalization", ["column", "row"])
def test_bound_of_p_with_turns(monkeypatch, normalization):
    """It holds for each of the two DAGs that an edge leads to, or is entered from."""
    conv = wild(order="order", normalization=normalization)
    edge_index = deep_dag()[:, :500]
    edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    _, transition, *_, edges, line = gates(
        monkeypatch, conv, torch.randn(DEPTH, 4), edge_index
    )[:6]
    down = (edges[0] < edges[1]).long()
    turns = down[line[0]] < down[line[1]]
    assert 100 < turns.sum() < turns.numel() - 100
    assert not (down[line[0]] > down[line[1]]).any()
    side = 0 if normalization == "column" else 1
    key = 2 * line[side] + down[line[1 - side]]
    total = torch.zeros(2 * edges.size(1), 2).index_add(0, key, transition.abs())
    assert total.max() <= 1 + 1e-5
    assert total.max() > 0.9


@pytest.mark.parametrize("tracking", [1, 3])
def test_bound_of_d(monkeypatch, tracking):
    conv = wild(mode="D", order="order", tracking=tracking)
    edge_index = deep_dag()[:, :500]
    _, transition, *_, edges, line = gates(
        monkeypatch, conv, torch.randn(DEPTH, 4), edge_index
    )[:6]
    assert multitree(line, edges.size(1)).all()
    norm = size_of(transition)
    assert 0.9 < norm.max() <= 1 + 1e-5


def test_bounds_on_grids(monkeypatch):
    x = torch.randn(12, 4)
    for normalization, axis in (("column", 2), ("row", 3)):
        conv = wild(PLSTMGridConv, normalization=normalization)
        transition = gates(monkeypatch, conv, x, height=3, width=4)[1]
        assert 0.9 < transition.abs().sum(axis).max() <= 1 + 1e-6
    conv = wild(PLSTMGridConv, mode="D")
    transition = gates(monkeypatch, conv, x, height=3, width=4)[1]
    assert 0.9 < transition.abs().max() <= 1
    assert not transition[:, :, 0, 1].any()


@on_graphs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    # Rotations on ways of different lengths, as P sums them, cancel each other.
    [{}, {"normalization": "row"}, {"mode": "D"}, {"mode": "D", "tracking": 2}],
    ids=str,
)
def test_layer_at_its_bounds(make, options, dtype):
    """All gates open: no state grows beyond what has been written; gradients flow."""
    edge_index = make()
    conv = PLSTMConv(8, 8, heads=2, **options)
    with torch.no_grad():
        conv.gate_bias.fill_(30)
    x = torch.randn(DEPTH, 8, requires_grad=True)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        out = conv(x, edge_index)
        out[-1].float().square().sum().backward()
    assert out.isfinite().all()
    assert x.grad.isfinite().all()
    # The last node hears the first one, over its own thousand.
    assert x.grad[0].abs().max() > 1e-6 * x.grad.abs().max()
    assert all(p.grad.isfinite().all() for p in conv.parameters())


@pytest.mark.parametrize("mode", ["P", "D"])
def test_turns_carry_far(mode):
    """From one end of a path of a thousand nodes to the other, by way of its middle."""
    conv = PLSTMConv(8, 8, heads=2, mode=mode, order="bfs", reach=None)
    order = torch.cat([torch.arange(DEPTH - 1, 0, -2), torch.arange(0, DEPTH, 2)])
    edge_index = order[path()]
    edge_index = torch.cat([edge_index, edge_index.flip(0)], dim=1)
    x = torch.randn(DEPTH, 8, requires_grad=True)
    out = conv(x, edge_index)
    first, last = int(order[0]), int(order[-1])
    assert 0 not in (first, last)  # where the search begins
    (grad,) = torch.autograd.grad(out[last].square().sum(), x)
    assert grad[first].abs().max() > 1e-6 * grad.abs().max()
    conv.turns = False
    (grad,) = torch.autograd.grad(conv(x, edge_index)[last].square().sum(), x)
    assert not grad[first].any()
