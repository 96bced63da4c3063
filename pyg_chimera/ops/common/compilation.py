"""How functions are jitted, and when their machine code is loaded from disk.

numba's cache looks at the file of a function only, although functions of other files
are compiled into it. Here, the files of the package that its file imports, directly or
not, must be unchanged as well.
"""

import hashlib
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from inspect import signature
from itertools import count
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba import types
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.dispatcher import Dispatcher
from numba.extending import lower_builtin, type_callable


def _number_symbols() -> None:
    """Starts the numbers in names of symbols somewhere else in each process.

    numba tells functions of one name, such as the sorts of `np.sort` and `np.argsort`,
    apart by a count from one. If two processes have cached kernels, a third that loads
    both would find the same name twice, and call the wrong function. The count is that
    of all functions that numba compiles in the process, whosever they are.
    """
    FunctionIdentity._unique_ids = count(secrets.randbits(48))


_number_symbols()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_number_symbols)


def compiled(fastmath: bool | set = False, **options: Any) -> Callable[[Callable], Any]:
    """A decorator that jits a function, releases the GIL in it, and caches it.

    Without the option, numba would compile it with that of the function which is the
    first to call it.
    """
    jit = numba.njit(nogil=True, fastmath=fastmath, **options)

    def decorate(function: Callable) -> Any:
        dispatcher = jit(function)
        if isinstance(dispatcher, Dispatcher):  # not with NUMBA_DISABLE_JIT
            dispatcher._cache = _Cache(function)  # type: ignore[attr-defined]
        return dispatcher

    return decorate


def compiles_to(typed: Callable, lower: Callable, kinds: tuple = ()) -> Callable:
    """A decorator that tells what plain Python compiles to in jitted code.

    Args:
        typed: The numba signature for types of arguments, or None.
        lower: Emits LLVM code, given numba's context, a builder, the signature and the
            values of the arguments, and returns the value, if there is one.
        kinds: The numba types of arguments, if there are other functions of this name.
    """

    def emit(context: Any, builder: Any, types: Any, args: Any) -> Any:
        out = lower(context, builder, types, args)
        return context.get_dummy_value() if out is None else out

    def decorate(function: Callable) -> Callable:
        def typer(*args: Any) -> Any:
            return typed(*args)

        typer.pysig = signature(function)  # type: ignore[attr-defined]
        type_callable(function)(lambda context: typer)
        lower_builtin(function, *(kinds or [types.VarArg(types.Any)]))(emit)
        return function

    return decorate


class _Cache(FunctionCache):
    """numba's cache, in the same folders, with a stamp of all files that matter."""

    def __init__(self, function: Callable) -> None:
        super().__init__(function)
        locator = self._impl.locator
        self._stamp = stamp(function.__module__)
        # Without its line, an edit above a function would leave a file behind.
        line = f"-{locator.get_disambiguator()}.py"
        self._cache_file = _Files(
            cache_path=self._cache_path,
            filename_base=self._impl.filename_base.replace(line, ".py"),
            source_stamp=(locator.get_source_stamp(), self._stamp),
        )

    def _index_key(self, sig: Any, codegen: Any) -> tuple:
        """numba's, with the names of fields: it knows NamedTuples by their class, which
        another module may define, and by their types.
        """
        return *super()._index_key(sig, codegen), tuple(_fields(sig))

    def save_overload(self, sig: Any, data: Any) -> None:
        """Saves machine code, unless its sources have changed since their import."""
        _read.cache_clear()
        if stamp(self._py_func.__module__) == self._stamp:
            super().save_overload(sig, data)


def _fields(kind: Any) -> Iterator[tuple[str, ...]]:
    """The names of fields in a signature, a tuple of types, or a type."""
    if isinstance(kind, types.NamedTuple | types.NamedUniTuple):
        yield kind.fields
    kind = getattr(kind, "args", kind)  # of a signature
    for inner in kind if isinstance(kind, tuple) else getattr(kind, "types", ()):
        yield from _fields(inner)


class _Files(IndexDataCacheFile):
    """numba's, but an index with types that no longer exist counts as outdated, and
    machine code has a name of its own, and is there before its entry in the index.

    numba numbers it from one for each version: a process that reads while another
    writes would find that of an earlier version, or of other types.
    """

    def save(self, key: Any, data: Any) -> None:
        overloads = self._load_index()
        if not overloads:  # what there is belongs to an earlier version
            names = self._index_name.removesuffix("nbi") + "*.nbc"
            for path in Path(self._cache_path).glob(names):
                with suppress(OSError):
                    path.unlink()
        name = overloads.setdefault(key, self._data_name(secrets.randbits(48)))
        self._save_data(name, data)
        self._save_index(overloads)

    def _load_index(self) -> Any:
        try:
            return super()._load_index()
        except (AttributeError, ImportError):  # as it reads them before the stamp
            return {}


def stamp(module: str) -> tuple[str, ...]:
    """The versions of the compiler, and a digest of a module and what it imports."""
    package = module.partition(".")[0]
    folder = Path(sys.modules[package].__file__ or "").parent.parent
    digests: dict[str, bytes] = {}
    found = [module]
    while found:
        name = found.pop()
        if name not in digests:
            digests[name], imported = _read(folder, name)
            found += imported
    digest = hashlib.sha1(repr(sorted(digests.items())).encode(), usedforsecurity=False)
    return numba.__version__, llvmlite.__version__, digest.hexdigest()


@cache
def _read(folder: Path, module: str) -> tuple[bytes, list[str]]:
    """The digest of a module's source, and what it imports from its own package."""
    file = _file(folder, module)
    if file is None:
        return b"", []
    source, package, imported = file.read_bytes(), module.partition(".")[0], []
    pattern = rf"({re.escape(package)}[\w.]*) import (\([^)]*\)|[^\n]*)"
    for origin, names in re.findall(pattern.encode(), source):
        for name in re.findall(r"\w+", names.decode()):
            inner = f"{origin.decode()}.{name}"  # a module, or a name in one
            imported.append(inner if _file(folder, inner) else origin.decode())
    return hashlib.sha1(source, usedforsecurity=False).digest(), imported


@cache
def _file(folder: Path, module: str) -> Path | None:
    path = folder.joinpath(*module.split("."))
    files = path.with_suffix(".py"), path / "__init__.py"
    return next(filter(Path.is_file, files), None)
