"""The operators on a graph's structure: compiled, exported, remembered."""

import pytest
import torch
from torch import Tensor

from pyg_chimera.ops import (
    CycleError,
    line_graph,
    multitree,
    node_order,
    node_score,
    node_sequences,
)
from pyg_chimera.ops.common import cache
from pyg_chimera.ops.structure import topological_rank
from pyg_chimera.ops.structure.line_graph import ordered_dags


def ladder(num_nodes: int) -> Tensor:
    """Edges to the next node and the one after it."""
    node = torch.arange(num_nodes - 1)
    steps = [torch.stack([node, node + 1]), torch.stack([node[1:] - 1, node[1:] + 1])]
    return torch.cat(steps, dim=1)


class Layer(torch.nn.Module):
    """Takes all of the structure there is."""

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        lines, node = line_graph(edge_index, x.size(0))
        kept = multitree(lines, edge_index.size(1)).to(x.dtype)
        edge = x[edge_index[0]] * x[edge_index[1]]
        step = edge[lines[0]] * x[node] * kept
        edge = torch.zeros_like(edge).index_add(0, lines[1], step)
        index, edge_id, lines = ordered_dags(edge_index, x.size(0), "degree", True)
        edge = torch.tanh(edge[edge_id])
        edge = edge.index_add(0, lines[1], edge[lines[0]])
        both = torch.zeros_like(x).index_add(0, index[1] // 2, edge)
        place = node_order(edge_index, x.size(0), "bfs")
        batch = torch.zeros_like(place)
        score = node_score(edge_index, x.size(0), "pagerank", batch).to(x.dtype)
        return both[place] * score + node_score(edge_index, x.size(0), "degree")


@pytest.fixture(autouse=True)
def nothing_remembered():
    cache._CACHE.values.clear()


def assert_same_for_all_sizes(function):
    """On graphs never seen before, with gradients."""
    for num_nodes in (6, 9, 12):
        x = torch.linspace(-1, 1, num_nodes, dtype=torch.double, requires_grad=True)
        outs = [f(x, ladder(num_nodes)) for f in (function, Layer())]
        grads = [torch.autograd.grad(out.sum(), x)[0] for out in outs]
        torch.testing.assert_close(*outs)
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [
        *((backend, d) for backend in ("eager", "aot_eager") for d in (True, False)),
        ("inductor", True),
    ],
)
def test_compile(backend, dynamic):
    layer = torch.compile(Layer(), fullgraph=True, backend=backend, dynamic=dynamic)
    assert_same_for_all_sizes(layer)


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict):
    sizes = {name: torch.export.Dim(name, min=2, max=2**20) for name in "VE"}
    args = (torch.ones(5, dtype=torch.double), ladder(5))
    program = torch.export.export(
        Layer(), args, dynamic_shapes=({0: sizes["V"]}, {1: sizes["E"]}), strict=strict
    )
    assert_same_for_all_sizes(program.module())


def test_compiled_errors_are_the_same():
    compiled = torch.compile(line_graph, fullgraph=True, backend="eager")
    with pytest.raises(CycleError, match="0 -> 1 -> 0") as caught:
        compiled(torch.tensor([[0, 1], [1, 0]]), 2)
    assert caught.value.cycle == [0, 1]


def test_fake_tensors_have_the_right_types():
    edge_index = ladder(6)
    lines = line_graph(edge_index, 6).edge_index
    options = dict(test_utils=("test_schema", "test_faketensor"))
    structure = torch.ops.pyg_chimera
    for operator, args in [
        (structure.line_graph, (edge_index, 6)),
        (structure.ordered_dags, (edge_index, 6, "bfs", True)),
        (structure.multitree, (lines, edge_index.size(1))),
        (structure.node_order, (edge_index, 6, "bfs")),
        *(
            (structure.node_score, (edge_index, None, 6, order))
            for order in ("degree", "pagerank", "eigenvector", "closeness", "bfs")
        ),
    ]:
        report = torch.library.opcheck(operator.default, args, **options)
        assert set(report.values()) == {"SUCCESS"}


def test_results_are_remembered_but_nobody_shares_them(monkeypatch):
    edge_index = ladder(7)
    expected = line_graph(edge_index, 7)
    expected.node.fill_(-1)
    monkeypatch.setattr(cache._CACHE, "put", None)  # nothing is computed any more
    for out in (line_graph(edge_index, 7), line_graph(edge_index.clone(), 7)):
        assert int(out.node.min()) >= 0
    with pytest.raises(TypeError, match="not callable"):
        line_graph(edge_index, 8)


@pytest.mark.parametrize("function", [line_graph, multitree, node_order, node_score])
def test_what_no_dispatcher_takes(function):
    order = () if function in (line_graph, multitree) else ("degree",)
    with pytest.raises(TypeError, match=r"edge_index' must .*torch.sparse_coo"):
        function(torch.eye(2).to_sparse(), 2, *order)
    with pytest.raises(ValueError, match=r"'num_\w+' must be an integer of 64 bits"):
        function(ladder(3), 2**70, *order)


def test_arguments_by_name():
    edge_index = ladder(4)
    rank = topological_rank(edge_index=edge_index, num_nodes=4)
    assert rank.tolist() == [0, 1, 2, 3]
    with pytest.raises(TypeError, match="missing a required argument: 'num_nodes'"):
        topological_rank(edge_index)
    with pytest.raises(TypeError, match="too many positional arguments"):
        topological_rank(edge_index, 4, 5)


def test_transforms_of_functions():
    """Per-sample gradients, where the graph is the same for all."""
    x = torch.rand(3, 7)
    for lone in (
        lambda x: (x[line_graph(ladder(7), 7).node] ** 2).sum(),
        lambda x: (x * node_score(ladder(7), 7, "closeness")).sum(),
        lambda x: (
            x[node_sequences(node_score(ladder(7), 7, "bfs"), seed=1).index] ** 2
        )[:4].sum(),
    ):
        grads = torch.vmap(torch.func.grad(lone))(x)
        assert grads.equal(torch.stack([torch.func.grad(lone)(row) for row in x]))
