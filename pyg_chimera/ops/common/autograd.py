"""Autograd for backends of plain PyTorch operations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def recorded() -> Iterator[None]:
    """Lets autograd record, even in a registered operator, which runs below it."""
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(key, False):
        yield


def by_autograd(
    forward: Callable[[Any], tuple[Tensor, tuple[Tensor, ...]]],
) -> Callable[[Any, tuple[Tensor, ...], Tensor], tuple[Tensor, ...]]:
    """A backward pass that runs the forward pass again, and differentiates it."""

    def backward(
        call: Any, saved: tuple[Tensor, ...], grad: Tensor
    ) -> tuple[Tensor, ...]:
        with recorded():
            given = call.inputs._replace(
                **{
                    name: x.detach().requires_grad_()
                    for name, x in call.inputs._asdict().items()
                    if isinstance(x, Tensor) and x.is_floating_point()
                }
            )
            leaves = [x for x in given if isinstance(x, Tensor) and x.requires_grad]
            out, _ = forward(call.with_inputs(given))
            return torch.autograd.grad(out, leaves, grad, materialize_grads=True)

    return backward
