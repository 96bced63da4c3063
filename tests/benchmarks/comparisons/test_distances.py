"""Distances in graphs: what models read, and how they are measured."""

from functools import partial

import distances as compared
import pytest
import torch
from torch_geometric.data import Batch
from torch_geometric.utils import to_scipy_sparse_matrix


def largest(data):
    """The largest distance in a graph, by powers of its adjacency matrix."""
    adjacency = to_scipy_sparse_matrix(data.edge_index).toarray() > 0
    within = torch.eye(data.num_nodes, dtype=torch.bool).numpy()
    for hops in range(1, data.num_nodes):
        within = within | within @ adjacency
        if within.all():
            return hops
    raise AssertionError("not connected")


@pytest.mark.parametrize("task", compared.TASKS)
def test_data_and_errors(task):
    args = compared.get_args(["--smoke", "--task", task, "--out", "unused"])
    data = compared.get_datasets(args)
    batch = Batch.from_data_list(data["test"])
    assert batch.edge_attr.shape == (batch.num_edges, 1)
    assert len(batch.y) == (len(data["test"]) if task == "diameter" else len(batch.x))
    found = compared.get_task()
    out = batch.y + 0.5 / compared.HOPS
    metric = found.metrics["mae"]
    metric.update(*found.rows(out, batch)["mae"])
    assert metric.compute() == pytest.approx(0.5, rel=1e-4)
    assert found.loss(out, batch) == pytest.approx(0.5 / compared.HOPS, rel=1e-4)
    for graph in data["test"] if task == "diameter" else ():
        assert compared.HOPS * graph.y == pytest.approx(largest(graph))


@pytest.mark.parametrize("task", compared.TASKS)
def test_degrees(task):
    argv = ["--smoke", "--task", task, "--degrees", "--out", "unused"]
    args = compared.get_args(argv)
    graph = compared.get_datasets(args)["val"][0]
    counts = to_scipy_sparse_matrix(graph.edge_index).toarray().sum(axis=0)
    assert graph.x.shape == (graph.num_nodes, 3 if task == "sssp" else 2)
    assert (4 * graph.x[:, -1]).tolist() == counts.tolist()
    study = compared.get_study(args.task, args.degrees)
    model = study.build("layer_norm", "gated-gcn", 10, 8, 8)
    out = model(**model.inputs(Batch.from_data_list([graph])))
    assert out.shape == graph.y.shape


def test_the_median_without_learning():
    args = compared.get_args(["--smoke", "--out", "unused"])
    data = compared.get_datasets(args)
    row = compared.untrained(data)["median"]
    assert list(row) == ["val_mae", "test_mae"]
    train, test = (
        torch.cat([x.y for x in graphs])
        for graphs in (data["train"].graphs, data["test"])
    )
    error = compared.HOPS * (test - train.sort(0).values[(len(train) - 1) // 2]).abs()
    assert row["test_mae"] == pytest.approx(error.mean().item(), rel=1e-5)


@pytest.fixture
def call(smoke):
    """Runs the comparison on few graphs."""

    def run(args):
        return compared.get_study(args.task, args.degrees).run(args)

    return partial(smoke, compared.get_args, run)


@pytest.mark.parametrize("task", compared.TASKS)
def test_chimera_searches_logarithms_of_sums(call, tmp_path, task):
    rows = call("--arms", "chimera", "--task", task)["rows"]
    assert rows["chimera"]["seeds"] == 1
    for option in (0, 2):
        assert list(tmp_path.glob(f"out/chimera/search-log_sums-{option}-*"))
    build = compared.get_study(task).build
    models = [build("layer_norm", "chimera", option, 16, 32) for option in (0, 2)]
    assert [model.layers[0].mixer.log_sums is None for model in models] == [True, False]
