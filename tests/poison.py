"""Memory as bad as it may be: for kernels that must write whatever they read."""

import numpy as np
import pytest
import torch

from pyg_chimera.ops.structure import system

__all__ = ["poison"]


class _Poisoned:
    """numpy, whose `empty` is as bad as it may be."""

    def __getattr__(self, name):
        return getattr(np, name)

    def empty(self, shape, dtype=np.float64):
        kind = np.dtype(dtype).kind  # bytes of 255 are not a number, as floats
        bad = {"f": np.nan, "u": 255}.get(kind, -(1 << 40))
        return np.full(shape, bad, dtype)

    def empty_like(self, x):
        return self.empty(x.shape, x.dtype)


def _poison(function):
    def wrapper(*args, **kwargs):
        out = function(*args, **kwargs)
        if out.is_floating_point():
            return out.fill_(torch.nan)
        return out if out.dtype == torch.bool else out.fill_(torch.iinfo(out.dtype).max)

    return wrapper


def poison(monkeypatch: pytest.MonkeyPatch, *modules: object) -> None:
    """No array starts with zeros by luck, and kernels run as plain Python."""
    for module in modules:
        monkeypatch.setattr(module, "np", _Poisoned())
        if hasattr(module, "_SCRATCH"):
            monkeypatch.setattr(module, "_SCRATCH", type(module._SCRATCH)())
        for name, function in list(vars(module).items()):
            if hasattr(function, "py_func"):
                monkeypatch.setattr(module, name, function.py_func)
    for owner, name in (
        (torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, _poison(getattr(owner, name)))
    monkeypatch.setattr(system, "_CACHE", system._Cache(size=1))
