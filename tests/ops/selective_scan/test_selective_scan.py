"""What is special to `selective_scan`: its defaults, and the kernel of mamba-ssm."""

import math
import sys
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from asserts import assert_near
from operators import (
    assert_results,
    computed,
    example,
    expected_of,
)

from pyg_chimera.ops import explain, selective_scan

backends = pytest.mark.parametrize("backend", ["reference", "torch", "numba", "auto"])


@backends
def test_defaults(backend):
    """No bypass, gate, bias or softplus, and all rows in one sequence."""
    case = example("selective_scan", "spans")
    rows = case.floats["u"].size(0)
    core = {name: case.floats[name] for name in ("u", "delta", "A", "B", "C")}
    core["delta"] = F.softplus(core["delta"])
    out = selective_scan(**core, backend=backend)
    plain = {"D": torch.zeros(3), "z": None, "delta_bias": torch.zeros(3)}
    ptr = torch.tensor([0, rows])
    assert torch.equal(out, selective_scan(**core, **plain, ptr=ptr, backend=backend))
    z = torch.full_like(core["u"], 40.0)  # SiLU(40) = 40
    assert_near(selective_scan(**core, z=z, backend=backend), 40 * out)
    bypass = selective_scan(**core, D=torch.ones(3), backend=backend)
    assert_near(bypass, out + core["u"])


@backends
def test_growth_and_reset(backend):
    """A step of zero keeps a state, a long one forgets it, a rate > 0 lets it grow."""
    u = torch.tensor([[1.0], [5.0], [0.0]])
    delta = torch.tensor([[1.0], [0.0], [1.0]])
    ones = torch.ones(3, 1)
    lasts = {math.log(2): 2.0, -math.log(2): 0.5, -1e9: 0.0, 0.0: 1.0}
    for rate, last in lasts.items():
        A = torch.full((1, 1), rate)
        out = selective_scan(u, delta, A, ones, ones, backend=backend)
        assert_near(out, torch.tensor([[1.0], [1.0], [last]]), 1e-6)


@pytest.mark.parametrize("operator", ["selective_scan", "causal_conv1d"])
@backends
@pytest.mark.parametrize(
    ("ptr", "message"),
    [
        ([0, 5], "must begin with 0 and end with the number of rows, 13, got 0 and 5"),
        ([1, 13], "must begin with 0"),
        ([0, 4, 3, 13], "must not decrease, but sequence 1 begins at 4 and the next"),
        ([], r"must be \[sequences \+ 1\]"),
    ],
)
def test_wrong_ptr(operator, backend, ptr, message):
    case = example(operator)
    inputs = {**case.floats, "ptr": torch.tensor(ptr).long(), "backend": backend}
    for call in (case.operator.function, lambda **x: explain(operator, **x)):
        with pytest.raises(ValueError, match=f"'ptr' {message}"):
            call(**inputs)


# --------------------------------------------------------------------------- mamba-ssm

INTERFACE = "mamba_ssm.ops.selective_scan_interface"
MAMBA = {"delta_softplus": True, "backend": "mamba_ssm"}


def forget_what_was_probed():
    for name, module in list(sys.modules.items()):
        if name.startswith("pyg_chimera.ops.selective_scan"):
            for x in vars(module).values():
                getattr(x, "cache_clear", lambda: None)()


@pytest.fixture
def install(monkeypatch):
    """A package 'mamba-ssm' whose kernel is as told."""

    def install(kernel):
        module = types.ModuleType(INTERFACE)
        if kernel is not None:
            module.selective_scan_fn = kernel
        for name in ("mamba_ssm", "mamba_ssm.ops"):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.setitem(sys.modules, INTERFACE, module)
        forget_what_was_probed()

    yield install
    forget_what_was_probed()


def padded_kernel(u, delta, A, B, C, D):
    """The signature of the package: [batch, channels, length], float32."""
    assert {x.dtype for x in (u, delta, A, B, C, D)} == {torch.float32}
    state, outs = u.new_zeros(*u.shape[:2], A.size(1)), []
    for t in range(u.size(2)):
        decay = (delta[..., t, None] * A).exp()
        state = decay * state + (delta * u)[..., t, None] * B[:, None, :, t]
        outs.append((state * C[:, None, :, t]).sum(-1))
    return torch.stack(outs, 2) + D[:, None] * u


@pytest.mark.parametrize("name", ["several", "empty"])
def test_installed_kernel_is_used_on_padded_sequences(install, name):
    install(padded_kernel)
    case = example("selective_scan", name)
    assert_results(computed(case.to(torch.float32), MAMBA), expected_of(case))
    with pytest.raises(ValueError, match="computes in float32, not"):
        case(**MAMBA)


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
    inputs = example("selective_scan").to(torch.float32).inputs
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with mode():
            choice = explain("selective_scan", **inputs, **MAMBA)
    assert choice.backend == "mamba_ssm"


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
def test_installed_kernel_that_is_no_good_is_refused(install, kernel, reason):
    install(kernel)
    case = example("selective_scan").to(torch.float32)
    with (
        pytest.warns(UserWarning, match=reason),
        pytest.raises(ValueError, match=reason),
    ):
        case(**MAMBA)
    with warnings.catch_warnings():  # once
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=reason):
            case(**MAMBA)


def test_package_without_its_extension(install, monkeypatch, tmp_path):
    """As it comes since July 2026: nothing to warn about, unless it does not load."""
    install(fails)
    case = example("selective_scan").to(torch.float32)
    sys.modules[INTERFACE].selective_scan_cuda = None
    monkeypatch.setitem(sys.modules, "selective_scan_cuda", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="it was installed without its CUDA ext"):
            case(**MAMBA)

    monkeypatch.delitem(sys.modules, "selective_scan_cuda")
    (tmp_path / "selective_scan_cuda.py").write_text("raise ImportError('symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    forget_what_was_probed()
    with (
        pytest.warns(UserWarning, match=r"importing it raises ImportError\('symbol'\)"),
        pytest.raises(ValueError, match="importing it raises"),
    ):
        case(**MAMBA)


def test_kernel_that_is_not_installed_is_named():
    if "mamba_ssm" in sys.modules:
        pytest.skip("mamba-ssm is installed")
    with pytest.raises(ValueError, match="'mamba-ssm', but on cpu it is not installed"):
        example("selective_scan")(**MAMBA)
