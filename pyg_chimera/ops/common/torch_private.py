"""All uses of PyTorch's private interface."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

#: For the registration of operators that read tensors on the host: compilers leave them
#: out of CUDA graphs, if they know this tag.
NOT_IN_CUDA_GRAPHS: dict[str, Any] = {}
if hasattr(torch._C.Tag, "cudagraph_unsafe"):
    NOT_IN_CUDA_GRAPHS["tags"] = (torch._C.Tag.cudagraph_unsafe,)


@contextmanager
def recorded() -> Iterator[None]:
    """Let autograd record, even in a registered operator, which runs below it."""
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch.enable_grad(), torch._C._SetExcludeDispatchKeyGuard(key, False):
        yield


def is_transforming() -> bool:
    """Whether a transform of `torch.func` is active."""
    return torch._C._are_functorch_transforms_active()


def without_transforms() -> AbstractContextManager[None]:
    """Suspend the transforms of `torch.func`."""
    return torch._C._DisableFuncTorch()


def is_in_forward_mode() -> bool:
    """Whether derivatives are computed in forward mode."""
    return forward_ad._current_level >= 0


def is_in_backward_pass() -> bool:
    """Whether this thread of the autograd engine runs a backward pass."""
    return torch._C._current_graph_task_id() != -1


def is_batched(x: Tensor) -> bool:
    """Whether a gradient is one of many, as with `is_grads_batched`."""
    return torch._C._functorch.is_legacy_batchedtensor(x)


def is_followed() -> bool:
    """Whether a compiler, a transform or a mode is active."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or is_transforming()
        or torch._C._len_torch_dispatch_stack() > 0
        or is_in_forward_mode()
    )


def is_hooked(module: torch.nn.Module) -> bool:
    """Whether anything is called with a module, or with all modules."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or torch.nn.modules.module._has_any_global_hook()
    )


def while_loop(
    cond: Callable, body: Callable, carried: tuple, others: tuple
) -> tuple[Any, ...]:
    """Run a loop that exporters translate; the public function has no gradients."""
    from torch._higher_order_ops.while_loop import while_loop_op

    return while_loop_op(cond, body, carried, others)
