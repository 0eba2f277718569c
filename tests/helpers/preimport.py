"""Imports for fork servers: `import ckpt` imports its parts at their first use, which would otherwise be in each child."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def import_all_of(work: Callable[[Path], None]) -> None:
    """Import all modules that `work` imports, which is called with an empty folder.

    It runs in a forked child, because this process must not have the threads that it starts.
    """
    with tempfile.TemporaryDirectory(prefix="ckpt-preimport-") as folder:
        names = Path(folder) / "names"
        if (pid := os.fork()) == 0:
            status = 1
            try:
                os.dup2(2, 1)
                (Path(folder) / "work").mkdir()
                work(Path(folder) / "work")
                names.write_text(json.dumps(list(sys.modules)))
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0, "the work whose modules are imported has failed"
        for name in json.loads(names.read_text()):
            with suppress(ImportError):  # some names are not modules, such as typing.io
                importlib.import_module(name)
    gc.freeze()  # otherwise a collection in a child would copy the memory of this process
