"""Writes the list of the modules that a rank has imported, which the fork server imports for the next start.

The file lies beside the heartbeat page of the rank. Local rank 0 writes it at its first step, after late imports, and again
after its first save:

    {"modules": {name: origin, in the order of import}, "environ": {variable that the script changed: value, or null}}
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

from ckpt.training import heartbeat_page

_ADAPTED_VARIABLE = "CKPT_ADAPTED"  # `ADAPTED_VARIABLE` of the adapters, which this package must not import


def report_path(page: str | os.PathLike[str]) -> Path:
    """Return the path of the report of the rank with this heartbeat page. The file exists complete or not at all."""
    return Path(f"{os.fspath(page)}.imports")


def write_report() -> None:
    """Write the report, if an agent monitors this process and it is local rank 0."""
    page = os.environ.get(heartbeat_page.PAGE_VARIABLE)
    if not page or os.environ.get("LOCAL_RANK") != "0":
        return
    skipped = "ckpt" if os.environ.get(_ADAPTED_VARIABLE) else None  # a pre-import would look as if the script used ckpt
    modules = {name: _module_origin(m) for name, m in [*sys.modules.items()] if name.partition(".")[0] != skipped}
    report = json.dumps({"modules": modules, "environ": _changed_environment()})
    path = report_path(page)
    with contextlib.suppress(OSError):  # the job has ended, or the disk is full: the next rank starts without pre-imports
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(report)
        unfinished.replace(path)


def read_modules(path: Path) -> frozenset[str]:
    """Return the names of the modules in a report. Raises OSError, or ValueError if the file has something else."""
    report = json.loads(path.read_bytes())
    modules = report.get("modules") if isinstance(report, dict) else None
    if not isinstance(modules, dict):
        raise ValueError(f"{path} has no modules")
    return frozenset(modules)


def _module_origin(module: object) -> str | None:
    origin = getattr(getattr(module, "__spec__", None), "origin", None) or getattr(module, "__file__", None)
    return origin if isinstance(origin, str) else None


def _changed_environment() -> dict[str, str | None]:
    """Return the environment variables that the process has changed since its start; None for removed ones."""
    try:
        lines = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    before = dict(os.fsdecode(line).partition("=")[::2] for line in lines if line)
    return {name: os.environ.get(name) for name in before | dict(os.environ) if os.environ.get(name) != before.get(name)}
