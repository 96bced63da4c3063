"""Memory as bad as it may be: for kernels that must write whatever they read."""

import sys

import numpy as np
import pytest
import torch

__all__ = ["poison", "poison_tensors"]


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


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """No array of the operators starts with zeros by luck.

    Their kernels run as plain Python, where an index beyond an array is an error, too.
    What they keep from call to call, structures and scratch memory, is forgotten.
    """
    kept = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith("pyg_chimera.ops"):
            continue
        for attribute, x in list(vars(module).items()):
            if x is np:
                monkeypatch.setattr(module, attribute, _Poisoned())
            elif hasattr(x, "py_func"):
                monkeypatch.setattr(module, attribute, x.py_func)
            elif type(x).__name__ in ("_Cache", "_Scratch"):
                size = {"size": 1} if type(x).__name__ == "_Cache" else {}
                monkeypatch.setattr(module, attribute, type(x)(**size))
                kept.add(type(x).__name__)
    assert kept == {"_Cache", "_Scratch"}, "what is kept has other names now"
    poison_tensors(monkeypatch)


def poison_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor starts with zeros by luck."""
    for owner, name in (
        (torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, _poison(getattr(owner, name)))
