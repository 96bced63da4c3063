"""What is special to the hybrid layers; the rest is in the suites of all layers."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from asserts import assert_near
from convs import CASES, CHANNELS, DAGS
from dense_hybrids import HYBRIDS, dense
from dense_layers import Graphs
from torch import Tensor
from torch.func import functional_call

from pyg_chimera.nn import (
    DifferentialAttentionConv,
    DifferentialGatedDeltaConv,
    DifferentialSelfAttention,
    GatedDeltaConv,
    GPSLayer,
    HierarchicalMemoryConv,
    LatentAttentionConv,
    SurpriseGatedDeltaConv,
    WindowAttentionConv,
)
from pyg_chimera.ops import CycleError

KINDS = [name for name in CASES if name.partition("-")[0] in HYBRIDS]
C = CHANNELS


def path(size: int) -> Tensor:
    return torch.stack([torch.arange(size - 1), torch.arange(1, size)])


def randomized(conv: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for parameter in conv.double().parameters():
            parameter.copy_(torch.randn_like(parameter) / 2)
    return conv.eval()


# ------------------------------------------------------------------------- the formulas


def assert_all_near(names, found, wanted):
    """Up to rounding errors of the largest number: a softmax has no use for biases."""
    largest = max(float(y.abs().max()) for y in wanted if y is not None)
    for name, got, want in zip(names, found, wanted, strict=True):
        assert (got is None) == (want is None), name
        if want is not None:
            assert (got - want).abs().max() <= 1e-9 * largest, name


@pytest.mark.parametrize("name", KINDS)
def test_the_formula(name: str):
    """By loops in float64: outputs, and the gradients of all there is."""
    case = CASES[name]
    conv, inputs = case.trained(), case.inputs()
    leaves = {"x": inputs.x, "edge_attr": inputs.edge_attr, **dict(
        conv.named_parameters())}  # fmt: skip
    leaves = {k: v.detach().clone().requires_grad_() for k, v in leaves.items()}
    own = {k: v for k, v in leaves.items() if k not in ("x", "edge_attr")}
    edge_attr = leaves["edge_attr"] if conv.edge_dim else None

    index, batch = inputs.edge_index, inputs.batch
    args = (leaves["x"], index, edge_attr, batch)
    graphs = Graphs([index], None if edge_attr is None else [edge_attr], batch)
    outs = functional_call(conv, own, args), dense(conv, own, leaves["x"], graphs)
    weigh = torch.randn_like(outs[0])
    grads = [
        torch.autograd.grad((y * weigh).sum(), list(leaves.values()), allow_unused=True)
        for y in outs
    ]
    assert_near(*outs)
    assert_all_near(leaves, *grads)


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": True, "rotary": "sequence"}, {"depth": 3}],
    ids=str,
)
def test_the_formula_of_dense_attention(options: dict):
    conv = randomized(DifferentialSelfAttention(C, 2, **options))
    x = torch.randn(2, 5, C, dtype=torch.double, requires_grad=True)
    mask = torch.arange(5) < torch.tensor([[5], [3]])
    own = dict(conv.named_parameters())
    formula = {**options, "rotary": "rotary" in options}
    out = conv(x, mask)
    for i, n in enumerate((5, 3)):
        want = dense(conv, own, x[i, :n], Graphs([]), **formula)
        assert_near(out[i, :n], want)
        leaves = {"x": x, **own}
        grads = [
            torch.autograd.grad(y.sin().sum(), list(leaves.values()), retain_graph=True)
            for y in (out[i, :n], want)
        ]
        assert_all_near(leaves, *grads)


TINY = {
    "surprise": partial(SurpriseGatedDeltaConv, conv_kernel=1, state_channels=2),
    "memories": partial(HierarchicalMemoryConv, conv_kernel=1, state_channels=2),
    "differential": partial(DifferentialGatedDeltaConv, state_channels=2),
    "attention": DifferentialAttentionConv,
    "latent": LatentAttentionConv,
    "window": partial(WindowAttentionConv, k=2, stretch=3),
}


@pytest.mark.parametrize("name", TINY)
def test_gradients_by_differences(name: str):
    conv = randomized(TINY[name](4, heads=2))
    own = dict(conv.named_parameters())
    index = torch.tensor([[0, 1, 0, 0], [1, 2, 2, 2]])

    def function(x: Tensor, *parameters: Tensor) -> Tensor:
        return functional_call(
            conv, dict(zip(own, parameters, strict=True)), (x, index)
        )

    x = torch.randn(3, 4, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x, *own.values()))


# ----------------------------------------------------------------------------- surprise


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_surprise_between_half_and_all(share: float):
    """At temperatures of infinity and zero, it is the gated delta rule, with half of
    beta or all of it.
    """
    conv = randomized(SurpriseGatedDeltaConv(C, heads=2))
    plain = GatedDeltaConv(C, heads=2, acyclic=True).double()
    state = conv.state_dict()
    state.pop("log_temperature")
    plain.load_state_dict(state)
    conv.log_temperature.data.fill_(50.0 if share == 0.5 else -50.0)
    index, x = torch.tensor(DAGS[0]).t(), torch.randn(7, C, dtype=torch.double)
    out = conv(x, index)
    if share == 0.5:
        plain.recalled = lambda q, k, v, beta, *graph: GatedDeltaConv.recalled(
            plain, q, k, v, beta / 2, *graph
        )
    assert_near(out, plain(x, index), 1e-6)


def test_cycles():
    index = torch.tensor([[0, 1], [1, 0]])
    for make in (SurpriseGatedDeltaConv, HierarchicalMemoryConv):
        assert make(C)(torch.randn(2, C), index).shape == (2, C)
        with pytest.raises(CycleError, match="0 -> 1 -> 0"):
            make(C, order=None)(torch.randn(2, C), index)


# --------------------------------------------------------------------- how layers start


def test_how_fast_memories_forget_at_first():
    """And that all are read alike."""
    conv = HierarchicalMemoryConv(C, heads=2)
    lost = F.softplus(conv.delta_bias[0]).unflatten(0, (2, 3))
    decays = torch.tensor([0.8, 0.99, 0.999]).expand(2, -1)
    assert_near(torch.exp(-lost), decays, 1e-6)
    assert not conv.delta_bias[-1].any()
    assert not conv.log_temperature.any()


def test_lambda_starts_by_depth():
    """As published: 0.2 in the first layer, nearly 0.8 in the last ones, and near it
    for each head.
    """
    for depth, start in ((1, 0.2), (4, 0.8 - 0.6 * math.exp(-0.9)), (30, 0.7999)):
        for make in (DifferentialAttentionConv, DifferentialGatedDeltaConv):
            assert abs(make(8, depth=depth).contrast.initial - start) < 1e-4
    contrast = DifferentialSelfAttention(64, 4).contrast
    query, key = contrast.weight.unbind(1)
    grown, shrunk = (query * key).sum(-1).exp()
    assert grown.shape == (4,)
    assert (grown - shrunk).abs().max() < 0.5
    assert (contrast.weight.std() - 0.1).abs() < 0.02


def test_what_is_alike_cancels():
    """Equal memories and a factor of one: only the skip connection is left."""
    conv = randomized(DifferentialGatedDeltaConv(C, heads=2, acyclic=True))
    with torch.no_grad():
        conv.contrast.weight.zero_()
        conv.lin_delta.weight.zero_()
        conv.delta_bias.fill_(-1.0)
    conv.contrast.initial, index = 1.0, path(6)
    x = torch.randn(6, C, dtype=torch.double)
    without = conv(x, index)
    conv.recalled = lambda q, k, v, *_: torch.zeros_like(v)
    assert_near(without, conv(x, index), 1e-9)


def test_equal_maps_in_half_precision():
    """Their difference is small if the factor is near one, and then normalized."""
    conv, index = DifferentialAttentionConv(8), torch.empty(2, 0).long()
    with torch.no_grad():
        conv.contrast.weight.zero_()
    conv.contrast.initial = 1.001
    x = 1e3 * torch.randn(5, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = conv(x, index)
    assert_near(out, conv(x, index), 0.05)


# ---------------------------------------------------------------------------- attention


def test_a_sequence_is_continued():
    conv = randomized(DifferentialSelfAttention(C, 2, rotary="sequence", causal=True))
    x, state = torch.randn(6, C, dtype=torch.double), None
    for i, row in enumerate(conv(x.unsqueeze(0))[0]):
        out, state = conv.step(x[i : i + 1], state)
        assert_near(out[0], row)


def test_as_a_mixer():
    x, index = torch.randn(7, C), torch.tensor(DAGS[0]).t()
    batch = torch.tensor([0, 0, 0, 1, 2, 2, 0])
    layer = GPSLayer(C, mixer=DifferentialSelfAttention(C, 2), norm="layer_norm").eval()
    out = layer(x, index, batch)
    for graph in (0, 1, 2):
        alone = layer(x[batch == graph], index[:, :0])
        assert_near(out[batch == graph], alone, 1e-5)


def test_a_stretch_of_positions():
    """The nearest pair turns as before, the last one as if positions were nearer."""
    conv = randomized(WindowAttentionConv(8, heads=1, k=3))
    like, index = torch.zeros(9, 1, 8, dtype=torch.double), path(9)
    before = conv._angles(index, None, like)
    conv.stretch = 4.0
    after = conv._angles(index, None, like)
    assert_near(after[..., 0], before[..., 0])
    assert_near(after[..., -1], before[..., -1] / 4)
    places = torch.rand(9, 2, dtype=torch.double)
    two = conv._angles(index, places, like).unflatten(2, (2, 2))
    assert_near(two[:, 0, :, 0], places)


def test_groups_of_windows():
    for heads, groups in ((8, 2), (4, 1), (2, 1), (9, 1), (10, 2)):
        assert WindowAttentionConv(heads * 2, heads=heads).groups == groups
    assert WindowAttentionConv(8, heads=4, groups=4).groups == 4


def test_latent_keys_are_narrow():
    conv = LatentAttentionConv(64, heads=4)
    assert conv.lin_latent.out_channels == conv.lin_key.in_channels == 16
    x, path_of_two = torch.randn(2, 64), path(2)
    other = x.clone()  # what a null vector of the latent projection adds is not seen
    _, _, null = torch.linalg.svd(conv.lin_latent.weight)
    other[0] += null[-1].detach()
    assert_near(conv(other, path_of_two)[1], conv(x, path_of_two)[1], 1e-5)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (
            lambda: DifferentialAttentionConv(8, depth=0),
            "'depth' must be an integer >=",
        ),
        (
            lambda: DifferentialGatedDeltaConv(8, depth=0),
            "'depth' must be an integer >",
        ),
        (
            lambda: DifferentialSelfAttention(6, 2),
            "multiple of 2 channels.*got 2 heads",
        ),
        (
            lambda: DifferentialSelfAttention(12, 2, rotary="sequence"),
            "multiple of 4 channels.*got 2 heads of 6",
        ),
        (
            lambda: LatentAttentionConv(8, latent_channels=0),
            "'latent_channels' must be",
        ),
        (lambda: SurpriseGatedDeltaConv(8, form="mask"), "'form' must be one of"),
        (lambda: SurpriseGatedDeltaConv(8, order="bfs"), "'order' must be one of"),
        (lambda: WindowAttentionConv(8, stretch=0.5), "'stretch' must be at least 1"),
        (lambda: WindowAttentionConv(8, heads=4, groups=3), "'groups' must divide"),
    ],
)
def test_bad_options(make, match):
    with pytest.raises(ValueError, match=match):
        make()
