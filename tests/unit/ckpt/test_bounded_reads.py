"""A file longer than the format allows, or a manifest that claims a giant array, is refused before memory is allocated."""

from __future__ import annotations

import hashlib
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers.processes import finish, python

import ckpt
from ckpt.format import json_records
from ckpt.format.digest import checksum, digest
from ckpt.format.manifest_parquet import read_table, write_table
from ckpt.tools.inspect import command as inspect_command
from ckpt.tools.restore import command as restore_command

_LONG = 1 << 30
_ALLOWED = 300 << 20
"""More than imports need, and a fraction of `_LONG`."""

_CHILD = """
import sys
import ckpt, numpy, pyarrow.parquet
from helpers.peak_memory import peak_bytes
before = peak_bytes()
try:
    ckpt.load(sys.argv[1], step=5, strict=True)
except ckpt.IntegrityError as error:
    print(peak_bytes() - before, error)
else:
    print(-1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "pattern", ["ckpt.json", "steps/5/commit.json", "steps/5/manifest/*.parquet", "steps/5/manifest/*.json"]
)
def test_a_file_that_grew_is_refused_without_reading_it(tmp_path: Path, pattern: str) -> None:
    ckpt.save({"weight": np.arange(100)}, tmp_path, 5)
    (file,) = tmp_path.glob(pattern)
    os.truncate(file, _LONG)
    nbytes, _, message = finish(python(_CHILD, tmp_path)).partition(" ")
    assert 0 <= int(nbytes) < _ALLOWED
    assert file.name in message
    assert str(_LONG) in message


def _change_manifest(root: Path, step: int, **columns: Any) -> None:
    """Change values in the only row of the manifest of a step, and write a commit record that matches."""
    (manifest,) = root.glob(f"steps/{step}/manifest/*.parquet")
    table = read_table(manifest.read_bytes(), "manifest")
    for name, value in columns.items():
        column = table.schema.get_field_index(name)
        table = table.set_column(column, name, pa.array([value], table.schema.field(column).type))
    metadata = {k.decode(): v.decode() for k, v in pq.read_schema(manifest).metadata.items() if k != b"ARROW:schema"}
    data = write_table(table, metadata)
    manifest.write_bytes(data)
    record = root / f"steps/{step}/commit.json"
    body = json_records.decode("commit", record.read_bytes(), "commit")
    body["manifests"][0] |= {"nbytes": len(data), "digest": digest("xxh3-128", data).hex()}
    record.write_bytes(json_records.encode("commit", {k: v for k, v in body.items() if k not in ("kind", "format")}))


def test_a_giant_array_without_bytes_is_refused_before_allocation(tmp_path: Path) -> None:
    ckpt.save({"weight": np.arange(100)}, tmp_path, 5)
    _change_manifest(tmp_path, 5, global_shape=[1 << 45])
    with pytest.raises(ckpt.IntegrityError, match="weight .* covers 800 of"):
        ckpt.load(tmp_path, step=5)


@pytest.mark.parametrize(
    ("codec", "changes", "message"),
    [
        ("none", {"raw": 1 << 50, "nbytes": 1 << 50}, "a block of"),
        ("none", {"raw": 1 << 50, "stored": 1 << 50, "nbytes": 1 << 50}, "a block of"),
        ("none", {"nbytes": 1 << 50}, "outside of its block"),
        ("none", {"raw": 1 << 25, "nbytes": 1 << 25}, "without a codec"),
        ({"id": "zlib"}, {"raw": 1 << 50, "nbytes": 1 << 50}, "a block of"),
    ],
)
def test_a_giant_array_whose_blocks_claim_its_bytes_is_damaged(
    tmp_path: Path, codec: Any, changes: dict[str, int], message: str
) -> None:
    """Where no step is named, the previous one is loaded; memory of the claimed size is never allocated."""
    for step in (4, 5):
        ckpt.save({"weight": np.full(100, step, np.uint8)}, tmp_path, step, codec=codec)
    shape = [changes["nbytes"]]
    _change_manifest(tmp_path, 5, global_shape=shape, shape=shape, **changes)
    with pytest.raises(ckpt.IntegrityError, match=message):
        ckpt.load(tmp_path, step=5)
    assert ckpt.load(tmp_path)["weight"][0] == 4


@pytest.mark.parametrize("codec", ["none", {"id": "zlib"}])
@pytest.mark.parametrize(
    "changes",
    [
        {"global_shape": [1 << 62]}, {"global_shape": [1 << 50]}, {"global_shape": [-1]}, {"global_shape": [0]}, {"raw": 0},
        {"raw": -5}, {"stored": 1 << 62}, {"nbytes": 0}, {"nbytes": 1 << 61}, {"start": 1 << 60}, {"dtype": "numpy:[]"},
    ],
)  # fmt: skip
def test_one_array_whose_shape_does_not_match_its_bytes_is_damaged(tmp_path: Path, codec: Any, changes: dict[str, Any]) -> None:
    ckpt.save({"weight": np.arange(100)}, tmp_path, 5, codec=codec)
    _change_manifest(tmp_path, 5, **changes)
    for index in (3, slice(3, 5), ...):
        with pytest.raises(ckpt.IntegrityError, match=r"manifest|parquet"):
            ckpt.open(tmp_path)[5]["weight"][index]
    for ending in ("npz", "pt"):
        with pytest.raises(ckpt.IntegrityError, match=r"manifest|parquet"):
            restore_command.main([str(tmp_path), str(tmp_path / f"out.{ending}")], standalone_mode=False)
    assert inspect_command.main([str(tmp_path), "5"], standalone_mode=False) == 1


@pytest.mark.parametrize("nbytes", [1 << 20, 99])
def test_a_block_that_decodes_to_another_length_is_damaged(tmp_path: Path, nbytes: int) -> None:
    """The error names the leaf, the previous step is loaded, and a verification reports the damage."""
    for step in (4, 5):
        ckpt.save({"weight": np.full(100, step, np.uint8)}, tmp_path, step, codec={"id": "zlib"})
    bomb = zlib.compress(bytes(nbytes), 9)
    (pack,) = tmp_path.glob("steps/5/pack/*")
    pack.write_bytes(bomb.ljust(pack.stat().st_size, b"\0"))
    _change_manifest(tmp_path, 5, stored=len(bomb), checksum=checksum(np.frombuffer(bomb, np.uint8)))
    with pytest.raises(ckpt.IntegrityError, match=r"leaf weight .*decodes to"):
        ckpt.load(tmp_path, step=5)
    with pytest.raises(ckpt.IntegrityError, match=r"leaf weight .*decodes to"):
        ckpt.open(tmp_path)[5].verify()
    assert ckpt.load(tmp_path)["weight"][0] == 4


_MEASURED = """
import sys
import ckpt, numpy, pyarrow.parquet
from helpers.peak_memory import peak_bytes
from ckpt.aggregator.file_io.namespace import open_namespace
before = peak_bytes()
try:
    exec(sys.argv[1])
except (ckpt.IntegrityError, ckpt.GroupError) as error:
    print(type(error).__name__, error)
else:
    print("done")
print(peak_bytes() - before)
"""


def run_with_little_memory(code: str, *args: object, **options: Any) -> str:
    """Return the last line printed by a child that runs `code`, and check that it allocated little memory."""
    result, nbytes = finish(python(_MEASURED, code, *args, **options)).splitlines()
    assert int(nbytes) < _ALLOWED
    return result


def test_a_commit_record_that_grew_is_not_read_when_its_step_is_replaced(tmp_path: Path) -> None:
    ckpt.save({"weight": np.arange(100)}, tmp_path, 5)
    os.truncate(tmp_path / "steps/5/commit.json", _LONG)
    result = run_with_little_memory("ckpt.save({'weight': numpy.arange(10)}, sys.argv[2], 5, overwrite=True)", tmp_path)
    assert result.startswith("IntegrityError")
    assert f"has {_LONG} bytes" in result


@pytest.mark.slow
def test_a_commit_record_that_grew_in_a_namespace_is_refused(tmp_path: Path) -> None:
    """The record of the file states its length, and a hole of any length occupies no space."""
    config = tmp_path / "config.toml"
    members = ", ".join(f"'{tmp_path}/disk{i}'" for i in range(2))
    config.write_text(f"[namespaces.lab]\nmembers = [{members}]\n")
    grow = """
ckpt.save({"weight": numpy.arange(100)}, "ckpt://lab/run", 5)
namespace, _ = open_namespace("ckpt://lab")
namespace.delete(["run/steps/5/commit.json"])
with namespace.create("run/steps/5/commit.json", aligned=False) as writer:
    writer.write_at(1 << 40, memoryview(b"x"))
    writer.publish()
"""
    env = {"CKPT_CONFIG": str(config)}
    assert run_with_little_memory(grow, env=env) == "done"
    save = "ckpt.save({'w': numpy.arange(9)}, 'ckpt://lab/run', 5, overwrite=True)"
    for code in ("ckpt.load('ckpt://lab/run', step=5)", save):
        result = run_with_little_memory(code, env=env)
        assert result.startswith("IntegrityError"), result
        assert f"has {(1 << 40) + 1} bytes" in result


def test_a_long_object_of_another_rendezvous_is_ignored(tmp_path: Path) -> None:
    """An earlier rendezvous at the store has grown, and one of the same job names members of any length."""
    job = {"CKPT_RUN_ID": "a", "WORLD_SIZE": "2"}
    code = """
from ckpt.groups import EnvGroup
from ckpt.storage.local.directory import LocalStore
group = EnvGroup(60)
group.meet_at(LocalStore(sys.argv[2]))
assert group.all_gather(b"%d" % group.rank) == [b"0", b"1"]
group.close()
"""
    digest = hashlib.sha256(b"a").hexdigest()[:12]
    for folder in (f"meet/{digest}-2-abc", "meet/other-2-abc"):
        (tmp_path / folder).mkdir(parents=True)
        for name in ("open", "members.json"):
            (tmp_path / folder / name).touch()
            os.truncate(tmp_path / folder / name, _LONG)
    ranks = [python(_MEASURED, code, tmp_path, env={**job, "RANK": str(rank)}) for rank in range(2)]
    for rank in ranks:
        result, nbytes = finish(rank, 120).splitlines()
        assert result == "done"
        assert int(nbytes) < _ALLOWED


def test_a_report_that_grew_is_ignored(tmp_path: Path) -> None:
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "good.json").write_text("{}")
    (tmp_path / "agents" / "long.json").touch()
    os.truncate(tmp_path / "agents" / "long.json", _LONG)
    code = """
from pathlib import Path
from ckpt.recovery.run_log.report_files import ReportFiles
assert list(ReportFiles(Path(sys.argv[2])).read()) == ["good"]
"""
    assert run_with_little_memory(code, tmp_path) == "done"


@pytest.mark.parametrize("limit", ["MAX_MANIFEST_BYTES", "MAX_TREE_BYTES"])
def test_a_step_that_no_load_would_accept_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(f"ckpt.saving.committer.{limit}", 10)
    with pytest.raises(ckpt.StepRefused, match="more than the limit of 10:"):
        ckpt.save({"weight": np.arange(100)}, tmp_path, 5)
    assert ckpt.open(tmp_path).steps() == []


def test_a_manifest_that_shrinks_more_than_a_load_allows_is_stored_without_compression(tmp_path: Path) -> None:
    """Long names with a long part in common shrink a thousandfold, as does nothing else in a manifest."""
    prefix = "layer." * 1000
    state = {f"{prefix}{i}": np.full(2, i, np.float32) for i in range(5000)}
    for step in (5, 6):
        ckpt.save(state, tmp_path, step)
        loaded = ckpt.load(tmp_path, step=step)
        assert loaded.keys() == state.keys()
        assert all(np.array_equal(loaded[name], value) for name, value in state.items())
    assert ckpt.open(tmp_path)[6].verify() > 0
