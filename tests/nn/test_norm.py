"""The RMS norm of the layers, and the layers for features of any size."""

import math

import pytest
import torch
import torch.nn.functional as F
from asserts import assert_near

from pyg_chimera.nn import PLSTMConv, PLSTMGridConv
from pyg_chimera.nn._norm import RMSNorm, rms_norm

PATH = torch.stack([torch.arange(11), torch.arange(1, 12)])


def test_ordinary_rows_are_as_in_torch_bit_for_bit():
    x = torch.randn(50, 8) * torch.logspace(-30, 8, 50).view(-1, 1)
    weight = torch.randn(8)
    assert torch.equal(rms_norm(x, weight), F.rms_norm(x, (8,), weight, 1e-5))
    norm, other = RMSNorm(8), torch.nn.RMSNorm(8)
    assert torch.equal(norm(x), other(x))
    assert list(norm.state_dict()) == ["weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_of_any_size(dtype):
    """By hand: sizes do not matter once they are far above the root of eps."""
    largest = math.log10(torch.finfo(dtype).max) - 1e-3
    sizes = torch.logspace(3, largest, 40, dtype=dtype).view(-1, 1)
    row = torch.tensor([1.0, -0.5, 0.25, 0.0], dtype=dtype)
    x = (sizes * row).requires_grad_()
    y = rms_norm(x)
    assert_near(y, (row / row.square().mean().sqrt()).expand_as(y), 1e-6)
    y.backward(torch.ones_like(y))
    # Scaled back, gradients of all rows are the same.
    want = (1 - row * row.sum() / row.square().sum()) / row.square().mean().sqrt()
    assert_near(x.grad * sizes, want.expand_as(y), 1e-5)


def test_zeros_stay_zeros_and_nan_stays():
    x = torch.zeros(5, 4, requires_grad=True)
    with torch.no_grad():
        x[1, 2] = math.nan
        x[2, 0] = math.inf
        x[3, 1] = -math.inf
    y = rms_norm(x)
    assert y[[0, 4]].eq(0).all()
    assert y[1:4].isnan().all()
    y[[0, 4]].sum().backward()
    assert_near(x.grad[0], torch.full((4,), 1e5**0.5), 1e-6)


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e20])
def test_gradients(size):
    """Of first and second order, where eps matters, and where rows are scaled."""
    x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    weight = torch.randn(4, dtype=torch.double, requires_grad=True)

    def run(x, weight):
        return rms_norm(x * size, weight)

    assert torch.autograd.gradcheck(run, (x, weight), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, (x, weight))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_widened(dtype):
    x = torch.randn(6, 8).mul(200).to(dtype)  # squares exceed float16
    norm = RMSNorm(8).to(dtype)
    got = norm(x)
    assert got.dtype == dtype
    assert torch.equal(got, F.rms_norm(x.float(), (8,)).to(dtype))


@pytest.mark.parametrize("layer", [PLSTMConv, PLSTMGridConv])
@pytest.mark.parametrize("size", [1e5, 1e7, 1e12])
def test_features_of_any_size(layer, size):
    """float32 agrees with float64, which has room for the squares."""
    conv = layer(8, 8, heads=2)
    where = (
        {"height": 3, "width": 4} if layer is PLSTMGridConv else {"edge_index": PATH}
    )
    x = torch.randn(12, 8) * size
    got = conv(x, **where)
    assert_near(got, conv.double()(x.double(), **where), 1e-5)
    assert got.abs().sum(1).gt(0).all()
