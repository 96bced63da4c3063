import pytest
import torch
from asserts import assert_near

from pyg_chimera.nn import ChimeraGridConv

IN, OUT = 5, 8


def test_with_one_dag_nothing_is_heard_of_the_future():
    conv = ChimeraGridConv(IN, OUT, 2, 3, num_dags=1)
    x = torch.randn(6, IN, requires_grad=True)
    conv(x, height=1, width=6)[3].sum().backward()
    assert x.grad[:4].abs().sum(1).gt(0).all()
    assert x.grad[4:].eq(0).all()


def test_flipped_images():
    """Turning an image around exchanges the DAGs along one diagonal."""
    conv = ChimeraGridConv(IN, OUT, 2, 3, share="diagonal", window=None)
    with torch.no_grad():  # the same selectivities in both
        weight = conv.lin_delta.weight.view(4, 2, IN)
        weight[1::2] = weight[::2]
        conv.delta_bias[1::2] = conv.delta_bias[::2]
    x = torch.randn(12, IN)
    assert_near(
        conv(x.flip(0), height=3, width=4), conv(x, height=3, width=4).flip(0), 1e-5
    )


def test_bad_grids():
    for num_dags in (0, 3, 5):
        with pytest.raises(ValueError, match=f"1, 2 or 4 of a grid, got {num_dags}"):
            ChimeraGridConv(IN, OUT, num_dags=num_dags)
    with pytest.raises(ValueError, match="'edge_dim' must be None for grids"):
        ChimeraGridConv(IN, OUT, edge_dim=3)
    conv, x = ChimeraGridConv(IN, OUT), torch.randn(6, IN)
    with pytest.raises(ValueError, match="'height' and 'width' must be given"):
        conv(x)
    with pytest.raises(ValueError, match="grids of 6 nodes in all, got 8"):
        conv(x, height=2, width=4)
    with pytest.raises(ValueError, match=r"'batch' must be .* = \[6\], .*\[3\]"):
        conv(x, batch=torch.zeros(3, dtype=torch.long), height=2, width=3)
    sides = torch.tensor([1] * 3), torch.tensor([3] * 2)
    with pytest.raises(ValueError, match="of as many grids, got 3 and 2"):
        conv(x, None, None, torch.zeros(6).long(), *sides)
    conv.explain = True
    with pytest.raises(ValueError, match="Edge masks explain edges"):
        conv(x, height=2, width=3)
    conv.explain = False
    batch = torch.tensor([0, 0, 1, 1, 1, 1])
    with pytest.raises(ValueError, match="must be those of the graphs of 'batch'"):
        conv(x, batch=batch, height=1, width=torch.tensor([3, 3]))
