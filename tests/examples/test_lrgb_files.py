"""The files of the five data sets, laid out as PyG's download leaves them."""

import json
import pickle

import pytest
import torch
from lrgb import DATASETS, get_datasets, get_task, main, parse
from presets import build_model, get_recipe
from torch_geometric.loader import DataLoader

from pyg_chimera.datasets import ATOM_FEATURE_SIZES, BOND_FEATURE_SIZES

SPLITS = {"train": 6, "val": 3, "test": 2}
NAMES = [name for name in DATASETS if name != "generated"]
METRICS = {
    "peptides-func": {"ap"},
    "peptides-struct": {"mae"},
    "pascalvoc-sp": {"macro_f1"},
    "coco-sp": {"macro_f1"},
    "pcqm-contact": {"mrr_raw", "mrr_filtered", "mrr_extended_filtered"},
}


def ring(num_nodes):
    i = torch.arange(num_nodes)
    j = (i + 1) % num_nodes
    return torch.stack([torch.cat([i, j]), torch.cat([j, i])])


def molecule(num_nodes):
    """Categorical features, the largest of each among them."""
    edge_index = ring(num_nodes)
    x, edge_attr = (
        torch.stack([torch.randint(size, (n,)) for size in sizes], dim=1)
        for n, sizes in (
            (num_nodes, ATOM_FEATURE_SIZES),
            (edge_index.size(1), BOND_FEATURE_SIZES),
        )
    )
    x[0] = torch.tensor(ATOM_FEATURE_SIZES) - 1
    edge_attr[0] = torch.tensor(BOND_FEATURE_SIZES) - 1
    return x, edge_attr, edge_index


def raw_graph(name, i):
    num_nodes = 5 + i
    if name.endswith("-sp"):
        edge_index = ring(num_nodes)
        x = 100 + 50 * torch.randn(num_nodes, 14, dtype=torch.double)
        x[:, 3] = 7.0  # a feature that does not vary
        edge_attr = torch.rand(edge_index.size(1), 2, dtype=torch.double)
        # The raw labels of COCO-SP have gaps: 90 is the last of 81.
        y = [0, 90, 13, 1, 25][:num_nodes] if name == "coco-sp" else [0, 20, 7, 1, 3]
        return x, edge_attr, edge_index, y + [0] * (num_nodes - 5)
    x, edge_attr, edge_index = molecule(num_nodes)
    if name == "pcqm-contact":
        pairs = torch.tensor([[0, 0, 2, 1], [2, 3, 4, 4]])
        return x, edge_attr, edge_index, pairs, torch.tensor([1, 0, 1, i % 2])
    if name == "peptides-func":
        return x, edge_attr, edge_index, (torch.arange(10)[None] % 2 == i % 2).float()
    return x, edge_attr, edge_index, torch.randn(1, 11)


@pytest.fixture(scope="module")
def lrgb_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("lrgb")
    torch.manual_seed(0)
    for name in NAMES:
        raw = root / name / "raw"
        raw.mkdir(parents=True)
        for split, size in SPLITS.items():
            graphs = [raw_graph(name, i) for i in range(size)]
            if name.endswith("-sp"):
                (raw / f"{split}.pickle").write_bytes(pickle.dumps(graphs))
            else:
                torch.save(graphs, raw / f"{split}.pt")
    return root


def command(root, name, *more):
    flags = ("--smoke", "--device", "cpu", "--dataset", name, "--root", str(root))
    return [*flags, *map(str, more)]


@pytest.mark.parametrize("name", NAMES)
def test_files_become_graphs(lrgb_root, name):
    datasets = get_datasets(parse(command(lrgb_root, name)))
    assert {split: len(dataset) for split, dataset in datasets.items()} == SPLITS
    for dataset in datasets.values():
        for i, data in enumerate(dataset):
            assert data.validate()
            assert data.num_nodes == 5 + i
            assert sorted(data.elimination_rank.tolist()) == list(range(5 + i))
            assert "fill_index" not in data


@pytest.mark.parametrize("name", NAMES)
def test_metrics_of_a_run(lrgb_root, tmp_path, name):
    assert main(command(lrgb_root, name, "--out", tmp_path, "--epochs", 1)) == 0
    summary = json.loads((tmp_path / "metrics.json").read_text())
    assert summary["metric"] in METRICS[name]
    for split in ("val", "test"):
        values = summary["best"][split]
        assert values.keys() == METRICS[name] | {"loss"}
        assert all(0 <= value < float("inf") for value in values.values())


@pytest.mark.parametrize("name", ["pascalvoc-sp", "coco-sp"])
def test_superpixels_are_standardized_by_the_training_set(lrgb_root, name):
    datasets = get_datasets(parse(command(lrgb_root, name)))
    for key in ("x", "edge_attr"):
        values = torch.cat([data[key] for data in datasets["train"]])
        varies = values.std(0) > 0
        assert varies.sum() == values.size(1) - (key == "x")
        assert values.mean(0).abs().max() < 1e-4
        assert (values.std(0)[varies] - 1).abs().max() < 1e-4
        # The others by the same numbers, so not exactly, and twice does not count.
        other = datasets["test"][0]
        assert not torch.allclose(other[key].mean(0)[varies], torch.zeros(()))
        assert torch.equal(other[key], datasets["test"][0][key])


def test_labels_of_coco_are_contiguous(lrgb_root):
    data = get_datasets(parse(command(lrgb_root, "coco-sp")))["train"][0]
    assert data.y.tolist() == [0, 80, 12, 1, 24]
    assert data.y.max() < DATASETS["coco-sp"]["out_channels"]


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_is_evaluated_as_its_graphs_are(lrgb_root, name):
    """What a task collects does not depend on how graphs are batched."""
    dataset = get_datasets(parse(command(lrgb_root, name)))["train"]
    model = build_model(get_recipe("smoke", name), **DATASETS[name]).eval()
    task = get_task(name)

    def collect(batch_size):
        rows = []
        for batch in DataLoader(dataset, batch_size):
            with torch.no_grad():
                rows.append(task.collect(model(**model.inputs(batch)), batch))
        return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}

    together, alone = collect(len(dataset)), collect(1)
    assert together.keys() == alone.keys()
    for key, values in together.items():
        torch.testing.assert_close(values, alone[key], atol=1e-4, rtol=1e-4)
    values = task.metrics(together)
    assert values.keys() == METRICS[name]
    assert task.metric in values


def test_loss_of_nodes_weighs_classes_by_the_rest(lrgb_root):
    batch = next(
        iter(DataLoader(get_datasets(parse(command(lrgb_root, "coco-sp")))["train"], 6))
    )
    out = torch.randn(batch.num_nodes, 81)
    total = weights = 0.0
    for row, y in zip(out.log_softmax(-1), batch.y.tolist(), strict=True):
        weight = 1 - batch.y.tolist().count(y) / batch.num_nodes
        total, weights = total - weight * float(row[y]), weights + weight
    loss = get_task("coco-sp").loss(out, batch)
    assert float(loss) == pytest.approx(total / weights, rel=1e-5)


def test_loss_of_contacts(lrgb_root):
    dataset = get_datasets(parse(command(lrgb_root, "pcqm-contact")))["train"]
    batch = next(iter(DataLoader(dataset, 2)))
    out = torch.randn(batch.num_nodes, 4)
    losses = []
    for begin, data in zip((0, 5), dataset, strict=False):
        pairs = (begin + data.edge_label_index).t().tolist()
        for (u, v), label in zip(pairs, data.edge_label.tolist(), strict=True):
            chance = (out[u] @ out[v]).sigmoid()
            losses.append(-float((chance if label else 1 - chance).log()))
    loss = get_task("pcqm-contact").loss(out, batch)
    assert len(losses) == 8
    assert float(loss) == pytest.approx(sum(losses) / 8, rel=1e-4)


def test_loss_and_metric_of_unlabelled_tasks(lrgb_root):
    dataset = get_datasets(parse(command(lrgb_root, "peptides-func")))["train"]
    batch = next(iter(DataLoader(dataset, 6)))
    batch.y[:, 5:] = float("nan")
    out = torch.randn(6, 10)
    task = get_task("peptides-func")
    chance = out[:, :5].sigmoid()
    expected = -torch.where(batch.y[:, :5] == 1, chance, 1 - chance).log().mean()
    assert float(task.loss(out, batch)) == pytest.approx(float(expected), rel=1e-5)
    first = {"out": out[:, :5], "y": batch.y[:, :5]}
    assert task.metrics(task.collect(out, batch)) == task.metrics(first)
