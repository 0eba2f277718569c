"""Options of a command line that reach the command as one frozen dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from typing import Any

CommandFunction = Callable[..., int]


def gather_options(argument: str, options_type: type[Any]) -> Callable[[CommandFunction], CommandFunction]:
    """A decorator: the command takes the options that are fields of `options_type` as one `argument` of that type.

    It stands below the decorators of the options, so that click reads those from the decorated function.
    """
    names = [field.name for field in fields(options_type)]

    def decorate(function: CommandFunction) -> CommandFunction:
        @wraps(function)
        def gathered(*args: Any, **values: Any) -> int:
            values[argument] = options_type(**{name: values.pop(name) for name in names})
            return function(*args, **values)

        return gathered

    return decorate
