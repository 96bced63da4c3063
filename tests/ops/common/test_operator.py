"""A new backend is a module and one line."""

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from pyg_chimera.ops import causal_conv1d, explain, selective_scan
from pyg_chimera.ops.causal_conv1d import op as conv_op
from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.operator import OPERATORS, _Header
from pyg_chimera.ops.common.torch_private import NOT_IN_CUDA_GRAPHS


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


def test_compilers_do_not_break_the_graph(dummy):
    """Not even if not asked to, as they do at operators of results of unknown size."""
    counted = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(causal_conv1d, backend=counted)
    inputs = _inputs()
    out = compiled(*inputs, backend="dummy")
    torch.testing.assert_close(out, causal_conv1d(*inputs, backend="reference"))
    assert counted.frame_count == 1


def test_what_is_saved_lives_as_long_as_the_header(dummy):
    """A copy of the header computes it again."""
    operator = conv_op._causal_conv1d
    tensors = [y.detach() for y in _inputs()]
    inputs = conv_op.Inputs(*tensors, torch.tensor([0, 5]), "dummy")
    out, header = operator._forward(*inputs)
    copied, products = header.clone(), weakref.ref(_Header.decode(header)[1][0])
    assert torch.equal(products(), tensors[0] * tensors[1][:, 0])
    grads = operator._backward(torch.ones_like(out), None, header, *inputs)
    del header
    assert products() is None
    assert _Header.decode(copied)[1] is None
    again = operator._backward(torch.ones_like(out), None, copied, *inputs)
    torch.testing.assert_close(grads, again)


@pytest.mark.skipif(not NOT_IN_CUDA_GRAPHS, reason="this PyTorch has no such tag")
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_that_read_tensors_are_left_out_of_cuda_graphs(name):
    for op in (name, f"{name}_backward"):
        registered = getattr(torch.ops.pyg_chimera, op).default
        assert torch._C.Tag.cudagraph_unsafe in registered.tags
