"""Models in folders: their arguments as plain data, their weights, and a card.

The files have the names that PyTorch Geometric and Hugging Face give them.
"""

import hashlib
import json
import operator
import os
import pickle
import shutil
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from inspect import Parameter, signature
from os import PathLike
from pathlib import Path
from typing import Any, ParamSpec, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

CONFIG, WEIGHTS, CARD = "config.json", "model.pth", "README.md"
#: Where classes are looked up, by name: no other code runs because a file says so.
SOURCES = ("pyg_chimera.nn", "torch_geometric.nn")


def build(description: Mapping[str, Any]) -> torch.nn.Module:
    """The module that a description stands for: the name of its class, and arguments,
    which may be descriptions of modules too, or lists and mappings with some.
    """
    name = description.get("class")
    found = (getattr(import_module(x), str(name), None) for x in SOURCES)
    kinds = [x for x in found if isinstance(x, type) and issubclass(x, torch.nn.Module)]
    if not kinds:
        raise ValueError(
            f"'class' must name a module of {' or '.join(SOURCES)}, got {name!r} in "
            f"{dict(description)}"
        )
    return kinds[0](**{k: _built(v) for k, v in description.items() if k != "class"})


def _built(value: Any) -> Any:
    if isinstance(value, Mapping):
        if "class" in value:
            return build(value)
        return {key: _built(inner) for key, inner in value.items()}
    return type(value)(map(_built, value)) if isinstance(value, list | tuple) else value


def plain_arguments(arguments: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Arguments as JSON has them, and the names of those that are no plain data."""
    plain: dict[str, Any] = {}
    other = []
    for name, value in arguments.items():
        try:
            plain[name] = json.loads(json.dumps(value, default=operator.index))
        except (TypeError, ValueError):  # functions, modules, what holds itself
            other.append(name)
    return plain, other


P = ParamSpec("P")


def recorded(init: Callable[P, None]) -> Callable[P, None]:
    """A constructor that keeps its arguments, as `plain_arguments` has them. Those of
    a subclass take the place of what it passes on.
    """

    @wraps(init)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        init(*args, **kwargs)
        bound = signature(init).bind(*args, **kwargs)
        bound.apply_defaults()
        kinds, arguments = bound.signature.parameters, dict[str, Any]()
        if any(x.kind is Parameter.VAR_POSITIONAL for x in kinds.values()):
            return  # they have no names; those of the base class have
        (_, model), *given = bound.arguments.items()
        for name, value in given:
            is_open = kinds[name].kind is Parameter.VAR_KEYWORD
            arguments |= value if is_open else {name: value}
        cast(Any, model)._arguments = plain_arguments(arguments)

    return run


def save_model(
    path: str | PathLike,
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    card: str,
) -> None:
    """Makes the folder; it is there when all of it is."""
    path = Path(path)
    if path.exists():
        raise ValueError(
            f"'path' must not exist yet, got {str(path)!r}. Choose another folder, or "
            "remove this one"
        )
    lazy = [name for name, value in state.items() if is_lazy(value)]
    if lazy:
        raise ValueError(
            f"The model has weights of unknown size, {lazy}. Call it once before it is "
            "saved"
        )
    part = Path(f"{path}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        torch.save(state, part / WEIGHTS)
        text = json.dumps({**config, "sha256": _digest(part / WEIGHTS)}, indent=1)
        (part / CONFIG).write_text(f"{text}\n", encoding="utf-8")
        if card:
            (part / CARD).write_text(card, encoding="utf-8")
        part.rename(path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def load_model(path: str | PathLike) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration, and the weights on the CPU."""
    path = Path(path)
    missing = [name for name in (CONFIG, WEIGHTS) if not (path / name).is_file()]
    if missing:
        raise ValueError(
            "'path' must be a folder that 'save_pretrained' has made, got "
            f"{str(path)!r}, which has no {' and no '.join(missing)}"
        )
    try:
        config = json.loads((path / CONFIG).read_text(encoding="utf-8"))
        config["arguments"].items(), config["version"], set(config["missing"])
        found, stored = _digest(path / WEIGHTS), config["sha256"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{str(path / CONFIG)!r} is damaged: it must hold 'version', 'arguments', "
            f"'missing' and 'sha256', in JSON ({error!r})"
        ) from error
    if found != stored:
        raise ValueError(
            f"{str(path / WEIGHTS)!r} is damaged, or not the file that "
            f"'save_pretrained' wrote: its SHA-256 is {found}, not {stored}"
        )
    try:
        state = torch.load(path / WEIGHTS, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{str(path / WEIGHTS)!r} has no weights: {error}") from error
    return config, state


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
