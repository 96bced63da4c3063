import long_range_bounds as bounds
import numpy as np
import pytest
import torch
from torch_geometric.data import Data


@pytest.mark.parametrize("side", [5, 16, 20])
def test_couplings_end_after_eight_steps(side):
    spins = np.where(np.random.default_rng(side).random((side, side)) < 0.5, -1.0, 1.0)
    wanted = np.zeros_like(spins)
    for row, column, r, c in np.ndindex(side, side, side, side):
        down, right = (
            (a - b + side // 2) % side - side // 2 for a, b in ((r, row), (c, column))
        )
        if (down or right) and max(abs(down), abs(right)) <= 8:
            pair = spins[row, column] * spins[r, c]
            wanted[row, column] += pair * (down**2 + right**2) ** -1.3
    np.testing.assert_allclose(bounds.truncated(side, spins), wanted, atol=1e-12)


def test_sums_on_a_path():
    """Sums of constants are constant; leaves count half of what is left a step on."""
    edge_index = torch.tensor([[0, 1, 1, 2, 2, 3], [1, 0, 2, 1, 3, 2]])
    found = bounds.sums(Data(edge_index=edge_index, num_nodes=4))
    assert found.shape == (4, 2 + 3 * len(bounds.RANGES))
    assert found[:, 0].tolist() == [1, 2, 2, 1]
    assert found[:, 1].tolist() == [1, 0, 0, 1]
    torch.testing.assert_close(found[:, 2], found[:1, 2].expand(4))
    s = 2 * (1 / 3) / (1 + 1 / 9)  # of a range of 1.5 steps
    # u = 1 + s v at the ends, and v = s / 2 (u + v) between them
    u, v = np.linalg.solve([[1, -s], [-s / 2, 1 - s / 2]], [1, 0])
    assert float(found[1, 4] / found[0, 4]) == pytest.approx(v / u, rel=1e-5)
