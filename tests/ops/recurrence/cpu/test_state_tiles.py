from itertools import product

import numpy as np
import pytest

from pyg_chimera.ops.recurrence.cpu import state_tiles
from pyg_chimera.ops.recurrence.cpu.state_tiles import Operands, StateTiles


@pytest.mark.parametrize("size", [16, 32, 64], ids="vectors of {} bytes".format)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tiles_on_any_machine(size, dtype, monkeypatch):
    """Whole vectors, not much more than the states, and as much as may be held."""
    vector = size // np.dtype(dtype).itemsize
    monkeypatch.setattr(state_tiles, "vector_lanes", lambda _: (vector, 4 * vector))
    held = np.array([100, 70])
    for keys, channels, vectors, room in product(
        (1, 2, 4, 16, 21, 96), (1, 3, 5, 8, 17, 24), (1, 2, 4), (2**9, 2**17, 2**30)
    ):
        side, query = vectors * vector, np.zeros((170, 1, keys), dtype)
        x = Operands(query, query, np.zeros((170, 8, channels), dtype))
        tiles = StateTiles.of(held, x, room, side)
        numbers = tiles.keys * tiles.width
        assert numbers % side == 0
        assert tiles.width >= tiles.channels
        assert tiles.pieces * tiles.channels >= channels
        if tiles.keys >= keys:
            whole = -(-tiles.channels // vector) * vector
            assert numbers <= max(side, (keys + side) * whole)
        fits = numbers <= min(state_tiles._MOST, room // (100 * x.value.itemsize))
        assert fits or numbers == np.lcm(side, tiles.width)
