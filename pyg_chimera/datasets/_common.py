"""Splits of data sets, and atomic writing of their files."""

import os
import os.path as osp
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch_geometric.data import Data, Dataset, InMemoryDataset
from tqdm import tqdm

from pyg_chimera.ops.common.checks import check_option

SPLITS = ("train", "val", "test")


@contextmanager
def atomic_path(path: str) -> Iterator[str]:
    """Yields a temporary path, and renames the file when it is complete."""
    part = f"{path}.{os.getpid()}.part"
    yield part
    os.replace(part, path)


def save_atomically(graphs: Sequence[Data], path: str) -> None:
    """Saves graphs as one file, atomically."""
    with atomic_path(path) as part:
        InMemoryDataset.save(graphs, part)


class SplitDataset(InMemoryDataset):
    """A data set with one processed file per split; loads the chosen split."""

    def __init__(self, root: str, split: str, **kwargs: Any) -> None:
        check_option("split", split, SPLITS)
        self.split = split
        super().__init__(root, **kwargs)
        self.load(osp.join(self.processed_dir, f"{split}.pt"))

    @property
    def processed_file_names(self) -> list[str]:
        return [f"{split}.pt" for split in SPLITS]

    def save_splits(self, graphs: list[Data], ends: list[int]) -> None:
        """Filters, transforms and saves graphs sorted by split; ``ends[0]`` is 0."""
        for i, split in enumerate(SPLITS):
            part = graphs[ends[i] : ends[i + 1]]
            if self.pre_filter is not None:
                part = [data for data in part if self.pre_filter(data)]
            if self.pre_transform is not None:
                bar = tqdm(part, f"Transforming {split}", disable=no_bars(self))
                part = [self.pre_transform(data) for data in bar]
            if not part:
                raise ValueError(
                    f"'pre_filter' must leave at least one graph of the split '{split}'"
                )
            save_atomically(part, osp.join(self.processed_dir, f"{split}.pt"))


def no_bars(dataset: Dataset) -> bool | None:
    """The `disable` option of tqdm: None shows bars on terminals only."""
    return None if dataset.log else True
