"""Foreign data may nest values as deeply as their length allows: a parser refuses them by the error that it promises."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest

import ckpt
from ckpt.adapters import lightning_io
from ckpt.aggregator.cluster import etcd_client
from ckpt.aggregator.cluster.config import parse_tables
from ckpt.aggregator.records import file_record, record_ring
from ckpt.errors import FormatError, GroupError
from ckpt.format import codec, json_records, manifest_parquet
from ckpt.groups import hello
from ckpt.groups.launchers import rank_from_env, signs_of_other_ranks
from ckpt.recovery.run_log.entry_schema import read_entry
from ckpt.repository.checkpoint import Checkpoint
from ckpt.state.dtype_names import numpy_dtype
from ckpt.storage.base.checked_decode import Malformed, read_json
from ckpt.storage.base.errors import CkptError, IntegrityError, InvalidArgument, StoreError
from ckpt.storage.member.bucket import Bucket
from ckpt.storage.node import wire
from ckpt.storage.registers.base import RegisterValue

DEPTH = 100_000
JSON = b"[" * DEPTH + b"]" * DEPTH
SHORT_JSON = b"[" * 30_000 + b"]" * 30_000
"""For files whose length is limited to 64 KiB."""
MESSAGE = b"\x91" * DEPTH + b"\xc0"


@pytest.mark.parametrize("parse", [manifest_parquet.read_table, manifest_parquet.read_row_groups])
@pytest.mark.parametrize(
    "footer",
    [b"\x49" + b"\x19" * DEPTH, b"\x4a" + b"\x1a" * DEPTH, b"\x4b" + b"\x01\x8b\x01" * DEPTH, b"\x4c" + b"\x1c" * DEPTH,
     b"\x49" + b"\x1c\x19" * DEPTH],
    ids=["lists", "sets", "maps", "structs", "lists of structs"],
)  # fmt: skip
def test_a_footer_of_nested_values_is_no_manifest(parse: Callable[[bytes, str], object], footer: bytes) -> None:
    footer += b"\0" * 8
    with pytest.raises(IntegrityError, match=r"is not a manifest \((nested too deeply|unexpected type 11)\)"):
        parse(b"PAR1" + footer + len(footer).to_bytes(4, "little") + b"PAR1", "manifest")


def _bucket(folder: Path, name: str, data: bytes) -> Bucket:
    (folder / "objects").mkdir()
    (folder / name).write_bytes(data)
    return Bucket(f"file://{folder}")


def test_nested_values_in_the_record_of_a_bucket_are_damage(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"device\.json is damaged"):
        _bucket(tmp_path, "device.json", JSON).info()


def test_nested_values_in_the_facts_of_the_registers_of_a_bucket_are_damage(tmp_path: Path) -> None:
    bucket = _bucket(tmp_path, "registers.json", SHORT_JSON)
    with pytest.raises(StoreError, match=r"registers\.json is damaged \(not JSON"):
        bucket.registers.read(["a"])


def test_a_file_of_nested_values_is_none_of_the_lightning_plugin(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(SHORT_JSON)
    assert lightning_io._read_file(tmp_path / "file") is None


def test_nested_values_in_the_environment_are_no_cluster() -> None:
    with pytest.raises(GroupError, match="TF_CONFIG that is not the description of a cluster"):
        rank_from_env({"TF_CONFIG": JSON.decode()})
    assert signs_of_other_ranks({"CLUSTER_SPEC": JSON.decode()}) == []


def test_nested_values_in_records_and_messages_raise_the_promised_error(tmp_path: Path) -> None:
    cases: list[tuple[Callable[[], object], type[Exception]]] = [
        (lambda: json_records.decode("commit", JSON, "commit"), IntegrityError),
        (lambda: codec.codec_of(JSON.decode()), FormatError),
        (lambda: numpy_dtype(f"numpy:{JSON.decode()}"), FormatError),
        (lambda: numpy_dtype("numpy:" + '[["a", ' * 500 + '"<f4"' + "]]" * 500), FormatError),
        (lambda: read_json(JSON), Malformed),
        (lambda: parse_tables(b"x=" + JSON, tmp_path), InvalidArgument),
        (lambda: wire.unpack(MESSAGE), ValueError),
        (lambda: file_record.decode_record("a", RegisterValue(MESSAGE, MESSAGE)), CkptError),
        (lambda: record_ring.decode_ring(RegisterValue(MESSAGE)), IntegrityError),
        (lambda: etcd_client._parse_answer("http://a", JSON), StoreError),
    ]  # fmt: skip
    for parse, error in cases:
        with pytest.raises(error):
            parse()
    assert hello.decode_hello(JSON) is None
    assert "can't be read" in read_entry(1, JSON).text


@pytest.mark.parametrize("levels", [500, 1000])
def test_a_record_ring_with_many_previous_rings_cannot_be_read(levels: int) -> None:
    ring = [b"\x97" + msgpack.packb([3, [["a", []]], 1, "ns"])[1:], b"\xc0\x90"]
    data = ring[0] * levels + b"\xc0" + ring[1] * levels  # each level: four fields, the previous ring, two fields
    with pytest.raises(IntegrityError, match="the record ring can't be read"):
        record_ring.decode_ring(RegisterValue(data))


class _Step(Checkpoint):
    """A step with a tree of nested values for rank 0 and for all other ranks."""

    def verified(self, file: json_records.StepFile) -> bytes:
        return b'{"format":1,"tree":' + JSON + b"}" if file in self.commit.trees else super().verified(file)


def test_nested_values_in_a_tree_are_damage(tmp_path: Path) -> None:
    ckpt.save({"w": 1}, tmp_path, 1)
    whole = ckpt.open(tmp_path)[1]
    step = _Step(whole.store, whole.commit)
    with pytest.raises(IntegrityError, match="is not a tree"):
        step.tree()
    step._tree = whole.tree()  # the trees of other ranks are read by the next call only
    with pytest.raises(IntegrityError, match="is not a tree"):
        step.require_complete()
