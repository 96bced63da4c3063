import csv
import gzip
import hashlib
import json
import stat

import pytest

from pyg_chimera.datasets import GeneratedPeptides, PeptidesFunctional

pytest.importorskip("ogb.utils")
pytest.importorskip("rdkit")

SPLITS = ("train", "val", "test")
RAW_NAME = "peptide_multi_class_dataset.csv.gz"
SMILES = ["CC(N)C(=O)O", "NCC(=O)O", "C", "c1ccccc1", "CSC"]


def write_raw(root, splits):
    """In all columns of the real file."""
    (root / "raw").mkdir(parents=True)
    with gzip.open(root / "raw" / RAW_NAME, "wt", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["", "smiles", "peptide_seq", "labels", "identifier"])
        for row, smiles in enumerate(SMILES):
            labels = [int(row == task) for task in range(10)]
            writer.writerow([row, smiles, "GG", str(labels), 100 + row])
    (root / "splits.json").write_text(json.dumps(splits))
    return root


def test_raw_files_stay_as_they_are(tmp_path):
    """Down to times and permissions, in folders without the right to write."""
    root = write_raw(tmp_path / "raw-root", {"train": [4, 0], "val": [3], "test": [1]})
    for path in (*root.rglob("*"), root):
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))

    def snapshot():
        return {
            path: (path.stat().st_mtime_ns, path.stat().st_mode, path.is_dir())
            for path in (root, *root.rglob("*"))
        }

    before = snapshot()
    for split in SPLITS:
        kwargs = {"processed_root": str(tmp_path / "elsewhere"), "log": False}
        dataset = PeptidesFunctional(str(root), split, **kwargs)
        assert len(dataset) == (2 if split == "train" else 1)
    assert snapshot() == before


@pytest.mark.parametrize(
    "splits",
    [
        {"train": [0, 1], "val": [2]},
        {"train": [0, 1], "val": [2], "test": []},
        {"train": [], "val": [2], "test": [0]},
    ],
    ids=["missing", "empty-test", "empty-train"],
)
def test_a_split_without_rows_is_an_error(splits, tmp_path):
    root = write_raw(tmp_path, splits)
    with pytest.raises(ValueError, match="must list rows 0 to 4 under"):
        PeptidesFunctional(str(root), log=False)
    assert not list(root.glob("processed/t*.pt*"))


@pytest.mark.parametrize("num_graphs", [0, 2, -5])
def test_zero_peptides_are_not_the_default(num_graphs, tmp_path):
    with pytest.raises(ValueError, match=rf"at least 3.*got {num_graphs}"):
        GeneratedPeptides(str(tmp_path), num_graphs=num_graphs)
    assert not list(tmp_path.iterdir())


def test_the_real_file_is_the_one_we_describe(shared_data):
    content = (shared_data / "peptides-functional" / "raw" / RAW_NAME).read_bytes()
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    assert digest == "701eb743e899f4d793f0e13c8fa5a1b4"
    rows = list(csv.DictReader(gzip.decompress(content).decode().splitlines()))
    assert set(rows[0]) == {"", "smiles", "peptide_seq", "labels", "identifier"}
    assert len(rows) == 15_535
    assert {len(json.loads(row["labels"])) for row in rows} == {10}
