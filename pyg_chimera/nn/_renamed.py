"""Arguments that have other names now."""

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

Init = TypeVar("Init", bound=Callable)


def renamed(**names: str) -> Callable[[Init], Init]:
    """A constructor that takes arguments by old names too, with a warning."""

    def decorate(init: Init) -> Init:
        @wraps(init)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
            for old, new in names.items():
                if old in kwargs and new not in kwargs:
                    kwargs[new] = kwargs.pop(old)
                    warnings.warn(
                        f"'{old}' of {type(self).__name__} is '{new}' since 0.3, and "
                        "will be an error in 0.4",
                        DeprecationWarning,
                        stacklevel=2,
                    )
            init(self, *args, **kwargs)

        return cast(Init, wrapper)

    return decorate
