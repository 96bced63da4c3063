"""The steps that benchmarks repeat: forward and backward, compared and measured."""

import time
from collections.abc import Callable
from typing import Any

import torch
from timing import Timing
from torch import Tensor

#: The relative error allowed in float32, for outputs and all gradients.
TOLERANCE = 1e-5


class Step:
    """A forward and a backward pass of a function, once per call.

    `leaves` are the tensors that get gradients, by name.
    """

    def __init__(
        self, function: Callable[[], Tensor], leaves: dict[str, Tensor], grad: Tensor
    ) -> None:
        self.function = function
        self.leaves = leaves
        self.grad = grad
        self.synchronize = torch.cuda.synchronize if grad.is_cuda else lambda: None

    def __call__(self) -> Timing:
        """Forward and backward once."""
        for leaf in self.leaves.values():
            leaf.grad = None
        self.synchronize()
        start = time.perf_counter()
        out = self.function()
        self.synchronize()
        middle = time.perf_counter()
        out.backward(self.grad)
        self.synchronize()
        end = time.perf_counter()
        self.out = out.detach()
        return Timing(middle - start, end - start)

    def results(self) -> dict[str, Tensor]:
        """The output and all gradients."""
        self()
        grads = {f"gradient of {name}": x.grad for name, x in self.leaves.items()}
        return {"output": self.out} | grads


# Exactness ---------------------------------------------------------------------


def compare(
    case: str,
    workload: str,
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
    against: str,
) -> dict[str, Any]:
    """A row of relative errors; ends the benchmark if one is too large."""
    errors = {key: relative_error(x, expected[key]) for key, x in found.items()}
    for key, error in errors.items():
        if not error <= TOLERANCE:
            raise SystemExit(
                f"\n{case} is wrong on {workload}: its {key} is off by {error:.1e}, "
                f"and {TOLERANCE:.0e} is allowed. Nothing is timed."
            )
    row = {"workload": workload, "case": case, "errors": errors}
    return row | {"against": against, "worst": max(errors.values())}


def relative_error(found: Tensor, expected: Tensor) -> float:
    error = (found.double() - expected.double()).abs().max()
    return float(error / expected.double().abs().max())
