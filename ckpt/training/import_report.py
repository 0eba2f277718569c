"""What a rank has imported, told to whoever starts the next one: a file beside the page of the rank
(`ckpt.training.heartbeat_page`).

Rank 0 of a host writes it at its first step, when what is imported late is there too, and again when its first save is done:

    {"modules": {name: where it came from, in the order of import}, "environ": {what the script has set: value, or null}}
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from ckpt.training import heartbeat_page


def report_path(page: str | os.PathLike[str]) -> Path:
    """The file of the rank with this page. It is there in one piece or not at all."""
    return Path(f"{os.fspath(page)}.imports")


def write_report() -> None:
    """Write the file, where somebody looks after this process."""
    page = os.environ.get(heartbeat_page.PAGE_VARIABLE)
    if not page or os.environ.get("LOCAL_RANK") != "0":
        return
    modules = {name: _module_origin(module) for name, module in [*sys.modules.items()]}
    report = json.dumps({"modules": modules, "environ": _changed_environment()})
    path = report_path(page)
    with contextlib.suppress(OSError):  # a job that is over, or no space: the next rank starts cold
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(report)
        unfinished.replace(path)


def _module_origin(module: object) -> str | None:
    origin = getattr(getattr(module, "__spec__", None), "origin", None) or getattr(module, "__file__", None)
    return origin if isinstance(origin, str) else None


def _changed_environment() -> dict[str, str | None]:
    """Variables that are not what they were when the process began."""
    try:
        lines = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    before = dict(os.fsdecode(line).partition("=")[::2] for line in lines if line)
    return {name: os.environ.get(name) for name in before | dict(os.environ) if os.environ.get(name) != before.get(name)}
