"""Functions of a graph's structure as operators that are opaque to compilers."""

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable
from itertools import count
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from pyg_chimera.ops.common.cache import called_eagerly, remembered
from pyg_chimera.ops.common.checks import no_integer
from pyg_chimera.ops.common.portability import (
    is_portable,
    portable_form,
    refuse_for_onnx,
)
from pyg_chimera.ops.common.torch_private import NOT_IN_CUDA_GRAPHS

_CALLS = count()


@torch.compiler.assume_constant_result
def _name_of_call() -> str:
    """A name for a call that is being compiled, so that no other call is equal to it.

    Compilers merge equal calls. Results of unknown size then lose a size, as each call
    gave its result one of its own.
    """
    return str(next(_CALLS))


def unsized(*shapes: tuple[int | str, ...]) -> Callable:
    """A fake implementation that returns int64 tensors of these shapes, in which sizes
    that depend on the graph have names.
    """

    def fake(like: Tensor, *_: Any) -> Any:
        sizes: dict[str, Any] = defaultdict(torch.library.get_ctx().new_dynamic_size)
        known = ([sizes[x] if isinstance(x, str) else x for x in s] for s in shapes)
        made = tuple(like.new_empty(shape, dtype=torch.long) for shape in known)
        return made if len(made) > 1 else made[0]

    return fake


def structural_op(
    fake: Callable, *, sized: bool = True
) -> Callable[[Callable], Callable]:
    r"""Registers a function of tensors as a PyTorch operator.

    Compilers and exporters treat the operator as opaque. Each call looks up the cached
    result for the same contents, and returns a copy of it.

    Args:
        fake (Callable): Takes the arguments of the function, and makes tensors of the
            shapes and dtypes of its results.
        sized (bool, optional): Whether these shapes are known. (default: :obj:`True`)

    Returns:
        Callable: A decorator for functions with annotated arguments and results, whose
        tensor arguments come first, without defaults. The operator raises a
        :class:`TypeError` or a :class:`ValueError` for arguments that PyTorch's
        dispatcher would not accept.
    """

    def register(function: Callable) -> Callable:
        signature = inspect.signature(function)
        kinds = [
            (x.name, x.annotation, x.annotation == Tensor | None)
            for x in signature.parameters.values()
        ]
        num_tensors = sum(optional or kind is Tensor for _, kind, optional in kinds)

        @functools.wraps(function)
        def run(*args: Any) -> Any:
            out = remembered(
                function, args[:num_tensors], *args[num_tensors : len(kinds)]
            )
            if isinstance(out, Tensor):
                return out.clone()
            return tuple(x.clone() for x in out)

        name = f"pyg_chimera::{function.__name__.strip('_')}"
        schema = torch.library.infer_schema(function, mutates_args=())
        operator = torch.library.custom_op(
            name,
            run,
            mutates_args=(),
            schema=schema.replace(") ->", ", str call='') ->"),
            **NOT_IN_CUDA_GRAPHS,
        )

        @operator.register_fake
        def fake_run(*args: Any) -> Any:
            refuse_for_onnx()
            return fake(*args[: len(kinds)])

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if kwargs or len(args) != len(kinds):
                args = signature.bind(*args, **kwargs).args
            if is_portable():
                return portable_form(function.__name__)(*args)
            if torch.compiler.is_compiling():  # then sizes may be unknown
                return operator(*args) if sized else operator(*args, _name_of_call())
            for kind, value in zip(kinds, args, strict=True):
                _check_argument(*kind, value)
            with called_eagerly():
                return operator(*args)

        return call

    return register


def _check_argument(name: str, kind: Any, optional: bool, value: Any) -> None:
    if optional and value is None:
        return
    if kind is int:
        if not isinstance(value, (Integral, torch.SymInt)):
            raise no_integer(name, value)
        if not -(2**63) <= value < 2**63:  # type: ignore[operator]
            raise ValueError(f"'{name}' must be an integer of 64 bits, got {value}")
    elif kind in (str, bool):
        if not isinstance(value, kind):
            wanted = "a string" if kind is str else "True or False"
            raise TypeError(f"'{name}' must be {wanted}, got {value!r}")
    elif not isinstance(value, Tensor) or value.layout != torch.strided:
        or_none = " or None" if optional else ""
        got = value.layout if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(
            f"'{name}' must be a dense tensor of integers{or_none}, got '{got}'"
        )
