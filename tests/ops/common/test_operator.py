"""A new backend is a module and one line."""

from types import SimpleNamespace

import pytest
import torch

from pyg_chimera.ops import causal_conv1d, explain, selective_scan
from pyg_chimera.ops.causal_conv1d import op as conv_op
from pyg_chimera.ops.common.dispatch import Call


def _forward(call: Call):
    x, weight, bias, _ = call.inputs[:4]
    products = x * weight[:, 0]
    return products + bias, (products, weight[:, 0].exp())


def _backward(call: Call, saved, grad):
    x, weight, _, _ = call.inputs[:4]
    products, exponentials = saved
    assert torch.equal(products, x * weight[:, 0])  # as they were saved
    assert torch.equal(exponentials, weight[:, 0].exp())
    return grad * weight[:, 0], (grad * x).sum(0).unsqueeze(1), grad.sum(0)


def _why_not(call: Call):
    return None if call.inputs.weight.size(1) == 1 else "dummy has filters of one row"


DUMMY = SimpleNamespace(
    DEVICES=("cpu",), why_not=_why_not, forward=_forward, backward=_backward
)


@pytest.fixture
def dummy(monkeypatch):
    monkeypatch.setitem(conv_op._causal_conv1d.backends, "dummy", DUMMY)


def _inputs(size=1):
    x, bias = torch.randn(5, 3).double(), torch.randn(3).double()
    weight = torch.randn(3, size).double()
    return [leaf.requires_grad_() for leaf in (x, weight, bias)]


def test_a_backend_of_ones_own(dummy):
    inputs = _inputs()
    assert explain("causal_conv1d", *inputs, backend="dummy").backend == "dummy"
    results = []
    for backend in ("dummy", "reference"):
        out = causal_conv1d(*inputs, activation="silu", backend=backend)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for x, y in zip(*results, strict=True):
        torch.testing.assert_close(x, y)
    compiled = torch.compile(causal_conv1d, fullgraph=True, backend="aot_eager")
    out = compiled(*inputs, activation="silu", backend="dummy")
    torch.testing.assert_close(out, results[1][0])
    grads = torch.autograd.grad(out.square().sum(), inputs)
    torch.testing.assert_close(list(grads), results[1][1:])


def test_its_verdict_is_heard(dummy):
    with pytest.raises(ValueError, match="filters of one row"):
        causal_conv1d(*_inputs(2), backend="dummy")
    assert explain("causal_conv1d", *_inputs(2)).backend == "numba"
    with pytest.raises(ValueError, match=r"'backend'.*'dummy'"):
        selective_scan(*(torch.ones(2, 2) for _ in range(5)), backend="dummy")


def test_it_is_preferred_if_it_comes_first(monkeypatch):
    operator = conv_op._causal_conv1d
    monkeypatch.setattr(operator, "backends", {"dummy": DUMMY, **operator.backends})
    assert explain("causal_conv1d", *_inputs()).backend == "dummy"
    assert explain("causal_conv1d", *_inputs(2)).backend == "numba"
