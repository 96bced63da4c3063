import csv
import gzip
import hashlib
import json
import re
import stat
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch_geometric.loader import DataLoader

from pyg_chimera.datasets import (
    ATOM_FEATURE_SIZES,
    BOND_FEATURE_SIZES,
    GeneratedPeptides,
    PeptidesFunctional,
    long_range_labels,
)

pytest.importorskip("rdkit")
pytest.importorskip("ogb")

SPLITS = ("train", "val", "test")
NAMES = GeneratedPeptides.label_names


# Labels ------------------------------------------------------------------------


def label(sequence: str) -> dict[str, int]:
    return dict(zip(NAMES, long_range_labels(sequence), strict=True))


@pytest.mark.parametrize(
    ("name", "yes", "no"),
    [
        ("aromatic_lead", "GFGGG", "GGFGG"),  # the middle does not lead
        ("aromatic_lead", "WGGYGGGG", "GGGWGGGY"),
        ("sulfur_lead", "CGMGG", "CGGGM"),  # 0 and 4 lie in the middle
        ("sulfur_first", "GCGFM", "GFGCM"),
        ("aromatic_span", "FGGGYG", "FGGGGYGGGGGG"),
        ("aromatic_wider", "FCGMGW", "CFGWGM"),
        ("aromatic_wider", "FGWCCG", "FGWCGM"),  # alike is not wider
        ("dipole", "GDGKG", "GKGDG"),
        ("dipole", "DGGGG", "GGEGG"),
    ],
)
def test_labels_of_literal_peptides(name, yes, no):
    assert (label(yes)[name], label(no)[name]) == (1, 0)


def test_labels_without_the_residues_in_question():
    assert long_range_labels("GGGG") == [0] * len(NAMES)


def neighbourhoods(sequence: str, rounds: int) -> Counter:
    """The bag of what message passing can tell of each atom after some rounds."""
    data = graph_of(sequence)
    colour = [tuple(row) for row in data.x.tolist()]
    bonds = list(zip(*data.edge_index.tolist(), data.edge_attr.tolist(), strict=True))
    for _ in range(rounds):
        around = [[] for _ in colour]
        for source, target, kind in bonds:
            around[target].append((tuple(kind), colour[source]))
        colour = [
            hash((c, tuple(sorted(a)))) for c, a in zip(colour, around, strict=True)
        ]
    return Counter(colour)


def graph_of(sequence: str):
    from pyg_chimera.datasets.peptides import _sequence_to_smiles, _to_graphs

    smiles = [_sequence_to_smiles(sequence)]
    return next(_to_graphs(smiles, torch.zeros(1, 6).numpy(), True))


def chain(*parts: str) -> str:
    """Residues with runs of glycine between: ``chain("9", "F", "20")``."""
    return "".join("G" * int(p) if p.isdigit() else p for p in parts)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("aromatic_lead", ("9", "F", "20"), ("20", "F", "9")),
        ("sulfur_lead", ("9", "M", "20"), ("20", "M", "9")),
        ("sulfur_first", ("9", "M", "9", "F", "9"), ("9", "F", "9", "M", "9")),
        ("aromatic_span", ("9", "F", "24", "F", "9"), ("9", "F", "9", "F", "24")),
        (
            "aromatic_wider",
            ("9", "F", "9", "M", "9", "M", "9", "F", "9"),
            ("9", "M", "9", "F", "9", "F", "9", "M", "9"),
        ),
        ("dipole", ("9", "D", "9", "K", "9"), ("9", "K", "9", "D", "9")),
    ],
)
def test_no_label_can_be_told_from_the_bag_of_neighbourhoods(name, one, other):
    one, other = chain(*one), chain(*other)
    assert (label(one)[name], label(other)[name]) == (1, 0)
    bags = [neighbourhoods(sequence, rounds=8) for sequence in (one, other)]
    assert bags[0] == bags[1]
    # The measure can tell: who sees the whole chain sees the difference.
    assert neighbourhoods(one, 60) != neighbourhoods(other, 60)


# Generated peptides ------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> dict[str, GeneratedPeptides]:
    root = str(tmp_path_factory.mktemp("generated"))
    return {
        s: GeneratedPeptides(root, s, "small", num_graphs=100, seed=1) for s in SPLITS
    }


def test_generated_sizes_and_features(small):
    assert [len(small[split]) for split in SPLITS] == [70, 15, 15]
    data = small["train"][0]
    assert data.x.dtype == data.edge_index.dtype == data.edge_attr.dtype == torch.long
    assert data.y.dtype == torch.float
    assert data.y.shape == (1, len(NAMES))
    batch = next(iter(DataLoader(small["train"], batch_size=70)))
    assert batch.x.shape[1] == len(ATOM_FEATURE_SIZES)
    assert batch.edge_attr.shape[1] == len(BOND_FEATURE_SIZES)
    assert (batch.x < torch.tensor(ATOM_FEATURE_SIZES)).all()
    assert (batch.edge_attr < torch.tensor(BOND_FEATURE_SIZES)).all()
    assert 70 < batch.num_nodes / 70 < 105
    assert all(data.is_undirected() for data in small["train"])


def test_the_feature_sizes_are_those_of_ogb():
    from ogb.utils.features import get_atom_feature_dims, get_bond_feature_dims

    assert list(ATOM_FEATURE_SIZES) == get_atom_feature_dims()
    assert list(BOND_FEATURE_SIZES) == get_bond_feature_dims()


def test_generated_labels_are_those_of_the_sequences(small):
    sequences = small["train"].sequences()
    expected = torch.tensor([long_range_labels(s) for s in sequences]).float()
    found = torch.cat([data.y for split in SPLITS for data in small[split]])
    assert torch.equal(found, expected)
    assert len(set(sequences)) == 100
    # Graphs and sequences are in the same order, too: count the sulfur atoms.
    graphs = [data for split in SPLITS for data in small[split]]
    for sequence, data in zip(sequences, graphs, strict=True):
        sulfur = (data.x[:, 0] == 15).sum()  # OGB's number is the element's less 1
        assert sulfur == sequence.count("C") + sequence.count("M")


@pytest.mark.parametrize("preset", ["small", "full"])
def test_generated_labels_are_balanced_and_composition_is_no_help(preset):
    dataset = GeneratedPeptides.__new__(GeneratedPeptides)
    dataset.preset, dataset.num_graphs, dataset.seed = preset, 2000, 0
    sequences = dataset.sequences()
    rates = torch.tensor([long_range_labels(s) for s in sequences]).float().mean(0)
    assert ((rates > 0.25) & (rates < 0.75)).all(), rates
    for length in {len(s) for s in sequences}:
        counts = {
            tuple(sum(s.count(r) for r in kind) for kind in ("DE", "KRH", "FWY", "CM"))
            for s in sequences
            if len(s) == length
        }
        assert len(counts) == 1


def test_full_peptides_are_as_large_as_the_real_ones(tmp_path):
    dataset = GeneratedPeptides(str(tmp_path), "train", num_graphs=60)
    mean = sum(data.num_nodes for data in dataset) / len(dataset)
    assert 120 < mean < 180


def test_generated_is_a_function_of_its_arguments(small, tmp_path):
    def make(folder: str, seed: int):
        root = str(tmp_path / folder)
        return GeneratedPeptides(root, "val", "small", num_graphs=100, seed=seed)

    again, other = make("again", 1), make("other", 2)
    for one, two in zip(small["val"], again, strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one.keys())  # noqa: SIM118
    assert other.sequences() != again.sequences()
    # Seeds and sizes don't share files.
    first, second = make("both", 1), make("both", 2)
    assert not torch.equal(first.x, second.x)


def test_generated_files_hold_plain_tensors(small):
    path = Path(small["val"].processed_paths[1])
    data, slices, cls = torch.load(path, weights_only=True)
    assert torch.equal(data["x"], small["val"].x)
    assert slices["x"].numel() == 16
    assert cls.__name__ == "Data"
    assert not list(path.parent.glob("*.part"))


def test_generated_transforms_and_filters(tmp_path):
    def mark(data):
        data.mark = torch.tensor([data.num_nodes])
        return data

    dataset = GeneratedPeptides(
        str(tmp_path),
        "train",
        "small",
        num_graphs=20,
        pre_transform=mark,
        pre_filter=lambda data: data.y[0, 0] == 1,
    )
    assert 0 < len(dataset) < 14
    assert all(data.y[0, 0] == 1 for data in dataset)
    assert all(data.mark == data.num_nodes for data in dataset)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"split": "valid"}, "'split' must be one of"),
        ({"preset": "tiny"}, "'preset' must be one of"),
        *(({"num_graphs": n}, rf"at least 3.*got {n}") for n in (2, 0, -5)),
    ],
)
def test_generated_rejects(tmp_path, kwargs, message):
    with pytest.raises(ValueError, match=message):
        GeneratedPeptides(str(tmp_path), **kwargs)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("module", ["rdkit.Chem", "ogb.utils"])
def test_a_missing_package_names_the_extra(tmp_path, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pyg-chimera\[examples\]"):
        GeneratedPeptides(str(tmp_path), num_graphs=3)


# The real data set ---------------------------------------------------------------

SMILES = ["CC(=O)N", "NCC(=O)O", "C", "CCO", "c1ccccc1", "CS"]
NUM_ATOMS = [4, 5, 1, 3, 6, 2]


def write_raw(root: Path, splits=None, smiles=SMILES, num_labels=10, **columns) -> Path:
    (root / "raw").mkdir(parents=True)
    path = root / "raw" / "peptide_multi_class_dataset.csv.gz"
    names = {"smiles": "smiles", "labels": "labels", **columns}
    with gzip.open(path, "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", names["smiles"], "peptide_seq", names["labels"]])
        for i, text in enumerate(smiles):
            labels = [int(i == task) for task in range(num_labels)]
            writer.writerow([i, text, "?", str(labels)])
    splits = splits or {"train": [5, 0, 3], "val": [1], "test": [2, 4]}
    (root / "splits.json").write_text(json.dumps(splits))
    return root


def test_peptides_functional_from_raw_files(tmp_path):
    root = write_raw(tmp_path / "data")
    assert PeptidesFunctional.holds_raw_files(str(root))
    for path in (*root.rglob("*"), root):  # nobody may write
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))

    def snapshot():
        found = {path: path.stat() for path in (root, *root.rglob("*"))}
        return {path: (x.st_mtime_ns, x.st_mode) for path, x in found.items()}

    before = snapshot()
    found = {}
    for split in SPLITS:
        dataset = PeptidesFunctional(str(root), split, str(tmp_path / "cache"))
        found[split] = [int(data.y.argmax()) for data in dataset]
        for data in dataset:
            row = int(data.y.argmax())
            assert data.num_nodes == NUM_ATOMS[row]
            assert data.x.shape == (NUM_ATOMS[row], 9)
            assert data.edge_attr.shape == (data.num_edges, 3)
            assert data.y.shape == (1, 10)
            assert data.y.sum() == 1
    assert found == {"train": [5, 0, 3], "val": [1], "test": [2, 4]}
    assert snapshot() == before  # nothing was written beside the data
    assert (tmp_path / "cache" / "processed" / "train.pt").is_file()
    torch.load(tmp_path / "cache" / "processed" / "train.pt", weights_only=True)


def test_peptides_functional_caches_in_root_by_default(tmp_path):
    root = write_raw(tmp_path)
    assert len(PeptidesFunctional(str(root), "test")) == 2
    (root / "raw" / "peptide_multi_class_dataset.csv.gz").unlink()
    assert len(PeptidesFunctional(str(root), "train")) == 3


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"splits": {"train": [0], "val": [1], "test": [6]}}, "rows 0 to 5"),
        ({"splits": {"train": [0], "val": [-1], "test": [5]}}, "rows 0 to 5"),
        ({"splits": {"folds": []}}, "rows 0 to 5"),
        ({"splits": {"train": [0, 1], "val": [2]}}, "must list rows 0 to 5 under"),
        ({"splits": {"train": [0, 1], "val": [2], "test": []}}, "rows 0 to 5 under"),
        ({"splits": {"train": [], "val": [2], "test": [0]}}, "rows 0 to 5 under"),
        ({"splits": {"train": [0, 1], "val": [1], "test": [5]}}, "more than once"),
        ({"labels": "target"}, "columns 'smiles' and 'labels'"),
        ({"smiles": []}, "columns 'smiles' and 'labels'"),
        ({"num_labels": 11}, "lists of 10 numbers"),
        ({"smiles": ["C", "not a molecule", *SMILES[2:]]}, "cannot read.*'not a mol"),
    ],
)
def test_peptides_functional_rejects_bad_raw_files(tmp_path, kwargs, message):
    root = write_raw(tmp_path, **kwargs)
    with pytest.raises(ValueError, match=message):
        PeptidesFunctional(str(root), log=False)
    assert not list(root.glob("processed/t*.pt*"))


def test_peptides_functional_names_missing_files(tmp_path):
    assert not PeptidesFunctional.holds_raw_files(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="LRGBDataset"):
        PeptidesFunctional(str(tmp_path))
    root = write_raw(tmp_path / "data")
    (root / "splits.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"splits\.json"):
        PeptidesFunctional(str(root))


def test_peptides_functional_on_the_real_file(shared_data, tmp_path):
    source = shared_data / "peptides-functional"
    splits = json.loads((source / "splits.json").read_text())
    assert [len(splits[split]) for split in SPLITS] == [10_873, 2_331, 2_331]
    assert sorted(i for rows in splits.values() for i in rows) == list(range(15_535))

    # All of them take 45 seconds: take some.
    (tmp_path / "raw").symlink_to(source / "raw")
    some = {split: splits[split][:20] for split in SPLITS}
    (tmp_path / "splits.json").write_text(json.dumps(some))
    for split in SPLITS:
        dataset = PeptidesFunctional(str(tmp_path), split, str(tmp_path / "cache"))
        assert len(dataset) == 20
        assert all(data.y.shape == (1, 10) for data in dataset)
    # Of the last split loaded, the test peptides, the first is the file's first row.
    with gzip.open(source / "raw" / dataset.raw_file_names[0], "rt") as file:
        row = next(csv.DictReader(file))
    assert dataset[0].y.tolist() == [json.loads(row["labels"])]
    atoms = re.findall(r"\[[^]]+\]|Br|Cl|[BCNOPSFIbcnops]", row["smiles"])
    assert dataset[0].num_nodes == len(atoms) > 100

    content = (source / "raw" / dataset.raw_file_names[0]).read_bytes()
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    assert digest == "701eb743e899f4d793f0e13c8fa5a1b4"  # the one that we describe
    rows = list(csv.DictReader(gzip.decompress(content).decode().splitlines()))
    assert set(rows[0]) == {"", "smiles", "peptide_seq", "labels", "identifier"}
    assert len(rows) == 15_535
    assert {len(json.loads(row["labels"])) for row in rows} == {10}
