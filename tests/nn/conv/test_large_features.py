"""Features far from size one, such as degrees, counts and coordinates."""

import copy
import math
import sys
from functools import partial
from itertools import product

import mpmath
import pytest
import torch
from asserts import assert_near
from torch import Tensor

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
from pyg_chimera.ops import unchecked

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
    "ChimeraConv": (
        partial(ChimeraConv, state_channels=64, norm=None, qk_norm=False), PATH),
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


FORMS = ("state", "mask", "chunk")


@pytest.mark.parametrize("options", [{}, {"reach": None, "qk_norm": False}])
@pytest.mark.parametrize("scale", [1.0, 100.0, 300.0, 1e3, 1e5, 1e10])
def test_paths_in_hundreds_of_digits(scale, options):
    """Single transitions of this layer may be of any size, as may states."""
    torch.manual_seed(int(math.log(scale)))
    conv = ChimeraPathConv(6, 6, heads=2, state_channels=4, **options)
    x, along, cotangent = scale * torch.randn(30, 6), *torch.randn(2, 30, 6)
    edge_index = PATH[:, ((PATH < 30).all(0))]
    exact, slope = path_layer(conv, x, along, cotangent)
    tolerances = {torch.float: 1e-4, torch.double: 1e-6}
    for (dtype, tolerance), form in product(tolerances.items(), FORMS):
        given, conv.form = x.to(dtype).requires_grad_(), form
        out = conv.to(dtype)(given, edge_index)
        (grad,) = torch.autograd.grad(out, given, cotangent.to(dtype))
        # Nodes are compared one by one, as the largest hides the others.
        error = (out.double() - exact).norm(dim=1) / exact.norm(dim=1)
        assert error.max() < tolerance
        # Rounding errors of outputs are those of features.
        noise = 2 * torch.finfo(dtype).eps * scale
        size = (grad * along).abs().sum().item()
        assert abs((grad * along).sum().item() - slope) < tolerance * size + noise


def path_layer(
    conv: torch.nn.Module, x: Tensor, along: Tensor, cotangent: Tensor
) -> tuple[Tensor, float]:
    """`ChimeraPathConv` on a path from node to node, and the derivative of an output
    times a cotangent. All but products with weights is computed with 400 digits.
    """
    with mpmath.workdps(400):
        step = mpmath.mpf(10) ** -200
        out, other = (path_outputs(conv, x, along, t) for t in (0, step))
        weight = conv.norm.weight.detach() * (cotangent @ conv.lin_out.weight.detach())
        weight = weight.double().flatten().tolist()
        slope = (
            sum(w * (b - a) for w, a, b in zip(weight, out, other, strict=True)) / step
        )
        y = torch.tensor([float(a) for a in out], dtype=torch.double).view(len(x), -1)
    lin = conv.lin_out
    y = y * conv.norm.weight.detach().double() @ lin.weight.detach().double().t()
    return y + lin.bias.detach().double(), float(slope)


def path_outputs(conv: torch.nn.Module, x: Tensor, along: Tensor, step) -> list:
    """What enters the last projection, but for the norm's weight, at x + step along."""
    n, heads, size = len(x), conv.heads, conv.state_channels

    def lin(name: str, bias: Tensor | float = 0.0) -> list:
        """[nodes][channels]"""
        lin = conv.get_submodule(f"lin_{name}")
        weight = lin.weight.detach().double().t()
        bias = bias if lin.bias is None else lin.bias
        at = x.double() @ weight + bias
        slope = along.double() @ weight
        return [
            [mpmath.mpf(a) + step * b for a, b in zip(*row, strict=True)]
            for row in zip(at.tolist(), slope.tolist(), strict=True)
        ]

    def activated(name: str) -> list:
        return [[z / (1 + mpmath.exp(-z)) for z in row] for row in lin(name)]

    def unit(row: list) -> list:
        root = mpmath.sqrt(sum(z * z for z in row) / len(row) + mpmath.mpf(1e-5))
        return [z / root for z in row]

    query, key, value = (activated(name) for name in ("query", "key", "value"))
    if conv.qk_norm:
        query = [[z / mpmath.sqrt(size) for z in unit(row)] for row in query]
        key = [unit(row) for row in key]
    gates = lin("delta", conv.delta_bias.detach().double().flatten())
    gates = [[mpmath.log1p(mpmath.exp(z)) for z in row] for row in gates]
    width = conv.out_channels // heads
    skip = conv.skip.tolist()
    y = [[skip[c // width] * z for c, z in enumerate(row)] for row in value]
    for h in range(heads):
        target, source, psi, write = (
            [row[g * heads + h] for row in gates] for g in range(4)
        )
        system = mpmath.eye(n)
        for i in range(n - 1):
            there = mpmath.exp(-(target[i + 1] + source[i]) / 2)
            back = mpmath.exp(-(target[i] + source[i + 1]) / 2)
            margin = mpmath.exp(-(psi[i] + psi[i + 1]) / 2)
            bound = 2 * mpmath.sqrt(there * back + margin)
            system[i + 1, i], system[i, i + 1] = -there / bound, -back / bound
        mixed = inverse(system)
        for i in range(n):
            for j in range(n):
                score = sum(a * b for a, b in zip(query[i], key[j], strict=True))
                weight = mixed[i, j] * score * write[j]
                for c in range(h * width, (h + 1) * width):
                    y[i][c] += weight * value[j][c]
    gate = activated("gate")
    return [
        a * b
        for row, gates in zip(map(unit, y), gate, strict=True)
        for a, b in zip(row, gates, strict=True)
    ]


def inverse(system: mpmath.matrix) -> mpmath.matrix:
    """Of a tridiagonal matrix with ones on the diagonal, by Thomas' algorithm."""
    n = system.rows
    out, pivot = mpmath.eye(n), [mpmath.mpf(1)]
    for i in range(1, n):
        factor = system[i, i - 1] / pivot[-1]
        pivot.append(1 - factor * system[i - 1, i])
        for j in range(i):
            out[i, j] -= factor * out[i - 1, j]
    for i in reversed(range(n)):
        for j in range(n):
            if i + 1 < n:
                out[i, j] -= system[i, i + 1] * out[i + 1, j]
            out[i, j] /= pivot[i]
    return out


def test_what_states_cannot_hold_is_nan_where_contents_are_not_read():
    """Rather than wrong. Otherwise, such states are computed again."""
    torch.manual_seed(21)
    conv, x = ChimeraPathConv(8, 8, heads=2, state_channels=4), 300 * torch.randn(40, 8)
    edge_index = PATH[:, ((PATH < 40).all(0))]
    exact = conv(x, edge_index)
    with unchecked():
        out = conv(x, edge_index)
    lost = out.isnan().all(1)
    assert 0 < lost.sum() < 20
    assert_near(out[~lost], exact[~lost], 1e-4)
    # Compiled, it is computed in float64.
    compiled = torch.compile(conv, backend="aot_eager", fullgraph=True)
    assert_near(compiled(x, edge_index), exact, 1e-4)
