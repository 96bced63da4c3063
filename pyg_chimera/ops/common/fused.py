"""Functions of tensors that pass over memory once on the CPU, forward and backward.

PyTorch's operators pass over it once each, and small graphs wait for their calls.
Registered operators take longer than all of that for small graphs, so these are plain
autograd functions of ordinary tensors. All else, such as compilers, transforms, other
devices and second derivatives, sees the same function as PyTorch's operators.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from pyg_chimera.ops.common.checks import trusted, trusting
from pyg_chimera.ops.common.torch_private import (
    is_batched,
    is_followed,
    is_transforming,
)

_ORDINARY = (Tensor, Parameter)
_FLOATS = (torch.float32, torch.float64)
_INTEGERS = (torch.int32, torch.int64)

Tensors = Sequence[Tensor | None]


@dataclass(frozen=True)
class Fused:
    """A function of tensors, any of which may be None, and of options.

    Attributes:
        name: What profilers call it.
        composed: It, `(*tensors, options)`, by PyTorch's operators.
        fits: Whether kernels take ordinary tensors on the CPU, of the same arguments.
        forward: It, of the same arguments: the outputs, further tensors that `backward`
            needs, and what else it needs.
        backward: From the tensors, the options, the further tensors, the gradients of
            outputs and what else was saved, the gradient of each tensor, or None.
        devices: The types of devices of whose tensors it may be.
        partial: Whether `backward` takes None for the gradients of outputs of which
            nothing was made, rather than zeros.
    """

    name: str
    composed: Callable[..., Any]
    fits: Callable[..., bool]
    forward: Callable[..., tuple[Any, Sequence[Tensor], Any]]
    backward: Callable[[Any, Any, Any, Any, Any], Iterable]
    devices: tuple[str, ...] = ("cpu",)
    partial: bool = False

    @cached_property
    def function(self) -> Any:
        """The autograd function, of its own name."""
        return type(self.name, (_Function,), {})

    def __call__(self, tensors: Tensors, options: Any) -> Any:
        """The outputs; composed unless tensors are ordinary ones on the CPU, followed
        by nothing but autograd, and kernels take them.
        """
        if _are_ordinary(tensors, self.devices) and self.fits(*tensors, options):
            return self.function.apply(self, len(tensors), options, *tensors)
        return self.composed(*tensors, options)


def _are_ordinary(tensors: Tensors, devices: tuple[str, ...]) -> bool:
    """Whether tensors are ordinary ones, of numbers that kernels take, and nothing
    follows what is done with them but autograd.
    """
    return not is_followed() and all(
        x is None
        or (
            type(x) in _ORDINARY
            and x.device.type in devices
            and x.dtype in (_FLOATS if x.is_floating_point() else _INTEGERS)
            and x.layout is torch.strided
            and not x.is_neg()
        )
        for x in tensors
    )


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fused: Fused, count: int, options: Any, *tensors: Any) -> Any:
        outputs, saved, ctx.rest = fused.forward(*tensors, options)
        ctx.save_for_backward(*tensors, *saved)
        ctx.fused, ctx.count, ctx.options = fused, count, options
        ctx.trusted = trusted()
        ctx.set_materialize_grads(not fused.partial)
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if all(grad is None for grad in grads):
            return None, None, None, *[None] * ctx.count
        saved = ctx.saved_tensors  # once: checkpointing computes them when asked
        tensors, more = saved[: ctx.count], saved[ctx.count :]
        if torch.is_grad_enabled() or not all(map(_is_seen, grads)):
            # It reads the contents of tensors, or not, as in the forward pass.
            with trusting(ctx.trusted):
                found = _recomposed(ctx.fused.composed, tensors, ctx.options, grads)
        else:
            found = ctx.fused.backward(tensors, ctx.options, more, grads, ctx.rest)
        return None, None, None, *found


def _is_seen(grad: Tensor | None) -> bool:
    """Whether a gradient is an ordinary tensor: not one of many, or of a compiler."""
    return grad is None or (
        type(grad) in _ORDINARY
        and not is_batched(grad)
        and not torch.compiler.is_compiling()
        and not is_transforming()
    )


def _recomposed(
    composed: Callable, tensors: Tensors, options: Any, grads: Tensors
) -> Iterable[Tensor | None]:
    """The gradients by PyTorch's operators, which can be differentiated again."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():  # of views, as one may depend on another
        views = [None if x is None else x.view_as(x) for x in tensors]
        outputs = composed(*views, options)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    leaves = [x for x in views if x is not None and x.requires_grad]
    pairs = [
        (x, grad)
        for x, grad in zip(outputs, grads, strict=True)
        if x.requires_grad and grad is not None
    ]
    several, gradients = zip(*pairs, strict=True)
    found = iter(
        torch.autograd.grad(
            several, leaves, gradients, create_graph=again, allow_unused=True
        )
    )
    return [next(found) if x is not None and x.requires_grad else None for x in views]
