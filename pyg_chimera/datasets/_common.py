"""What the data sets share: splits, and files that are never half written."""

import os
import os.path as osp
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch_geometric.data import Data, InMemoryDataset
from tqdm import tqdm

from pyg_chimera.ops.common.checks import check_option

__all__ = ["SPLITS", "SplitDataset", "save_whole", "written_whole"]

SPLITS = ("train", "val", "test")


@contextmanager
def written_whole(path: str) -> Iterator[str]:
    """Where to write what will be at the path. Interrupted or not, and with several
    processes at it, there is never half a file under the final name.
    """
    part = f"{path}.{os.getpid()}.part"
    yield part
    os.replace(part, path)


def save_whole(graphs: Sequence[Data], path: str) -> None:
    """Saves graphs as one file, see :func:`written_whole`."""
    with written_whole(path) as part:
        InMemoryDataset.save(graphs, part)


class SplitDataset(InMemoryDataset):
    """A data set of three processed files, one a split, one of which is loaded."""

    def __init__(self, root: str, split: str, **kwargs: Any) -> None:
        check_option("split", split, SPLITS)
        self.split = split
        super().__init__(root, **kwargs)
        self.load(osp.join(self.processed_dir, f"{split}.pt"))

    @property
    def processed_file_names(self) -> list[str]:
        return [f"{split}.pt" for split in SPLITS]

    def save_splits(self, graphs: list[Data], ends: list[int]) -> None:
        """Filters, transforms and saves the graphs, which are sorted by split;
        ``ends`` starts with 0.
        """
        for i, split in enumerate(SPLITS):
            part = graphs[ends[i] : ends[i + 1]]
            if self.pre_filter is not None:
                part = [data for data in part if self.pre_filter(data)]
            if self.pre_transform is not None:
                bar = tqdm(part, f"Transforming {split}", disable=hidden(self))
                part = [self.pre_transform(data) for data in bar]
            if not part:
                raise ValueError(
                    f"'pre_filter' must leave at least one graph of the split '{split}'"
                )
            save_whole(part, osp.join(self.processed_dir, f"{split}.pt"))


def hidden(dataset: InMemoryDataset) -> bool | None:
    """The `disable` of progress bars, which are shown on terminals only."""
    return None if dataset.log else True
