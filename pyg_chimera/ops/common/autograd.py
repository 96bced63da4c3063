"""Autograd for backends of plain PyTorch operations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyg_chimera.ops.common.torch_private import recorded


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
