"""What all functions of a graph's structure have in common."""

import time
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from pyg_chimera.ops import line_graph, multitree, node_order, node_score
from pyg_chimera.ops.structure import (
    ORDERS,
    connected_components,
    diameter,
    elimination_rank,
    find_cycle,
    k_hop_index,
    parent_scale,
    topological_rank,
)
from pyg_chimera.ops.structure.line_graph import ordered_dags

WITH_BATCH = {
    "diameter": diameter,
    **{f"score_{x}": partial(node_score, order=x) for x in ORDERS},
}
FUNCTIONS = {
    "parent_scale": parent_scale,
    "topological_rank": topological_rank,
    "find_cycle": find_cycle,
    "connected_components": connected_components,
    "elimination_rank": elimination_rank,
    "k_hop_index": partial(k_hop_index, k=2),
    "line_graph": line_graph,
    "multitree": multitree,
    "ordered_dags": partial(ordered_dags, order="bfs", turns=True),
    **{f"{x}_order": partial(node_order, order=x) for x in ("order", "degree", "bfs")},
    **WITH_BATCH,
}
DTYPES = {f"score_{x}": torch.double for x in ("eigenvector", "pagerank", "closeness")}
DTYPES |= {"multitree": torch.bool, "parent_scale": torch.double}
#: Those that tell also nodes without any edges apart.
BY_NUMBER = ("connected_components", "elimination_rank", "score_bfs", "score_cluster")
BY_NUMBER += ("order_order", "degree_order", "bfs_order")
#: A DAG with duplicate edges, an isolated node, and edges against the order of nodes.
EDGES = torch.tensor([[3, 3, 0, 1, 3, 3, 0], [0, 1, 2, 2, 2, 0, 1]])

each_function = pytest.mark.parametrize("name", FUNCTIONS)
each_with_batch = pytest.mark.parametrize("name", WITH_BATCH)


def as_lists(out):
    if isinstance(out, tuple):
        return [as_lists(x) for x in out]
    return out.tolist() if isinstance(out, Tensor) else out


@each_function
def test_dtypes_and_layouts(name):
    expected = FUNCTIONS[name](EDGES, 5)
    dtypes = [EDGES.to(x) for x in (torch.int32, torch.int16, torch.int8, torch.uint8)]
    layouts = [EDGES.t().contiguous().t(), EDGES.repeat_interleave(2, 1)[:, ::2]]
    for edge_index in dtypes + layouts:
        out = FUNCTIONS[name](edge_index, 5)
        assert as_lists(out) == as_lists(expected)
    for x in expected if isinstance(expected, tuple) else (expected,):
        if isinstance(x, Tensor):
            assert x.dtype == DTYPES.get(name, torch.long)
            assert x.is_contiguous()
    assert as_lists(FUNCTIONS[name](EDGES, np.int64(5))) == as_lists(expected)


@each_function
@pytest.mark.parametrize("num_nodes", [0, 1, 3])
def test_without_edges(name, num_nodes):
    empty = torch.empty(2, 0, dtype=torch.long)
    out = FUNCTIONS[name](empty, num_nodes)
    of_edges = {
        "find_cycle": None,
        "diameter": 0,
        "multitree": [],
        "k_hop_index": [[[*range(num_nodes)]] * 2, [0] * num_nodes],
        "line_graph": [[[], []], []],
        "ordered_dags": [[[], []], [], [[], []]],
    }
    if name in of_edges:
        assert as_lists(out) == of_edges[name]
        return
    assert out.numel() == num_nodes
    if name in BY_NUMBER:
        assert sorted(out.tolist()) == list(range(num_nodes))
    else:
        assert out.unique().numel() == min(num_nodes, 1)
    if name in WITH_BATCH:
        batch = torch.full((num_nodes,), 2)
        assert FUNCTIONS[name](empty, num_nodes, batch=batch).equal(out)


@each_function
@pytest.mark.parametrize(
    ("edge_index", "num_nodes", "error", "match"),
    [
        (None, 3, TypeError, "must be a.* tensor of integers.*'NoneType'"),
        ([[0], [1]], 3, TypeError, "must be a.* tensor of integers.*'list'"),
        (np.zeros((2, 1)), 3, TypeError, "must be a.* tensor of integers.*'ndarray'"),
        (torch.zeros(2, 2), 3, TypeError, "integers.*torch.float32"),
        (torch.zeros(2, 2).bool(), 3, TypeError, "integers.*torch.bool"),
        (torch.zeros(2, 2).cfloat(), 3, TypeError, "integers.*torch.complex64"),
        (torch.zeros(2, 2).to(torch.float8_e5m2), 3, TypeError, "integers.*float8"),
        (torch.zeros(3, 2).long(), 3, ValueError, r"\[2, num_.*shape \[3, 2\]"),
        (torch.zeros(4).long(), 3, ValueError, r"\[2, num_.*shape \[4\]"),
        (torch.tensor([[0], [3]]), 3, ValueError, r"= \[0, 3\), got 3"),
        (torch.tensor([[0], [-1]]), 3, ValueError, r"= \[0, 3\), got -1"),
        (EDGES, 5.0, TypeError, "must be an integer, got 'float'"),
        (EDGES, None, TypeError, "must be an integer, got 'NoneType'"),
        (EDGES, -1, ValueError, "must not be negative, got -1"),
    ],
)
def test_bad_graph(name, edge_index, num_nodes, error, match):
    lines = name == "multitree"
    argument = "line_edge_index" if lines else "edge_index"
    if edge_index is EDGES:
        argument = "num_states" if lines else "num_nodes"
    with pytest.raises(error, match=f"'{argument}'.*{match}"):
        FUNCTIONS[name](edge_index, num_nodes)


@each_with_batch
@pytest.mark.parametrize(
    ("batch", "error", "match"),
    [
        ([0, 0, 0], TypeError, "'batch' must be a.*tensor of integers.*'list'"),
        (np.zeros(3, np.int64), TypeError, "'batch' must be a.*tensor.*'ndarray'"),
        (torch.zeros(3), TypeError, "'batch' must hold integers"),
        (torch.zeros(3).to(torch.float8_e5m2), TypeError, "'batch' must hold integers"),
        (torch.zeros(2).long(), ValueError, r"'batch'.*\[3\].*\[2\]"),
        (torch.tensor([0, -1, 0]), ValueError, "'batch'.*negative"),
        (torch.tensor([0, 0, 1]), ValueError, "'edge_index' joins.*node 0.*node 2 of"),
    ],
)
def test_bad_batch(name, batch, error, match):
    with pytest.raises(error, match=match):
        FUNCTIONS[name](torch.tensor([[0], [2]]), 3, batch=batch)


@each_with_batch
def test_labels_of_graphs_make_no_difference(name):
    """However large they are, and in no more time and memory."""
    batch = torch.tensor([1, 0, 1, 1, 2, 0])
    edge_index = torch.tensor([[0, 2, 1], [2, 3, 5]])
    expected = FUNCTIONS[name](edge_index, 6, batch=batch)
    begin = time.process_time()
    for labels in ([0, 5, 90_000_000], [1, 2**40, 2**62]):
        labels = torch.tensor(labels)
        if name == "diameter" and labels[-1] > 2**31:
            with pytest.raises(ValueError, match="'batch' must number the graphs"):
                diameter(edge_index, 6, labels[batch])
            continue
        out = FUNCTIONS[name](edge_index, 6, batch=labels[batch])
        if name == "diameter":
            assert out.numel() == labels[-1] + 1
            out = out[labels]
        assert out.equal(expected)
    assert time.process_time() - begin < 2


@pytest.mark.parametrize("function", [node_order, node_score])
@pytest.mark.parametrize("order", ["dfs", None, 1, ["bfs"]])
def test_unknown_order(function, order):
    with pytest.raises(ValueError, match=r"'order' must be one of.*'bfs'.*got "):
        function(EDGES, 5, order)


@pytest.mark.cuda
@each_function
def test_results_are_on_the_device_of_the_graph(name):
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    out = FUNCTIONS[name](EDGES.cuda(), 5)
    for x in out if isinstance(out, tuple) else (out,):
        assert not isinstance(x, Tensor) or x.is_cuda
    assert as_lists(out) == as_lists(FUNCTIONS[name](EDGES, 5))
