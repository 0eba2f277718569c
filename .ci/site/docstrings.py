"""An extension of griffe that turns parameters in docstrings, lines of the form `name: text`, into lists."""

from __future__ import annotations

import re
from typing import Any

import griffe

_PARAMETER = re.compile(r"([a-z_]\w*(?:, [a-z_]\w*)*): (.*)")


class PlainParameters(griffe.Extension):
    """Rewrites each docstring before griffe parses it."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_lists(obj.docstring.value)


def with_lists(text: str) -> str:
    """Return a docstring in which each line `name: text`, with the indented lines below it, is an item of a list."""
    lines, before = [], ""
    for line in text.splitlines():
        if found := _PARAMETER.fullmatch(line):
            if before and not before.startswith("- ") and not before.startswith("  "):
                lines.append("")
            names = ", ".join(f"**{name}**" for name in found[1].split(", "))
            line = f"- {names}: {found[2]}"
        elif before.startswith(("- ", "    ")) and line and not line.startswith(" "):
            lines.append("")
        lines.append(line)
        before = line
    return "\n".join(lines)
