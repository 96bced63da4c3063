"""How graphs are divided."""

SPLITS = ("train", "val", "test")


def split_size(split: str, total: int) -> int:
    """How many of `total` graphs a split has: 80, 10 and 10 %, 1 at least."""
    held_out = max(1, total // 10)
    return total - 2 * held_out if split == "train" else held_out
