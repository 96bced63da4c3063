import pytest
import torch
from asserts import assert_near
from hypothesis import given, settings
from hypothesis import strategies as st

from pyg_chimera.ops import householder_product

VECTORS = st.floats(-3, 3, width=32) | st.sampled_from([0.0, 1e-30, -1e30])


def test_one_reflection():
    # Swaps the two axes: it reflects at the diagonal.
    out = householder_product(torch.tensor([[1.0, -1.0]]))
    assert_near(out, torch.tensor([[0.0, 1.0], [1.0, 0.0]]), 1e-6)
    out = householder_product(torch.tensor([[0.0, 0.0, -7.0]]))
    assert out.equal(torch.tensor([1.0, 1.0, -1.0]).diag())


def test_order_of_reflections():
    """The first vector's is the leftmost factor."""
    vectors = torch.tensor([[0.0, 1.0], [1.0, -1.0]])
    flip = torch.tensor([[1.0, 0.0], [0.0, -1.0]])
    swap = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert_near(householder_product(vectors), flip @ swap, 1e-6)
    assert_near(householder_product(vectors.flip(0)), swap @ flip, 1e-6)


def test_is_the_product():
    vectors = torch.randn(4, 3, 6, 5, dtype=torch.double)
    out = householder_product(vectors)
    assert out.shape == (4, 3, 5, 5)
    eye = torch.eye(5, dtype=torch.double)
    for i in range(4):
        for j in range(3):
            expected = eye
            for v in vectors[i, j]:
                expected = expected @ (eye - 2 * torch.outer(v, v) / (v @ v))
            assert_near(out[i, j], expected)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(data=st.data(), num_vectors=st.integers(0, 4), size=st.integers(1, 5))
def test_is_orthogonal(data, num_vectors, size):
    """Vectors of any length, zeros among them."""
    count = num_vectors * size
    entries = data.draw(st.lists(VECTORS, min_size=count, max_size=count))
    vectors = torch.tensor(entries).view(num_vectors, size).requires_grad_()
    out = householder_product(vectors)
    assert_near(out @ out.t(), torch.eye(size), 1e-5)
    if num_vectors:
        (out * torch.randn(size, size)).sum().backward()
        assert vectors.grad.isfinite().all()
        nonzero = (vectors != 0).sum(1)
        flips = int((nonzero > 0).sum())
        assert out.detach().det().sign() == (-1) ** flips


def test_lengths_do_not_matter():
    vectors = torch.randn(3, 4, dtype=torch.double)
    expected = householder_product(vectors)
    for factor in (1e-200, 1e200, -2.0):
        assert_near(householder_product(factor * vectors), expected)


def test_zeros_reflect_nothing():
    vectors = torch.randn(3, 4, dtype=torch.double)
    padded = torch.cat([torch.zeros(1, 4), vectors[:1], torch.zeros(1, 4), vectors[1:]])
    assert_near(householder_product(padded), householder_product(vectors))
    assert householder_product(torch.zeros(2, 2, 3)).equal(torch.eye(3).expand(2, 3, 3))


def test_nan_is_where_it_belongs():
    vectors = torch.randn(2, 3, 4)
    expected = householder_product(vectors)
    vectors[0, 1, 2] = torch.nan
    out = householder_product(vectors)
    assert out[0].isnan().all()
    assert out[1].equal(expected[1])


def test_gradients():
    vectors = torch.randn(2, 3, 3, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(householder_product, vectors)
    assert torch.autograd.gradgradcheck(householder_product, vectors)


def test_empty():
    assert householder_product(torch.empty(0, 3, 2)).shape == (0, 2, 2)
    assert householder_product(torch.empty(4, 0, 2)).equal(torch.eye(2).expand(4, 2, 2))
    assert householder_product(torch.empty(4, 2, 0)).shape == (4, 0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    vectors = torch.randn(7, 4, 4)
    expected = householder_product(vectors)
    with torch.autocast("cpu", dtype=dtype):
        assert householder_product(vectors).equal(expected)
    out = householder_product(vectors.to(dtype))
    assert out.dtype == dtype
    assert_near(out, expected, 0.05)


def test_is_bounded_for_a_long_way():
    """A thousand transitions between orthogonal factors neither grow nor vanish."""
    turns = householder_product(torch.randn(1000, 4, 4))
    state = torch.tensor([1.0, 0.0, 0.0, 0.0])
    for turn in turns:
        state = turn @ state
    assert (state.norm() - 1).abs() < 1e-3


def test_errors():
    with pytest.raises(TypeError, match=r"floating point tensor, got torch\.int64"):
        householder_product(torch.ones(2, 2, dtype=torch.long))
    with pytest.raises(TypeError, match="floating point tensor, got list"):
        householder_product([[1.0]])
    with pytest.raises(ValueError, match=r"got shape \[3\]; use vectors.unsqueeze"):
        householder_product(torch.ones(3))
