"""A load that gets no memory raises MemoryError: whole data do not count as damaged, and no older step takes their place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from helpers.processes import finish, python

import ckpt

PROGRAM = """
import os, resource, sys
from pathlib import Path
import pyarrow.parquet
from ckpt.storage.base.errors import CkptError
from ckpt.format import manifest_parquet

data = [file.read_bytes() for file in Path(sys.argv[1]).rglob("*.parquet")]
in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
outcomes = set()
for more in range(0, 1 << 30, 1 << 18):
    resource.setrlimit(resource.RLIMIT_AS, (in_use + more, -1))
    try:
        manifest_parquet.read_table(data[0], "a manifest")
    except MemoryError:
        outcomes.add("no memory")
    except CkptError as error:
        outcomes.add(f"{type(error).__name__}: {error}")
    else:
        outcomes.add("read")
        break
print(sorted(outcomes))
"""


def test_a_manifest_that_memory_does_not_suffice_for_is_not_damaged(tmp_path: Path) -> None:
    ckpt.save({f"a{i}": np.zeros(1) for i in range(20_000)}, tmp_path / "r", step=0)
    environment = {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # the others reserve memory beforehand
    assert finish(python(PROGRAM, tmp_path / "r", env=environment), 600).strip() == "['no memory', 'read']"
