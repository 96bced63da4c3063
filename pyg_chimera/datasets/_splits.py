"""Data sets whose graphs are split into training, validation and test."""

import os.path as osp
from collections.abc import Sequence
from typing import Any

from torch_geometric.data import Data, InMemoryDataset
from tqdm import tqdm

from pyg_chimera.datasets._common import save_whole

__all__ = ["SPLITS", "GeneratedDataset", "SplitDataset"]

SPLITS = ("train", "val", "test")


class SplitDataset(InMemoryDataset):
    """A data set of three processed files, one a split, one of which is loaded.

    Where splits are made one by one, :obj:`processed_file_names` has the one only.
    """

    def __init__(self, root: str, split: str, **kwargs: Any) -> None:
        if split not in SPLITS:
            raise ValueError(f"'split' must be one of {SPLITS} (got {split!r})")
        self.split = split
        super().__init__(root, **kwargs)
        self.load(osp.join(self.processed_dir, f"{split}.pt"))

    @property
    def processed_file_names(self) -> list[str]:
        return [f"{split}.pt" for split in SPLITS]

    def save_splits(self, graphs: list[Data], ends: list[int]) -> None:
        """Saves the graphs, which are sorted by split; ``ends`` starts with 0."""
        for i, split in enumerate(SPLITS):
            self.save_split(graphs[ends[i] : ends[i + 1]], split)

    def save_split(self, graphs: Sequence[Data], split: str) -> None:
        """Filters, transforms and saves the graphs of one split."""
        if self.pre_filter is not None:
            graphs = [data for data in graphs if self.pre_filter(data)]
        if self.pre_transform is not None:
            graphs = [
                self.pre_transform(data)
                for data in tqdm(
                    graphs,
                    desc=f"Transforming {split}",
                    disable=None if self.log else True,
                )
            ]
        if not graphs:
            raise ValueError(
                f"'pre_filter' must leave at least one graph of the split '{split}'"
            )
        save_whole(graphs, osp.join(self.processed_dir, f"{split}.pt"))


class GeneratedDataset(SplitDataset):
    """A data set whose splits are generated one by one, each on its first use.

    Subclasses define :meth:`generate`, and a :obj:`processed_dir` that carries all
    arguments on which graphs depend.
    """

    def __init__(self, root: str, split: str, seed: int, **kwargs: Any) -> None:
        if seed < 0:
            raise ValueError(f"'seed' must not be negative (got {seed})")
        self.seed = seed
        super().__init__(root, split, **kwargs)

    @property
    def raw_file_names(self) -> list[str]:
        """None: the graphs are generated."""
        return []

    @property
    def processed_file_names(self) -> list[str]:
        """The file of this split."""
        return [f"{self.split}.pt"]

    def split_size(self, total: int) -> int:
        """How many of ``total`` graphs the split has: 80%, 10% and 10%, 1 at least."""
        held_out = max(1, total // 10)
        return total - 2 * held_out if self.split == "train" else held_out

    def generate(self) -> list[Data]:
        """The graphs of the split."""
        raise NotImplementedError

    def process(self) -> None:
        """Generates the graphs of the split and saves them."""
        self.save_split(self.generate(), self.split)
