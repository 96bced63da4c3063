import itertools

import networkx as nx
import pytest
import torch
from torch_geometric.loader import DataLoader
from torch_geometric.utils import is_undirected, to_networkx

from pyg_chimera.datasets import EchoSynth

FAMILIES = EchoSynth.FAMILIES


def make(root, *args, num_graphs=120, **kwargs):
    return EchoSynth(str(root), *args, num_graphs=num_graphs, log=False, **kwargs)


def prune(graph: nx.Graph) -> nx.Graph:
    """Without its leaves."""
    return graph.subgraph([v for v, degree in graph.degree if degree > 1])


def is_path(graph: nx.Graph) -> bool:
    return nx.is_tree(graph) and max(degree for _, degree in graph.degree) <= 2


@pytest.mark.parametrize("scale", [1, 2])
def test_targets_are_those_of_networkx(tmp_path, scale):
    kwargs = {"num_graphs": 36, "scale": scale}
    sssp = make(tmp_path, **kwargs)
    eccentricity = make(tmp_path, "eccentricity", **kwargs)
    diameter = make(tmp_path, "diameter", **kwargs)
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
        assert 17 * scale <= max(far.values()) <= 40 * scale


def test_graphs_are_of_their_families(tmp_path):
    dataset = make(tmp_path)
    for data in dataset:
        graph, name = to_networkx(data, to_undirected=True), FAMILIES[data.family]
        assert nx.is_connected(graph)
        if name == "line":
            assert is_path(graph)
        elif name == "ladder":
            rungs = nx.ladder_graph(data.num_nodes // 2)
            assert nx.is_isomorphic(graph, rungs)
        elif name == "grid":
            assert max(degree for _, degree in graph.degree) <= 4
            assert nx.is_bipartite(graph)
            assert not nx.is_tree(graph)
        elif name == "caterpillar":
            assert is_path(prune(graph))
            assert not is_path(graph)
        elif name == "lobster":
            assert is_path(prune(prune(graph)))
            assert not is_path(prune(graph))
        else:
            assert nx.is_tree(graph)
    assert not all(
        is_path(prune(prune(to_networkx(data, to_undirected=True))))
        for data in dataset
        if FAMILIES[data.family] == "tree"
    )


def test_splits_are_balanced(tmp_path):
    sizes = {"train": 96, "val": 12, "test": 12}
    for split, size in sizes.items():
        dataset = make(tmp_path, split=split)
        assert dataset._data.family.bincount().tolist() == [size // 6] * 6
    lengths = make(tmp_path, "diameter", num_graphs=6 * 30)
    for family in (0, 1, 3, 4, 5):
        chosen = lengths.y[lengths._data.family == family].view(-1)
        assert (40 * chosen).round().int().tolist() == [
            17 + 7 * i % 24 for i in range(24)
        ]
    # 1,344, 168 and 168 of each family: as often as there are diameters, or a multiple.
    assert 10_080 // 6 // 10 % 24 == 0


def test_graphs_depend_on_position_split_scale_and_seed(tmp_path):
    first = make(tmp_path, num_graphs=36)
    for short, long in zip(first, make(tmp_path, num_graphs=60), strict=False):
        for name in ("x", "edge_index", "y", "family"):
            assert torch.equal(short[name], long[name])
    kinds = [{}, {"seed": 1}, {"split": "val"}, {"split": "test"}, {"scale": 2}]
    made = [make(tmp_path, **kind)[0] for kind in kinds]
    for one, other in itertools.combinations(made, 2):
        assert float(one.x[0, 0]) != float(other.x[0, 0])


def test_only_the_split_is_generated_and_cached(tmp_path, monkeypatch):
    first = make(tmp_path, split="test")
    assert [path.name for path in tmp_path.rglob("*.pt")].count("test.pt") == 1
    assert not list(tmp_path.rglob("train.pt"))
    monkeypatch.setattr(EchoSynth, "generate", None)
    again = make(tmp_path, split="test")
    assert torch.equal(again._data.x, first._data.x)
    with pytest.raises(TypeError):
        make(tmp_path, split="test", force_reload=True)


def test_batches_and_transforms(tmp_path):
    dataset = make(
        tmp_path,
        "diameter",
        pre_filter=lambda data: int(data.family) == 1,
        pre_transform=lambda data: data.update({"mark": torch.ones(1)}),
    )
    assert len(dataset) == 16
    batch = next(iter(DataLoader(dataset, 4)))
    assert batch.y.shape == (4, 1)
    assert batch.family.tolist() == [1] * 4
    assert batch.mark.shape == (4,)
    assert repr(dataset) == "EchoSynth(16, task='diameter', split='train', scale=1)"


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"task": "ecc"}, "'task' must be one of"),
        ({"split": "valid"}, "'split' must be one of"),
        ({"num_graphs": 100}, "'num_graphs' must be a multiple of 6"),
        ({"num_graphs": 12}, "at least 18"),
        ({"scale": 0}, "'scale' must be at least 1"),
        ({"seed": -1}, "'seed' must not be negative"),
        ({"pre_filter": lambda data: False}, "'pre_filter' must leave"),
    ],
)
def test_rejects(tmp_path, kwargs, message):
    with pytest.raises(ValueError, match=message):
        make(tmp_path, **kwargs)
