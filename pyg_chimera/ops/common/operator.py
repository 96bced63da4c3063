"""From the declaration of an operator's inputs: the registered operator, its fake
implementation, gradient, batching rule and explanation.
"""

import json
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from itertools import compress
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar
from warnings import warn
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pyg_chimera.ops.common.array_views import as_array
from pyg_chimera.ops.common.cache import Recipe, called_eagerly, recalled
from pyg_chimera.ops.common.checks import check_option, setting, trusted, trusting
from pyg_chimera.ops.common.dispatch import Backend, Call, Choice, UnsuitableSolver
from pyg_chimera.ops.common.examples import Draw, Example
from pyg_chimera.ops.common.fused import Fused
from pyg_chimera.ops.common.memory import check_memory
from pyg_chimera.ops.common.portability import (
    is_portable,
    portable_form,
    refuse_for_onnx,
)
from pyg_chimera.ops.common.predicted_time import on_this_machine, warn_if_long
from pyg_chimera.ops.common.torch_private import (
    NOT_IN_CUDA_GRAPHS,
    is_in_forward_mode,
    is_transforming,
)
from pyg_chimera.ops.common.verdicts import reason_against

Inputs = TypeVar("Inputs", bound=tuple)
Structure = TypeVar("Structure")

#: Device types whose kernels are self-tested before first use.
_TESTED = ("cuda",)

#: All operators, by the names of their public functions.
OPERATORS: "dict[str, Operator]" = {}

_SCHEMA_TYPES = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    str: "str",
    bool: "bool",
    int: "int",
    int | None: "int?",
    float: "float",
    float | None: "float?",
    list[int]: "int[]",
    # An empty list would not do for nothing: AOTInductor passes None for it.
    list[int] | None: "int[]?",
}


class Operator(Generic[Inputs, Structure]):
    """An operator: a subclass declares its inputs and how to choose an algorithm.

    `inputs` is a NamedTuple with at least the fields ``value`` (of the output's shape
    and dtype) and ``backend``. Its fields are already checked; floating-point tensors
    have one dtype, float32 or float64, unless `in_one_dtype` chooses one, and get
    gradients.

    The registered forward pass returns the output and a header for the backward pass,
    with the choice, the structure's key in the cache, and whether contents were
    trusted. What a backend saves is kept with the header.
    """

    name: str  #: the name of the registered operator
    inputs: ClassVar[type]
    output_like: ClassVar[str] = "value"  #: the input of the output's shape and dtype
    #: Whether the backward pass needs the output, and no other saved tensor. Autograd
    #: keeps it anyway, whereas a backend would have to save a copy.
    saves_output: ClassVar[bool] = False
    backends: ClassVar[dict[str, Any]]  #: by name, preferred ones first
    solver, form = "scan", "state"  #: the algorithm, unless `choices` has others

    def recipe(self, inputs: Inputs) -> Recipe | None:
        """How to make a call's structure, and from what; None if it has none."""
        return None

    def choices(self, call: Call[Inputs, Structure]) -> Iterable[Choice]:
        """The algorithms for a call, preferred ones first; here, one per backend.

        If a solver is unsuitable, the next one is used and the user is warned.
        """
        inputs = call.inputs
        for backend in self.usable(inputs):
            yield Choice(
                self.name, self.solver, self.form, backend, self.reason(inputs)
            )

    def in_one_dtype(self, inputs: Inputs) -> Inputs:
        """The inputs in the dtype to compute in."""
        return inputs

    def check(self, inputs: Inputs, structure: Structure) -> None:
        """Checks what requires both the tensors' contents and the structure."""

    def __init__(self) -> None:
        hints = typing.get_type_hints(self.inputs)
        arguments = [f"{_SCHEMA_TYPES[hint]} {name}" for name, hint in hints.items()]
        self._are_tensors = [hint in (Tensor, Tensor | None) for hint in hints.values()]
        self._forward = torch.library.custom_op(
            f"pyg_chimera::{self.name}",
            self._run_forward,
            mutates_args=(),
            schema=f"({', '.join(arguments)}) -> (Tensor, Tensor)",
            **NOT_IN_CUDA_GRAPHS,
        )
        self._backward = torch.library.custom_op(
            f"pyg_chimera::{self.name}_backward",
            self._run_backward,
            mutates_args=(),
            schema="(Tensor grad, Tensor? output, Tensor header, "
            f"{', '.join(arguments)}) -> "
            # Not a list, which `is_grads_batched` does not support.
            f"({', '.join(['Tensor'] * sum(self._are_tensors))})",
            **NOT_IN_CUDA_GRAPHS,
        )
        self._forward.register_fake(self._fake_forward)
        self._forward.register_autograd(
            self._differentiate, setup_context=self._setup_context
        )
        self._backward.register_fake(self._fake_backward)
        self._backward.register_autograd(self._refuse_second_order)
        for op in (self._forward, self._backward):
            torch.library.register_vmap(op, one_by_one(op))
        self._direct = Fused(
            f"pyg_chimera::{self.name}",
            lambda *args: self._forward(*self._inputs_of(*args))[0],
            lambda *_: True,
            self._direct_forward,
            self._direct_backward,
            devices=("cpu", "cuda"),
        )
        self._transformable_forward = _transformable(
            self._forward, self._setup_context, self._differentiate
        )
        self._transformable_backward = _transformable(
            self._backward, lambda *_: None, self._refuse_second_order
        )

    def public(self, examples: Callable[[Draw], Iterator[Example]]) -> Callable:
        """Declares the function that users call, and tiny arguments of it."""

        def declare(function: Callable) -> Callable:
            self.function, self.examples = function, examples
            OPERATORS[self.name] = self
            return function

        return declare

    def choice(self, *args: Any, **kwargs: Any) -> Choice:
        """The algorithm of a call of the public function."""
        return explained(self.function, *args, **kwargs)[0]

    # ------------------------------------------------------------------------- a call

    def __call__(self, inputs: Inputs) -> Tensor:
        """The output of a call."""
        self.usable(inputs)
        if is_portable():
            return portable_form(self.name)(inputs)
        if torch.compiler.is_compiling():  # context variables cannot be traced
            return self._called(inputs, None)
        with called_eagerly():
            return self._called(inputs, _REPORT.get())

    def _called(self, inputs: Inputs, report: list[Choice] | None) -> Tensor:
        if report is not None:
            with setting(_REPORT, None):  # `why_not` may itself call operators
                report.append(
                    on_this_machine(self.plan(inputs).choice, self._size(inputs))
                )
            return self._output(inputs).zero_()
        backend = self.backends.get(inputs.backend)  # type: ignore[attr-defined]
        if backend is not None and not hasattr(backend, "backward"):
            out = backend.forward(self.plan(inputs))
            # Whatever it need not read, of small graphs, has a gradient all the same.
            return out + sum(x[:0].sum() for x in _floating(inputs))
        self._refuse_forward_mode(inputs)
        if not torch.compiler.is_compiling() and is_transforming():
            return self._transformable_forward(*inputs)[0]
        pairs = zip(inputs, self._are_tensors, strict=True)
        others = [x for x, is_tensor in pairs if not is_tensor]
        return self._direct(self._tensors(inputs), others)

    def plan(self, inputs: Inputs) -> Call[Inputs, Structure]:
        """Makes the structure of a call and chooses the algorithm."""
        recipe = self.recipe(inputs)
        structure: Any
        structure, key = (None, "") if recipe is None else recipe.found()
        inputs = self.in_one_dtype(inputs)
        if not is_transforming():  # where contents cannot be read
            self.check(inputs, structure)
        problems: list[str] = []
        unsuitable: dict[str, str] = {}
        undecided = Call(inputs, structure, Choice(self.name, "", "", "", ""), key)
        for choice in self.choices(undecided):
            if choice.solver in unsuitable:
                continue
            call = undecided.with_choice(choice)
            backend = self.backends[choice.backend]
            try:
                problem = backend.why_not(call) if hasattr(backend, "why_not") else None
            except UnsuitableSolver as error:
                unsuitable[choice.solver] = str(error)
                continue
            problem = problem or self._reason_against(call)
            if problem is not None:  # of a backend that would be preferred
                problems.append(problem)
                continue
            if unsuitable:
                why = "; ".join(unsuitable.values())
                warn(f"{why}: solver={choice.solver!r} is used", stacklevel=2)
            reason = "; ".join(
                dict.fromkeys([choice.reason, *(unsuitable.values() or problems)])
            )
            others = (x for x in choice.alternatives if x.solver not in unsuitable)
            choice = choice._replace(reason=reason, alternatives=tuple(others))
            return call.with_choice(choice)
        raise ValueError("; ".join(dict.fromkeys([*unsuitable.values(), *problems])))

    def _reason_against(self, call: Call[Inputs, Structure]) -> str | None:
        """Why `auto` does not use a backend that failed its test on a device."""
        inputs, choice = call.inputs, call.choice
        device = getattr(inputs, self.output_like).device
        if (
            inputs.backend != "auto"  # type: ignore[attr-defined]
            or device.type not in _TESTED
            or self.backends[choice.backend].DEVICES is None  # plain PyTorch
        ):
            return None
        return reason_against(self, choice, device)

    def usable(self, inputs: Inputs) -> list[str]:
        """The backends that match the request and run on the device of the inputs.

        Raises:
            ValueError: If the requested one is unknown or does not run on the device.
        """
        asked: str = inputs.backend  # type: ignore[attr-defined]
        device = getattr(inputs, self.output_like).device
        check_option("backend", asked, ("auto", *self.backends))
        if asked == "auto":
            return [
                name
                for name, backend in self.backends.items()
                if hasattr(backend, "backward")
                and (backend.DEVICES is None or device.type in backend.DEVICES)
            ]
        devices = self.backends[asked].DEVICES
        if devices is not None:
            devices += getattr(self.backends[asked], "DEVICES_IF_ASKED", ())
        if devices is not None and device.type not in devices:
            raise ValueError(
                f"backend={asked!r} runs on {' and '.join(devices)}, but "
                f"'{self.output_like}' is on {device}; use backend='auto'"
            )
        return [asked]

    def reason(self, inputs: Inputs) -> str:
        """Why a backend is used, apart from costs."""
        if inputs.backend != "auto":  # type: ignore[attr-defined]
            return "asked for"
        return f"tensors on {getattr(inputs, self.output_like).device.type}"

    # ----------------------------------------------------------- forward and backward

    def _output(self, inputs: Inputs) -> Tensor:
        like = getattr(inputs, self.output_like)
        return like.new_empty(like.shape)

    def _size(self, inputs: Inputs) -> int:
        """The bytes of the inputs, of the output and of its gradient."""
        like = getattr(inputs, self.output_like)
        return sum(x.nbytes for x in (*_floating(inputs), like, like))

    def _compute(self, inputs: Inputs) -> tuple[Tensor, Sequence[Tensor], Call]:
        """The output, perhaps in a wider dtype, what is saved, and the call."""
        with _plain(inputs):
            call = self.plan(inputs)
            warn_if_long(call.choice, self._size(inputs))
            _refuse_if_large(call.choice, getattr(inputs, self.output_like).device)
            return *self.backends[call.choice.backend].forward(call), call

    def _differences(
        self, call: Call, saved: Sequence[Tensor], grad: Tensor, args: Sequence[Any]
    ) -> Iterator[Tensor | None]:
        """The gradient of each tensor among the arguments, None of integers."""
        backend: Backend = self.backends[call.choice.backend]
        grads = iter(backend.backward(call, tuple(saved), grad))
        for x in self._tensors(args):
            yield _cast(next(grads).contiguous(), x.dtype) if _is_floating(x) else None

    # Without a compiler, a plain autograd function: registered operators take longer.

    def _inputs_of(self, *args: Any) -> Inputs:
        """From the tensors among the inputs, and the list of the others."""
        *tensors, others = args
        these, those = iter(tensors), iter(others)
        return self.inputs(
            *(next(these if is_one else those) for is_one in self._are_tensors)
        )

    def _direct_forward(self, *args: Any) -> tuple[Tensor, Sequence[Tensor], Any]:
        inputs = self._inputs_of(*args)
        out, saved, call = self._compute(inputs)
        kept = call.structure, call.choice.algorithm, call.key, out.dtype
        out = _cast(out.contiguous(), getattr(inputs, self.output_like).dtype)
        return out, (out,) if self.saves_output else saved, kept

    def _direct_backward(
        self, tensors: Any, others: Any, saved: Any, grads: Any, kept: Any
    ) -> Iterator[Tensor | None]:
        structure, choice, key, dtype = kept
        args = self._inputs_of(*tensors, others)
        inputs = self.inputs(*(_cast(x, dtype) for x in args))
        with _plain(inputs):
            call = Call(inputs, structure, choice, key)
            grad = _cast(grads[0].contiguous(), dtype)
            return iter([*self._differences(call, saved, grad, args)])

    # ----------------------------------------------------- the registered operators

    def _run_forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        inputs = self.inputs(*args)
        out, saved, call = self._compute(inputs)
        # As in the fake implementation, which compilers rely on.
        dtype = getattr(inputs, self.output_like).dtype
        is_wide = out.dtype != dtype
        header = _Header(call.choice.algorithm, call.key, trusted(), is_wide)
        return out.contiguous().to(dtype), header.encode(tuple(saved))

    def _fake_forward(self, *args: Any) -> tuple[Tensor, Tensor]:
        refuse_for_onnx()
        header = torch.empty(_HEADER_BYTES, dtype=torch.uint8, device="cpu")
        return self._output(self.inputs(*args)), header

    def _run_backward(
        self, grad: Tensor, output: Tensor | None, header: Tensor, *args: Any
    ) -> tuple[Tensor, ...]:
        """One gradient per tensor argument; empty for integer or absent ones."""
        decoded, saved = _Header.decode(header)
        dtype = torch.float64 if decoded.is_wide else grad.dtype
        inputs = self.inputs(*(_cast(x, dtype) for x in args))
        grad = grad.to(dtype)
        with _plain(inputs):
            structure: Any = None
            if decoded.key:  # there is a recipe
                # It reads the contents of tensors, or not, as in the forward pass.
                with trusting(decoded.trusted):
                    structure = recalled(
                        decoded.key,
                        lambda: self.recipe(inputs).build(),  # type: ignore[union-attr]
                    )
            call = Call(inputs, structure, decoded.choice, decoded.key)
            if output is not None:
                saved = (output,)
            elif saved is None:  # of a copy of the header
                with trusting(decoded.trusted):
                    saved = self.backends[call.choice.backend].forward(call)[1]
            grads = self._differences(call, saved, grad, args)
            return tuple(grad.new_empty(0) if x is None else x for x in grads)

    def _tensors(self, args: Sequence[Any]) -> list[Any]:
        """The arguments that are tensors, or may be."""
        return list(compress(args, self._are_tensors))

    def _fake_backward(
        self, grad: Tensor, output: Tensor | None, header: Tensor, *args: Any
    ) -> tuple[Tensor, ...]:
        return tuple(
            x.new_empty(x.shape) if _is_floating(x) else grad.new_empty(0)
            for x in self._tensors(args)
        )

    def _setup_context(self, ctx: Any, inputs: tuple, output: tuple) -> None:
        out, header = output
        ctx.mark_non_differentiable(header)
        ctx.set_materialize_grads(False)
        tensors = [x if isinstance(x, Tensor) else None for x in inputs]
        ctx.others = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(out if self.saves_output else None, header, *tensors)

    def _differentiate(self, ctx: Any, grad: Tensor | None, *_: Any) -> tuple:
        if grad is None:
            return (None,) * len(self._are_tensors)
        out, header, *tensors = ctx.saved_tensors
        args = [
            x if other is None else other
            for x, other in zip(tensors, ctx.others, strict=True)
        ]
        differentiate = self._backward
        if not torch.compiler.is_compiling() and is_transforming():
            differentiate = self._transformable_backward
        grads = iter(differentiate(grad.contiguous(), out, header, *args))
        given = [next(grads) if is_one else None for is_one in self._are_tensors]
        return tuple(
            y if _is_floating(x) else None for x, y in zip(args, given, strict=True)
        )

    # ------------------------------------------------------------- what is not offered

    def _refuse_second_order(self, ctx: Any, *grads: Any) -> tuple:
        advice = "; for higher ones (on small graphs) use backend='reference'"
        raise NotImplementedError(
            f"{self.name} has first derivatives only, so its gradient cannot be "
            f"differentiated again{advice if 'reference' in self.backends else ''}"
        )

    def _refuse_forward_mode(self, inputs: Inputs) -> None:
        if not is_in_forward_mode():
            return
        for x in _floating(inputs):
            if forward_ad.unpack_dual(x).tangent is not None:
                other = ", or backend='reference'"
                raise NotImplementedError(
                    f"{self.name} has derivatives in reverse mode only, not in forward "
                    "mode (torch.func.jvp, jacfwd, torch.autograd.forward_ad); use "
                    "torch.func.vjp or jacrev"
                    f"{other if 'reference' in self.backends else ''}"
                )


def _refuse_if_large(choice: Choice, device: torch.device) -> None:
    """Refuses what would not fit into memory even if it took a quarter of what is
    predicted.
    """
    if choice.cost is not None:
        check_memory(
            f"{choice.operator} with solver={choice.solver!r}, form={choice.form!r} "
            f"and backend={choice.backend!r}, by a quarter of the prediction,",
            choice.cost.memory / 4,
            "use 'auto' for these, smaller graphs, clusters or samples; "
            "'pyg_chimera.ops.explain' predicts what a call takes",
            device,
        )


# ------------------------------------------------------------------------- explaining

_REPORT: ContextVar[list[Choice] | None] = ContextVar("report", default=None)


def is_explained() -> bool:
    """Whether calls are reported: operators return zeros then."""
    return not torch.compiler.is_compiling() and _REPORT.get() is not None


def explained(function: Callable, *args: Any, **kwargs: Any) -> list[Choice]:
    """The choices for the operator calls of a function, in order."""
    report: list[Choice] = []
    with setting(_REPORT, report), torch.no_grad():
        function(*args, **kwargs)
    return report


# ---------------------------------------------------------------- from pass to pass


#: Enough for all headers: if sizes were unknown, compilers would break their graphs.
_HEADER_BYTES = 512


class _Kept(bytearray):
    """The memory of a header, and what is saved for the backward pass with it: tensors
    of sizes that compilers do not know. They live as long as the header.
    """

    saved: tuple[Tensor, ...] = ()


#: By address.
_KEPT: "WeakValueDictionary[int, _Kept]" = WeakValueDictionary()


class _Header(NamedTuple):
    """What the forward pass passes to the backward pass besides tensors."""

    choice: Choice
    key: str
    trusted: bool
    is_wide: bool  #: whether float32 is computed in float64

    def encode(self, saved: tuple[Tensor, ...]) -> Tensor:
        kept = _Kept(json.dumps(self).encode().ljust(_HEADER_BYTES))
        kept.saved = saved
        header = torch.frombuffer(kept, dtype=torch.uint8)
        _KEPT[header.data_ptr()] = kept
        return header

    @classmethod
    def decode(cls, header: Tensor) -> "tuple[_Header, tuple[Tensor, ...] | None]":
        """The header, and what was saved with it; None if it is a copy."""
        kept = _KEPT.get(header.data_ptr())
        choice, *others = json.loads(as_array(header.cpu()).tobytes())
        decoded = cls(Choice(*choice), *others)
        return decoded, None if kept is None else kept.saved


def _is_floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def _cast(x: Any, dtype: torch.dtype) -> Any:
    """A floating-point tensor in a dtype; not even a call of PyTorch where it is."""
    return x.to(dtype) if _is_floating(x) and x.dtype != dtype else x


def _floating(args: Sequence[Any]) -> list[Tensor]:
    return [x for x in args if _is_floating(x)]


@contextmanager
def _plain(inputs: Sequence[Any]) -> Iterator[None]:
    """A context without autograd and autocast."""
    like = next(x for x in inputs if isinstance(x, Tensor))
    with torch.no_grad(), without_autocast(like):
        yield


def without_autocast(like: Tensor) -> AbstractContextManager:
    """A context without autocast on a tensor's device."""
    if not torch.amp.is_autocast_available(like.device.type):  # such as 'meta'
        return nullcontext()
    return torch.autocast(like.device.type, enabled=False)


def _transformable(op: Callable, setup_context: Callable, backward: Callable) -> Any:
    """The operator for `torch.func`, which does not support registered gradients."""

    def apply(*args: Any) -> tuple[Tensor, ...]:
        return function.apply(*args)  # type: ignore[attr-defined]

    members = {
        "forward": lambda *args: tuple(op(*args)),
        "setup_context": setup_context,
        "backward": backward,
        "vmap": one_by_one(apply),
    }
    statics: dict[str, Any] = {k: staticmethod(v) for k, v in members.items()}
    function: Any = type("Transformable", (torch.autograd.Function,), statics)
    return apply


def one_by_one(op: Callable) -> Callable:
    """The batching rule for `torch.vmap`: one call per batch entry."""

    def rule(info: Any, in_dims: tuple, *args: Any) -> tuple[Any, Any]:
        if info.batch_size == 0:
            raise ValueError("torch.vmap must be over at least one sample, got none")
        outs = []
        for b in range(info.batch_size):
            outs.append(
                op(
                    *(
                        x if dim is None or not isinstance(x, Tensor)
                        else x.select(dim, b)
                        for x, dim in zip(args, in_dims, strict=True)
                    )
                )
            )  # fmt: skip
        if isinstance(outs[0], Tensor):
            return torch.stack(outs), 0
        stacked = tuple(torch.stack(x) for x in zip(*outs, strict=True))
        return stacked, (0,) * len(stacked)

    return rule
