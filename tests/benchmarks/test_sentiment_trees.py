import gzip

import long_range_data
import torch

#: The most frequent first, then in order of appearance.
VOCABULARY = ["it", "film", "really", "works", "bad"]
TRAIN = [
    "(3 (2 It) (4 (2 really) (4 works)))",
    "(1 (0 (0 Bad) (1 film)) (2 it))",
    "(2 Film)",
]


def write_raw(raw, train=TRAIN, dev=("(4 (2 It) (3 shines))",), test=("(0 Bad)",)):
    (raw / "train.txt").write_text("\n".join(train) + "\n", encoding="utf-8")
    with gzip.open(raw / "dev.txt.gz", "wt") as file:
        file.write("\n".join(dev))
    (raw / "test.txt").write_text("\n".join(test))
    return raw


def to_text(data, vocabulary, node=None) -> str:
    """The line of a tree, by recursion from its root."""
    if node is None:
        (node,) = data.root_mask.nonzero().flatten().tolist()
    edges = zip(
        *data.edge_index.tolist(), data.edge_attr.view(-1).tolist(), strict=True
    )
    children = {side: child for child, parent, side in edges if parent == node}
    label = int(data.y[node])
    if not children:
        word = int(data.x[node])
        return f"({label} {'?' if word == 1 else vocabulary[word - 2]})"
    assert data.x[node] == 0
    left, right = (to_text(data, vocabulary, children[side]) for side in (0, 1))
    return f"({label} {left} {right})"


def test_trees_come_back(tmp_path):
    folder = write_raw(tmp_path)
    for split, lines in (
        ("train", [line.lower() for line in TRAIN]),
        ("val", ["(4 (2 it) (3 ?))"]),
        ("test", ["(0 bad)"]),
    ):
        trees = long_range_data.sentiment_trees(folder, split)
        assert [to_text(data, VOCABULARY) for data in trees] == lines
        for data in trees:
            assert data.num_edges == data.num_nodes - 1
            assert (data.edge_index[0] < data.edge_index[1]).all()
            assert data.root_mask.tolist() == [False] * data.num_edges + [True]
            assert data.edge_attr.shape == (data.num_edges, 1)
            for value in (data.x, data.y, data.edge_attr, data.edge_index):
                assert value.dtype == torch.int64


def test_published_statistics(shared_data):
    sizes = {"train": (8_544, 318_582), "val": (1_101, 41_447), "test": (2_210, 82_600)}
    polar = {"train": 6_920, "val": 872, "test": 1_821}
    for split, size in sizes.items():
        trees = long_range_data.sentiment_trees(shared_data / "sst", split)
        assert (len(trees), sum(data.num_nodes for data in trees)) == size
        assert sum(int(data.y[-1]) != 2 for data in trees) == polar[split]
        assert all(int(data.y.max()) <= 4 for data in trees)
