"""Features far from size one, such as degrees, counts and coordinates."""

import copy
import sys
from functools import partial

import mpmath
import pytest
import torch
from asserts import assert_near
from torch import Tensor
from torch.nn.functional import silu, softplus

from pyg_chimera.nn import (
    ChimeraConv,
    ChimeraDAGConv,
    ChimeraGridConv,
    ChimeraPathConv,
    GatedDeltaConv,
    GraphMambaConv,
    PLSTMConv,
    PLSTMGridConv,
    RGLRUConv,
)

TRANSITIONS = sys.modules["pyg_chimera.ops.chimera_transition"]
LEAST_MARGIN = TRANSITIONS.LEAST_MARGIN
PLACES = torch.arange(255)
DAG = torch.stack([PLACES, PLACES + 1])
PATH = torch.cat([DAG, DAG.flip(0)], dim=1)
LAYERS = {
    "ChimeraConv": (partial(ChimeraConv, heads=4), PATH),
    "ChimeraConv-products": (partial(ChimeraConv, heads=4, qk_norm=False), PATH),
    "ChimeraPathConv": (partial(ChimeraPathConv, heads=4), PATH),
    "ChimeraDAGConv": (partial(ChimeraDAGConv, heads=4), DAG),
    "ChimeraDAGConv-products": (partial(ChimeraDAGConv, heads=4, qk_norm=False), DAG),
    "ChimeraGridConv": (partial(ChimeraGridConv, heads=4, qk_norm=False), None),
    "PLSTMConv": (partial(PLSTMConv, heads=4), DAG),
    "PLSTMGridConv": (partial(PLSTMGridConv, heads=4), None),
    "RGLRUConv": (RGLRUConv, DAG),
    "GatedDeltaConv": (partial(GatedDeltaConv, heads=4, acyclic=True), DAG),
    "GraphMambaConv": (partial(GraphMambaConv, order="order"), DAG),
}


def call(conv: torch.nn.Module, x: Tensor, edge_index: Tensor | None) -> Tensor:
    if edge_index is None:
        return conv(x, height=16, width=16)
    return conv(x, edge_index)


@pytest.mark.parametrize("scale", [1.0, 10.0, 50.0])
@pytest.mark.parametrize("name", LAYERS)
def test_float16_does_not_overflow(name, scale):
    """In recurrences, whose results a norm then brings back to size one."""
    make, edge_index = LAYERS[name]
    conv, x = make(64).eval(), scale * torch.randn(256, 64)
    expected = call(conv, x, edge_index)
    with torch.autocast("cpu", dtype=torch.float16):
        mixed = call(conv, x, edge_index)
    half = call(copy.deepcopy(conv).half(), x.half(), edge_index)
    for out in (mixed, half):
        error = (out.float() - expected).abs().mean() / expected.abs().mean()
        assert error < 0.02 * max(1, scale / 10)  # NaN is not less


AMPLITUDES = {
    "ChimeraConv": (partial(ChimeraConv, norm=None, qk_norm=False), PATH),
    "ChimeraConv-plain": (
        partial(ChimeraConv, norm=None, qk_norm=False, gated=False), PATH),
    "RGLRUConv": (RGLRUConv, DAG),
}  # fmt: skip


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("scale", [10.0, 60.0, 100.0])
@pytest.mark.parametrize("name", AMPLITUDES)
def test_float16_without_a_norm_is_infinite_only_where_it_must(name, scale, mixed):
    make, edge_index = AMPLITUDES[name]
    index = edge_index[:, (edge_index < 40).all(0)]
    conv, x = make(8, heads=2).eval().half(), (scale * torch.randn(40, 8)).half()
    expected = copy.deepcopy(conv).double()(x.double(), index)
    if mixed:
        with torch.autocast("cpu", dtype=torch.float16):
            out = conv.float()(x.float(), index)
    else:
        out = conv(x, index)
    assert not out.isnan().any()
    fits = expected.abs() < 6e4
    assert fits.any()
    assert out[fits].isfinite().all()
    largest = expected.abs().clamp(max=6e4).max()
    assert (out[fits] - expected[fits]).abs().max() < 0.02 * largest


def test_gradients_in_float16_of_a_gate_before_the_norm():
    """Those of the gate itself are beyond float16, where it is nearly shut."""
    conv = ChimeraDAGConv(8, 8, heads=2, qk_norm=False, norm_before_gate=False).half()
    for _ in range(5):
        x = (1e3 * torch.randn(50, 8)).half().requires_grad_()
        conv(x, DAG[:, :49]).sum().backward()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("scale", [1e-3, 20.0, 1e3, 1e5])
@pytest.mark.parametrize("name", LAYERS)
def test_float32_agrees_with_float64(name, scale, monkeypatch):
    """Outputs and gradients, up to what rounding of gates of that size explains."""
    make, edge_index = LAYERS[name]
    conv, x = make(64).eval(), (scale * torch.randn(256, 64)).requires_grad_()
    cotangent = torch.randn(256, 64)
    out = call(conv, x, edge_index)
    out.backward(cotangent)
    # With ranges that end where those of float32 do.
    ratio = torch.finfo(torch.float32).eps / torch.finfo(torch.float64).eps
    monkeypatch.setattr(TRANSITIONS, "LEAST_MARGIN", LEAST_MARGIN * ratio)
    wide = x.detach().double().requires_grad_()
    exact = call(copy.deepcopy(conv).double(), wide, edge_index)
    exact.backward(cotangent.double())
    tolerance = 5e-5 + 5e-7 * scale
    assert_near(out.double(), exact, tolerance)
    assert_near(x.grad.double(), wide.grad, 4 * tolerance)


@pytest.mark.parametrize("options", [{}, {"reach": None}])
@pytest.mark.parametrize("scale", [1.0, 120.0, 300.0])
def test_paths_in_hundreds_of_digits(scale, options):
    """Single transitions of this layer may be of any size, such as 10^50."""
    conv = ChimeraPathConv(6, 6, heads=2, state_channels=4, **options)
    x = scale * torch.randn(9, 6)
    edge_index = PATH[:, ((PATH < 9).all(0))]
    exact = path_layer(conv, x, edge_index.t().tolist())
    assert_near(conv(x, edge_index).double(), exact, 1e-4)
    assert_near(conv.double()(x.double(), edge_index), exact, 1e-8)


def path_layer(conv: torch.nn.Module, x: Tensor, edges: list) -> Tensor:
    """The formula of `ChimeraPathConv`, by inverting I - A with 400 digits."""
    p = {name: y.detach().double() for name, y in conv.named_parameters()}
    x, heads = x.double(), conv.heads

    def lin(name: str) -> Tensor:
        return x @ p[f"{name}.weight"].t() + p.get(f"{name}.bias", 0)

    value, key, query = (silu(lin(f"lin_{y}")) for y in ("value", "key", "query"))
    key, query = (y / (y.square().mean(1, True) + 1e-5).sqrt() for y in (key, query))
    scores = (query @ key.t() / conv.state_channels**0.5).tolist()
    delta = softplus(lin("lin_delta").view(-1, 4, heads) + p["delta_bias"])
    value = value.view(len(x), heads, -1)
    rows = []
    with mpmath.workdps(400):
        exp = mpmath.exp
        for h in range(heads):
            target, source, psi, write = map(mpmath.matrix, delta[..., h].t().tolist())
            a = {(i, j): exp(-(target[i] + source[j]) / 2) for j, i in edges}
            system = mpmath.eye(len(x))
            for i, j in a:
                margin = exp(-(psi[i] + psi[j]) / 2)
                system[i, j] -= a[i, j] / (2 * mpmath.sqrt(a[i, j] * a[j, i] + margin))
            mixed = system**-1
            v = value[:, h].tolist()
            for i in range(len(x)):
                y = [p["skip"][h].item() * z for z in v[i]]
                for j in range(len(x)):
                    weight = mixed[i, j] * scores[i][j] * write[j]
                    y = [total + weight * z for total, z in zip(y, v[j], strict=True)]
                rows.append(y)
        out = []
        for i in range(len(x)):
            y = [z for h in range(heads) for z in rows[h * len(x) + i]]
            root = mpmath.sqrt(sum(z * z for z in y) / len(y) + mpmath.mpf(1e-5))
            out.append([float(z / root) for z in y])
    y = torch.tensor(out, dtype=torch.double) * p["norm.weight"] * silu(lin("lin_gate"))
    return y @ p["lin_out.weight"].t() + p["lin_out.bias"]
