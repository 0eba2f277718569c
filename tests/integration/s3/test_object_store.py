"""A bucket as a store: uploads in parts, errors with advice, credentials."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ckpt.storage.base import errors
from ckpt.storage.base.errors import NotFound, StoreError, UnknownScheme
from ckpt.storage.remote import object_store
from ckpt.storage.remote.multipart_writer import PART_BYTES, MultipartWriter
from ckpt.storage.remote.object_store import ObjectStore
from ckpt.storage.testing import object_lengths, run_simultaneously, write_object

pytest_plugins = ["helpers.moto_server"]


def uploads(client: Any, url: str) -> list[Any]:
    """The multipart uploads that were neither completed nor aborted."""
    found = client.list_multipart_uploads(Bucket=url.removeprefix("s3://")).get("Uploads", [])
    return list(found)


@pytest.fixture
def no_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_RETRY_CONFIG", {"max_retries": 0, "retry_timeout": timedelta(seconds=5)})


def test_small_objects_take_one_request_and_large_ones_parts(bucket: str, s3_client: Any) -> None:
    store = ObjectStore(bucket)
    write_object(store, "small", bytes(PART_BYTES))
    write_object(store, "large", bytes(3 * PART_BYTES + 1))
    tag = {o["Key"]: o["ETag"] for o in s3_client.list_objects_v2(Bucket=bucket.removeprefix("s3://"))["Contents"]}
    assert "-" not in tag["small"]
    assert tag["large"].endswith('-4"')
    assert uploads(s3_client, bucket) == []


def test_abort_leaves_no_part_behind(bucket: str, s3_client: Any) -> None:
    store = ObjectStore(bucket)
    with store.create("a") as writer:
        for _ in range(4):
            writer.append(memoryview(bytes(PART_BYTES)))
    assert uploads(s3_client, bucket) == []
    assert object_lengths(store) == {}


def test_a_dropped_writer_ends_its_thread(bucket: str, s3_client: Any) -> None:
    writer = ObjectStore(bucket).create("a")
    before = set(threading.enumerate())
    writer.append(memoryview(bytes(2 * PART_BYTES)))
    (thread,) = set(threading.enumerate()) - before
    del writer
    gc.collect()
    thread.join(600)
    assert not thread.is_alive()
    assert uploads(s3_client, bucket) == []


def test_parts_grow_with_the_size_hint() -> None:
    """S3 accepts at most 10,000 parts."""
    sizes: list[int] = []
    for hint in (0, 100 * 2**30, 5 * 2**40):
        writer = MultipartWriter("s3://b/a", lambda data, part_bytes: sizes.append(part_bytes), hint)
        writer.commit()
        assert sizes[-1] * 10_000 > hint
    assert sizes[0] == PART_BYTES


class Refused(Exception):
    pass


def failing_writer(after_parts: int) -> MultipartWriter:
    def put(data: Any, part_bytes: int) -> None:
        if isinstance(data, bytes):
            raise Refused("by the test")
        for _ in range(after_parts):
            next(data)
        raise Refused("by the test")

    return MultipartWriter("s3://bucket/name", put, 0)


@pytest.mark.parametrize("after_parts", [0, 1, 3])
def test_an_error_of_the_upload_surfaces_at_append_and_at_commit(after_parts: int) -> None:
    with failing_writer(after_parts) as writer:
        with pytest.raises(StoreError, match=r"s3://bucket/name.*by the test") as failure:
            while True:  # the queue is bounded, so this ends
                writer.append(memoryview(bytes(PART_BYTES)))
        assert isinstance(failure.value.__cause__, Refused)
        with pytest.raises(StoreError, match="by the test"):
            writer.append(memoryview(b"x"))
        with pytest.raises(StoreError, match="by the test"):
            writer.commit()


def test_an_error_after_the_last_append_surfaces_at_commit() -> None:
    with failing_writer(2) as writer:
        writer.append(memoryview(bytes(PART_BYTES)))
        writer.append(memoryview(bytes(1)))
        with pytest.raises(StoreError, match="by the test"):
            writer.commit()


def test_an_upload_needs_bounded_memory() -> None:
    """The caller waits for a slow upload: at most the queue and the part that is being added are in memory."""
    queued_bytes: list[int] = []

    def put(data: Iterator[bytes], part_bytes: int) -> None:
        queued_bytes.extend(writer._pieces.queued_bytes for _ in data)

    writer = MultipartWriter("s3://bucket/name", put, 0)
    part = memoryview(bytes(1 << 20))
    run_simultaneously([lambda: [writer.append(part) for _ in range(16)] for _ in range(4)])
    assert writer.commit() == 64 << 20
    assert len(queued_bytes) == 64
    assert max(queued_bytes) <= 2 * PART_BYTES + len(part)


def test_abort_releases_an_append_that_waits() -> None:
    aborted = threading.Event()

    def put(data: Iterator[bytes], part_bytes: int) -> None:
        next(data)
        aborted.wait(600)
        next(data)

    writer = MultipartWriter("s3://bucket/name", put, 0)

    def append() -> None:
        while True:
            writer.append(memoryview(bytes(PART_BYTES)))

    def abort() -> None:
        aborted.set()
        writer.abort()

    append_error, _ = run_simultaneously([append, abort])
    assert isinstance(append_error, StoreError)


def test_a_missing_bucket_is_reported_as_such(s3_endpoint: str) -> None:
    store = ObjectStore("s3://no-such-bucket/run")
    for call in (
        lambda: store.put("a", b"x"),
        lambda: store.put_new("a", b"x"),
        lambda: write_object(store, "a", b"x"),
        lambda: write_object(store, "a", bytes(2 * PART_BYTES)),
        lambda: store.get("a"),
        lambda: store.delete(["a"]),
        lambda: list(store.list()),
        lambda: list(store.list_folders()),
    ):
        with pytest.raises(StoreError, match=r"s3://no-such-bucket/run.*bucket does not exist; create it") as failure:
            call()
        assert errors.Refused in (type(failure.value), type(failure.value.__cause__)), (
            "the error is one for which waiting helps"
        )
        assert not isinstance(failure.value, NotFound), "a missing bucket is reported as a missing object"
        assert "\n" not in str(failure.value)
        assert failure.value.__cause__ is not None


def test_an_unreachable_server_is_reported(bucket: str, monkeypatch: pytest.MonkeyPatch, no_retry: None) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # no process listens on the discard port
    store = ObjectStore(bucket)
    large = bytes(2 * PART_BYTES)
    for call in (lambda: store.put("a", b"x"), lambda: store.get("a"), lambda: write_object(store, "a", large)):
        with pytest.raises(StoreError, match=r"a failed: .*check the network and the endpoint"):
            call()


def test_the_service_specific_endpoint_wins(
    bucket: str, s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, no_retry: None
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_endpoint)
    store = ObjectStore(bucket)
    store.put("a", b"x")
    assert store.get("a") == b"x"


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UnknownScheme, match=r'pip install "ckpt-store\[s3\]"'):
        ObjectStore("s3://bucket/run")


@pytest.mark.parametrize("url", ["s3://", "s3:///run"])
def test_a_url_without_a_bucket_is_refused(url: str, s3_endpoint: str) -> None:
    with pytest.raises(StoreError, match="scheme://bucket/folder"):
        ObjectStore(url)


def test_credentials_come_from_boto3_where_the_environment_has_none(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_retry: None
) -> None:
    profile = tmp_path / "credentials"
    profile.write_text("[team]\naws_access_key_id = from-profile\naws_secret_access_key = secret\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(profile))
    monkeypatch.setenv("AWS_PROFILE", "team")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = ObjectStore(bucket)
    store.put("a", b"x")
    assert store.get("a") == b"x"
    assert store._store.credential_provider()["access_key_id"] == "from-profile"


def test_foreign_objects_are_neither_listed_nor_deleted(bucket: str, s3_client: Any) -> None:
    name = bucket.removeprefix("s3://")
    for key in ("run/a/b", "run/a/with space", "run/.hidden", "run/ü/c", "run2/x", "other"):
        s3_client.put_object(Bucket=name, Key=key, Body=b"x")
    store = ObjectStore(f"{bucket}/run")
    assert object_lengths(store) == {"a/b": 1}
    assert list(store.list_folders()) == ["a"]


@pytest.mark.parametrize("folder", ["a b", "größe", "x/y/z", "trailing/"])
def test_any_folder_can_be_a_root(bucket: str, s3_client: Any, folder: str) -> None:
    store = ObjectStore(f"{bucket}/{folder}")
    store.put("a/b", b"x")
    found = s3_client.list_objects_v2(Bucket=bucket.removeprefix("s3://"))["Contents"]
    assert [o["Key"] for o in found] == [f"{folder.rstrip('/')}/a/b"]
    assert object_lengths(store, "a") == {"a/b": 1}
    assert list(store.list_folders()) == ["a"]
