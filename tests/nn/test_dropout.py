import pytest
import torch

from pyg_chimera.nn._dropout import Dropout


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rate_scale_and_gradient(p: float) -> None:
    torch.manual_seed(0)
    x = torch.rand(1000, 301, dtype=torch.float64).add_(1.0).requires_grad_()
    out = Dropout(p)(x)
    (out * x.detach()).sum().backward()
    kept = out.detach() != 0
    # Six standard deviations of a Bernoulli variable's mean, by rows and by columns.
    for dim in (0, 1):
        noise = 6 * (p * (1 - p) / x.size(dim)) ** 0.5
        assert (kept.double().mean(dim) - (1 - p)).abs().max() < noise
    torch.testing.assert_close(out, x * kept / (1 - p), rtol=1e-4, atol=0)
    torch.testing.assert_close(x.grad, out.detach(), rtol=1e-12, atol=0)
    pairs = (kept[:, 1:] & kept[:, :-1]).double().mean()
    assert abs(pairs - (1 - p) ** 2) < 5e-3  # the four numbers of a word


def test_seeds_decide() -> None:
    x = torch.ones(7, 5)
    outs = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        outs.append(Dropout(0.5)(x))
    assert outs[0].equal(outs[1])
    assert not outs[0].equal(outs[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (0, 4), (3,), (5, 2, 3)])
def test_dtypes_and_shapes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    out = Dropout(0.25)(torch.ones(shape, dtype=dtype))
    assert out.dtype == dtype
    assert out.shape == shape
    assert set(out.flatten().tolist()) <= {0.0, torch.tensor(4 / 3, dtype=dtype).item()}


def test_limits() -> None:
    x = torch.rand(100)
    assert Dropout(0.0)(x).equal(x)
    assert Dropout(0.5).eval()(x).equal(x)
    assert Dropout(1.0)(x).equal(torch.zeros(100))
    Dropout(0.5, inplace=True)(x)
    assert (x == 0).any()
    with pytest.raises(ValueError, match="probability"):
        Dropout(1.5)
