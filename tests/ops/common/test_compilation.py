"""Machine code is loaded from disk if nothing that was compiled into it has changed."""

import errno
import importlib
import io
import itertools
import os
import pickle
import pkgutil
import re
import shutil
import subprocess
import sys
import time
import zipfile
from contextlib import suppress
from pathlib import Path

import llvmlite
import numba
import pytest
from numba.core import caching
from numba.core.caching import (
    IndexDataCacheFile,
    InTreeCacheLocator,
    _CacheLocator,
)
from numba.core.dispatcher import Dispatcher

import pyg_chimera.ops
from pyg_chimera.ops.common import compilation

SOURCES = {
    "__init__": "",
    "constants": "SHIFT = 2\n",
    "parts": """
from pyg_chimera.ops.common.compilation import compiled
from tiny.constants import (
    SHIFT,
)

@compiled(inline="always")
def part(x):
    return x + SHIFT
""",
    "kernels": """
from pyg_chimera.ops.common.compilation import compiled
from tiny import parts
from tiny.parts import part

@compiled()
def kernel(x):
    return 10 * part(x)
""",
    "others": "",
}


class Tiny:
    """A package, of which each call imports the functions as a new process would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "tiny"
        self.folder.mkdir()
        self.write(**SOURCES)

    def write(self, **sources: str) -> None:
        for name, source in sources.items():
            (self.folder / f"{name}.py").write_text(source)

    def imported(self) -> Dispatcher:
        for name in [x for x in sys.modules if x.partition(".")[0] == "tiny"]:
            del sys.modules[name]
        compilation._read.cache_clear()
        compilation._file.cache_clear()
        importlib.invalidate_caches()
        return importlib.import_module("tiny.kernels").kernel

    def __call__(self, x: int) -> tuple[int, bool]:
        """The result, and whether it was computed without compiling."""
        kernel = self.imported()
        result = kernel(x)
        return result, kernel.stats.cache_hits.total() == 1

    def files(self) -> list[str]:
        return sorted(x.name for x in self.folder.rglob("*.nb[ic]"))


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Tiny(tmp_path)
    for name in [x for x in sys.modules if x.partition(".")[0] == "tiny"]:
        del sys.modules[name]


def test_what_is_inlined_from_another_file_changes(tiny):
    assert tiny(1) == (30, False)
    assert tiny(1) == (30, True)
    files = tiny.files()
    tiny.write(parts=SOURCES["parts"].replace("x + SHIFT", "x - SHIFT"))
    assert tiny(1) == (-10, False)
    assert tiny(1) == (-10, True)
    tiny.write(constants="SHIFT = 3\n")  # of a file that holds no jitted code
    assert tiny(1) == (-20, False)
    tiny.write(others="anything = 1\n")  # which nobody imports
    assert tiny(1) == (-20, True)
    tiny.write(kernels="# A line.\n" + SOURCES["kernels"])
    assert tiny(1) == (-20, False)
    left = tiny.files()
    assert len(left) == len(files) == 2  # nothing stale is left behind
    assert [x for x in left if x in files] == [x for x in files if x.endswith(".nbi")]


def test_processes_that_save_at_once_never_read_the_code_of_each_other(tmp_path):
    """Nor what an earlier version has left behind."""
    earlier, one, other = (
        compilation._Files(str(tmp_path), "f", stamp) for stamp in ("old", "new", "new")
    )
    earlier.save("float32", "of an earlier version")
    (old,) = tmp_path.glob("*.nbc")
    time.sleep(0.02)  # as files have times

    def interrupted(name: str, data: str) -> None:
        compilation._Files._save_data(one, name, data)
        assert one.load("float32") is None  # not in the index before its data
        other.save("float64", "code for float64")

    one._save_data = interrupted
    one.save("float32", "code for float32")
    for kind in ("float32", "float64"):
        assert one.load(kind) == other.load(kind) == f"code for {kind}"
    assert not old.exists()


def test_another_compiler(tiny, monkeypatch):
    tiny(1)
    monkeypatch.setattr(llvmlite, "__version__", "0.0")
    assert tiny(1) == (30, False)
    monkeypatch.setattr(numba, "__version__", "0.0")
    assert tiny(1) == (30, False)


def test_sources_that_changed_after_they_were_imported(tiny):
    """Nobody knows which of them the compiler has seen: nothing is kept."""
    kernel = tiny.imported()
    tiny.write(constants="SHIFT = 3\n")
    assert kernel(1) == 30
    assert tiny(1) == (40, False)
    tiny.write(**SOURCES)
    assert tiny(1) == (30, False)


def test_types_that_have_been_renamed(tiny):
    """numba reads all signatures before it sees that they are outdated."""
    source = """
from typing import NamedTuple
from pyg_chimera.ops.common.compilation import compiled

class Pair(NamedTuple):
    x: int

pair = Pair(3)

@compiled()
def kernel(pair):
    return pair.x
"""
    for text in (source, source.replace("Pair", "Single")):
        tiny.write(kernels=text)
        for known in (False, True):
            kernel = tiny.imported()
            assert kernel(sys.modules["tiny.kernels"].pair) == 3
            assert (kernel.stats.cache_hits.total() == 1) == known


def test_fields_that_change_places_in_another_module(tiny):
    """A kernel need not import the module that defines its tuples."""
    tiny.write(
        parts="""
from pyg_chimera.ops.common.compilation import compiled

@compiled()
def part(pairs):
    return pairs[0].x
""",
        kernels="""
from typing import NamedTuple
from pyg_chimera.ops.common.compilation import compiled
from tiny.parts import part

class Pair(NamedTuple):
    x: int
    y: int

@compiled()
def kernel(x):
    return part((Pair(x, 10 * x),))
""",
    )
    assert tiny(1) == (1, False)
    source = (tiny.folder / "kernels.py").read_text()
    swapped = source.replace("x: int\n    y: int", "y: int\n    x: int")
    assert swapped != source
    tiny.write(kernels=swapped)
    assert tiny(1) == (10, False)
    assert tiny(1) == (10, True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs forks")
def test_no_two_processes_give_a_symbol_the_same_number():
    """Of functions of one name, such as sorts, cached kernels would call the wrong."""
    code = (  # without the package, which imports PyTorch
        f"import os, runpy; runpy.run_path({compilation.__file__!r})\n"
        "from numba.core.bytecode import FunctionIdentity as F\n"
        "if os.fork(): os.wait()\n"
        "print(next(F._unique_ids), flush=True)"
    )
    found = [
        int(line)
        for _ in range(2)
        for line in subprocess.check_output([sys.executable, "-c", code]).split()
    ]
    distances = [abs(a - b) for a, b in itertools.combinations(found, 2)]
    assert len(distances) == 6
    assert min(distances) > 10**6


def test_folders_are_those_of_numba(tiny, tmp_path, monkeypatch):
    def refuse(self: object) -> None:
        raise OSError

    monkeypatch.setattr(InTreeCacheLocator, "ensure_cache_path", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert [tiny(1), tiny(1)] == [(30, False), (30, True)]
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "given"))
    assert [tiny(1), tiny(1)] == [(30, False), (30, True)]
    assert tiny.files() == []
    for folder in ("home", "given"):
        assert list((tmp_path / folder).rglob("kernels.kernel.py*.nbi"))


def test_all_jitted_functions_are_cached_so():
    found = []
    for info in pkgutil.walk_packages(pyg_chimera.ops.__path__, "pyg_chimera.ops."):
        if ".gpu." in info.name or ".triton_" in info.name:  # need Triton
            continue
        module = importlib.import_module(info.name)
        found += [x for x in vars(module).values() if isinstance(x, Dispatcher)]
    assert len(found) > 150
    assert {type(x._cache) for x in found} == {compilation._Cache}


def test_what_a_kernel_depends_on_is_found(monkeypatch):
    """Imports are read in one form only, the one that is used."""
    other = re.compile(r"^\s*(from \.|import pyg_chimera)", re.MULTILINE)
    folder = Path(pyg_chimera.ops.__file__).parent
    for file in folder.rglob("*.py"):
        assert other.search(file.read_text()) is None, file

    read, edited = compilation._read, ""

    def read_edited(folder: Path, name: str) -> tuple:
        source, imported = read(folder, name)
        return b"edited" if name == f"pyg_chimera.ops.{edited}" else source, imported

    monkeypatch.setattr(compilation, "_read", read_edited)
    room = "recurrence"
    stamps = {}
    for edited in (
        *("", "common.simd", "common.vector_kit", f"{room}.cpu.grid_sweep"),
        # Which are edited often, and need not be recompiled for.
        *(f"{room}.{x}" for x in ("dag_scan", "gpu.walk", "dense.scan")),
    ):
        stamps[edited] = compilation.stamp(f"pyg_chimera.ops.{room}.cpu.sweep")
    unchanged = [x for x in stamps if x and stamps[x] == stamps[""]]
    assert unchanged == list(stamps)[-3:]


def test_imports_have_the_form_that_stamps_understand():
    """No relative ones, none of modules by `import`, none continued by a backslash."""
    folder = Path(pyg_chimera.__file__).parent
    for file in folder.glob("ops/**/*.py"):
        for line in file.read_text().splitlines():
            words = line.split()
            if words[:1] == ["import"]:
                assert not words[1].startswith("pyg_chimera"), file
            elif words[:1] == ["from"] and "import" in words:
                assert not words[1].startswith("."), file
                assert not line.endswith("\\"), file


def test_fast_arithmetic_is_not_inherited():
    """A function that a fast one calls first must not be reordered."""

    @compilation.compiled()
    def lost(a, b):
        return (a + b - a) - b

    @compilation.compiled(fastmath=True)
    def fast(a, b):
        return lost(a, b)

    assert fast(1.0, 1e-17) == -1e-17


# ------------------------------------------------------- what goes wrong with the cache


@pytest.fixture
def fresh(monkeypatch):
    """As in a process in which nothing has gone wrong yet."""
    monkeypatch.setattr(compilation, "PROBLEMS", [])


def once(tiny: Tiny, expected: tuple[int, bool], reason: str) -> None:
    """The result is right, and one warning says why, however often it goes wrong."""
    with pytest.warns(UserWarning, match="NUMBA_CACHE_DIR") as caught:
        found = [tiny(1), tiny(1)]
    assert found[0] == expected
    said = [str(x.message) for x in caught if "NUMBA_CACHE_DIR" in str(x.message)]
    assert len(said) == 1
    assert reason in said[0]


DAMAGES = {
    "empty": lambda whole: b"",
    "truncated": lambda whole: whole[: len(whole) // 2],
    "a byte short": lambda whole: whole[:-1],
    "garbage": lambda whole: bytes(range(256)) * 8,
    "text": lambda whole: b"<html>404</html>",
    "another pickle": lambda whole: pickle.dumps(17),
    "another class": lambda whole: pickle.dumps(Path("nowhere")),
    "a bit": lambda whole: whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:],
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damaged_code(tiny, fresh, kind):
    """What numba would load, and run, whatever it is."""
    tiny(1)
    (file,) = tiny.folder.rglob("*.nbc")
    file.write_bytes(DAMAGES[kind](file.read_bytes()))
    once(tiny, (30, False), f"{file} is damaged")
    assert tiny(1) == (30, True)  # it has been written again


@pytest.mark.parametrize("kind", [x for x in DAMAGES if x != "a bit"])
def test_damaged_index(tiny, fresh, kind):
    tiny(1)
    (file,) = tiny.folder.rglob("*.nbi")
    whole = file.read_bytes()
    file.write_bytes(DAMAGES[kind](whole))
    if kind in ("another pickle", "another class"):  # of another version
        assert tiny(1) == (30, False)
    else:
        once(tiny, (30, False), f"{file} is damaged")
    assert tiny(1) == (30, True)
    assert len(tiny.files()) == 2


def test_an_index_of_something_else(tiny, fresh):
    """Of the same version, with the right stamp."""
    kernel = tiny.imported()
    kernel(1)
    (file,) = tiny.folder.rglob("*.nbi")
    version, stamp = (pickle.dumps(x) for x in (numba.__version__, None))
    for rest in (
        b"",
        stamp,
        pickle.dumps((kernel._cache._cache_file._source_stamp, 5)),
    ):
        compilation.PROBLEMS.clear()
        file.write_bytes(version + rest)
        once(tiny, (30, False), f"{file} is damaged")
    assert tiny(1) == (30, True)


def test_code_that_is_gone(tiny, fresh):
    tiny(1)
    (file,) = tiny.folder.rglob("*.nbc")
    file.unlink()
    once(tiny, (30, False), "FileNotFoundError")
    assert tiny(1) == (30, True)


def test_a_folder_that_is_gone(tiny, fresh):
    """It is made again."""
    kernel = tiny.imported()
    shutil.rmtree(tiny.folder / "__pycache__")
    assert kernel(1) == 30
    assert tiny(1) == (30, True)


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT"])
@pytest.mark.parametrize("step", ["open", "write", "close", "replace"])
def test_what_cannot_be_written(tiny, fresh, monkeypatch, name, step):
    """Not at all, or not to its end: nothing is left of it."""
    error = OSError(getattr(errno, name), "no")

    class File(io.FileIO):
        def write(self, data: bytes) -> int:
            if step == "write":
                super().write(data[: len(data) // 2])
                raise error
            return super().write(data)

        def __exit__(self, *args: object) -> None:
            super().__exit__(*args)
            if step == "close":
                raise error

    def opened(path: str, mode: str) -> object:
        if mode == "rb":
            return open(path, mode)
        if step == "open":
            raise error
        return File(path, mode)

    def replace(old: str, new: str) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(caching, "open", opened, raising=False)
        if step == "replace":
            patch.setattr(os, "replace", replace)
        once(tiny, (30, False), str(error))
        assert list((tiny.folder / "__pycache__").iterdir()) == []
    assert tiny(1) == (30, False)
    assert tiny(1) == (30, True)


@pytest.mark.parametrize("name", ["EACCES", "EIO"])
def test_what_cannot_be_read(tiny, fresh, monkeypatch, name):
    tiny(1)
    error = OSError(getattr(errno, name), "no")

    def refuse(*args: object) -> None:
        raise error

    monkeypatch.setattr(compilation._Files, "_load_data", refuse)
    once(tiny, (30, False), str(error))
    compilation.PROBLEMS.clear()
    monkeypatch.setattr(IndexDataCacheFile, "_load_index", refuse)
    once(tiny, (30, False), str(error))


def test_no_folder_can_be_used(tiny, fresh, monkeypatch):
    """A read-only one, and no home to fall back to."""

    def refuse(self: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(_CacheLocator, "ensure_cache_path", refuse)
    once(tiny, (30, False), "Read-only file system")
    assert tiny.files() == []


@pytest.mark.parametrize("kind", ["a file", "below a file", "below a link to nothing"])
def test_a_given_folder_that_cannot_be_used(tiny, fresh, tmp_path, monkeypatch, kind):
    """numba would use another one without a word."""
    given = tmp_path / "given"
    if kind == "below a link to nothing":
        given.symlink_to(tmp_path / "given")
    else:
        given.write_text("")
    below = given if kind == "a file" else given / "below"
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(below))
    once(tiny, (30, False), str(given))
    assert tiny(1) == (30, True)  # beside the sources


def test_sources_that_cannot_be_read(tiny, fresh, monkeypatch):
    def refuse(folder: Path, name: str) -> None:
        raise PermissionError(errno.EACCES, "no", name)

    refuse.cache_clear = lambda: None  # type: ignore[attr-defined]
    monkeypatch.setattr(compilation, "_read", refuse)
    once(tiny, (30, False), "PermissionError")
    assert tiny.files() == []


def test_sources_that_vanish_after_they_were_imported(tiny, fresh):
    kernel = tiny.imported()
    shutil.rmtree(tiny.folder)
    with pytest.warns(UserWarning, match="NUMBA_CACHE_DIR"):
        assert kernel(1) == 30


def test_a_package_in_an_archive(tmp_path, fresh, monkeypatch):
    """Where numba would not see that its files have changed."""
    archive = tmp_path / "all.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for name, source in SOURCES.items():
            file.writestr(f"tiny/{name}.py", source)
    monkeypatch.syspath_prepend(archive)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    with pytest.warns(UserWarning, match="no file has the source of tiny"):
        kernel = importlib.import_module("tiny.kernels").kernel
    try:
        assert kernel(1) == 30
    finally:
        for name in [x for x in sys.modules if x.partition(".")[0] == "tiny"]:
            del sys.modules[name]


def test_a_package_without_a_file(tiny, fresh, monkeypatch):
    kernel = tiny.imported()
    monkeypatch.setattr(sys.modules["tiny"], "__file__", None)
    with pytest.warns(UserWarning, match="no file has the source of tiny"):
        assert kernel(1) == 30


PROCESS = """
from tiny.kernels import kernel
print(kernel(1), kernel.stats.cache_hits.total())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
@pytest.mark.parametrize("home", ["/proc/nobody", "file"])
def test_no_home_and_a_folder_that_cannot_be_used(tiny, home, tmp_path):
    """From the import on, in a process of its own."""
    (tmp_path / "file").write_text("")
    (tiny.folder / "__pycache__").write_text("")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    env = {**os.environ, "HOME": str(tmp_path / home), "PYTHONPATH": paths}
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        env.pop(name, None)
    out = subprocess.run(
        [sys.executable, "-B", "-c", PROCESS],
        env=env, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert (out.returncode, out.stdout) == (0, "30 0\n"), out.stderr
    assert out.stderr.count("NUMBA_CACHE_DIR") == 1


def test_processes_that_compile_at_once(tiny):
    """And damage each other's files meanwhile."""
    paths = os.pathsep.join([str(tiny.folder.parent), *filter(None, sys.path)])
    command = [sys.executable, "-B", "-c", PROCESS]
    env = {**os.environ, "PYTHONPATH": paths}
    processes = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    while any(x.poll() is None for x in processes):
        for file in tiny.folder.rglob("*.nb[ic]"):
            with suppress(FileNotFoundError):
                os.truncate(file, 50)
    found = [x.communicate()[0] for x in processes]
    assert {x.returncode for x in processes} == {0}
    assert {x.split()[0] for x in found} == {"30"}
