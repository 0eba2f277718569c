"""A file that is longer than it can be, or a manifest that claims a giant array, costs no memory: it is refused first."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import finish, python

import ckpt
from ckpt import records
from ckpt.digest import digest
from ckpt.table import read_table, write_table

_LONG = 1 << 30
_ALLOWED = 300 << 20
"""More than imports take, and a fraction of `_LONG`."""

_CHILD = """
import resource, sys
import ckpt, numpy, pyarrow.parquet
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    ckpt.load(sys.argv[1], step=5, strict=True)
except ckpt.IntegrityError as error:
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10, error)
else:
    print(-1)
"""


@pytest.mark.parametrize(
    "pattern", ["ckpt.json", "steps/5/commit.json", "steps/5/manifest/*.parquet", "steps/5/manifest/*.json"]
)
def test_a_file_that_grew_is_refused_unread(tmp_path: Path, pattern: str) -> None:
    ckpt.save({"weight": np.arange(100)}, tmp_path, 5)
    (file,) = tmp_path.glob(pattern)
    os.truncate(file, _LONG)
    nbytes, _, message = finish(python(_CHILD, tmp_path)).partition(" ")
    assert 0 <= int(nbytes) < _ALLOWED
    assert file.name in message
    assert str(_LONG) in message


def test_a_giant_array_that_no_bytes_cover_is_refused_before_it_is_made(tmp_path: Path) -> None:
    ckpt.save({"weight": np.arange(100)}, tmp_path, 5)
    (manifest,) = tmp_path.glob("steps/5/manifest/*.parquet")
    table = read_table(manifest.read_bytes(), "manifest")
    column = table.column_names.index("global_shape")
    table = table.set_column(column, "global_shape", pa.array([[1 << 45]], pa.list_(pa.int64())))
    metadata = {k.decode(): v.decode() for k, v in pq.read_schema(manifest).metadata.items() if k != b"ARROW:schema"}
    data = write_table(table, metadata)
    manifest.write_bytes(data)
    record = tmp_path / "steps/5/commit.json"
    body = records.decode("commit", record.read_bytes(), "commit")
    body["manifests"][0] |= {"nbytes": len(data), "digest": digest("xxh3-128", data).hex()}
    record.write_bytes(records.encode("commit", {k: v for k, v in body.items() if k not in ("kind", "format")}))
    with pytest.raises(ckpt.IntegrityError, match="weight .* covers 800 of"):
        ckpt.load(tmp_path, step=5)


@pytest.mark.parametrize("limit", ["MANIFEST_BYTES", "TREE_BYTES"])
def test_what_no_load_would_take_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(f"ckpt.commit.{limit}", 10)
    with pytest.raises(ckpt.StepRefused, match="10 are the most"):
        ckpt.save({"weight": np.arange(100)}, tmp_path, 5)
    assert ckpt.open(tmp_path).steps() == []


