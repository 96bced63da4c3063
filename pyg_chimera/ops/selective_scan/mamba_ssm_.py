"""The CUDA kernel of the package mamba-ssm, where that is installed and right."""

import functools
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from pyg_chimera.ops.selective_scan import torch_

__all__ = ["is_usable", "scan"]


def _kernel() -> Callable[..., Tensor] | None:
    try:
        from mamba_ssm.ops.selective_scan_interface import selective_scan_fn
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "mamba_ssm":
            raise
        return None
    return selective_scan_fn


def scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, ptr: Tensor
) -> Tensor:
    """The outputs, [T, D]; the kernel wants sequences of one length, so they get it."""
    kernel = _kernel()
    assert kernel is not None  # see `is_usable`
    sizes = ptr.diff()
    longest = int(sizes.max()) if sizes.numel() else 0
    if longest == 0:
        return u * 0
    sequence = torch.repeat_interleave(sizes, output_size=u.size(0))
    place = torch.arange(u.size(0), device=u.device) - ptr[sequence]

    def padded(x: Tensor) -> Tensor:
        out = x.new_zeros(sizes.size(0), longest, x.size(1))
        return out.index_put((sequence, place), x).transpose(1, 2).contiguous()

    out = kernel(padded(u), padded(delta), A, padded(B), padded(C), D)
    return out.transpose(1, 2)[sequence, place]


@functools.cache
def is_usable(device: torch.device) -> bool:
    """Whether the kernel is installed and computes what it should, on a device."""
    if _kernel() is None:
        return False
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    u, delta, A, B, C, D = (
        x.to(device).requires_grad_()
        for x in (
            *(draw(21, 5), draw(21, 5).abs(), -draw(5, 4).exp()),
            *(draw(21, 4), draw(21, 4), draw(5)),
        )
    )
    ptr, grad = torch.tensor([0, 13, 13, 21], device=device), draw(21, 5).to(device)
    with torch.enable_grad():
        out = scan(u, delta, A, B, C, D, ptr)
        found = [out, *torch.autograd.grad(out, (u, delta, A, B, C, D), grad)]
    with torch.no_grad():
        right = [torch_.scan_forward(u, delta, A, B, C, D, ptr)]
        right += torch_.scan_backward(grad, u, delta, A, B, C, D, ptr)
    if all(
        torch.allclose(x, y, rtol=1e-3, atol=1e-4)
        for x, y in zip(found, right, strict=True)
    ):
        return True
    warnings.warn(
        "The kernel of the installed 'mamba-ssm' gives other results than it should on "
        f"{device}; selective_scan uses its 'torch' backend instead",
        stacklevel=2,
    )
    return False
