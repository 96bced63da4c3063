"""A cache of results that depend on graphs alone, keyed by the graphs' contents."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from pyg_chimera.ops.common.array_views import as_array
from pyg_chimera.ops.common.checks import setting, trusted
from pyg_chimera.ops.common.torch_private import without_transforms

_EAGER: ContextVar[bool] = ContextVar("eager", default=False)
#: What has the structures of a step that is captured, in place of the cache.
STATIC: ContextVar[Any] = ContextVar("static", default=None)


def called_eagerly() -> AbstractContextManager[None]:
    """A context for operators that are called from Python, not from compiled code.

    Compiled code may reuse the memory, and the object, of a tensor for another one.
    """
    return setting(_EAGER, True)


class _Cache:
    """The most recently used results, by key.

    A network's layers and the backward pass need the same structure many times. Keys
    are digests of contents, so entries are never stale.
    """

    def __init__(self, size: int, num_bytes: int = 1 << 28) -> None:
        self.size, self.num_bytes = size, num_bytes
        self.values: OrderedDict[str, tuple[Any, int]] = OrderedDict()
        self.keys: dict[int, str] = {}  #: by the identity of the result
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
            if key in self.values:
                self._drop(key)
            self.values[key] = (value, 0)
            self.keys[id(value)] = key
            self._add(key, _num_bytes(value))

    def grow(self, value: Any, by: Any) -> None:
        """Counts what has been derived from a result, and is kept with it."""
        with self.lock:
            key = self.keys.get(id(value))
            if key is not None:
                self._add(key, _num_bytes(by))

    def _add(self, key: str, num_bytes: int) -> None:
        value, held = self.values[key]
        self.values[key] = (value, held + num_bytes)
        self.held += num_bytes
        while len(self.values) > self.size or (
            self.held > self.num_bytes and len(self.values) > 8
        ):
            self._drop(next(iter(self.values)))

    def _drop(self, key: str) -> None:
        value, held = self.values.pop(key)
        self.keys.pop(id(value), None)
        self.held -= held


def _num_bytes(value: Any) -> int:
    """Bytes of the tensors and arrays in a result, or its own estimate."""
    if hasattr(value, "nbytes"):
        return value.nbytes
    if isinstance(value, (tuple, list)):
        return sum(map(_num_bytes, value))
    if isinstance(value, dict):
        return sum(map(_num_bytes, value.values()))
    return sum(map(_num_bytes, getattr(value, "__dict__", {}).values()))


# A layer may need eight small structures of a graph, and a loop may have many graphs.
_CACHE = _Cache(size=1024)


#: Larger tensors on other devices are not copied to the host to recognise them.
_MOST_COPIED = 1 << 16


class _Digests:
    """Digests of tensors, stored as long as tensors live and are unchanged.

    Views of a tensor share its version. Stored digests are used only if contents are
    trusted, as memory can be written to without a new version.
    """

    def __init__(self) -> None:
        self.found = WeakTensorKeyDictionary()
        self.lock = Lock()

    def of(self, x: Tensor) -> bytes:
        # Tensors made in inference mode have no versions.
        if not (trusted() and _EAGER.get()) or x.is_inference():
            return _digest(x)
        # `x.data = y` replaces the contents without a new version.
        now = x._version, x.data_ptr(), x.shape, x.stride(), x.dtype, x.device
        with self.lock:
            then, digest = self.found.get(x, (None, b""))
        if then != now:
            digest = _digest(x)
            with self.lock:
                self.found[x] = now, digest
        return digest


def _digest(x: Tensor) -> bytes:
    """A digest of a tensor's dtype, device, shape and contents."""
    # Dtypes, as some of them are errors; devices, as results may be on them.
    kind = (x.dtype, x.device, tuple(x.shape))
    digest = hashlib.sha1(repr(kind).encode(), usedforsecurity=False)  # a fast one
    if x.numel() > _MOST_COPIED and x.device.type != "cpu" and not x.is_complex():
        digest.update(repr(_sums_of_hashes(x).tolist()).encode())
    elif x.numel() > 0:
        content = x.detach().cpu().reshape(-1)
        if content.stride(0) != 1:  # such as one entry of a strided tensor
            content = content.clone(memory_format=torch.contiguous_format)
        digest.update(as_array(content.view(torch.uint8)).data)
    return digest.digest()


def _sums_of_hashes(x: Tensor) -> Tensor:
    """Two sums of 64-bit hashes of entries at their places, on the tensor's device."""
    same_size = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = x.detach().reshape(-1).view(same_size[x.element_size()]).long()
    place = torch.arange(bits.numel(), device=x.device)
    keys = ((-7046029254386353131, 6364136223846793005),
            (2862933555777941757, -3335678366873096957))  # fmt: skip
    return torch.stack([scrambled(bits * a + place * b).sum() for a, b in keys])


def scrambled(x: Any) -> Any:
    """Hashes of int64 numbers, in a tensor or an array: the finaliser of SplitMix64,
    whose products overflow.
    """
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return x ^ (x >> 31)


_DIGESTS = _Digests()


class Recipe(NamedTuple):
    """How to make a structure: `make(*tensors, *options)`.

    The result is shared and must not be changed.
    """

    make: Callable[..., Any]
    tensors: Sequence[Tensor | None]
    options: tuple = ()

    def found(self) -> tuple[Any, str]:
        """The structure, made unless it is cached, and its key in the cache.

        In `StaticTables`, without a key, as contents are to change.
        """
        static = STATIC.get()
        if static is None:
            key = self.key()
            return recalled(key, self.build), key
        if not _EAGER.get():
            raise ValueError(
                "'StaticTables' do not take compiled models, which read graphs on the "
                "host at each call; capture the model itself"
            )
        return static.structure(self), ""

    def key(self) -> str:
        """A digest of everything that the structure depends on."""
        with without_transforms():  # graphs are not transformed
            digests = [None if x is None else _DIGESTS.of(x) for x in self.tensors]
        name = (self.make.__module__, self.make.__qualname__)
        whole = repr((digests, *name, self.options)).encode()
        return hashlib.sha1(whole, usedforsecurity=False).hexdigest()

    def build(self) -> Any:
        """Makes the structure.

        From copies of the tensors, as it may keep parts of them, and later calls may
        save the tensors for their gradients.
        """
        with torch.inference_mode(False), without_transforms():
            copies = [None if x is None else x.detach().clone() for x in self.tensors]
            return self.make(*copies, *self.options)


def remembered(make: Callable, tensors: Sequence[Tensor | None], *options: Any) -> Any:
    """`make(*tensors, *options)`, cached by the contents of the tensors."""
    return Recipe(make, tensors, options).found()[0]


def recalled(key: str, make: Callable[[], Any]) -> Any:
    """The cached result for this key, or `make()` if there is none."""
    value = _CACHE.get(key)
    if value is None:
        value = make()
        _CACHE.put(key, value)
    return value


def table(
    make: Callable[..., Any], structure: Any, device: torch.device, *options: Any
) -> Any:
    """`make(structure, device, *options)`, cached per device along with the structure:
    what a backend derives from the graph alone.
    """
    key = (make, device, *options)
    if key not in structure.tables:
        with torch.inference_mode(False), without_transforms():
            made = make(structure, device, *options)
        if "room" in structure.tables:
            made = roomy(made, structure.tables["room"])
        structure.tables[key] = made
        _CACHE.grow(structure, made)
    return structure.tables[key]


def roomy(made: Any, room: float) -> Any:
    """What was made of a graph, with room for what is made of a larger one."""
    if not hasattr(made, "with_room"):
        raise ValueError(
            f"'StaticTables' cannot replace '{type(made).__name__}', which this step "
            "needs; they take ChimeraConv on small graphs only, with form='mask' and "
            "backend='triton'. Capture a step for each graph"
        )
    return made.with_room(room)
