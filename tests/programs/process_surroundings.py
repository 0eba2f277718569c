"""Print the surroundings of a process as JSON, and report its imports, as a rank does at its first step."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import warnings

import numpy as np

import ckpt
from ckpt.training import import_report


class Mine:
    """A class of __main__, to be pickled."""


def around() -> dict[str, object]:
    main = sys.modules["__main__"]
    spec = main.__spec__
    return {
        "argv": sys.argv,
        "orig_argv": sys.orig_argv[1:],
        "path": sys.path,
        "flags": repr(sys.flags),
        "main": {name: repr(getattr(main, name, None)) for name in ("__name__", "__file__", "__package__", "__doc__")},
        "cached": repr(getattr(main, "__cached__", "none")),
        "loader": [type(main.__loader__).__name__, getattr(main.__loader__, "name", ""), getattr(main.__loader__, "path", "")],
        "spec": None if spec is None else [spec.name, spec.origin],
        "globals": sorted(vars(main)),
        "builtins": type(main.__builtins__).__name__,
        "class": [Mine.__module__, Mine.__qualname__],
        "directory": os.getcwd(),
        "environ": dict(os.environ),
        "environ class": type(os.environ).__name__,
        "signals": {n: repr(signal.getsignal(n)) for n in (1, 2, 13, 15, 17)},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "thread": [threading.current_thread().name, threading.active_count(), len(os.listdir("/proc/self/task"))],
        "own session": [os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid()],
        "nice": os.getpriority(os.PRIO_PROCESS, 0),
        "open": [os.readlink(f"/proc/self/fd/{n}") for n in range(20) if os.path.exists(f"/proc/self/fd/{n}")],
        "streams": [
            [stream.encoding, stream.errors, stream.line_buffering, stream.write_through, stream.name, stream.isatty()]
            for stream in (sys.stdin, sys.stdout, sys.stderr)
        ],
        "hooks": [repr(sys.excepthook)[:20], [type(finder).__name__ for finder in sys.meta_path]],
        "warnings": len(warnings.filters),
        "parent": os.getppid(),
        "seed": np.random.get_state()[1][0].item() != 0,
        "ckpt": ckpt.__file__,
    }


if __name__ == "__main__":
    import_report.write_report()
    print(json.dumps(around()))
