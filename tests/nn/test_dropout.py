import pytest
import torch

from pyg_chimera.nn._dropout import Dropout

SIZE = 2**18 + 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_entries_are_kept_with_the_probability_and_scaled(dtype, p):
    torch.manual_seed(0)
    x = torch.ones(SIZE, dtype=dtype, requires_grad=True)
    out = Dropout(p)(x)
    out.sum().backward()
    kept = out != 0

    assert out.dtype == dtype
    assert abs(float(kept.double().mean()) - (1 - p)) < 5 * (p * (1 - p) / SIZE) ** 0.5
    scale = torch.full_like(out, 1 / (1 - p))
    torch.testing.assert_close(out, scale * kept, rtol=1e-3, atol=0)
    torch.testing.assert_close(x.grad, out.detach(), rtol=0, atol=0)


def test_entries_are_independent():
    """Of those before them, also of those from the same 64 random bits."""
    torch.manual_seed(0)
    kept = (Dropout(0.5)(torch.ones(SIZE)) != 0).double() - 0.5
    for lag in (1, 2, 3, 4, 64):
        assert abs(float((kept[lag:] * kept[:-lag]).mean())) < 5 * 0.25 / SIZE**0.5


def test_draws_follow_the_seed_and_are_new_each_time():
    x, drop = torch.randn(128, 65).t(), Dropout(0.3)  # not contiguous
    torch.manual_seed(1)
    first, second = drop(x), drop(x)
    torch.manual_seed(1)
    assert torch.equal(drop(x), first)
    assert not torch.equal(first, second)
    torch.testing.assert_close(first, (first != 0) * x / 0.7, rtol=1e-4, atol=0)


@pytest.mark.parametrize("p", [0.0, 1e-7, 1.0])
def test_nothing_or_everything_is_dropped(p):
    x = torch.randn(SIZE)
    expected = x if p < 1 else torch.zeros(SIZE)
    torch.testing.assert_close(Dropout(p)(x), expected, rtol=1e-5, atol=0)


def test_evaluation_is_the_identity():
    x = torch.randn(SIZE)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.5)(x[:0]).shape == (0,)


def test_compiled_code_draws_as_pytorch():
    """With sizes that are not known, on which nothing may depend."""
    drop = torch.compile(Dropout(0.5), backend="eager", fullgraph=True, dynamic=True)
    for size in (8, SIZE):
        with torch._dynamo.config.patch(error_on_recompile=True):
            torch.manual_seed(0)
            out = drop(torch.ones(size))
        torch.manual_seed(0)
        assert torch.equal(out, torch.nn.functional.dropout(torch.ones(size)))


def test_transforms_draw_as_pytorch():
    """`torch.vmap` refuses random numbers unless it is told what they depend on."""
    x = torch.ones(2, SIZE)
    with pytest.raises(RuntimeError, match="random"):
        torch.vmap(Dropout(0.5))(x)
    one, other = torch.vmap(Dropout(0.5), randomness="different")(x)
    assert not torch.equal(one, other)
