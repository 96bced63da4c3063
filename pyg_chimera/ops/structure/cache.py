"""What was computed of a graph, remembered by the graph's contents."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Recipe", "recalled", "remembered"]


class _Cache:
    """What was last made of some graphs, found by what the graphs hold.

    A network's layers, and the backward pass, ask for the same structure many times.
    Keys are digests of the graph's contents, so nothing can go stale.
    """

    def __init__(self, size: int, num_bytes: int = 1 << 28) -> None:
        self.size, self.num_bytes = size, num_bytes
        self.values: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self.held = 0
        self.lock = Lock()

    def get(self, key: str) -> Any:
        with self.lock:
            if key not in self.values:
                return None
            self.values.move_to_end(key)
            return self.values[key][0]

    def put(self, key: str, value: Any) -> None:
        with self.lock:
            self.held -= self.values.pop(key, (None, 0))[1]
            self.values[key] = (value, _num_bytes(value))
            self.held += self.values[key][1]
            while len(self.values) > self.size or (
                self.held > self.num_bytes and len(self.values) > 8
            ):
                self.held -= self.values.popitem(last=False)[1][1]


def _num_bytes(value: Any) -> int:
    if isinstance(value, tuple):
        return sum(map(_num_bytes, value))
    return getattr(value, "nbytes", 0)


_CACHE = _Cache(size=32)


class Recipe(NamedTuple):
    """How to make a structure: `make(*tensors, *options)`.

    For results that nobody changes.
    """

    make: Callable[..., Any]
    tensors: Sequence[Tensor | None]
    options: tuple = ()

    def key(self) -> str:
        """A digest of all that the structure depends on."""
        digest = hashlib.sha1(usedforsecurity=False)  # the fastest one on most CPUs
        # Dtypes too, as some of them are errors; devices, as results may lie there.
        for x in self.tensors:
            kind = None if x is None else (x.dtype, x.device, tuple(x.shape))
            digest.update(repr(kind).encode())
            if x is not None and x.numel() > 0:
                content = x.detach().cpu().reshape(-1)
                if content.stride(0) != 1:  # as of one entry of a strided tensor
                    content = content.clone(memory_format=torch.contiguous_format)
                digest.update(content.view(torch.uint8).numpy().data)
        name = (self.make.__module__, self.make.__qualname__)
        digest.update(repr((*name, self.options)).encode())
        return digest.hexdigest()

    def cook(self) -> Any:
        """The structure.

        Of copies of the tensors: it may have parts of them, and later calls may save
        the tensors for their gradients.
        """
        with torch.inference_mode(False):
            copies = [None if x is None else x.detach().clone() for x in self.tensors]
            return self.make(*copies, *self.options)


def remembered(make: Callable, tensors: Sequence[Tensor | None], *options: Any) -> Any:
    """`make(*tensors, *options)`, or what it was for the same contents before."""
    recipe = Recipe(make, tensors, options)
    return recalled(recipe.key(), recipe)


def recalled(key: str, recipe: Recipe) -> Any:
    """What has this key; if it is forgotten, made again."""
    value = _CACHE.get(key)
    if value is None:
        value = recipe.cook()
        _CACHE.put(key, value)
    return value
