"""Checks whether I - A can be inverted, and whether it needs pivoting."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pyg_chimera.ops.common.dispatch import UnsuitableSolver

#: Elimination without pivoting may magnify rounding errors by this much.
_MAX_GROWTH = 100.0


def check_pivot_growth(growth: float) -> None:
    """Rejects factors whose rounding errors may be too large.

    Raises:
        UnsuitableSolver: If the pivot growth is too large.
    """
    if not growth <= _MAX_GROWTH:
        raise UnsuitableSolver(
            "'edge_weight' makes I - A too far from diagonally dominant to be "
            f"eliminated without pivoting (growth {growth:.1e}); scale the weights "
            "(rows of |A| that sum to less than 1 are always safe), or use "
            "solver='dense' or 'auto'"
        )


@contextmanager
def named_if_singular() -> Iterator[None]:
    """Turns the error for a singular matrix into one that names the argument."""
    try:
        yield
    except torch.linalg.LinAlgError as error:
        raise ValueError(
            "'edge_weight' makes I - A singular: some combination of nodes returns to "
            "itself undiminished. Scale the weights"
        ) from error
