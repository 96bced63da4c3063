import json
from collections import Counter

import learning
import learning_tasks as tasks
import networkx as nx
import numpy as np
import pytest
import torch
from torch_geometric.utils import to_networkx

GENERATED = (
    "nearest-source", "ring-transfer", "tree-match", "path-sum", "weighted-nearest",
    "reachability", "parity",
)  # fmt: skip


def some_graphs(name, number=30):
    """Each as it is, and for networkx."""
    make = tasks.TASKS[name].make
    for seed in range(number):
        data = make(np.random.default_rng(seed))
        attrs = ["edge_attr"] if "edge_attr" in data else None
        yield data, to_networkx(data, edge_attrs=attrs)


def marked(data, column):
    """The only node whose feature in a column is 1."""
    (node,) = (data.x[:, column] == 1).nonzero().flatten().tolist()
    return node


# Labels, worked out anew -------------------------------------------------------------


def test_nearest_source():
    for data, graph in some_graphs("nearest-source"):
        sources = data.x.sum(1).nonzero().flatten().tolist()
        assert len(sources) == 3
        steps = {s: nx.single_source_shortest_path_length(graph, s) for s in sources}
        for node in graph:
            nearest = min(steps[s][node] for s in sources)
            classes = {int(data.x[s].argmax()) for s in sources
                       if steps[s][node] == nearest}  # fmt: skip
            told = nearest > 0 and len(classes) == 1
            assert data.y[node] == (classes.pop() if told else -1)
            assert data.distance[node] == nearest
        assert 60 <= len(graph) <= 120
        assert nx.is_tree(graph.to_undirected())


def test_ring_transfer():
    for data, graph in some_graphs("ring-transfer"):
        target = marked(data, 5)
        (source,) = data.x[:, :5].sum(1).nonzero().flatten().tolist()
        steps = nx.shortest_path_length(graph, source, target)
        assert 2 * steps == len(graph)
        assert set(data.distance.tolist()) == {steps}
        assert set(dict(graph.to_undirected().degree).values()) == {2}
        assert data.y[target] == data.x[source, :5].argmax()
        assert (data.y >= 0).sum() == 1


def test_tree_match():
    keys = tasks.MAX_KEYS
    for data, graph in some_graphs("tree-match"):
        root = marked(data, keys + 4)
        steps = nx.single_source_shortest_path_length(graph, root)
        depth = max(steps.values())
        leaves = [node for node in graph if graph.in_degree(node) == 1]
        leaves = [node for node in leaves if node != root]
        assert nx.is_tree(graph.to_undirected())
        assert Counter(steps.values()) == {d: 2**d for d in range(depth + 1)}
        assert {steps[leaf] for leaf in leaves} == {depth}
        found = {int(data.x[leaf, :keys].argmax()): leaf for leaf in leaves}
        assert set(found) == set(range(2**depth))
        leaf = found[int(data.x[root, :keys].argmax())]
        assert data.y[root] == data.x[leaf, keys : keys + 4].argmax()
        assert (data.y >= 0).sum() == 1
        assert set(data.distance.tolist()) == {depth}


def test_path_sum():
    for data, graph in some_graphs("path-sum"):
        start, total, node, came_from = marked(data, 2), 0, None, None
        for place in range(1, len(graph) + 1):
            if node is None:
                node = start
            else:
                (ahead,) = set(graph[node]) - {came_from}
                assert graph.edges[node, ahead]["edge_attr"] == [1, 0]
                assert graph.edges[ahead, node]["edge_attr"] == [0, 1]
                node, came_from = ahead, node
            total += int(data.x[node, 1] - data.x[node, 0])
            assert data.y[node] == (total > 0) - (total < 0) + 1
            assert data.distance[node] == place
        assert graph.in_degree(node) == 1


def test_weighted_nearest():
    for data, graph in some_graphs("weighted-nearest"):
        for *_, values in graph.edges(data=True):
            values["weight"] = 1 + values["edge_attr"].index(1)
        ends = marked(data, 0), marked(data, 1)
        steps, far = (
            [nx.shortest_path_length(graph, end, weight=weight) for end in ends]
            for weight in (None, "weight")
        )
        assert nx.is_tree(graph.to_undirected())
        for node in graph:
            told = far[0][node] != far[1][node]
            assert data.y[node] == (far[1][node] < far[0][node] if told else -1)
            assert data.hard[node] == (abs(steps[0][node] - steps[1][node]) <= 1)
            assert data.distance[node] == min(steps[0][node], steps[1][node])


def test_reachability():
    for data, graph in some_graphs("reachability"):
        source = marked(data, 1)
        reached = nx.descendants(graph, source)
        steps = nx.single_source_shortest_path_length(graph.to_undirected(), source)
        assert nx.is_directed_acyclic_graph(graph)
        assert nx.is_weakly_connected(graph)
        assert 0.3 <= len(reached) / (len(graph) - 1) <= 0.7
        for node in graph:
            assert data.y[node] == (-1 if node == source else node in reached)
            assert data.distance[node] == steps[node]


def test_parity():
    for data, graph in some_graphs("parity"):
        before = 0
        order = list(nx.topological_sort(graph))
        assert nx.is_path(graph, order)
        assert graph.number_of_edges() == len(graph) - 1
        for place, node in enumerate(order, start=1):
            before ^= int(data.x[node].argmax())
            assert data.y[node] == before
            assert data.distance[node] == place


# Properties --------------------------------------------------------------------------


@pytest.mark.parametrize("name", GENERATED)
def test_generators(name):
    """Seeds decide, features are as many as is said, and no class is rare."""
    task = tasks.TASKS[name]
    first, again, other = (task.make(np.random.default_rng(i)) for i in (0, 0, 1))
    assert torch.equal(first.x, again.x)
    assert torch.equal(first.edge_index, again.edge_index)
    assert torch.equal(first.y, again.y)
    assert first.x.shape != other.x.shape or not torch.equal(first.x, other.x)

    labels, hard, in_order = [], 0, 0
    for data, graph in some_graphs(name, 100):
        assert data.validate()
        assert nx.is_weakly_connected(graph)
        assert data.x.size(1) == task.in_channels
        assert data.y.size(0) == data.distance.size(0) == data.num_nodes
        assert ("edge_attr" in data) == (task.edge_dim is not None)
        assert task.directed == nx.is_directed_acyclic_graph(graph)
        row, col = data.edge_index
        in_order += int((row < col).sum()) / data.num_edges
        labels.append(data.y[data.y >= 0])
        hard += int((data.hard & (data.y >= 0)).sum())
    counts = torch.cat(labels).bincount()
    assert len(counts) == task.out_channels
    assert counts.min() > 0.2 * counts.max()
    assert 0.2 < hard / counts.sum() < 0.8
    assert 0.4 < in_order / 100 < 0.6  # numbers of nodes don't tell directions


def test_splits_differ():
    train, test = (tasks.graphs("parity", split, True) for split in ("train", "test"))

    def graphs_as_text(graphs):
        return {str((x.x.tolist(), x.edge_index.tolist())) for x in graphs}

    assert not graphs_as_text(train) & graphs_as_text(test)


@pytest.mark.parametrize("name", ["path-sum", "parity"])
def test_models_are_of_one_size(name):
    task = learning.TASKS[name]
    models = [learning.build(mixer, task) for mixer in learning.MIXERS]
    sizes = [learning.count_parameters(model.layers) for model in models]
    assert max(sizes) / min(sizes) < 1.01
    whole = [learning.count_parameters(model) for model in models]
    assert max(whole) / min(whole) < 1.05


def test_scores():
    out = torch.tensor([[2.0, 1], [2, 1], [2, 1], [1, 2]])
    y = torch.tensor([0, 0, 1, 1])
    assert learning.score(out, y, "accuracy") == 0.75
    assert learning.score(out[:3], y[:3], "balanced accuracy") == 0.5
    assert learning.score(out, (out > 1).float(), "average precision") == 1


# The command -------------------------------------------------------------------------


@pytest.mark.slow
def test_runs_are_added_and_kept(tmp_path):
    out = tmp_path / "smoke.json"
    command = ["--smoke", "--jobs", "1", "--out", str(out)]
    command += ["--seconds", "0.02", "--only", "parity", "path-sum", "--mixers"]
    learning.main([*command, "chimera"])
    results = json.loads(out.read_text())
    rows = results["runs"]
    for row in rows:
        assert row["mixer"] == "chimera"
        number = sum(count for *_, count in row["by_distance"])
        mean = sum(value * count for _, value, count in row["by_distance"]) / number
        assert mean == pytest.approx(row["score"], abs=1e-5)

    with pytest.raises(SystemExit, match="exists: pass --resume to go on with it"):
        learning.main([*command, "gcn"])
    with pytest.raises(SystemExit, match="was measured with"):
        learning.main([*command, "gcn", "--resume", "--seconds", "0.5"])
    assert json.loads(out.read_text()) == results
    learning.main([*command, "chimera", "gcn", "--resume"])
    more = json.loads(out.read_text())["runs"]
    assert more[:2] == rows
    found = {(x["task"], x["mixer"]) for x in more[2:]}
    assert found == {("parity", "gcn"), ("path-sum", "gcn")}
    learning.main([*command, "gcn", "--overwrite", "--seeds", "2"])
    rows = json.loads(out.read_text())["runs"]
    assert [(x["mixer"], x["seed"]) for x in rows] == 2 * [("gcn", 0), ("gcn", 1)]
