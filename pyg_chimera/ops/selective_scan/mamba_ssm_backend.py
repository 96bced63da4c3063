"""The CUDA kernel of the package mamba-ssm, if it is installed and correct."""

import functools
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from pyg_chimera.ops.common.dispatch import Call
from pyg_chimera.ops.common.operator import without_autocast
from pyg_chimera.ops.selective_scan.reference import reference_scan

DEVICES = None

_EXTENSION = "selective_scan_cuda"
#: What may well be missing, and is no reason to warn.
_ABSENT: dict[str | None, str] = {
    "mamba_ssm": "it is not installed",
    _EXTENSION: "it was installed without its CUDA extension",
}

#: Sequences are padded to one length if this multiplies the rows by at most this.
_MAX_PADDING = 4


def why_not(call: Call) -> str | None:
    """It needs the package, a GPU that it was built for, and float32."""
    x = call.inputs.u
    reason = _problem(x.device)
    if reason is None and x.dtype != torch.float32:
        reason = f"it computes in float32, not {x.dtype}"
    if reason is None:
        return None
    return (
        "backend='mamba_ssm' needs the kernel of the package 'mamba-ssm', but on "
        f"{x.device} {reason}; use 'auto'"
    )


def forward(call: Call) -> Tensor:
    """The outputs, [T, D]; autograd differentiates the kernel."""
    with without_autocast(call.inputs.u):
        return _scan(*call.inputs[:7])


def is_preferred(inputs: Any) -> bool:
    """Whether to use it if the user has no preference.

    Warns, once, if it is installed but unusable.
    """
    return (
        inputs.u.is_cuda
        and inputs.u.dtype == torch.float32
        and not torch.compiler.is_compiling()  # it cannot be traced
        and _problem(inputs.u.device) is None
        and _is_worthwhile(inputs.ptr)
    )


def _kernel() -> Callable[..., Tensor]:
    interface = import_module("mamba_ssm.ops.selective_scan_interface")
    if getattr(interface, _EXTENSION, interface) is None:
        import_module(_EXTENSION)  # says why
    return interface.selective_scan_fn


def _scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, ptr: Tensor
) -> Tensor:
    """The outputs, [T, D]; sequences are padded, as the kernel needs equal lengths."""
    sizes = ptr.diff()
    longest = int(sizes.max()) if sizes.numel() else 0
    if longest == 0:
        return u * D
    sequence = torch.repeat_interleave(sizes, output_size=u.size(0))
    place = torch.arange(u.size(0), device=u.device) - ptr[sequence]

    def padded(x: Tensor) -> Tensor:
        out = x.new_zeros(sizes.size(0), longest, x.size(1))
        return out.index_put((sequence, place), x).transpose(1, 2).contiguous()

    out = _kernel()(padded(u), padded(delta), A, padded(B), padded(C), D)
    return out.transpose(1, 2)[sequence, place]


def _is_worthwhile(ptr: Tensor) -> bool:
    """Whether time and memory remain about linear in the rows despite padding."""
    sizes = ptr.diff()
    padded = sizes.numel() * int(sizes.max()) if sizes.numel() else 0
    return padded <= _MAX_PADDING * int(ptr[-1])


@functools.cache
def _problem(device: torch.device) -> str | None:
    """Why the kernel can't be used on a device; None if it can."""
    try:
        _kernel()
    except ModuleNotFoundError as error:
        if error.name in _ABSENT:
            return _ABSENT[error.name]
        reason = f"importing it raises {error!r}"
    except Exception as error:  # its libraries are built for one PyTorch version
        reason = f"importing it raises {error!r}"
    else:
        try:
            reason = "" if _is_right(device) else "its results are wrong"
        except Exception as error:  # such as a GPU that it was not built for
            reason = f"running it raises {error!r}"
    if not reason:
        return None
    warnings.warn(
        f"The kernel of the installed 'mamba-ssm' can't be used on {device}: {reason}. "
        "selective_scan uses another backend instead",
        stacklevel=2,
    )
    return reason


def _is_right(device: torch.device) -> bool:
    """Compares a small example with the reference, whatever the caller's mode."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        return x.to(device)

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
    ):
        inputs = [
            *(draw(21, 5), draw(21, 5).abs(), -draw(5, 4).exp()),
            *(draw(21, 4), draw(21, 4), draw(5)),
        ]
        ptr, grad = torch.tensor([0, 13, 13, 21], device=device), draw(21, 5)
        results = []
        for function, dtype in (
            (_scan, torch.float32),
            (reference_scan, torch.float64),
        ):
            leaves = [x.to(dtype).detach().clone().requires_grad_() for x in inputs]
            u, delta, A, B, C, D = leaves
            out = function(u, delta, A, B, C, D, ptr)
            grads = torch.autograd.grad(out, leaves, grad.to(dtype))
            results.append([out, *grads])
    return all(
        torch.allclose(x.double(), y, rtol=1e-3, atol=1e-4)
        for x, y in zip(*results, strict=True)
    )
