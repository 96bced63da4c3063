"""How jitted kernels run: threads, scratch memory, denormals, interruption.

A kernel is a jitted function `kernel(first, last, stop, scratch, *args)` that processes
the tasks from `first` up to `last`, which are independent of each other, and returns
early if `stopped(stop)`. Kernels do not use numba's parallel regions: they release the
GIL and run on `torch.get_num_threads()` threads that share the tasks, which is safe
after a fork and when called from several Python threads.
"""

import gc
import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numba import types
from numba.core import event
from numba.core.dispatcher import Dispatcher
from torch import Tensor

from pyg_chimera.ops.common.array_views import as_array
from pyg_chimera.ops.common.compilation import compiled, compiles_to
from pyg_chimera.ops.common.parallel import FAILED, OPENMP, STOP, on_threads

# Sums may be reordered (to use vector units), but NaN and infinity must survive.
_FAST = {"reassoc", "contract", "nsz", "arcp"}
jit = compiled(fastmath=_FAST)
# Inlined, as passing arrays to a function takes longer than a short loop.
inlined = compiled(fastmath=_FAST, inline="always")

#: `mmap.MAP_NORESERVE`, which Python knows since 3.13, on Linux.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000) if sys.platform == "linux" else 0
#: Bytes of a huge page.
_HUGE = 1 << 21
#: Bytes of scratch memory for each of its threads that a caller keeps between calls.
_KEPT_BYTES = 1 << 26
#: Costs (about nanoseconds) below which no other thread is woken, and above which the
#: calling thread only waits for others, as only then it notices Ctrl-C at once.
_SHORT, _LONG = 5e4, 5e8
#: How many numbers PyTorch adds up in less time than numpy.
_MANY = 1 << 16


def run(
    kernel: Callable, costs: np.ndarray, scratch: int, dtype: np.dtype, *args: object
) -> None:
    """Runs a kernel on all tasks.

    Args:
        kernel: The kernel, see the module's docstring.
        costs: The cost of each task, in nanoseconds (approximately).
        scratch: How many numbers of scratch memory a task needs.
        dtype: The dtype of the scratch memory.
        *args: Further arguments of the kernel.
    """
    num_tasks, total = costs.shape[0], float(costs.sum())
    num_threads = min(torch.get_num_threads(), num_tasks)
    if total < _SHORT:
        num_threads = 1
    queue = np.zeros(4, np.int64)
    if not isinstance(kernel, Dispatcher):  # with NUMBA_DISABLE_JIT
        kernel(0, num_tasks, queue, np.empty(scratch, dtype), *args)
        return
    bounds = np.array([0, num_tasks], np.int64)
    if num_threads > 1:
        # Many ranges per thread, as other processes may use cores.
        cuts = costs.cumsum().searchsorted(total * _shares(16 * num_threads))
        bounds = np.concatenate([bounds[:1], cuts, bounds[1:]])
    own = -(-scratch * dtype.itemsize // 64) * 64 // dtype.itemsize
    call = on_threads(kernel)
    has_openmp = OPENMP is not None and os.getpid() == _PID  # not in a forked child
    if total < _LONG and (num_threads == 1 or has_openmp):
        memory = _SCRATCH.get(num_threads, own, dtype)
        call(num_threads, bounds, queue, memory, own, *args)
    else:  # its own memory, as signal handlers may run kernels meanwhile
        memory = _aligned(num_threads * own * dtype.itemsize).view(dtype)
        _in_threads(
            lambda: call(1, bounds, queue, memory, own, *args), num_threads, queue
        )
    if queue[FAILED]:
        raise RuntimeError(
            f"{kernel.py_func.__name__} failed, perhaps as memory ran out; if not, "
            "please report it"
        )


@lru_cache
def _shares(count: int) -> np.ndarray:
    return np.arange(1, count) / count


def arrays(*tensors: Tensor) -> list[np.ndarray]:
    """Tensors as contiguous numpy arrays."""
    return [as_array(x) for x in tensors]


def summed(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """The sum over axes, without a copy if each of them has size 1."""
    if all(x.shape[axis] == 1 for axis in axes):
        return x.squeeze(axes)
    if x.size < _MANY:
        return x.sum(axes)
    return as_array(torch.from_numpy(x).sum(axes))  # which is faster by far


def heads_a_task(num_blocks: int, num_groups: int, num_heads: int) -> int:
    """How many heads of a group a task takes: all, if there are enough tasks."""
    enough = num_blocks * num_groups >= 4 * torch.get_num_threads()
    return num_heads // num_groups if enough else 1


# --------------------------------------------------------------------------- threads


_PID = os.getpid()


def _in_threads(work: Callable[[], None], num_threads: int, queue: np.ndarray) -> None:
    """Runs a function in several threads of Python, where OpenMP is missing, or for
    long work: the calling thread only waits, so that it notices Ctrl-C at once.
    """
    pool = _pool(os.getpid(), num_threads)
    futures = [pool.submit(work) for _ in range(num_threads)]
    try:
        wait(futures)
    except BaseException:  # such as Ctrl-C
        queue[STOP] = 1
        wait(futures)
        raise
    for future in futures:
        future.result()


@lru_cache(maxsize=1)
def _pool(pid: int, num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, "pyg_chimera")


def _flag(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    """Whether the first entry is set; the compiler must not hoist this from a loop."""
    array = context.make_array(signature.args[0])(context, builder, args[0])
    flag = builder.load_atomic(array.data, "monotonic", 8)
    return builder.icmp_signed("!=", flag, flag.type(0))


@compiles_to(lambda stop: types.boolean(stop), _flag)
def stopped(stop: np.ndarray) -> bool:
    """Whether another thread has set `stop`."""
    return bool(stop[0])


# ---------------------------------------------------------- scratch memory, denormals


class _Scratch:
    """Per-thread memory that outlives a call: new pages cost more than their use."""

    def __init__(self) -> None:
        # Keyed by thread, as callers may be threads that other libraries have made.
        self.buffers: dict[int, np.ndarray] = {}

    def get(self, count: int, size: int, dtype: np.dtype) -> np.ndarray:
        """Memory for `count` threads."""
        needed = count * size * dtype.itemsize
        if size * dtype.itemsize > _KEPT_BYTES:
            return _aligned(needed).view(dtype)
        thread = threading.get_ident()
        buffer = self.buffers.get(thread)
        if buffer is None or buffer.shape[0] < needed:
            if len(self.buffers) > 256:  # most of their threads have ended
                self.buffers.clear()
            buffer = self.buffers[thread] = _aligned(needed)
        return buffer[:needed].view(dtype)


def _aligned(size: int) -> np.ndarray:
    """Bytes aligned to a cache line, so that no vector crosses two lines.

    On Linux, many of them are on huge pages: where states are gathered from thousands
    of small ones, translating their addresses takes longer than all else.
    """
    unit = 64
    if size >= _HUGE // 8 and hasattr(mmap, "MADV_HUGEPAGE"):
        unit = _HUGE
        # What is not used, such as of threads that get small tasks, need not be there.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
        memory = mmap.mmap(-1, -(-size // _HUGE) * _HUGE + _HUGE, flags)
        with suppress(OSError):  # of kernels that have none
            memory.madvise(mmap.MADV_HUGEPAGE)
        buffer = np.frombuffer(memory, np.uint8)
    else:
        buffer = np.empty(size + unit, np.uint8)
    start = -buffer.ctypes.data % unit
    return buffer[start : start + size]


_SCRATCH = _Scratch()

# ------------------------------------------------------------------------ compilation


def _waiting() -> str:
    """The layer or transform that called this, or else the function of the package."""
    frame, found = sys._getframe(), ""
    while frame := frame.f_back:  # type: ignore[assignment]
        module = frame.f_globals.get("__name__", "")
        kind = type(frame.f_locals.get("self")).__name__
        if module.startswith(("pyg_chimera.nn.", "pyg_chimera.transforms.")) and not (
            kind.startswith("_") or kind == "NoneType"
        ):
            return kind
        if module.startswith("pyg_chimera.") and module != __name__:
            found = frame.f_code.co_name
    return found


class _Announcer(event.Listener):
    """Logs once that kernels are being compiled, as the first call takes long.

    Meanwhile no garbage is collected: compilers make very many objects, few of them
    garbage, and to look for it takes a tenth of their time.
    """

    def __init__(self) -> None:
        self.said, self.count = False, 0
        self.depth, self.collects = 0, False

    def on_start(self, event: Any) -> None:
        if self.depth == 0:
            self.collects = gc.isenabled()
            gc.disable()
        self.depth += 1
        module = event.data["dispatcher"].py_func.__module__ or ""
        ours = module.startswith("pyg_chimera.ops.")
        self.count += ours
        if not self.said and ours:
            self.said = True
            logging.getLogger("pyg_chimera").warning(
                "pyg_chimera is compiling the CPU kernels of %s. Each layer type takes "
                "10 to 30 seconds, once a machine; this is said once a process. "
                "'python -m pyg_chimera.compile' compiles all of them ahead.",
                _waiting() or module,
            )

    def on_end(self, event: Any) -> None:
        self.depth -= 1
        if self.depth == 0 and self.collects:
            gc.enable()

    def forked(self) -> None:
        """In a new process, in which nothing is being compiled."""
        if self.depth > 0:
            self.depth = 1
            self.on_end(None)


#: Counts the functions that have been compiled.
ANNOUNCER = _Announcer()
event.register("numba:compile", ANNOUNCER)
if hasattr(os, "register_at_fork"):  # while another thread compiles
    os.register_at_fork(after_in_child=ANNOUNCER.forked)
