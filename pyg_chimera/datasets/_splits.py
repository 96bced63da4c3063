"""Data sets whose graphs are split into training, validation and test."""

import os
from typing import Any

from torch_geometric.data import Data, InMemoryDataset
from tqdm import tqdm

__all__ = ["SPLITS", "SplitDataset"]

SPLITS = ("train", "val", "test")


class SplitDataset(InMemoryDataset):
    """A data set of three processed files, one a split, one of which is loaded."""

    def __init__(self, root: str, split: str, **kwargs: Any) -> None:
        if split not in SPLITS:
            raise ValueError(f"'split' must be one of {SPLITS} (got {split!r})")
        super().__init__(root, **kwargs)
        self.load(self.processed_paths[SPLITS.index(split)])

    @property
    def processed_file_names(self) -> list[str]:
        return [f"{split}.pt" for split in SPLITS]

    def save_splits(self, graphs: list[Data], ends: list[int]) -> None:
        """Saves the graphs, which are sorted by split; ``ends`` starts with 0."""
        for i, (split, path) in enumerate(
            zip(SPLITS, self.processed_paths, strict=True)
        ):
            chosen = graphs[ends[i] : ends[i + 1]]
            if self.pre_filter is not None:
                chosen = [data for data in chosen if self.pre_filter(data)]
            if self.pre_transform is not None:
                chosen = [
                    self.pre_transform(data)
                    for data in tqdm(
                        chosen,
                        desc=f"Transforming {split}",
                        disable=None if self.log else True,
                    )
                ]
            if not chosen:
                raise ValueError(
                    f"'pre_filter' must leave at least one graph of the split '{split}'"
                )
            # Interrupted or not, and with several processes at it, never leave half a
            # file under the final name.
            part = f"{path}.{os.getpid()}.part"
            self.save(chosen, part)
            os.replace(part, path)
