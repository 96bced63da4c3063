"""What is special to `grid_conv`: literals, and its kinds of canvas."""

import pytest
import torch
from asserts import assert_near
from operators import OPERATORS

from pyg_chimera.ops import causal_conv1d, grid_conv

VARIANTS = ["numba", "torch", "reference"]
variants = pytest.mark.parametrize("backend", VARIANTS)


@variants
def test_literal(backend):
    """The sum of a node, ten times the one to its left and a hundred times that above
    it, of two grids side by side.
    """
    x = torch.tensor([1, 2, 3, 4, 5, 6, 7.0])[:, None]
    weight = torch.tensor([[[0, 100, 0], [10, 1, 0], [0, 0, 0]]]).float()
    height, width = torch.tensor([2, 1]), torch.tensor([2, 3])
    out = grid_conv(x, weight, height, width, backend=backend)
    assert out.flatten().tolist() == [1, 12, 103, 234, 5, 56, 67]
    causal = weight[:, :2, :2]
    same = grid_conv(x, causal, height, width, causal=True, backend=backend)
    assert torch.equal(same, out)


@variants
def test_sequences_are_grids_of_one_row(backend):
    x, weight, lengths = torch.randn(9, 5), torch.randn(5, 4), torch.tensor([4, 2, 3])
    ptr = torch.tensor([0, 4, 6, 9])
    height = torch.ones(3, dtype=torch.long)
    out = grid_conv(x, weight[:, None], height, lengths, causal=True, backend=backend)
    assert_near(out, causal_conv1d(x, weight, None, ptr), 1e-5)


def test_grids_alike_or_not():
    """Each an image, or all on one: the same."""
    x, weight = torch.randn(18, 5).double(), torch.randn(5, 3, 3).double()
    alike = grid_conv(x[:12], weight, 2, 3)
    sizes = torch.tensor([2, 2, 6]), torch.tensor([3, 3, 1])
    assert_near(grid_conv(x, weight, *sizes)[:12], alike)


@pytest.mark.parametrize("window", [(3, 3), (1, 4), (2, 5)])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_in_pieces(window, causal):
    """Rows of all lengths, some longer than a piece, with all gradients."""
    height, width = torch.tensor([3, 1, 2, 2, 4]), torch.tensor([70, 130, 64, 9, 3])
    nodes = int((height * width).sum())
    x, grad = torch.randn(2, nodes, 19).double()
    weight, found = torch.randn(19, *window).double(), []
    for backend in ("numba", "torch"):
        leaves = [y.clone().requires_grad_() for y in (x, weight)]
        out = grid_conv(*leaves, height, width, causal=causal, backend=backend)
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    for y, expected in zip(*found, strict=True):
        assert_near(y, expected, 1e-12)


def test_one_grid_does_not_hear_of_another():
    for sizes in (
        (torch.tensor([2, 2]), 3),
        (torch.tensor([2, 3]), torch.tensor([3, 2])),
    ):
        x = torch.randn(12, 2)
        x[:6] = torch.nan
        out = grid_conv(x, torch.randn(2, 5, 5), *sizes)
        assert out[:6].isnan().all()
        assert out[6:].isfinite().all()


def test_bad_filters():
    x = torch.randn(6, 2)
    with pytest.raises(ValueError, match=r"rows and columns|at least one row"):
        grid_conv(x, torch.randn(2, 0, 3), 2, 3)
    with pytest.raises(
        ValueError, match=r"'weight' must be \[channels, rows, columns\]"
    ):
        grid_conv(x, torch.randn(3, 3, 3), 2, 3)
    with pytest.raises(TypeError, match="'causal' must be True or False, got 'no'"):
        grid_conv(x, torch.randn(2, 3, 3), 2, 3, causal="no")
    assert "grid_conv" in OPERATORS
