import math
from pathlib import Path

import numpy as np
import pytest
import torch
from asserts import assert_near
from hypothesis import given, settings
from strategies import Graph, dags, graphs
from torch import Tensor
from torch.nn.functional import softplus
from torch_geometric.utils import grid

from pyg_chimera.ops import (
    balanced_path_transition,
    chimera_transition,
    dag_scan,
    dag_transition,
    grid_dag_scan,
    grid_transition,
    path_transition,
    released_transition,
    resolvent_mix,
)
from pyg_chimera.ops.structure.grid import grid_parents

GOLDEN = Path(__file__).parents[1] / "golden"
EDGE_INDEX = torch.tensor([[0, 1, 2, 2, 0, 3], [1, 0, 1, 2, 1, 3]])  # node 4 is alone


def load(name: str) -> dict[str, Tensor]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file}


def gates(num_nodes: int, heads: int = 2, copies: int = 3) -> list[Tensor]:
    shape = (copies, num_nodes, heads)
    return list(softplus(torch.randn(shape, dtype=torch.double)))


def sum_of_rows(weight: Tensor, index: Tensor, num_nodes: int) -> Tensor:
    return weight.new_zeros(num_nodes, weight.size(1)).index_add(0, index, weight)


# --------------------------------------------------------------------------- formulas


@pytest.mark.parametrize("roots", ["write", "silent"])
def test_dag_formula(roots):
    edge_index = torch.tensor([[0, 0, 1, 2, 0], [1, 2, 3, 3, 3]])
    (delta,) = gates(5, copies=1)
    (root,) = gates(5, copies=1)
    weight, input_gate = dag_transition(
        edge_index, 5, delta, root if roots == "write" else None
    )
    parents = torch.tensor([1.0, 1.0, 3.0, 3.0, 3.0]).double().unsqueeze(-1)
    assert_near(weight, torch.exp(-delta) / parents.sqrt(), 1e-12)
    nothing = root if roots == "write" else torch.zeros_like(root)
    expected = torch.stack([
        nothing[0], delta[0], delta[1], delta[2:].sum(0) / 3**0.5, nothing[4],
    ])  # fmt: skip
    assert_near(input_gate, expected, 1e-12)


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8])
def test_small_integers(dtype):
    """Edges may be of any integers."""
    edges = torch.tensor([[0, 2, 1, 2, 3, 4], [2, 0, 2, 1, 4, 3]])
    (of_edges,), nodes = gates(6, copies=1), gates(6)
    for function, rows in (
        (chimera_transition, nodes),
        (released_transition, nodes),
        (dag_transition, [of_edges]),
        (path_transition, [of_edges, nodes[0]]),
        (balanced_path_transition, [of_edges, nodes[0], nodes[1]]),
    ):
        want, got = (function(e, 6, *rows) for e in (edges, edges.to(dtype)))
        if isinstance(want, Tensor):
            want, got = [want], [got]
        assert all(map(torch.equal, got, want)), function


def test_path_formula():
    #   0 - 2 - 1,  3 - 4,  5
    edge_index = torch.tensor([[0, 2, 1, 2, 3, 4], [2, 0, 2, 1, 4, 3]])
    reverse = [1, 0, 3, 2, 5, 4]
    (weight,) = gates(6, copies=1)
    (psi,) = gates(6, copies=1)
    out = path_transition(edge_index, 6, weight, psi)
    for e, (j, i) in enumerate(edge_index.t().tolist()):
        margin = torch.exp(-(psi[i] + psi[j]) / 2)
        expected = weight[e] / (2 * torch.sqrt(weight[e] * weight[reverse[e]] + margin))
        torch.testing.assert_close(out[e], expected, rtol=1e-12, atol=0)


# ----------------------------------------------------------------------------- bounds


@settings(max_examples=40, derandomize=True, deadline=None)
@given(graph=graphs())
def test_sums_are_below_one(graph: Graph):
    edge_index, num_nodes = graph
    target, source, psi = gates(num_nodes)
    args = (edge_index, num_nodes, target, source, psi)
    for gamma in (1.0, 0.5):
        weight = chimera_transition(*args, gamma=gamma)
        assert (weight >= 0).all()
        assert (sum_of_rows(weight, edge_index[1], num_nodes) < gamma).all()
    weight = released_transition(*args)
    assert (weight >= 0).all()
    assert (sum_of_rows(weight, edge_index[0], num_nodes) < 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_float_is_singular(dtype):
    """Nodes that would keep all they hear, beside some whose inputs fade away."""
    edge_index, _ = grid(8, 8)
    torch.manual_seed(0)
    target, source, value = torch.randn(3, 64, 2, dtype=dtype)
    target, source = softplus(10 * target), softplus(10 * source)
    target[5] = source[6] = 1e4
    target[9], source[8] = 90.0, 100.0
    psi = torch.full((64, 2), 1e4, dtype=dtype)
    psi[:32] = 17.0
    gates = [x.requires_grad_() for x in (target, source, psi)]
    weight = chimera_transition(edge_index, 64, target, source, psi)
    margin = 1 - sum_of_rows(weight.double(), edge_index[1], 64)
    assert margin.min() > 8 * torch.finfo(dtype).eps
    assert weight.isfinite().all()
    ones = torch.ones(64, 1, 1, dtype=dtype)
    inputs = (ones, ones, value[..., None], edge_index)
    out = resolvent_mix(*inputs, weight)
    exact = resolvent_mix(*(x.double() for x in inputs[:3]), edge_index,
                          weight.double(), backend="reference")  # fmt: skip
    assert_near(out.double(), exact, 1e-5 if dtype == torch.float32 else 1e-7)
    out.sum().backward()
    for gate in gates:
        assert gate.grad.isfinite().all()
    assert (psi.grad[10:32] != 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_two_neighbours_of_large_selectivity(dtype):
    """Whose weights are e^-50, beside a margin of e^-60."""
    edge_index = torch.tensor([[1, 2], [0, 0]])
    delta, psi = torch.full((2, 3, 1), 50.0, dtype=dtype), torch.full((3, 1), 60.0)
    out = chimera_transition(edge_index, 3, *delta, psi.to(dtype))
    share = torch.full((2, 1), 1 / (2 + math.exp(-10)), dtype=dtype)
    torch.testing.assert_close(out, share, rtol=1e-5, atol=0)


@pytest.mark.parametrize("with_edges", [False, True])
@pytest.mark.parametrize("scale", [1e-3, 50.0, 300.0, 1e4])
def test_selectivities_of_any_size(scale, with_edges):
    """In float32, as the formula with logarithms in float64, gradients too."""
    torch.manual_seed(int(scale))
    inputs = [scale * torch.rand(5, 2) for _ in range(3)]
    inputs += [scale * torch.rand(6, 2)] if with_edges else []
    leaves = [x.requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    out = chimera_transition(EDGE_INDEX, 5, *leaves)

    target, source, psi, *edge = wide
    (col, row), eps = EDGE_INDEX, torch.finfo(torch.float32).eps
    exponent = -sum([target[row], source[col], *edge]) / (2 + with_edges)
    rows = []
    for i in range(5):
        total = exponent[row == i].logsumexp(0)  # minus infinity for node 4
        margins = torch.stack([-psi[i], total + math.log(16 * eps)])
        rows.append(torch.logaddexp(total, (2 * margins).logsumexp(0) / 2))
    expected = torch.exp(exponent - torch.stack(rows)[row])
    tolerance = 1e-5 + 4 * eps * scale  # of exponents that are rounded
    assert_near(out.double(), expected, tolerance)

    grad = torch.randn(6, 2)
    out.backward(grad)
    expected.backward(grad.double())
    for leaf, exact in zip(leaves, wide, strict=True):
        error = leaf.grad[:4].double() - exact.grad[:4]  # nothing flows to node 4
        assert error.abs().max() <= 4 * tolerance
        assert leaf.grad.isfinite().all()


@settings(max_examples=40, derandomize=True, deadline=None)
@given(graph=dags())
def test_energy_along_a_dag_is_bounded(graph: Graph):
    # The squares of the weights into a node sum to at most one.
    edge_index, num_nodes = graph
    (delta,) = gates(edge_index.size(1), copies=1)
    weight, input_gate = dag_transition(edge_index, num_nodes, delta)
    assert (sum_of_rows(weight.square(), edge_index[1], num_nodes) <= 1).all()
    has_parents = torch.zeros(num_nodes, dtype=torch.bool)
    has_parents[edge_index[1]] = True
    assert (input_gate[~has_parents] == 0).all()
    assert (input_gate[has_parents] > 0).all()


def test_path_products_are_below_a_quarter():
    n = 30
    name = torch.randperm(n)
    forward = torch.stack([name[:-1], name[1:]])
    edge_index = torch.cat([forward.flip(0), forward], dim=1)
    weight = torch.exp(5 * torch.randn(2 * n - 2, 3, dtype=torch.double))
    out = path_transition(edge_index, n, weight, torch.rand(n, 3, dtype=torch.double))
    product = out[: n - 1] * out[n - 1 :]
    assert (product < 0.25).all()
    assert product.max() > 0.2
    assert out.max() > 2


def undirected_paths(*sizes: int) -> tuple[Tensor, int]:
    """Paths with these numbers of nodes, which are renumbered at random."""
    total, start, edges = sum(sizes), 0, []
    name = torch.randperm(total)
    for size in sizes:
        places = torch.arange(start, start + size)
        edges.append(torch.stack([name[places[:-1]], name[places[1:]]]))
        start += size
    edge_index = torch.cat([y for x in edges for y in (x, x.flip(0))], dim=1)
    return edge_index[:, torch.randperm(edge_index.size(1))], total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("delta", "psi"), [(20.0, 20.0), (40.0, 90.0), (51.0, 102.0), (80.0, 300.0)]
)
def test_small_weights_of_a_path(delta, psi, dtype):
    """Whose product underflows."""
    weight = torch.full((2, 1), math.exp(-delta), dtype=dtype, requires_grad=True)
    edge_index = torch.tensor([[0, 1], [1, 0]])
    out = path_transition(edge_index, 2, weight, torch.full((2, 1), psi, dtype=dtype))
    ratio = math.exp(2 * delta - psi)
    exact = torch.full((2, 1), 0.5 / math.sqrt(1 + ratio), dtype=dtype)
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=0)
    out.sum().backward()
    slope = exact * ratio / (1 + ratio) * math.exp(delta)
    least = 1e-6 * math.exp(delta)  # rounding: both directions cancel
    torch.testing.assert_close(weight.grad, slope.detach(), rtol=1e-3, atol=least)


def test_balanced_transitions_of_paths():
    """Rescale the states, and so the resolvent, and are at most a half."""
    edge_index, num_nodes = undirected_paths(7, 1, 2, 5, 1)
    log = 6 * torch.randn(edge_index.size(1), 3, dtype=torch.double)
    psi, source = 4 * torch.randn(2, num_nodes, 3, dtype=torch.double)
    weight = path_transition(edge_index, num_nodes, log.exp(), psi)
    out, scale = balanced_path_transition(edge_index, num_nodes, log, psi, source)
    assert weight.max() > 5
    assert out.max() <= 0.5 + 1e-12
    for h in range(3):
        A, B = torch.eye(num_nodes).double(), torch.eye(num_nodes).double()
        A[edge_index[1], edge_index[0]] -= weight[:, h]
        B[edge_index[1], edge_index[0]] -= out[:, h]
        ratio = torch.exp(scale[:, None, h] - scale[None, :, h])
        assert_near(ratio * B.inverse(), A.inverse())
    # The largest of what the nodes of the same path write, as it arrives there.
    gain = torch.full((num_nodes, num_nodes, 3), -torch.inf).double()
    gain[range(num_nodes), range(num_nodes)] = 0
    gain[edge_index[1], edge_index[0]] = (2 * weight).log()
    for k in range(num_nodes):
        gain = torch.maximum(gain, gain[:, k, None] + gain[None, k])
    assert_near(scale, (gain + source).amax(1), 1e-6)


@pytest.mark.parametrize("size", [1e3, 1e5])
def test_balanced_transitions_of_any_size(size):
    edge_index, num_nodes = undirected_paths(40, 3)
    log = (-size * torch.rand(edge_index.size(1), 2)).requires_grad_()
    psi = (size * torch.rand(num_nodes, 2)).requires_grad_()
    source = -size * torch.rand(num_nodes, 2)
    out, scale = balanced_path_transition(edge_index, num_nodes, log, psi, source)
    assert out.max() <= 0.51
    reverse = (edge_index.flip(0)[:, :, None] == edge_index[:, None]).all(0)
    product = out * out[reverse.int().argmax(1)]
    assert (product <= 0.25 * (1 + 1e-6)).all()
    assert product.max() > 0.2
    assert (scale >= source).all()
    out.sum().backward()
    assert log.grad.isfinite().all()
    assert psi.grad.isfinite().all()


# ----------------------------------------------------------------------------- golden


def test_nodes_without_edges_have_finite_gradients_in_half_precision():
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        psi = torch.full((3, 2), 18.0, dtype=dtype, requires_grad=True)
        delta, edges = torch.ones(3, 2, dtype=dtype), torch.tensor([[0], [1]])
        chimera_transition(edges, 3, delta, delta, psi).sum().backward()
        assert psi.grad.isfinite().all()


@pytest.mark.parametrize(
    "function",
    [chimera_transition, released_transition, dag_transition, path_transition],
)
def test_nan_is_where_it_belongs(function):
    """In all that depends on it, and nowhere else."""
    index = EDGE_INDEX
    if function is path_transition:
        index = torch.tensor([[0, 1, 1, 2, 3, 4], [1, 0, 2, 1, 4, 3]])
    nodes, edges = gates(5), gates(6, copies=1)
    args = {
        chimera_transition: (*nodes, *edges),
        released_transition: (*nodes, *edges),
        dag_transition: (*edges, nodes[0]),
        path_transition: (*edges, nodes[0]),
    }[function]

    def results(i, change):
        leaves = [x.clone() for x in args]
        leaves[i][1, 1] = change(leaves[i][1, 1])
        leaves = [x.requires_grad_() for x in leaves]
        outs = function(index, 5, *leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        weighed = sum(
            (x * torch.arange(1.0, x.numel() + 1).view_as(x)).sum() for x in outs
        )
        grads = torch.autograd.grad(weighed, leaves)
        return [*(x.detach() for x in outs), *grads]

    for i in range(len(args)):
        want, other, got = (
            results(i, f)
            for f in (lambda x: x, lambda x: x - 3, lambda x: x * torch.nan)
        )
        for x, y, z in zip(want, other, got, strict=True):
            assert z.isnan().equal(x != y)
            assert z[x == y].equal(x[x == y])


def test_released_graph():
    data = load("chimera_graph_released")
    edge_index, bias = data["edge_index"], data["dt_bias"]
    num_nodes, heads = data["x"].size(0), bias.size(0)
    leaves = {
        name: data[name].requires_grad_() for name in ("x", "B", "C", "dt", "dt_edge")
    }
    dt = leaves["dt"].view(num_nodes, heads, 4)
    source, target, psi = (softplus(dt[..., c] + bias) for c in range(3))
    edge = softplus(leaves["dt_edge"] + bias)
    weight = released_transition(edge_index, num_nodes, target, source, psi, edge)
    x = leaves["x"].view(num_nodes, heads, -1)
    B, C = leaves["B"].unsqueeze(1), leaves["C"].unsqueeze(1)
    y = resolvent_mix(C, B, dt[..., 3, None] * x, edge_index, weight)
    y = y + data["D"].unsqueeze(-1) * x
    out = y.transpose(1, 2).flatten(1)
    assert_near(out, data["out"])
    out.backward(data["grad_out"])
    for name, leaf in leaves.items():
        assert_near(leaf.grad, data[f"grad_{name}"], what=name)


def grid_dag(height: int, width: int, down: bool, right: bool) -> tuple[Tensor, Tensor]:
    """From one corner of a grid: its edges, and 0 / 1 for a horizontal / vertical."""
    edges, direction = [], []
    for y in range(height):
        for x in range(width):
            parents = ((y, x - 1 if right else x + 1), (y - 1 if down else y + 1, x))
            for q, (b, a) in enumerate(parents):
                if 0 <= a < width and 0 <= b < height:
                    edges.append((b * width + a, y * width + x))
                    direction.append(q)
    return torch.tensor(edges).t(), torch.tensor(direction)


@pytest.mark.parametrize("write", [False, True])
def test_grids_without_edges(write):
    """Two grids, in all orientations: the transitions of each edge."""
    height, width = torch.tensor([3, 1]), torch.tensor([2, 1])
    parent = grid_parents(height, width, 4, 7)
    delta = torch.rand(7, 4, 2, 3, dtype=torch.double)
    root = torch.rand(7, 4, 3, dtype=torch.double) if write else None
    weight, gate = grid_transition(parent, delta, root)
    corners = [(True, True), (False, False), (False, True), (True, False)]
    for o, (down, right) in enumerate(corners):
        edge_index, direction = grid_dag(3, 2, down, right)
        source, target = edge_index
        assert (parent[target, o, direction] == 4 * source + o).all()
        of_edges = delta[target, o, direction]
        wanted, gates = dag_transition(
            edge_index, 7, of_edges, root[:, o] if write else None
        )
        assert_near(weight[target, o, direction], wanted)
        assert_near(gate[:, o], gates)
    places = torch.arange(28).view(7, 4, 1).expand(7, 4, 2)
    assert (parent == places).sum() == 4 * (2 + 3) + 8  # borders, and the node alone


@pytest.mark.parametrize("on", ["edges", "grids"])
def test_released_grid(on):
    """Four DAGs from the corners of a grid, whose roots write nothing."""
    data = load("chimera_grid_released")
    height, width, bias = int(data["height"]), int(data["width"]), data["dt_bias"]
    size, T, _ = data["x"].shape
    heads = bias.size(0)
    leaves = {name: data[name].requires_grad_() for name in ("x", "B", "C", "dt")}
    nodes = size * T
    x = leaves["x"].reshape(nodes, heads, -1)
    B, C = (leaves[name].reshape(nodes, 1, 4, -1) for name in ("B", "C"))
    delta = softplus(leaves["dt"].reshape(nodes, heads, 4, 2) + bias[:, None, None])
    y = 0
    corners = [(True, True), (True, False), (False, True), (False, False)]
    if on == "grids":
        sizes, corner = torch.tensor([[height, width]] * size), [0, 3, 2, 1]
        weight, input_gate = grid_transition(
            grid_parents(*sizes.unbind(1), 4, nodes),
            delta[:, :, corner].permute(0, 2, 3, 1),
        )
        for o, d in enumerate(corner):
            y = y + grid_dag_scan(
                C[:, :, d], B[:, :, d], x, input_gate[:, [o]], weight[:, [o]], height,
                width, orientations=[o],
            )  # fmt: skip
        corners = []
    for d, (down, right) in enumerate(corners):
        one, direction = grid_dag(height, width, down, right)
        edge_index = torch.cat([one + T * i for i in range(size)], dim=1)
        direction = direction.repeat(size)
        edge_delta = delta[edge_index[1], :, d, direction]
        weight, input_gate = dag_transition(edge_index, nodes, edge_delta)
        value = input_gate.unsqueeze(-1) * x
        y = y + dag_scan(C[:, :, d], B[:, :, d], value, edge_index, weight)
    y = y / 2 + data["D"].unsqueeze(-1) * x
    out = y.reshape(data["out"].shape)
    assert_near(out, data["out"])
    out.backward(data["grad_out"])
    for name, leaf in leaves.items():
        assert_near(leaf.grad, data[f"grad_{name}"], what=name)


# --------------------------------------------------------------------- errors and more


def test_path_errors():
    def check(edges, num_nodes, match):
        edge_index = torch.tensor(edges).view(-1, 2).t()
        weight = torch.ones(edge_index.size(1), 1)
        with pytest.raises(ValueError, match=match):
            path_transition(edge_index, num_nodes, weight, torch.ones(num_nodes, 1))

    check([(0, 1), (1, 0), (1, 2)], 3, "edge 2, 1 -> 2, has no reverse.*to_undirected")
    star = [(0, 1), (1, 0), (0, 2), (2, 0), (0, 3), (3, 0)]
    check(star, 4, "6 edges between 4 nodes in 1 components, and a node of degree 3")
    triangle = [(0, 1), (1, 0), (1, 2), (2, 1), (2, 0), (0, 2)]
    check(triangle, 3, "simple paths.*6 edges between 3 nodes")
    check([(0, 1), (1, 0), (0, 1), (1, 0)], 2, "simple paths")
    check([(0, 1), (1, 0), (0, 0)], 2, "simple paths")
    check([(0, 1), (1, 0), (2, 2)], 4, "simple paths")
    check([(0, 1), (1, 0)], 1, r"\[0, num_nodes\) = \[0, 1\)")


@pytest.mark.parametrize("num_nodes", [0, 1, 3])
def test_no_edges(num_nodes):
    edge_index = torch.empty(2, 0, dtype=torch.long)
    node, none = torch.rand(num_nodes, 2), torch.empty(0, 2)
    args = (edge_index, num_nodes)
    assert chimera_transition(*args, node, node, node).shape == (0, 2)
    assert released_transition(*args, node, node, node).shape == (0, 2)
    assert path_transition(*args, none, node).shape == (0, 2)
    weight, input_gate = dag_transition(*args, none, node)
    assert weight.shape == (0, 2)
    assert input_gate.equal(node)
    assert dag_transition(*args, none)[1].equal(torch.zeros(num_nodes, 2))


@pytest.mark.parametrize("function", [chimera_transition, released_transition])
def test_bad_graphs(function):
    edge_index, nodes = torch.tensor([[0, 1], [1, 0]]), [torch.rand(3, 2)] * 3
    for i, name in enumerate(("target", "source", "psi")):
        wrong = [x[:1] if j == i else x for j, x in enumerate(nodes)]
        with pytest.raises(ValueError, match=rf"'{name}' must be .* = \[3, 2\], got"):
            function(edge_index, 3, *wrong)
    for edge in (torch.rand(1, 2), torch.rand(2, 1)):  # which would be broadcast
        with pytest.raises(ValueError, match=r"'edge' must be .* = \[2, 2\], got"):
            function(edge_index, 3, *nodes, edge)


def test_what_selectivities_must_be():
    edge_index, nodes = torch.tensor([[0, 1], [1, 0]]), [torch.rand(3, 2)] * 3
    for function in (chimera_transition, released_transition):
        with pytest.raises(TypeError, match=r"'target' must be a torch.Tensor, got"):
            function(edge_index, 3, None, *nodes[1:])
        with pytest.raises(TypeError, match=r"'psi' must be floating point"):
            function(edge_index, 3, *nodes[:2], torch.ones(3, 2).long())
        for wrong in (torch.tensor([[0, 1], [1, -1]]), edge_index + 2):
            with pytest.raises((IndexError, ValueError), match="must hold node"):
                function(wrong, 3, *nodes)
    with pytest.raises(TypeError, match=r"'delta' must be a torch.Tensor"):
        dag_transition(edge_index, 3, None)
    with pytest.raises(TypeError, match="'gamma' must be a number, got 'a'"):
        chimera_transition(edge_index, 3, *nodes, gamma="a")
    with pytest.raises(ValueError, match=r"'log_weight' must be .* = \[2, 2\], got"):
        balanced_path_transition(edge_index, 3, torch.rand(1, 2), *nodes[:2])


def test_bad_gamma_and_bad_dags():
    edge_index, nodes = torch.tensor([[0, 1], [1, 0]]), [torch.rand(3, 2)] * 3
    for gamma in (0.0, 1.5):
        with pytest.raises(ValueError, match=r"'gamma' must be in \(0, 1\], got"):
            chimera_transition(edge_index, 3, *nodes, gamma=gamma)
    with pytest.raises(ValueError, match=r"'delta' must be .* = \[2, 2\], got"):
        dag_transition(edge_index, 3, torch.rand(1, 2))
    with pytest.raises(ValueError, match=r"'root' must be .* = \[3, 2\], got"):
        dag_transition(edge_index, 3, torch.rand(2, 2), torch.rand(3, 1))


def test_bad_grids():
    delta = torch.rand(6, 4, 2, 1)
    parent = grid_parents(2, 3, 4, 6)
    with pytest.raises(ValueError, match=r"'parent' must be .* = \[6, 4, 2\], got"):
        grid_transition(parent[:, :3], delta)
    with pytest.raises(ValueError, match=r"'root' must be .* = \[6, 4, 1\], got"):
        grid_transition(parent, delta, torch.rand(6, 4))
    with pytest.raises(ValueError, match=r"'num_dags' must be one of \(1, 2, 3, 4\)"):
        grid_parents(2, 3, 5, 6)
    with pytest.raises(ValueError, match="of 6 nodes in all, got 8 in 1 grid"):
        grid_parents(2, 4, 4, 6)


def test_path_reverse_is_registered():
    edge_index = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    op = torch.ops.pyg_chimera.path_reverse.default
    assert op(edge_index, 3).tolist() == [1, 0, 3, 2]
    torch.library.opcheck(op, (edge_index, 3))
