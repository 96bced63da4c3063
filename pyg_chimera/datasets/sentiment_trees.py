"""Sentences as parse trees, with a sentiment at each node."""

import gzip
import json
import os.path as osp
import re
from collections import Counter
from typing import Any

import torch
from torch_geometric.data import Data

from pyg_chimera.datasets._common import find_raw, written_whole
from pyg_chimera.datasets._splits import SplitDataset

__all__ = ["SentimentTrees"]

#: Word ids of nodes without a word, and of words that are not in the vocabulary.
_INNER, _UNKNOWN = 0, 1
#: Words of the official files have no-break spaces, as in 8 1/2.
_TOKEN = re.compile(r"[()]|[^()\s]+", re.ASCII)


class SentimentTrees(SplitDataset):
    r"""The Stanford Sentiment Treebank of the `"Recursive Deep Models for Semantic
    Compositionality Over a Sentiment Treebank"
    <https://aclanthology.org/D13-1170>`_ paper: sentences of film reviews as binary
    parse trees, in which the phrase of each node has one of five sentiments.

    .. list-table::
        :header-rows: 1

        * - split
          - sentences
          - labelled nodes
          - words
        * - :obj:`"train"`
          - 8,544
          - 318,582
          - 163,563
        * - :obj:`"val"`
          - 1,101
          - 41,447
          - 21,274
        * - :obj:`"test"`
          - 2,210
          - 82,600
          - 42,405

    The official files are read from where you have put them, and may be compressed:

    .. code-block:: text

        root/raw/train.txt (or train.txt.gz)
        root/raw/dev.txt
        root/raw/test.txt

    Each line is a tree such as :obj:`(3 (2 It) (4 works))`. Processing takes about
    0.2 seconds per 1,000 sentences, once.

    Edges lead from children to parents, so that each sentence is a directed acyclic
    graph from its words to its root. Children precede parents in the order of nodes,
    words are in the order of the sentence, and the root is last. A sentence of
    :math:`n` words has :math:`V = 2n - 1` nodes and :math:`E = V - 1` edges, and the
    attributes

    * :obj:`x`: int64 :math:`(V)`, 0 for inner nodes, 1 for unknown words, and
      :math:`i + 2` for the word :obj:`vocabulary[i]`,
    * :obj:`edge_index`: int64 :math:`(2, E)`,
    * :obj:`side`: int64 :math:`(E)`, whether the child is the left (0) or the right one
      (1),
    * :obj:`y`: int64 :math:`(V)`, from 0 (very negative) over 2 (neutral) to 4 (very
      positive),
    * :obj:`root_mask`: bool :math:`(V)`, which node is the root; the usual measures are
      the accuracy at all nodes and at roots.

    In the binary task of the literature, neutral sentences (or nodes) are left out and
    the others are positive or negative. A :obj:`pre_filter` that keeps sentences with
    :obj:`data.y[-1] != 2` leaves 6,920, 872 and 1,821; :obj:`data.y != 2` is a mask of
    nodes, and :obj:`data.y > 2` are labels.

    Args:
        root (str): Folder with the raw files. Processed files are kept in it, too.
        split (str, optional): :obj:`"train"`, :obj:`"val"` or :obj:`"test"`.
            (default: :obj:`"train"`)
        **kwargs (optional): Additional arguments of
            :class:`~torch_geometric.data.InMemoryDataset`.

    Attributes:
        vocabulary (list[str]): The words of the training sentences in lower case, the
            most frequent first. It is the same for all splits, and does not depend on
            :obj:`pre_filter`.

    Raises:
        FileNotFoundError: If a raw file is missing.
        ValueError: If a line is not a binary tree with labels from 0 to 4.
    """

    vocabulary: list[str]

    def __init__(self, root: str, split: str = "train", **kwargs: Any) -> None:
        super().__init__(root, split, **kwargs)
        with open(self._vocabulary_path, encoding="utf-8") as file:
            self.vocabulary = json.load(file)

    @property
    def _vocabulary_path(self) -> str:
        return osp.join(self.processed_dir, "vocabulary.json")

    def process(self) -> None:
        """Turns the raw files into the vocabulary and the processed splits."""
        splits = [self._trees(name) for name in ("train", "dev", "test")]
        counts = Counter(word for _, words in splits[0] for word in words if word)
        vocabulary = [word for word, _ in counts.most_common()]
        with (
            written_whole(self._vocabulary_path) as part,
            open(part, "w", encoding="utf-8") as file,
        ):
            json.dump(vocabulary, file)

        ids = {"": _INNER} | {word: i for i, word in enumerate(vocabulary, 2)}
        graphs, ends = [], [0]
        for trees in splits:
            for data, words in trees:
                data.x = torch.tensor([ids.get(word, _UNKNOWN) for word in words])
                graphs.append(data)
            ends.append(len(graphs))
        self.save_splits(graphs, ends)

    def _trees(self, name: str) -> list[tuple[Data, list[str]]]:
        names = (f"{name}.txt", f"{name}.txt.gz")
        source = "the file of the Stanford Sentiment Treebank"
        path = find_raw(self.raw_dir, names, source)
        file: Any = gzip.open if path.endswith(".gz") else open
        with file(path, "rt", encoding="utf-8") as lines:
            try:
                return [_parse(line) for line in lines if line.strip()]
            except ValueError as error:
                raise ValueError(f"{path} must have binary trees: {error}") from error


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
                raise ValueError(f"got {line.strip()!r}")
            unfinished[-1].append(len(labels))
            labels.append(int(label))
    if unfinished != [[len(labels) - 1]]:
        raise ValueError(f"got {line.strip()!r}")
    root_mask = torch.zeros(len(labels), dtype=torch.bool)
    root_mask[-1] = True
    data = Data(
        edge_index=torch.tensor([children, parents], dtype=torch.long),
        side=torch.arange(len(children)) % 2,
        y=torch.tensor(labels),
        root_mask=root_mask,
    )
    return data, words
