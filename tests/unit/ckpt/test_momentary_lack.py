"""What a process lacks for a moment (memory, descriptors, threads) is not a fault of the data, of a package or of the state."""

from __future__ import annotations

import errno
import importlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NoReturn

import numcodecs
import numpy as np
import pytest

import ckpt
from ckpt.format import codec
from ckpt.state import dtype_names, frameworks, leaves, tree
from ckpt.storage.base import checked_decode

LACKS = {
    "memory": MemoryError(),
    "descriptors": OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    "descriptors for a library": ImportError(f"libx.so: cannot open shared object file: {os.strerror(errno.EMFILE)}"),
    "threads": RuntimeError("can't start new thread"),
}


class Array(np.ndarray):
    """An array of a class whose leaves nothing has made so far."""


@dataclass
class State:
    weight: Any = None


def flatten_unreadable_field(error: BaseException) -> Callable[[], object]:
    class Unreadable(State):
        def __getattribute__(self, name: str) -> Any:
            if name == fields(State)[0].name:
                raise error
            return super().__getattribute__(name)

    value = object.__new__(Unreadable)
    return lambda: tree.flatten({"state": value})


def make_leaf(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
    def fail(value: object) -> NoReturn:
        raise error

    monkeypatch.setitem(leaves._leaf_makers, Array, fail)
    return lambda: tree.flatten({"w": np.zeros(3).view(Array)})


def failing(
    module: object, name: str, call: Callable[[], object]
) -> Callable[[BaseException, pytest.MonkeyPatch], Callable[[], object]]:
    """Return a function that lets a function fail, and returns what then calls it."""

    def prepare(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Callable[[], object]:
        def fail(*args: object, **kwargs: object) -> NoReturn:
            raise error

        monkeypatch.setattr(module, name, fail)
        return call

    return prepare


CALLS: dict[str, Callable[[BaseException, pytest.MonkeyPatch], Callable[[], object]]] = {
    "the type of elements": failing(
        np.lib.format, "descr_to_dtype", lambda: dtype_names.numpy_dtype.__wrapped__('numpy:[["a", "<f4"]]')
    ),
    "a codec": failing(numcodecs, "get_codec", lambda: codec.codec_of.__wrapped__(json.dumps({"id": "zstd", "level": 3}))),
    "a framework": failing(importlib, "import_module", lambda: frameworks.file_of_kind.__wrapped__("torch")),
    "a field of the state": lambda error, monkeypatch: flatten_unreadable_field(error),
    "an array of the state": make_leaf,
}


@pytest.mark.parametrize("lack", LACKS)
@pytest.mark.parametrize("where", CALLS)
def test_a_lack_is_raised_as_it_is(where: str, lack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = LACKS[lack]
    call = CALLS[where](error, monkeypatch)
    with pytest.raises((type(error), ckpt.StagingFailed)) as caught:
        call()
    monkeypatch.undo()
    assert error in (caught.value, caught.value.__cause__)


@pytest.mark.parametrize("where", CALLS)
def test_any_other_error_is_reported_with_what_to_do(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ImportError("no such module")
    call = CALLS[where](error, monkeypatch)
    with pytest.raises(ckpt.CkptError, match="no such module|element type"):
        call()
    monkeypatch.undo()


def test_deep_json_that_memory_does_not_suffice_for_is_not_malformed(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = "[" * 500 + "]" * 500
    attempts: list[MemoryError] = []

    def loads(data: str) -> object:
        if not attempts:  # at the end of the caller's stack
            attempts.append(MemoryError())
            raise RecursionError
        raise attempts[0]  # in a thread of its own

    monkeypatch.setattr(checked_decode.json, "loads", loads)
    with pytest.raises(MemoryError) as caught:
        checked_decode.parse_json(deep)
    assert caught.value is attempts[0]
