"""Whether the backends compute what they should, on this machine.

``python -m pyg_chimera.selftest`` compares them with the reference, on tiny inputs, and
prints a table for bug reports; names of operators select some.

On a GPU, a call with ``backend="auto"`` asks :func:`objection`, which compares kernels
with PyTorch before their first use, and remembers on disk how that went.
"""

import json
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import Context, ContextVar
from importlib import import_module
from importlib.metadata import version
from inspect import signature
from itertools import product
from pathlib import Path
from typing import Any
from warnings import warn

import torch
import torch.nn.functional as F
from torch import Tensor

from pyg_chimera import ops
from pyg_chimera.ops.common.checks import setting
from pyg_chimera.ops.common.compilation import stamp
from pyg_chimera.ops.common.dispatch import Choice
from pyg_chimera.ops.common.triton_runtime import WITH_TRITON, allows_tf32

__all__ = ["main", "objection"]

# ----------------------------------------------------------------------- tiny inputs

Inputs = dict[str, Any]


class _Draw:
    """Random numbers that bfloat16 can represent, the same ones each time."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        return _rounded(scale * x)

    def nodes(self, size: int) -> Inputs:
        """Queries and keys that two heads share, and values."""
        shapes = {"query": (1, 6), "key": (1, 6), "value": (2, 5)}
        return {name: self(size, *shape) for name, shape in shapes.items()}

    def graph(self, kind: str) -> Inputs:
        """A graph that takes several tiles of a kernel, and one of three nodes."""
        size = 70 if "path" in kind else 40
        node = torch.arange(1, size)
        edges = torch.stack([node - 1, node])
        if kind in ("dag", "graph"):
            others = torch.stack([(5 * node + 3) % node, node])
            edges = torch.cat([edges[:, ::3], others, others[:, :1]], 1)  # a duplicate
        edges = torch.cat([edges, torch.tensor([[size], [size + 1]])], 1)
        if kind in ("graph", "undirected path"):
            edges = torch.cat([edges, edges.flip(0), torch.full((2, 1), 7)], 1)
        order = torch.randperm(size + 3, generator=self.generator)
        return {"edge_index": order.argsort()[edges], "batch": (order >= size).long()}

    def weights(self, graph: Inputs, channels: int) -> Tensor:
        """Weights with which the rows of |A| sum to less than one."""
        target = graph["edge_index"][1]
        degree = torch.bincount(target)[target].unsqueeze(1)
        return _rounded(0.9 * self(len(target), channels).tanh() / degree)


def _rounded(x: Tensor) -> Tensor:
    return x.bfloat16().double()


def _mixes(draw: _Draw, *kinds: str) -> Iterator[Inputs]:
    for kind in kinds:
        graph = draw.graph(kind)
        nodes = draw.nodes(len(graph["batch"]))
        yield {**nodes, **graph, "edge_weight": draw.weights(graph, 2)}


def _delta_scans(draw: _Draw) -> Iterator[Inputs]:
    for inputs in _mixes(draw, "graph", "path", "dag"):
        inputs["key"] = _rounded(F.normalize(inputs["key"], dim=-1))
        inputs["beta"] = _rounded(1.5 * draw(*inputs["value"].shape[:2]).sigmoid())
        yield inputs


def _stm_scans(draw: _Draw) -> Iterator[Inputs]:
    for kind, parts in (("dag", ()), ("dag", (2,)), ("path", ())):
        graph = draw.graph(kind)
        tail, head = graph["edge_index"]
        lines = (head[:, None] == tail).nonzero().t().contiguous()
        yield {
            **draw.nodes(len(graph["batch"])),
            "source": draw(len(tail), 2, *parts),
            "transition": draw(lines.size(1), 2, *parts, *parts, scale=0.25),
            "mark": draw(len(tail), 2, *parts),
            "direct": draw(len(graph["batch"]), 2),
            "line_edge_index": lines,
            **graph,
        }


def _grids(draw: _Draw, on_edges: bool) -> Iterator[Inputs]:
    for height, width in ((5, 7), (1, 70)):
        size = height * width
        inputs = {**draw.nodes(size), "height": height, "width": width}
        if on_edges:
            inputs["source"] = draw(size, 4, 2, 2)
            inputs["transition"] = draw(size, 4, 2, 2, 2, scale=0.25)
            inputs["mark"] = draw(size, 4, 2, 2)
            inputs["direct"] = draw(size, 2)
        else:
            inputs["source"] = draw(size, 4, 2)
            inputs["transition"] = draw(size, 4, 2, 2, scale=0.25)
        yield inputs


def _channel_scans(draw: _Draw) -> Iterator[Inputs]:
    for kind in ("dag", "path"):
        graph = draw.graph(kind)
        value, decay = (draw(len(graph["batch"]), 17) for _ in range(2))
        weight = draw.weights(graph, 17)
        yield {"value": value, "decay": decay, "edge_weight": weight, **graph}


def _sequences(draw: _Draw, **shapes: tuple[int, ...]) -> Iterator[Inputs]:
    inputs = {name: draw(*shape) for name, shape in shapes.items()}
    yield {**inputs, "ptr": torch.tensor([0, 70, 70, 75])}


def _selective_scans(draw: _Draw) -> Iterator[Inputs]:
    sizes = {"u": (75, 17), "delta": (75, 17), "A": (17, 3), "D": (17,)}
    for inputs in _sequences(draw, **sizes, B=(75, 3), C=(75, 3)):
        yield {**inputs, "A": -inputs["A"].abs(), "delta_softplus": True}


def _grid_convolutions(draw: _Draw) -> Iterator[Inputs]:
    for causal in (False, True):
        given = {"height": 5, "width": 7, "causal": causal}
        yield {"x": draw(35, 17), "weight": draw(17, 3, 2), **given}


def _attentions(draw: _Draw) -> Iterator[Inputs]:
    graph = draw.graph("graph")
    size, edges = len(graph["batch"]), graph["edge_index"].size(1)
    query, key, value = draw(size, 2, 6), draw(size, 1, 6), draw(size, 1, 5)
    bias = draw(edges, 2)
    yield {"query": query, "key": key, "value": value, "edge_bias": bias, **graph}


_INPUTS: dict[str, Callable[[_Draw], Iterator[Inputs]]] = {
    "resolvent_mix": lambda draw: _mixes(draw, "graph", "undirected path"),
    "dag_scan": lambda draw: _mixes(draw, "dag", "path"),
    "delta_scan": _delta_scans,
    "channel_scan": _channel_scans,
    "stm_scan": _stm_scans,
    "grid_scan": lambda draw: _grids(draw, on_edges=True),
    "grid_dag_scan": lambda draw: _grids(draw, on_edges=False),
    "selective_scan": _selective_scans,
    "causal_conv1d": lambda draw: _sequences(
        draw, x=(75, 17), weight=(17, 4), bias=(17,)
    ),
    "grid_conv": _grid_convolutions,
    "neighborhood_attention": _attentions,
}

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


def _verdicts(
    name: str, device: torch.device
) -> dict[tuple[Choice, torch.dtype], tuple[float, str]]:
    """The largest error of each algorithm of an operator on a device, compared with the
    reference on all tiny inputs of one dtype, and what is wrong, if anything.
    """
    found: dict[tuple[Choice, torch.dtype], tuple[float, str]] = {}
    for inputs in _INPUTS[name](_Draw()):
        expected = {}
        for dtype, options in product(_TOLERANCE, _all_options(name)):
            given = _cast(inputs, dtype, device)
            choice = _choice(name, given, options)
            if choice is None:
                continue
            terms = options.get("num_terms")
            if terms not in expected:
                expected[terms] = _computed(name, inputs, _by("reference", options))
            error, problem = _compared(name, given, options, expected[terms])
            before = found.get((choice, dtype), (0.0, ""))
            found[choice, dtype] = max(before[0], error), before[1] or problem
    return found


def _all_options(name: str) -> Iterator[Inputs]:
    known = signature(getattr(ops, name)).parameters
    some = {option: values for option, values in _OPTIONS.items() if option in known}
    for values in product(*some.values()):
        yield _complete(dict(zip(some, values, strict=True)))


def _complete(options: Inputs) -> Inputs:
    sums = options.get("solver") == "neumann"
    return {**options, "num_terms": 4} if sums else options


def _by(backend: str, options: Inputs) -> Inputs:
    """The options for the same result by another backend, however it computes it."""
    same = {"num_terms": 4, "solver": "neumann"} if "num_terms" in options else {}
    return {**same, "backend": backend}


def _cast(inputs: Inputs, dtype: torch.dtype, device: Any) -> Inputs:
    def cast(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.to(device, dtype) if x.is_floating_point() else x.to(device)

    return {name: cast(x) for name, x in inputs.items()}


def _choice(name: str, inputs: Inputs, options: Inputs) -> Choice | None:
    """The algorithm of a call; None if it is not supported."""
    try:
        return ops.explain(name, **inputs, **options).algorithm
    except ValueError:
        return None


def _computed(name: str, inputs: Inputs, options: Inputs) -> Results:
    leaves = {
        key: x.detach().requires_grad_()
        for key, x in inputs.items()
        if isinstance(x, Tensor) and x.is_floating_point()
    }
    out = getattr(ops, name)(**{**inputs, **leaves}, **options)
    grads = torch.autograd.grad(out, list(leaves.values()), _Draw()(*out.shape).to(out))
    results = {f"the gradient of '{x}'": y for x, y in zip(leaves, grads, strict=True)}
    results = {"the output": out, **results}
    return {what: x.detach().double().cpu() for what, x in results.items()}


def _compared(
    name: str, inputs: Inputs, options: Inputs, expected: Results
) -> tuple[float, str]:
    """The largest relative error, and what is wrong, if anything."""
    try:
        got = _computed(name, inputs, options)
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


def objection(choice: Choice, device: torch.device) -> str | None:
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
                problem, certain = _judged(choice, device)
                if certain:
                    _KNOWN[key] = problem
                if problem:
                    warn(f"{problem}; another backend is used", stacklevel=2)
    return problem or None


def _judged(choice: Choice, device: torch.device) -> tuple[str, bool]:
    """What is wrong with an algorithm, or "", and whether that will stay so."""
    machine, algorithm = _machine(device), " ".join(choice[:4])
    problem = _remembered().get(machine, {}).get(algorithm)
    subject = f"backend={choice.backend!r}"
    if problem is None:
        if torch._C._current_graph_task_id() != -1:  # whose thread serves the device
            return f"{subject} cannot be tested first in a backward pass", False
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return (
                f"{subject} cannot be tested while a CUDA graph is captured; call the "
                "model once before",
                False,
            )
        try:
            with ThreadPoolExecutor(1, "pyg_chimera") as pool:
                problem = pool.submit(Context().run, _tested, choice, device).result()
        except torch.OutOfMemoryError:
            return f"{subject} cannot be tested, as the memory is full", False
        except Exception as error:  # of PyTorch
            return f"{subject} cannot be tested: {error!r}", True
        _remember(machine, {algorithm: problem})
    if problem:
        problem = (
            f"{subject} failed its test on {device}: {problem} (see 'python -m "
            f"pyg_chimera.selftest {choice.operator}')"
        )
    return problem, True


def _tested(choice: Choice, device: torch.device) -> str:
    """What is wrong with an algorithm, or "": a comparison with PyTorch in float64."""
    name = choice.operator
    known = signature(getattr(ops, name)).parameters
    options = {x: getattr(choice, x) for x in _OPTIONS if x in known}
    options = _complete(options)
    tried = 0
    with setting(_TESTING, True):
        for inputs in _INPUTS[name](_Draw()):
            for dtype in (torch.float64, torch.float32):
                given = _cast(inputs, dtype, device)
                if _choice(name, given, options) == choice.algorithm:
                    tried += 1
                    double = _cast(inputs, torch.float64, device)
                    expected = _computed(name, double, _by("torch", options))
                    if problem := _compared(name, given, options, expected)[1]:
                        return problem
    return "" if tried else "no tiny input takes this algorithm"


def _machine(device: torch.device) -> str:
    """Everything that a verdict depends on."""
    name, driver = torch.backends.cpu.get_cpu_capability(), "none"
    if device.type == "cuda":
        name, driver = torch.cuda.get_device_name(device), _driver()
    triton = import_module("triton").__version__ if WITH_TRITON else "none"
    precision = "TF32" if _uses_tf32(device) else "float32"
    sources = stamp("pyg_chimera.selftest")[-1][:16]
    return (
        f"{name}, driver {driver}, torch {torch.__version__}, triton {triton}, "
        f"products in {precision}, sources {sources}"
    )


def _driver() -> str:
    for path in ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version"):
        with suppress(OSError):
            return Path(path).read_text().splitlines()[0]
    return "unknown"


def _file() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(folder) / "pyg_chimera" / "selftest.json"


def _remembered() -> dict[str, dict[str, str]]:
    """The verdicts on disk: for each machine, what is wrong with each algorithm."""
    try:
        found = json.loads(_file().read_text())
        return {x: dict(y) for x, y in found.items()}
    except (OSError, RuntimeError, ValueError, TypeError, AttributeError):
        return {}  # there is none, or no home, or something else wrote it


def _remember(machine: str, verdicts: dict[str, str]) -> None:
    """Adds verdicts to those on disk, if it can be written to."""
    known = _remembered()
    known[machine] = known.pop(machine, {}) | verdicts
    text = json.dumps(dict(list(known.items())[-_MOST_MACHINES:]), indent=1)
    with suppress(OSError, RuntimeError):
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}")
        temporary.write_text(text)
        temporary.replace(file)  # at once: another process may read it


# -------------------------------------------------------------------------- the table


def main(names: Sequence[str] = ()) -> int:
    """Prints how all algorithms of some operators, or of all, do on this machine.

    Returns:
        int: 1 if anything is wrong, otherwise 0.
    """
    unknown = [name for name in names if name not in _INPUTS]
    if unknown:
        print(f"no such operators: {', '.join(unknown)}; known: {', '.join(_INPUTS)}")
        return 2
    failed = False
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    versions = (f"{x} {version(x)}" for x in ("pyg-chimera", "numba", "llvmlite"))
    print(f"{', '.join(versions)}, Python {platform.python_version()}")
    print(platform.platform())
    for device in map(torch.device, devices):
        print(f"\n{device}: {_machine(device)}\n")
        columns = ("operator", "solver", "form", "backend", "dtype", "error", "")
        print(_LINE.format(*columns))
        for name in names or _INPUTS:
            verdicts: dict[str, str] = {}
            found = sorted(_verdicts(name, device).items(), key=str)
            for (choice, dtype), (error, problem) in found:
                failed |= bool(problem)
                kind = str(dtype).removeprefix("torch.")
                said = f"{error:.1e}", problem or "right"
                print(_LINE.format(*choice[:4], kind, *said))
                algorithm = " ".join(choice[:4])
                verdicts[algorithm] = verdicts.get(algorithm) or problem
            if device.type == "cuda":
                _remember(_machine(device), verdicts)
    return int(failed)


_LINE = "{:22} {:10} {:6} {:9} {:9} {:>8}  {}"

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
