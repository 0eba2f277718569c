"""A load that gets no memory raises MemoryError: whole data do not count as damaged, and no older step takes their place."""

from __future__ import annotations

import json
import signal
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
resource.setrlimit(resource.RLIMIT_AS, (in_use + (int(sys.argv[2]) << 20), -1))
try:
    manifest_parquet.read_table(data[0], "a manifest")
except MemoryError:
    print("no memory")
except CkptError as error:
    print(f"{type(error).__name__}: {error}")
else:
    print("read")
"""

DECODING = """
import json, resource
from functools import partial
import numpy as np
from ckpt.aggregator.records import file_record
from ckpt.aggregator.records.file_record import FileRecord, RecordHead
from ckpt.format import codec

raw = np.random.default_rng(0).integers(0, 50, 1 << 20).astype(np.uint8)
decoded = np.empty_like(raw)
blocks = {name: (json.dumps({"id": name}), codec.encode(json.dumps({"id": name}), raw, 4)) for name in ("zstd", "float_planes")}
content = bytes(4 << 20)
record = file_record.encode_record(FileRecord(RecordHead("file", len(content), 0.0, 0.0, "1", ()), inline_data=content))

def decode_block(name):
    config, block = blocks[name]
    codec.decode(config, block, decoded)
    return bool((decoded == raw).all())

calls = {name: partial(decode_block, name) for name in blocks}
calls["record"] = lambda: file_record.decode_record("a", record).inline_data == content
in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (in_use, -1))
taken, nbytes = [], 1 << 20
while nbytes >= 1 << 15:  # what malloc has in reserve, but for small objects
    try:
        taken.append(bytearray(nbytes))
    except MemoryError:
        nbytes //= 2
outcomes = {name: set() for name in calls}
for more in range(0, 64 << 20, 1 << 13):
    resource.setrlimit(resource.RLIMIT_AS, (in_use + more, -1))
    for name, call in calls.items():
        if True not in outcomes[name]:
            try:
                outcomes[name].add(call())
            except BaseException as error:
                outcomes[name].add(type(error).__name__)
resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
print(json.dumps({name: sorted(map(str, found)) for name, found in outcomes.items()}))
"""


def test_neither_blocks_nor_records_that_memory_does_not_suffice_for_are_damaged() -> None:
    outcomes = json.loads(finish(python(DECODING), 600))
    assert outcomes == {name: ["MemoryError", "True"] for name in ("zstd", "float_planes", "record")}


def test_a_manifest_that_memory_does_not_suffice_for_is_not_damaged(tmp_path: Path) -> None:
    ckpt.save({f"a{i}": np.zeros(1) for i in range(60_000)}, tmp_path / "r", step=0)
    environment = {"ARROW_DEFAULT_MEMORY_POOL": "system"}  # the others reserve memory beforehand
    outcomes = []
    for more in (0, 1, 2, 3, 4, 8, 1000):
        process = python(PROGRAM, tmp_path / "r", more, env=environment)
        printed, message = process.communicate(timeout=600)
        if process.returncode != -signal.SIGABRT:  # without memory, the C++ of Arrow may also end the process (std::bad_alloc)
            assert process.returncode == 0, message
            outcomes.append(printed.strip())
    assert outcomes[-1] == "read"
    assert set(outcomes) == {"no memory", "read"}
