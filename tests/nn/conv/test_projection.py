"""Several projections at once: equal to each one alone, and no hook is left out."""

import copy

import pytest
import torch
from asserts import assert_near
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import weight_norm
from torch_geometric.nn.dense.linear import Linear

from pyg_chimera.nn import ChimeraConv, GatedDeltaConv, GraphMambaConv
from pyg_chimera.nn.conv._init import GateLinear
from pyg_chimera.nn.conv._projection import is_plain, projected


def layers(bias=True):
    torch.manual_seed(0)
    made = [Linear(6, 3, bias=bias), Linear(6, 4, bias=bias), GateLinear(6, 2, std=1.0)]
    return [lin.double() for lin in made]


def results(function, x, lins):
    x = x.clone().requires_grad_()
    outs = function(x, lins)
    weights = [p for lin in lins for p in lin.parameters()]
    loss = sum((out * out.detach().cos()).sum() for out in outs)
    return [*outs, *torch.autograd.grad(loss, [x, *weights])]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_outputs_and_gradients(bias, rows):
    x, lins = torch.randn(rows, 6).double(), layers(bias)
    got = results(projected, x, lins)
    want = results(lambda x, lins: [lin(x) for lin in lins], x, lins)
    assert len(got) == len(want)
    for y, z in zip(got, want, strict=True):
        assert_near(y, z, 1e-12)


def test_gradcheck_of_second_order():
    lins = layers()
    leaves = [torch.randn(3, 6).double().requires_grad_()]

    def run(x):
        return tuple(y.square() for y in projected(x, lins))

    assert torch.autograd.gradcheck(run, leaves)
    assert torch.autograd.gradgradcheck(run, leaves)


def test_hooks_and_adapters_are_called():
    x, lins = torch.randn(4, 6).double(), layers()
    seen = []
    lins[1].register_forward_hook(lambda *_: seen.append("hook"))
    assert not is_plain(lins[1])
    projected(x, lins)
    assert seen == ["hook"]

    class Adapter(torch.nn.Module):
        def __init__(self, lin):
            super().__init__()
            self.lin = lin

        def forward(self, x):
            return 2 * self.lin(x)

    plain = layers()
    got = projected(x, [plain[0], Adapter(plain[1])])
    assert_near(got[1], 2 * plain[1](x), 1e-12)


def test_lazy_layers_take_the_size_of_the_input():
    torch.manual_seed(0)
    lins = [Linear(-1, 3), Linear(-1, 2)]
    x = torch.randn(4, 6)
    first = projected(x, lins)
    assert lins[0].weight.shape == (3, 6)
    for y, z in zip(first, projected(x, lins), strict=True):
        assert torch.equal(y, z)


def test_autocast_and_half_precision():
    x, lins = torch.randn(4, 6), [lin.float() for lin in layers()]
    want = [lin(x) for lin in lins]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = projected(x, lins)
    for y, z in zip(got, want, strict=True):
        assert y.dtype == torch.float32
        assert_near(y, z, 0.05)
    for y, z in zip(
        projected(x.bfloat16(), [lin.bfloat16() for lin in lins]), want, strict=True
    ):
        assert y.dtype == torch.float32
        assert_near(y, z, 0.05)


def test_hooks_of_all_modules_are_called():
    seen = []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, *_: seen.append(module)
    )
    try:
        lins = layers()
        projected(torch.randn(2, 6).double(), lins)
    finally:
        handle.remove()
    assert seen == lins


def test_weights_of_another_kind_are_left_to_their_layer():
    class Quantized(torch.nn.Parameter):
        pass

    lins = layers()
    lins[0].weight = Quantized(lins[0].weight.detach())
    assert not is_plain(lins[0])
    assert is_plain(lins[1])


@pytest.mark.parametrize("make", [ChimeraConv, GatedDeltaConv])
def test_parametrized_layers_are_copied(make):
    torch.manual_seed(0)
    conv, edge_index = make(8), torch.tensor([[0, 1, 2], [1, 2, 0]])
    for module in list(conv.modules()):
        if isinstance(module, Linear):
            weight_norm(module)
    x = torch.randn(3, 8)
    out = conv(x, edge_index)
    again = copy.deepcopy(conv)
    assert torch.equal(again(x, edge_index), out)
    with torch.no_grad():
        again.lin_delta.parametrizations.weight.original0.mul_(2)
    assert not torch.equal(again(x, edge_index), out)
    assert torch.equal(conv(x, edge_index), out)


@pytest.mark.parametrize("make", [ChimeraConv, GraphMambaConv])
def test_pruned_layers_are_trained(make):
    torch.manual_seed(0)
    conv, edge_index = make(8).eval(), torch.tensor([[0, 1, 2], [1, 2, 0]])
    pruned = [(x, "weight") for x in conv.modules() if isinstance(x, torch.nn.Linear)]
    pruned += [(x, "weight") for x in conv.modules() if isinstance(x, Linear)]
    prune.global_unstructured(pruned, prune.L1Unstructured, amount=0.3)
    x, before = torch.randn(3, 8), None
    for _ in range(2):  # hooks compute weights anew for each step
        conv.zero_grad()
        conv(x, edge_index).square().sum().backward()
        grads = [module.weight_orig.grad.clone() for module, _ in pruned]
        assert before is None or all(map(torch.equal, grads, before))
        before = grads
