"""Plain autograd functions, in all that one does with PyTorch's operators."""

import pytest
import torch
from asserts import assert_near
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from pyg_chimera import nn, ops
from pyg_chimera.ops.gated_norm import gated_inputs

EDGES = torch.tensor([[0, 1, 2, 0], [1, 2, 3, 3]])
LAYERS = ["ChimeraConv", "ChimeraDAGConv", "PLSTMConv", "GatedDeltaConv", "RGLRUConv"]


def layer_and_nodes(name, **options):
    torch.manual_seed(0)
    conv = getattr(nn, name)(8, 8, heads=2, **options).double()
    return conv, torch.randn(4, 8, dtype=torch.double, requires_grad=True)


def gradients(conv, out, x):
    return torch.autograd.grad(out.square().sum(), [x, *conv.parameters()])


@pytest.mark.parametrize("name", LAYERS)
def test_checkpointing(name):
    conv, x = layer_and_nodes(name)
    want = gradients(conv, conv(x, EDGES), x)
    for reentrant in (False, True):
        out = checkpoint(conv, x, EDGES, use_reentrant=reentrant)
        if reentrant:
            out.square().sum().backward()
            got = [x.grad, *(p.grad for p in conv.parameters())]
        else:
            got = gradients(conv, out, x)
        for y, z in zip(got, want, strict=True):
            assert_near(y, z)


@pytest.mark.parametrize("name", LAYERS)
def test_tensors_are_unpacked_once(name):
    conv, x = layer_and_nodes(name)
    packed, unpacked = [], []
    with saved_tensors_hooks(
        lambda y: packed.append(0) or y, lambda y: unpacked.append(0) or y
    ):
        out = conv(x, EDGES)
    gradients(conv, out, x)
    assert len(packed) == len(unpacked) > 0


@pytest.mark.parametrize("name", LAYERS)
def test_twice_and_while_operations_are_counted(name):
    conv, x = layer_and_nodes(name)
    out = conv(x, EDGES).square().sum()
    leaves = [x, *conv.parameters()]
    first = torch.autograd.grad(out, leaves, retain_graph=True)
    with FlopCounterMode(display=False):
        second = torch.autograd.grad(out, leaves)
    for y, z in zip(first, second, strict=True):
        assert_near(y, z, 1e-12)


def test_what_is_computed_backward_only_is_counted():
    conv, x = layer_and_nodes("ChimeraConv")
    out = conv(x, EDGES)
    with FlopCounterMode(display=False) as counter:
        out.sum().backward()
    total = sum(lin.weight.numel() for lin in conv.children() if hasattr(lin, "weight"))
    total -= conv.norm.weight.numel()
    assert counter.get_total_flops() == 2 * 2 * len(x) * total


def test_second_derivatives_where_an_output_needs_none():
    query, key, value = torch.randn(3, 4, 2, 3, dtype=torch.double).unbind()
    query.requires_grad_()
    out = gated_inputs(query, key, value, None, True)[0]
    (grad,) = torch.autograd.grad(out.sum(), query, create_graph=True)
    assert grad.requires_grad
    (second,) = torch.autograd.grad(grad.square().sum(), query)
    assert second.isfinite().all()


def test_contents_stay_trusted_in_second_derivatives():
    conv, x = layer_and_nodes("ChimeraDAGConv")
    bad = x.detach().clone()
    bad[0, 0] = torch.nan
    bad.requires_grad_()
    with ops.unchecked():
        out = conv(bad, EDGES)
    (grad,) = torch.autograd.grad(out.sum(), bad, create_graph=True)
    assert grad.isnan().any()


@pytest.mark.parametrize("bad", [-1, 3, 50_000_000])
def test_nodes_that_do_not_exist(bad):
    """Kernels do not look where they write, so somebody has to."""
    edges, t = torch.tensor([[0, 1], [1, bad]]), torch.ones(3, 2)
    with pytest.raises(IndexError, match=rf"\[0, 3\), got (0 to {bad}|{bad} to 1)"):
        ops.chimera_transition(edges, 3, t, t, t)
    for name in LAYERS:
        conv = getattr(nn, name)(4, heads=1)
        with ops.unchecked(), pytest.raises((IndexError, ValueError, RuntimeError)):
            conv(torch.ones(3, 4), edges)
