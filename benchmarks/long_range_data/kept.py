"""What the data have in common: splits, and files of graphs."""

import os
from collections.abc import Callable
from hashlib import sha1
from pathlib import Path
from typing import Any

from torch_geometric.data import Data, InMemoryDataset

SPLITS = ("train", "val", "test")


def split_size(split: str, total: int) -> int:
    """How many of `total` graphs a split has: 80, 10 and 10 %, 1 at least."""
    held_out = max(1, total // 10)
    return total - 2 * held_out if split == "train" else held_out


class Kept(InMemoryDataset):
    """The graphs `make(*args)`, made once and kept in a file of the folder."""

    def __init__(
        self, folder: Path, make: Callable[..., list[Data]], *args: Any
    ) -> None:
        super().__init__()
        key = sha1(repr(args).encode(), usedforsecurity=False).hexdigest()[:12]
        path = folder / f"{make.__name__}-{key}.pt"
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.part")  # never half a file
            self.save(make(*args), str(part))
            part.rename(path)
        self.load(str(path))
