import itertools

import long_range_data
import networkx as nx
import pytest
import torch
from torch_geometric.utils import is_undirected, to_networkx


@pytest.fixture
def make():
    def make(task="sssp", split="train", num_graphs=120):
        return long_range_data.echo_graphs(task, split, num_graphs)

    return make


def test_targets_are_those_of_networkx(make):
    tasks = ("sssp", "eccentricity", "diameter")
    sssp, eccentricity, diameter = (make(task, num_graphs=36) for task in tasks)
    for data, ecc, diam in zip(sssp, eccentricity, diameter, strict=True):
        graph = to_networkx(data, to_undirected=True)
        assert is_undirected(data.edge_index)
        assert not data.has_self_loops()
        assert data.x.shape == (data.num_nodes, 2)
        assert ecc.x.shape == diam.x.shape == (data.num_nodes, 1)
        for other in (ecc, diam):
            assert torch.equal(other.edge_index, data.edge_index)
            assert torch.equal(other.x, data.x[:, :1])
        source = data.x[:, 1].nonzero().view(-1).tolist()
        hops = nx.single_source_shortest_path_length(graph, *source)
        far = nx.eccentricity(graph)
        nodes = range(data.num_nodes)
        for y, expected in (
            (data.y, [[hops[v]] for v in nodes]),
            (ecc.y, [[far[v]] for v in nodes]),
            (diam.y, [[max(far.values())]]),
        ):
            assert torch.allclose(40 * y, torch.tensor(expected).float(), atol=1e-5)
        assert 17 <= max(far.values()) <= 40


def test_graphs_depend_on_position_and_split(make):
    first = make(num_graphs=36)
    for short, long in zip(first, make(num_graphs=60), strict=False):
        for name in ("x", "edge_index", "y", "family"):
            assert torch.equal(short[name], long[name])
    made = [make(split=x, num_graphs=18)[0] for x in ("train", "val", "test")]
    for one, other in itertools.combinations(made, 2):
        assert float(one.x[0, 0]) != float(other.x[0, 0])
