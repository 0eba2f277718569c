"""Passes options of a command line to the command function as one frozen dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any

CommandFunction = Callable[..., int]


def gather_options(argument: str, options_type: type[Any]) -> Callable[[CommandFunction], CommandFunction]:
    """Return a decorator that passes the options which are fields of `options_type` as one `argument` of that type.

    Put it below the decorators of the options, because click reads those from the decorated function.
    """
    names = [field.name for field in fields(options_type)]

    def decorate(function: CommandFunction) -> CommandFunction:
        @wraps(function)
        def gathered(*args: Any, **values: Any) -> int:
            values[argument] = options_type(**{name: values.pop(name) for name in names})
            return function(*args, **values)

        return gathered

    return decorate
