"""Memory of a node that is short for a moment: the pool of its buffers is as large as before afterwards."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import resource
from ckpt.storage.base.buffer_pool import BufferPool

pool = BufferPool(64 << 20)
limits = resource.getrlimit(resource.RLIMIT_AS)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), limits[1]))
failures = 0
for _ in range(3):
    try:
        with pool.borrow(40 << 20, 0.0):
            pass
    except (OSError, MemoryError):
        failures += 1
assert failures == 3, failures
resource.setrlimit(resource.RLIMIT_AS, limits)
with pool.borrow(40 << 20, 0.0):
    pass
"""


def test_memory_that_could_not_be_mapped_does_not_count_as_lent() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
