"""Whether operators shall be plain, and where their plain forms are found."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from pyg_chimera.ops.common.checks import setting

#: The plain forms of operators and of functions of a graph's structure, by name.
_FORMS: dict[str, Callable[..., Any]] = {}
_PORTABLE: ContextVar[bool] = ContextVar("portable", default=False)


@contextmanager
def portable() -> Iterator[None]:
    r"""A context in which operators and layers consist of PyTorch's own operations, so
    that programs exported in it run without this package::

        with ops.portable():
            program = torch.export.export(model.eval(), (x, edge_index))

    :func:`torch.onnx.export` does so by itself. Matrices are dense: memory is quadratic
    in the number of nodes of the whole batch. Contents of tensors are not checked. The
    context has no effect on :func:`torch.compile`, nor with :obj:`strict=True`.

    Raises:
        NotImplementedError: When what is called in the context depends on the graph in
            a way that has no such form.
    """
    with setting(_PORTABLE, True):
        yield


def is_portable() -> bool:
    """Whether operators shall be plain, as in `portable` and in exports to ONNX."""
    if torch.compiler.is_dynamo_compiling():  # context variables cannot be traced
        return False
    exporting = torch.compiler.is_compiling()
    return _PORTABLE.get() or (exporting and torch.onnx.is_in_onnx_export())


def has_form(function: Callable) -> Callable:
    """Registers a plain form, by its name without underscores in front."""
    _FORMS[function.__name__.lstrip("_")] = function
    return function


def portable_form(name: str) -> Callable[..., Any]:
    """The plain form of an operator, or of a function of a graph's structure.

    Raises:
        NotImplementedError: If there is none.
    """
    name = name.lstrip("_")
    if name not in _FORMS:
        raise no_form(f"'{name}'")
    return _FORMS[name]


def no_form(what: str) -> Exception:
    """The error about what cannot be exported to ONNX."""
    return NotImplementedError(
        f"{what} has no portable form: compute what depends on it by "
        "a transform, and pass it to the layer, or use another option"
    )


def refuse_for_onnx() -> None:
    """Raises an error where a program with our operators is exported to ONNX."""
    if torch.onnx.is_in_onnx_export():
        raise NotImplementedError(
            "ONNX has no such operator: give 'torch.onnx.export' the model itself, or "
            "a program that 'torch.export.export' made within 'ops.portable()', with "
            "strict=False"
        )
