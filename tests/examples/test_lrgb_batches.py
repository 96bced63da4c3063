"""What a data set's graphs mean does not depend on how they are read or batched."""

import pickle

import loading
import lrgb
import pytest
import tasks
import torch
from presets import build_model, get_recipe
from torch_geometric.loader import DataLoader

from pyg_chimera.datasets import ATOM_FEATURE_SIZES, BOND_FEATURE_SIZES

NAMES = [name for name in lrgb.DATASETS if name != "generated"]


def raw_graph(name: str, i: int) -> tuple:
    """As in the files that LRGBDataset downloads, with the largest of all categories.

    The superpixels have one feature that never varies.
    """
    n = 5 + i
    node = torch.arange(n)
    ring = torch.stack([node, (node + 1) % n])
    edge_index = torch.cat([ring, ring.flip(0)], dim=1)
    if name.endswith("-sp"):
        x = 100 + 50 * torch.randn(n, 14, dtype=torch.double)
        x[:, 3] = 7.0
        edge_attr = torch.rand(2 * n, 2, dtype=torch.double)
        last = 90 if name == "coco-sp" else 20
        return x, edge_attr, edge_index, [last, 1, 0, 7, 3] + [0] * i
    atoms, bonds = torch.tensor(ATOM_FEATURE_SIZES), torch.tensor(BOND_FEATURE_SIZES)
    x = (torch.rand(n, 9) * atoms).long()
    edge_attr = (torch.rand(2 * n, 3) * bonds).long()
    x[0], edge_attr[0] = atoms - 1, bonds - 1
    if name == "pcqm-contact":
        pairs = torch.tensor([[0, 0, 2, 1], [2, 3, 4, 4]])
        return x, edge_attr, edge_index, pairs, torch.tensor([1, 0, 1, i % 2])
    if name == "peptides-func":
        return x, edge_attr, edge_index, (torch.arange(10)[None] % 2 == i % 2).float()
    return x, edge_attr, edge_index, torch.randn(1, 11)


@pytest.fixture
def datasets(tmp_path, request):
    name = request.param
    raw = tmp_path / name / "raw"
    raw.mkdir(parents=True)
    for split, size in (("train", 6), ("val", 3), ("test", 2)):
        graphs = [raw_graph(name, i) for i in range(size)]
        if name.endswith("-sp"):
            (raw / f"{split}.pickle").write_bytes(pickle.dumps(graphs))
        else:
            torch.save(graphs, raw / f"{split}.pt")
    return lrgb.get_datasets(lrgb.parse(["--dataset", name, "--root", str(tmp_path)]))


@pytest.mark.parametrize(
    ("datasets", "name"), [(name, name) for name in NAMES], indirect=["datasets"]
)
def test_graphs_are_evaluated_alike_in_batches_and_alone(datasets, name):
    torch.manual_seed(0)
    model = build_model(get_recipe("smoke", name), **lrgb.DATASETS[name]).eval()
    task = tasks.get_task(name)
    pieces = {}
    for batch_size in (1, 6):
        rows = []
        for batch in DataLoader(datasets["train"], batch_size):
            with torch.no_grad():
                out = model(**model.inputs(batch)).double()
            rows.append({"out": out, **task.collect(out, batch)})
        pieces[batch_size] = {key: torch.cat([r[key] for r in rows]) for key in rows[0]}
    assert pieces[1].keys() == pieces[6].keys()
    for key, values in pieces[1].items():
        assert len(values) > 0
        torch.testing.assert_close(values, pieces[6][key], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("datasets", ["pascalvoc-sp", "coco-sp"], indirect=True)
def test_superpixels_are_standardized_once(datasets):
    x = torch.cat([data.x for data in datasets["train"]])
    assert x.isfinite().all()
    assert x[:, 3].abs().max() < 1e-5  # of no variance, and still finite
    for dataset in datasets.values():
        first = dataset[0]
        again = dataset[0]  # from the data set's cache
        assert torch.equal(first.x, again.x)
        assert torch.equal(first.edge_attr, again.edge_attr)
        assert torch.equal(next(iter(DataLoader(dataset, 1))).x, first.x)


def test_a_read_only_root_needs_a_place_for_processed_files(tmp_path, monkeypatch):
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "peptide_multi_class_dataset.csv.gz").touch()
    # Permissions do not stop root, who may be running this.
    monkeypatch.setattr(loading.os, "access", lambda *_: False)
    args = lrgb.parse(["--root", str(tmp_path)])
    with pytest.raises(SystemExit, match="read-only: pass --processed-root"):
        lrgb.get_datasets(args)


def test_batch_size_is_shared_by_all_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    args = ["--smoke", "--out", str(tmp_path), "--root", str(tmp_path)]
    with pytest.raises(SystemExit, match="--batch-size must be a multiple of 3"):
        lrgb.run(lrgb.parse(args))
    assert not list(tmp_path.iterdir())
