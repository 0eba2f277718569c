"""One name for each element type: older versions of ckpt stored the types of unpickled arrays in the notation of numpy."""

from __future__ import annotations

import re

_NATIVE_NUMBER = re.compile(r'numpy:"[<|](?P<kind>[biufc])(?P<nbytes>\d{1,2})"')
_KINDS = {"i": "int", "u": "uint", "f": "float", "c": "complex"}


def plain_dtype(name: str) -> str:
    """Return "float64" for the stored name `numpy:"<f8"`, and so on; every other name as it is."""
    if (found := _NATIVE_NUMBER.fullmatch(name)) is None:
        return name
    return "bool" if found["kind"] == "b" else f"{_KINDS[found['kind']]}{8 * int(found['nbytes'])}"
