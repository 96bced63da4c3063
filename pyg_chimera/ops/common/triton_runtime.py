"""Whether Triton kernels can compute a call: on a GPU, or interpreted on the CPU.

Triton itself is imported only with the kernels, when one is first called.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

WITH_TRITON = find_spec("triton") is not None
#: Whether Triton's interpreter runs the kernels; Triton reads it as they are defined.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on")

#: Device types of the Triton backends; the latter are slow and meant for tests only.
DEVICES = ("cuda",)
DEVICES_IF_ASKED = ("cpu",) if INTERPRETED else ()

#: The oldest Triton version and GPU compute capability that the kernels support.
_OLDEST, _CAPABILITY = (3, 6), (8, 0)


def why_not(x: Tensor, rows: int = 0) -> str | None:
    """Why kernels can't process tensors on this device, or this number of rows; None if
    they can.
    """
    reason = _problem(x.device)
    if reason is None and rows >= 1 << 30:
        reason = "counts rows in 32 bits"
    if reason is None:
        return None
    return f"backend='triton' {reason}; use backend='torch' or 'auto'"


def _problem(device: torch.device) -> str | None:
    if not WITH_TRITON:
        return "needs the package 'triton', which is not installed"
    if INTERPRETED:
        return None
    if device.type != "cuda":
        return f"needs a GPU, or TRITON_INTERPRET=1 in the environment, not {device}"
    return _problem_of_gpu(device)


@cache
def _problem_of_gpu(device: torch.device) -> str | None:
    version = import_module("triton").__version__
    if tuple(int(x) for x in version.split(".")[:2]) < _OLDEST:
        oldest = ".".join(map(str, _OLDEST))
        return f"needs Triton {oldest} or newer, and {version} is installed"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < _CAPABILITY:
        return (
            f"needs a GPU of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]} or "
            f"more, and {device} has {capability[0]}.{capability[1]}"
        )
    return None


def input_precision(x: Tensor) -> str:
    """The precision of `tl.dot`: that of float32, unless PyTorch allows TF32.

    AMD's matrix cores multiply float32 natively.
    """
    if x.dtype == torch.float64 or torch.version.hip is not None:
        return "ieee"
    return "tf32" if allows_tf32() else "tf32x3"


def allows_tf32() -> bool:
    """Whether PyTorch's matrix products may use TF32, however that was set."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # since PyTorch 2.9; then the other may raise
        return matmul.fp32_precision == "tf32"
    return matmul.allow_tf32


def on_device_of(x: Tensor) -> AbstractContextManager:
    """A context in which kernels are launched on the tensor's device."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()
