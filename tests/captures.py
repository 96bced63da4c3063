"""CUDA graphs without a GPU: what a step computes, repeated on the same memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from operations import as_on_gpus
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

__all__ = ["Capture", "captured"]

_LAUNCH = GridExecutor.__call__


class Capture(TorchDispatchMode):
    """The calls of PyTorch's operators, and launches of Triton's interpreter."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        assert func.namespace != "pyg_chimera", func  # which looks into tensors
        with _disable_current_modes():
            out = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and "empty" not in func.__name__:
            self.calls.append((func, args, kwargs or {}, out))
        return out

    @property
    def launches(self) -> list[tuple[Any, ...]]:
        """Those of Triton's kernels: the name, the grid, and all arguments; of tables,
        which are of integers, the addresses, of other tensors the layout.
        """

        def fixed(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            at = None if x.is_floating_point() else x.data_ptr()
            return x.shape, x.stride(), x.dtype, at

        return [
            (kernel.fn.__name__, kernel.grid, *map(fixed, tree_leaves((args, kwargs))))
            for kernel, args, kwargs in (
                (args[0], args[1:], kwargs)
                for func, args, kwargs, _ in self.calls
                if func is _LAUNCH
            )
        ]

    def replay(self) -> None:
        """Computes all of it again; nothing else runs on the host."""
        with torch.no_grad():
            for func, args, kwargs, outs in self.calls:
                found = func(*args, **kwargs)
                for old, new in zip(tree_leaves(outs), tree_leaves(found), strict=True):
                    is_tensor = isinstance(old, torch.Tensor)
                    if is_tensor and old.data_ptr() != new.data_ptr():  # not a view
                        old.copy_(new)


@contextmanager
def captured() -> Iterator[Capture]:
    """Captures what is computed within, as on a GPU."""
    capture = Capture()

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        capture.calls.append((_LAUNCH, (self, *args), kwargs, None))
        with _disable_current_modes():
            _LAUNCH(self, *args, **kwargs)

    with patch.object(GridExecutor, "__call__", launch), as_on_gpus(), capture:
        yield capture
