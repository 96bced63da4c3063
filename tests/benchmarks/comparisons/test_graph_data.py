"""Data sets, losses and metrics of the benchmarks."""

import graph_data
import graph_mamba
import layouts
import lrgb
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, balanced_accuracy_score, f1_score
from torch_geometric.data import Batch, Data
from torch_geometric.datasets import LRGBDataset
from torch_geometric.loader import DataLoader
from torch_geometric.transforms import LocalDegreeProfile

NAN = float("nan")


def get_args(script, root, name: str, *argv: str):
    return script.get_args(["--root", str(root), "--dataset", name, *argv])


def get_datasets(script, *argv) -> dict:
    args = get_args(script, *argv)
    return graph_data.get_datasets(args, script.get_transforms(args))


def evaluate(name: str, out, batch) -> dict[str, float]:
    task = graph_data.get_task(name)
    for key, row in task.rows(out, batch).items():
        task.metrics[key].update(*row)
    return {key: float(metric.compute()) for key, metric in task.metrics.items()}


# Losses --------------------------------------------------------------------------


def test_weighted_cross_entropy_by_hand():
    loss = graph_data.get_task("coco-sp").loss
    out = torch.tensor([[2.0, 0.0, 1.0], [0.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    log_p = out.log_softmax(-1)
    weights = [1 / 3, 2 / 3]  # of class 0, which two of three nodes have, and of 1
    terms = [-weights[0] * log_p[0, 0], -weights[0] * log_p[1, 0]]
    expected = (sum(terms) - weights[1] * log_p[2, 1]) / (2 * weights[0] + weights[1])
    found = loss(out, Data(y=torch.tensor([0, 0, 1])))
    assert float(found) == pytest.approx(float(expected))
    found = loss(out, Data(y=torch.tensor([0, 0, 0])))  # one class
    assert float(found) == pytest.approx(float(-log_p[:, 0].mean()))


def test_unlabelled_entries_have_no_loss():
    out = torch.tensor([[1.0, 5.0], [-1.0, 2.0]])
    batch = Data(y=torch.tensor([[1.0, NAN], [0.0, 1.0]]))
    p = torch.tensor([1.0, 1.0, 2.0]).sigmoid()
    loss = graph_data.get_task("peptides-func").loss(out, batch)
    assert float(loss) == pytest.approx(float(-p.log().mean()))


def test_contacts_are_scored_by_inner_products():
    out = torch.tensor([[1.0, 0.0], [2.0, 1.0], [0.0, 3.0]])
    index = torch.tensor([[0, 1], [1, 2]])  # scores 2 and 3
    batch = Data(edge_label_index=index, edge_label=torch.tensor([1, 0]))
    p = torch.tensor([2.0, -3.0]).sigmoid()
    loss = graph_data.get_task("pcqm-contact").loss(out, batch)
    assert float(loss) == pytest.approx(float(-p.log().mean()))


# Metrics -------------------------------------------------------------------------


def test_average_precision_by_hand():
    out = torch.tensor(
        [[0.9, 0.1, 5.0], [0.8, 0.2, 4.0], [0.7, 9.0, 3.0], [0.6, 0.3, 2]]
    )
    y = torch.tensor([[1, 0, 1], [0, 1, 1], [1, NAN, 1], [0, 0, NAN]])
    # Precision at the positives of the first label: 1/1 and 2/3, of the second: 1/2.
    # The third one has no negatives and is left out.
    found = evaluate("peptides-func", out, Data(y=y))["ap"]
    assert found == pytest.approx(((1 + 2 / 3) / 2 + 1 / 2) / 2)


def test_metrics_of_classes():
    y, noise = torch.randint(6, (50,)), torch.randn(50, 21)
    out = noise + 2 * torch.nn.functional.one_hot(y, 21)
    out[:, 6:] = -9.0  # classes that neither occur nor are predicted are left out
    predicted, batch = out.argmax(1), Data(y=y)
    found = evaluate("pascalvoc-sp", out, batch)["macro_f1"]
    assert found == pytest.approx(f1_score(y, predicted, average="macro"))
    found = evaluate("mnist", out[:, :10], batch)["accuracy"]
    assert found == pytest.approx(accuracy_score(y, predicted))
    found = evaluate("cluster", out[:, :6], batch)["accuracy_sbm"]
    assert found == pytest.approx(balanced_accuracy_score(y, predicted))
    # A class that is only predicted counts as nothing.
    found = evaluate(
        "cluster", torch.eye(6)[[0, 0, 2, 1]], Data(y=torch.tensor([0, 0, 1, 1]))
    )
    assert found["accuracy_sbm"] == pytest.approx((1 + 1 / 2 + 0) / 3)


def contacts(x, pairs, label) -> Batch:
    data = Data(x=torch.tensor(x), edge_label_index=torch.tensor(pairs).T)
    data.edge_label = torch.tensor(label)
    return Batch.from_data_list([data])


def test_ranks_by_hand():
    # One graph of four nodes on a line: the score of (u, w) is x_u * x_w.
    x = [[1.0], [4.0], [3.0], [2.0]]
    batch = contacts(x, [(0, 2), (0, 1), (1, 0)], [1, 1, 0])
    # Tails of head 0 by score: node 1 (4), 2 (3), 3 (2), 0 (1). Contacts are 2 and 1,
    # which compete in the benchmark's own definition only.
    found = evaluate("pcqm-contact", batch.x, batch)
    assert found.pop("mrr_raw") == (1 / 2 + 1 / 1) / 2
    assert found == {"mrr_filtered": 1, "mrr_extended_filtered": 1}
    # From the node that likes itself most, it only goes without itself.
    found = evaluate("pcqm-contact", batch.x, contacts(x, [(1, 2)], [1]))
    assert found == {"mrr_raw": 0.5, "mrr_filtered": 0.5, "mrr_extended_filtered": 1}


def literal_ranks(x, contacts, kind):
    """Reciprocal ranks of a graph's contacts, candidate by candidate."""
    out = []
    for u, v in contacts:
        rank = 1.0
        for w in range(len(x)):
            if w == v or (kind != "mrr_raw" and (u, w) in contacts):
                continue
            if kind == "mrr_extended_filtered" and w == u:
                continue
            mine, other = (x[u] * x[v]).sum(), (x[u] * x[w]).sum()
            rank += 1.0 if other > mine else 0.5 if other == mine else 0.0
        out.append(1 / rank)
    return sum(out) / len(out)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(0, 10**6))
def test_ranks_against_a_loop(sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    data, graphs = [], []
    for n in sizes:
        x = torch.randint(-2, 3, (n, 2), generator=generator).double()  # ties
        pairs = torch.cartesian_prod(torch.arange(n), torch.arange(n))
        order = torch.randperm(n * n, generator=generator)  # need not be sorted
        pairs = pairs[order[: max(1, n * n // 2)]]
        label = (torch.rand(len(pairs), generator=generator) < 0.6).int()
        data.append(Data(x=x, edge_label_index=pairs.T, edge_label=label))
        graphs.append((x, [tuple(p) for p in pairs[label == 1].tolist()]))
    batch = Batch.from_data_list(data)
    result = graph_data.mean_ranks(batch.x, batch)
    assert set(result) == {"mrr_raw", "mrr_filtered", "mrr_extended_filtered"}
    for kind, values in result.items():
        # Graphs without a contact have no rank.
        expected = [literal_ranks(x, pairs, kind) for x, pairs in graphs if pairs]
        assert values.tolist() == pytest.approx(expected)


# Data sets -----------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pascalvoc-sp", "coco-sp"])
def test_superpixels_are_standardized_by_the_training_set(root, name):
    datasets = get_datasets(lrgb, root, name)
    for key in ("x", "edge_attr"):
        values = torch.cat([data[key] for data in datasets["train"]])
        assert values.mean(0).abs().max() < 1e-5
        assert (values.std(0) - 1).abs().max() < 1e-5
    raw, train = (LRGBDataset(str(root), name, split) for split in ("val", "train"))
    expected = (raw[0].x - train.x.mean(0)) / train.x.std(0)
    for _ in range(2):  # from the file, and from the data set's cache
        data = datasets["val"][0]
        assert torch.allclose(data.x, expected, atol=1e-6)
        assert torch.equal(data.y, raw[0].y)
    assert sorted(data.elimination_rank.tolist()) == list(range(data.num_nodes))


def test_features_are_those_of_the_benchmarks(root):
    def first(name: str) -> Data:
        return get_datasets(graph_mamba, root, name)["train"][1]

    data = first("mnist")
    assert torch.equal(data.x[:, 1:], data.pos)
    data = first("pattern")
    assert data.edge_attr.tolist() == [[0]] * data.num_edges
    data = first("malnet-tiny")
    bare = data.clone()
    del bare.x
    assert torch.equal(data.x, LocalDegreeProfile()(bare).x)


def test_scores_are_stored_for_the_orders_that_need_them(tmp_path):
    layouts.write_lrgb(tmp_path, "peptides-func")
    data = get_datasets(graph_mamba, tmp_path, "peptides-func", "--ablation")["val"][0]
    assert data.cluster_score.dtype == torch.long
    assert data.eigenvector_score.shape == (data.num_nodes,)
    assert "degree_score" not in data
    get_datasets(graph_mamba, tmp_path, "peptides-func")
    folders = {path.name for path in (tmp_path / "peptides-func").iterdir()}
    assert folders == {
        *("raw", "processed-laplacian10", "processed-laplacian10-cluster-eigenvector")
    }


@pytest.mark.parametrize("script", [lrgb, graph_mamba])
@pytest.mark.parametrize("name", ["peptides-func", "pcqm-contact", "pascalvoc-sp"])
def test_graphs_are_evaluated_alike_in_batches_and_alone(root, script, name):
    model = script.build_model(get_args(script, root, name, "--smoke")).eval()
    dataset = get_datasets(script, root, name, "--smoke")["train"]
    rows = []
    for size in (1, 6):
        with torch.no_grad():
            out = [model(**model.inputs(batch)) for batch in DataLoader(dataset, size)]
        rows.append(torch.cat(out))
    assert len(rows[0]) >= 12
    torch.testing.assert_close(*rows, atol=1e-5, rtol=1e-4)


def test_processing_shows_progress(tmp_path, capsys):
    layouts.write_gnn_benchmark(tmp_path, "PATTERN")
    get_datasets(graph_mamba, tmp_path, "pattern")
    assert "24 graphs" in capsys.readouterr().err


def test_a_root_may_be_read_only(tmp_path):
    layouts.write_lrgb(tmp_path, "peptides-struct")
    (tmp_path / "cache").mkdir()
    argv = (lrgb, tmp_path, "peptides-struct")
    get_datasets(*argv, "--processed-root", str(tmp_path / "cache"))
    folders = [path.name for path in (tmp_path / "peptides-struct").iterdir()]
    assert folders == ["raw"]
    assert (tmp_path / "cache/peptides-struct/processed-elimination/val.pt").is_file()
    (tmp_path / "peptides-struct" / "processed-elimination").touch()
    with pytest.raises(OSError, match=r"processed-elimination.*pass --processed-root"):
        get_datasets(*argv)
