"""What is special to `RGLRUConv`: on paths it is Griffin."""

import importlib
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from asserts import assert_near
from convs import CASES, CHANNELS, EDGE
from torch_geometric.data import Data
from torch_geometric.explain.algorithm.utils import clear_masks, set_masks

from pyg_chimera import ops
from pyg_chimera.nn import GPSLayer, RGLRUConv, SequenceEncoder
from pyg_chimera.ops import channel_scan


def path(length):
    node = torch.arange(length)
    return torch.stack([node[:-1], node[1:]])


def spread(conv):
    """No parameter is where it starts."""
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.add_(torch.randn_like(parameter) / 3)
    return conv


def test_edges_without_features_are_as_if_they_had_none():
    """Zeros add nothing to the gates."""
    torch.manual_seed(0)
    conv, plain = RGLRUConv(CHANNELS, edge_dim=EDGE), RGLRUConv(CHANNELS)
    state = {x: y for x, y in conv.state_dict().items() if "lin_edge" not in x}
    plain.load_state_dict(state)
    x, index, _, *_ = CASES["RGLRUConv"].inputs(torch.float)
    assert_near(conv(x, index, torch.zeros(6, EDGE)), plain(x, index), 1e-6)


# ---------------------------------------------------------------------- initial values


def decays(conv, num_nodes, index):
    """What the layer hands to the scan, for inputs of zero."""
    module = importlib.import_module("pyg_chimera.nn.conv.rg_lru_conv")
    with patch.object(module, "channel_scan", wraps=channel_scan) as spy:
        conv(torch.zeros(num_nodes, CHANNELS), index)
    return spy.call_args.kwargs["decay"].detach()


@pytest.mark.parametrize("heads", [1, 2])
def test_reach(heads):
    """Influence falls to 1/e after so many steps, evenly spread in each head."""
    conv = RGLRUConv(CHANNELS, heads=heads, bias=False, reach=(2.0, 32.0))
    steps = -1 / decays(conv, 3, path(3))[1].log()
    block = CHANNELS // heads
    want = [2 * 16 ** ((c + 0.5) / block) for c in range(block)] * heads
    assert steps.tolist() == pytest.approx(want, rel=1e-4)


def test_values_of_the_paper():
    torch.manual_seed(0)
    conv = RGLRUConv(CHANNELS, 400, reach=None)
    powers = torch.sigmoid(conv.Lambda.detach()) ** 8
    assert 0.9 <= powers.min() < 0.91
    assert 0.99 < powers.max() <= 0.999
    assert powers.mean().item() == pytest.approx(0.9495, abs=0.01)


def test_scale_is_kept_on_trees():
    """Of independent inputs of variance one, however many generations there are."""
    torch.manual_seed(0)
    depth, conv = 11, RGLRUConv(CHANNELS, conv_kernel=1, bias=False, reach=(2, 8))
    child = torch.arange(1, 2**depth - 1)  # edges lead to the root, 0
    index = torch.stack([child, (child - 1) // 2])
    V = 2**depth - 1
    forget = torch.zeros(V, CHANNELS)
    decay, weight, fresh = conv._transition(index, forget, [(None, V - 2)])
    assert weight is None
    h = channel_scan(fresh.sqrt() * torch.randn(V, CHANNELS), index, decay=decay)
    variances = [h[2**k - 1 : 2 ** (k + 1) - 1].var() for k in range(4, depth)]
    # Leaves write, and have nobody to hear: they are quieter than one.
    assert 0.7 < variances[0] < 1.3
    assert variances[-1] < variances[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("edge_dim", [None, EDGE])
@pytest.mark.parametrize("value", [0.0, 30.0, 1e4, -30.0, -1e4])
def test_gradients_are_finite_wherever_a_is(value, edge_dim, dtype):
    """As it goes to one, the root of 1 - a^2 has an infinite slope."""
    torch.manual_seed(0)
    conv = RGLRUConv(CHANNELS, edge_dim=edge_dim)
    x, index, attr, *_ = CASES["RGLRUConv"].inputs(torch.float)
    attr = None if edge_dim is None else attr.to(dtype)
    for parameter in (conv.Lambda, conv.gate_bias):
        conv.reset_parameters()
        torch.nn.init.constant_(parameter, value)
        conv.to(dtype).zero_grad()
        conv(x.to(dtype), index, attr).float().sum().backward()
        for name, p in conv.named_parameters():
            assert p.grad.isfinite().all(), name
        conv.float()


def test_what_hardly_decays_is_accurate():
    """1 - a^2 of a = 1 - 1e-7 has no digits left in float32, taken as it is written."""
    torch.manual_seed(0)
    conv = RGLRUConv(CHANNELS, reach=(1e6, 1e7))
    x, index = torch.randn(50, CHANNELS), path(50)
    out = conv(x, index)
    assert_near(out, conv.double()(x.double(), index), 1e-5)


# ------------------------------------------------------------------------ continuation


@pytest.mark.parametrize("conv_kernel", [1, 4])
@pytest.mark.parametrize("options", [{}, {"gated": False}, {"released": True}], ids=str)
def test_step_by_step(conv_kernel, options):
    torch.manual_seed(0)
    conv = spread(RGLRUConv(CHANNELS, 6, 2, conv_kernel=conv_kernel, **options))
    x = torch.randn(3, 9, CHANNELS).double()
    index = torch.cat([path(9) + 9 * k for k in range(3)], 1)
    expected = conv.double()(x.flatten(0, 1), index).view(3, 9, 6)
    state = None
    for i in range(9):
        out, state = conv.step(x[:, i], state)
        assert_near(out, expected[:, i])


def test_models_of_sequences():
    """A language model: all at once, step by step, and generated from."""
    torch.manual_seed(0)
    model = SequenceEncoder(
        7, CHANNELS, num_layers=2, mixer=lambda _: RGLRUConv(CHANNELS, heads=2),
        head="lm",
    ).double().eval()  # fmt: skip
    tokens = torch.randint(7, (12,))
    expected = model(**model.inputs(Data(x=tokens, edge_index=path(12))))
    state = None
    for i in range(12):
        out, state = model.step(tokens[i : i + 1], state)
        assert_near(out[0], expected[i])
    assert model.generate(tokens, 5).shape == (17,)


@pytest.mark.parametrize("options", [{"num_dags": 2}, {"edge_dim": 3}])
def test_what_cannot_be_continued(options):
    conv = RGLRUConv(CHANNELS, **options)
    with pytest.raises(ValueError, match="num_dags=1 and edge_dim=None"):
        GPSLayer(CHANNELS, mixer=conv, norm=None).step(torch.randn(2, CHANNELS))


# -------------------------------------------------------------------------- explainers


@pytest.mark.parametrize("edge_dim", [None, EDGE])
def test_masked_edges_pass_nothing_on(edge_dim):
    torch.manual_seed(0)
    conv = RGLRUConv(CHANNELS, edge_dim=edge_dim, conv_kernel=1).double()
    x, index, attr, *_ = CASES["RGLRUConv"].inputs()
    attr = None if edge_dim is None else attr
    set_masks(conv, torch.ones(6), index, apply_sigmoid=False)
    assert_near(conv(x, index, attr), RGLRUConv.forward(conv, x, index, attr))
    clear_masks(conv)
    full = conv(x, index, attr)
    set_masks(conv, torch.zeros(6), index, apply_sigmoid=False)
    masked = conv(x, index, attr)
    clear_masks(conv)
    roots = torch.tensor([0, 3, 4])
    assert_near(masked[roots], full[roots])
    assert not torch.allclose(masked, full)
    if edge_dim is None:
        assert_near(masked, conv(x, index[:, :0]))


def test_masks_are_of_one_dag():
    conv = RGLRUConv(CHANNELS, num_dags=2)
    conv.explain = True
    with pytest.raises(ValueError, match="one graph, not several DAGs"):
        conv(torch.randn(3, CHANNELS), [path(3), path(3).flip(0)])


def test_shut_gates_write_nothing():
    """Nor do they have infinite gradients."""
    conv = RGLRUConv(CHANNELS)
    torch.nn.init.zeros_(conv.gate_weight)
    torch.nn.init.constant_(conv.gate_bias[0], -1e3)  # a is 1
    x = (1e3 * torch.randn(5, CHANNELS)).requires_grad_()
    out = conv(x, path(5))
    assert out.equal(conv.lin_out.bias.expand_as(out))
    out.sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in conv.parameters())


# ------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("name", ["num_dags", "conv_kernel"])
@pytest.mark.parametrize("bad", [0, -1, 1.5, None])
def test_bad_numbers(name, bad):
    with pytest.raises((TypeError, ValueError), match=f"'{name}' must be an integer"):
        RGLRUConv(CHANNELS, **{name: bad})


@pytest.mark.parametrize("reach", [(0.5, 2.0), (8.0, 4.0), 8])
def test_bad_reach(reach):
    with pytest.raises(ValueError, match="'reach' must be two numbers of steps"):
        RGLRUConv(CHANNELS, reach=reach)


# ------------------------------------------------------------------- parts of a DAG


def test_parts_and_their_gradients():
    """On streams: `transforms/test_events_to_dag.py`."""
    conv = spread(RGLRUConv(4, conv_kernel=1).double())
    x = torch.randn(5, 4, dtype=torch.double)
    edges = torch.tensor([[0, 0, 1, 1, 2], [1, 2, 2, 3, 3]])
    whole = conv(x, edges)
    first, state = conv.resume(x[:2], edges[:, :1])
    assert_near(first, whole[:2])
    state = state.detach().requires_grad_()
    out, rest = conv.resume(x, edges[:, 1:], state=state)
    assert_near(out, whole)
    assert rest[:2].equal(state)
    out[3].sum().backward()
    assert (state.grad[:, 1:] != 0).all()
    assert not state.grad[:, 0].any()  # depends on edges alone


def test_bad_parts():
    conv, edges = RGLRUConv(4, conv_kernel=1).double(), path(3)
    x = torch.randn(3, 4, dtype=torch.double)
    out, state = conv.resume(x, edges)
    assert_near(out, conv(x, edges))
    assert state.shape == (3, 5)
    for shape in ((3, 4), (4, 5), (5,)):
        with pytest.raises(ValueError, match=r"'state' must have shape \[K, 5\] .* 3 "):
            conv.resume(x, edges, state=torch.zeros(shape))
    with pytest.raises(ValueError, match=r"lead to the first 2 nodes.*got one to 1"):
        conv.resume(x, edges, state=state[:2])
    for options in ({}, {"num_dags": 2, "conv_kernel": 1}):
        with pytest.raises(ValueError, match="num_dags=1 and conv_kernel=1, got"):
            RGLRUConv(4, **options).resume(x, edges)


def test_resume_checks_what_it_is_given():
    conv, x = RGLRUConv(4, conv_kernel=1), torch.randn(4, 4)
    far = torch.tensor([[0, 0], [1, 40_000_000]])
    for context in (nullcontext, ops.unchecked):
        with context(), pytest.raises((ValueError, IndexError, RuntimeError)):
            conv.resume(x, far)
    with pytest.raises(TypeError, match=r"'state' must be a torch.Tensor"):
        conv.resume(x, far[:, :1], state=[1.0])
    memory = torch.zeros(3, 5)  # of which only the first row has been written
    memory[0] = conv.resume(x[:1], far[:, :0])[1]
    for row in (torch.zeros(5), torch.full((5,), torch.nan)):
        memory[1:] = row
        with pytest.raises(ValueError, match=r"'resume' returned.* row 1, one of 2"):
            conv.resume(x, torch.tensor([[0, 1], [3, 3]]), state=memory)
    with pytest.raises(TypeError, match="'state' must be floating point"):
        conv.resume(x, far[:, :1], state=torch.zeros(1, 5, dtype=torch.long))
