"""Loads a step at growing stack depth, until no frames are left. Prints the outcomes as JSON.

Usage:

    deep_loads.py FOLDER LEVELS WITH_LIKE       LEVELS: how deep the state is nested; WITH_LIKE: True or False
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import ckpt
from ckpt.errors import FormatError
from ckpt.storage.base.errors import CkptError


def call_below(frames: int, call: Callable[[], Any]) -> Any:
    """Return the result of `call`, this many frames deeper."""
    return call() if frames == 0 else call_below(frames - 1, call)


def nested(levels: int, step: int) -> Any:
    state: Any = {"step": step, "a": np.full(3, step)}
    for _ in range(levels):
        state = {"n": state}
    return state


def outcome(load: Callable[[], Any], levels: int, frames: int) -> int | str:
    """Return the step that a load this many frames deeper returns, or a word for its error."""
    try:
        found = call_below(frames, load)
    except RecursionError:  # raised by this program, or while ckpt makes a message
        return "stack"
    except FormatError as error:
        return "nested" if "nested too deeply for the stack of this call" in str(error) else str(error)
    except CkptError as error:
        return "low stack" if re.match(r"a load needs \d+ stack frames, and \d+ of \d+ are in use", str(error)) else str(error)
    for _ in range(levels):
        found = found["n"]
    return int(found["step"])


def main() -> None:
    folder, levels, with_like = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "True"
    for step in range(2):
        ckpt.save(nested(levels, step), folder, step=step)
    like = nested(levels, -1) if with_like else None
    outcomes = [outcome(lambda: ckpt.load(folder, like=like), levels, f) for f in range(0, sys.getrecursionlimit(), 7)]
    print(json.dumps(sorted(map(str, set(outcomes)))))


if __name__ == "__main__":
    main()
