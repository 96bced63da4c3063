"""How functions are jitted, and when their machine code is loaded from disk.

numba's cache looks at the file of a function only, although functions of other files
are compiled into it. Here, the files of the package that its file imports, directly or
not, must be unchanged as well. No error of the cache ends a program: what cannot be
read or written is compiled again.
"""

import hashlib
import os
import pickle
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from inspect import signature
from itertools import count
from pathlib import Path
from typing import Any
from warnings import warn

import llvmlite
import numba
from numba import types
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import (
    FunctionCache,
    IndexDataCacheFile,
    InTreeCacheLocator,
    UserProvidedCacheLocator,
)
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
    options["no_cfunc_wrapper"] = True  # nobody calls it; a tenth of the time
    jit = numba.njit(nogil=True, fastmath=fastmath, **options)

    def decorate(function: Callable) -> Any:
        dispatcher = jit(function)
        if isinstance(dispatcher, Dispatcher):  # not with NUMBA_DISABLE_JIT
            with _forgiven():
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


#: What has gone wrong with the cache in this process.
PROBLEMS: list[str] = []


@contextmanager
def _forgiven() -> Iterator[None]:
    """Warns of an error of the cache, once in a process, and goes on without."""
    try:
        yield
    except Exception as error:  # what damaged files raise is anything
        PROBLEMS.append(f"{type(error).__name__}: {error}")
        if len(PROBLEMS) == 1:
            warn(
                f"the cache of compiled kernels failed ({PROBLEMS[0]}): they are "
                "compiled again, which takes 10 to 30 seconds for each layer type. Set "
                "NUMBA_CACHE_DIR to a folder that can be written to, or, if its files "
                "are damaged, delete them",
                stacklevel=3,
            )


class _Cache(FunctionCache):
    """numba's cache, in the same folders, with a stamp of all files that matter."""

    def __init__(self, function: Callable) -> None:
        given = numba.config.CACHE_DIR  # type: ignore[attr-defined]
        first = UserProvidedCacheLocator if given else InTreeCacheLocator
        wanted = first(function, function.__code__.co_filename)
        try:
            super().__init__(function)
        except RuntimeError:  # numba has found no folder, and does not say why
            wanted.ensure_cache_path()
            raise
        locator = self._impl.locator
        if given and not isinstance(locator, first):
            with _forgiven():
                wanted.ensure_cache_path()
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

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        with _forgiven():
            return super().load_overload(sig, target_context)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Saves machine code, unless its sources have changed since their import."""
        with _forgiven():
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
    writes would find that of an earlier version, or of other types. Code that is not
    what was written would end the process: a digest precedes it.
    """

    def save(self, key: Any, data: Any) -> None:
        index = Path(self._index_path)
        then = index.stat().st_mtime_ns if index.exists() else 0
        overloads = self._load_index()
        if not overloads:  # what its files belong to is an earlier version
            names = self._index_name.removesuffix("nbi") + "*.nbc"
            for path in index.parent.glob(names):
                with suppress(OSError):
                    if path.stat().st_mtime_ns <= then:  # not of another process
                        path.unlink()
        name = overloads.get(key) or self._data_name(secrets.randbits(48))
        self._save_data(name, data)
        self._save_index(self._load_index() | {key: name})

    def load(self, key: Any) -> Any:
        """None if there is none, or it is gone since the index was read."""
        with _forgiven():
            name = self._load_index().get(key)
            return None if name is None else self._load_data(name)

    def _load_index(self) -> Any:
        with _forgiven():
            try:
                return dict(super()._load_index())
            except OSError:
                raise
            except (AttributeError, ImportError):  # as it reads types before the stamp
                return {}
            except Exception as error:
                raise ValueError(f"{self._index_path} is damaged") from error
        return {}

    def _save_data(self, name: str, data: Any) -> None:
        code = self._dump(data)
        with self._open_for_write(self._data_path(name)) as file:
            file.write(_digest(code) + code)

    def _load_data(self, name: str) -> Any:
        path = Path(self._data_path(name))
        whole = path.read_bytes()
        digest, code = whole[:20], whole[20:]
        if _digest(code) != digest:
            raise ValueError(f"{path} is damaged")
        return pickle.loads(code)


def _digest(content: bytes) -> bytes:
    return hashlib.sha1(content, usedforsecurity=False).digest()


def stamp(module: str) -> tuple[str, ...]:
    """The versions of the compiler, and a digest of a module and what it imports.

    Raises:
        OSError: If there is no file with its source, or it cannot be read.
    """
    package = sys.modules[module.partition(".")[0]]
    folder = Path(package.__file__ or os.devnull).parent
    folder = folder.parent if hasattr(package, "__path__") else folder
    if _file(folder, module) is None:  # such as in an archive
        raise FileNotFoundError(f"no file has the source of {module}")
    digests: dict[str, bytes] = {}
    found = [module]
    while found:
        name = found.pop()
        if name not in digests:
            digests[name], imported = _read(folder, name)
            found += imported
    digest = _digest(repr(sorted(digests.items())).encode())
    return numba.__version__, llvmlite.__version__, digest.hex()


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
    return _digest(source), imported


@cache
def _file(folder: Path, module: str) -> Path | None:
    path = folder.joinpath(*module.split("."))
    files = path.with_suffix(".py"), path / "__init__.py"
    return next(filter(Path.is_file, files), None)
