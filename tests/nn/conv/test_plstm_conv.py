import math

import pytest
import torch
from asserts import assert_near, formula
from plstm import (
    DAGS,
    EDGE,
    IN,
    NODES,
    OUT,
    call,
    graphs_of,
    make_conv,
    make_inputs,
    named,
)
from torch import Tensor
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks
from torch_geometric.utils import (
    to_undirected,
)

from pyg_chimera.nn import PLSTMConv
from pyg_chimera.ops import CycleError, line_graph, multitree


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
    out = readings(plain(mode=mode, order="order"), x, edge_index)
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


def test_tree_by_hand():
    """1, 2 and 3 around 0, and 4 next to 3: D carries along the only path."""
    x = [0.02, 0.01, 0.03, 0.015, 0.04]
    edge_index = to_undirected(torch.tensor([[0, 0, 0, 3], [1, 2, 3, 4]]))
    written = [z**2 for z in x]
    everybody = [w / 2 + (sum(written) - w) / 8 for w in written]
    out = readings(plain(mode="D", order="bfs"), x, edge_index)
    assert_near(out, torch.tensor(everybody) * torch.tensor(x), 1e-6)
    # P divides what comes to 0 among its neighbours.
    a, b, c, d, e = written
    shared = [a / 2 + (b + c + d + e) / 8,
              b / 2 + a / 8 + (c + d + e) / 24,
              c / 2 + a / 8 + (b + d + e) / 24,
              d / 2 + (a + e) / 8 + (b + c) / 24,
              e / 2 + (a + d) / 8 + (b + c) / 24]  # fmt: skip
    out = readings(plain(mode="P", order="bfs"), x, edge_index)
    assert_near(out, torch.tensor(shared) * torch.tensor(x), 1e-6)
    # Without turns, 1 hears nobody but 0, which it follows.
    related = [a / 2 + (b + c + d + e) / 8, b / 2 + a / 8, c / 2 + a / 8,
               d / 2 + (a + e) / 8, e / 2 + (a + d) / 8]  # fmt: skip
    out = readings(plain(mode="D", order="bfs", turns=False), x, edge_index)
    assert_near(out, torch.tensor(related) * torch.tensor(x), 1e-6)


@pytest.mark.parametrize("mode", ["P", "D"])
def test_given_line_graph(mode):
    conv = make_conv(IN, OUT, 2, mode=mode, num_dags=2).double()
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
    conv = make_conv(IN, OUT, 2, mode=mode).double()
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


MASKED = [{}, {"tracking": 2}, {"mode": "D"}, {"order": "order"}]


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
    expected = formula(conv, x, graphs_of(conv, graphs, mask))
    assert_near(out, expected)
    assert not torch.allclose(out, bare)
    assert conv(x, edge_index).equal(bare)


def test_masks_that_are_refused():
    conv = make_conv(IN, OUT, num_dags=2)
    x, graphs = make_inputs(conv, torch.float32)
    set_masks(conv, torch.ones(7), graphs[0][0], apply_sigmoid=False)
    with pytest.raises(ValueError, match="one graph, not several DAGs"):
        call(conv, x, graphs)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mode": "PD"}, r"'mode' must be one of \('P', 'D'\), got 'PD'"),
        ({"order": "tree"}, "'order' must be one of .*, got 'tree'"),
        ({"normalization": "rows"}, "'normalization' must be one of .*, got 'rows'"),
        ({"num_dags": 0}, "'num_dags' must be an integer >= 1 .*got 0"),
        (
            {"num_dags": 2, "order": "bfs"},
            "with order='bfs', which makes two DAGs, got 2",
        ),
        ({"tracking": 0}, "'tracking' must be an integer >= 1 .*got 0"),
        ({"gate_biases": (1.0,)}, "'gate_biases' must be three numbers"),
        ({"form": "matrix"}, "'form' must be one of .*, got 'matrix'"),
    ],
)
def test_bad_options(options, match):
    x = torch.randn(NODES, IN)
    edge_index = torch.tensor(DAGS[0]).t()
    with pytest.raises(ValueError, match=match):
        PLSTMConv(IN, OUT, **options)(x, edge_index)


def test_turns_are_a_flag():
    with pytest.raises(TypeError, match="'turns' must be True or False, got 1"):
        PLSTMConv(IN, OUT, order="bfs", turns=1)


def test_bad_inputs():
    conv = PLSTMConv(IN, OUT)
    x, ((edge_index, _attr),) = make_inputs(conv, torch.float32)
    with pytest.raises(TypeError, match="must be one tensor, got a list of 2"):
        conv(x, [edge_index, edge_index])
    with pytest.raises(TypeError, match=r"'edge_index' must be .*NoneType"):
        conv(x, None)
    with pytest.raises(ValueError, match="joins different graphs of 'batch'"):
        conv(x, edge_index, batch=torch.arange(NODES))
    for shift, got in ((3, 9), (-1, -1)):
        with pytest.raises(ValueError, match=rf"= \[0, 7\), got {got}"):
            conv(x, edge_index + shift)

    conv = PLSTMConv(IN, OUT, num_dags=2)
    match = "must be a list with an entry for each of 2 DAGs"
    with pytest.raises(TypeError, match=f"'line_edge_index' {match}, got one Tensor"):
        conv(x, [edge_index] * 2, line_edge_index=edge_index[:, :0])


@pytest.mark.parametrize("mode", ["P", "D"])
def test_cycles(mode):
    edge_index = torch.tensor([[0, 1, 2, 4], [1, 2, 0, 1]])
    x = torch.randn(5, IN)
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
        with pytest.raises(ValueError, match=rf"= \[0, 3\), got {wrong}"):
            run(torch.tensor([[0], [wrong]]))
    with pytest.raises(ValueError, match=r"of shape \[2, num_edges\], got shape \[3\]"):
        run(torch.tensor([0, 1, 2]))
    with pytest.raises(TypeError, match=r"hold integers, got dtype torch.float32"):
        run(torch.ones(2, 1))
    conv = PLSTMConv(IN, OUT, order="order")
    with pytest.raises(ValueError, match="must be None with order='order'"):
        conv(x, edge_index, line_edge_index=torch.tensor([[0], [1]]))
