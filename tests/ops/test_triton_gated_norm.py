"""The fused norm in Triton's interpreter: against PyTorch's operators in float64."""

from itertools import product

import pytest
import torch
from asserts import assert_near
from poison import poison_tensors

from pyg_chimera.ops import gated_norm as module
from pyg_chimera.ops.common import triton_runtime, triton_trial
from pyg_chimera.ops.gated_norm import _Options, gated_norm, gated_output

if not triton_runtime.INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1: make test-triton", allow_module_level=True)
pytest.importorskip("triton")

from triton_watch import counted, watched

from pyg_chimera.ops import triton_gated_norm as kernels

FLAGS = list(product([False, True], repeat=4))
CPU = torch.device("cpu")


def drawn(shape, present, dtype):
    """Rows between others, and what is present of weight, gate, factor and skip."""
    generator = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(size, generator=generator, dtype=torch.double).to(dtype)

    weighted, gated, scaled, skips = present
    rows = draw(*shape[:-1], shape[-1] + 3)[..., 2:-1]
    return [
        rows if len(shape) == 2 else rows.contiguous(),
        draw(*shape[1:]) if weighted else None,
        draw(*shape) if gated else None,
        draw(*shape[:-1]) if scaled else None,
        draw(*shape) if skips else None,
        draw(2) if skips else None,
    ]  # fmt: skip


@pytest.fixture
def on_gpus(monkeypatch):
    """Norms are computed as those of tensors on a GPU."""
    monkeypatch.setattr(triton_trial, "by_triton", lambda _: True)
    monkeypatch.setattr(module._TRIAL, "found", {})


@pytest.mark.parametrize("present", FLAGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_outputs_and_gradients(present, dtype, monkeypatch):
    for shape, activated, normed in product(
        [(5, 4), (70, 2, 17)], [False, True], [False, True]
    ):
        given = drawn(shape, (*present[:3], present[3] and len(shape) == 2), dtype)
        given[0] = given[0].contiguous()  # the watch sees no strides
        options = _Options(1e-5, 0.3, activated, normed)
        leaves = [x if x is None else x.double().requires_grad_() for x in given]
        out = module._composed(*leaves, options)
        grad = torch.linspace(-1, 2, out.numel(), dtype=torch.double).view(shape).cos()
        wanted = [x for x in leaves if x is not None]
        want = [out.detach(), *torch.autograd.grad(out, wanted, grad)]
        with monkeypatch.context() as patch, watched(1) as problems:
            poison_tensors(patch)
            got = [kernels.forward(given, options)]
            found = kernels.backward(given, options, grad.to(dtype))
        assert problems == set()
        assert [x is None for x in found] == [x is None for x in given]
        got += [x for x in found if x is not None]
        assert {x.dtype for x in got} == {dtype}
        for x, y in zip(got, want, strict=True):
            assert_near(x, y, 3e-6 if dtype == torch.float32 else 1e-13)


def test_one_launch(on_gpus):
    x, weight, gate, _, value, skip = (
        x if x is None else x.requires_grad_()
        for x in drawn((9, 6), (True, True, False, True), torch.float64)
    )
    module._TRIAL.passed(CPU)
    with counted() as launches:
        out = gated_output(x, value, skip, weight, gate, 1e-5)
        out.sum().backward()
    assert launches == {"_forward": 1, "_backward": 1}
    want = module._composed(x, weight, gate, None, value, skip, _Options())
    assert_near(out, want, 1e-13)


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_query_key_and_value_in_one_launch(normed, scaled, dtype, on_gpus):
    """Of several groups, as columns of one matrix; gates are those of heads."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(70, 60, generator=generator, dtype=torch.double)
    gates = torch.rand(70, 2, 4, generator=generator, dtype=torch.double)
    leaf, gate = (x.to(dtype).requires_grad_() for x in (whole, gates))
    wide, wide_gate = (x.detach().double().requires_grad_() for x in (leaf, gate))

    def computed(function, x, factor):
        query, key, value = x.split((12, 12, 36), 1)
        given = query.unflatten(1, (2, -1)), key.unflatten(1, (2, -1))
        factor = factor[:, 1] if scaled else None
        outs = function(*given, value.unflatten(1, (4, -1)), factor, normed)
        rows = [torch.linspace(-1, 2, y.numel()).view_as(y).cos() for y in outs]
        return outs, [y.to(x) for y in rows]

    module._TRIAL.passed(CPU)
    with counted() as launches:
        outs, grads = computed(module.gated_inputs, leaf, gate)
        torch.autograd.backward(outs, grads)
    assert launches == {"_forward_inputs": 1, "_backward_inputs": 1}
    want, grads = computed(module._compose_inputs, wide, wide_gate)
    torch.autograd.backward(want, grads)
    pairs = [*zip(outs, want, strict=True), (leaf.grad, wide.grad)]
    if scaled:
        pairs.append((gate.grad, wide_gate.grad))
    for x, y in pairs:
        assert x.dtype == dtype
        assert_near(x, y, 3e-6 if dtype == torch.float32 else 1e-13)


def test_query_key_and_value_apart(on_gpus, monkeypatch):
    """Programs touch only what is theirs, in memory of nobody."""
    generator = torch.Generator().manual_seed(0)
    shapes = (30, 2, 6), (30, 2, 6), (30, 3, 17), (30, 3)
    given = [torch.randn(x, generator=generator) for x in shapes]
    with watched(1) as problems:
        poison_tensors(monkeypatch)
        outs, *_ = module._forward_inputs(*given, True)
        found = module._backward_inputs(given, True, (), outs, None)
    assert problems == set()
    assert all(x.isfinite().all() for x in (*outs, *found))


def test_large_rows_and_those_that_are_not_numbers(on_gpus):
    """Squares do not overflow, and NaN stays in its row."""
    x = torch.ones(3, 4)
    x[0] *= 1e30
    x[1, 2] = torch.nan
    out = gated_norm(x)
    assert out.isnan().any(1).tolist() == [False, True, False]
    assert_near(out[[0, 2]], torch.ones(2, 4), 1e-5)


@pytest.mark.parametrize(
    ("broken", "match"),
    [(lambda *_: torch.zeros(9, 20), "something else"), (lambda *_: 1 / 0, "division")],
)
def test_kernels_that_fail_are_not_used(on_gpus, monkeypatch, broken, match):
    monkeypatch.setattr(kernels, "forward", broken)
    with pytest.warns(UserWarning, match=match):
        out = gated_norm(torch.ones(2, 4))
    assert_near(out, torch.ones(2, 4), 1e-5)


def test_wide_rows_are_left_to_pytorch(on_gpus):
    with counted() as launches:
        gated_norm(torch.ones(2, module._MOST + 1))
    assert launches == {}
