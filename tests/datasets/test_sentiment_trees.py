import gzip
import shutil

import networkx as nx
import pytest
import torch
from torch_geometric.loader import DataLoader
from torch_geometric.utils import to_networkx

from pyg_chimera.datasets import SentimentTrees

SPLITS = ("train", "val", "test")
TRAIN = [
    "(3 (2 It) (4 (2 really) (4 works)))",
    "(1 (0 (0 Bad) (1 film)) (2 it))",
    "(2 Film)",
]


def write_raw(root, train=TRAIN, dev=("(4 (2 It) (3 shines))",), test=("(0 Bad)",)):
    raw = root / "raw"
    raw.mkdir(parents=True)
    (raw / "train.txt").write_text("\n".join(train) + "\n", encoding="utf-8")
    with gzip.open(raw / "dev.txt.gz", "wt") as file:
        file.write("\n".join(dev))
    (raw / "test.txt").write_text("\n".join(test))
    return str(root)


def to_text(data, vocabulary, node=None) -> str:
    """The line of a tree, by recursion from its root."""
    if node is None:
        (node,) = data.root_mask.nonzero().flatten().tolist()
    edges = zip(*data.edge_index.tolist(), data.side.tolist(), strict=True)
    children = {side: child for child, parent, side in edges if parent == node}
    label = int(data.y[node])
    if not children:
        word = int(data.x[node])
        return f"({label} {'?' if word == 1 else vocabulary[word - 2]})"
    assert data.x[node] == 0
    left, right = (to_text(data, vocabulary, children[side]) for side in (0, 1))
    return f"({label} {left} {right})"


def test_trees_come_back(tmp_path):
    root = write_raw(tmp_path)
    for split, lines in (
        ("train", [line.lower() for line in TRAIN]),
        ("val", ["(4 (2 it) (3 ?))"]),
        ("test", ["(0 bad)"]),
    ):
        dataset = SentimentTrees(root, split)
        assert [to_text(data, dataset.vocabulary) for data in dataset] == lines
        # The most frequent first, then in order of appearance.
        assert dataset.vocabulary == ["it", "film", "really", "works", "bad"]
        for data in dataset:
            assert data.num_edges == data.num_nodes - 1
            assert (data.edge_index[0] < data.edge_index[1]).all()
            assert data.root_mask.tolist() == [False] * data.num_edges + [True]
            for value in (data.x, data.y, data.side, data.edge_index):
                assert value.dtype == torch.int64


def test_batches(tmp_path):
    dataset = SentimentTrees(write_raw(tmp_path))
    (batch,) = DataLoader(dataset, batch_size=3)
    assert batch.root_mask.nonzero().flatten().tolist() == [4, 9, 10]
    assert batch.y[batch.root_mask].tolist() == [3, 1, 2]
    assert batch.batch[batch.root_mask].tolist() == [0, 1, 2]
    assert batch.side.shape == (8,)


def test_deep_trees(tmp_path):
    depth = 20_000
    line = "(2 a)"
    line = "(3 " * depth + line + " (1 b))" * depth
    data = SentimentTrees(write_raw(tmp_path, train=[line]))[0]
    assert data.num_nodes == 2 * depth + 1
    graph = to_networkx(data)
    assert nx.dag_longest_path_length(graph) == depth


def test_filters_and_cache(tmp_path):
    root = write_raw(tmp_path, test=["(4 (1 Good) (3 film))"])
    kwargs = {"pre_filter": lambda data: data.y[-1] != 2}
    dataset = SentimentTrees(root, **kwargs)
    assert [int(data.y[-1]) for data in dataset] == [3, 1]
    shutil.rmtree(tmp_path / "raw")
    again = SentimentTrees(root, "test", **kwargs)
    assert again.vocabulary == dataset.vocabulary


@pytest.mark.parametrize(
    "line",
    [
        *("(5 a)", "(a)", "(2 a b)", "(2 (2 a))", "(2 (2 a) (2 b) (2 c))"),
        *("(2 (2 a) b)", "((2 a) 2 (2 b))", "(2 (2 a) (2 b)", "(2 a))", "(2 a) (2 b)"),
        *("2 a", "()", "(22 a)", ")"),
    ],
)
def test_rejects_what_is_no_binary_tree(tmp_path, line):
    root = write_raw(tmp_path, train=[*TRAIN, line])
    with pytest.raises(ValueError, match=r"train\.txt must have binary trees: got"):
        SentimentTrees(root)


def test_rejects(tmp_path):
    with pytest.raises(ValueError, match="'split' must be one of"):
        SentimentTrees(str(tmp_path), "dev")
    with pytest.raises(FileNotFoundError, match=r"train\.txt or train\.txt\.gz"):
        SentimentTrees(str(tmp_path))


def test_published_statistics(shared_data, tmp_path):
    (tmp_path / "raw").symlink_to(shared_data / "sst")
    sizes = {"train": (8_544, 318_582), "val": (1_101, 41_447), "test": (2_210, 82_600)}
    polar = {"train": 6_920, "val": 872, "test": 1_821}
    for split, size in sizes.items():
        dataset = SentimentTrees(str(tmp_path), split)
        assert (len(dataset), dataset.y.numel()) == size
        assert int((dataset.y[dataset.root_mask] != 2).sum()) == polar[split]
        assert dataset.num_classes == 5
        assert dataset.x.max() <= len(dataset.vocabulary) + 1
        name = {"val": "dev"}.get(split, split)
        with gzip.open(shared_data / "sst" / f"{name}.txt.gz", "rt") as file:
            line = file.readline()
        if split == "train":
            assert to_text(dataset[0], dataset.vocabulary) == line.strip().lower()
