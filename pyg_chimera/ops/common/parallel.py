"""A jitted kernel on several threads, called once from Python.

Threads take ranges of tasks from a common counter, in machine code. If Python handed
the ranges out, threads would wait for its lock, and for as long as a thread needs to
wake up, which is longer than many kernels take.
"""

import ctypes
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from llvmlite import binding, ir
from numba import typeof, types
from numba._dispatcher import compute_fingerprint
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np import arrayobj

from pyg_chimera.ops.common.compilation import compiled

#: Entries of a queue: whether to stop, the next range, how many threads have begun, and
#: whether a kernel has failed.
STOP, NEXT, BEGUN, FAILED = range(4)
_BYTE, _INT, _SHORT = ir.IntType(8), ir.IntType(64), ir.IntType(32)
_ANY = _BYTE.as_pointer()
_MACHINE = binding.get_process_triple().partition("-")[0]
_OPENMP_NAME = "pyg_chimera_openmp"


def _find_openmp() -> int | None:
    """GNU OpenMP's `GOMP_parallel`, from the same library that torch has loaded.

    Its threads spin for a while after each of torch's operators, and would compete with
    other threads for the cores.
    """
    folder = Path(torch.__file__).parent
    for path in [
        *folder.glob("lib/libgomp*.so*"),
        *folder.parent.glob("torch.libs/libgomp*"),
    ]:
        try:
            # RTLD_NOLOAD: a second copy would have threads of its own.
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
        except (AttributeError, OSError):
            continue
    return None


#: The address of `GOMP_parallel`, if there is one.
OPENMP = _find_openmp()
# Cached code refers to it by its name, and calls nothing of it on one thread.
binding.add_symbol(
    _OPENMP_NAME,
    OPENMP or ctypes.cast(ctypes.pythonapi.Py_IsInitialized, ctypes.c_void_p).value,
)


@cache
def on_threads(kernel: Any) -> Callable[..., None]:
    """A function `(threads, bounds, queue, scratch, size, *args)`.

    It calls `kernel(bounds[i], bounds[i + 1], queue, scratch, *args)` for each i that
    is left in the queue, on a number of threads of OpenMP or in the calling one, which
    may be one of several. Each thread has its own `size` numbers of `scratch`.
    """
    of = kernel.py_func
    name = f"{of.__name__}_on_threads"
    code = _drive.__code__.replace(
        co_filename=of.__code__.co_filename,
        co_firstlineno=of.__code__.co_firstlineno,
        co_name=name,
    )
    function = FunctionType(code, {"_fork": _fork}, name)
    function.__qualname__, function.__module__ = name, of.__module__
    drive = compiled()(function)
    found: dict[bytes, Callable] = {}
    # Python calls it through `drive` only: called directly, it would crash from now on.
    compiler = kernel._compiler
    compiler.targetoptions = compiler.targetoptions | {"no_cpython_wrapper": True}

    def call(
        threads: int, bounds: Any, queue: Any, scratch: Any, size: int, *args: Any
    ) -> None:
        # `bounds`, `queue` and `size` always have the types that `run` gives them.
        kinds = compute_fingerprint((scratch, args))
        entry = found.get(kinds)
        if entry is None:
            address = _address(kernel, queue, scratch, *args)
            given = address, threads, bounds, queue, scratch, size, args
            # What numba calls after it has found out types, which takes as long.
            compiled_for = drive.compile(tuple(map(typeof, given)))
            entry = found[kinds] = partial(compiled_for, address)
        entry(threads, bounds, queue, scratch, size, args)

    return call


def _address(kernel: Any, *args: Any) -> int:
    """The address of a kernel's machine code, which is compiled first."""
    signature = types.int64, types.int64, *map(typeof, args)
    kernel.compile(signature)
    found = kernel.overloads[signature]
    if found.signature.return_type != types.none:
        raise TypeError(f"{kernel.py_func.__name__} must return nothing")
    return found.library.get_pointer_to_function(found.fndesc.llvm_func_name)


def _drive(
    kernel: int,
    threads: int,
    bounds: Any,
    queue: Any,
    scratch: Any,
    size: int,
    args: Any,
) -> None:
    _fork(kernel, threads, bounds, queue, scratch, size, args)  # type: ignore[call-arg]


@intrinsic
def _fork(typing, kernel, threads, bounds, queue, scratch, size, args):
    """What `on_threads` says."""

    def emit(context: Any, builder: Any, signature: Any, values: list) -> Any:
        address, count, bounds_, queue_, scratch_, size_, args_ = values
        bounds_ = context.make_array(bounds)(context, builder, bounds_)
        scratch_ = context.make_array(scratch)(context, builder, scratch_)
        shared = [
            address,
            bounds_.data,
            builder.sub(builder.extract_value(bounds_.shape, 0), _INT(1)),
            scratch_.data,
            size_,
            queue_,
            *cgutils.unpack_tuple(builder, args_, len(args.types)),
        ]
        shared = cgutils.pack_struct(builder, shared)
        memory = cgutils.alloca_once_value(builder, shared)
        kinds = types.int64, types.int64, queue, scratch, *args.types
        work = _work(context, builder.module, kinds, shared.type)
        data = builder.bitcast(memory, _ANY)
        on_several = builder.icmp_signed(">", count, count.type(1))
        with builder.if_else(on_several) as (several, alone):
            with several:
                kind = ir.FunctionType(ir.VoidType(), [_ANY, _ANY, _SHORT, _SHORT])
                parallel = cgutils.get_or_insert_function(
                    builder.module, kind, _OPENMP_NAME
                )
                count = builder.trunc(count, _SHORT)
                pointer = builder.bitcast(work, _ANY)
                builder.call(parallel, [pointer, data, count, _SHORT(0)])
            with alone:
                builder.call(work, [data])
        return context.get_dummy_value()

    return types.void(kernel, threads, bounds, queue, scratch, size, args), emit


def _work(context: Any, module: Any, kinds: tuple, shared: ir.Type) -> ir.Function:
    """What a thread does: a function of the address of what threads share."""
    kind = ir.FunctionType(ir.VoidType(), [_ANY])
    work = ir.Function(module, kind, module.get_unique_name("chimera_work"))
    work.linkage = "internal"
    builder = ir.IRBuilder(work.append_basic_block())
    memory = builder.bitcast(work.args[0], shared.as_pointer())
    address, bounds, ranges, scratch, size, queue, *args = cgutils.unpack_tuple(
        builder, builder.load(memory)
    )
    entries = context.make_array(kinds[2])(context, builder, queue).data
    at = lambda i: builder.gep(entries, [_INT(i)])  # noqa: E731
    bound = lambda i: builder.load(builder.gep(bounds, [i]))  # noqa: E731
    start = builder.mul(_taken(builder, at(BEGUN)), size)
    own = _array(context, builder, kinds[3], builder.gep(scratch, [start]), size)
    signature = context.call_conv.get_function_type(types.none, kinds)
    kernel = builder.inttoptr(address, signature.as_pointer())
    before = _flush(builder)
    loop, run, end = (work.append_basic_block(x) for x in ("loop", "run", "end"))
    builder.branch(loop)
    builder.position_at_end(loop)
    i = _taken(builder, at(NEXT))
    stop = builder.load_atomic(at(STOP), "monotonic", 8)
    left = builder.icmp_signed("<", i, ranges)
    goes_on = builder.and_(left, builder.icmp_signed("==", stop, _INT(0)))
    builder.cbranch(goes_on, run, end)
    builder.position_at_end(run)
    first, last = bound(i), bound(builder.add(i, _INT(1)))
    with cgutils.if_likely(builder, builder.icmp_signed("<", first, last)):
        status, _ = context.call_conv.call_function(
            builder, kernel, types.none, kinds, [first, last, queue, own, *args]
        )
        with cgutils.if_unlikely(builder, status.is_error):
            for entry in (STOP, FAILED):
                builder.store_atomic(_INT(1), at(entry), "monotonic", 8)
    builder.branch(loop)
    builder.position_at_end(end)
    _flush(builder, before)
    builder.ret_void()
    return work


def _taken(builder: Any, address: Any) -> Any:
    return builder.atomic_rmw("add", address, _INT(1), "monotonic")


def _array(context: Any, builder: Any, kind: Any, data: Any, size: Any) -> Any:
    array = context.make_array(kind)(context, builder)
    item = _INT(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    arrayobj.populate_array(array, data, [size], [item], item, None)
    return array._getvalue()


def _flush(builder: Any, before: Any = None) -> Any:
    """Flushes denormal numbers to zero in this thread, as decaying signals reach them:
    arithmetic with them is 100 times slower, and they are negligibly small. Returns
    the register that says so as it was before; if that is given, puts it back.
    """

    def call(name: str, result: ir.Type, *args: Any) -> Any:
        kind = ir.FunctionType(result, [x.type for x in args])
        function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.{name}")
        return builder.call(function, args)

    if _MACHINE == "x86_64":
        memory = cgutils.alloca_once(builder, _SHORT)
        address = builder.bitcast(memory, _ANY)
        if before is None:
            call("x86.sse.stmxcsr", ir.VoidType(), address)
            before = builder.load(memory)
            builder.store(builder.or_(before, _SHORT(0x8040)), memory)
        else:
            builder.store(before, memory)
        call("x86.sse.ldmxcsr", ir.VoidType(), address)
    elif _MACHINE in ("aarch64", "arm64"):
        new = before
        if before is None:
            before = call("aarch64.get.fpcr", _INT)
            new = builder.or_(before, _INT(1 << 24))
        call("aarch64.set.fpcr", ir.VoidType(), new)
    return before
