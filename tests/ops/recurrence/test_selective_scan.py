"""What is special to `selective_scan`: its defaults, and where sequences begin."""

import math

import pytest
import torch
import torch.nn.functional as F
from asserts import assert_near
from operators import example

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


@backends
def test_nothing_is_before_the_first_row(backend):
    """However much it would have grown there: infinity times nothing is NaN."""
    delta = torch.tensor([[1000.0], [1.0], [1000.0], [1.0]]).requires_grad_()
    A = torch.ones(1, 1, requires_grad=True)
    ones, ptr = torch.ones(4, 1), torch.tensor([0, 2, 4])
    out = selective_scan(ones, delta, A, ones, ones, ptr=ptr, backend=backend)
    last = 1000 * math.e + 1
    assert_near(out, torch.tensor([[1000.0], [last]] * 2), 1e-6)
    out.sum().backward()
    grown = 1 + math.e
    assert_near(delta.grad, torch.tensor([[grown], [last]] * 2), 1e-6)
    assert_near(A.grad, torch.tensor([[2000 * math.e]]), 1e-6)


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
