"""A bucket as a member of a namespace: registers by conditional puts, and files beside those of nodes and directories."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.registers import Flaky, check_eras, check_final, replicated_registers, words
from helpers.whole_namespaces import require_whole

import ckpt
from ckpt.aggregator.cluster.config import config_from_table
from ckpt.aggregator.file_io.namespace import Namespace
from ckpt.aggregator.maintenance import rebalance, repair, scrub
from ckpt.aggregator.placement.redundancy import parse_redundancy
from ckpt.storage.base.errors import NotFound, Outdated, StoreError, Unavailable
from ckpt.storage.member.bucket import Bucket
from ckpt.storage.member.bucket_format import object_key, register_name
from ckpt.storage.member.device import Device
from ckpt.storage.registers.base import NO_BALLOT, Ballot, DamagedRegister, DirectChange, Register, Registers, RegisterValue
from ckpt.storage.registers.fence_numbers import next_era
from ckpt.storage.testing import random_bytes

pytest_plugins = ["helpers.moto_server"]


@pytest.fixture
def registers(bucket: str) -> Registers:
    made = Bucket(f"{bucket}/a").registers
    made.mark_complete()
    return made


def test_an_empty_bucket_does_not_vote(bucket: str) -> None:
    registers = Bucket(f"{bucket}/b").registers
    assert isinstance(registers.read(["a"])[0], DamagedRegister)
    assert registers.scan("") == []
    assert isinstance(registers.prepare(["a"], Ballot(1, "x"))[0], DamagedRegister)
    assert registers.change([DirectChange("a", NO_BALLOT, RegisterValue(b"1"))], "w") == [False]
    registers.mark_complete()
    assert registers.read(["a"]) == [Register()]


def test_registers_in_a_bucket_keep_promises_and_changes(registers: Registers) -> None:
    low, high = Ballot(1, "a"), Ballot(2, "a")
    assert registers.prepare(["x"], high) == [Register(high, NO_BALLOT, None)]
    assert registers.prepare(["x"], low) == [Register(high, NO_BALLOT, None)], "a lower ballot does not learn the higher one"
    assert registers.accept([("x", RegisterValue(b"h", b"b"))], low) == [False]
    assert registers.accept([("x", RegisterValue(b"h", b"b"))], high) == [True]
    assert registers.read(["x", "y"]) == [Register(high, high, RegisterValue(b"h", b"b")), Register()]
    first = DirectChange("y", NO_BALLOT, RegisterValue(b"1"))
    assert registers.change([first], "w") == [True]
    assert registers.change([first], "w") == [True], "the same change is refused after a lost reply"
    assert registers.change([first], "v") == [False]
    assert registers.change([DirectChange("y", NO_BALLOT, RegisterValue(b"2"))], "w") == [False]
    registers.prepare(["y"], Ballot(1, "p"))
    assert registers.change([DirectChange("y", NO_BALLOT.next_step("w"), RegisterValue(b"4"))], "v") == [False], (
        "a change is accepted despite a promise"
    )


def test_a_complete_register_in_a_bucket_stays_final(registers: Registers) -> None:
    check_final(registers)


def test_eras_of_registers_in_a_bucket(registers: Registers) -> None:
    check_eras(registers)


def test_a_linked_object_survives_the_deletion_of_its_first_name(bucket: str, tmp_path: Path) -> None:
    for member in (Bucket(f"{bucket}/links"), Device(tmp_path / "disk")):
        member.store.put("aa/one", b"content")
        member.link("aa/one", "bb/two")
        member.store.delete(["aa/one"])
        assert member.store.get("bb/two") == b"content"
        with pytest.raises(NotFound):
            member.link("aa/one", "bb/three")
        assert list(member.inventory()) == ["bb/two"]


def test_registers_in_a_bucket_are_listed_by_any_name(registers: Registers) -> None:
    names = ["/a", "/a/1", "/a/2", "/a0", "/A", "/.hidden", "/ä/1", "/a/\U0001f600", "/a_b", "/a%20b", "/a b", "ring"]
    names.append("/" + "ü" * 500)
    assert len({object_key(name).lower() for name in names}) == len(names) - 1, (
        "names other than A collide where case is ignored"
    )
    registers.change([DirectChange(n, NO_BALLOT, RegisterValue(n.encode(), b"body")) for n in names], "w")
    assert [n for n, _ in registers.scan("")] == sorted(names)
    assert {register_name(object_key(n)) for n in names} == {n for n in names if len(n) < 500} | {""}
    assert [n for n, _ in registers.scan("/a/")] == ["/a/1", "/a/2", "/a/\U0001f600"]
    assert [n for n, _ in registers.scan("/a/", "/a/1", 1)] == ["/a/2"]
    found = dict(registers.scan_all("/"))["/a b"]
    assert isinstance(found, Register)
    assert found.value == RegisterValue(b"/a b"), "the listing has the body, too"
    registers.drop(["/a", "/none"], 0)
    assert registers.read(["/a"]) == [Register()]


def test_a_damaged_register_in_a_bucket_does_not_vote(registers: Registers, bucket: str, s3_client: Any) -> None:
    registers.change([DirectChange("/x", NO_BALLOT, RegisterValue(b"head", b"body"))], "w")
    position = {"Bucket": bucket.removeprefix("s3://"), "Key": f"a/{object_key('/x')}"}
    data = bytearray(s3_client.get_object(**position)["Body"].read())
    for at in (0, 3, len(data) // 2, len(data) - 1):
        damaged = data.copy()
        damaged[at] ^= 0x41
        s3_client.put_object(**position, Body=bytes(damaged))
        assert isinstance(registers.read(["/x"])[0], DamagedRegister), at
        assert [(n, type(r)) for n, r in registers.scan("/")] == [("/x", DamagedRegister)], (
            "the listing does not name the damaged register"
        )
        assert registers.accept([("/x", RegisterValue(b"1"))], Ballot(9, "")) == [False]
    assert registers.accept([("/x", RegisterValue(b"1"))], Ballot(9, ""), repair_damaged=True) == [True]
    assert registers.read(["/x"]) == [Register(Ballot(9, ""), Ballot(9, ""), RegisterValue(b"1"))]


@pytest.mark.parametrize("size", [100, 34 << 20])
def test_nothing_is_deleted_while_a_register_with_a_long_name_can_not_be_read(bucket: str, s3_client: Any, size: int) -> None:
    """The name of its object is only a hash, so nothing shows which file it is of. 34 MiB are more than any register has."""
    table = {"members": [{"url": f"{bucket}/member", "name": "bucket"}], "redundancy": "1x"}
    namespace = Namespace(config_from_table("test", table, "the test"))
    long_path = "/".join(["雪" * 80] * 2)
    for path in ("a", long_path):
        namespace.put(path, random_bytes(100_000, 1))
    objects = set(namespace.open_members["bucket"].inventory())
    key = object_key(f"/{long_path}")
    assert key.startswith("registers/long/")
    position = {"Bucket": bucket.removeprefix("s3://"), "Key": f"member/{key}"}
    before = s3_client.get_object(**position)["Body"].read()
    s3_client.put_object(**position, Body=b"\xc1" * size)
    with pytest.raises(StoreError, match=f"{key} can't be read"):
        namespace.list()
    with pytest.raises(StoreError, match=f"{key} can't be read"):
        repair.repair_namespace(namespace, scrub.scrub_namespace(namespace, grace_seconds=-60.0))
    assert set(namespace.open_members["bucket"].inventory()) == objects
    s3_client.put_object(**position, Body=before)
    assert [*namespace.list()] == ["a", long_path]
    namespace.close()


def test_an_oversized_register_does_not_vote_and_is_repaired(registers: Registers, bucket: str, s3_client: Any) -> None:
    """It is longer than any record, and is not read."""
    ballot = Ballot(5, "x")
    assert registers.accept([("/x", RegisterValue(b"head", b"body"))], ballot) == [True]
    s3_client.put_object(Bucket=bucket.removeprefix("s3://"), Key=f"a/{object_key('/x')}", Body=bytes(34 << 20))
    (answer,) = registers.read(["/x"])
    assert isinstance(answer, DamagedRegister)
    assert "at most" in answer.reason
    assert [(n, type(r)) for n, r in registers.scan("/")] == [("/x", DamagedRegister)]
    assert registers.accept([("/x", RegisterValue(b"head", b"new"))], Ballot(6, "x"), repair_damaged=True) == [True]
    assert registers.read(["/x"]) == [Register(Ballot(6, "x"), Ballot(6, "x"), RegisterValue(b"head", b"new"))]


def test_a_fenced_bucket_refuses_older_rings(registers: Registers) -> None:
    registers.learn("ring", RegisterValue(b"agreed"))
    registers.fence(5)
    registers.fence(3)
    for call in (
        lambda e: registers.read(["x"], e),
        lambda e: registers.prepare(["x"], Ballot(1, "a"), e),
        lambda e: registers.change([DirectChange("x", NO_BALLOT, RegisterValue(b""))], "w", e),
        lambda e: registers.scan("", fence_number=e),
    ):
        with pytest.raises(Outdated, match="ring 5, and the call has ring 4"):
            call(4)
        call(5)
    registers.join_ring(6, "ring")
    assert [name for name, _ in registers.scan("")] == ["ring"]
    registers.change([DirectChange("new", NO_BALLOT, RegisterValue(b""))], "w", 6)
    registers.join_ring(6, "ring")
    assert [name for name, _ in registers.scan("")] == ["new", "ring"]


@pytest.mark.parametrize("call", ["prepare", "accept", "change"])
@pytest.mark.parametrize("is_missing", [True, False])
@pytest.mark.parametrize("delayed_request", ["get_tagged", "put_if"])
def test_a_delayed_change_brings_no_forgotten_record_back(
    bucket: str, registers: Registers, call: str, is_missing: bool, delayed_request: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file was deleted, and its tombstone collected, between two requests of the change."""
    number, era = 1, next_era(1)
    assert era is not None
    value, low, tombstone_ballot = RegisterValue(b"file"), Ballot(2, "a"), NO_BALLOT if is_missing else NO_BALLOT.next_step("b")
    if not is_missing:
        assert registers.change([DirectChange("/x", NO_BALLOT, RegisterValue(b"deleted"))], "b", number) == [True]
    delayed = Bucket(f"{bucket}/a").registers
    send = getattr(delayed._store, delayed_request)

    def send_after_the_collection(key: str, *arguments: Any) -> Any:
        if key == object_key("/x") and registers.fence(era):
            registers.collect([("/x", tombstone_ballot)], era)
        return send(key, *arguments)

    monkeypatch.setattr(delayed._store, delayed_request, send_after_the_collection)
    with pytest.raises(StoreError, match="ring 1 in era 1, and the call has ring 1"):
        if call == "prepare":
            delayed.prepare(["/x"], low, number)
        elif call == "accept":
            delayed.accept([("/x", value)], low, fence_number=number)
        else:
            delayed.change([DirectChange("/x", tombstone_ballot, value)], "w", number)
    assert registers.scan("/") == [], "the register stays forgotten"


@pytest.mark.parametrize("seed", range(3))
def test_registers_in_a_bucket_keep_one_history(bucket: str, seed: int) -> None:
    """Each value that one of four clients received is a prefix of the final value."""
    draw = random.Random(seed)
    inner: dict[str, Registers] = {f"m{i}": Bucket(f"{bucket}/{i}").registers for i in range(3)}
    for each in inner.values():
        each.mark_complete()
    received: list[tuple[str | None, list[str]]] = []
    lock, rate = threading.Lock(), draw.choice([0.0, 0.1])

    def client(number: int) -> None:
        draws = random.Random(f"{seed} {number}")
        book = replicated_registers({n: Flaky(r, draws, rate) for n, r in inner.items()}, 10)
        for i in range(5):
            word = f"{number}.{i}"

            def add(_: str, value: RegisterValue | None, word: str = word) -> RegisterValue | None:
                present = words(value)
                return None if word in present else RegisterValue(b"", " ".join([*present, word]).encode())

            try:
                value_words = words(book.update(["x"], add)["x"])
            except Unavailable:
                continue
            with lock:
                received.append((word, value_words))

    threads = [threading.Thread(target=client, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    final = words(replicated_registers(inner).read(["x"])["x"])
    assert len(set(final)) == len(final)
    for added, value_words in received:
        assert final[: len(value_words)] == value_words, f"{value_words} was returned, and {final} is the end"
        assert added in value_words


def mixed(folder: Path, bucket: str, redundancy: str = "2x") -> Namespace:
    """Return a namespace of two directories and a bucket; for three copies, one more directory that only keeps records."""
    members: list[dict[str, Any]] = [{"url": str(folder / f"disk{i}"), "name": f"disk{i}"} for i in range(2)]
    if redundancy == "3x":
        members.append({"url": str(folder / "disk2"), "name": "disk2", "weight": 0})
    members.append({"url": f"{bucket}/member", "name": "bucket"})
    return Namespace(
        config_from_table("test", {"members": members, "redundancy": redundancy, "deadline_seconds": 10.0}, "the test")
    )


CONTENT = {f"d/f{i}": random_bytes(n, i) for i, n in enumerate([0, 100, 40_000, 300_001, 9_000_000, 20_000_000])}


@pytest.mark.parametrize("redundancy", ["2x", "2+1", "3x"])
def test_files_are_read_back_from_a_namespace_with_a_bucket(tmp_path: Path, bucket: str, redundancy: str) -> None:
    namespace = mixed(tmp_path, bucket, redundancy)
    for path, data in CONTENT.items():
        namespace.put(path, data)
    other = mixed(tmp_path, bucket, redundancy)
    assert sorted(other.list()) == sorted(CONTENT)
    for path, data in CONTENT.items():
        assert other.get(path) == data
    found = scrub.scrub_namespace(other, verify=True)
    assert found.is_whole, found
    objects_in_bucket = set(other.open_members["bucket"].inventory())
    assert objects_in_bucket, "the bucket has no fragment"
    assert other.delete(["d/f5"]) == ["d/f5"]
    assert set(namespace.list()) == set(CONTENT) - {"d/f5"}
    assert len(other.open_members["bucket"].inventory()) < len(objects_in_bucket) or redundancy == "2x"


def test_a_damaged_object_in_the_bucket_is_repaired(tmp_path: Path, bucket: str, s3_client: Any) -> None:
    namespace = mixed(tmp_path, bucket, "3x")
    namespace.put("f", CONTENT["d/f4"])
    (name,) = namespace.open_members["bucket"].inventory()
    key = f"member/objects/{name}"
    data = bytearray(s3_client.get_object(Bucket=bucket.removeprefix("s3://"), Key=key)["Body"].read())
    data[1000] ^= 1
    s3_client.put_object(Bucket=bucket.removeprefix("s3://"), Key=key, Body=bytes(data))
    assert namespace.get("f") == CONTENT["d/f4"]
    found = scrub.scrub_namespace(namespace, verify=True)
    assert [f.path for f in found.damaged_files] == ["f"]
    assert repair.repair_namespace(namespace, found).files == 1
    require_whole(namespace, verify=True)
    keys = [o["Key"] for o in s3_client.list_objects_v2(Bucket=bucket.removeprefix("s3://"))["Contents"]]
    assert sum(key.startswith("member/quarantine/") for key in keys) == 1


def test_a_lost_bucket_loses_no_file_and_is_refilled(tmp_path: Path, bucket: str, s3_client: Any) -> None:
    """All objects of the bucket are deleted; a repair fills it again, and until then it does not vote."""
    namespace = mixed(tmp_path, bucket)
    for path, data in CONTENT.items():
        namespace.put(path, data)
    name = bucket.removeprefix("s3://")
    for item in s3_client.list_objects_v2(Bucket=name)["Contents"]:
        s3_client.delete_object(Bucket=name, Key=item["Key"])
    again = mixed(tmp_path, bucket)
    for path, data in CONTENT.items():
        assert again.get(path) == data
    assert isinstance(again.open_members["bucket"].registers.read(["/d/none"])[0], DamagedRegister)
    found = scrub.scrub_namespace(again)
    assert found.damaged_files
    assert not found.lost_files
    repair.repair_namespace(again, found)
    require_whole(again, verify=True)
    assert isinstance(again.open_members["bucket"].registers.read(["/d/none"])[0], Register)


def test_a_bucket_replaces_a_disk(tmp_path: Path, bucket: str) -> None:
    members = [{"url": str(tmp_path / f"disk{i}"), "name": f"disk{i}"} for i in range(3)]
    first = Namespace(config_from_table("test", {"members": members, "redundancy": "2x"}, "the test"))
    for path, data in CONTENT.items():
        first.put(path, data)
    members.append({"url": f"{bucket}/member", "name": "bucket"})
    namespace = Namespace(config_from_table("test", {"members": members, "redundancy": "2x"}, "the test"))
    assert not rebalance.remove_member(namespace, "disk1").failed
    assert set(namespace.ring.all_members) == {"disk0", "disk2", "bucket"}
    rest = Namespace(
        config_from_table("test", {"members": [m for m in members if m["name"] != "disk1"], "redundancy": "2x"}, "the test")
    )
    for path, data in CONTENT.items():
        assert rest.get(path) == data
    require_whole(rest, verify=True)


def test_checkpoints_are_loaded_from_a_namespace_with_a_bucket(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "config.toml"
    config.write_text(
        f'[namespaces.lab]\nmembers = ["{tmp_path}/disk0", {{url = "{bucket}/member", name = "cloud"}}]\nredundancy = "2x"\n'
    )
    monkeypatch.setenv("CKPT_CONFIG", str(config))
    state = {"w": np.arange(3_000_000.0), "step": 3}
    ckpt.save(state, "ckpt://lab/run", step=3)
    (tmp_path / "disk0" / "objects").rename(tmp_path / "gone")
    assert np.array_equal(ckpt.load("ckpt://lab/run")["w"], state["w"]), "the bucket alone does not have the step"
    done = subprocess.run(
        [sys.executable, "-m", "ckpt.tools.node", "admin", "status", "ckpt://lab"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "cloud" in done.stdout


def test_a_missing_bucket_is_reported(tmp_path: Path, bucket: str) -> None:
    namespace = mixed(tmp_path, bucket + "-none")
    with pytest.raises(StoreError, match="the bucket does not exist"):
        namespace.put("f", b"1")
    assert parse_redundancy("2x") == namespace.config.redundancy
