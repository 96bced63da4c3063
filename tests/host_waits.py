"""Where a host would wait for a GPU: looks into tensors, and copies to and from it.

Tensors on the CPU stand for those on a device, so that a GPU is not needed: operations
that need a number on the host are seen by PyTorch's dispatcher, below autograd and
within the registered operators, and methods that copy are patched.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from operations import within_operators
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["host_waits"]

#: Operations whose result, or its size, the host has to know.
_WAITS = {
    "_linalg_check_errors", "_local_scalar_dense", "_unique2", "bincount", "equal",
    "is_nonzero", "item", "masked_select", "nonzero", "unique_consecutive",
    "unique_dim",
}  # fmt: skip
#: Those that wait if an index is a mask.
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}


class _Watch(TorchDispatchMode):
    def __init__(self, found: set[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        name, kwargs = func.__name__.split(".")[0], kwargs or {}
        waits = name in _WAITS
        if name in _INDEXED:
            masks = [x for x in args[1] if x is not None and x.dtype == torch.bool]
            waits = len(masks) > 0
        elif func is torch.ops.aten.repeat_interleave.Tensor:
            waits = kwargs.get("output_size") is None
        elif name.startswith("linalg"):
            waits = kwargs.get("check_errors", False)
        if waits:
            self.found.add(name)
        return func(*args, **kwargs)


@contextmanager
def host_waits() -> Iterator[set[str]]:
    """Collects what would wait, by name.

    Headers from pass to pass, bytes, lie on the CPU in any case.
    """
    found: set[str] = set()

    def noted(name: str, function: Any) -> Any:
        def call(x: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(x, "dtype", None) != torch.uint8:
                found.add(name)
            return function(x, *args, **kwargs)

        return call

    watched = within_operators(partial(_Watch, found))
    with pytest.MonkeyPatch.context() as patch, watched:
        for name in ("cpu", "numpy", "tolist"):
            method = noted(name, getattr(torch.Tensor, name))
            patch.setattr(torch.Tensor, name, method)
        for name in ("from_numpy", "tensor"):
            patch.setattr(torch, name, noted(name, getattr(torch, name)))
        yield found
