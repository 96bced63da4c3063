"""Comparisons of backends with the reference, and before first use with PyTorch.

On a GPU, a call with ``backend="auto"`` asks `reason_against`, which compares kernels
with PyTorch before their first use, and remembers on disk how that went.
"""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context, ContextVar
from importlib import import_module
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any, Protocol
from warnings import warn

import torch
from torch import Tensor

from pyg_chimera.ops.common.checks import setting
from pyg_chimera.ops.common.compilation import stamp
from pyg_chimera.ops.common.dispatch import Choice
from pyg_chimera.ops.common.examples import Draw, Example
from pyg_chimera.ops.common.torch_private import is_in_backward_pass
from pyg_chimera.ops.common.triton_runtime import WITH_TRITON, allows_tf32
from pyg_chimera.ops.common.user_files import user_file, write_json


class Declared(Protocol):
    """What an operator declares for its users."""

    function: Callable[..., Tensor]  #: the public function
    examples: Callable[[Draw], Iterator[Example]]  #: tiny arguments of it

    def choice(self, **arguments: Any) -> Choice:
        """Report the algorithm of a call."""


# ------------------------------------------------------------------------ comparisons

#: The largest errors that rounding explains, relative to a tensor's largest entry.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-4, torch.bfloat16: 3e-2}
_TOLERANCE_OF_TF32 = 2e-2
_OPTIONS = {
    "solver": ("sparse", "dense", "iterative", "neumann"),
    "form": ("state", "mask", "chunk"),
    "backend": ("numba", "triton", "torch"),
}

Results = dict[str, Tensor]  #: the output and all gradients, described by the keys


def verdicts(
    operator: Declared, device: torch.device
) -> dict[tuple[Choice, torch.dtype], tuple[float, str]]:
    """The largest error of each algorithm of an operator on a device, compared with the
    reference on all tiny inputs of one dtype, and what is wrong, if anything.
    """
    found: dict[tuple[Choice, torch.dtype], tuple[float, str]] = {}
    for inputs in operator.examples(Draw()):
        expected = {}
        for dtype, options in product(_TOLERANCE, all_options(operator)):
            given = cast(inputs, dtype, device)
            choice = algorithm(operator, given, options)
            if choice is None:
                continue
            terms = options.get("num_terms")
            if terms not in expected:
                expected[terms] = computed(operator, inputs, _by("reference", options))
            error, problem = _compared(operator, given, options, expected[terms])
            before = found.get((choice, dtype), (0.0, ""))
            found[choice, dtype] = max(before[0], error), before[1] or problem
    return found


def all_options(operator: Declared) -> Iterator[Example]:
    """Yield all combinations of solver, form and backend."""
    known = signature(operator.function).parameters
    some = {option: values for option, values in _OPTIONS.items() if option in known}
    for values in product(*some.values()):
        yield _complete(dict(zip(some, values, strict=True)))


def _complete(options: Example) -> Example:
    sums = options.get("solver") == "neumann"
    return {**options, "num_terms": 4} if sums else options


def _by(backend: str, options: Example) -> Example:
    """The options for the same result by another backend, however it computes it."""
    same = {"num_terms": 4, "solver": "neumann"} if "num_terms" in options else {}
    return {**same, "backend": backend}


def cast(inputs: Example, dtype: torch.dtype, device: Any) -> Example:
    """Convert tensors to a device, and floating-point ones to a dtype."""

    def converted(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.to(device, dtype) if x.is_floating_point() else x.to(device)

    return {name: converted(x) for name, x in inputs.items()}


def algorithm(operator: Declared, inputs: Example, options: Example) -> Choice | None:
    """Report the algorithm of a call; None if it is not supported."""
    try:
        return operator.choice(**inputs, **options).algorithm
    except ValueError:
        return None


def computed(operator: Declared, inputs: Example, options: Example) -> Results:
    """Compute the output and all gradients, in float64 on the CPU at the end."""
    leaves = {
        key: x.detach().requires_grad_()
        for key, x in inputs.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    out = operator.function(**{**inputs, **leaves}, **options)
    grads = torch.autograd.grad(out, list(leaves.values()), Draw()(*out.shape).to(out))
    results = {f"the gradient of '{x}'": y for x, y in zip(leaves, grads, strict=True)}
    results = {"the output": out, **results}
    return {what: x.detach().double().cpu() for what, x in results.items()}


def _compared(
    operator: Declared, inputs: Example, options: Example, expected: Results
) -> tuple[float, str]:
    """The largest relative error, and what is wrong, if anything."""
    try:
        got = computed(operator, inputs, options)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever compilers and drivers raise
        lines = str(error).splitlines() or [""]
        return float("inf"), f"it raises {type(error).__name__}: {lines[0][:200]}"
    errors = {}
    for what, x in got.items():
        off = (x - expected[what]).abs().max() / expected[what].abs().max()
        errors[what] = float(off.nan_to_num(float("inf")))
    worst = max(errors, key=lambda what: errors[what])
    like = next(
        x for x in inputs.values() if isinstance(x, Tensor) and x.is_floating_point()
    )
    most = _TOLERANCE[like.dtype]
    if _uses_tf32(like.device) and like.dtype == torch.float32:
        most = _TOLERANCE_OF_TF32
    if errors[worst] <= most:
        return errors[worst], ""
    return errors[worst], f"{worst} is off by {errors[worst]:.2g} in {like.dtype}"


def _uses_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and allows_tf32()


# --------------------------------------------------------------------------- verdicts

#: What is wrong with an algorithm on a device, or "", as far as this process knows.
_KNOWN: dict[tuple, str] = {}
_LOCK = threading.Lock()
_TESTING: ContextVar[bool] = ContextVar("testing", default=False)
#: Of so many machines, or versions, verdicts are kept on disk.
_MOST_MACHINES = 16


def reason_against(
    operator: Declared, choice: Choice, device: torch.device
) -> str | None:
    """Why a backend should not be used on a device unless it is asked for, or None.

    The first call on a machine compares it with PyTorch on tiny inputs, in a thread of
    its own, without the caller's modes (autocast, inference, fake tensors, ...). Where
    that is impossible, PyTorch should be used, unless the result is known.
    """
    key = (*choice[:4], device, _uses_tf32(device))
    problem = _KNOWN.get(key)
    if problem == "":
        return None
    if problem is None:
        if _TESTING.get():
            return f"backend={choice.backend!r} is being tested"
        with _LOCK:
            problem = _KNOWN.get(key)
            if problem is None:
                problem, certain = _judged(operator, choice, device)
                if certain:
                    _KNOWN[key] = problem
                if problem:
                    warn(f"{problem}; another backend is used", stacklevel=2)
    return problem or None


def _judged(
    operator: Declared, choice: Choice, device: torch.device
) -> tuple[str, bool]:
    """What is wrong with an algorithm, or "", and whether that will stay so."""
    machine, name = machine_of(device), " ".join(choice[:4])
    problem = _remembered().get(machine, {}).get(name)
    subject = f"backend={choice.backend!r}"
    if problem is None:
        if is_in_backward_pass():  # whose thread serves the device
            return f"{subject} cannot be tested first in a backward pass", False
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return (
                f"{subject} cannot be tested while a CUDA graph is captured; call the "
                "model once before",
                False,
            )
        try:
            with ThreadPoolExecutor(1, "pyg_chimera") as pool:
                test = pool.submit(Context().run, _tested, operator, choice, device)
                problem = test.result()
        except torch.OutOfMemoryError:
            return f"{subject} cannot be tested, as the memory is full", False
        except Exception as error:  # of PyTorch
            return f"{subject} cannot be tested: {error!r}", True
        remember(machine, {name: problem})
    if problem:
        problem = (
            f"{subject} failed its test on {device}: {problem} (see 'python -m "
            f"pyg_chimera.selftest {choice.operator}')"
        )
    return problem, True


def _tested(operator: Declared, choice: Choice, device: torch.device) -> str:
    """What is wrong with an algorithm, or "": a comparison with PyTorch in float64."""
    known = signature(operator.function).parameters
    options = {x: getattr(choice, x) for x in _OPTIONS if x in known}
    options = _complete(options)
    tried = 0
    with setting(_TESTING, True):
        for inputs in operator.examples(Draw()):
            for dtype in (torch.float64, torch.float32):
                given = cast(inputs, dtype, device)
                if algorithm(operator, given, options) == choice.algorithm:
                    tried += 1
                    double = cast(inputs, torch.float64, device)
                    expected = computed(operator, double, _by("torch", options))
                    if problem := _compared(operator, given, options, expected)[1]:
                        return problem
    return "" if tried else "no tiny input takes this algorithm"


def machine_of(device: torch.device) -> str:
    """Everything that a verdict depends on."""
    name, driver = torch.backends.cpu.get_cpu_capability(), "none"
    if device.type == "cuda":
        name, driver = torch.cuda.get_device_name(device), _driver()
    triton = import_module("triton").__version__ if WITH_TRITON else "none"
    precision = "TF32" if _uses_tf32(device) else "float32"
    sources = stamp("pyg_chimera.ops")[-1][:16]
    return (
        f"{name}, driver {driver}, torch {torch.__version__}, triton {triton}, "
        f"products in {precision}, sources {sources}"
    )


def _driver() -> str:
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        with suppress(OSError):
            return Path(path).read_text().splitlines()[0]
    return "unknown"


def _remembered() -> dict[str, dict[str, str]]:
    """The verdicts on disk: for each machine, what is wrong with each algorithm."""
    try:
        found = json.loads(user_file("selftest.json").read_text())
        return {x: dict(y) for x, y in found.items()}
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError):
        return {}  # there is none, or no home, or something else wrote it


def remember(machine: str, verdicts: dict[str, str]) -> None:
    """Adds verdicts to those on disk, if it can be written to."""
    known = _remembered()
    known[machine] = known.pop(machine, {}) | verdicts
    latest = dict(list(known.items())[-_MOST_MACHINES:])
    with suppress(OSError, RuntimeError):
        write_json(user_file("selftest.json"), latest)
