"""Sentences as parse trees, with a sentiment at each node."""

import gzip
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch_geometric.data import Data

#: Word ids of nodes without a word, and of words that are not in the vocabulary.
_INNER, _UNKNOWN = 0, 1
#: Words of the official files have no-break spaces, as in 8 1/2.
_TOKEN = re.compile(r"[()]|[^()\s]+", re.ASCII)


def sentiment_trees(folder: Path, split: str) -> list[Data]:
    """The Stanford Sentiment Treebank (https://aclanthology.org/D13-1170): sentences as
    binary parse trees, in which the phrase of each node has one of five sentiments.

    Edges lead from children to parents, which come later in the order of nodes.

    Args:
        folder: The official files `train.txt`, `dev.txt` and `test.txt`, or the same
            with `.gz`.
        split: `"train"`, `"val"` or `"test"`.

    Returns:
        Graphs with `x` [V], 0 for inner nodes, 1 for unknown words, and i + 2 for the
        i-th word of the training sentences, in lower case, most frequent first;
        `edge_index`; `edge_attr` [E, 1], whether the child is the left (0) or the right
        one (1); `y` [V], from 0 (very negative) to 4 (very positive); and `root_mask`
        [V].
    """
    train = _trees(folder / "train.txt")
    counts = Counter(word for _, words in train for word in words if word)
    vocabulary = [word for word, _ in counts.most_common()]
    ids = {"": _INNER} | {word: i for i, word in enumerate(vocabulary, 2)}
    trees = train
    if split != "train":
        trees = _trees(folder / {"val": "dev.txt", "test": "test.txt"}[split])
    for data, words in trees:
        data.x = torch.tensor([ids.get(word, _UNKNOWN) for word in words])
    return [data for data, _ in trees]


def _trees(path: Path) -> list[tuple[Data, list[str]]]:
    file: Any = open
    if not path.exists():
        path, file = path.with_suffix(".txt.gz"), gzip.open
    with file(path, "rt", encoding="utf-8") as lines:
        return [_parse(line) for line in lines if line.strip()]


def _parse(line: str) -> tuple[Data, list[str]]:
    """The graph of a line such as ``(3 (2 It) (4 works))``, and its nodes' words."""
    labels: list[int] = []
    words: list[str] = []
    children: list[int] = []
    parents: list[int] = []
    # Without recursion, since trees may be deep. An unfinished node is the list of its
    # label, then of its word or the positions of its children.
    unfinished: list[list] = [[]]
    for token in _TOKEN.findall(line):
        if token == "(":
            unfinished.append([])
        elif token != ")":
            unfinished[-1].append(token)
        else:
            match unfinished.pop():
                case [str(label), str(word)]:
                    words.append(word.lower())
                case [str(label), int(left), int(right)]:
                    words.append("")
                    children += left, right
                    parents += len(labels), len(labels)
                case _:
                    label = ""
            if label not in ("0", "1", "2", "3", "4") or not unfinished:
                raise ValueError(f"no binary tree: {line.strip()!r}")
            unfinished[-1].append(len(labels))
            labels.append(int(label))
    if unfinished != [[len(labels) - 1]]:
        raise ValueError(f"no binary tree: {line.strip()!r}")
    root_mask = torch.zeros(len(labels), dtype=torch.bool)
    root_mask[-1] = True
    data = Data(
        edge_index=torch.tensor([children, parents], dtype=torch.long),
        edge_attr=torch.arange(len(children)).view(-1, 1) % 2,
        y=torch.tensor(labels),
        root_mask=root_mask,
    )
    return data, words
