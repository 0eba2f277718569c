"""Convert untrusted data (decoded JSON or msgpack) to dataclasses, with a check of every type.

An unknown field (of a newer version) is ignored; a missing one gets its default. A field of another type, or a missing one
without a default, raises Malformed, which names the field. The caller reports the error, and skips an optional record.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ckpt.storage.base.threads import WorkerThread

T = TypeVar("T")

_REPR_CHARACTERS = 60
_INT_LIMIT = 1 << 63
"""Integers must fit into 64 bits: no record has larger ones, and the formats of heartbeat pages and files cannot store them."""

_Converter = Callable[[object], Any]


class Malformed(ValueError):
    """Data do not match a dataclass. The message names the field."""

    def __init__(self, what: str, *path: str) -> None:
        self.problem, self.path = what, path
        super().__init__(f"{''.join(path).lstrip('.')} {what}" if path else what)

    def within(self, part: str) -> Malformed:
        """Return the same error with its path extended by `part`, the name of this part in a larger value."""
        return Malformed(self.problem, part, *self.path)


def decode(kind: type[T], data: object) -> T:
    """Return the dataclass `kind` from a mapping by field name; raise Malformed.

    Types may be str, bytes, int, bool, float (also from an int), None, Literal, dataclasses, unions, tuples, lists, sequences
    and mappings of these; object and Any take anything. Lists and tuples are interchangeable in the data, since JSON has only
    lists.
    """
    try:
        hashable: Any = kind  # mypy treats classes as unhashable
        made: T = _converter(hashable)(data)
    except Malformed as error:
        raise error.within(f"{kind.__name__}") from None
    return made


def read_json(data: bytes | str) -> Any:
    """Return the decoded JSON; raise Malformed for any other bytes."""
    try:
        return parse_json(data)
    except ValueError as error:
        raise Malformed(f"not JSON: {error}") from None


def parse_json(data: bytes | str) -> Any:
    """Return the decoded JSON; raise ValueError if it is not valid, or is nested too deeply.

    Python's recursion limit counts the frames of the caller, too. A text beyond it is decoded in a new thread: a load from a
    deep stack must read what a save from a shallow one wrote.
    """
    try:
        return json.loads(data)
    except RecursionError:
        pass
    decoded: list[Any] = []
    errors: list[Exception] = []

    def decode_here() -> None:
        try:
            decoded.append(json.loads(data))
        except RecursionError:
            errors.append(ValueError("it is nested too deeply"))
        except (ValueError, MemoryError) as error:
            errors.append(error)

    thread = WorkerThread(target=decode_here, name="ckpt-json", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return decoded[0]


@cache
def _converter(kind: Any) -> _Converter:
    """Return the function that converts decoded data to a value of this type, or raises Malformed."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any or kind is object:
        return lambda data: data
    if origin in (Union, UnionType):
        return _union_converter([_converter(each) for each in arguments])
    if origin is Literal:
        return _literal_converter(arguments)
    if is_dataclass(kind):
        return _dataclass_converter(kind)
    if origin is tuple and (len(arguments) != 2 or arguments[1] is not Ellipsis):
        return _fixed_tuple_converter([_converter(each) for each in arguments])
    if origin in (tuple, list, Sequence):
        return _sequence_converter(_converter(arguments[0]), list if origin is list else tuple)
    if origin in (dict, Mapping):
        return _mapping_converter(*map(_converter, arguments))
    return {int: _convert_int, float: _convert_float, NoneType: _convert_none}.get(kind) or _exact_type_converter(kind)


def _dataclass_converter(kind: Any) -> _Converter:
    types = get_type_hints(kind)
    converters = [(each.name, _converter(types[each.name]), _is_required(each)) for each in fields(kind)]

    def convert(data: object) -> object:
        if not isinstance(data, Mapping):
            raise _type_error("a mapping", data)
        found = {}
        for name, each, required in converters:
            if name in data:
                try:
                    found[name] = each(data[name])
                except Malformed as error:
                    raise error.within(f".{name}") from None
            elif required:
                raise Malformed("is missing", f".{name}")
        try:
            return kind(**found)
        except (ValueError, TypeError) as error:  # raised by __post_init__
            raise Malformed(f"is invalid: {error}") from error

    return convert


def _is_required(each: Field[object]) -> bool:
    return each.default is MISSING and each.default_factory is MISSING


def _union_converter(converters: Sequence[_Converter]) -> _Converter:
    def convert(data: object) -> object:
        if data is None and _convert_none in converters:
            return None
        first = None
        for each in converters:
            try:
                return each(data)
            except Malformed as error:
                first = first or error
        raise first or _type_error("of a known type", data)

    return convert


def _literal_converter(values: Sequence[object]) -> _Converter:
    def convert(data: object) -> object:
        if any(type(data) is type(value) and data == value for value in values):
            return data
        raise _type_error("one of " + ", ".join(map(repr, values)), data)

    return convert


def _fixed_tuple_converter(converters: Sequence[_Converter]) -> _Converter:
    def convert(data: object) -> tuple[object, ...]:
        if not isinstance(data, list | tuple) or len(data) != len(converters):
            raise _type_error(f"a list of {len(converters)}", data)
        return tuple(_convert_item(each, i, item) for i, (each, item) in enumerate(zip(converters, data, strict=True)))

    return convert


def _sequence_converter(each: _Converter, made: Callable[[Iterable[object]], object]) -> _Converter:
    def convert(data: object) -> object:
        if not isinstance(data, list | tuple):
            raise _type_error("a list", data)
        return made([_convert_item(each, i, item) for i, item in enumerate(data)])

    return convert


def _mapping_converter(key: _Converter, value: _Converter) -> _Converter:
    def convert(data: object) -> dict[object, object]:
        if not isinstance(data, Mapping):
            raise _type_error("a mapping", data)
        return {_convert_item(key, k, k): _convert_item(value, k, v) for k, v in data.items()}

    return convert


def _convert_item(each: _Converter, where: object, data: object) -> object:
    try:
        return each(data)
    except Malformed as error:
        raise error.within(f"[{_short_repr(where)}]") from None


def _convert_int(data: object) -> int:
    if type(data) is int and -_INT_LIMIT <= data < _INT_LIMIT:  # not isinstance: True is not a number here
        return data
    raise _type_error("an integer of 64 bits", data)


def _convert_float(data: object) -> float:
    if type(data) is float:
        return data
    return float(_convert_int(data))


def _convert_none(data: object) -> None:
    if data is None:
        return None
    raise _type_error("None", data)


def _exact_type_converter(kind: object) -> _Converter:
    def convert(data: object) -> object:
        if type(data) is kind:
            return data
        raise _type_error(getattr(kind, "__name__", str(kind)), data)

    return convert


def _type_error(expected: str, data: object) -> Malformed:
    return Malformed(f"is {_short_repr(data)}, not {expected}")


def _short_repr(data: object) -> str:
    try:
        text = repr(data)
    except (ValueError, RecursionError):  # too many digits, or levels
        return f"a {type(data).__name__}"
    return text if len(text) <= _REPR_CHARACTERS else f"{text[:_REPR_CHARACTERS]}…"
