"""Packages that only some functions need."""

from importlib import import_module
from typing import Any


def required(module: str, who: str, extra: str) -> Any:
    """A module of an optional package, imported on first use. If the package is
    missing, an ImportError says who needs it, and which extra has it.
    """
    package = module.partition(".")[0]
    try:
        import_module(package)
        return import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise ImportError(
            f"{who} needs '{package}': pip install 'pyg-chimera[{extra}]'"
        ) from error
