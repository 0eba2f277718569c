"""A warning names the line of the user that called into the package."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ckpt
from ckpt.support import user_warning

SOURCE = """
import contextlib

@contextlib.contextmanager
def context():
    yield

@context()
def warn():
    inner()

def inner():
    warn_user("something happened")
"""


def warning_function() -> Callable[[], None]:
    """Return a function in a module of the package that warns two calls and a decorator further down."""
    module: dict[str, Any] = {"__name__": "ckpt.example", "warn_user": user_warning.warn_user}
    exec(compile(SOURCE, "ckpt/example.py", "exec"), module)
    found: Callable[[], None] = module["warn"]
    return found


def test_the_first_line_outside_of_the_package_is_named() -> None:
    warn = warning_function()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        warn()
    assert [(w.filename, str(w.message), w.category) for w in seen] == [(__file__, "something happened", UserWarning)]


def test_a_thread_of_the_package_names_the_line_that_warns() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        thread = threading.Thread(target=warning_function())
        thread.start()
        thread.join()
    assert [w.filename for w in seen] == ["ckpt/example.py"]


def test_a_load_that_passes_over_a_damaged_step_names_the_call_of_load(tmp_path: Path) -> None:
    for step in range(2):
        ckpt.save({"x": np.arange(100) + step}, tmp_path, step)
    next(tmp_path.glob("steps/*1/pack/*")).write_bytes(bytes(4096))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ckpt.load(tmp_path)
        with ckpt.Checkpointer(tmp_path) as saver:
            saver.restore({"x": np.zeros(100, int)})
    assert [w.filename for w in seen if "so the older step 0 was loaded" in str(w.message)] == [__file__, __file__]
