"""Whether the Triton kernels of a fused function take its tensors.

They are tried once a device, against PyTorch's operators, which otherwise stand in.
"""

import warnings
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from pyg_chimera.ops.common import triton_runtime
from pyg_chimera.ops.common.cache import STATIC
from pyg_chimera.ops.common.checks import setting


def by_triton(x: Tensor) -> bool:
    """Whether it is kernels for GPUs that would take a tensor."""
    return not x.is_cpu


class Trial:
    """A test of kernels before their first use on a device.

    Attributes:
        name: What they compute, as "fused norms".
        compare: From a device, what kernels compute there, to be called, and what
            PyTorch does. Nothing else may raise an error.
        found: Whether they may be used, by device.
    """

    def __init__(
        self,
        name: str,
        compare: Callable[
            [torch.device], tuple[Callable[[], Iterable], Iterable[Tensor]]
        ],
    ) -> None:
        self.name, self.compare = name, compare
        self.found: dict[torch.device, bool] = {}

    def passed(self, device: torch.device) -> bool:
        """Whether kernels can be run on a GPU and compute what PyTorch does there,
        which is tried once, outside of captures.
        """
        if device not in self.found:
            if triton_runtime.why_not(torch.empty(0, device=device)) is not None:
                self.found[device] = False
            elif device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return False
            else:
                with (
                    torch.enable_grad(),
                    torch.inference_mode(False),
                    setting(STATIC, None),
                ):
                    self.found[device] = self.tried(device)
        return self.found[device]

    def tried(self, device: torch.device) -> bool:
        """Whether kernels pass the test; a warning says why not."""
        compute, want = self.compare(device)
        try:
            with torch.no_grad():
                got = [*compute()]
            same = all(
                x is not None and torch.allclose(x, y, rtol=1e-4, atol=1e-4)
                for x, y in zip(got, want, strict=True)
            )
            reason = "compute something else than PyTorch"
        except Exception as error:  # of compilers and drivers: of any kind
            same, reason = False, f"cannot be run: {error}"
        if not same:
            warnings.warn(
                f"The {self.name} of backend='triton' {reason}; PyTorch computes them",
                stacklevel=2,
            )
        return same
