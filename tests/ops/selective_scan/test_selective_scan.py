import math
import sys
import types
import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from asserts import assert_near
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit
from poison import poison

from pyg_chimera.ops import causal_conv1d, explain, selective_scan
from pyg_chimera.ops.resolvent import numba_ as threads
from pyg_chimera.ops.selective_scan import mamba_ssm_, numba_, scan

GOLDEN = Path(__file__).parents[2] / "golden" / "selective_scan.npz"
BACKENDS = ("reference", "torch", "numba", "auto")
backends = pytest.mark.parametrize("backend", BACKENDS)
#: Sizes of sequences, channels, states: odd ones, spans and blocks of the kernels.
SHAPES = {
    "none": ((), 3, 2),
    "empty": ((0,), 3, 2),
    "one_row": ((1,), 1, 1),
    "several": ((5, 0, 1, 7, 0), 3, 4),
    "spans": ((31, 32, 33, 63, 2), 5, 3),
    "blocks": ((150, 3, 129, 1), 2, 2),
    "slices": ((9, 4), 71, 2),
}
shapes = pytest.mark.parametrize("shape", SHAPES)
NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias")


def make(sizes, channels, states, dtype=torch.float64, seed=0):
    """Arguments of a scan, without the options."""
    g = torch.Generator().manual_seed(seed)
    rows = sum(sizes)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    return {
        "u": draw(rows, channels),
        "delta": draw(rows, channels),
        "A": -draw(channels, states).exp(),
        "B": draw(rows, states),
        "C": draw(rows, states),
        "D": draw(channels),
        "z": draw(rows, channels),
        "delta_bias": draw(channels),
    }


def as_ptr(sizes):
    return torch.tensor([0, *sizes]).cumsum(0)


def oracle(u, delta, A, B, C, D, z, delta_bias, sizes):
    """From the formula, as one matrix per sequence, channel and state."""
    delta = F.softplus(delta + delta_bias)
    outs = [u[:0]]
    for v, d, b, c in zip(
        *(x.split(list(sizes)) for x in (u, delta, B, C)), strict=True
    ):
        total = d.cumsum(0)
        # exp(A (delta_{s+1} + ... + delta_t)) for s <= t
        decay = (total.unsqueeze(1) - total).unsqueeze(-1) * A
        decay = decay.exp() * torch.ones(len(v), len(v)).tril()[..., None, None]
        outs.append(torch.einsum("tsdn,tn,sn,sd->td", decay, c, b, d * v))
    return (torch.cat(outs) + u * D) * F.silu(z)


def conv_oracle(x, weight, bias, sizes):
    """With PyTorch's own convolution, one sequence after the other."""
    outs = [x[:0]]
    for part in x.split(list(sizes)):
        if len(part) == 0:
            continue
        padded = F.pad(part.t(), (weight.size(1) - 1, 0))
        outs.append(F.conv1d(padded, weight[:, None], bias, groups=len(weight)).t())
    return torch.cat(outs)


def assert_agrees(function, expected, inputs, dtype=torch.float64):
    """Outputs and all gradients, against an oracle in float64."""
    right = [x.double().requires_grad_() for x in inputs.values()]
    given_ = [x.to(dtype).requires_grad_() for x in inputs.values()]
    want, out = expected(*right), function(*given_)
    assert out.dtype == dtype
    tol = 1e-9 if dtype == torch.float64 else 1e-5
    assert_near(out, want, tol)
    grad = torch.randn(want.shape, dtype=torch.float64)
    grads = torch.autograd.grad(out, given_, grad.to(dtype), allow_unused=True)
    wanted = torch.autograd.grad(want, right, grad, allow_unused=True)
    for name, x, y, leaf in zip(inputs, grads, wanted, given_, strict=True):
        x, y = (torch.zeros_like(leaf) if g is None else g for g in (x, y))
        assert_near(x, y, tol, name)


@backends
@shapes
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scan_is_what_the_formula_says(shape, backend, dtype):
    sizes, *rest = SHAPES[shape]
    assert_agrees(
        lambda *x: selective_scan(*x, True, as_ptr(sizes), backend=backend),
        lambda *x: oracle(*x, sizes),
        make(sizes, *rest),
        dtype,
    )


@backends
@shapes
@pytest.mark.parametrize("size", [1, 4, 6])
def test_conv_is_what_pytorch_says(shape, backend, size):
    sizes, channels, _ = SHAPES[shape]
    inputs = {
        "x": torch.randn(sum(sizes), channels, dtype=torch.float64),
        "weight": torch.randn(channels, size, dtype=torch.float64),
        "bias": torch.randn(channels, dtype=torch.float64),
    }
    for dtype in (torch.float64, torch.float32):
        assert_agrees(
            lambda *x: causal_conv1d(*x, as_ptr(sizes), backend=backend),
            lambda *x: conv_oracle(*x, sizes),
            inputs,
            dtype,
        )


@backends
def test_conv_without_bias_and_with_activation(backend):
    x, weight = torch.randn(7, 3), torch.randn(3, 4)
    ptr = torch.tensor([0, 4, 7])
    want = F.silu(conv_oracle(x, weight, None, (4, 3)))
    out = causal_conv1d(x, weight, None, ptr, activation="silu", backend=backend)
    assert_near(out, want, 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_golden(backend):
    """Inputs, outputs and gradients of Mamba's reference implementation."""
    with np.load(GOLDEN) as file:
        data = {name: torch.from_numpy(file[name]) for name in file}
    graphs, _, length = data["u"].shape

    def packed(x):  # [graphs, channels or states, length] there
        return x.transpose(1, 2).reshape(graphs * length, -1) if x.dim() == 3 else x

    inputs = [packed(data[name]).clone().requires_grad_() for name in NAMES]
    ptr = as_ptr([length] * graphs)
    out = selective_scan(*inputs, True, ptr, backend=backend)
    assert (out - packed(data["out"])).abs().max() < 1e-12
    out.backward(packed(data["grad_out"]))
    for name, x in zip(NAMES, inputs, strict=True):
        assert (x.grad - packed(data[f"grad_{name}"])).abs().max() < 1e-9, name


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_gradcheck(backend):
    inputs = [x.requires_grad_() for x in make((3, 0, 2), 2, 2).values()]
    ptr = as_ptr((3, 0, 2))
    assert torch.autograd.gradcheck(
        lambda *x: selective_scan(*x, True, ptr, backend=backend), inputs
    )
    x, weight, bias = (torch.randn(s, dtype=torch.float64) for s in ((5, 2), (2, 3), 2))
    assert torch.autograd.gradcheck(
        lambda *x: causal_conv1d(*x, ptr, backend=backend),
        [x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()],
    )


@backends
@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), max_size=5),
    channels=st.integers(1, 4),
    states=st.integers(1, 3),
)
def test_each_sequence_is_alone(backend, sizes, channels, states):
    """Packed together they give what they give one by one."""
    inputs = make(sizes, channels, states)
    soft = {"delta_softplus": True, "backend": backend}
    out = selective_scan(**inputs, ptr=as_ptr(sizes), **soft)
    per_row = ("u", "delta", "B", "C", "z")
    for a, b in pairwise(as_ptr(sizes).tolist()):
        own = {k: x[a:b] if k in per_row else x for k, x in inputs.items()}
        assert_near(out[a:b], selective_scan(**own, **soft))


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_nothing_leaks_to_another_sequence(backend):
    inputs = make((40, 40, 40), 3, 2)
    ptr = as_ptr((40, 40, 40))
    out = selective_scan(**inputs, ptr=ptr, backend=backend)
    for name in ("u", "delta", "B", "C"):
        inputs[name][40:80] = math.nan
    other = selective_scan(**inputs, ptr=ptr, backend=backend)
    assert torch.equal(out[:40], other[:40])
    assert torch.equal(out[80:], other[80:])
    assert other[40:80].isnan().all()
    x, weight = torch.randn(9, 2), torch.randn(2, 4)
    out = causal_conv1d(x, weight, ptr=as_ptr((4, 5)), backend=backend)
    x[:4] = math.inf
    assert torch.equal(
        causal_conv1d(x, weight, ptr=as_ptr((4, 5)), backend=backend)[4:], out[4:]
    )


@backends
def test_one_sequence_is_the_default(backend):
    inputs = make((9,), 3, 2)
    want = selective_scan(**inputs, ptr=as_ptr((9,)), backend=backend)
    assert torch.equal(selective_scan(**inputs, backend=backend), want)


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_growth_and_reset(backend):
    """A step of zero keeps a state, a long one forgets it, a rate > 0 lets it grow."""
    u = torch.tensor([[1.0], [5.0], [0.0]])
    delta = torch.tensor([[1.0], [0.0], [1.0]])
    ones = torch.ones(3, 1)
    for rate, last in (
        (math.log(2), 2.0),
        (-math.log(2), 0.5),
        (-1e9, 0.0),
        (0.0, 1.0),
    ):
        A = torch.full((1, 1), rate)
        out = selective_scan(u, delta, A, ones, ones, backend=backend)
        assert_near(out, torch.tensor([[1.0], [1.0], [last]]), 1e-6)


@pytest.mark.parametrize("sizes", [[60] * 40, [400]], ids=["many", "one"])
def test_threads(sizes):
    """However work is shared out, outputs are the same bits, and gradients close."""
    inputs = make(sizes, 71, 3, torch.float32)

    def gradients():
        leaves = [x.clone().requires_grad_() for x in inputs.values()]
        out = selective_scan(*leaves, True, as_ptr(sizes), backend="numba")
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    one = gradients()
    torch.set_num_threads(3)
    several = gradients()
    assert torch.equal(one[0], several[0])
    for x, y in zip(one, several, strict=True):
        assert_near(x, y, 1e-5)


@pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.0.0",
    reason="outside of numba, NumPy 1 adds unsigned and other integers as floats",
)
@pytest.mark.parametrize("shape", ["several", "spans", "slices"])
def test_kernels_read_nothing_that_they_did_not_write(shape, monkeypatch):
    sizes, *rest = SHAPES[shape]
    sizes = sizes[-2:] if shape == "spans" else sizes
    poison(monkeypatch, threads, numba_)
    for backend in ("numba", "torch"):
        assert_agrees(
            lambda *x, b=backend: selective_scan(*x, True, as_ptr(sizes), backend=b),
            lambda *x: oracle(*x, sizes),
            make(sizes, *rest),
        )
        x = {"x": torch.randn(sum(sizes), 3), "w": torch.randn(3, 4)}
        assert_agrees(
            lambda *x, b=backend: causal_conv1d(*x, None, as_ptr(sizes), backend=b),
            lambda *x: conv_oracle(*x, None, sizes),
            x,
        )


@pytest.mark.parametrize(
    ("dtype", "bits"), [(np.float32, 3), (np.float64, 4)], ids=["float32", "float64"]
)
def test_exponential(dtype, bits):
    """To the last bits wherever it is a normal number."""
    function = njit(lambda x, y: _fill(x, y))
    least = float(np.finfo(dtype).minexp)
    x = np.concatenate([np.linspace(least, 20, 10_001), [0.5, -0.5, 0.0, 1.0]])
    x = x.astype(dtype)
    y = np.empty_like(x)
    function(x, y)
    want = np.exp2(x.astype(np.longdouble))
    assert np.max(np.abs(y / want - 1)) < bits * np.finfo(dtype).eps
    odd = np.array([np.nan, -np.inf, np.inf, 10 * least], dtype)
    y = np.empty_like(odd)
    function(odd, y)
    assert np.isnan(y[0])
    assert y[2] == np.inf
    assert 0 <= y[1] <= np.finfo(dtype).tiny
    assert 0 <= y[3] <= np.finfo(dtype).tiny


@njit
def _fill(x, y):
    for i in range(x.shape[0]):
        y[i] = numba_._exp2(x[i])


# -------------------------------------------------------------------- dtypes, compile


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(backend, dtype):
    inputs = make((5, 4), 3, 2, dtype)
    out = selective_scan(**inputs, ptr=as_ptr((5, 4)), backend=backend)
    wide = {name: x.float() for name, x in inputs.items()}
    want = selective_scan(**wide, ptr=as_ptr((5, 4)), backend=backend)
    assert out.dtype == dtype
    assert torch.equal(out, want.to(dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again = selective_scan(**wide, ptr=as_ptr((5, 4)), backend=backend)
    assert torch.equal(again, want)


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_compile(backend):
    def layer(*x):
        *x, ptr = x
        u = causal_conv1d(x[0], x[2], x[5], ptr, activation="silu", backend=backend)
        return selective_scan(u, *x[1:], True, ptr, backend=backend)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for sizes in ((5, 4), (7, 0, 3)):
        inputs = list(make(sizes, 3, 2).values())
        inputs = [x.requires_grad_() for x in inputs]
        want = layer(*inputs, as_ptr(sizes))
        out = compiled(*inputs, as_ptr(sizes))
        assert_near(out, want)
        grads = torch.autograd.grad(out.square().sum(), inputs)
        for x, y in zip(
            grads, torch.autograd.grad(want.square().sum(), inputs), strict=True
        ):
            assert_near(x, y)


@pytest.mark.parametrize("backend", ["torch", "numba"])
def test_operators_are_registered_as_they_should(backend):
    x = make((5, 4), 3, 2)
    core = [x[name].requires_grad_() for name in NAMES[:6]]
    torch.library.opcheck(scan._scan_op, (*core, as_ptr((5, 4)), backend))
    conv = [x["u"], x["A"], x["D"].requires_grad_(), as_ptr((5, 4)), backend]
    torch.library.opcheck(scan._conv_op, tuple(conv))


def test_inference_mode_then_training():
    inputs = make((5, 4), 3, 2)
    with torch.inference_mode():
        want = selective_scan(**inputs, ptr=as_ptr((5, 4)))
    out = selective_scan(inputs.pop("u").requires_grad_(), **inputs, ptr=as_ptr((5, 4)))
    out.sum().backward()
    assert torch.equal(out, want)


# ------------------------------------------------------------------------------ errors


@backends
@pytest.mark.parametrize(
    ("ptr", "message"),
    [
        ([0, 5], "must begin with 0 and end with the number of rows, 6, got 0 and 5"),
        ([1, 6], "must begin with 0"),
        ([0, 4, 3, 6], "must not decrease, but sequence 1 begins at 4 and the next"),
    ],
)
def test_wrong_ptr(backend, ptr, message):
    inputs, ptr = make((6,), 3, 2), torch.tensor(ptr)
    with pytest.raises(ValueError, match=message):
        selective_scan(**inputs, ptr=ptr, backend=backend)
    with pytest.raises(ValueError, match=message):
        causal_conv1d(inputs["u"], inputs["A"], ptr=ptr, backend=backend)
    with pytest.raises(ValueError, match=message):
        explain("selective_scan", **inputs, ptr=ptr, backend=backend)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_shapes_and_dtypes_are_named(name):
    inputs = make((6,), 3, 2)
    right = inputs[name]
    inputs[name] = torch.zeros(9, *right.shape, dtype=right.dtype)
    with pytest.raises(ValueError, match=f"'{name}' must be"):
        selective_scan(**inputs)
    inputs[name] = torch.zeros(right.shape, dtype=torch.long)
    with pytest.raises(TypeError, match=f"'{name}' must be floating point"):
        selective_scan(**inputs)


def test_wrong_options():
    inputs = make((6,), 3, 2)
    with pytest.raises(TypeError, match="'ptr' must be integer"):
        selective_scan(**inputs, ptr=torch.tensor([0.0, 6.0]))
    with pytest.raises(ValueError, match=r"'ptr' must be \[sequences \+ 1\]"):
        selective_scan(**inputs, ptr=torch.tensor([[0, 6]]))
    with pytest.raises(ValueError, match="'backend' must be one of"):
        selective_scan(**inputs, backend="cuda")
    with pytest.raises(ValueError, match="'activation' must be None or 'silu'"):
        causal_conv1d(inputs["u"], inputs["A"], activation="relu")
    with pytest.raises(ValueError, match=r"'weight' must be \[channels, size\]"):
        causal_conv1d(inputs["u"], inputs["D"])
    with pytest.raises(ValueError, match="'mamba-ssm', but on cpu it is not"):
        selective_scan(**inputs, backend="mamba_ssm")


def test_explain():
    inputs = make((6,), 3, 2)
    choice = explain("selective_scan", **inputs)
    assert choice == ("selective_scan", "scan", "state", "numba", "tensors on cpu")
    choice = explain("causal_conv1d", inputs["u"], inputs["A"], backend="torch")
    assert choice == ("causal_conv1d", "scan", "state", "torch", "asked for")


# --------------------------------------------------------------------------- mamba-ssm

INTERFACE = "mamba_ssm.ops.selective_scan_interface"
CPU = torch.device("cpu")


@pytest.fixture
def install(monkeypatch):
    """A package 'mamba-ssm' whose kernel is as told."""

    def install(kernel):
        module = types.ModuleType(INTERFACE)
        module.selective_scan_fn = kernel
        for name in ("mamba_ssm", "mamba_ssm.ops"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, INTERFACE, module)
        mamba_ssm_.why_not.cache_clear()

    yield install
    mamba_ssm_.why_not.cache_clear()


def padded_kernel(u, delta, A, B, C, D):
    """The signature of the package: [batch, channels, length], float32."""
    outs = []
    for x in zip(u, delta, B, C, strict=True):
        assert x[0].dtype == torch.float32
        v, d, b, c = (y.t() for y in x)
        outs.append(selective_scan(v, d, A, b, c, D, backend="reference").t())
    return torch.stack(outs)


def test_installed_kernel_is_used_on_padded_sequences(install):
    install(padded_kernel)
    assert mamba_ssm_.is_usable(CPU)
    for sizes in ((5, 0, 1, 7), (0,)):
        inputs = make(sizes, 3, 2)
        assert_agrees(
            lambda *x, s=sizes: selective_scan(
                *x, True, as_ptr(s), backend="mamba_ssm"
            ),
            lambda *x, s=sizes: oracle(*x, s),
            inputs,
            torch.float32,
        )
    with pytest.raises(ValueError, match="computes in float32, not"):
        selective_scan(**inputs, backend="mamba_ssm")


@pytest.mark.parametrize(
    "mode",
    [
        torch.inference_mode,
        torch.no_grad,
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        lambda: torch.device("meta"),
    ],
    ids=["inference", "no_grad", "autocast", "meta"],
)
def test_installed_kernel_is_judged_alike_in_every_mode(install, mode):
    install(padded_kernel)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with mode():
            assert mamba_ssm_.is_usable(CPU)


def fails(*_):
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (lambda *x: padded_kernel(*x) * 1.01, "its results are wrong"),
        (fails, "running it raises RuntimeError"),
        (None, "importing it raises"),
    ],
    ids=["wrong", "fails", "broken"],
)
def test_installed_kernel_that_is_no_good_is_refused(
    install, monkeypatch, kernel, reason
):
    install(kernel)
    if kernel is None:
        monkeypatch.delattr(sys.modules[INTERFACE], "selective_scan_fn")
    with pytest.warns(UserWarning, match=reason):
        assert not mamba_ssm_.is_usable(CPU)
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        assert not mamba_ssm_.is_usable(CPU)
    inputs = make((6,), 3, 2, torch.float32)
    with pytest.raises(ValueError, match=reason):
        selective_scan(**inputs, backend="mamba_ssm")


def test_padding_is_bounded():
    assert mamba_ssm_.is_worthwhile(as_ptr((394, 100, 100)))
    assert not mamba_ssm_.is_worthwhile(as_ptr((20_000, *[10] * 2_000)))
    assert mamba_ssm_.is_worthwhile(as_ptr(()))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", ["several", "spans", "blocks"])
def test_cuda(shape):
    sizes, *rest = SHAPES[shape]
    inputs = make(sizes, *rest, torch.float32)
    want = selective_scan(**inputs, ptr=as_ptr(sizes), backend="reference")
    moved = {name: x.cuda() for name, x in inputs.items()}
    out = selective_scan(**moved, ptr=as_ptr(sizes).cuda())
    assert_near(out.cpu(), want, 1e-5)
