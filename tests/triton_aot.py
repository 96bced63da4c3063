"""Kernels compiled for real GPUs, on a machine that needs none.

`launches` notes the launches of a block of code in place of running them, and `built`
compiles a launch as it would be for a GPU of some kind, and looks at the binary.
"""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

__all__ = [
    "SHARED",
    "TARGETS",
    "Build",
    "Launch",
    "built",
    "launches",
    "specializations",
]

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
#: Bytes of shared memory that a block of threads may have.
SHARED = {
    "sm_80": 163 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "gfx942": 64 << 10,
}
_BIN = Path(triton.__file__).parent / "backends/nvidia/bin"


class Launch(NamedTuple):
    """A launch, with all that it is compiled for."""

    kernel: JITFunction
    args: tuple
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """The kernel, and its constants."""
        names = self.kernel.arg_names
        constants = [str(self.args[i]) for i in self.kernel.constexprs]
        given = [y for x in self.args for y in (x if isinstance(x, tuple) else (x,))]
        types = {str(x.dtype) for x in given if hasattr(x, "dtype")}
        assert len(names) == len(self.args)
        kind = "float64 " * ("torch.float64" in types)
        return f"{self.kernel.fn.__name__} {kind}{' '.join(constants)}"


@contextmanager
def launches() -> Iterator[dict[str, Launch]]:
    """Notes launches, by name, and runs none."""
    found: dict[str, Launch] = {}

    def note(self, *args, grid, warmup, **options):
        launch = Launch(self, args, options)
        found.setdefault(launch.name, launch)

    run, JITFunction.run = JITFunction.run, note
    try:
        yield found
    finally:
        JITFunction.run = run


@contextmanager
def specializations() -> Iterator[set[str]]:
    """Notes what launches would be compiled for, and runs none."""
    found: set[str] = set()
    backend = make_backend(TARGETS["sm_90"])

    def note(self, *args, grid, warmup, **options):
        bind = create_function_from_signature(self.signature, self.params, backend)
        found.add(f"{self.fn.__name__} {bind(*args, debug=False, **options)[1]}")

    run, JITFunction.run = JITFunction.run, note
    try:
        yield found
    finally:
        JITFunction.run = run


class Build(NamedTuple):
    """What a compiled kernel needs of a multiprocessor."""

    registers: int  #: of a thread
    spills: int  #: instructions that move registers to memory or back
    shared: int  #: bytes
    warps: int
    products: int  #: instructions of matrix units


def built(launch: Launch, target: str) -> Build:
    """Compiles a launch for a GPU; raises as Triton does."""
    gpu = TARGETS[target]
    backend, kernel = make_backend(gpu), launch.kernel
    args = launch.args
    if gpu.backend == "hip":  # as `input_precision` has it
        args = tuple("ieee" if isinstance(x, str) else x for x in args)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(*args, debug=False, **launch.options)
    options, signature, constants, attrs = kernel._pack_args(
        backend, launch.options, bound, specialization, None
    )
    source = ASTSource(kernel, signature, constants, attrs)
    compiled = triton.compile(source, target=gpu, options=options.__dict__)
    read = _read_nvidia if gpu.backend == "cuda" else _read_amd
    registers, spills, products = read(compiled.asm)
    meta = compiled.metadata
    return Build(registers, spills, meta.shared, meta.num_warps, products)


def _read_nvidia(asm: dict[str, Any]) -> tuple[int, int, int]:
    """From the binary itself."""

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run(
                [_BIN / "cuobjdump", option, file.name],
                capture_output=True, text=True, check=True,
            ).stdout
            for option in ("-res-usage", "-sass")
        )  # fmt: skip
    line = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)"
    count = Counter(re.findall(line, code, re.M))
    spills = count["STL"] + count["LDL"]
    products = sum(count[x] for x in ("HMMA", "DMMA", "HGMMA", "UTCHMMA"))
    return int(re.search(r"REG:(\d+)", usage)[1]), spills, products


def _read_amd(asm: dict[str, Any]) -> tuple[int, int, int]:
    """From the assembly and its notes."""
    text = asm["amdgcn"]

    def noted(key: str) -> int:
        return int(re.search(rf"\.{key}:\s+(\d+)", text)[1])

    spills = noted("vgpr_spill_count") + noted("sgpr_spill_count")
    return noted("vgpr_count"), spills, len(re.findall(r"v_mfma", text))
